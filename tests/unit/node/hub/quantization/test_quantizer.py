"""Quantizations with the memory and the engine of a node, without their process."""

import asyncio
import shutil
from pathlib import Path

from node.hub.child_messages import ChildEnd, build_end
from node.hub.order_child import OrderChild
from node.hub.quantization.quantizer import Quantizer
from tests.models import EMBEDDED
from tests.support.video.studio import Node
from wire.frames import QuantizeModel
from wire.frames.model_files import ModelOrderCode

ORDER = QuantizeModel(5, "me/tiny", 4, "me/tiny-4bit")


async def test_a_mac_that_is_paused_while_a_quantization_waits_for_its_lease_starts_no_process(tmp_path: Path):
    shutil.copytree(EMBEDDED, tmp_path / "models" / "me" / "tiny")
    settings = {
        "engine.kind": "scripted",
        "memory.cap": "90GiB",
        "memory.margin": "1GiB",
        "models.use_huggingface_cache": False,
        "models.folders": str(tmp_path / "models"),
    }
    node = await Node(tmp_path / "node", settings).start()
    started = list[OrderChild]()

    async def run_child(child: OrderChild) -> ChildEnd:
        started.append(child)
        return build_end(ModelOrderCode.COMPLETED)

    try:
        quantizer = Quantizer(node.settings, node.folder, node.limiter, node.poll, node.supervisor, {})
        running = asyncio.create_task(quantizer.run(ORDER, run_child, lambda progress: None))
        await node.until(lambda: quantizer.holding)
        quantizer.pause("its owner uses it")
        await node.until(lambda: node.supervisor.reports.limits_number >= node.supervisor.orders.limits_number)
        quantizer.on_engine_change()
        end = await running
        assert (end.code, end.message) == (ModelOrderCode.CANCELLED, "this node stopped sharing: its owner uses it")
        assert started == []
        assert not quantizer.holding, "the ceiling is restored"
    finally:
        await node.stop()
