"""Tool calls and log probabilities of an answer in OpenAI's format.

A node is not trusted. Its data is checked and limited here, numbers are made finite, and invalid data is omitted.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from router.admission.request_limits import MAX_NAME_CHARS
from router.worker_thread import encoded_list
from wire.bounds import MAX_CALL_BYTES
from wire.frames import Logprob

MAX_CALLS_SENT = 1024
"""Maximum tool calls of one choice that are sent to the client."""
MAX_TOKEN_BYTES = 1024
"""Maximum bytes of a token. Tokens of real vocabularies are much shorter."""
UNKNOWN_LOGPROB = -9999.0
"""Value for an unknown log probability, as in OpenAI's API."""

_Named = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class AnswerToolCall(msgspec.Struct, gc=False):
    """Tool call of an answer, as sent by an engine. `arguments` is JSON text.

    The `index` that the node sends is ignored, because calls are numbered in their order of arrival.
    """

    id: _Named
    name: _Named
    arguments: str


_calls = msgspec.json.Decoder(AnswerToolCall)


def parse_call(piece: str) -> AnswerToolCall | None:
    """Parse the text of a delta in the channel `TOOL_CALL`. Return None if it is invalid or too long."""
    if len(piece) > MAX_CALL_BYTES:
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
    """Field `choices[].logprobs` of an answer. `content` is the list of tokens as encoded JSON."""

    content: msgspec.Raw
    refusal: None = None


def convert_logprobs(logprobs: Iterable[Logprob], top: int) -> Logprobs:
    """Return log probabilities in OpenAI's format, with at most `top` alternatives for each token.

    A token may be a part of a character. `bytes` is then exact, and `token` is a printable form. Both are cut after
    `MAX_TOKEN_BYTES` bytes. A log probability that is not finite becomes `UNKNOWN_LOGPROB`.
    """
    return Logprobs(
        encoded_list(
            _Token(
                *render_token(logprob.token, logprob.logprob),
                [_Alternative(*render_token(*each)) for each in logprob.top[:top]],
            )
            for logprob in logprobs
        )
    )


def render_token(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """Return the text of a token, its log probability, and its bytes.

    Text and bytes are cut after `MAX_TOKEN_BYTES` bytes. Invalid UTF-8 becomes U+FFFD. A log probability that is not
    finite becomes `UNKNOWN_LOGPROB`.
    """
    shortened = token[:MAX_TOKEN_BYTES]
    return shortened.decode("utf-8", "replace"), logprob if math.isfinite(logprob) else UNKNOWN_LOGPROB, list(shortened)


def get_finish_reason(reason: str, calls: int) -> str:
    """Return OpenAI's finish reason for an engine's `reason` and the number of tool calls in the answer.

    The result is `tool_calls` for an answer with calls that was not cut by its length. A stop string or the limit of
    one call may have ended that answer.
    """
    if reason == "length":
        return reason
    return "tool_calls" if calls else "stop"
