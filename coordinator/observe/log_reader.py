"""Reader of the coordinator's log file: its newest part and its additions."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

CHUNK_BYTES = 64 * 1024
"""Maximum bytes of a yielded piece."""
MAX_LINE_BYTES = 1024 * 1024
"""Maximum bytes that are searched for the end of a truncated first line."""


async def read_log(file: Path, max_bytes: int, *, interval_seconds: float | None = None) -> AsyncGenerator[bytes]:
    """Yield the newest `max_bytes` bytes of a log file, from the first complete line.

    With `interval_seconds`, continue with additions to the file, polled at this interval. A file that has become
    shorter is read from its start. Raise `OSError` if the file cannot be read.
    """
    offset, end = await asyncio.to_thread(_find_newest_range, file, max_bytes)
    while True:
        while offset < end:
            piece = await asyncio.to_thread(_read_piece, file, offset, min(CHUNK_BYTES, end - offset))
            if not piece:
                break
            offset += len(piece)
            yield piece
        if interval_seconds is None:
            return
        await asyncio.sleep(interval_seconds)
        end = (await asyncio.to_thread(file.stat)).st_size
        offset = 0 if end < offset else offset


def _find_newest_range(file: Path, max_bytes: int) -> tuple[int, int]:
    """Return the start and end of the newest `max_bytes` bytes, from the first complete line if there is one."""
    end = file.stat().st_size
    begin = end - max_bytes
    if begin <= 0:
        return 0, end
    with file.open("rb") as opened:
        opened.seek(begin - 1)
        line = opened.readline(MAX_LINE_BYTES)
        start = opened.tell()
        return start if line.endswith(b"\n") and start < end else begin, end


def _read_piece(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(size)
