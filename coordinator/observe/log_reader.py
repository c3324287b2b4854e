"""The coordinator's own log, read from its file: the newest part, and what is added to it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

PIECE = 64 * 1024
LONGEST_LINE = 1024 * 1024
"""Bytes in which the first line that is cut must end."""


async def read(file: Path, size: int, *, every: float | None = None) -> AsyncGenerator[bytes]:
    """Yield the newest `size` bytes of a file; with `every` also what is added, looking again so many seconds later.
    A file that has become shorter began anew. OSError when it cannot be read."""
    offset, end = await asyncio.to_thread(_newest, file, size)
    while True:
        while offset < end:
            piece = await asyncio.to_thread(_piece, file, offset, min(PIECE, end - offset))
            if not piece:
                break
            offset += len(piece)
            yield piece
        if every is None:
            return
        await asyncio.sleep(every)
        end = (await asyncio.to_thread(file.stat)).st_size
        offset = 0 if end < offset else offset


def _newest(file: Path, size: int) -> tuple[int, int]:
    """Return where the newest `size` bytes begin and end, from the first whole line on where there is one."""
    end = file.stat().st_size
    begin = end - size
    if begin <= 0:
        return 0, end
    with file.open("rb") as opened:
        opened.seek(begin - 1)
        line = opened.readline(LONGEST_LINE)
        start = opened.tell()
        return start if line.endswith(b"\n") and start < end else begin, end


def _piece(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(size)
