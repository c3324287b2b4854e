"""Fields that the bodies of several dialects have, as pydantic types, and their conversion to `GenerationParams`."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from router.admission.request_limits import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    MAX_TOP_K,
)
from router.errors import Problem, build_invalid
from wire.frames import GenerationParams, GrammarSpec
from wire.refusals import RefusalCode

INT64 = 2**63 - 1

KEEP = "a model stays loaded until its memory is needed, or as set on its node"
ONE = "there is one provider; requests are placed by memory and expected time"
OTHER_SERVERS: Mapping[str, str] = MappingProxyType(
    {
        "cache_prompt": "the settings of the node control the prefix cache",
        "keep_alive": KEEP,
        "id_slot": ONE,
        "provider": ONE,
        "providers": ONE,
        "models": ONE,
        "route": ONE,
        "transforms": ONE,
        "plugins": ONE,
        "include_reasoning": "reasoning is always included",
        "separate_reasoning": "reasoning is always separate from the answer",
        "skip_special_tokens": "special tokens are never part of an answer",
        "spaces_between_special_tokens": "special tokens are never part of an answer",
        "add_generation_prompt": "set by the model's template",
        "continue_final_message": "set by the model's template",
        "stop_token_ids": "an answer ends at the model's end token or at a text in stop",
        "min_tokens": "an answer ends at the model's end token",
        "ignore_eos": "an answer ends at the model's end token",
        "num_ctx": "a request can always use the whole context of the model",
    }
)
"""Fields of other servers, each with the reason why it has no effect here."""
NO_LIMIT_NOTE = "-1: as without it, up to engine.mlx.max_tokens of the node"
RANDOM_SEED_NOTE = "-1: random, as without it"
SESSION_NOTE = "names the conversation, whose next request goes to the same node if possible; x-session-id overrides it"


class StrictPart(BaseModel):
    """Base of all bodies and their parts, which converts no types and refuses unknown fields.

    `FieldTable.parse` can ignore unknown fields. The validator of a body is built at its first request, in any thread,
    under a lock of pydantic 2.14.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class ForeignPart(BaseModel):
    """Tool, or part of a message or of a tool result, with an unsupported type, such as a web search or an image.

    The dialect omits it, replaces it by a note, or refuses the request.
    """

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    type: Annotated[str, Field(min_length=1)]


class TextFormat(StrictPart):
    """Response format `text`, which does not constrain the answer."""

    type: Literal["text"]


class GrammarFormat(StrictPart):
    """Grammar for the input of a custom tool. It is shown to the model, but not enforced."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


MIN_TOP_P = 1e-6
"""Minimum of `top_p`, which replaces any smaller value. All such values leave only the most likely token.

Clients of OpenAI's API also send 0.
"""


def _raise_to_minimum(top_p: float) -> float:
    return max(top_p, MIN_TOP_P)


def _convert_whole_number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_convert_whole_number)
"""Validator of whole numbers that also accepts `100.0`, the form of clients in languages without whole numbers."""
NO_LIMIT = -1
"""Value of `max_tokens` for no limit, as in LM Studio and llama.cpp.

The limit of the profile applies, else `engine.mlx.max_tokens` of the node.
"""
RANDOM_SEED = -1
"""Value of `seed` for a random seed, as in Ollama, vLLM, llama.cpp and LM Studio."""


def _lower_limit(limit: int) -> int:
    return min(limit, MAX_TOKENS)


def _refuse_zero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("token_limit", "Input should be at least 1, or -1 for no limit")
    return limit


def resolve_limit(limit: int | None) -> int | None:
    """Return the limit in tokens that a `TokenLimit` sets; None if it sets no limit or is None."""
    return None if limit == NO_LIMIT else limit


def resolve_seed(seed: int | None) -> int | None:
    """Return the seed that a body sets; None for `RANDOM_SEED` and if the body sets no seed."""
    return None if seed == RANDOM_SEED else seed


def shorten_name(name: str) -> str:
    """Return the name of a conversation or the id of a call, shortened if it has more than `MAX_NAME_CHARS` characters.

    The short form is the SHA-256 of the name in hexadecimal.
    """
    return name if len(name) <= MAX_NAME_CHARS else sha256(name.encode("utf-8", "replace")).hexdigest()


Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Named = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./:-]{1,128}$")]
"""Name of a tool, with up to 128 characters as in Anthropic's API. Agents build names from those of servers and tools.

OpenAI's API does not allow `.`, `/` and `:`, but MCP servers and clients of Google's API use them in names.
"""
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]
TokenLimitOrZero = Annotated[int, Field(ge=NO_LIMIT), AfterValidator(_lower_limit), WHOLE]
"""Maximum tokens of an answer: at least 0, or `NO_LIMIT`. A number above `MAX_TOKENS` becomes `MAX_TOKENS`."""
TokenLimit = Annotated[TokenLimitOrZero, AfterValidator(_refuse_zero)]
"""Maximum tokens of an answer: at least 1, or `NO_LIMIT`. A number above `MAX_TOKENS` becomes `MAX_TOKENS`."""
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)
]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
CallId = Annotated[str, Field(min_length=1), AfterValidator(shorten_name)]
"""Id of a tool call. A long id is replaced by its digest (`shorten_name`).

Ids are long if a gateway writes the signatures of another model's reasoning into them.
"""
Hint = Annotated[str, AfterValidator(shorten_name)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-INT64, le=INT64), WHOLE]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(_raise_to_minimum)]
TopK = Annotated[int, Field(ge=-1, le=MAX_TOP_K), WHOLE]
MinP = Annotated[float, Field(ge=0, le=1)]
Repetition = Annotated[float, Field(gt=0, le=10)]


def build_type_discriminator(*kinds: str) -> Discriminator:
    """Return a discriminator by the `type` of a part, whose tags are `<type>_part` for each of `kinds`.

    An unknown type is validated as the first kind, whose own `type` field then reports the error.
    """
    marks = {kind: f"{kind}_part" for kind in kinds}

    def get_tag(part: object) -> str:
        kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
        return marks.get(kind, marks[kinds[0]]) if isinstance(kind, str) else marks[kinds[0]]

    return Discriminator(get_tag)


def build_tool_discriminator(*kinds: str) -> Discriminator:
    """Return a discriminator by the `type` of a tool or part, whose tags are `<type>_part` for each of `kinds`.

    The tag of any other type is `foreign_part`. A tool or part without a type is validated as the first kind.
    """
    marks = {kind: f"{kind}_part" for kind in kinds}

    def get_tag(part: object) -> str:
        kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
        return marks.get(kind, "foreign_part") if isinstance(kind, str) and kind else marks[kinds[0]]

    return Discriminator(get_tag)


def _return_unchanged(part: object) -> object:
    return part


YIELDING = BeforeValidator(_return_unchanged)
"""Validator of list items that does not change them.

The interpreter switches threads only in Python code, and pydantic validates a complete list in one native call. With
this validator, the event loop can run between two items.
"""


def get_input_tag(value: object) -> str:
    """Return the tag of an input: `text_part`, `texts_part`, `ids_part` or `many_part`.

    The last two are for a list of token ids, and for a list of such lists. The first item of a list decides. The
    tag of an empty list is `texts_part`.
    """
    if not isinstance(value, list):
        return "text_part"
    first = cast("list[object]", value)[0] if value else ""
    return "ids_part" if isinstance(first, int) else "many_part" if isinstance(first, list) else "texts_part"


def _get_content_tag(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


TEXT_OR_PARTS = Discriminator(_get_content_tag)
"""Discriminator between a text and a list, with the tags `text` and `parts`."""


def _get_stop_tag(stop: object) -> str:
    return "list" if isinstance(stop, list) else "one"


StopOrStops = Annotated[Annotated[Stop, Tag("one")] | Annotated[Stops, Tag("list")], Discriminator(_get_stop_tag)]


class StreamOptions(StrictPart):
    """Field `stream_options`, which requests optional content of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(StrictPart):
    """Common fields of `/v1/chat/completions` and `/v1/completions`, for sampling, choices, stops and the session."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    stop: StopOrStops | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Seed | None = None
    prompt_cache_key: Hint | None = None
    session_id: Hint | None = None
    chat_id: Hint | None = None
    user: Hint | None = None

    @property
    def session(self) -> str:
        """Name of the conversation; empty if the body sets none.

        It is the first of `prompt_cache_key`, `session_id`, `chat_id` and `user` that is set.
        """
        return self.prompt_cache_key or self.session_id or self.chat_id or self.user or ""


def build_params(
    body: SamplingFields,
    max_tokens: int | None,
    *,
    logprobs: int | None = None,
    one_call: bool = False,
    grammar: GrammarSpec | None = None,
) -> GenerationParams:
    """Return the generation parameters of a body.

    `max_tokens` is the maximum length of a choice; None for no limit. `logprobs` is the number of alternatives for each
    token; None for no log probabilities. `one_call` ends the answer after its first tool call. `grammar` constrains the
    answer; None for no constraint.

    `repetition_penalty` overrides `repeat_penalty`, and a `top_k` of -1 becomes 0.
    """
    top_k = body.top_k
    return GenerationParams(
        grammar=grammar,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=resolve_seed(body.seed),
        stop=list_stops(body.stop),
        n=body.n or 1,
        top_k=None if top_k is None else max(0, top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=next(
            (penalty for penalty in (body.repetition_penalty, body.repeat_penalty) if penalty is not None), 1.0
        ),
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items() if bias),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        one_call=one_call,
    )


def list_given_penalties(body: SamplingFields) -> frozenset[str]:
    """Return the names of the penalties that a body sets, including those set to their defaults."""
    penalties = {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repeat_penalty if body.repetition_penalty is None else body.repetition_penalty,
    }
    return frozenset(name for name, value in penalties.items() if value is not None)


def list_stops(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a field that has none, one, or several. Empty strings are omitted."""
    return tuple(text for text in ((stop,) if isinstance(stop, str) else stop or ()) if text)


def parse_stream_options(body: SamplingFields) -> bool | Problem:
    """Return whether the last chunk of a stream must have the usage; False if the body requests no stream.

    Return a 400 problem for a stream with `include_obfuscation: true`.
    """
    options = body.stream_options
    if options is None or not body.stream:
        return False
    if options.include_obfuscation:
        text = "stream_options.include_obfuscation is not supported: streams are not padded"
        return build_invalid(text, "stream_options.include_obfuscation", RefusalCode.UNSUPPORTED.value)
    return bool(options.include_usage)
