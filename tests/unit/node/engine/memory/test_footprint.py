"""The engine's own memory for its gate: bytes of MLX, the recent peak, and bytes that are released."""

import time
from collections.abc import Callable

import mlx.core as mx
import pytest

from node.engine.memory.footprint import (
    MAX_FREE_BUFFER_BYTES,
    EngineMemory,
    MlxPeakTracker,
    clear_buffers,
    limit_buffers,
    release_free_memory,
)
from node.engine.memory.gate import MemoryGate
from tests.support.readings import failing, trailing
from wire.frames import MemoryLimits
from wire.report import Memory
from wire.units import GIB, MIB


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Release memory of earlier tests: an array in buffers that MLX kept would change neither count nor footprint."""
    release_free_memory()


@pytest.fixture
def gate() -> MemoryGate:
    made = MemoryGate()
    made.set_limits(MemoryLimits(64 * GIB, 64 * GIB, GIB, "static"))
    return made


def held(size: int) -> mx.array:
    array = mx.full((size // 4,), 0.5)
    mx.eval(array)
    return array


@pytest.mark.parametrize(("cap", "limit"), [(8 * GIB, 8 * GIB // 100), (64 * GIB, MAX_FREE_BUFFER_BYTES), (0, 0)])
def test_the_pool_is_one_percent_of_the_cap_and_256_mib_at_most(cap: int, limit: int):
    limit_buffers(cap)
    assert mx.set_cache_limit(MAX_FREE_BUFFER_BYTES) == limit


def test_free_buffers_go_and_what_is_held_stays():
    mx.set_cache_limit(MAX_FREE_BUFFER_BYTES)
    kept, gone = held(8 * MIB), held(16 * MIB)
    del gone
    assert mx.get_cache_memory() >= 16 * MIB
    clear_buffers()
    assert mx.get_cache_memory() == 0
    assert mx.get_active_memory() >= kept.nbytes


@pytest.mark.parametrize("free", [clear_buffers, release_free_memory])
def test_free_buffers_go_only_after_the_launched_work(monkeypatch: pytest.MonkeyPatch, free: Callable[[], None]):
    calls = list[str]()
    for name in ("synchronize", "clear_cache"):
        monkeypatch.setattr(mx, name, lambda name=name: calls.append(name))
    free()
    assert calls == ["synchronize", "clear_cache"]


def test_a_reading_has_what_mlx_holds_the_footprint_and_the_base(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    array = held(64 * MIB)
    memory = footprint.read_memory(gate, 5 * MIB, time.monotonic())
    assert memory.active == mx.get_active_memory() >= array.nbytes
    assert memory.cache == mx.get_cache_memory()
    assert memory.peak == mx.get_peak_memory()
    assert memory.phys is not None
    assert memory.base + 56 * MIB < memory.phys
    assert (memory.reserved, memory.total, memory.armed) == (5 * MIB, 128 * GIB, True)


def test_a_height_above_what_is_held_on_purpose_is_remembered_for_five_seconds(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    release_free_memory()

    def read(now: float) -> Memory:
        return footprint.read_memory(gate, 0, now)

    began = time.monotonic() - 3.0  # the last reading must not count as stale five seconds later
    array = held(256 * MIB)
    high = read(began)
    assert high.current is not None
    del array
    release_free_memory()
    after = read(began + 1.5)
    assert after.current is not None
    assert after.current > high.current - 32 * MIB, "what stood there a moment ago still counts"
    assert footprint.find_peak_expiry(began + 1.5) == began + 5.0
    fallen = read(began + 5.5)
    assert fallen.current is not None
    assert fallen.current < high.current - 200 * MIB
    assert footprint.find_peak_expiry(began + 6.0) is None


def test_a_height_is_remembered_on_top_of_what_is_held_since(gate: MemoryGate):
    kept = held(128 * MIB)
    footprint = EngineMemory(128 * GIB, lambda: kept.nbytes)
    release_free_memory()
    spike = held(128 * MIB)
    high = footprint.read_memory(gate, 0, 100.0)
    del spike
    release_free_memory()
    after = footprint.read_memory(gate, 0, 101.5)
    assert high.phys is not None
    assert after.recent == pytest.approx(high.phys, abs=16 * MIB)


def test_what_was_given_back_on_purpose_is_not_held_against_the_next_request(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    array = held(256 * MIB)
    high = footprint.read_memory(gate, 0, 100.0)
    del array
    release_free_memory()
    footprint.reset_peak()
    low = footprint.read_memory(gate, 0, 100.5)
    assert high.current is not None
    assert low.current is not None
    assert low.current < high.current - 200 * MIB


def test_a_footprint_that_falls_late_is_awaited_and_does_not_count_as_a_peak(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    trailing(footprint.sensor, 0.2)
    array = held(256 * MIB)
    high = footprint.read_memory(gate, 0, time.monotonic())
    footprint.reset_peak()
    del array
    release_free_memory()
    late = footprint.read_memory(gate, 0, time.monotonic())
    settled = footprint.read_memory(gate, 0, time.monotonic(), settled=True)
    expiry = footprint.find_peak_expiry(time.monotonic())
    footprint.wait_until_settled(5.0)
    low = footprint.read_memory(gate, 0, time.monotonic())
    assert high.phys is not None
    assert late.current is not None
    assert late.current >= high.phys, "the gate judges what the system reports"
    assert expiry is not None
    for after in (settled, low):
        assert after.current is not None
        assert after.current < high.phys - 200 * MIB


def test_nothing_is_awaited_where_the_footprint_falls_at_once(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    source = trailing(footprint.sensor, 60.0)
    source.source = "statm"
    array = held(64 * MIB)
    footprint.read_memory(gate, 0, time.monotonic())
    del array
    release_free_memory()
    began = time.monotonic()
    footprint.wait_until_settled(5.0)
    assert time.monotonic() < began + 2.5


def test_a_reading_that_fails_moves_with_what_mlx_takes_and_is_unknown_after_five_seconds(gate: MemoryGate):
    footprint = EngineMemory(128 * GIB, lambda: 0)
    source = failing(footprint.sensor)
    now = time.monotonic()
    before = footprint.read_memory(gate, 0, now)
    source.fails = True
    array = held(64 * MIB)
    during = footprint.read_memory(gate, 0, now + 1.0)
    assert before.phys is not None
    assert during.phys is not None
    assert during.phys - before.phys == pytest.approx(array.nbytes, abs=MIB)
    assert during.armed
    blind = footprint.read_memory(gate, 0, now + 6.0)
    assert (blind.phys, blind.current, blind.headroom, blind.armed) == (None, None, None, False)
    source.fails = False
    assert footprint.read_memory(gate, 0, time.monotonic()).phys is not None


def test_a_height_is_measured_from_its_own_mark_and_the_highest_ever_is_kept():
    height = MlxPeakTracker()
    release_free_memory()
    height.mark()
    first = held(32 * MIB)
    assert height.measure_peak_above_mark() == pytest.approx(32 * MIB, abs=MIB)
    del first
    assert height.measure_peak_drop() == pytest.approx(32 * MIB, abs=MIB)
    ever = height.get_highest()
    height.mark()
    assert (height.marks, height.measure_peak_above_mark()) == (2, 0)
    assert height.get_highest() == ever
