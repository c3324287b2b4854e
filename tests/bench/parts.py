"""Runs on the coordinator's host: gaps between tokens alone, then during the download of a long log over the same
link."""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

from tests.bench.router import load

SIZE = 100_000_000


async def fetch(base: str, key: str) -> tuple[int, float]:
    """Fetch the log of the node; return bytes and seconds."""
    parts = urlsplit(base)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    writer.write(
        f"GET /api/v1/nodes/far/logs?bytes={SIZE} HTTP/1.1\r\nhost: {parts.hostname}:{parts.port}\r\n"
        f"authorization: Bearer {key}\r\nconnection: close\r\n\r\n".encode()
    )
    began, size = time.monotonic(), 0
    while piece := await reader.read(2**20):
        size += len(piece)
    writer.close()
    return size, time.monotonic() - began


def p99(gaps: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(gaps)[int(len(gaps) * 0.99)]


async def main(base: str, key: str, secret: str) -> None:
    alone = await load.streams(base, key, 16, 300)
    (size, seconds), beside = await asyncio.gather(fetch(base, secret), load.streams(base, key, 16, 400))
    print(json.dumps({"alone": p99(alone.gaps), "beside": p99(beside.gaps), "bytes": size, "seconds": seconds}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
