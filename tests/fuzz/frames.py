"""Mutated frames of nodes and of strangers: to the decoder, to a node's link, and to an enrolment.

A link that receives bytes that are no valid frames may end, with a reason. Any other result is a surprise: an exception
other than `WireError` from the decoder, or any exception from a connection. A decoded frame must
be encodable again. Views of the pool and rows of the database must have only values that JSON can represent.
"""

# pyright: reportPrivateUsage=false
# A connection is inserted in place of a linked one, without the certificate and the rate limit of real links.

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from structlog.testing import capture_logs

from coordinator.cluster.links.link_budgets import NodeBudgets
from coordinator.cluster.links.link_connection import Connection
from coordinator.joining.rate_limit import RateLimit
from coordinator.state.rows import MemberRow
from tests.support.cluster.application import Application, application
from tests.support.cluster.cluster_port import a_report
from tests.support.cluster.enrolment import HARDWARE
from tests.support.cluster.loopback_cluster import a_model
from wire.codec import Splitter, WireError, decode, decode_request_number, encode, split_into_fragments
from wire.frames import (
    TAGS,
    Admitted,
    Delta,
    Deltas,
    Enroll,
    EnrollStart,
    Failed,
    FetchChunk,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    Goodbye,
    Hello,
    JoinRelay,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    Logprob,
    MemberQuery,
    Refusal,
    RenewCertificate,
    Timings,
)
from wire.identity import PROTOCOL, NodeId
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import BatchGroup
from wire.video import Artifact, LeaseState, VideoPackage, VideoState

COUNT = 1_000_000
CONNECTED = 5
"""One of this many inputs also goes to connections."""
NODE = NodeId("node-1")
REPORT = a_report(
    7,
    models=(a_model(groups=(BatchGroup(2, 100, 150),)), a_model("other", loaded=False)),
    video=VideoState(True, "", "r1", (VideoPackage("wan"),), (LeaseState("l1", 1, "video_1", 2**30),)),
)
SEEDS: tuple[Frame, ...] = (
    REPORT,
    Admitted(1, 30, 10, b"hash"),
    Deltas((Delta(1, 0, (1, 2), ((0, "text"), (1, "thought")), (Logprob(b"a", -0.5, ((b"b", -1.0),)),)),)),
    Finished(1, ("stop",), 30, 5, 10, Timings(0.1, 0.2, 0.3), a_model(), ("",), 2),
    Refusal(1, Refused(RefusalCode.NO_ROOM, "no room", MemoryNumbers(1, 2, 3, 4, 5, 6, 7, 8, "static"), 1.0, "n"), 30),
    Failed(1, "engine_error", "it broke"),
    FetchChunk(1, b"piece", last=True, next=5, end=9),
    Goodbye("stopping"),
    RenewCertificate(b"request"),
    LeaseGranted("l1", 1, "/folder"),
    LeaseRefused("l1", 1, "no_headroom", "no", 5, 6, 1.0, "room"),
    LeaseEnded("l1", 1, "completed", "", (Artifact("clip.mp4", 10, b"x" * 32),), 5, 1.0, b"{}"),
    Hello(PROTOCOL, NODE, "studio", "instance", "m1", "0.1.0", HARDWARE, frames=(10, 43)),
    MemberQuery(PROTOCOL, NODE, "m1", "/api/v1/nodes"),
    JoinRelay(PROTOCOL, NODE, "m1", "token", serves=True),
    EnrollStart(PROTOCOL, b"commitment"),
    Enroll(b"request", "studio", "m1", HARDWARE, "token", b"mac", b"opening", b"certificate", b"proof"),
    Generate(1, 1, "r", "tiny", (), GenerationParams(max_tokens=5), 0),
)
EXTREMES = (
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcf\x7f" + b"\xff" * 7,
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xcb\x7f\xf0" + bytes(6),
    b"\xff",
    b"\xc0",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x90",
    b"\xc1",
    b"\xd9\x04\xed\xa0\x80x",
    b"\xa1\x1b",
    b"\xce\x7f\xff\xff\xff",
    b"\x00",
)
"""Values of msgpack that are invalid everywhere, or at a limit."""


def inputs(seed: int, count: int) -> Iterator[bytes]:
    """Make mutated streams of frames."""
    draw = random.Random(seed)
    encoded = [encode(frame) for frame in SEEDS]
    for _ in range(count):
        yield b"".join(_mutated(draw, draw.choice(encoded)) for _ in range(draw.choice((1, 1, 1, 2, 3))))


def _mutated(draw: random.Random, frame: bytes) -> bytes:
    body = bytearray(frame[4:])
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4, 8))):
        at = draw.randrange(len(body)) if body else 0
        match draw.randrange(7):
            case 0 if body:
                body[at] ^= 1 << draw.randrange(8)
            case 1:
                del body[at:]
            case 2:
                body[at:at] = draw.choice(EXTREMES)
            case 3:
                extreme = draw.choice(EXTREMES)
                body[at : at + len(extreme)] = extreme
            case 4 if body:
                body[0] = draw.choice(list(TAGS))
            case 5:
                body[at:at] = draw.randbytes(draw.randrange(1, 20))
            case _:
                body += body[at : at + 40]
    length = len(body) if draw.random() < 0.95 else draw.choice((0, 1, len(body) + 3, 2**20, 2**32 - 1))
    whole = length.to_bytes(4, "big") + bytes(body)
    return b"".join(split_into_fragments(whole, draw.randrange(5))) if draw.random() < 0.1 else whole


@dataclass
class Pipe:
    """A transport that discards all data."""

    ended: bool = False
    certificate: bytes = b""
    extra: dict[str, Any] = field(default_factory=lambda: {"peername": ("10.0.0.7", 1)})

    def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.ended = True

    abort = close

    def is_closing(self) -> bool:
        return self.ended

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self.extra.get(name, default)


def run(seed: int, count: int) -> list[str]:
    """Feed mutated frames to every reader; return one line for each surprise."""
    with tempfile.TemporaryDirectory() as folder, capture_logs():
        return asyncio.run(_run(Path(folder), seed, count))


async def _run(folder: Path, seed: int, count: int) -> list[str]:
    surprises: list[str] = []
    async with application(folder, RateLimit(6e9, 10**9)) as made:
        made.store.members.put(MemberRow(NODE, "studio", "m1", HARDWARE, "00", 0.0))
        made.registry.add_member(made.store.members[NODE])
        for number, data in enumerate(inputs(seed, count)):
            for reader in (_decoded, _linked, _greeted) if number % CONNECTED == 0 else (_decoded,):
                try:
                    reader(data, made)
                except Exception as error:  # the harness reports every surprise
                    where = f"{reader.__name__.strip('_')}, seed {seed}, input {number}"
                    surprises.append(f"{where}: {type(error).__name__}: {error} ({data[:60].hex()})")
            if number % 500 == 499:
                surprises += await _settled(made, f"seed {seed}, input {number}")
    return surprises


def _decoded(data: bytes, _: Application) -> None:
    try:
        for tag, body in Splitter().feed(data):
            frame = decode(tag, body)
            encode(frame)
            decode_request_number(body)
    except WireError:
        return


def _linked(data: bytes, made: Application) -> None:
    """Feed a linked node's connection, after an honest report."""
    server = made.nodes.server
    connection = Connection(server)
    connection.connection_made(Pipe())
    connection._enrollment = None
    hello = Hello(PROTOCOL, NODE, "studio", "instance", "m1", "0.1.0", HARDWARE)
    server._unlinked.discard(connection)
    made.nodes.links.table.add(NODE, connection, hello)
    connection.bind_link(NODE, hello, made.registry.on_link_up(NODE, hello), NodeBudgets(), made.registry.handle_frame)
    connection.data_received(encode(REPORT))
    connection.data_received(data)
    connection.connection_lost(None)


def _greeted(data: bytes, made: Application) -> None:
    """Feed a stranger's connection."""
    connection = Connection(made.nodes.server)
    connection.connection_made(Pipe())
    connection.data_received(data)
    connection.connection_lost(None)


async def _settled(made: Application, where: str) -> list[str]:
    """Run the scheduled callbacks, then check that the API's view of the node is JSON and that the store can be
    flushed."""
    await asyncio.sleep(0)
    try:
        if NODE not in made.registry.pool.members:  # the node said goodbye
            made.store.deny_list._subjects.clear()
            made.store.members.put(MemberRow(NODE, "studio", "m1", HARDWARE, "00", 0.0))
            made.registry.add_member(made.store.members[NODE])
        json.dumps(made.nodes.directory.build_node_row(NODE, 0), allow_nan=False)
        msgspec.json.encode(made.registry.build_view().nodes)
        await made.store.flush()
    except Exception as error:  # the harness reports every surprise
        return [f"settled, {where}: {type(error).__name__}: {error}"]
    return []
