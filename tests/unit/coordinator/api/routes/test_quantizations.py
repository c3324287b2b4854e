"""Quantizations through the API of the coordinator, with nodes on real links."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import QuantizeModel
from wire.machine import Disk
from wire.units import GIB

BIG = "publisher/big-model"


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def node(port: Port, name: str, headroom: int, cause: str = "") -> Line:
    """Link a node that has the model on its disk, with a headroom in GiB. `cause`: why it cannot load the model."""
    who = port.member(name)
    model = a_model(BIG, loaded=False, cause=cause)
    disk = Disk(100 * GIB, 500 * GIB, "/cache")
    line = await port.link(who, a_report(models=(model,), memory=a_memory(headroom * GIB), disk=disk))
    await port.until(lambda: port.state(who) == "ready")
    return line


async def test_a_quantization_goes_to_the_node_with_most_free_memory_whose_copy_is_intact(port: Port):
    await node(port, "damaged", 16, cause="its files are damaged")
    await node(port, "small", 4)
    studio = await node(port, "studio", 8)
    async with port.client("admin") as client:
        answer = await client.post("/api/v1/quantizations", json={"model": BIG, "bits": 4})
    assert answer.json()["quantization"]["node"]["name"] == "studio"
    order = await studio.until(QuantizeModel)
    assert (order.model, order.bits, order.name) == (BIG, 4, f"{BIG}-4bit")
