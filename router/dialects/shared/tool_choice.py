"""Field `tool_choice` of OpenAI's routes, with the tools that the model may or must call.

In chats, the name of a tool is in a member `function` or `custom`. In `/v1/responses`, the name is next to `type`.
Agents that use both routes mix these forms. Each route therefore accepts both forms.
"""

from typing import Annotated, Literal, NamedTuple, cast, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.admission.request_limits import MAX_TOOLS
from router.dialects.shared.common_fields import (
    ForeignPart,
    FunctionName,
    StrictPart,
    build_tool_discriminator,
)
from router.dialects.shared.strict_json import Body
from router.dialects.shared.tool_shapes import extract_member

TOOL_CHOICE_NOTE = (
    "auto, none, required (or any), a tool by name, or allowed_tools: the model gets only the tools that it lists"
)
"""Description of the field in docs/api.md."""

Word = Literal["auto", "none", "required", "any"]
WORDS = frozenset(get_args(Word))


class ChosenTool(StrictPart):
    """Choice of a function, which the model must call, by its name."""

    type: Literal["function"]
    name: FunctionName


class ChosenCustomTool(StrictPart):
    """Choice of a custom tool, which the model must call, by its name."""

    type: Literal["custom"]
    name: FunctionName


def _normalize_choice(choice: object) -> object:
    """Return a choice in the form of `/v1/responses`. A value of an unknown form is returned unchanged.

    `{"type": "function", "function": {"name": …}}` becomes `{"type": "function", "name": …}`, and `{"type": "auto"}`
    becomes `auto`. Anthropic's type `tool`, and a name without a type, become a function.
    """
    if not isinstance(choice, dict):
        return choice
    fields = cast("Body", choice)
    kind = fields.get("type", "function")
    if kind in WORDS and "name" not in fields:
        return cast("str", kind)
    if not isinstance(kind, str):
        return fields
    return extract_member(fields | {"type": "function" if kind == "tool" else kind}, kind)


AllowedTool = Annotated[
    Annotated[ChosenTool, Tag("function_part")]
    | Annotated[ChosenCustomTool, Tag("custom_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("function", "custom"),
    BeforeValidator(_normalize_choice),
]


class AllowedTools(StrictPart):
    """Tools of the request to which the model is restricted. With the mode `required`, the model must call a tool."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


def _get_choice_tag(choice: object) -> str:
    if not isinstance(choice, dict):
        return "word_part"
    kind = cast("Body", choice).get("type")
    return f"{kind}_part" if kind in ("custom", "allowed_tools") else "function_part"


ToolChoice = Annotated[
    Annotated[Word, Tag("word_part")]
    | Annotated[ChosenTool, Tag("function_part")]
    | Annotated[ChosenCustomTool, Tag("custom_part")]
    | Annotated[AllowedTools, Tag("allowed_tools_part")],
    Discriminator(_get_choice_tag),
    BeforeValidator(_normalize_choice),
]


class CallRule(NamedTuple):
    """Constraint on the tool calls of an answer, which any form of `tool_choice` sets."""

    word: str = "auto"
    """`none`, `auto` or `required`."""
    named: str = ""
    """Tool that must be called; empty if none is named."""
    allowed: frozenset[str] | None = None
    """Names of the tools to which the model is restricted; None for all tools."""


def convert_tool_choice(choice: ToolChoice | None) -> CallRule:
    """Return the constraint on tool calls that a choice sets; None means `auto`.

    Tools of `allowed_tools` that would run on a server are omitted.
    """
    if choice is None:
        return CallRule()
    if isinstance(choice, str):
        return CallRule("required" if choice == "any" else choice)
    if isinstance(choice, AllowedTools):
        named = frozenset(tool.name for tool in choice.tools if not isinstance(tool, ForeignPart))
        return CallRule(choice.mode, allowed=named)
    return CallRule("required", choice.name)
