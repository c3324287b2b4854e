"""Quantizations of the coordinator: orders, progress, lost links, ends."""

import asyncio
from pathlib import Path

import pytest

from coordinator.model_tools import quantizations
from coordinator.model_tools.quantizations import (
    MAX_ENDED,
    MAX_OPEN,
    QuantizationRecord,
    Quantizations,
    TooManyQuantizationsError,
)
from wire.frames import CancelModelOrder, Frame, ModelOrderCode, ModelOrderEnded, ModelOrderProgress, QuantizeModel
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


class Orders:
    """Quantizations with links to the nodes in `linked`, and the frames that they send."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[tuple[NodeId, Frame]] = []
        self.linked = {A, B}
        self._numbers = iter(range(7, 1000))
        self.all = Quantizations(folder, self._send, lambda: next(self._numbers), wall=lambda: 1000.0)

    def _send(self, node: NodeId, frame: Frame) -> bool:
        self.sent.append((node, frame))
        return node in self.linked

    def start(self, node: NodeId = A, name: str = "big-4bit") -> QuantizationRecord:
        return self.all.start(node, "big", 4, name, "key")

    def row(self, one: QuantizationRecord) -> dict[str, object]:
        found = self.all.find(one.id)
        assert found is not None
        return found.to_row(str)


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path)


def test_start_sends_an_order_and_rows_have_its_progress(orders: Orders):
    one = orders.start()
    assert orders.sent == [(A, QuantizeModel(7, "big", 4, "big-4bit"))]
    orders.all.handle_frame(A, ModelOrderProgress(7, "quantizing", done=25, total=100, speed=5.0))
    row = orders.row(one)
    assert (row["state"], row["phase"], row["done"], row["seconds_left"]) == ("running", "quantizing", 25, 15.0)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (ModelOrderCode.COMPLETED, "completed"),
        (ModelOrderCode.CANCELLED, "cancelled"),
        (ModelOrderCode.NO_MEMORY, "failed"),
        ("code of a newer node", "failed"),
    ],
)
def test_ended_quantization_has_its_code(orders: Orders, code: str, state: str):
    one = orders.start()
    orders.all.handle_frame(A, ModelOrderEnded(7, code, "why", stored=3, peak=9))
    row = orders.row(one)
    assert (row["state"], row["code"], row["message"], row["stored"], row["peak"]) == (state, code, "why", 3, 9)
    assert row["ended"] == 1000.0


def test_frames_of_other_nodes_and_orders_are_ignored(orders: Orders):
    one = orders.start()
    orders.all.handle_frame(B, ModelOrderEnded(7, ModelOrderCode.COMPLETED))
    orders.all.handle_frame(A, ModelOrderEnded(8, ModelOrderCode.COMPLETED))
    assert orders.row(one)["state"] == "running"


def test_the_same_result_is_quantized_once(orders: Orders):
    assert orders.start() is orders.start()
    assert len(orders.sent) == 1
    assert orders.start(B).id != orders.start(A).id


def test_without_a_link_it_fails_at_once(orders: Orders):
    orders.linked.clear()
    row = orders.start().to_row(str)
    assert (row["state"], row["message"]) == ("failed", "the node is not linked: try again when it is back")


def test_a_quantization_is_cancelled_by_its_node(orders: Orders):
    one = orders.start()
    assert orders.all.cancel(one.id)
    assert orders.sent[-1] == (A, CancelModelOrder(7))
    orders.linked.clear()
    assert not orders.all.cancel(one.id), "the node does not get it"
    orders.all.handle_frame(A, ModelOrderEnded(7, ModelOrderCode.CANCELLED))
    assert not orders.all.cancel(one.id)
    assert not orders.all.cancel("quantize-none")


def test_a_cancelled_quantization_is_not_returned_again(orders: Orders):
    first = orders.start()
    assert orders.all.cancel(first.id)
    second = orders.start()
    assert second.id != first.id
    assert orders.sent[-1] == (A, QuantizeModel(8, "big", 4, "big-4bit"))
    assert orders.start().id == second.id


async def test_it_continues_without_a_link(orders: Orders):
    one = orders.start()
    orders.all.apply_links({A}, [])
    assert orders.row(one)["node"] == {"id": A, "name": "a", "linked": False}
    orders.all.handle_frame(A, ModelOrderProgress(7, "quantizing"))
    assert orders.row(one)["node"] == {"id": A, "name": "a", "linked": True}
    orders.all.apply_links([], [A])
    orders.all.handle_frame(A, ModelOrderEnded(7, ModelOrderCode.COMPLETED))
    assert orders.row(one)["state"] == "completed"
    orders.all.close()


async def test_a_node_that_is_back_and_silent_was_restarted(orders: Orders, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantizations, "RETURN_TIMEOUT_SECONDS", 0.0)
    one = orders.start()
    orders.all.apply_links({A}, [])
    orders.all.apply_links([], [A])
    await asyncio.sleep(0.02)
    row = orders.row(one)
    assert (row["state"], "was restarted" in str(row["message"])) == ("failed", True)


async def test_a_node_that_is_away_again_is_awaited(orders: Orders, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantizations, "RETURN_TIMEOUT_SECONDS", 0.01)
    away, silent = orders.start(A), orders.start(B)
    orders.all.apply_links({A, B}, [])
    orders.all.apply_links([], [A])
    orders.all.apply_links({A}, [])
    orders.all.apply_links([], [B])
    async with asyncio.timeout(30):
        while orders.row(silent)["state"] == "running":  # noqa: ASYNC110  the record has no event
            await asyncio.sleep(0.01)
    assert orders.row(away)["state"] == "running"


def test_a_removed_node_ends_its_quantizations(orders: Orders):
    first, second = orders.start(A), orders.start(B)
    orders.all.remove_node(A)
    assert (orders.row(first)["state"], orders.row(second)["state"]) == ("failed", "running")


def test_the_number_of_open_ones_is_limited(orders: Orders):
    for number in range(MAX_OPEN):
        orders.start(name=f"big-{number}")
    with pytest.raises(
        TooManyQuantizationsError, match=r"^16 quantizations are open, which is the limit: wait for one$"
    ):
        orders.start(name="one-more")


def test_the_newest_ended_ones_stay_listed(orders: Orders, tmp_path: Path):
    names = [f"big-{number}" for number in range(MAX_ENDED + 3)]
    for number, name in enumerate(names, 7):
        orders.start(name=name)
        orders.all.handle_frame(A, ModelOrderEnded(number, ModelOrderCode.COMPLETED))
    orders.start(name="running")
    listed = [*names[-MAX_ENDED:], "running"]
    assert [record.order.name for record in orders.all.list_all()] == listed
    assert [record.order.name for record in Orders(tmp_path).all.list_all()] == listed


async def test_quantizations_are_listed_after_a_restart_and_continue(orders: Orders, tmp_path: Path):
    ended, running = orders.start(name="first"), orders.start(name="second")
    orders.all.handle_frame(A, ModelOrderEnded(7, ModelOrderCode.COMPLETED, stored=5))
    restarted = Orders(tmp_path)
    assert [restarted.row(one)["state"] for one in (ended, running)] == ["completed", "running"]
    assert restarted.row(running)["node"] == {"id": A, "name": A, "linked": False}
    restarted.all.apply_links((), (A,))
    restarted.all.handle_frame(A, ModelOrderProgress(8, "quantizing", done=50, total=100))
    assert (restarted.row(running)["done"], restarted.sent) == (50, []), "the order is not sent again"
    restarted.all.handle_frame(A, ModelOrderEnded(8, ModelOrderCode.COMPLETED))
    assert Orders(tmp_path).row(running)["state"] == "completed"


async def test_a_quantization_that_its_node_no_longer_has_fails_after_a_restart(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    running = orders.start()
    monkeypatch.setattr(quantizations, "RETURN_TIMEOUT_SECONDS", 0.01)
    restarted = Orders(tmp_path)
    restarted.all.apply_links((), (A,))
    async with asyncio.timeout(30):
        while restarted.row(running)["state"] == "running":  # noqa: ASYNC110  the record has no event
            await asyncio.sleep(0.01)
    assert "was restarted" in str(restarted.row(running)["message"])


def test_a_broken_file_has_no_quantizations(tmp_path: Path):
    (tmp_path / "quantizations.json").write_text("{")
    assert Orders(tmp_path).all.list_all() == ()


def test_a_row_has_every_value_while_it_runs_and_after_the_end(orders: Orders):
    one = orders.start()
    orders.all.handle_frame(A, ModelOrderProgress(7, "quantizing", done=25, total=100, speed=8.0))
    running = {
        "id": one.id,
        "node": {"id": "a", "name": "a", "linked": True},
        "model": "big",
        "bits": 4,
        "name": "big-4bit",
        "state": "running",
        "phase": "quantizing",
        "done": 25,
        "total": 100,
        "speed": 8.0,
        "seconds_left": 9.4,
        "code": "",
        "message": "",
        "stored": 0,
        "peak": 0,
        "started": 1000.0,
        "ended": None,
        "actor": "key",
    }
    assert orders.row(one) == running
    orders.all.handle_frame(A, ModelOrderEnded(7, ModelOrderCode.COMPLETED, stored=90, peak=300))
    assert orders.row(one) == running | {
        "state": "completed",
        "phase": "",
        "speed": 0.0,
        "seconds_left": None,
        "code": "completed",
        "stored": 90,
        "peak": 300,
        "ended": 1000.0,
    }


async def test_closed_quantizations_do_not_fail_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    orders, loop = Orders(tmp_path), asyncio.get_running_loop()
    monkeypatch.setattr(quantizations, "RETURN_TIMEOUT_SECONDS", 0.01)
    one = orders.start()
    orders.all.apply_links((), [A])
    orders.all.close()
    later = loop.create_future()
    loop.call_later(0.03, later.set_result, None)
    await later
    assert orders.row(one)["state"] == "running"


async def test_a_failure_is_on_the_disk(tmp_path: Path):
    orders = Orders(tmp_path)
    orders.start()
    orders.all.remove_node(A)
    (stored,) = Orders(tmp_path).all.list_all()
    assert (stored.stage, stored.message, stored.ended) == ("failed", "the node has left the pool", 1000.0)


@pytest.mark.parametrize(
    ("node", "model", "bits", "name", "is_same"),
    [
        (A, "big", 4, "copy", True),
        (B, "big", 4, "copy", False),
        (A, "other", 4, "copy", False),
        (A, "big", 8, "copy", False),
        (A, "big", 4, "copy-2", False),
    ],
)
def test_only_an_equal_quantization_that_runs_is_returned_again(
    orders: Orders, node: NodeId, model: str, bits: int, name: str, is_same: bool
):
    running = orders.all.start(A, "big", 4, "copy", "key")
    asked = orders.all.start(node, model, bits, name, "key")
    assert (asked.id == running.id) is is_same
    assert (asked.node, asked.order.model, asked.order.bits, asked.order.name) == (node, model, bits, name)
    assert len(orders.sent) == (1 if is_same else 2)


async def test_a_quantization_that_its_node_reports_after_a_new_link_continues(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(quantizations, "RETURN_TIMEOUT_SECONDS", 0.05)
    reported, silent = orders.start(A), orders.start(B)
    orders.all.apply_links((), (A,))
    orders.all.handle_frame(A, ModelOrderProgress(7, "quantizing", done=50, total=100))
    orders.all.apply_links((), (B,))
    async with asyncio.timeout(30):
        while orders.row(silent)["state"] == "running":  # noqa: ASYNC110  the record has no event
            await asyncio.sleep(0.01)
    assert (orders.row(reported)["state"], orders.row(reported)["done"]) == ("running", 50)
