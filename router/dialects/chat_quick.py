"""The common chat body, read in C: plain texts, the usual parameters, nothing unusual.

`router/dialects/chat.py` defines what a body means; this only recognises bodies of which nothing is to be said, three
times faster. None means: let the other decide. A property test holds the two together: what is understood here is
understood there, to the same request.

A key that stands twice must be refused, and msgspec takes the last. But each key is followed by a colon, so where no
more colons follow a quote than keys were read, no key stands twice (a text that holds `":` only costs the short cut).
A null is read as a key that is not there, and so leaves a colon too many.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from router.dialects.demand import demand_of
from router.dialects.limits import LONGEST_NAME, MOST_CHOICES, MOST_MESSAGES, MOST_TOKENS, MOST_TOP_K, PLAIN_ROLES
from router.placement import Demand
from wire.frames import Message, Params

LONGEST = 64 * 1024
"""Bytes of a body that may be plain."""
_KEY = re.compile(rb'"\s*:')
_INT64 = 2**63 - 1

Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str
    content: str


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    model: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64)] | None = None
    stream_options: _StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None


_ROLES = frozenset(PLAIN_ROLES)
_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes) -> tuple[Demand, tuple[Message, ...], Params, bool, bool] | None:
    """Understand a plain body: demand, messages, params, whether it is a stream and whether its usage is wanted. None
    when there might be something to say about it."""
    if len(body) > LONGEST or b"\\u" in body:
        return None
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    options, most = found.stream_options, found.max_completion_tokens
    optional = (found.stream, found.max_tokens, most, found.n, found.temperature, found.top_p, found.seed, found.top_k,
                found.min_p, found.presence_penalty, found.frequency_penalty, found.repetition_penalty)  # fmt: skip
    keys = 2 + 2 * len(found.messages) + len(optional) - optional.count(None) + 2 * (options is not None)
    if len(_KEY.findall(body)) != keys or any(one.role not in _ROLES for one in found.messages):
        return None
    stream = found.stream is True
    if options is not None and not stream:
        return None
    messages = tuple([Message(one.role, one.content) for one in found.messages])
    top_k = found.top_k
    params = Params(
        found.max_tokens if most is None else most, found.temperature, found.top_p, found.seed, (), found.n or 1,
        None if top_k is None else max(0, top_k), found.min_p, found.presence_penalty or 0.0,
        found.frequency_penalty or 0.0,
        1.0 if found.repetition_penalty is None else found.repetition_penalty,
    )  # fmt: skip
    demand = demand_of(found.model, messages, params)
    return demand, messages, params, stream, options is not None and options.include_usage
