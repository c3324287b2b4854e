"""Orders about model files with a scripted process: the frames that the coordinator gets of its messages."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.agent.connection import CoordinatorLink
from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.engine_process.supervisor import Supervisor
from node.hub.child_messages import ChildEnd, ChildProgress
from node.hub.orders import ModelFileOrders
from node.hub.quantization.quantizer import Quantizer
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import open_machine
from node.settings import NodeSettings
from wire.codec import Splitter, decode
from wire.frames import Frame, ModelOrderEnded, ModelOrderProgress, PullModel
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.identity import NodeId
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

MANIFEST = ModelManifest("me/tiny", "c" * 40, (ModelFile("config.json", 2, "d" * 64),))
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
        self._splitter = Splitter()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for tag, body in self._splitter.feed(bytes(data)):
            self.frames.put_nowait(decode(tag, body))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def open_orders(folder: Path, links: CoordinatorLinks) -> ModelFileOrders:
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
    return ModelFileOrders(settings.models, identity, folder, links, quantizer, lambda name: False, lambda: None)


async def test_the_coordinator_gets_every_field_of_the_messages_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    messages = [msgspec.json.encode(message).decode() for message in (PROGRESS, END)]
    (tmp_path / "scripted_child.py").write_text("".join(f"print({message!r})\n" for message in messages))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[4]}")
    monkeypatch.setattr("node.hub.orders._DOWNLOADER", "scripted_child")
    links, transport = CoordinatorLinks(), RecordedTransport()
    link = CoordinatorLink("mac:8081", "c", lambda *_: None, lambda *_: None)
    link.connection_made(transport)
    links.add(link)
    links.accept(link)
    mirror = ModelSource(SourceKind.MIRROR, "https://127.0.0.1:9", "transfer", "n2")
    orders = open_orders(tmp_path, links)
    orders.handle(PullModel(7, MANIFEST, (mirror,)), link)
    progress, end = [await asyncio.wait_for(transport.frames.get(), 30) for _ in range(2)]
    assert progress == ModelOrderProgress(order=7, from_mirror=True, **msgspec.structs.asdict(PROGRESS))
    assert end == ModelOrderEnded(order=7, **msgspec.structs.asdict(END))
    assert not orders.is_working()
