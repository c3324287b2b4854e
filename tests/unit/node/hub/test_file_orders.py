"""Orders about model files with a scripted process: the frames that the coordinator gets of its messages."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.engine_process.supervisor import Supervisor
from node.hub.child_messages import ChildEnd, ChildProgress, ClusterFiles, DownloadOrder, MirrorOrder, VerifyOrder
from node.hub.file_orders import ModelFileOrders, ModelOrder
from node.hub.quantization.quantizer import Quantizer
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import open_machine
from node.settings import ModelSettings, NodeSettings
from tests.support.cluster.recorded_link import open_recorded_link
from wire.frames import (
    CancelModelOrder,
    Frame,
    ModelOrderEnded,
    ModelOrderProgress,
    PullModel,
    QuantizeModel,
    RemoveModel,
    ServeModel,
    VerifyModel,
)
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.identity import NodeId
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

MANIFEST = ModelManifest("me/tiny", "c" * 40, (ModelFile("config.json", 2, "d" * 64),))
LOADED = "me/loaded"
SECRET = "hf_secretsecretsecretsecret"
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


def open_orders(
    folder: Path, links: CoordinatorLinks, on_change: Callable[[], None], models: ModelSettings
) -> ModelFileOrders:
    settings = NodeSettings(models=models)
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
    return ModelFileOrders(models, identity, folder, links, quantizer, lambda name: name == LOADED, on_change)


class Orders:
    """Orders of a node on a recorded link. The process of each order is a script of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, **models: Any) -> None:
        (folder / "scripted_child.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[4]}")
        for name in ("_DOWNLOADER", "_MIRROR", "_VERIFIER"):
            monkeypatch.setattr(f"node.hub.file_orders.{name}", "scripted_child")
        self._links = CoordinatorLinks()
        self.changes = list[str]()
        """One entry for each change of model files."""
        self.orders = open_orders(folder, self._links, lambda: self.changes.append("changed"), ModelSettings(**models))
        self.open_link()

    def close_link(self) -> None:
        self._links.remove(self.link)

    def open_link(self) -> None:
        """Replace the link of the node by a new one."""
        self.link, self.transport = open_recorded_link(self._links)

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
    assert node.changes == [], "a pull that failed has changed no model"


async def test_no_message_of_a_process_shows_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages = [
        msgspec.json.encode(replace(message, message=f"refused {SECRET}")).decode() for message in (PROGRESS, END)
    ]
    node = Orders(tmp_path, monkeypatch, "".join(f"print({message!r})\n" for message in messages))
    node.handle(PullModel(7, MANIFEST, (MIRROR,)))
    shown = [await node.take_frame(), await node.take_frame()]
    assert [type(frame) for frame in shown] == [ModelOrderProgress, ModelOrderEnded]
    assert SECRET not in str(shown)
    assert str(shown).count("refused ") == 2


ECHO = "import json, sys\nprint(json.dumps({'type': 'end', 'code': 'completed', 'message': sys.stdin.readline()}))\n"
"""Process that returns its order as the message of its end."""


async def test_each_process_gets_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "models" / "me" / "own"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    node = Orders(tmp_path, monkeypatch, ECHO, folders=(str(tmp_path / "models"),))
    cluster = ClusterFiles(
        cluster="c", certificate=str(tmp_path / "node.pem"), node="n", machine="m", coordinator="mac:8081"
    )
    hub, digests = str(tmp_path / "hub"), str(tmp_path / "digests.json")
    for order, expected in (
        (
            PullModel(1, MANIFEST, (MIRROR,)),
            DownloadOrder(manifest=MANIFEST, sources=(MIRROR,), hub=hub, digests=digests, cluster=cluster),
        ),
        (
            ServeModel(2, MANIFEST, "key of the transfer", 7.5, relay=True),
            MirrorOrder(
                manifest=MANIFEST,
                hub=hub,
                token="key of the transfer",
                cluster=cluster,
                hosts=(),
                idle_seconds=7.5,
                relay=True,
            ),
        ),
        (VerifyModel(3, "me/own"), VerifyOrder(folder=str(model), digests=digests)),
    ):
        node.handle(order)
        end = await node.take_frame()
        assert isinstance(end, ModelOrderEnded)
        assert (end.order, end.code) == (order.order, ModelOrderCode.COMPLETED), end.message
        assert msgspec.json.decode(end.message, type=type(expected)) == expected


async def test_an_order_that_cannot_be_performed_ends_at_once_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Orders(tmp_path, monkeypatch, "", use_huggingface_cache=False)
    for order, code, text in (
        (RemoveModel(1, LOADED), ModelOrderCode.IN_USE, "me/loaded is loaded: unload it first"),
        (
            PullModel(2, MANIFEST, (MIRROR,)),
            ModelOrderCode.FAILED,
            "this node does not serve its Hugging Face cache: set models.use_huggingface_cache = true there",
        ),
        (ServeModel(3, MANIFEST, "", 7.5), ModelOrderCode.INVALID, "a mirror needs a token"),
    ):
        node.handle(order)
        assert await node.take_frame() == ModelOrderEnded(order=order.order, code=code, message=text)
    assert not node.orders.is_working()


async def test_an_unexpected_error_ends_its_order_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Orders(tmp_path, monkeypatch, "", folders=("a name with\0 in it",))
    node.handle(VerifyModel(1, "me/tiny"))
    assert await node.take_frame() == ModelOrderEnded(
        order=1, code=ModelOrderCode.FAILED, message="the order failed: see the node's log"
    )
    assert (node.orders.is_working(), node.changes) == (False, [])


async def test_orders_for_other_results_of_a_quantization_do_not_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Orders(tmp_path, monkeypatch, "", use_huggingface_cache=False)
    node.handle(
        QuantizeModel(1, "me/tiny", 4, "me/tiny-4bit"),
        QuantizeModel(2, "me/tiny", 8, "me/tiny-8bit"),
        QuantizeModel(3, "me/tiny", 4, "me/tiny-4bit"),
    )
    assert await node.take_ends(3) == {
        1: ModelOrderCode.NOT_FOUND,
        2: ModelOrderCode.IN_USE,
        3: ModelOrderCode.NOT_FOUND,
    }


async def test_an_end_without_a_link_is_sent_once_and_an_older_one_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.hub.file_orders.RESEND_SECONDS", 0.0)
    node = Orders(tmp_path, monkeypatch, "")
    node.handle(VerifyModel(1, "a\nb"))
    assert await node.take_ends(1) == {1: ModelOrderCode.INVALID}
    node.close_link()
    node.handle(VerifyModel(2, "c\nd"))
    assert node.transport.frames.empty()
    for expected in ({2: ModelOrderCode.INVALID}, {}):
        node.open_link()
        node.orders.resend_ends()
        assert await node.take_ends(len(expected)) == expected
        assert node.transport.frames.empty()


async def test_a_node_that_stops_sends_no_end_and_begins_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    node = Orders(tmp_path, monkeypatch, "import time; time.sleep(60)")
    node.handle(PullModel(1, MANIFEST, (MIRROR,)))
    async with asyncio.timeout(30):
        await node.orders.stop()
    assert (node.orders.is_working(), node.transport.frames.empty()) == (False, True)
    node.handle(VerifyModel(2, "me/tiny"))
    assert await node.take_frame() == ModelOrderEnded(
        order=2, code=ModelOrderCode.IN_USE, message="the node stops: try again later"
    )


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
