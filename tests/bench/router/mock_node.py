"""An HTTP node for the peers to route to: streams one event per step to every open stream, or answers at once.

`python -m tests.bench.router.mock_node STEP_MS APART_US KEEPS` prints its port and serves until its standard input
ends. The events of a step go to one request after the other, at least APART_US apart. A server with a thread or a
task for each request does the same. With 0 all go at one instant. The node sleeps between them: a real node is
another machine and does not use the cores of this one. With steps of 0 it answers at once, without streams.

It speaks HTTP/1.0 as mlx_lm.server does, which closes a connection after each answer. With KEEPS of 1 it speaks
HTTP/1.1 and keeps connections.
"""

import asyncio
import ctypes
import json
import sys
import time
from typing import Any, ClassVar

import uvloop

SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h, nanoseconds
STREAM = b"HTTP/1.%d 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n%s\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
EVENT = (
    '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"scripted-1","choices":[{"index":0,'
    '"delta":{"content":"%d "},"finish_reason":null}]}'
)
WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"scripted-1","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":%s},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":8,'
    b'"total_tokens":13}}'
)
ANSWER = WHOLE % json.dumps("word " * 8).encode()
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"scripted-1","choices":[{"index":0,'
    b'"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)


class Exchange(asyncio.Protocol):
    """One connection."""

    streams: ClassVar["set[Exchange]"] = set()
    answers: ClassVar["list[Exchange]"] = []
    at_once: ClassVar[bool] = False
    keeps: ClassVar[bool] = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""
        self.left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
            )
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.answer(head, rest[:length])

    def answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat"):
            self.whole(b'{"status":"ok","data":[],"model_path":"scripted-1"}')
            return
        asked = json.loads(body)
        if self.at_once:
            self.whole(ANSWER)
            return
        if not asked.get("stream"):
            self.left = asked_tokens(asked)
            self.answers.append(self)
            return
        self.left = asked_tokens(asked)
        self.transport.write(STREAM % (self.keeps, CHUNKED if self.keeps else b""))
        self.streams.add(self)

    def whole(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        head = b"HTTP/1.%d 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (self.keeps, len(body)) + body)
        self.over()

    def over(self) -> None:
        """Handle the end of an answer."""
        if not self.keeps:
            self.transport.close()

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self.keeps else data)

    def gave(self, event: bytes) -> bool:
        """Take a step; return False if there was nothing to send."""
        self.left -= 1
        if self in self.streams:
            self.chunk(event)
            if self.left == 0:
                self.streams.discard(self)
                self.chunk(LAST)
                if self.keeps:
                    self.transport.write(b"0\r\n\r\n")
                self.over()
            return True
        if self.left or self not in self.answers:
            return False
        self.answers.remove(self)
        self.whole(ANSWER)
        return True


def asked_tokens(asked: dict[str, int]) -> int:
    """Return the maximum tokens of a request, by default 8. sglang-router renames `max_tokens`."""
    return asked.get("max_tokens") or asked.get("max_completion_tokens") or 8


async def main(step: float, apart: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Exchange, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    if not step:
        Exchange.at_once = True
        await over.wait()
    due = loop.time()
    while not over.is_set():
        due = max(due + step, loop.time())
        await asyncio.sleep(due - loop.time())
        event = f"data: {EVENT % time.monotonic_ns()}\n\n".encode()
        given = time.monotonic()
        for exchange in (*Exchange.streams, *Exchange.answers):
            if not exchange.gave(event) or not apart:
                continue
            await asyncio.sleep(0)  # sends the written bytes
            time.sleep(max(0.0, given + apart - time.monotonic()))  # noqa: ASYNC251  the loop's timers count in milliseconds
            given = time.monotonic()


def sleep_exactly() -> None:
    """Make the kernel wake this process on time, not up to 50 us later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1000, 0, 0, 0)


if __name__ == "__main__":
    sleep_exactly()
    Exchange.keeps = sys.argv[3] == "1"
    uvloop.run(main(float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e6))
