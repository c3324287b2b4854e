"""The common chat body, read in C: plain texts, the usual parameters, nothing unusual.

`router/dialects/chat.py` defines what a body means; this only recognises bodies of which nothing is to be said, three
times faster. None means: let the other decide. A property test holds the two together: what is understood here is
understood there, to the same request.

A key that stands twice must be refused, and msgspec takes the last. But each key is followed by a colon, so where no
more colons follow a quote than keys were read, no key stands twice (a text that holds `":` only costs the short cut).
"""

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.dialects.limits import LONGEST_NAME, MOST_CHOICES, MOST_MESSAGES, MOST_TOKENS, ROLES, TEMPLATE_BYTES
from router.placement import Demand
from wire.frames import Message, Params

LONGEST = 64 * 1024
"""Bytes of a body that may be plain."""
_KEY = re.compile(rb'"\s*:')
_INT64 = 2**63 - 1
T = TypeVar("T")

Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class _Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str
    content: str


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    model: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool | UnsetType = UNSET
    max_tokens: Tokens | UnsetType = UNSET
    max_completion_tokens: Tokens | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64)] | UnsetType = UNSET


_ROLES = frozenset(ROLES)
_decoder = msgspec.json.Decoder(_Body)


def read(body: bytes) -> tuple[Demand, tuple[Message, ...], Params, bool] | None:
    """Understand a plain body; None when there might be something to say about it."""
    if len(body) > LONGEST or b"\\u" in body:
        return None
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    optional = (found.stream, found.max_tokens, found.max_completion_tokens, found.n, found.temperature, found.top_p,
                found.seed)  # fmt: skip
    keys = 2 + 2 * len(found.messages) + sum(one is not UNSET for one in optional)
    if len(_KEY.findall(body)) != keys or any(one.role not in _ROLES for one in found.messages):
        return None
    messages = tuple([Message(one.role, one.content) for one in found.messages])
    most = found.max_tokens if found.max_completion_tokens is UNSET else found.max_completion_tokens
    params = Params(_or_none(most), _or_none(found.temperature), _or_none(found.top_p), _or_none(found.seed), (),
                    1 if found.n is UNSET else found.n)  # fmt: skip
    size = sum(
        (len(one.content) if one.content.isascii() else len(one.content.encode())) + TEMPLATE_BYTES for one in messages
    )
    demand = Demand(found.model, size, None, params.max_tokens, params.n)
    return demand, messages, params, found.stream is True


def _or_none(value: T | UnsetType) -> T | None:
    return None if value is UNSET else value
