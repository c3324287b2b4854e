"""Tool formats with one tag pair per argument: text unquoted, all other values as JSON."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_arguments import Argument, MarkExclusion, TextArgument, list_arguments, list_types
from node.engine.grammar.tool_spec import PREFIX, ToolSpec, UnsupportedSchema

COUNTED: Final = "/[0-9]{1,3}/"
"""Lark's terminal for the number of a call: one to three digits."""
NAME: Final = re.compile(r"[^\s<>\"'&=]+")
"""Pattern of a name that fits into a tag."""


@dataclass(frozen=True, slots=True)
class XmlFormat:
    """Tags of a call format with one tag pair per argument."""

    open: str
    """Text before the arguments; `{name}` is the tool, `{at}` the number of the call."""
    close: str
    """Text after the arguments."""
    before: str
    """Text before each argument; `{key}` is its name, `{kind}` its type."""
    after: str
    """Text after each argument, which ends its value."""
    marks: Sequence[str]
    """Marks that a value must not contain, because the parser searches for them."""
    inner: str = ""
    """Text between an argument's `before` and its value; empty for none."""
    several: bool = False
    """Whether one pair of markers may enclose more than one call."""
    nullable: bool = False
    """Whether the parser reads the text null as null."""
    wrapped: bool = False
    """Whether text that contains `<` is enclosed in a CDATA section."""


QWEN: Final = XmlFormat(
    "\n<function={name}>\n",
    "</function>\n",
    "<parameter={key}>\n",
    "</parameter>",
    ("</parameter>", "</function>", "</tool_call>"),
    nullable=True,
)
GLM: Final = XmlFormat(
    "{name}",
    "",
    "<arg_key>{key}</arg_key>",
    "</arg_value>",
    ("</arg_value>", "</tool_call>", "<arg_key>"),
    inner="<arg_value>",
)
MINIMAX: Final = XmlFormat(
    '<invoke name="{name}">\n',
    "</invoke>",
    '<parameter name="{key}">',
    "</parameter>",
    ("</parameter>", "</invoke>", "</minimax:tool_call>"),
    several=True,
    nullable=True,
)
MINICPM: Final = XmlFormat(
    '"{name}">',
    "",
    '<param name="{key}">',
    "</param>",
    ("</param>", "</function>"),
    nullable=True,
    wrapped=True,
)
KIMI_K3: Final = XmlFormat(
    '<|open|>call tool="{name}" index="{at}"<|sep|>',
    "<|close|>call<|sep|>",
    '<|open|>argument key="{key}" type="{kind}"<|sep|>',
    "<|close|>argument<|sep|>",
    ("<|open|>", "<|close|>", "<|sep|>"),
    several=True,
)


def render_tagged_call(builder: LarkBuilder, tags: XmlFormat, tool: ToolSpec) -> str:
    """Return the Lark expression for a call of `tool` in the format `tags`, without the markers of calls.

    Add the rules that the expression uses to `builder`. Raise `UnsupportedSchema` for names or schemas that the format
    cannot represent, or if the rules or schemas exceed the limits of the builder.
    """
    guard = MarkExclusion(tuple(tags.marks))
    parts = [_render_argument(builder, tags, guard, argument) for argument in list_arguments(tool)]
    end = builder.render_literal(tags.close) if tags.close else ""
    opened = [builder.render_literal(part) for part in tags.open.format(name=tool.name, at="{at}").split("{at}")]
    before = f" {builder.add_rule(COUNTED, 'AT')} ".join(opened)
    return f"{before} BLANK? {' '.join(parts)} {end}"


def _render_argument(builder: LarkBuilder, tags: XmlFormat, guard: MarkExclusion, argument: Argument) -> str:
    if not NAME.fullmatch(argument.name) or not guard.is_free_of_marks(argument.name):
        raise UnsupportedSchema(
            f"{PREFIX}the parameter {argument.name[:40]!r} has a name that this model's format cannot represent"
        )
    text = argument.find_text_constraints(nullable=tags.nullable)
    kind = "string" if text is not None else get_type_name(argument)
    value = _render_json(builder, tags, guard, argument) if text is None else _render_text(builder, tags, guard, text)
    before = builder.render_literal(tags.before.format(key=argument.name, kind=kind))
    inner = f"BLANK? {builder.render_literal(tags.inner)}" if tags.inner else ""
    rule = builder.add_rule(f"{before} {inner} {value} BLANK?")
    return rule if argument.is_required else f"{rule}?"


def get_type_name(argument: Argument) -> str:
    """Return the name of the type of a JSON argument: its only type if that is not `string`, otherwise `object`."""
    named = list_types(argument.schema)
    return named[0] if len(named) == 1 and named[0] != "string" else "object"


def _render_json(builder: LarkBuilder, tags: XmlFormat, guard: MarkExclusion, argument: Argument) -> str:
    return (
        f"{builder.add_schema(guard.exclude_from_schema(argument.schema))} BLANK? {builder.render_literal(tags.after)}"
    )


def _render_text(builder: LarkBuilder, tags: XmlFormat, guard: MarkExclusion, text: TextArgument) -> str:
    if not all(map(guard.is_free_of_marks, text.choices)):
        raise UnsupportedSchema(f"{PREFIX}it has a value that contains a marker of this model's format")
    null = tags.nullable
    if not tags.wrapped or text.choices:
        return builder.add_text(text, tags.after, guard, null=null)
    plain = builder.add_text(text, tags.after, MarkExclusion(("<",)), null=null)
    section = builder.add_text(text, "]]>", guard, null=null, section=True)
    return f'({plain} | "<![CDATA[" {section} {builder.render_literal(tags.after)})'
