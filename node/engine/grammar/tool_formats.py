"""Grammars of tool calls, one for each call format: the text between the markers of calls.

Counterpart of `tool_call_parser`: mlx-lm's parser of the same name must read every text that a grammar allows as the
intended call. Text that a parser cannot separate is excluded. If a tool requires such text, the request is refused with
the reason, because no requirement may be enforced only in part.

Each grammar (`Form`) has two Lark rules:

    calls    one call or several, with their markers
    rest     the calls without the first marker, for calls between words
"""

import json
from collections.abc import Callable, Sequence
from typing import Final

from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_arguments import MarkExclusion, check_schema, render_parser_tools
from node.engine.grammar.tool_format_pythonic import render_braced_call, render_keyword_call
from node.engine.grammar.tool_format_xml import GLM, KIMI_K3, MINICPM, MINIMAX, QWEN, XmlFormat, render_tagged_call
from node.engine.grammar.tool_spec import ToolCallFormat, ToolSpec, UnsupportedSchema

Form = Callable[[LarkBuilder, Sequence[ToolSpec], bool], str]
"""`form(builder, tools, one_call)` returns the rules `calls` and `rest` of a call format; `one_call`: at most one
call. It raises `UnsupportedSchema` for tools that the format cannot represent."""
BLANK = "BLANK: /[ \\n]{1,4}/\n"
"""Terminal of the blanks between parts of a call."""
PLAIN: Final = frozenset({"json_tools", "longcat", "mistral"})
"""Parsers of models whose arguments are all JSON. llguidance parses and checks the schemas of their tools, and
`check_schema` is left out."""
INSEPARABLE_PARSERS: Final = frozenset({"kimi_k3"})
"""Parsers of models that also put ordinary text between markers. With `free`, `render_rules` raises `UnsupportedSchema`
for them, because a grammar cannot distinguish calls from such text."""


def render_rules(builder: LarkBuilder, tools: Sequence[ToolSpec], *, free: bool, one_call: bool) -> str:
    """Return the Lark rules of tool calls: `calls` and, with `free`, `spoken` for calls between words.

    `builder` collects rules and schemas. `one_call`: at most one call; with `free`, in each place between words.

    Raise `UnsupportedSchema` for a schema that is invalid or that the model's format cannot enforce. Raise it as well
    if calls of this format cannot be enforced at all, or not with `free`.
    """
    calling = builder.call_format
    form = FORMS.get(calling.parser)
    if form is None:
        raise UnsupportedSchema(
            f"calls of this model's format ({calling.parser or 'unknown'}) cannot be enforced: leave strict out "
            "and use tool_choice auto"
        )
    if free and calling.parser in INSEPARABLE_PARSERS:
        raise UnsupportedSchema("this model supports strict tools only with tool_choice required or a tool name")
    if calling.parser not in PLAIN:
        for tool in tools:
            check_schema(tool.schema)
    text = form(builder, tools, one_call)
    return text + (_render_text_with_calls(calling) if free else "") + builder.render_rules() + BLANK


def render_tools_for_parser(parser: str, tools: Sequence[ToolSpec]) -> str:
    """Return the tools as JSON, with types by which `parser` distinguishes text from JSON. Return an empty text if
    `parser` uses the original tools.

    Raise `UnsupportedSchema` for a schema that is invalid or too large, has circular references, or is strict with
    keywords that cannot be enforced.
    """
    return render_parser_tools(tools, nullable=TAGS[parser].nullable) if parser in TAGS else ""


def has_quoted_calls(parser: str) -> bool:
    """Return whether calls in the format of `parser` quote strings as JSON does, so that a marker in quotes is text. In
    other formats a marker always ends a value or call."""
    return parser not in TAGS and parser not in ("gemma4", "function_gemma")


def _render_text_with_calls(calling: ToolCallFormat) -> str:
    """Return the rules of words with calls between them. A marker that is text ends the words at its first
    occurrence."""
    marker, token = calling.render_literal(calling.markers[0])
    opening = f"opening: WORDS {marker}\n" if token else f"opening[lazy]: WORDS {marker}\n"
    return f"spoken: (opening rest)* words\nwords: WORDS\n{opening}WORDS: /(.|\\n)*/\n"


def _render_calls(one_call: bool) -> str:
    return "calls: call\n" if one_call else "calls: call (BLANK? call)*\n"


def _render_object(builder: LarkBuilder, tools: Sequence[ToolSpec]) -> str:
    """Return the rules of a call as an object with a name and arguments."""
    chosen = " | ".join(
        f'{tool.quoted_name} BLANK? "," BLANK? {_render_key("arguments")} {builder.add_schema(tool.schema)}'
        for tool in tools
    )
    return f'object: "{{" BLANK? {_render_key("name")} named BLANK? "}}"\nnamed: {chosen}\n'


def _render_key(name: str) -> str:
    return f'{json.dumps(json.dumps(name))} BLANK? ":" BLANK?'


def _render_json_tools(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
    start, end = map(builder.render_literal, builder.call_format.markers)
    rule = f"{_render_calls(one_call)}call: {start} rest\nrest: BLANK? object BLANK? {end}\n"
    return rule + _render_object(builder, tools)


def _render_mistral(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
    start = builder.render_literal(builder.call_format.markers[0])
    if "[ARGS]" in builder.call_format.template:
        chosen = " | ".join(
            f"{json.dumps(tool.name)} {builder.render_literal('[ARGS]')} {builder.add_schema(tool.schema)}"
            for tool in tools
        )
        return f"calls: call{'' if one_call else '+'}\ncall: {start} rest\nrest: {chosen}\n"
    more = "" if one_call else '(BLANK? "," BLANK? object)*'
    return f'calls: {start} rest\nrest: BLANK? "[" BLANK? object {more} BLANK? "]"\n{_render_object(builder, tools)}'


def _render_kimi(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
    start, end = map(builder.render_literal, builder.call_format.markers)
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begin, arguments, done = map(builder.render_literal, marks)
    guard = MarkExclusion(marks[-1:])
    named = [
        (json.dumps(f"functions.{tool.name}:"), builder.add_schema(guard.exclude_from_schema(tool.schema)))
        for tool in tools
    ]
    chosen = " | ".join(f"{name} NUMBER {arguments} {schema}" for name, schema in named)
    return (
        f"calls: {start} rest\nrest: each{'' if one_call else '+'} {end}\neach: {begin} named {done}\nnamed: {chosen}\n"
        "NUMBER: /[0-9]{1,3}/\n"
    )


def _build_tagged_form(tags: XmlFormat) -> Form:
    def render(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
        start, end = map(builder.render_literal, builder.call_format.markers)
        chosen = " | ".join(render_tagged_call(builder, tags, tool) for tool in tools)
        if tags.several:
            return f"calls: {start} rest\nrest: BLANK? (named BLANK?){'' if one_call else '+'} {end}\nnamed: {chosen}\n"
        return f"{_render_calls(one_call)}call: {start} rest\nrest: named {end}\nnamed: {chosen}\n"

    return render


def _render_pythonic(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
    start, end = map(builder.render_literal, builder.call_format.markers)
    chosen = " | ".join(render_keyword_call(builder, tool) for tool in tools)
    more = "" if one_call else '("," BLANK? named)*'
    return f'calls: {start} rest\nrest: "[" named {more} "]" {end}\nnamed: {chosen}\n'


def _build_braced_form(quote: str, *, nested: bool) -> Form:
    def render(builder: LarkBuilder, tools: Sequence[ToolSpec], one_call: bool) -> str:
        start, end = map(builder.render_literal, builder.call_format.markers)
        chosen = " | ".join(render_braced_call(builder, tool, quote, nested=nested) for tool in tools)
        return f"{_render_calls(one_call)}call: {start} rest\nrest: named {end}\nnamed: {chosen}\n"

    return render


TAGS: dict[str, XmlFormat] = {
    "qwen3_coder": QWEN,
    "glm47": GLM,
    "laguna": GLM,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM,
    "kimi_k3": KIMI_K3,
}
"""Formats with tags around each argument."""
FORMS: dict[str, Form] = {
    "json_tools": _render_json_tools,
    "longcat": _render_json_tools,
    "mistral": _render_mistral,
    "kimi_k2": _render_kimi,
    "pythonic": _render_pythonic,
    "gemma4": _build_braced_form('<|"|>', nested=True),
    "function_gemma": _build_braced_form("<escape>", nested=False),
    **{parser: _build_tagged_form(tags) for parser, tags in TAGS.items()},
}
"""Forms by the name of mlx-lm's parser. The parser muse_spark is missing, because the whole answer of its models has a
format that no grammar can extend."""
