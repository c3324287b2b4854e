"""Quantizations with the memory and the engine of a node, without their process."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing

from node.agent.connection import CoordinatorLink
from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.agent.sharing_effects import SharingEffects
from node.hub.child_messages import ChildEnd, ChildProgress, build_end
from node.hub.errors import ModelFileError
from node.hub.file_orders import ModelFileOrders
from node.hub.order_child import OrderChild
from node.hub.quantization.quantizer import Quantizer
from node.sharing.policy import Occupancy, SharingAction, SharingState
from tests.models import EMBEDDED
from tests.support.hub.downloads import list_children
from tests.support.video.studio import Node
from wire.frames import QuantizeModel
from wire.frames.model_files import ModelOrderCode
from wire.identity import NodeId

ORDER = QuantizeModel(5, "me/tiny", 4, "me/tiny-4bit")
STOPPED = SharingState(shared=False, why="its owner uses it")


@contextlib.asynccontextmanager
async def studio(folder: Path, **more: str) -> AsyncIterator[tuple[Node, Quantizer]]:
    """Yield a node that has a model to quantize, and its quantizer."""
    shutil.copytree(EMBEDDED, folder / "models" / "me" / "tiny")
    settings = {
        "engine.kind": "scripted",
        "memory.cap": "90GiB",
        "memory.margin": "1GiB",
        "models.use_huggingface_cache": False,
        "models.folders": str(folder / "models"),
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    node = await Node(folder / "node", settings).start()
    try:
        yield node, Quantizer(node.settings, node.folder, node.limiter, node.poll, node.supervisor, {})
    finally:
        await node.stop()


def create_effects(node: Node, quantizer: Quantizer) -> SharingEffects:
    return SharingEffects(CoordinatorLinks(), node.supervisor, node.lender, quantizer, node.studio.pause)


async def confirm_ceiling(node: Node, quantizer: Quantizer) -> None:
    """Confirm the lower ceiling, for which a quantization waits."""
    await node.until(lambda: quantizer.holding)
    await node.until(lambda: node.supervisor.reports.limits_number >= node.supervisor.orders.limits_number)
    quantizer.on_engine_change()


async def test_a_mac_that_is_paused_while_a_quantization_waits_for_its_lease_starts_no_process(tmp_path: Path):
    started = list[OrderChild]()

    async def run_child(child: OrderChild) -> ChildEnd:
        started.append(child)
        return build_end(ModelOrderCode.COMPLETED)

    async with studio(tmp_path) as (node, quantizer):
        running = asyncio.create_task(quantizer.run(ORDER, run_child, lambda progress: None))
        await node.until(lambda: quantizer.holding)
        effects = create_effects(node, quantizer)
        assert effects.read_occupancy() == Occupancy(lending=True)
        effects.on_sharing_change(STOPPED)
        await confirm_ceiling(node, quantizer)
        end = await running
        assert (end.code, end.message) == (ModelOrderCode.CANCELLED, "this node stopped sharing: its owner uses it")
        assert started == []
        assert not quantizer.holding, "the ceiling is restored"
        assert effects.read_occupancy() == Occupancy()


async def test_the_process_of_a_quantization_ends_after_the_grace_period_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that is not cancelled fails, because it has no program."""
    monkeypatch.setattr("node.hub.quantization.quantizer.CONVERTER", "no_such_program")

    async def run_child(child: OrderChild) -> ChildEnd:
        create_effects(node, quantizer).apply_sharing_action(SharingAction.END_LEASE, STOPPED)
        return await child.run()

    async with studio(tmp_path) as (node, quantizer):
        running = asyncio.create_task(quantizer.run(ORDER, run_child, lambda progress: None))
        await confirm_ceiling(node, quantizer)
        end = await running
        assert (end.code, end.message) == (ModelOrderCode.CANCELLED, "this node stopped sharing: its owner uses it")


async def test_failed_quantizations_leave_no_files_and_give_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    temporary = tmp_path / "models" / "me" / ".quantizing-tiny-4bit"
    (tmp_path / "patient_child.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[5]}")
    monkeypatch.setattr("node.hub.quantization.quantizer.CONVERTER", "patient_child")
    workers = set[int | None]()

    async def run_child(child: OrderChild) -> ChildEnd:
        working = asyncio.create_task(child.run())
        await node.until(lambda: child.pid is not None and node.limiter.worker == child.pid, 10)
        workers.add(child.pid)
        child.kill()
        await working
        temporary.mkdir()
        (temporary / "model.safetensors").write_bytes(b"half")
        raise OSError("no more processes")

    async with studio(tmp_path) as (node, quantizer):
        running = asyncio.create_task(quantizer.run(ORDER, run_child, lambda progress: None))
        await confirm_ceiling(node, quantizer)
        with pytest.raises(OSError, match="no more processes"):
            await running
        assert not temporary.exists()
        assert not quantizer.holding
        assert (len(workers), node.limiter.worker) == (1, None), "the footprint of the process counts for its lease"

        temporary.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
        links, identity = CoordinatorLinks(), NodeIdentity("c", NodeId("n"), "n", "m", tmp_path, b"", b"")
        orders = ModelFileOrders(
            node.settings.models, identity, node.folder, links, quantizer, lambda name: False, lambda: None
        )
        with structlog.testing.capture_logs() as logs:
            orders.handle(ORDER, CoordinatorLink("mac:8081", "c", lambda *_: None, lambda *_: None))
            await confirm_ceiling(node, quantizer)
            await node.until(lambda: not orders.is_working())
        (end,) = (line["message"] for line in logs if line["event"] == "model order ended")
        assert end == "the files of me/tiny cannot be changed: Cannot call rmtree on a symbolic link"


async def test_a_process_above_its_lease_is_killed_and_no_progress_follows_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "patient_child.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[5]}")
    monkeypatch.setattr("node.hub.quantization.quantizer.CONVERTER", "patient_child")
    monkeypatch.setattr("node.hub.quantization.quantizer.REPEAT_SECONDS", 0.01)
    monkeypatch.setattr("node.hub.quantization.prediction.BASE_BYTES", 1024)
    progress = list[ChildProgress]()
    async with studio(tmp_path) as (node, quantizer):
        running = asyncio.create_task(quantizer.run(ORDER, OrderChild.run, progress.append))
        await confirm_ceiling(node, quantizer)
        async with asyncio.timeout(30):
            end = await running
        assert end.code == ModelOrderCode.NO_MEMORY
        assert end.message.startswith("the quantization was ended: the worker used ")
        assert end.peak > 2**20
        assert list_children("patient_child") == []
        assert not quantizer.holding
        known = len(progress)
        assert known > 1, "the phase is repeated while the process says nothing"
        await asyncio.sleep(0.05)
        assert len(progress) == known


async def test_a_lease_that_no_guard_enforces_is_refused(tmp_path: Path):
    async with studio(tmp_path, memory__guard="off") as (_, quantizer):
        with pytest.raises(
            ModelFileError, match=r"memory\.guard is off on this node, .*: set memory\.guard = on"
        ) as refused:
            await quantizer.run(ORDER, OrderChild.run, lambda progress: None)
        assert refused.value.code == ModelOrderCode.INVALID
        assert not quantizer.holding
