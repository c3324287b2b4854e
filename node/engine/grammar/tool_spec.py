"""What is known of a model's calls and of a request's tools before a grammar is made of them (see `forms`)."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, cast

Json = dict[str, object]

DEEPEST: Final = 64
"""Levels of a JSON text. Whatever reads one calls itself for each."""
MOST_DETAIL: Final = 300
PREFIX: Final = "the grammar cannot be used: "

LENIENT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}", "lenient": True, "coerce_one_of": True}
STRICT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}"}


class Unfit(ValueError):
    """No grammar can be made of this; the text says why, for the client."""


def in_words(marker: str) -> tuple[str, bool]:
    """Write a marker as text; see `Calling.mark`."""
    return json.dumps(marker), False


@dataclass(frozen=True, slots=True)
class Calling:
    """How a model writes calls: the parser's name, the markers, the chat template; `mark` gives text as Lark has it
    (the special tokens in it as such, the rest in quotes), and whether it begins with a token."""

    parser: str
    markers: tuple[str, str]
    template: str
    mark: Callable[[str], tuple[str, bool]]

    def in_words(self) -> "Calling":
        """Give the same with every marker as text."""
        return replace(self, mark=in_words)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, the schema of its arguments with llguidance's options, and whether it is strict."""

    name: str
    schema: Json
    strict: bool

    @property
    def quoted(self) -> str:
        """Give the name as JSON within Lark."""
        return json.dumps(json.dumps(self.name))


def tools_of(text: str, only: str) -> list[Tool]:
    """Read the tools (see wire.frames.Generate); those of a name, if it is given."""
    found = read(text or "[]")
    if not isinstance(found, list):
        raise Unfit("the tools are not a JSON array")
    tools = [cast("Json", tool) for tool in cast("list[object]", found) if isinstance(tool, dict)]
    functions = [cast("Json", tool.get("function")) for tool in tools if isinstance(tool.get("function"), dict)]
    chosen = [one for one in functions if not only or one.get("name") == only]
    if not chosen:
        raise Unfit(f"there is no tool {only}" if only else "there are no tools that could be called")
    return [_tool(function) for function in chosen]


def _tool(function: Json) -> Tool:
    parameters, strict = function.get("parameters"), function.get("strict") is True
    schema = dict(cast("Json", parameters)) if isinstance(parameters, dict) else {}
    schema.setdefault("type", "object")
    schema["x-guidance"] = STRICT if strict else LENIENT
    return Tool(str(function.get("name")), schema, strict)


# reading


def read(text: str) -> object:
    """Read JSON that is not too deep; how deep it is at most can be told without reading it."""
    if _depth(text) > DEEPEST:
        raise Unfit(f"{PREFIX}it is nested deeper than {DEEPEST} levels")
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unfit(f"{PREFIX}it is no JSON: {told(str(error))}") from error


def _depth(text: str) -> int:
    """Count the levels of a JSON text, or more where brackets stand within its strings."""
    deepest = level = 0
    for sign in text:
        if sign in "[{":
            level += 1
            deepest = max(deepest, level)
        elif sign in "]}":
            level -= 1
    return deepest


def told(wrong: str) -> str:
    """Put what was said of a grammar into one bounded line."""
    return " ".join(wrong.split())[:MOST_DETAIL]
