"""The body of `/v1/chat/completions` as pydantic reads it: OpenAI's shape, and the parameters that its users add.

Three tables say what happens to the rest: `NEUTRAL` (not offered, but the values that ask for nothing pass), `HARMLESS`
(passes, because it changes nothing here), and everything else is refused as unknown. What a model of this cluster may
lack (`Demand.features`) is accepted here and judged by placement.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from router.dialects.limits import (
    LONGEST_NAME,
    LONGEST_STOP,
    MOST_BIASES,
    MOST_CALLS,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOKENS,
    MOST_TOOLS,
    MOST_TOP_K,
    MOST_TOP_LOGPROBS,
)

_INT64 = 2**63 - 1

HARMLESS = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
})  # fmt: skip
"""Fields that change nothing in the answer of a cluster like this: who asks, and hints for somebody's cache or bill."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "verbosity": (None,),
    "store": (None, False),
})  # fmt: skip
"""Fields that are not offered, with the values that ask for nothing."""

INSTEAD: Mapping[str, str] = MappingProxyType({
    "functions": "it is deprecated, use tools",
    "function_call": "it is deprecated, use tools and tool_calls",
    "parallel_tool_calls": "a model may always make several calls, only true is offered yet",
    "response_format": "only the type text is offered yet",
    "store": "answers are not kept",
    "include_obfuscation": "nothing is added to the chunks of a stream",
})  # fmt: skip
"""What to do instead, where there is something."""


class Strict(BaseModel):
    """Base of all parts: no unknown field, no value turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Named = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class TextPart(Strict):
    """One piece of a message's text."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """One piece of what the assistant said when it declined."""

    type: Literal["refusal"]
    refusal: str


def _part_kind(part: object) -> str:
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    return "refusal_part" if kind == "refusal" else "text_part"


def _content_kind(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


Part = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal_part")], Discriminator(_part_kind)
]
Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")], Discriminator(_content_kind)]


class CalledFunction(Strict):
    """A function that the assistant called. `arguments` is JSON text, as far as the model kept to it."""

    name: Named
    arguments: str
    parsed_arguments: Any = None


class MessageToolCall(Strict):
    """A call that the assistant made in an earlier turn. `index` and `parsed_arguments` are what client libraries leave
    in the messages that they put together from a stream."""

    id: Named
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MOST_CALLS)] | None = None
    function_call: None = None
    audio: None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Strict):
    """A function that the model may call. `strict` is a wish: the model sees it, nothing enforces it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class StreamOptions(Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


def _stop_kind(stop: object) -> str:
    return "list" if isinstance(stop, list) else "one"


class ChatBody(Strict):
    """The request body. What is not offered is refused with `unsupported_parameter`, nothing is ignored in silence."""

    model: Named
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Annotated[
        Annotated[Stop, Tag("one")] | Annotated[list[Stop], Field(max_length=MOST_STOPS), Tag("list")],
        Discriminator(_stop_kind),
    ] | None = None  # fmt: skip
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MOST_BIASES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[Variable, Any] | None = None


KNOWN = frozenset(ChatBody.model_fields) | HARMLESS | NEUTRAL.keys()
