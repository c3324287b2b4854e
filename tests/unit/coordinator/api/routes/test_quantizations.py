"""Quantizations through the API of the coordinator, with nodes on real links."""

from typing import Any

import httpx
import pytest

from coordinator.model_tools.quantizations import MAX_OPEN
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import CancelModelOrder, ModelOrderCode, ModelOrderEnded, QuantizeModel
from wire.machine import Disk
from wire.units import GIB

BIG = "publisher/big-model"


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


async def quantize(boss: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await boss.post("/api/v1/quantizations", json={"model": BIG, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_quantization_is_started_followed_and_cancelled(port: Port, boss: httpx.AsyncClient):
    line = await node(port, "studio", 8)
    await node(port, "mini", 4)
    started = (await quantize(boss, node="mini", bits=8, name="publisher/small"))["quantization"]
    assert (started["node"]["name"], started["bits"], started["name"]) == ("mini", 8, "publisher/small")
    other = (await quantize(boss, node="studio"))["quantization"]
    order = await line.until(QuantizeModel)
    assert (order.bits, order.name) == (4, f"{BIG}-4bit")
    listed = (await boss.get("/api/v1/quantizations")).json()["quantizations"]
    assert [row["id"] for row in listed] == [other["id"], started["id"]], "the newest first"
    acts = (await boss.get("/api/v1/audit")).json()["acts"]
    assert [act["subject"] for act in acts] == [
        f"{BIG} mini publisher/small {started['id']}",
        f"{BIG} studio {BIG}-4bit {other['id']}",
    ]
    path = f"/api/v1/quantizations/{other['id']}"
    assert (await boss.delete(path)).json()["quantization"]["state"] == "running", "until the node has ended it"
    assert (await line.until(CancelModelOrder)).order == order.order
    line.send(ModelOrderEnded(order.order, ModelOrderCode.CANCELLED))
    quantizations = port.application.pulls.quantizations
    await port.until(lambda: (one := quantizations.find(other["id"])) is not None and one.ended is not None)
    assert (await boss.get(path)).json()["quantization"]["state"] == "cancelled"
    again = await boss.delete(path)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "quantization_ended")


async def test_each_number_of_bits_has_its_result_and_the_actor_is_shown(port: Port, boss: httpx.AsyncClient):
    line = await node(port, "studio", 8)
    (key,) = port.application.store.keys
    for bits in (2, 3, 4, 5, 6, 8):
        started = (await quantize(boss, bits=bits))["quantization"]
        order = await line.until(QuantizeModel)
        assert (order.bits, order.name, started["actor"]) == (bits, f"{BIG}-{bits}bit", key)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_quantization_is_a_404(boss: httpx.AsyncClient, method: str):
    answer = await boss.request(method, "/api/v1/quantizations/quantize-0123456789ab")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "quantization_not_found")


async def test_a_quantization_that_cannot_run_is_refused(port: Port, boss: httpx.AsyncClient):
    line = await node(port, "studio", 8)
    for body, status, code in (
        ({"bits": 7}, 400, "invalid_request"),
        ({"name": "bad\nname"}, 400, "invalid_request"),
        ({"node": "nowhere"}, 404, "node_not_found"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"model": "other", "node": "studio"}, 404, "model_not_found"),
    ):
        error = (await quantize(boss, status, **body))["error"]
        assert error["code"] == code, error
    for number in range(MAX_OPEN):
        await quantize(boss, name=f"publisher/{number}")
    assert (await quantize(boss, 429))["error"]["code"] == "too_many_quantizations"
    line.close()
    (who,) = port.application.registry.pool.members
    await port.until(lambda: port.application.registry.pool.members[who].state.value != "ready")
    assert (await quantize(boss, 409, node="studio"))["error"]["code"] == "node_away"
    assert (await quantize(boss, 404))["error"]["code"] == "model_not_found"


async def test_a_node_that_reports_no_disk_is_too_old(port: Port, boss: httpx.AsyncClient):
    who = port.member("old")
    await port.link(who, a_report(models=(a_model(BIG, loaded=False),)))
    await port.until(lambda: port.state(who) == "ready")
    assert (await quantize(boss, 409, node="old"))["error"]["code"] == "node_outdated"
    assert (await quantize(boss, 404))["error"]["code"] == "model_not_found"
