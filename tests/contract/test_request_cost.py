"""The work of a plain request and of a streamed token, in calls of our functions, whose number does not depend on the
load.

A limit is a tenth above the count of the day on which it was set. Raise it only with a reason in decision 0015. Each
count has its own process: before CPython 3.13 a call under `sys.setprofile` never returns if an exception for another
thread was withdrawn in the process.
"""

import asyncio
import json
import subprocess
import sys
from types import FrameType
from urllib.parse import urlsplit

from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode
from tests.support.processes import ROOT

PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("coordinator", "router", "wire"))
ROUNDS = 12


class CallCounter:
    """Counter of the calls of functions of the coordinator's packages in this thread, while it is active."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> "CallCounter":
        self.calls = 0
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGES)


async def count_calls(tokens: int, *, stream: bool) -> int:
    """Return the fewest calls that a request for some tokens took in a few rounds, on a connection in use."""
    cluster = LoopbackCluster(LoopbackNode("one"), LoopbackNode("two"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": tokens}
    content = json.dumps(body | ({"stream": True} if stream else {})).encode()
    async with cluster.serving() as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(base).port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {cluster.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        counts: list[int] = []
        counter = CallCounter()
        for _ in range(ROUNDS):
            with counter:
                writer.write(head.encode() + content)
                answer = await reader.readuntil(b"\r\n\r\n")
                if stream:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r")[0]))
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            counts.append(counter.calls)
        writer.close()
        await writer.wait_closed()
    return min(counts)


def run_count(tokens: int, *, stream: bool) -> int:
    """Return `count_calls` of a new process."""
    run = f"print(asyncio.run(count_calls({tokens}, stream={stream})))"
    call = f"import asyncio; from {__name__} import count_calls; {run}"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_plain_request_takes_few_calls() -> None:
    assert run_count(4, stream=False) <= 244


def test_a_streamed_token_takes_few_calls() -> None:
    assert (run_count(6, stream=True) - run_count(2, stream=True)) / 4 <= 17.6
