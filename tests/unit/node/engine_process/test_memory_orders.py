"""Orders about the engine's memory as frames, and the reports that confirm them."""

from msgspec.structs import replace

from node.engine_process.memory_orders import EngineOrders, EngineReports
from wire.codec import Splitter, decode
from wire.frames import EngineReport, Frame, MemoryLimits, ReclaimMemory, ReduceMemory
from wire.report import Memory, MemoryLevel, Model
from wire.units import GIB

LIMITS = MemoryLimits(8 * GIB, 7 * GIB, GIB, "static")


class Sent:
    """Frames that orders have written."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.orders = EngineOrders(self._write)

    def _write(self, encoded: bytes) -> None:
        self.frames += [decode(tag, body) for tag, body in Splitter().feed(encoded)]


def test_limits_have_rising_numbers_and_the_last_ones_are_sent_again():
    sent = Sent()
    sent.orders.resend_limits()
    assert (sent.frames, sent.orders.limits_number) == ([], 0), "there are none yet"
    other = replace(LIMITS, ceiling=5 * GIB)
    assert [sent.orders.set_limits(limits) for limits in (LIMITS, other)] == [1, 2]
    sent.orders.resend_limits()
    assert sent.frames == [replace(LIMITS, number=1), replace(other, number=2), replace(other, number=2)]
    assert sent.orders.limits_number == 2


def test_orders_to_free_memory_have_numbers_of_their_own():
    sent, order = Sent(), ReduceMemory(7, MemoryLevel.OVER_HARD, 3 * GIB)
    sent.orders.set_limits(LIMITS)
    assert [sent.orders.free_memory(size) for size in (GIB, 2 * GIB)] == [1, 2]
    sent.orders.reduce_memory(order)
    assert sent.frames[1:] == [ReclaimMemory(1, GIB), ReclaimMemory(2, 2 * GIB), order]


def test_reports_are_those_of_the_current_child():
    reports = EngineReports()
    none = (None, None, 0, 0)

    def read() -> tuple[EngineReport | None, float | None, int, int]:
        return reports.latest, reports.received_at, reports.limits_number, reports.freed_order

    assert read() == none
    for number in (3, 4):
        report = EngineReport(Memory(), (), 0, 0, limits_number=number, freed_order=number + 5)
        reports.store(report, 10.0 + number)
        assert read() == (report, 10.0 + number, number, number + 5)
    reports.clear()
    assert read() == none


def test_a_model_is_in_memory_while_it_is_loaded_or_loading():
    reports = EngineReports()
    models = Model("idle"), Model("loaded", loaded=True), Model("loading", loading=True)
    assert not reports.has_model_in_memory("loaded")
    reports.store(EngineReport(Memory(), models, 0, 0), 1.0)
    found = {name: reports.has_model_in_memory(name) for name in ("idle", "loaded", "loading", "other")}
    assert found == {"idle": False, "loaded": True, "loading": True, "other": False}
