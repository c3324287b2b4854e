"""Schema of the bodies of `/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's format.

Fields of the type `Any` are accepted and have no effect.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.admission.request_limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from router.dialects.openai.chat_schema import BILL, CACHE, KEY_IDENTIFIES_CLIENT
from router.dialects.shared.common_fields import (
    NO_LIMIT_NOTE,
    OTHER_SERVERS,
    SESSION_NOTE,
    TEXT_OR_PARTS,
    CallId,
    ForeignPart,
    FunctionName,
    Named,
    Stops,
    StrictPart,
    Temperature,
    TokenLimitOrZero,
    TopK,
    TopP,
    build_tool_discriminator,
    shorten_name,
)
from router.dialects.shared.field_table import FieldTable
from router.dialects.shared.template import EffortField
from router.dialects.shared.tool_shapes import ArgumentsObject, convert_to_anthropic

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **OTHER_SERVERS,
        "user_profile_id": KEY_IDENTIFIES_CLIENT,
        "workspace_id": KEY_IDENTIFIES_CLIENT,
        "service_tier": BILL,
        "cache_control": CACHE,
        "context_management": "a conversation is never shortened: the model gets all of it",
        "diagnostics": "usage.cache_read_input_tokens counts the tokens from the prefix cache",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "container": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
        "thread": (None,),
    }
)
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "container": "the server runs only models",
        "inference_geo": "all requests run on the machines of this cluster",
        "mcp_servers": "connect to them in the client, and send their functions as tools",
        "speed": "only standard is supported",
        "thread": "no conversations are stored: send all messages",
        "max_tokens": f"required; {NO_LIMIT_NOTE}; 0: only the prompt is computed, for the prefix cache",
        "thinking": "enabled and disabled set the template's enable_thinking; budget_tokens has no effect; "
        "display: omitted removes thinking blocks from the answer",
        "tool_choice": "auto, any, tool and none, also with disable_parallel_tool_use",
        "tools": "custom tools; tools of other types would run on the server and are left out",
        "output_format": "same as output_config.format, which has precedence; older clients send it",
        "output_config": "effort sets the template's reasoning_effort; format constrains the answer to its JSON "
        "schema; task_budget has no effect",
    }
)


class CacheablePart(StrictPart):
    """Base of the parts that may have `cache_control`, which has no effect."""

    cache_control: Any = None


class TextBlock(CacheablePart):
    """Text block of a message, a system prompt or a tool result."""

    type: Literal["text"]
    text: str
    citations: Any = None


class ToolUseBlock(CacheablePart):
    """Tool call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: CallId
    name: Named
    input: ArgumentsObject
    caller: Any = None


class ToolResultBlock(CacheablePart):
    """Result of a tool call. `is_error` has no effect, because the text describes the error.

    Parts that are not text, such as images, are replaced by a note.
    """

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: "ResultContent | None" = None
    is_error: bool | None = None


class ThinkingBlock(StrictPart):
    """Reasoning of the assistant in an earlier turn. `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictPart):
    """Encrypted reasoning of a model on another server. The prompt omits it, because no node can decrypt it."""

    type: Literal["redacted_thinking"]
    data: str


class TextSource(StrictPart):
    """Source of a document that is a text."""

    type: Literal["text"]
    media_type: Any = None
    data: str


class ContentSource(StrictPart):
    """Source of a document that is a text or a list of blocks. Blocks that are not text are replaced by a note."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[
                Annotated[
                    Annotated[TextBlock, Tag("text_part")] | Annotated[ForeignPart, Tag("foreign_part")],
                    build_tool_discriminator("text"),
                ]
            ],
            Field(fail_fast=True, max_length=MAX_PARTS),
            Tag("parts"),
        ],
        TEXT_OR_PARTS,
    ]


class DocumentBlock(CacheablePart):
    """Document in a message of the user, or in the result of a tool. `citations` has no effect.

    A source of another type, such as a PDF file, is refused in a message of the user that has no tool results.
    """

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("text_part")]
        | Annotated[ContentSource, Tag("content_part")]
        | Annotated[ForeignPart, Tag("foreign_part")],
        build_tool_discriminator("text", "content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(CacheablePart):
    """Result of a search in a message of the user, or in the result of a tool. `citations` has no effect."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)]
    citations: Any = None


class ToolDefinition(StrictPart):
    """Tool of a `tool_addition`, given by its definition."""

    type: Literal["tool_definition"]
    definition: "AnyTool"


class ToolReference(StrictPart):
    """Tool of a `tool_addition` or `tool_removal`, given by its name in `tools`."""

    type: Literal["tool_reference"]
    name: Named


class ToolChangeBlock(CacheablePart):
    """Change of the tools in the middle of a conversation, in a message with the role `system`.

    A change applies to the whole conversation, because the prompt begins with the tools.
    """

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[
        Annotated[ToolReference, Tag("tool_reference_part")]
        | Annotated[ToolDefinition, Tag("tool_definition_part")]
        | Annotated[ForeignPart, Tag("foreign_part")],
        build_tool_discriminator("tool_reference", "tool_definition"),
    ]


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]
ResultPart = Annotated[
    Annotated[TextBlock, Tag("text_part")]
    | Annotated[DocumentBlock, Tag("document_part")]
    | Annotated[SearchResultBlock, Tag("search_result_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("text", "document", "search_result"),
]
ResultContent = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ResultPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]
Block = Annotated[
    Annotated[TextBlock, Tag("text_part")]
    | Annotated[ToolUseBlock, Tag("tool_use_part")]
    | Annotated[ToolResultBlock, Tag("tool_result_part")]
    | Annotated[ThinkingBlock, Tag("thinking_part")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking_part")]
    | Annotated[DocumentBlock, Tag("document_part")]
    | Annotated[SearchResultBlock, Tag("search_result_part")]
    | Annotated[ToolChangeBlock, Tag("tool_addition_part")]
    | Annotated[ToolChangeBlock, Tag("tool_removal_part")]
    | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator(
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "document",
        "search_result",
        "tool_addition",
        "tool_removal",
    ),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_PARTS), Tag("parts")],
    TEXT_OR_PARTS,
]


class AnthropicMessage(StrictPart):
    """Message of the conversation. A message with the role `system` may be at any position."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(CacheablePart):
    """Tool that the model may call. Hints for Anthropic's own servers have no effect.

    If `strict` is true, the input of each call follows `input_schema`.
    """

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


def _get_tool_tag(tool: object) -> str:
    kind = cast("dict[str, object]", tool).get("type") if isinstance(tool, dict) else None
    return "foreign_part" if isinstance(kind, str) and kind not in ("", "custom") else "custom_part"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom_part")] | Annotated[ForeignPart, Tag("foreign_part")],
    Discriminator(_get_tool_tag),
    BeforeValidator(convert_to_anthropic),
]


class ToolChoice(StrictPart):
    """Choice of the tools that the model may or must call.

    In `/v1/messages`, `name` is required with the type `tool`, and refused with any other type. If
    `disable_parallel_tool_use` is true, the answer ends after its first call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: Named | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(StrictPart):
    """Reasoning options. `budget_tokens` has no effect.

    The types `enabled` and `disabled` set the template's variable `enable_thinking`. The other types do not set it.
    With `display: omitted`, the answer has no reasoning.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None


class JsonFormat(StrictPart):
    """Answer format `json_schema`, for an answer that is JSON and follows the schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictPart):
    """Reasoning effort and format of the answer. `task_budget` has no effect."""

    effort: EffortField = None
    format: JsonFormat | None = None
    task_budget: Any = None


class CountBody(StrictPart):
    """Request body of `/v1/messages/count_tokens`."""

    model: Named
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None


class MessagesBody(CountBody):
    """Request body of `/v1/messages`."""

    max_tokens: TokenLimitOrZero
    stop_sequences: Stops | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    @property
    def session(self) -> str:
        """Name of the conversation from `metadata.user_id`, shortened if it is long; empty if it is absent."""
        user_id = (self.metadata or {}).get("user_id")
        return shorten_name(user_id) if isinstance(user_id, str) else ""


MESSAGES = FieldTable(MessagesBody, HARMLESS, NEUTRAL, INSTEAD | {"metadata": f"user_id {SESSION_NOTE}"})
COUNT = FieldTable(
    CountBody,
    {**HARMLESS, "metadata": KEY_IDENTIFIES_CLIENT, "thread": "only the messages of the body are counted"},
    {name: values for name, values in NEUTRAL.items() if name != "thread"},
    INSTEAD,
)
