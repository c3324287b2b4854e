"""Peers that speak protocol 1 as it was first frozen: its tags, and only the fields that each structure had then.

Their frames are cut down to those fields. A frame with a newer tag breaks the connection, as in that version. The
number of fields of a structure is read from `protocol_1.json`, the frozen bytes.
"""

import asyncio
import json
import struct
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import NodeIdentity, new_request, store_address, store_identity
from node.agent.machine_id import compute_machine_id
from wire.codec import Splitter, decode
from wire.frames import TAGS, Frame, Hello, Ping, Report, Welcome
from wire.identity import NodeId
from wire.report import WireStruct

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "unit/wire/protocol_1.json").read_text())
FROZEN = frozenset(int(tag) for tag in GOLDEN)
"""The tags of that version."""
_HEADER = struct.Struct(">IB")
_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
F = TypeVar("F", bound=Frame)


def _counted(hint: Any, value: Any, counts: dict[type, int]) -> None:
    """Count the fields of each structure in a frozen value."""
    kinds = [one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, WireStruct)]
    if not kinds or not isinstance(value, list):
        for inner in get_args(hint):
            if isinstance(value, list) and get_origin(inner) is tuple:
                _counted(inner, value, counts)
        return
    if get_origin(hint) is tuple:
        for one in value:
            _counted(kinds[0], one, counts)
        return
    counts[kinds[0]] = len(value)
    hints = get_type_hints(kinds[0])
    for one, inner in zip(msgspec.structs.fields(kinds[0]), value, strict=False):
        _counted(hints[one.name], inner, counts)


def _frozen_fields() -> dict[type, int]:
    counts: dict[type, int] = {}
    for tag, entry in GOLDEN.items():
        _counted(TAGS[int(tag)], msgspec.msgpack.decode(bytes.fromhex(entry["body"])), counts)
    return counts


FIELDS = _frozen_fields()


def _cut(value: Any) -> Any:
    if isinstance(value, WireStruct):
        names = [one.name for one in msgspec.structs.fields(value)]
        return [_cut(getattr(value, name)) for name in names[: FIELDS.get(type(value), 0)]]
    return [_cut(one) for one in value] if isinstance(value, list | tuple) else value


def old_bytes(frame: Frame) -> bytes:
    """Return the bytes of a frame in the old version."""
    tag = _TAG_OF[type(frame)]
    assert tag in FROZEN, f"{type(frame).__name__} was not there yet"
    body = msgspec.msgpack.encode(_cut(frame))
    return _HEADER.pack(len(body) + 1, tag) + body


@dataclass
class OldCoordinator:
    """A coordinator of the old version: greets, pings, and keeps the frames that it receives."""

    authority: ClusterCa
    folder: Path
    address: str = ""
    heard: list[Frame] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    also: frozenset[type[Frame]] = frozenset()
    """Frames that this coordinator understands beyond the old version."""
    _writer: asyncio.StreamWriter | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def node(self, name: str) -> Path:
        """Make the state folder of a joined node, and return it."""
        state, request = self.folder / name, new_request(name)
        certificate = self.authority.sign_request(request.csr, NodeId(name), name)
        identity: NodeIdentity = store_identity(
            state / "node" / "identity",
            request,
            certificate,
            self.authority.cluster,
            self.authority.ca,
            compute_machine_id(name),
        )
        store_address(identity, self.address)
        return state

    def send(self, frame: Frame) -> None:
        assert self._writer is not None
        self._writer.write(old_bytes(frame))

    def send_new(self, encoded: bytes) -> None:
        """Send bytes of a frame that the old version did not have."""
        assert self._writer is not None
        self._writer.write(encoded)

    async def until(self, kind: type[F], true: Callable[[F], bool] = lambda _: True, seconds: float = 30.0) -> F:
        """Return the next frame of this kind for which `true` holds, and discard the frames before it.

        Raise TimeoutError after `seconds`.
        """
        async with asyncio.timeout(seconds):
            while True:
                while self.heard:
                    frame = self.heard.pop(0)
                    if isinstance(frame, kind) and true(frame):
                        return frame
                self._news.clear()
                await self._news.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one node at a time."""
        splitter, pinging = Splitter(), None
        try:
            while data := await reader.read(65536):
                for tag, body in splitter.feed(data):
                    if tag not in FROZEN and TAGS.get(tag) not in self.also:
                        self.unknown.append(tag)
                        return
                    frame = decode(tag, body)
                    if isinstance(frame, Hello):
                        self._writer = writer
                        self.send(Welcome(1, self.authority.cluster, "home", time.time(), "0.0.1", (self.address,)))
                        pinging = asyncio.create_task(self._ping(writer))
                    self.heard.append(frame)
                    self._news.set()
        except OSError:
            pass
        finally:
            if pinging is not None:
                pinging.cancel()
            writer.close()

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        nonce = 0
        with suppress(OSError):
            while True:
                nonce += 1
                writer.write(old_bytes(Ping(nonce)))
                await asyncio.sleep(0.5)

    async def ready(self) -> Report:
        """Wait until the node's engine is ready."""
        return await self.until(Report, lambda one: one.engine.state == "ready" and bool(one.models))


@asynccontextmanager
async def old_coordinator(folder: Path) -> AsyncGenerator[OldCoordinator]:
    """Listen as a coordinator of the old version."""
    made = OldCoordinator(ClusterCa(folder / "authority", time.time), folder)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=made.authority.get_server_context())
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
