"""`/v1/chat/completions`: a body in OpenAI's shape into the parts of a Generate frame.

pydantic lives at this edge only. What we do not offer yet is refused by name (`NEUTRAL`: the values that ask for
nothing are let pass), what changes nothing here is let pass (`HARMLESS`), what nobody knows is refused.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from router.dialects import chat_quick
from router.dialects.limits import (
    LONGEST_NAME,
    LONGEST_STOP,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOKENS,
    TEMPLATE_BYTES,
)
from router.dialects.strict_json import Body, read_object
from router.placement import Demand
from router.problems import Problem, invalid
from wire.frames import Message, Params
from wire.refusals import Code

_INT64 = 2**63 - 1

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
})  # fmt: skip
"""Fields that change nothing in the answer of a cluster like this."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
})  # fmt: skip
"""Fields that no model offers yet, with the values that ask for nothing. A field leaves this table when a model's
`features` may name it."""

_LATER_IN_MESSAGES = frozenset({"type", "tool_calls", "function_call", "audio"})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Strict):
    """One piece of a message's text."""

    type: Literal["text"]
    text: str


def _content_kind(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_content_kind)]


class ChatMessage(_Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = None


class StreamOptions(_Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def _stop_kind(stop: object) -> str:
    return "list" if isinstance(stop, list) else "one"


class ChatBody(_Strict):
    """The request body. Fields that ask for what no model offers yet are refused with `unsupported_parameter`."""

    model: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
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
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64)] | None = None


_TAGS = frozenset({"text", "parts", "one", "list"})
_KNOWN = frozenset(ChatBody.model_fields) | HARMLESS | NEUTRAL.keys()


class ChatRequest(msgspec.Struct, frozen=True, gc=False):
    """A body that was understood."""

    demand: Demand
    messages: tuple[Message, ...]
    params: Params
    stream: bool
    include_usage: bool


def parse(body: bytes) -> ChatRequest | Problem:
    """Read a body (UTF-8 JSON), or say which parameter is wrong and why."""
    plain = chat_quick.read(body)
    if plain is not None:
        return ChatRequest(*plain, include_usage=False)
    return parse_strictly(body)


def parse_strictly(body: bytes) -> ChatRequest | Problem:
    """Read any body, also one of which nothing is wrong."""
    found = read_object(body)
    if isinstance(found, Problem):
        return found
    asked = _strip(found)
    if isinstance(asked, Problem):
        return asked
    try:
        return _request(ChatBody.model_validate(asked))
    except ValidationError as error:
        return _problem(error)


def _strip(found: Body) -> Body | Problem:
    """Take out what changes nothing; refuse what is not offered."""
    asked: Body = {}
    for name, value in found.items():
        if name in NEUTRAL:
            if not _neutral(value, NEUTRAL[name]):
                return unsupported(name)
        elif name not in HARMLESS:
            asked[name] = value
    return asked


def _neutral(value: object, allowed: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)


def unsupported(param: str) -> Problem:
    """Give the 400 for a parameter that no model here offers."""
    return invalid(f"{param} is not supported by the models of this cluster", param, Code.UNSUPPORTED.value)


def _request(body: ChatBody) -> ChatRequest | Problem:
    messages: list[Message] = []
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            return invalid(f"a {message.role} message needs content", f"messages[{index}].content")
        messages.append(Message(message.role, _text(message.content), message.name or ""))
    params = _params(body)
    size = sum(_utf8_length(message.content) + TEMPLATE_BYTES for message in messages)
    options = body.stream_options
    if options is not None and not body.stream:
        return invalid("stream_options is only possible with stream: true", "stream_options")
    return ChatRequest(
        Demand(body.model, size, None, params.max_tokens, params.n),
        tuple(messages),
        params,
        bool(body.stream),
        options is not None and bool(options.include_usage),
    )


def _params(body: ChatBody) -> Params:
    stop = body.stop
    return Params(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        n=body.n or 1,
    )


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class _Error(msgspec.Struct, frozen=True, gc=False):
    type: str
    loc: tuple[str | int, ...]
    msg: str


def _problem(error: ValidationError) -> Problem:
    found = [
        _Error(one["type"], one["loc"], one["msg"])
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    later = next((one for one in found if _later(one)), None)
    if later is not None:
        return unsupported(_path(later.loc))
    first = found[0]
    if first.type == "extra_forbidden":
        return _unknown(first.loc)
    return invalid(f"{_path(first.loc)}: {first.msg}", _path(first.loc))


def _later(error: _Error) -> bool:
    return error.loc[0] == "messages" and error.loc[-1] in _LATER_IN_MESSAGES and error.type != "missing"


def _unknown(loc: tuple[str | int, ...]) -> Problem:
    name = str(loc[-1])[:64]
    near = difflib.get_close_matches(name, _KNOWN, 1, 0.7) if len(loc) == 1 else []
    hint = f": did you mean {near[0]}?" if near else ""
    return invalid(f"unknown field {name!r}{hint}", _path(loc)[:128])


def _path(loc: tuple[str | int, ...]) -> str:
    """Write `messages[0].content[1].text` without the names of union branches."""
    path = ""
    for index, step in enumerate(loc):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (step in _TAGS and index > 0 and loc[index - 1] in ("content", "stop")):
            path += f".{step}" if path else step
    return path
