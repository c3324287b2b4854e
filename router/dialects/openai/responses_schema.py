"""Schema of the body of `/v1/responses`, in OpenAI's newer format with a list of items instead of messages.

Fields of the type `Any` are accepted and have no effect, except `namespace` of a call.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.admission.request_limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from router.dialects.openai.chat_schema import HARMLESS as CHAT_HARMLESS
from router.dialects.openai.chat_schema import TOOLS_NOTE, CustomToolSpec
from router.dialects.shared.common_fields import (
    NO_LIMIT_NOTE,
    SESSION_NOTE,
    TEXT_OR_PARTS,
    CallId,
    ForeignPart,
    FunctionName,
    Hint,
    Name,
    Named,
    StrictPart,
    Temperature,
    TextFormat,
    TokenLimit,
    TopP,
    build_tool_discriminator,
    build_type_discriminator,
)
from router.dialects.shared.field_table import FieldTable
from router.dialects.shared.formats import JsonObject, NamedSchema
from router.dialects.shared.template import EffortField
from router.dialects.shared.tool_choice import TOOL_CHOICE_NOTE, ToolChoice
from router.dialects.shared.tool_shapes import ArgumentsText, convert_to_responses

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **{name: why for name, why in CHAT_HARMLESS.items() if name not in ("metadata", "store")},
        "truncation": "a conversation that is too long is refused, never truncated",
        "context_management": "a conversation is never shortened: the model gets all of it",
        "max_tool_calls": "limits tools that run on the server; no tool does",
        "client_metadata": "the API key identifies the client",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "access_programs": (None,),
        "background": (None, False),
        "conversation": (None,),
        "image": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
    }
)
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "background": "the client must stay connected until the answer ends",
        "conversation": "use previous_response_id",
        "prompt": "prompts are not stored: send them in input",
        "top_logprobs": "use /v1/chat/completions for log probabilities",
        "tools": TOOLS_NOTE.replace("custom tools,", "custom tools and namespaces of both,"),
        "tool_choice": TOOL_CHOICE_NOTE,
        "text": "format: text, json_object or json_schema, enforced even if not strict; verbosity has no effect",
        "reasoning": "effort is the template's reasoning_effort; summary has no effect, because reasoning is complete",
        "include": "no effect: reasoning is always included, and no tools run on the server",
        "store": "default true; answers are stored in memory until newer answers need the space",
        "previous_response_id": "id of an answer that is stored for the same key",
        "input": "a text, or messages, calls of functions and custom tools, their outputs, reasoning, further tools, "
        "and references to stored items; calls that ran on another server are left out",
        "max_output_tokens": NO_LIMIT_NOTE,
        "metadata": "returned with the answer",
        "prompt_cache_key": SESSION_NOTE,
        "user": SESSION_NOTE,
        "session_id": SESSION_NOTE,
        "chat_id": SESSION_NOTE,
        "stream_options": "only include_obfuscation: false",
        "parallel_tool_calls": "false ends the answer after its first tool call",
    }
)


class InputText(StrictPart):
    """Text part of a message from the client. The type `text` of chats is accepted as well."""

    type: Literal["input_text", "text"]
    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(StrictPart):
    """Text part of a message from the model."""

    type: Literal["output_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class OutputRefusal(StrictPart):
    """Part of a message from the model with the text of a refusal."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[InputText, Tag("input_text_part")]
    | Annotated[InputText, Tag("text_part")]
    | Annotated[OutputText, Tag("output_text_part")]
    | Annotated[OutputRefusal, Tag("refusal_part")],
    build_type_discriminator("input_text", "text", "output_text", "refusal"),
]
Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]


ToolOutputPart = Annotated[
    Annotated[InputText, Tag("input_text_part")]
    | Annotated[InputText, Tag("text_part")]
    | Annotated[OutputText, Tag("output_text_part")]
    | Annotated[OutputRefusal, Tag("refusal_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("input_text", "text", "output_text", "refusal"),
]
ToolOutput = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ToolOutputPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]


class FunctionTool(StrictPart):
    """Function that the model may call. If `strict` is true, the arguments of each call follow `parameters`."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


class ResponsesCustomTool(CustomToolSpec):
    """Custom tool that the model may call."""

    type: Literal["custom"]
    allowed_callers: Any = None
    defer_loading: Any = None


class Namespace(StrictPart):
    """Group of tools under one name. A call in an answer names the namespace and the tool."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function_part")]
                | Annotated[ResponsesCustomTool, Tag("custom_part")]
                | Annotated[ForeignPart, Tag("foreign_part")],
                build_tool_discriminator("function", "custom"),
                BeforeValidator(convert_to_responses),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function_part")]
    | Annotated[ResponsesCustomTool, Tag("custom_part")]
    | Annotated[Namespace, Tag("namespace_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("function", "custom", "namespace"),
    BeforeValidator(convert_to_responses),
]


class ReturnedItem(StrictPart):
    """Base of the input items that may come from an earlier answer. `id` and `status` have no effect."""

    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(ReturnedItem):
    """Input item: a message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None
    phase: Any = None


class CallItem(ReturnedItem):
    """Input item: a function call that the model made. `arguments` is an object, or JSON text if it is valid."""

    type: Literal["function_call"]
    call_id: CallId
    name: Named
    arguments: ArgumentsText | None = None
    caller: Any = None
    namespace: Any = None
    parsed_arguments: Any = None


class OutputItem(ReturnedItem):
    """Input item: the result of a function call. Parts that are not text, such as images, are replaced by a note."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: ToolOutput | None = None
    caller: Any = None
    name: Any = None
    namespace: Any = None


class CustomCallItem(ReturnedItem):
    """Input item: a call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Named
    input: str
    caller: Any = None
    namespace: Any = None


class CustomOutputItem(ReturnedItem):
    """Input item: the result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: ToolOutput | None = None
    caller: Any = None
    name: Any = None
    namespace: Any = None


class ReasoningText(StrictPart):
    """Text part of a reasoning item or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ReturnedItem):
    """Input item: reasoning of the model. `summary` is used only if `content` is empty."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    encrypted_content: Any = None


class ItemReference(StrictPart):
    """Input item: a reference, by its id, to an item of an earlier answer to the same API key."""

    type: Literal["item_reference"]
    id: Named


class ToolsItem(ReturnedItem):
    """Input item: further tools, in addition to those of `tools`. Newer versions of Codex send them there."""

    type: Literal["additional_tools"]
    role: Any = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ForeignItem(ForeignPart):
    """Input item: a call for another server or its result. The prompt omits such an item if it has no `call_id`."""

    call_id: CallId | None = None


_ITEMS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
        "additional_tools",
    }
)
FOREIGN_ITEMS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_output")
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Types of items in which another server has encrypted a conversation. Such items are refused."""


def _get_item_tag(item: object) -> str:
    kind = cast("dict[str, object]", item).get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return "message_part"
    if kind in _ITEMS:
        return f"{kind}_part"
    is_foreign = kind.endswith(("_call", "_call_output")) or kind in (*FOREIGN_ITEMS, *COMPACTIONS)
    return "foreign_part" if is_foreign else "message_part"


OwnItem = MessageItem | CallItem | OutputItem | CustomCallItem | CustomOutputItem | ReasoningItem
Item = OwnItem | ToolsItem | ForeignItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("message_part")]
    | Annotated[CallItem, Tag("function_call_part")]
    | Annotated[OutputItem, Tag("function_call_output_part")]
    | Annotated[CustomCallItem, Tag("custom_tool_call_part")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output_part")]
    | Annotated[ReasoningItem, Tag("reasoning_part")]
    | Annotated[ItemReference, Tag("item_reference_part")]
    | Annotated[ToolsItem, Tag("additional_tools_part")]
    | Annotated[ForeignItem, Tag("foreign_part")],
    Discriminator(_get_item_tag),
]
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("parts")],
    TEXT_OR_PARTS,
]


class Reasoning(StrictPart):
    """Reasoning options of a request. Only `effort` has an effect."""

    effort: EffortField = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(NamedSchema):
    """Answer format `json_schema`, for an answer that is JSON and follows the schema."""

    type: Literal["json_schema"]


Format = Annotated[
    Annotated[TextFormat, Tag("text_part")]
    | Annotated[JsonObject, Tag("json_object_part")]
    | Annotated[SchemaFormat, Tag("json_schema_part")],
    build_type_discriminator("text", "json_object", "json_schema"),
]


class TextConfig(StrictPart):
    """Field `text`, which has the format of the answer. `verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(StrictPart):
    """Field `stream_options`. The only accepted option, `include_obfuscation: false`, has no effect."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(StrictPart):
    """Request body of `/v1/responses`."""

    model: Named
    input: Input
    include: Annotated[list[Name], Field(fail_fast=True, max_length=16)] | None = None
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Named | None = None
    prompt_cache_key: Hint | None = None
    session_id: Hint | None = None
    chat_id: Hint | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    top_p: TopP | None = None
    user: Hint | None = None


RESPONSES = FieldTable(ResponsesBody, HARMLESS, NEUTRAL, INSTEAD)
