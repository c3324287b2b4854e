"""Reader of the coordinator's log file: its newest part, and lines that are appended later."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 64 * 1024
"""Maximum bytes of one piece that `read_log` yields."""
MAX_LINE_BYTES = 1024 * 1024
"""Maximum bytes that are searched for the end of a truncated first line."""


async def read_log(file: Path, max_bytes: int, *, interval_seconds: float | None = None) -> AsyncGenerator[bytes]:
    """Yield the newest `max_bytes` bytes of a log file, from the first complete line.

    With `interval_seconds`, continue with appended bytes, polled at this interval, until the caller closes the
    iterator. A rotated file is read to its end, then the new file from its start. A file that has become shorter is
    read from its start. Raise `OSError` if the file cannot be read.
    """
    opened = await asyncio.to_thread(file.open, "rb")
    try:
        offset, end = await asyncio.to_thread(_find_newest_range, opened, max_bytes)
        is_replaced = False
        while True:
            while offset < end:
                piece = await asyncio.to_thread(_read_piece, opened, offset, min(CHUNK_BYTES, end - offset))
                if not piece:
                    break
                offset += len(piece)
                yield piece
            if interval_seconds is None:
                return
            if is_replaced:
                opened.close()
                opened, offset = await asyncio.to_thread(file.open, "rb"), 0
            else:
                await asyncio.sleep(interval_seconds)
            end, is_replaced = await asyncio.to_thread(_measure, opened, file)
            offset = 0 if end < offset else offset
    finally:
        opened.close()


def _measure(opened: BinaryIO, file: Path) -> tuple[int, bool]:
    """Return the size of an open log, and whether another file has its name by now. Such a log gets no more additions.

    During a rotation no file has the name.
    """
    try:
        is_replaced = not os.path.samestat(file.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        is_replaced = False
    return os.fstat(opened.fileno()).st_size, is_replaced


def _find_newest_range(opened: BinaryIO, max_bytes: int) -> tuple[int, int]:
    """Return the start and end of the newest `max_bytes` bytes, from the first complete line if there is one."""
    end = opened.seek(0, os.SEEK_END)
    begin = end - max_bytes
    if begin <= 0:
        return 0, end
    opened.seek(begin - 1)
    line = opened.readline(MAX_LINE_BYTES)
    start = opened.tell()
    return start if line.endswith(b"\n") and start < end else begin, end


def _read_piece(opened: BinaryIO, offset: int, size: int) -> bytes:
    return os.pread(opened.fileno(), size, offset)
