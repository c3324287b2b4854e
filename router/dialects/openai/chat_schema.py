"""Schema of the body of `/v1/chat/completions` for pydantic: OpenAI's format with common extra parameters.

Three tables define the other fields. Fields of `NEUTRAL` are not supported, but their neutral values are accepted.
Fields of `HARMLESS` are accepted, because they have no effect here. `INSTEAD` has alternatives and notes. Any other
field is unknown. A feature that some models of the cluster lack (`ResourceDemand.features`) is accepted here, and
checked by placement.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from router.admission.request_limits import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_TOP_LOGPROBS
from router.dialects.shared.common_fields import (
    NO_LIMIT_NOTE,
    OTHER_SERVERS,
    RANDOM_SEED_NOTE,
    SESSION_NOTE,
    TEXT_OR_PARTS,
    WHOLE,
    CallId,
    ForeignPart,
    FunctionName,
    GrammarFormat,
    Hint,
    Name,
    Named,
    StrictPart,
    TextFormat,
    TokenLimit,
    build_tool_discriminator,
    build_type_discriminator,
)
from router.dialects.shared.field_table import FieldTable
from router.dialects.shared.formats import FORMS, FormattedBody
from router.dialects.shared.template import EffortField
from router.dialects.shared.tool_choice import TOOL_CHOICE_NOTE, ToolChoice
from router.dialects.shared.tool_shapes import ArgumentsText, convert_to_chat

TOOLS_NOTE = (
    "functions, and custom tools, which the model gets as functions with one text argument; tools of other types would "
    "run on the server and are left out"
)
BILL = "there is one service tier"
CACHE = "the prefix cache needs no hints"
KEY_IDENTIFIES_CLIENT = "the API key identifies the client"
HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **OTHER_SERVERS,
        "safety_identifier": KEY_IDENTIFIES_CLIENT,
        "metadata": "answers are not stored",
        "service_tier": BILL,
        "prompt_cache_retention": CACHE,
        "prompt_cache_options": CACHE,
        "store": "answers are not stored",
        "prediction": "speculative decoding with a predicted answer is not implemented",
        "moderation": "answers are not moderated",
        "verbosity": "ask for a short or long answer in the prompt",
        "web_search_options": "the server does not search: send a search tool",
    }
)
"""Accepted fields that have no effect on an answer of this server, each with the reason."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
    }
)
"""Unsupported fields, each with its accepted neutral values."""

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "prompt_cache_key": SESSION_NOTE,
        "user": SESSION_NOTE,
        "session_id": SESSION_NOTE,
        "chat_id": SESSION_NOTE,
        "repeat_penalty": "same as repetition_penalty",
        "enable_thinking": "sets the template variable",
        "thinking": "true, false, or an object of type enabled or disabled: sets enable_thinking; a budget is ignored",
        "think": "same as thinking",
        "reasoning": "effort sets reasoning_effort, enabled sets enable_thinking; other members are ignored",
        "usage": "include: same as stream_options.include_usage",
        "tools": TOOLS_NOTE,
        "tool_choice": TOOL_CHOICE_NOTE,
        "parallel_tool_calls": "false ends the answer after its first tool call",
        "chat_template_kwargs": "template variables from an allow-list; a template of a request is never run",
        "reasoning_effort": "sets the template variable; none also sets enable_thinking to false",
        "max_tokens": NO_LIMIT_NOTE,
        "max_completion_tokens": "overrides max_tokens",
        "seed": RANDOM_SEED_NOTE,
        "functions": "deprecated: use tools",
        "function_call": "deprecated: use tools and tool_calls",
        **FORMS,
        "include_obfuscation": "only false is supported: streams are not padded",
    }
)
"""Notes on fields: alternatives to unsupported fields, and effects of supported fields."""


class TextPart(StrictPart):
    """Text part of a message. The types `input_text` and `output_text` of `/v1/responses` are accepted as well."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(StrictPart):
    """Part of an assistant's message with the text of a refusal."""

    type: Literal["refusal"]
    refusal: str


class ThinkingPart(StrictPart):
    """Part with the reasoning of an earlier answer, as in Anthropic's and Mistral's messages.

    `signature` has no effect.
    """

    type: Literal["thinking"]
    thinking: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
        TEXT_OR_PARTS,
    ]
    signature: Any = None


class ReasoningPart(StrictPart):
    """Part with the reasoning of an earlier answer, as in messages of LangChain and the AI SDK."""

    type: Literal["reasoning"]
    text: str


class ToolUsePart(StrictPart):
    """Part with a tool call of an earlier answer, as in Anthropic's messages. Cursor sends it to chats."""

    type: Literal["tool_use"]
    id: CallId
    name: Named
    input: ArgumentsText


class ToolResultPart(StrictPart):
    """Part of a user's message with the result of a tool call, as in Anthropic's messages.

    `is_error` has no effect.
    """

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[
                list[
                    Annotated[
                        Annotated[TextPart, Tag("text_part")] | Annotated[ForeignPart, Tag("foreign_part")],
                        build_tool_discriminator("text"),
                    ]
                ],
                Field(fail_fast=True, max_length=MAX_PARTS),
                Tag("parts"),
            ],
            TEXT_OR_PARTS,
        ]
        | None
    ) = None
    is_error: Any = None


Part = Annotated[
    Annotated[TextPart, Tag("text_part")]
    | Annotated[TextPart, Tag("input_text_part")]
    | Annotated[TextPart, Tag("output_text_part")]
    | Annotated[RefusalPart, Tag("refusal_part")]
    | Annotated[ThinkingPart, Tag("thinking_part")]
    | Annotated[ReasoningPart, Tag("reasoning_part")]
    | Annotated[ToolUsePart, Tag("tool_use_part")]
    | Annotated[ToolResultPart, Tag("tool_result_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator(
        "text", "input_text", "output_text", "refusal", "thinking", "reasoning", "tool_use", "tool_result"
    ),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]


def _complete_type(kind: object) -> object:
    return kind or "function"


class CalledFunction(StrictPart):
    """Function in a tool call of the assistant. `parsed_arguments` has no effect.

    `arguments` is JSON text if the model produced valid JSON. Some clients omit empty arguments, or send an object.
    """

    name: Named
    arguments: ArgumentsText | None = None
    parsed_arguments: Any = None


class MessageToolCall(StrictPart):
    """Function call that the assistant made in an earlier turn.

    Client libraries leave `index` and `parsed_arguments` in messages that they assemble from a stream. These fields
    have no effect.
    """

    id: CallId
    type: Annotated[Literal["function"], BeforeValidator(_complete_type)] = "function"
    function: CalledFunction
    index: int | None = None


class CalledCustom(StrictPart):
    """Custom tool in a tool call of the assistant. `input` is plain text."""

    name: Named
    input: str


class MessageCustomCall(StrictPart):
    """Call of a custom tool that the assistant made in an earlier turn. `index` has no effect."""

    id: CallId
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None


MessageCall = Annotated[
    Annotated[MessageToolCall, Tag("function_part")] | Annotated[MessageCustomCall, Tag("custom_part")],
    build_type_discriminator("function", "custom"),
]


class ChatMessage(StrictPart):
    """Message of the conversation. `annotations` and `parsed` have no effect.

    `refusal` is appended to `content`. `reasoning` is used only if `reasoning_content` is empty. Reasoning in parts of
    `content` is used only if both are empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_call_id: Hint | None = None
    tool_calls: Annotated[list[MessageCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    function_call: None = None
    audio: None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(StrictPart):
    """Function that the model may call. If `strict` is true, the arguments of each call follow `parameters`."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(StrictPart):
    """Function tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class CustomToolSpec(StrictPart):
    """Custom tool, whose input is a text. A grammar in `format` is shown to the model, but not enforced."""

    name: FunctionName
    description: str | None = None
    format: (
        Annotated[
            Annotated[TextFormat, Tag("text_part")] | Annotated[GrammarFormat, Tag("grammar_part")],
            build_type_discriminator("text", "grammar"),
        ]
        | None
    ) = None


class ChatCustomTool(StrictPart):
    """Custom tool that the model may call."""

    type: Literal["custom"]
    custom: CustomToolSpec


AnyTool = Annotated[
    Annotated[ChatTool, Tag("function_part")]
    | Annotated[ChatCustomTool, Tag("custom_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("function", "custom"),
    BeforeValidator(convert_to_chat),
]

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class ChatBody(FormattedBody):
    """Request body of `/v1/chat/completions`.

    An unsupported field is refused with `unsupported_parameter`, unless its value is neutral (`NEUTRAL`). `INSTEAD` has
    the effects of the fields for reasoning, and of `usage` and `max_completion_tokens`.
    """

    model: Named
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: EffortField = None
    enable_thinking: bool | None = None
    thinking: Any = None
    think: Any = None
    reasoning: Any = None
    usage: Any = None
    chat_template_kwargs: dict[Variable, Any] | None = None


CHAT = FieldTable(ChatBody, HARMLESS, NEUTRAL, INSTEAD)
