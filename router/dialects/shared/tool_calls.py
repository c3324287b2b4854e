"""Tool calls and log probabilities of an answer in OpenAI's shape. A node is not trusted: what it says is checked,
bounded and made finite here, and what is none is left out."""

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from router.admission.request_limits import LONGEST_NAME
from router.worker_thread import encoded_list
from wire.frames import Logprob

MOST_CALLS = 1024
"""Tool calls of one choice that are passed on."""
LONGEST_CALL = 1024 * 1024
"""Characters of one call, as the node writes it."""
LONGEST_TOKEN = 1024
"""Bytes of a token; no real vocabulary comes near."""
UNLIKELY = -9999.0
"""OpenAI's sign for a probability that cannot be told."""

_Named = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]


class Call(msgspec.Struct, gc=False):
    """One call. The node's `index` is not read: a call's place is that in which it came, so none repeats or misses."""

    id: _Named
    name: _Named
    arguments: str


_calls = msgspec.json.Decoder(Call)


def call_of(piece: str) -> Call | None:
    """Read a piece of the channel TOOL_CALL; None when it is none."""
    if len(piece) > LONGEST_CALL:
        return None
    try:
        return _calls.decode(piece)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


class _Alternative(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class _Token(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_Alternative]


class Logprobs(msgspec.Struct, gc=False):
    """`choices[].logprobs`; `content` is a list of tokens, encoded in slices."""

    content: msgspec.Raw
    refusal: None = None


def logprobs_of(logprobs: Iterable[Logprob], top: int) -> Logprobs:
    """Give the shape, with at most `top` alternatives beside each token. A token may be a part of a character: `bytes`
    is exact, `token` what can be shown of it."""
    return Logprobs(encoded_list(
        _Token(*shown(one.token, one.logprob), [_Alternative(*shown(*each)) for each in one.top[:top]])
        for one in logprobs
    ))  # fmt: skip


def shown(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """Give what can be shown of a token, a finite log probability, and the token's bytes."""
    kept = token[:LONGEST_TOKEN]
    return kept.decode("utf-8", "replace"), logprob if math.isfinite(logprob) else UNLIKELY, list(kept)


def finish_reason(reason: str, calls: int) -> str:
    """Give a reason that clients know, and `tool_calls` only where there are some, but then for every answer that ended
    by itself: also for one that a stop string, or the limit of one call, ended."""
    if reason == "length":
        return reason
    return "tool_calls" if calls else "stop"
