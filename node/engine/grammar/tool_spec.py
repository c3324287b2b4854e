"""Input of tool grammars (`tool_formats`): a model's call format and a request's tools."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, cast

from node.engine.grammar.schema_rewrite import rewrite_schema

Json = dict[str, object]

MAX_JSON_DEPTH: Final = 64
"""Maximum levels of a JSON text, because JSON parsers recurse once per level; also of nested references in a schema."""
MAX_DETAIL_CHARS: Final = 300
"""Maximum characters of the detail in an error text."""
PREFIX: Final = "the grammar cannot be used: "
"""Start of the error text for a grammar that cannot be used."""

LENIENT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}", "lenient": True, "coerce_one_of": True}
"""Options of llguidance for the schema of a tool that is not strict."""
STRICT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}"}
"""Options of llguidance for a schema that is enforced exactly."""


class UnsupportedSchema(ValueError):
    """Error: no grammar can be made for a request. The text is the reason, for the client."""


def quote_marker(marker: str) -> tuple[str, bool]:
    """Return a marker as a quoted Lark string, and False because it is not a token. This is the
    `ToolCallFormat.render_literal` of a process without the tokenizer."""
    return json.dumps(marker), False


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format of a model's tool calls, from its tokenizer."""

    parser: str
    """Name of the parser of the calls (`Tokenizer.call_parser`): `harmony`, or the name of mlx-lm's parser."""
    markers: tuple[str, str]
    """Start and end of a call."""
    template: str
    """Chat template of the model."""
    render_literal: Callable[[str], tuple[str, bool]]
    """`render_literal(text)` returns the Lark expression that matches `text`: special tokens as tokens, other text in
    quotes. It also returns whether the text starts with a special token."""

    def replace_tokens(self) -> "ToolCallFormat":
        """Return the same format with special tokens as text, for a process without the tokenizer."""
        return replace(self, render_literal=quote_marker)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Function of a request that a model may call."""

    name: str
    """Name of the function."""
    schema: Json
    """JSON schema of the arguments, with options of llguidance under `x-guidance`."""
    strict: bool
    """Whether the schema must be enforced exactly."""

    @property
    def quoted_name(self) -> str:
        """Name as a JSON string, quoted once more for Lark."""
        return json.dumps(json.dumps(self.name))


def parse_tool_specs(text: str, only: str) -> list[ToolSpec]:
    """Parse the tools of a request (`wire.frames.Generate.tools`). Return the functions, or only the function `only`
    unless that is empty.

    Entries that are not functions are left out. Raise `UnsupportedSchema` if the tools are not a JSON array, are nested
    deeper than `MAX_JSON_DEPTH` levels, or contain no such function.
    """
    found = parse_json(text or "[]")
    if not isinstance(found, list):
        raise UnsupportedSchema("the tools are not a JSON array")
    tools = [cast("Json", tool) for tool in cast("list[object]", found) if isinstance(tool, dict)]
    functions = [cast("Json", tool.get("function")) for tool in tools if isinstance(tool.get("function"), dict)]
    chosen = [function for function in functions if not only or function.get("name") == only]
    if not chosen:
        raise UnsupportedSchema(
            f"tool_choice names {only}, which is not in tools" if only else "the request has no tools to call"
        )
    return [_build_tool_spec(function) for function in chosen]


def _build_tool_spec(function: Json) -> ToolSpec:
    parameters, strict = function.get("parameters"), function.get("strict") is True
    schema = rewrite_schema(cast("Json", parameters), strict=strict) if isinstance(parameters, dict) else {}
    schema.setdefault("type", "object")
    schema["x-guidance"] = STRICT if strict else LENIENT
    return ToolSpec(str(function.get("name")), schema, strict)


# JSON


def parse_json(text: str) -> object:
    """Parse JSON. Raise `UnsupportedSchema` if it is invalid, or its brackets are nested deeper than `MAX_JSON_DEPTH`
    levels. Brackets in strings count as well."""
    if _measure_depth(text) > MAX_JSON_DEPTH:
        raise UnsupportedSchema(f"{PREFIX}it is nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UnsupportedSchema(f"{PREFIX}it is not JSON: {join_lines(str(error))}") from error


def _measure_depth(text: str) -> int:
    """Return the levels of a JSON text, or more if its strings contain brackets."""
    deepest = level = 0
    for sign in text:
        if sign in "[{":
            level += 1
            deepest = max(deepest, level)
        elif sign in "]}":
            level -= 1
    return deepest


def join_lines(wrong: str) -> str:
    """Return an error text as one line of at most `MAX_DETAIL_CHARS` characters."""
    return " ".join(wrong.split())[:MAX_DETAIL_CHARS]
