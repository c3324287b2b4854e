"""Schema of the bodies of `/api/chat`, `/api/generate` and `/api/show`, and of the options, in Ollama's format."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.admission.request_limits import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from router.dialects.openai.chat_schema import ChatTool
from router.dialects.shared.common_fields import (
    KEEP,
    RANDOM_SEED_NOTE,
    WHOLE,
    YIELDING,
    ForeignPart,
    Hint,
    MinP,
    Name,
    Named,
    Penalty,
    Repetition,
    Seed,
    StopOrStops,
    StrictPart,
    Temperature,
    TopK,
    TopP,
    build_tool_discriminator,
)
from router.dialects.shared.field_table import FieldTable
from router.dialects.shared.tool_shapes import ArgumentsObject, convert_to_chat

_NO_LOGPROBS = "use /v1/chat/completions for log probabilities"
_NO_TRUNCATION = "a conversation that is too long is refused, never truncated"
HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        "keep_alive": f"{KEEP}; 0 without a prompt is refused",
        "truncate": _NO_TRUNCATION,
        "shift": _NO_TRUNCATION,
    }
)
CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
    }
)
GENERATE_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **CHAT_NEUTRAL,
        "context": (None, []),
        "images": (None, []),
        "suffix": (None, ""),
        "template": (None, ""),
        "width": (None, 0),
        "height": (None, 0),
        "steps": (None, 0),
    }
)
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "format": "json or a JSON schema",
        "logprobs": _NO_LOGPROBS,
        "top_logprobs": _NO_LOGPROBS,
        "context": "use /api/chat with the whole conversation",
        "suffix": "models here do not fill in the middle of a text",
        "template": "templates of requests are never run: use raw for a prompt without a template",
        "images": "text only",
        "width": "text only",
        "height": "text only",
        "steps": "text only",
        "stream": "default true",
        "think": "true and false set the template's enable_thinking; low, medium, high, max also set reasoning_effort",
        "raw": "the prompt is not rendered with the model's template",
        "options": "see the options below",
        "model": "a `:latest` at the end is ignored",
    }
)

_NODE = "set by the node"
_NO_SAMPLER = "there is no such sampler here: use temperature, top_p or min_p"
OPTIONS_HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "num_batch",
                "num_gpu",
                "main_gpu",
                "num_thread",
                "low_vram",
                "f16_kv",
                "logits_all",
                "vocab_only",
                "use_mmap",
                "use_mlock",
                "embedding_only",
                "numa",
            ),
            _NODE,
        ),
        "num_ctx": "a request can always use the whole context of the model",
        "num_keep": _NO_TRUNCATION,
        "repeat_last_n": "penalties apply to the whole answer",
        "penalize_newline": "newlines are penalized like every token",
        "mirostat": _NO_SAMPLER,
        "mirostat_eta": _NO_SAMPLER,
        "mirostat_tau": _NO_SAMPLER,
        "tfs_z": _NO_SAMPLER,
        "typical_p": _NO_SAMPLER,
        "draft_num_predict": "set by the engine",
    }
)
OPTIONS_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "num_predict": "0 and below: as without it, up to engine.mlx.max_tokens of the node",
        "seed": RANDOM_SEED_NOTE,
        "repeat_penalty": "1 turns it off",
    }
)


class OllamaOptions(StrictPart):
    """Sampling options of a request, in the field `options`."""

    num_predict: Annotated[int, WHOLE] | None = None
    stop: StopOrStops | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaCalledFunction(StrictPart):
    """Function in a tool call of the assistant. Its arguments are an object or JSON text. `index` has no effect."""

    name: Named
    arguments: ArgumentsObject | None = None
    index: int | None = None


class OllamaCall(StrictPart):
    """Tool call that the assistant made in an earlier turn."""

    id: Hint | None = None
    type: Literal["function"] | None = None
    function: OllamaCalledFunction


class OllamaMessage(StrictPart):
    """Message of the conversation. `images` must be empty. `name` has an effect only if `tool_name` is absent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_name: Name | None = None
    tool_call_id: Hint | None = None
    name: Name | None = None


def _get_think_tag(think: object) -> str:
    return "word_part" if isinstance(think, str) else "switch_part"


Think = Annotated[
    Annotated[bool, Tag("switch_part")] | Annotated[Literal["low", "medium", "high", "max"], Tag("word_part")],
    Discriminator(_get_think_tag),
]


def _get_format_tag(form: object) -> str:
    return "word_part" if isinstance(form, str) else "schema_part"


Format = Annotated[
    Annotated[dict[str, Any], Tag("schema_part")] | Annotated[Literal["json", ""], Tag("word_part")],
    Discriminator(_get_format_tag),
]


class OllamaBody(StrictPart):
    """Common fields of the bodies of `/api/chat` and `/api/generate`."""

    model: Named
    stream: bool | None = None
    options: dict[str, Any] | None = None
    think: Think | None = None
    format: Format | None = None


OllamaTool = Annotated[
    Annotated[ChatTool, Tag("function_part")] | Annotated[ForeignPart, Tag("foreign_part")],
    build_tool_discriminator("function"),
    BeforeValidator(convert_to_chat),
]


class OllamaChatBody(OllamaBody):
    """Request body of `/api/chat`. A body without messages loads the model."""

    messages: Annotated[
        list[Annotated[OllamaMessage, YIELDING]] | None, Field(fail_fast=True, max_length=MAX_MESSAGES)
    ] = None
    tools: Annotated[list[OllamaTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody):
    """Request body of `/api/generate`. A body without a prompt loads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowBody(StrictPart):
    """Request body of `/api/show`. Older clients send `name` instead of `model`. `verbose` has no effect."""

    model: Named | None = None
    name: Named | None = None
    verbose: bool | None = None


CHAT = FieldTable(OllamaChatBody, HARMLESS, CHAT_NEUTRAL, INSTEAD)
GENERATE = FieldTable(OllamaGenerateBody, HARMLESS, GENERATE_NEUTRAL, INSTEAD)
SHOW = FieldTable(OllamaShowBody, MappingProxyType({}), MappingProxyType({}), INSTEAD)
OPTIONS = FieldTable(OllamaOptions, OPTIONS_HARMLESS, MappingProxyType({}), OPTIONS_INSTEAD)
