"""A complete coordinator in this process with its cluster port open, and peers that send it any frame or bytes.

`Port.undisturbed` keeps a streamed chat running on one honest node while other peers misbehave. At the end it checks
that every token arrived over the same link.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from msgspec.structs import replace
from structlog.testing import capture_logs

from coordinator.joining.rate_limit import RateLimit
from coordinator.state.rows import MemberRow
from coordinator.video.settings import VideoSettings
from node.agent.identity import (
    NodeIdentity,
    create_authority_context,
    create_client_context,
    new_request,
    store_identity,
)
from tests.support.cluster.application import Application, application
from tests.support.cluster.enrolment import HARDWARE
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.certificate import read_certificate
from wire.codec import Splitter, decode, encode
from wire.frames import TAGS, Admitted, Delta, Deltas, Denied, Finished, Frame, Generate, Hello, Report, Welcome
from wire.identity import PROTOCOL, NodeId
from wire.report import EngineState

STEP = 0.02
"""Seconds between two tokens of the honest node."""
F = TypeVar("F", bound=Frame)


class Ended(Exception):
    """The coordinator closed the connection."""


@dataclass
class Line:
    """One connection to the cluster port."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    splitter: Splitter = field(default_factory=Splitter)
    frames: list[Frame] = field(default_factory=list)

    def send(self, *words: Frame | bytes) -> None:
        for word in words:
            self.writer.write(word if isinstance(word, bytes) else encode(word))

    async def next(self, seconds: float = 60.0) -> Frame:
        """Return the next frame; raise Ended at the end of the connection."""
        async with asyncio.timeout(seconds):
            while not self.frames:
                try:
                    data = await self.reader.read(65536)
                except OSError:
                    data = b""
                if not data:
                    raise Ended
                self.frames += [decode(tag, body) for tag, body in self.splitter.feed(data)]
        return self.frames.pop(0)

    async def until(self, kind: type[F], seconds: float = 60.0) -> F:
        """Return the next frame of this kind, and discard the frames before it."""
        async with asyncio.timeout(seconds):
            while not isinstance(frame := await self.next(seconds), kind):
                pass
        return frame

    async def ended(self, seconds: float = 60.0) -> list[Frame]:
        """Wait for the end of the connection and return the frames before it."""
        before = list[Frame]()
        async with asyncio.timeout(seconds):
            with suppress(Ended):
                while True:
                    before.append(await self.next(seconds))
        return before

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Port:
    """The coordinator, its log entries and its peers."""

    application: Application
    folder: Path
    number: int
    logs: list[Any]
    made: int = 0
    lines: list[Line] = field(default_factory=list)

    def member(self, name: str) -> NodeIdentity:
        """Make a node that has joined, and return its identity."""
        authority, store = self.application.authority, self.application.store
        self.made += 1
        node, request = NodeId(f"node-{self.made}"), new_request(name)
        certificate = authority.sign_request(request.csr, node, name)
        row = MemberRow(node, name, f"m{self.made}", HARDWARE, read_certificate(certificate).serial, time.time())
        store.members.put(row)
        self.application.registry.add_member(row)
        return store_identity(self.folder / name, request, certificate, authority.cluster, authority.ca, row.machine)

    async def dial(self, who: NodeIdentity | ssl.SSLContext | None = None) -> Line:
        """Open a connection, without a certificate unless one is given."""
        if who is None:
            context = create_authority_context(self.application.authority.ca)
        else:
            context = create_client_context(who) if isinstance(who, NodeIdentity) else who
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number, ssl=context)
        line = Line(reader, writer)
        self.lines.append(line)
        return line

    async def link(self, who: NodeIdentity, report: Report | None = None, **changes: Any) -> Line:
        """Open a node's link up to Welcome and the first report."""
        line = await self.dial(who)
        line.send(hello(who, **changes))
        await line.until(Welcome)
        line.send(report or a_report())
        return line

    def said(self, words: str) -> bool:
        """Return whether a log event has these words in its reason."""
        return any(words in str(entry.get("reason", "")) for entry in self.logs)

    async def until(self, true: Any, seconds: float = 60.0) -> None:
        """Wait until `true` returns a true value. Raise TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while not true():  # noqa: ASYNC110  the coordinator has no event for tests
                await asyncio.sleep(0.01)

    def state(self, who: NodeIdentity) -> str:
        return self.application.registry.pool.members[who.node].state.value

    async def get(self, path: str) -> Any:
        """GET from the API as an administrator."""
        async with self.client("admin") as client:
            answer = await client.get(path)
            answer.raise_for_status()
            return answer.json()

    def client(self, scope: str) -> httpx.AsyncClient:
        key = self.application.admin.create_key("test", [scope], None)["key"]
        return self.client_of(key)

    def client_of(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.application.app),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=60,
        )

    @asynccontextmanager
    async def undisturbed(self) -> AsyncGenerator[None]:
        """Keep a stream running on a node of its own. At the end the stream must be complete and its link the same."""
        honest = self.member("honest")
        line = await self.link(honest)
        await self.until(lambda: self.state(honest) == "ready")
        link = self.application.registry.pool.members[honest.node].link
        enough, sent = asyncio.Event(), asyncio.Queue[int]()
        serving = asyncio.create_task(_serve(line, enough, sent))
        async with self.client("infer") as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": True}))
            try:
                await asyncio.wait_for(sent.get(), 30)
                yield
                enough.set()
                answer = await asyncio.wait_for(asking, 20)
                count = await asyncio.wait_for(serving, 20)
            finally:
                asking.cancel()
                serving.cancel()
                await asyncio.gather(asking, serving, return_exceptions=True)
        texts = [f'"w{number}."' for number in range(count)]
        assert answer.text.count('"content":"w') == count
        assert all(text in answer.text for text in texts)
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert self.application.registry.pool.members[honest.node].link == link


async def _serve(line: Line, enough: asyncio.Event, sent: asyncio.Queue[int]) -> int:
    """Answer one request token by token until it is enough, with a report for every ping; return the number of
    tokens."""
    asked = await line.until(Generate)
    line.send(Admitted(asked.request, 3))
    number = 0
    while not enough.is_set():
        line.send(Deltas((Delta(asked.request, 0, (1,), ((0, f"w{number}."),)),)))
        if number % 20 == 0:
            line.send(a_report(number))
        number += 1
        sent.put_nowait(number)
        await asyncio.sleep(STEP)
    line.send(Finished(asked.request, ("stop",), 3, number))
    return number


def hello(who: NodeIdentity, **changes: Any) -> Hello:
    """Make the Hello of a node, with false values on request."""
    return replace(
        Hello(
            PROTOCOL,
            who.node,
            who.name,
            f"instance of {who.name}",
            who.machine,
            "0.1.0",
            HARDWARE,
            frames=tuple(TAGS),
        ),
        **changes,
    )


def a_report(sequence: int = 0, **changes: Any) -> Report:
    """Make an honest report, with false values on request."""
    return replace(Report(sequence, a_memory(), EngineState("loopback", "ready"), (a_model(),)), **changes)


def the_no(frames: list[Frame]) -> Denied:
    """Return the only Denied among these frames."""
    (denied,) = [frame for frame in frames if isinstance(frame, Denied)]
    return denied


@asynccontextmanager
async def opened(
    folder: Path, limit: RateLimit | None = None, video: VideoSettings | None = None, host: str = "127.0.0.1"
) -> AsyncGenerator[Port]:
    """Open the cluster port of a coordinator whose state is in `folder`, at the address `host`."""
    with capture_logs() as logs:
        async with application(folder / "state", limit, video=video) as made:
            number = await made.nodes.server.start(host, 0, made.authority.get_server_context())
            port = Port(made, folder, number, logs)
            try:
                yield port
            finally:
                for line in port.lines:
                    line.close()
                await made.nodes.server.close()
