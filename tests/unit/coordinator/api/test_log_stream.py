"""Text of a log as a response: complete, or with the reason why it is not."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import pytest
from fastapi.responses import StreamingResponse

from coordinator.api.errors import ProblemError
from coordinator.api.log_stream import stream_log


async def read(*pieces: bytes, error: Exception | None) -> list[bytes]:
    """Return the lines of the response to a log of these pieces, which ends with the error."""

    async def iterate() -> AsyncGenerator[bytes]:
        for piece in pieces:
            yield piece
        if error is not None:
            raise error

    response = await stream_log(iterate())
    assert isinstance(response, StreamingResponse)
    return b"".join([piece async for piece in cast("AsyncIterator[bytes]", response.body_iterator)]).splitlines()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LookupError("the node is not linked"), "the node is not linked"),
        (TimeoutError(), "the node did not answer"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
@pytest.mark.parametrize("last", [b"two\n", b"two"])
async def test_a_log_that_breaks_off_ends_with_the_reason(last: bytes, error: Exception, reason: str):
    *lines, end = await read(b"one\n", last, error=error)
    assert lines == [b"one", b"two"]
    assert {"event": "log is incomplete", "reason": reason, "level": "error"}.items() <= json.loads(end).items()


async def test_a_log_that_is_complete_has_no_other_line():
    assert await read(b"one\n", b"two", error=None) == [b"one", b"two"]


async def test_an_error_before_the_first_piece_is_a_refusal():
    for error, message in (
        (TimeoutError(), "the node did not answer"),
        (OSError(5, "Input/output error"), "the log cannot be read: Input/output error"),
    ):
        with pytest.raises(ProblemError) as refused:
            await read(error=error)
        assert (refused.value.problem.status, refused.value.problem.message) == (503, message)
