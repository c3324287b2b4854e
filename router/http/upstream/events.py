"""Server-sent events of an upstream: a parser with limits, and functions that read one event. Does no I/O.

The bytes of an upstream are not trusted. `UpstreamStreamError` is raised for a line or an event of more than
`MAX_EVENT_BYTES`. It is also raised for data that is not a JSON object, an error, and an answer without a list of
choices.
"""

from typing import Annotated, Any, cast

import msgspec

MAX_EVENT_BYTES = 1024 * 1024
"""Maximum bytes of an event, and of a line."""
DONE = b"[DONE]"
"""Data of the event that ends a stream."""


Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class UpstreamStreamError(ValueError):
    """Raised if an answer does not have the format of OpenAI's API. The message describes the fault."""


class EventReader:
    """Parser of the bytes of one stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that `received` completes, in order. The data of a comment is empty.

        Raise `UpstreamStreamError` for an event or a line of more than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            data = self._read_line(line.removesuffix(b"\r"))
            if data is not None:
                events.append(data)
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise UpstreamStreamError(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _read_line(self, line: bytes) -> bytes | None:
        """Parse one line. Return the data of the event that it ends, empty data for a comment, else None.

        Raise `UpstreamStreamError` if the line and the data of its event before it exceed `MAX_EVENT_BYTES`.
        """
        if self._size + len(line) > MAX_EVENT_BYTES:
            raise UpstreamStreamError(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
        if line.startswith(b":"):
            return b""
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        if line or not self._data:
            return None
        data = b"\n".join(self._data)
        self._data, self._size = [], 0
        return data


class Usage(msgspec.Struct, frozen=True):
    """Token counts of an answer."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raise `UpstreamStreamError` if `data` is anything else."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamStreamError("sent text that is not JSON") from None
    if not isinstance(parsed, dict):
        raise UpstreamStreamError("sent JSON that is not an object")
    return cast("dict[str, Any]", parsed)


def check_answer(answer: dict[str, Any]) -> list[Any]:
    """Return the choices of an answer or a chunk, which may be empty.

    Raise `UpstreamStreamError` if it has an error or no list of choices.
    """
    if answer.get("error"):
        raise UpstreamStreamError("sent an error in place of an answer")
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise UpstreamStreamError("sent an answer without choices")
    return cast("list[Any]", choices)


def read_usage(answer: dict[str, Any]) -> Usage | None:
    """Return the token counts of an answer or a chunk; None if it has no valid counts."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = cast("dict[str, Any]", usage)
    details = counts.get("prompt_tokens_details")
    cached = cast("dict[str, Any]", details).get("cached_tokens") if isinstance(details, dict) else 0
    fields = {
        "prompt_tokens": counts.get("prompt_tokens"),
        "completion_tokens": counts.get("completion_tokens"),
        "cached_tokens": cached or 0,
    }
    try:
        return msgspec.convert(fields, Usage)
    except msgspec.ValidationError:
        return None


def is_finished(choices: list[Any]) -> bool:
    """Return whether any of the choices of a chunk ends with it."""
    return any(isinstance(choice, dict) and cast("dict[str, Any]", choice).get("finish_reason") for choice in choices)
