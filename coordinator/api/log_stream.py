"""Log responses: text that is streamed as it arrives."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response, StreamingResponse

from coordinator.api.auth import end_with_key
from coordinator.api.errors import ProblemError
from router.errors import Problem

MAX_LOG_BYTES = 2**30
"""Maximum of the parameter `bytes` of a log route."""
FOLLOW_INTERVAL_SECONDS = 1.0
"""Seconds between two reads of a followed log."""
NO_ANSWER = "the node did not answer"
LogBytes = Annotated[int, Query(alias="bytes", ge=1, le=MAX_LOG_BYTES)]
"""Query parameter `bytes`: number of bytes from the end of a log."""


def _render_end(reason: str) -> bytes:
    """Return a line in the format of the logs about the early end of a log."""
    now = datetime.now(UTC).isoformat()
    line = {"event": "log is incomplete", "reason": reason, "level": "error", "timestamp": now}
    return json.dumps(line).encode() + b"\n"


async def stream_log(pieces: AsyncGenerator[bytes]) -> Response:
    """Return a response that streams the text of a log. `pieces` are the parts of the text in UTF-8.

    Wait for the first piece. Raise `ProblemError` (503) if reading it raises `LookupError` or `OSError`. If a later
    piece raises one, the text ends with a log line that has the reason. If the API key becomes invalid, the text ends
    at the next piece.
    """
    pieces = end_with_key(pieces)
    try:
        first = await anext(pieces, b"")
    except (LookupError, TimeoutError) as error:
        raise ProblemError(Problem(503, "node_unreachable", str(error) or NO_ANSWER)) from None
    except OSError as error:
        raise ProblemError(Problem(503, "no_log", f"the log cannot be read: {error.strerror}")) from None

    async def body() -> AsyncIterator[bytes]:
        yield first
        last = first
        try:
            async for piece in pieces:
                last = piece
                yield piece
        except (LookupError, TimeoutError, OSError) as error:
            separator = b"" if last.endswith(b"\n") else b"\n"
            yield separator + _render_end(getattr(error, "strerror", None) or str(error) or NO_ANSWER)

    return StreamingResponse(body(), media_type="text/plain; charset=utf-8")
