"""Orders about model files with a scripted process: the frames that the coordinator gets of its messages."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from node.agent.connection import CoordinatorLink
from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.engine_process.supervisor import Supervisor
from node.hub.child_messages import ChildEnd, ChildProgress
from node.hub.file_orders import ModelFileOrders, ModelOrder
from node.hub.quantization.quantizer import Quantizer
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import open_machine
from node.settings import NodeSettings
from wire.codec import Splitter, decode
from wire.frames import (
    CancelModelOrder,
    Frame,
    ModelOrderEnded,
    ModelOrderProgress,
    PullModel,
    RemoveModel,
    VerifyModel,
)
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.identity import NodeId
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

MANIFEST = ModelManifest("me/tiny", "c" * 40, (ModelFile("config.json", 2, "d" * 64),))
MIRROR = ModelSource(SourceKind.MIRROR, "https://127.0.0.1:9", "transfer", "n2")
PROGRESS = ChildProgress(
    phase=ModelOrderPhase.DOWNLOADING,
    done=1,
    total=2,
    speed=3.5,
    source="https://hub.example",
    addresses=("https://127.0.0.1:9",),
    fetched=4,
    message="the hub limits the rate of requests",
)
END = ChildEnd(
    code=ModelOrderCode.RATE_LIMITED,
    message="pull again later",
    content="e" * 64,
    fetched=5,
    freed=6,
    retry_after=7.5,
    stored=8,
    peak=9,
)


class RecordedTransport(asyncio.Transport):
    """Transport of a link, whose frames are in `frames` in the order in which the node sent them."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed = False
        self._splitter = Splitter()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for tag, body in self._splitter.feed(bytes(data)):
            self.frames.put_nowait(decode(tag, body))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def open_orders(folder: Path, links: CoordinatorLinks, on_change: Callable[[], None] = lambda: None) -> ModelFileOrders:
    settings = NodeSettings()
    machine = open_machine(settings)
    limiter = Limiter(settings, machine)
    supervisor = Supervisor(
        settings,
        on_frame=links.forward_from_engine,
        on_change=lambda: None,
        log_file=folder / "engine.log",
        scratch=folder / "scratch",
        wired=limiter.read_wired,
        illegal_events=IllegalEvents(),
    )
    quantizer = Quantizer(settings, folder, limiter, MemoryPoll(limiter, machine, supervisor), supervisor)
    identity = NodeIdentity("c", NodeId("n"), "n", "m", folder, b"", b"")
    return ModelFileOrders(settings.models, identity, folder, links, quantizer, lambda name: False, on_change)


class Orders:
    """Orders of a node on a recorded link. The process of each download is a script of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        (folder / "scripted_child.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[4]}")
        monkeypatch.setattr("node.hub.file_orders._DOWNLOADER", "scripted_child")
        self._links = CoordinatorLinks()
        self.changes = list[str]()
        """One entry for each change of model files."""
        self.orders = open_orders(folder, self._links, lambda: self.changes.append("changed"))
        self.open_link()

    def open_link(self) -> None:
        """Replace the link of the node by a new one."""
        self.transport = RecordedTransport()
        self.link = CoordinatorLink("mac:8081", "c", lambda *_: None, lambda *_: None)
        self.link.connection_made(self.transport)
        self._links.add(self.link)
        self._links.accept(self.link)

    def handle(self, *orders: ModelOrder | CancelModelOrder) -> None:
        for order in orders:
            self.orders.handle(order, self.link)

    async def take_frame(self) -> Frame:
        return await asyncio.wait_for(self.transport.frames.get(), 30)

    async def take_ends(self, count: int) -> dict[int, str]:
        """Return the codes of the next ends by their orders. No order has two."""
        ends = [await self.take_frame() for _ in range(count)]
        codes = {end.order: end.code for end in ends if isinstance(end, ModelOrderEnded)}
        assert len(codes) == count, ends
        return codes


async def test_the_coordinator_gets_every_field_of_the_messages_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    messages = [msgspec.json.encode(message).decode() for message in (PROGRESS, END)]
    node = Orders(tmp_path, monkeypatch, "".join(f"print({message!r})\n" for message in messages))
    node.handle(PullModel(7, MANIFEST, (MIRROR,)))
    assert await node.take_frame() == ModelOrderProgress(order=7, from_mirror=True, **msgspec.structs.asdict(PROGRESS))
    assert await node.take_frame() == ModelOrderEnded(order=7, **msgspec.structs.asdict(END))
    assert not node.orders.is_working()


async def test_every_order_gets_one_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process of a download ends when the file `go` is there, or by a cancel."""
    end, go = msgspec.json.encode(ChildEnd(code=ModelOrderCode.COMPLETED)).decode(), tmp_path / "go"
    script = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\nprint({end!r})\n"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    node, other = Orders(tmp_path, monkeypatch, script), replace(MANIFEST, commit="f" * 40)
    node.handle(PullModel(1, MANIFEST, (MIRROR,)), PullModel(2, MANIFEST, (MIRROR,)), PullModel(2, MANIFEST, (MIRROR,)))
    node.handle(PullModel(3, other, (MIRROR,)), RemoveModel(4, MANIFEST.repo), VerifyModel(5, "a\nb"))
    assert await node.take_ends(3) == {
        3: ModelOrderCode.IN_USE,
        4: ModelOrderCode.IN_USE,
        5: ModelOrderCode.INVALID,
    }
    node.handle(CancelModelOrder(2), CancelModelOrder(99), PullModel(6, MANIFEST, (MIRROR,)))
    assert await node.take_ends(2) == dict.fromkeys((1, 2), ModelOrderCode.CANCELLED)
    assert node.orders.is_working()
    assert node.changes == []
    go.touch()
    assert await node.take_ends(1) == {6: ModelOrderCode.COMPLETED}
    assert not node.orders.is_working()
    assert node.changes == ["changed"], "the engine looks for the new model at once"
    node.open_link()
    node.orders.resend_ends()
    assert (await node.take_ends(6)).keys() == {1, 2, 3, 4, 5, 6}, "the old link may have been dead"
    node.orders.resend_ends()
    node.handle(RemoveModel(7, MANIFEST.repo))
    assert await node.take_ends(1) == {7: ModelOrderCode.NOT_FOUND}, "no end is sent again on the same link"
