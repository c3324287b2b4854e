"""Fast parser of common chat bodies: plain texts, function calls and their results, usual parameters.

`router/dialects/openai/chat.py` defines the meaning of a body. This module recognises certainly valid bodies several
times faster, and returns None for any other body. A property test compares both parsers: a body that is accepted here
gives the same request there.

A duplicate key must be refused, but msgspec uses its last value. Each key is followed by a colon. Within a string, a
quote before a colon has a backslash before it. If the number of colons after an unescaped quote equals the number of
parsed keys, no key is duplicate. A null at the top level counts as a missing key. The numbers then differ, and the
complete parser decides. `content: null` in a message with calls counts as a key.

Tools are the largest part of an agent's body, and are the same in each of its requests. They are therefore kept as
bytes, looked up in a cache, and removed from the text whose keys are counted.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import astuple

from router.admission.request_limits import (
    MAX_CALLS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOKENS,
    MAX_TOP_K,
    PLAIN_ROLES,
)
from router.dialects.shared.common_fields import MIN_TOP_P
from router.dialects.shared.strict_json import SURROGATE_ESCAPE
from router.dispatch.resource_demand import compute_demand
from router.placement.candidate import ResourceDemand
from router.profiles import PENALTIES
from wire.frames import GenerationParams, Message, ToolCall

MAX_BODY_BYTES = 64 * 1024
"""Maximum bytes of a body that this parser accepts."""
_WHITESPACE = b" \t\n\r"
_BEGINNING = 64
"""Number of bytes at the beginning of the tools' JSON that locate the tools in the body.

Quotes in the JSON are not escaped, so that no string in the body contains the same bytes.
"""
_INT64 = 2**63 - 1
_NO_PENALTIES = (None, None, None)
_NONE_GIVEN: frozenset[str] = frozenset()

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


Named = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


Request = TypeVar("Request")
Build = Callable[[ResourceDemand, tuple[Message, ...], GenerationParams, bool, bool, str, frozenset[str]], Request]
"""Constructor of a request from the first fields of `router.dialects.openai.chat.ChatRequest`, in their order."""


class _Function(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: Named
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: Named
    type: Literal["function"]
    function: _Function


class _Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str
    content: str | UnsetType | None = UNSET
    tool_calls: Annotated[list[_Call], Meta(min_length=1, max_length=MAX_CALLS)] | UnsetType = UNSET
    tool_call_id: Named | UnsetType = UNSET


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    model: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=MIN_TOP_P, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    stream_options: _StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    tool_choice: Literal["auto"] | UnsetType = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET


_ROLES = frozenset(PLAIN_ROLES)
_decoder = msgspec.json.Decoder(_Body)
_BODY_FIELDS = len(_Body.__struct_fields__)


def _count_keys(text: bytes) -> int:
    """Return the number of keys in a JSON text, including duplicates."""
    packed = text.translate(None, _WHITESPACE)  # two counts take a quarter of the time of a pattern
    return packed.count(b'":') - packed.count(b'\\":')


def _remove_part(body: bytes, part: bytes) -> bytes:
    """Return a body without its tools (`part`); the unchanged body if the tools are not at the first match."""
    at = body.find(part[:_BEGINNING])
    return body[:at] + body[at + len(part) :] if body.startswith(part, at) else body


def read(body: bytes, plain_tools: Callable[[bytes], str | None], build: Build[Request]) -> Request | None:
    """Parse a plain body, and return the request that `build` creates.

    Return None for every invalid body, and for a body about which only the complete parser can decide. `plain_tools`
    converts the JSON of tools to their text for the model. It returns None if that needs the complete parser.
    """
    if len(body) > MAX_BODY_BYTES:
        return None
    try:
        parsed = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    tools, rest = "", body
    if parsed.tools is not UNSET:
        raw = bytes(parsed.tools)
        text = plain_tools(raw)
        if text is None:
            return None
        tools, rest = text, _remove_part(body, raw)
    if parsed.parallel_tool_calls is False or (b"\\u" in rest and SURROGATE_ESCAPE.search(rest)):
        return None
    options, most, top_k = parsed.stream_options, parsed.max_completion_tokens, parsed.top_k
    penalties = parsed.presence_penalty, parsed.frequency_penalty, parsed.repetition_penalty
    presence, frequency, repetition = penalties
    values = astuple(parsed)
    keys = _BODY_FIELDS - values.count(None) - values.count(UNSET) + (options is not None)  # with that of the options
    messages: list[Message] = []
    for raw_message in parsed.messages:
        role, content = raw_message.role, raw_message.content
        if (
            raw_message.tool_calls is UNSET
            and raw_message.tool_call_id is UNSET
            and role in _ROLES
            and isinstance(content, str)
        ):
            messages.append(Message(role, content))
            keys += 2
            continue
        message = _convert_tool_message(raw_message)
        if message is None:
            return None
        messages.append(message)
        keys += 1 + (raw_message.content is not UNSET) + (raw_message.tool_call_id is not UNSET)
        if raw_message.tool_calls is not UNSET:
            keys += 1 + 5 * len(raw_message.tool_calls)
    stream = parsed.stream is True
    if _count_keys(rest) != keys or (options is not None and not stream):
        return None
    params = GenerationParams(
        parsed.max_tokens if most is None else most,
        parsed.temperature,
        parsed.top_p,
        parsed.seed,
        (),
        parsed.n or 1,
        None if top_k is None else max(0, top_k),
        parsed.min_p,
        presence or 0.0,
        frequency or 0.0,
        1.0 if repetition is None else repetition,
    )
    demand = compute_demand(parsed.model, messages, params, tools)
    include_usage = options is not None and options.include_usage
    given = _NONE_GIVEN if penalties == _NO_PENALTIES else _list_given_penalties(penalties)
    return build(demand, tuple(messages), params, stream, include_usage, tools, given)


def _list_given_penalties(penalties: tuple[float | None, ...]) -> frozenset[str]:
    """Return the names of the penalties that are not None. `penalties` has them in the order of `PENALTIES`."""
    return frozenset(name for name, value in zip(PENALTIES, penalties, strict=True) if value is not None)


def _convert_tool_message(message: _Message) -> Message | None:
    """Return the message of a frame for an assistant message with calls, or for a tool message with a string.

    Return None for any other message, and for a message that has a field of the other role.
    """
    role, content = message.role, message.content
    if role == "tool":
        if message.tool_call_id is UNSET or message.tool_calls is not UNSET or not isinstance(content, str):
            return None
        return Message("tool", content, tool_call_id=message.tool_call_id)
    if role != "assistant" or message.tool_call_id is not UNSET or message.tool_calls is UNSET:
        return None
    calls = tuple([ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls])
    return Message("assistant", content or "", tool_calls=calls)
