"""Expected seconds of native calls, no new call once the process ends, and the checks of the gate."""

import time
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.footprint import MAX_FREE_BUFFER_BYTES, EngineMemory, MlxPeakTracker
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.memory.gated_forward import UNWIRE_AFTER_SECONDS, GatedForwards
from node.engine.memory.memory_reader import MemoryReader
from node.engine.models.load_times import MIN_LOAD_BYTES_PER_SECOND
from node.engine.process.crash_recorder import CrashRecord, CrashRecorder
from node.engine.process.device_errors import DeviceLost
from node.engine.process.interface import Halted, NativeCallKind
from node.engine_process.timeouts import SupervisorTimeouts
from tests import models
from tests.support.engine.text_engine import GREEDY, Driver
from tests.support.readings import Later
from wire.frames import LoadModel, MemoryLimits
from wire.refusals import RefusalCode, Refused
from wire.units import GIB, MIB

WEIGHTS = {"large": 85 * GIB, "small": GIB}


def new_forwards(clock: Later | None = None, recorder: CrashRecorder | None = None) -> GatedForwards:
    """Make forwards of an engine that holds both models and releases nothing."""
    return GatedForwards(
        recorder or CrashRecorder(),
        MemoryReader(EngineMemory(GIB, lambda: 0), MemoryGate(), lambda: 0),
        MlxPeakTracker(),
        lambda site, need: False,
        lambda refused: False,
        WEIGHTS.__getitem__,
        clock,
    )


@pytest.fixture
def clock() -> Later:
    return Later()


@pytest.fixture
def forwards(clock: Later) -> GatedForwards:
    return new_forwards(clock)


def expected(forwards: GatedForwards, doing: NativeCallKind, model: str = "large", own: float = 0.5) -> float:
    """Make a call and return its expected seconds minus its own time."""
    with forwards.run_native(doing, model, 1, own) as call:
        assert forwards.call is call
        return call.expected - own


READ_AGAIN = WEIGHTS["large"] / MIN_LOAD_BYTES_PER_SECOND


def test_the_first_forward_after_a_load_may_read_the_weights_again_and_the_next_may_not(forwards: GatedForwards):
    assert expected(forwards, NativeCallKind.LOAD) == READ_AGAIN, "with its last piece it runs for the first time"
    assert expected(forwards, NativeCallKind.PREFILL) == READ_AGAIN
    assert expected(forwards, NativeCallKind.PREFILL) == 0.0
    expected(forwards, NativeCallKind.LOAD)
    assert expected(forwards, NativeCallKind.PREFILL) == READ_AGAIN, "loaded again, however soon"


def test_the_first_forward_after_a_rest_may_read_the_weights_again(forwards: GatedForwards, clock: Later):
    for _ in range(2):
        expected(forwards, NativeCallKind.PREFILL)
    clock.by += UNWIRE_AFTER_SECONDS / 2
    assert expected(forwards, NativeCallKind.DECODE) == 0.0
    clock.by += UNWIRE_AFTER_SECONDS
    assert expected(forwards, NativeCallKind.PREFILL) == READ_AGAIN
    assert expected(forwards, NativeCallKind.JOIN) == expected(forwards, NativeCallKind.DECODE) == 0.0


def test_a_decode_step_is_waited_for_in_the_call_after_it(forwards: GatedForwards, clock: Later):
    assert [expected(forwards, NativeCallKind.DECODE) for _ in range(3)] == [READ_AGAIN, READ_AGAIN, 0.0]
    clock.by += 2 * UNWIRE_AFTER_SECONDS
    expected(forwards, NativeCallKind.DECODE)
    with forwards.publish_wait(NativeCallKind.DECODE, "large", 0.0) as call:
        assert call.expected == READ_AGAIN


def test_each_model_rests_for_itself(forwards: GatedForwards, clock: Later):
    expected(forwards, NativeCallKind.PREFILL, "small")
    clock.by += 2 * UNWIRE_AFTER_SECONDS
    expected(forwards, NativeCallKind.PREFILL, "large")
    assert expected(forwards, NativeCallKind.PREFILL, "large") == 0.0
    assert expected(forwards, NativeCallKind.PREFILL, "small") == WEIGHTS["small"] / MIN_LOAD_BYTES_PER_SECOND


def test_a_rest_includes_the_sleep_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    """The clock of all deadlines stops during sleep, another clock continues."""
    made = new_forwards()
    expected(made, NativeCallKind.PREFILL)
    read, goes_on = time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + 8 * 3600 * (clock == goes_on))
    assert expected(made, NativeCallKind.DECODE) == READ_AGAIN


def test_the_hang_rule_leaves_time_to_read_the_weights_again(forwards: GatedForwards):
    with forwards.run_native(NativeCallKind.PREFILL, "large", 1, 0.5) as call:
        assert not SupervisorTimeouts().is_hung(READ_AGAIN, call.expected)
    with forwards.run_native(NativeCallKind.PREFILL, "large", 1, 0.5) as call:
        assert SupervisorTimeouts().is_hung(10.1, call.expected)


def test_once_halted_no_call_begins(forwards: GatedForwards):
    forwards.halted = True
    with pytest.raises(Halted), forwards.run_native(NativeCallKind.PREFILL, "large", 1, 0.5):
        raise AssertionError("it began")
    assert forwards.get_counts().forwards == 0


def test_run_native_records_a_call_while_it_runs_and_counts_its_prompt_tokens():
    recorder = CrashRecorder()
    forwards = new_forwards(recorder=recorder)
    for _ in range(2):
        with forwards.run_native(NativeCallKind.PREFILL, "small", 3, 0.5, prefill_tokens=5):
            assert recorder.read_running_call() == CrashRecord(NativeCallKind.PREFILL, 3, "small")
        assert recorder.read_running_call() is None
    assert forwards.get_counts().prefill_tokens == 10


def test_the_record_of_a_call_with_a_failed_command_buffer_stays_for_the_agent():
    recorder = CrashRecorder()
    forwards = new_forwards(recorder=recorder)
    with pytest.raises(KeyError), forwards.run_native(NativeCallKind.PREFILL, "small", 2, 0.5):
        raise KeyError
    assert recorder.read_running_call() is None
    lost = "[METAL] Command buffer execution failed: Insufficient Memory."
    with pytest.raises(DeviceLost, match=r"Insufficient Memory\."):  # noqa: SIM117 the inner context converts it
        with forwards.run_native(NativeCallKind.PREFILL, "small", 3, 0.5):
            raise RuntimeError(lost)
    assert recorder.read_running_call() == CrashRecord(NativeCallKind.PREFILL, 3, "small")
    assert forwards.call is None


def test_run_native_after_a_forward_for_embeddings_needs_no_weights_again(forwards: GatedForwards):
    expected(forwards, NativeCallKind.EMBED)
    assert expected(forwards, NativeCallKind.PREFILL) == 0.0


@pytest.mark.parametrize(("kind", "is_measured"), [(NativeCallKind.PREFILL, True), (NativeCallKind.LOAD, False)])
def test_run_native_measures_the_peak_of_forwards_alone(
    forwards: GatedForwards, kind: NativeCallKind, is_measured: bool
):
    mx.eval(mx.zeros(64 * MIB, mx.uint8) + 1)  # a peak before the call
    with forwards.run_native(kind, "small", 1, 0.5):
        mx.eval(mx.zeros(4 * MIB, mx.uint8) + 1)
    measured = forwards.gate.get_measures().transient.total
    assert (4 * MIB <= measured < 64 * MIB) if is_measured else measured == 0


def test_an_engine_counts_the_weights_that_it_has(tmp_path: Path):
    (tmp_path / "a").symlink_to(models.path("llama"))
    driver = Driver(tmp_path)

    def rewiring(model: str) -> float:
        with driver.engine.parts.forwards.publish_wait(NativeCallKind.DECODE, model, 0.0) as call:
            return call.expected

    seen: list[float] = []
    driver.take(LoadModel(7, "a"))
    while not driver.said[7]:
        driver.turn()
        seen.append(rewiring("a"))
    weights = driver.resident("a").weights
    assert seen[-1] == weights / MIN_LOAD_BYTES_PER_SECOND
    assert seen[0] < seen[-1]
    driver.answer("Hello!", GREEDY)
    assert rewiring("a") == 0.0
    assert rewiring("b") == 0.0, "nothing of it is here"


class Asked:
    """Forwards with a gate over this process's own memory, and a record of the steps to make room."""

    def __init__(self, room: int, *, makes_room: bool = False, cap: int = 1024 * GIB, guard: bool = True) -> None:
        self.made_room: list[tuple[GateSite, int]] = []
        self.given_up: list[Refused] = []
        self.makes_room = makes_room
        self.loads = self.frees = False
        self.reserved = 0
        self.forwards = GatedForwards(
            CrashRecorder(),
            MemoryReader(EngineMemory(GIB, lambda: 0), MemoryGate(), lambda: self.reserved),
            MlxPeakTracker(),
            self._make_room,
            self._give_up_load,
            WEIGHTS.__getitem__,
        )
        self.hold(room, cap=cap, guard=guard)

    def hold(self, room: int, *, cap: int = 1024 * GIB, guard: bool = True) -> None:
        """Leave `room` bytes under the ceiling."""
        self.forwards.gate.set_limits(MemoryLimits(GIB, GIB, 0, ""))
        current = self.forwards.read_memory(time.monotonic()).current
        assert current is not None
        self.forwards.gate.set_limits(MemoryLimits(cap, current + room, 0, "dynamic", guard))

    def _make_room(self, site: GateSite, need: int) -> bool:
        self.made_room.append((site, need))
        return self.makes_room

    def _give_up_load(self, refused: Refused) -> bool:
        self.given_up.append(refused)
        if self.frees:
            self.hold(GIB)
        return self.loads


def test_a_fitting_forward_is_checked_once_and_frees_nothing():
    asked = Asked(256 * MIB)
    assert asked.forwards.check(GateSite.PREFILL, MIB) is None
    assert asked.made_room == []
    assert (asked.forwards.get_counts().checks, asked.forwards.get_counts().refusals) == (1, 0)


@pytest.mark.parametrize("makes_room", [False, True])
def test_memory_is_freed_once_before_a_refusal_and_the_gate_is_checked_again(makes_room: bool):
    asked = Asked(256 * MIB, makes_room=makes_room)
    refused = asked.forwards.check(GateSite.JOIN, GIB)
    assert refused is not None
    assert refused.code is RefusalCode.NO_ROOM, "the gate decides after the attempt to free memory"
    assert asked.made_room == [(GateSite.JOIN, GIB)]
    assert asked.forwards.gate.checks == {GateSite.JOIN: 1 + makes_room}
    assert asked.forwards.get_counts().refusals == 1 + makes_room


def test_nothing_is_given_back_where_the_gate_is_closed():
    asked = Asked(256 * MIB)
    asked.forwards.gate.set_limits(MemoryLimits(0, 0, 0, ""))
    refused = asked.forwards.check(GateSite.GROW, 1)
    assert refused is not None
    assert refused.code is RefusalCode.NOT_READY
    assert asked.made_room == []


@pytest.mark.parametrize(("fits", "shrinks"), [(512, 0), (256, 1), (128, 2)])
def test_the_largest_chunk_that_passes_is_taken_and_each_smaller_one_counted(fits: int, shrinks: int):
    asked = Asked(GIB)
    need = {512: 1, 256: 1, 128: 1} | {size: 64 * GIB for size in (512, 256, 128) if size > fits}
    assert asked.forwards.check_shrinking(GateSite.PREFILL, (512, 256, 128), need.__getitem__) == fits
    assert asked.forwards.get_counts().shrinks == shrinks
    assert asked.made_room == [], "kept prefixes stay as long as a smaller chunk fits"


def test_room_is_made_for_the_smallest_chunk_only_and_it_may_be_refused():
    asked = Asked(GIB)
    refused = asked.forwards.check_shrinking(GateSite.PREFILL, (512, 256), lambda size: size * GIB)
    assert isinstance(refused, Refused)
    assert refused.numbers is not None
    assert refused.numbers.estimate == 256 * GIB
    assert asked.made_room == [(GateSite.PREFILL, 256 * GIB)]
    assert asked.forwards.get_counts().shrinks == 1


def test_free_buffers_are_room_for_work_that_could_be_made_smaller():
    mx.set_cache_limit(MAX_FREE_BUFFER_BYTES)
    asked, buffers = Asked(GIB), mx.zeros(32 * MIB, mx.uint8) + 1
    mx.eval(buffers)
    del buffers
    assert mx.get_cache_memory() >= 32 * MIB
    asked.hold(8 * MIB)
    assert asked.forwards.check_optional(GateSite.PREFILL, 24 * MIB)
    assert mx.get_cache_memory() == 0
    assert not asked.forwards.check_optional(GateSite.PREFILL, GIB)
    assert asked.made_room == [], "cached prefixes and models stay"


def test_what_is_reserved_at_this_moment_is_off_the_room():
    asked = Asked(256 * MIB)
    asked.reserved = 192 * MIB
    assert asked.forwards.read_memory(time.monotonic()).reserved == 192 * MIB
    assert asked.forwards.check(GateSite.PREFILL, 96 * MIB) is not None
    asked.reserved = 0
    assert asked.forwards.check(GateSite.PREFILL, 96 * MIB) is None


def test_a_forward_over_the_cap_ends_a_request_with_the_numbers_whatever_the_ceiling():
    asked = Asked(GIB, cap=MIB)
    refused = asked.forwards.check_cap()
    assert refused is not None
    assert refused.code is RefusalCode.NO_ROOM
    assert refused.numbers is not None
    assert refused.numbers.cap == MIB
    assert asked.forwards.get_counts().overs == 1
    asked.hold(GIB)
    assert asked.forwards.check_cap() is None
    assert asked.forwards.get_counts().overs == 1


def test_over_the_cap_a_load_is_given_up_first_and_that_may_not_be_enough():
    asked = Asked(GIB, cap=MIB)
    asked.loads = True
    assert asked.forwards.check_cap() is not None, "still over"
    (given_up,) = asked.given_up
    assert "over its cap" in given_up.message
    asked.frees = True
    assert asked.forwards.check_cap() is None, "no request is ended where the load was enough"
    assert asked.forwards.get_counts().overs == 2


def test_with_the_guard_off_by_name_no_forward_is_over():
    asked = Asked(GIB, cap=MIB, guard=False)
    assert asked.forwards.check_cap() is None
    assert asked.forwards.get_counts().overs == 0


def test_prefills_joins_and_steps_are_counted_apart_and_loads_are_neither():
    asked = Asked(GIB)
    for doing in (
        NativeCallKind.PREFILL,
        NativeCallKind.JOIN,
        NativeCallKind.JOIN,
        NativeCallKind.DECODE,
        NativeCallKind.LOAD,
    ):
        with asked.forwards.run_native(doing, "small", 1, 0.5) as call:
            assert asked.forwards.call is call
            assert call.kind == doing.name.lower()
    assert asked.forwards.call is None
    counts = asked.forwards.get_counts()
    assert (counts.forwards, counts.steps) == (3, 1)
