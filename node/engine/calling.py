"""Tool calls as a grammar: what each family of models writes between its markers, for those whose format is JSON there.

The counterpart of `calls`, which reads what came of it. Parsers of other formats (XML with raw values, Python's syntax)
cannot be turned around exactly, so what needs a grammar is refused for their models: nothing is enforced by half.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

Json = dict[str, object]

DEEPEST: Final = 64
"""Levels of a JSON text. Whatever reads one calls itself for each."""
MOST_DETAIL: Final = 300
PREFIX: Final = "the grammar cannot be used: "

BLANK = "BLANK: /[ \\n]{1,4}/\n"
LENIENT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}", "lenient": True, "coerce_one_of": True}
STRICT: Json = {"whitespace_pattern": "[ \\n\\t]{1,32}"}


class Unfit(ValueError):
    """No grammar can be made of this; the text says why, for the client."""


def in_words(marker: str) -> tuple[str, bool]:
    """Write a marker as text; see `Calling.mark`."""
    return json.dumps(marker), False


@dataclass(frozen=True, slots=True)
class Calling:
    """How a model writes calls: the parser's name, the markers, the chat template; `mark` gives a marker as Lark has it
    (a token of its own, or text), and whether it is a token."""

    parser: str
    markers: tuple[str, str]
    template: str
    mark: Callable[[str], tuple[str, bool]]

    def in_words(self) -> "Calling":
        """Give the same with every marker as text."""
        return replace(self, mark=in_words)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, its name in Lark's quotes, and the grammar of its arguments."""

    name: str
    grammar: str
    schema: Json

    @property
    def part(self) -> Json:
        """Give the grammar of the arguments."""
        return {"name": self.grammar, "json_schema": self.schema}

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
    return [_tool(at, function) for at, function in enumerate(chosen)]


def _tool(at: int, function: Json) -> Tool:
    parameters, strict = function.get("parameters"), function.get("strict") is True
    schema = dict(cast("Json", parameters)) if isinstance(parameters, dict) else {}
    schema.setdefault("type", "object")
    schema["x-guidance"] = STRICT if strict else LENIENT
    return Tool(str(function.get("name")), f"arguments_{at}", schema)


def rules(calling: Calling, tools: Sequence[Tool], *, free: bool, one: bool) -> str:
    """Give the rules `calls` and, for calls between words, `spoken`; `one`: no more than one call."""
    form = FORMS.get(calling.parser)
    if form is None:
        raise Unfit(
            f"calls of this model's format ({calling.parser or 'unknown'}) cannot be enforced, only those of "
            f"{', '.join(sorted(FORMS))}: leave out strict, and use tool_choice auto"
        )
    text = form(calling, tools, one)
    return text + (_spoken(calling) if free else "") + BLANK


def _spoken(calling: Calling) -> str:
    """Give words with calls between them. A marker that is text ends the words at the first place where it stands."""
    marker, token = calling.mark(calling.markers[0])
    opening = f"opening: WORDS {marker}\n" if token else f"opening[lazy]: WORDS {marker}\n"
    return f"spoken: (opening rest)* words\nwords: WORDS\n{opening}WORDS: /(.|\\n)*/\n"


def _calls(one: bool) -> str:
    return "calls: call\n" if one else "calls: call (BLANK? call)*\n"


def _object(tools: Sequence[Tool]) -> str:
    """Give a call as an object with a name and arguments."""
    chosen = " | ".join(
        f'{tool.quoted} BLANK? "," BLANK? {_key("arguments")} @{tool.grammar}' for tool in tools
    )  # fmt: skip
    return f'object: "{{" BLANK? {_key("name")} named BLANK? "}}"\nnamed: {chosen}\n'


def _key(name: str) -> str:
    return f'{json.dumps(json.dumps(name))} BLANK? ":" BLANK?'


def _json_tools(calling: Calling, tools: Sequence[Tool], one: bool) -> str:
    start, end = (calling.mark(marker)[0] for marker in calling.markers)
    return f"{_calls(one)}call: {start} rest\nrest: BLANK? object BLANK? {end}\n{_object(tools)}"


def _mistral(calling: Calling, tools: Sequence[Tool], one: bool) -> str:
    start = calling.mark(calling.markers[0])[0]
    if "[ARGS]" in calling.template:
        chosen = " | ".join(
            f"{json.dumps(tool.name)} {calling.mark('[ARGS]')[0]} @{tool.grammar}" for tool in tools
        )  # fmt: skip
        return f"calls: call{'' if one else '+'}\ncall: {start} rest\nrest: {chosen}\n"
    more = "" if one else '(BLANK? "," BLANK? object)*'
    return f'calls: {start} rest\nrest: BLANK? "[" BLANK? object {more} BLANK? "]"\n{_object(tools)}'


def _kimi(calling: Calling, tools: Sequence[Tool], one: bool) -> str:
    start, end = (calling.mark(marker)[0] for marker in calling.markers)
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begin, arguments, done = (calling.mark(marker)[0] for marker in marks)
    chosen = " | ".join(
        f"{json.dumps(f'functions.{tool.name}:')} NUMBER {arguments} @{tool.grammar}" for tool in tools
    )  # fmt: skip
    return (
        f"calls: {start} rest\nrest: each{'' if one else '+'} {end}\neach: {begin} named {done}\nnamed: {chosen}\n"
        "NUMBER: /[0-9]{1,3}/\n"
    )


FORMS: dict[str, Callable[[Calling, Sequence[Tool], bool], str]] = {
    "json_tools": _json_tools,
    "longcat": _json_tools,
    "mistral": _mistral,
    "kimi_k2": _kimi,
}
"""mlx-lm's parsers whose format can be written as a grammar: each gives `calls`, and `rest`, which is a call after its
first marker."""


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
