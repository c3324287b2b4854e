"""Responses with a finished video file, complete or one range (RFC 9110 §14), in chunks as the client reads.

A request for several ranges gets the complete file, which the standard allows. Otherwise one request could ask for the
file a thousand times. A client that stops reading loses its connection and delays no other client.
"""

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

from coordinator.video.artifacts import get_media_type
from coordinator.video.state.jobs import StoredFile
from router.errors import Header, Problem
from router.http.exchange import Exchange

CHUNK_BYTES = 256 * 1024
"""Maximum bytes of the file that are read and sent in one piece."""
CHUNK_TIMEOUT_SECONDS = 60.0
"""Maximum seconds until the client has accepted a chunk. After that, the connection ends."""
_RANGE = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Range of a file, from byte `first` to byte `last`, both included."""

    first: int
    last: int


def parse_range(header: str, size: int) -> ByteRange | Problem | None:
    """Parse a Range header for a file of `size` bytes.

    Return one range, None for the complete file, or a 416 problem for a range outside of the file. An unsupported
    header means the complete file.
    """
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        wanted = min(int(match[2]), size)
        return ByteRange(size - wanted, size - 1) if wanted else _build_range_problem(size)
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if match[2] and int(match[2]) < first:
        return None
    return ByteRange(first, last) if first < size else _build_range_problem(size)


def _build_range_problem(size: int) -> Problem:
    return Problem(416, "range_not_satisfiable", f"the file has {size} bytes")


async def send_file(exchange: Exchange, path: Path, stored: StoredFile) -> None:
    """Send the file at `path`, or the range that a GET request asks for. For HEAD, send only headers.

    The headers for HEAD are those of the complete file, because only GET has ranges (RFC 9110, 14.2). A range outside
    of the file is answered with 416. Raise `OSError` if the file cannot be opened (nothing has then been sent), or is
    shorter than in `stored`. Raise `TimeoutError` if the client stops reading.
    """
    descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        await _send_open_file(exchange, descriptor, stored)
    finally:
        os.close(descriptor)


async def _send_open_file(exchange: Exchange, descriptor: int, stored: StoredFile) -> None:
    tag = f'"{stored.sha256[:32]}"'
    headers: list[Header] = [(b"accept-ranges", b"bytes"), (b"etag", tag.encode())]
    span = parse_range((exchange.get_header(b"range") or b"").decode("latin-1"), stored.size)
    condition = exchange.get_header(b"if-range")
    if exchange.method == "HEAD" or (condition is not None and condition.decode("latin-1").strip() != tag):
        span = None
    if isinstance(span, Problem):
        await exchange.refuse(span, [*headers, (b"content-range", b"bytes */%d" % stored.size)])
        return
    status, piece = (200, ByteRange(0, stored.size - 1)) if span is None else (206, span)
    if span is not None:
        headers.append((b"content-range", b"bytes %d-%d/%d" % (span.first, span.last, stored.size)))
    headers += [
        (b"content-type", get_media_type(stored.name).encode()),
        (b"cache-control", b"private"),
        (b"content-length", b"%d" % (piece.last - piece.first + 1)),
    ]
    exchange.begin(status)
    await exchange.send(
        {"type": "http.response.start", "status": status, "headers": headers + exchange.build_id_headers()}
    )
    await _send_chunks(exchange, descriptor, ByteRange(0, -1) if exchange.method == "HEAD" else piece)


async def _send_chunks(exchange: Exchange, descriptor: int, span: ByteRange) -> None:
    at = span.first
    while at <= span.last:
        chunk = await asyncio.to_thread(os.pread, descriptor, min(CHUNK_BYTES, span.last + 1 - at), at)
        if not chunk:
            raise OSError(f"the file ends at {at}")  # the connection is cut: its length was promised
        at += len(chunk)
        async with asyncio.timeout(CHUNK_TIMEOUT_SECONDS):
            await exchange.send({"type": "http.response.body", "body": chunk, "more_body": at <= span.last})
    if span.last < span.first:
        await exchange.send({"type": "http.response.body", "body": b""})
