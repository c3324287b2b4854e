"""The enrolment of a coordinator alone, on a real TLS socket: how the link server treats peers without a
certificate."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.joining.enrollment import EnrollmentConnection, EnrollmentContext, EnrollmentServer
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.joining.join_tokens import JoinTokens
from coordinator.joining.rate_limit import RateLimit
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.tls.cluster_ca import ClusterCa
from wire.codec import Splitter, decode, encode
from wire.frames import Frame
from wire.identity import NodeId, PeerIdentity
from wire.report import Hardware

HARDWARE = Hardware("M4 Max", 128 << 30, 16, "macOS 26", "3.13")


@dataclass
class Wall:
    """Unix time that a test moves."""

    now: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.now


@dataclass
class Door:
    """A running enrolment server and the requests that reached it."""

    authority: ClusterCa
    store: Database
    tokens: JoinTokens
    approvals: ApprovalQueue
    wall: Wall
    enrolment: EnrollmentServer
    address: str = ""
    joined: list[MemberRow] = field(default_factory=list)
    linked: dict[NodeId, str] = field(default_factory=dict)
    """Linked members and their addresses."""
    peers: list[PeerIdentity] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a condition that connections change."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(true)


@asynccontextmanager
async def opened(folder: Path, wall: Wall | None = None, limit: RateLimit | None = None) -> AsyncGenerator[Door, None]:
    """Run an enrolment server on a free port of 127.0.0.1, with its state in `folder`."""
    wall = wall or Wall()
    store = Database(folder)
    authority = ClusterCa(folder, wall)
    tokens, approvals = JoinTokens(store, authority.ca, wall), ApprovalQueue()
    joined: list[MemberRow] = []
    linked: dict[NodeId, str] = {}
    cluster = EnrollmentContext(
        "lab", authority, tokens, store, approvals, wall, joined.append, lambda one: linked.get(one, "")
    )
    enrolment = EnrollmentServer(cluster, limit or RateLimit(6000, 1000))
    door = Door(authority, store, tokens, approvals, wall, enrolment, joined=joined, linked=linked)
    server = await asyncio.start_server(
        lambda reader, writer: _serve(door, reader, writer), "127.0.0.1", 0, ssl=authority.get_server_context()
    )
    door.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield door
    finally:
        server.close()
        await server.wait_closed()
        store.close()


async def _serve(door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        peer = door.authority.identify_peer(writer.get_extra_info("ssl_object"))
        if peer:
            await _note(door, peer)
            writer.write(b"known")
            await writer.drain()
        else:
            await _enrol(door, reader, writer)
    except OSError:
        return
    finally:
        writer.close()


async def _note(door: Door, peer: PeerIdentity) -> None:
    async with door.changed:
        door.peers.append(peer)
        door.changed.notify_all()


async def _enrol(door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    decided = asyncio.Event()
    talk = door.enrolment.start_enrollment(writer.get_extra_info("peername")[0], time.monotonic(), decided.set)
    if not isinstance(talk, EnrollmentConnection):
        await _send(door, writer, [talk])
        return
    deciding = asyncio.create_task(decided.wait())
    reading = asyncio.create_task(reader.read(65536))
    try:
        while not talk.closed:
            patience = max(0.0, talk.deadline - time.monotonic())
            await asyncio.wait({deciding, reading}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                data = reading.result()
                if not data:
                    return
                await _send(door, writer, talk.feed(data, time.monotonic()))
                reading = asyncio.create_task(reader.read(65536))
            else:
                await _send(door, writer, talk.poll(time.monotonic()))
    finally:
        deciding.cancel()
        reading.cancel()
        talk.withdraw()


async def _send(door: Door, writer: asyncio.StreamWriter, frames: list[Frame]) -> None:
    await door.store.flush()
    writer.write(b"".join(encode(frame) for frame in frames))
    await writer.drain()
    async with door.changed:
        door.changed.notify_all()


async def said(door: Door, *words: Frame | bytes, answers: int | None = None) -> list[Frame]:
    """Connect without a certificate, send frames or raw bytes, and return the frames that came back.

    Stop after `answers` frames; by default when the server closes the connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context)
    splitter, frames = Splitter(), list[Frame]()
    try:
        for word in words:
            writer.write(word if isinstance(word, bytes) else encode(word))
        async with asyncio.timeout(20):
            while (answers is None or len(frames) < answers) and (data := await reader.read(65536)):
                frames += [decode(tag, body) for tag, body in splitter.feed(data)]
    except ConnectionError:
        return frames
    finally:
        writer.transport.abort()
    return frames
