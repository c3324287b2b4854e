"""The poll with real engine processes, read from outside like the agent does, under limits that a test sets."""

import asyncio
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from node.engine_process.supervisor import COMMAND, Supervisor
from node.engine_process.timeouts import SupervisorTimeouts
from node.illegal_events import IllegalEvents
from node.memory.enforcer import BUSY_POLL_SECONDS, EMPTY_POLL_SECONDS, IDLE_POLL_SECONDS, EnforcerState
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import WARNING_INTERVAL_SECONDS, MemoryPoll, compute_margin_in_force
from node.memory.reading import STALE_AFTER_SECONDS, HighWaterMarks
from node.settings import resolve_settings
from node.video import lease_rules
from tests import models
from tests.support.readings import FailingSource, Later, failing
from tests.unit.node.memory.test_limits import SetMachine
from wire.capacity.arithmetic import UNREADABLE, compute_headroom, compute_profiled_margin
from wire.codec import decode, encode
from wire.frames import (
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LeaseRequest,
    LoadModel,
    MemoryLimits,
    Message,
    Refusal,
)
from wire.refusals import FailureCode, RefusalCode
from wire.report import Hardware, Memory, MemoryLevel, Model
from wire.units import GIB, MIB

WAIT = 20.0
AT_ONCE = SupervisorTimeouts(first=0.01, longest=0.01, over=0.2, ping_busy=60.0, ping_idle=60.0)
"""Only the poll sends pings, where it needs one."""


MARKS = HighWaterMarks(lifetime=7 * GIB, interval=5 * GIB)


class MarkedSource(FailingSource):
    """A source with high-water marks that differ from each other."""

    def read_high_water_marks(self) -> HighWaterMarks:
        return MARKS


class SeenPoll(MemoryPoll):
    """A poll that notifies a test of each reading."""

    looked: Callable[[], None]

    def poll_once(self) -> None:
        try:
            super().poll_once()
        finally:
            self.looked()


class Node:
    """The composition root without a link: machine, limiter, supervisor, poll.

    `scripted`: Settings of the scripted engine.
    `models`: A folder that the real engine serves instead.
    """

    def __init__(
        self,
        folder: Path,
        memory: dict[str, object],
        command: Sequence[str] = COMMAND,
        models: Path | None = None,
        **scripted: object,
    ) -> None:
        flat = {"engine.kind": "scripted"} | {f"engine.scripted.{key}": value for key, value in scripted.items()}
        if models is not None:
            flat = {
                "engine.kind": "mlx",
                "models.folders": (str(models),),
                "models.use_huggingface_cache": False,
                "models.trial": False,
            }
        resolved = resolve_settings([("test", flat | {f"memory.{key}": value for key, value in memory.items()})])
        self.machine = SetMachine(hardware=Hardware("M5", 128 * GIB))
        self.limiter = Limiter(resolved.value, self.machine, resolved.origins, folder / "node")
        self.frames: list[tuple[Frame, int]] = []
        self._changed = asyncio.Event()
        self.illegal_events = IllegalEvents()
        self.supervisor = Supervisor(
            resolved.value,
            on_frame=self._frame,
            on_change=self._change,
            log_file=folder / "engine.log",
            scratch=folder / "scratch",
            wired=self.limiter.read_wired,
            illegal_events=self.illegal_events,
            command=command,
            timeouts=AT_ONCE,
        )
        self.first_cap = self.limiter.cap.bytes
        self.poll = SeenPoll(self.limiter, self.machine, self.supervisor)
        self.poll.looked = self._changed.set

    def _frame(self, tag: int, encoded: bytes, request: int) -> None:
        self.frames.append((decode(tag, encoded[5:]), request))
        self._changed.set()

    def _change(self) -> None:
        self.poll.poll_sooner()
        self._changed.set()

    async def until(self, wanted: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not wanted():
                self._changed.clear()
                await self._changed.wait()

    async def started(self) -> None:
        self.poll.start()
        await self.supervisor.start()
        await self.until(lambda: self.supervisor.ready and self.poll.state.engine == self.supervisor.ready)

    def generate(self, number: int, content: str = "hi", tokens: int = 20_000) -> None:
        message = Message("user", content)
        frame = Generate(number, number, "r", "scripted-1", (message,), GenerationParams(max_tokens=tokens), 0, tokens)
        self.supervisor.send(encode(frame), Generate, number)

    def ends(self, number: int) -> list[Frame]:
        kinds = (Finished, Refusal, Failed)
        return [frame for frame, request in self.frames if request == number and isinstance(frame, kinds)]

    async def end(self, number: int) -> Frame:
        await self.until(lambda: self.ends(number))
        (end,) = self.ends(number)
        return end

    def speaks(self, number: int) -> bool:
        deltas = (delta for frame, _ in self.frames if isinstance(frame, Deltas) for delta in frame.deltas)
        return any(delta.request == number for delta in deltas)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Node]]]:
    made: list[Node] = []

    async def start(memory: dict[str, object] | None = None, **scripted: Any) -> Node:
        made.append(Node(tmp_path, memory or {"cap": "90GiB", "margin": "1GiB"}, **scripted))
        await made[-1].started()
        return made[-1]

    yield start
    for one in made:
        one.poll.stop()
        await one.supervisor.stop()
        assert one.illegal_events.count == 0, "each is a bug"


@pytest.mark.parametrize(
    ("margin_auto", "said", "cap", "expected"),
    [
        (True, 8 * GIB, 8 * GIB, 200 * MIB),
        (True, 4 * GIB, 8 * GIB, 900 * MIB),
        (True, 0, 8 * GIB, 900 * MIB),
        (False, 8 * GIB, 8 * GIB, 900 * MIB),
        (True, 0, 0, 900 * MIB),
        (True, 1, 1, 200 * MIB),
    ],
)
def test_the_margin_in_force_is_the_one_that_the_gate_decided_under_this_cap(
    margin_auto: bool, said: int, cap: int, expected: int
):
    limits = MemoryLimits(cap, cap, 900 * MIB, "static", margin_auto=margin_auto)
    assert compute_margin_in_force(limits, Memory(cap=said, margin=200 * MIB)) == expected


@pytest.mark.slow
async def test_with_profiles_agent_and_engine_judge_leases_and_levels_by_one_margin(
    make: Callable[..., Awaitable[Node]], tmp_path: Path
):
    for name in ("one", "two"):
        shutil.copytree(models.path("llama"), tmp_path / "models" / name)
    node = await make({"cap": "2GiB", "margin": "auto"}, models=tmp_path / "models")
    wide = node.poll.read_memory().margin
    assert wide == 512 * MIB, "no model has a profile yet"
    for number, name in enumerate(("one", "two"), 1):
        node.supervisor.send(encode(LoadModel(number, name)), LoadModel, number)
        await node.end(number)
    await node.until(lambda: node.supervisor.reports.latest and node.supervisor.reports.latest.memory.margin < wide)
    memory, report = node.poll.read_memory(), node.supervisor.reports.latest
    assert report is not None
    assert memory.margin == report.memory.margin == compute_profiled_margin(2 * GIB, 0)
    room = compute_headroom(memory.ceiling, memory.margin, memory.phys, memory.reserved)
    assert room is not None
    ask = LeaseRequest("lease", 1, "job", "wan", room - 128 * MIB, b"")
    assert lease_rules.check_fits(ask, memory, report.models, frozenset()) is None, "two idle models can be unloaded"
    assert lease_rules.check_fits(ask, replace(memory, margin=wide), report.models, frozenset()) is not None


@pytest.mark.slow
async def test_the_limit_that_an_engines_device_reports_is_the_nodes_cap_and_its_gates_and_that_of_the_next_start(
    make: Callable[..., Awaitable[Node]],
):
    node = await make({"margin": "1GiB"}, metal="40GiB")
    supervisor = node.supervisor
    await node.until(lambda: supervisor.reports.latest and supervisor.reports.latest.memory.cap == 40 * GIB)
    assert supervisor.reports.latest is not None
    assert supervisor.reports.latest.metal_limit == 40 * GIB
    assert (node.limiter.cap.bytes, node.limiter.cap.bound_by) == (40 * GIB, "metal")
    assert node.poll.build_enforcement().cap_bound_by == "metal"
    node.generate(1, tokens=32_000)
    for number in range(2, 12):  # 4 GiB each, and 4 of weights: 8 fit below 39, 22 below the guess of 96
        node.generate(number, tokens=32_000)
    refusal = await node.end(9)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.numbers is not None
    assert refusal.refused.numbers.cap == 40 * GIB
    first = supervisor.ready
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await node.until(lambda: supervisor.ready not in (None, first) and supervisor.reports.latest)
    assert supervisor.reports.latest is not None
    assert supervisor.reports.latest.memory.cap == 40 * GIB, "the next engine begins with it"
    again = await make({"margin": "1GiB"}, metal="48GiB")
    assert again.first_cap == 40 * GIB, "and so does the next start, until its own engine reports"
    await again.until(
        lambda: again.supervisor.reports.latest and again.supervisor.reports.latest.memory.cap == 48 * GIB
    )


@pytest.mark.slow
async def test_a_new_engine_is_covered_and_so_is_the_one_after_a_death(
    make: Callable[..., Awaitable[Node]],
):
    node = await make()
    first = node.supervisor.ready
    assert first is not None
    assert node.poll.state.level is MemoryLevel.OK
    assert node.supervisor.reports.limits_number == 1
    report = node.supervisor.reports.latest
    assert report is not None
    assert report.memory.armed
    os.kill(first, signal.SIGKILL)
    await node.until(lambda: node.supervisor.ready not in (None, first))
    await node.until(lambda: node.poll.state.engine == node.supervisor.ready)
    report = node.supervisor.reports.latest
    assert report is not None
    assert (report.memory.cap, report.memory.armed, report.limits_number) == (90 * GIB, True, 1)


@pytest.mark.slow
async def test_a_process_that_no_look_has_seen_is_looked_at_at_once_and_not_at_the_next_poll(
    make: Callable[..., Awaitable[Node]],
):
    node = await make()
    node.poll.poll_once()
    node.poll.poll_sooner()
    looked = node.poll.state.polls
    await asyncio.sleep(0.1)
    assert node.poll.state.polls == looked, "for one that was seen the next poll is soon enough"
    node.poll.state = EnforcerState()
    node.poll.poll_sooner()
    for _ in range(3):  # turns of the loop without elapsed time
        await asyncio.sleep(0)
    assert node.poll.state.engine == node.supervisor.ready


@pytest.mark.slow
async def test_an_engine_over_its_cap_that_was_stopped_is_ended_within_its_polls_and_replaced(
    make: Callable[..., Awaitable[Node]],
):
    """The resident set of a real process is decisive: the engine reports 1 MiB, and then nothing more."""
    node = await make(weights="1MiB", kv_per_token=1)
    pid = node.supervisor.ready
    assert pid is not None
    node.generate(1)
    await node.until(lambda: node.speaks(1))
    os.kill(pid, signal.SIGSTOP)
    phys = node.supervisor.probe.read_footprint().phys
    assert phys is not None
    node.machine.container = phys // 2
    begun = time.monotonic()
    end = await node.end(1)
    assert time.monotonic() - begun < 3.0
    assert isinstance(end, Failed)
    assert end.code == FailureCode.ENGINE_LOST
    assert "over its cap: " in end.message
    assert "in two readings, without an answer of the engine" in end.message
    assert node.poll.state.kills == 1
    assert node.poll.build_enforcement().kills == 1
    node.machine.container = None
    await node.until(lambda: node.supervisor.ready not in (None, pid) and node.poll.state.level is MemoryLevel.OK)
    node.generate(2, tokens=4)
    assert isinstance(await node.end(2), Finished)
    assert node.supervisor.state.restarts == 1


IN_A_CALL = """
    import os, threading, time
    from node.engine.process import main as child
    from node.engine.process.interface import NativeCall
    from node.engine.scripted.batch import ScriptedBatch
    from node.engine.scripted.engine import ScriptedEngine

    decode, under_way, begun = ScriptedBatch.decode, [], []

    def slow(batch, steps, now):
        under_way.append(NativeCall("prefill", time.monotonic(), EXPECTED))
        time.sleep(SECONDS if begun else 0.0)
        begun.append(now)
        under_way.clear()
        return decode(batch, steps, now)

    ScriptedBatch.decode = slow
    ScriptedEngine.read_running_call = lambda engine: next(iter(under_way), None)
    child.main()
"""
"""An engine in which each decode step but the first is a native call of SECONDS."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "seconds", "kills"), [(2.0, 2.5, 0), (0.02, 30.0, 1)], ids=["as long as said", "longer than said"]
)
async def test_an_engine_over_its_cap_may_end_the_call_that_it_is_in(
    make: Callable[..., Awaitable[Node]], expected: float, seconds: float, kills: int
):
    """The order is carried out after the call: later than a period, and without counting as silence."""
    program = textwrap.dedent(IN_A_CALL).replace("EXPECTED", str(expected)).replace("SECONDS", str(seconds))
    node = await make(command=[sys.executable, "-c", program], weights="1MiB", kv_per_token=1)
    node.generate(1)
    await node.until(lambda: node.speaks(1))
    phys = node.supervisor.probe.read_footprint().phys
    assert phys is not None
    node.machine.container = phys // 2
    end = await node.end(1)
    assert isinstance(end, Failed)
    assert (node.poll.state.kills, end.code) == (kills, FailureCode.ENGINE_LOST if kills else "memory_pressure")


@pytest.mark.slow
async def test_a_busy_engine_over_its_cap_ends_its_newest_requests_one_by_one_and_the_others_finish(
    make: Callable[..., Awaitable[Node]],
):
    node = await make(kv_per_token=2**20, step_ms=50, max_context=4096)
    for number in (1, 2, 3, 4):
        node.generate(number, "word " * 1000, tokens=100)
        await node.until(lambda number=number: node.speaks(number))
    node.limiter.begin_lease(90 * GIB - (4 * GIB + 2560 * MIB), LeaseHolder.VIDEO)
    for number in (4, 3):
        end = await node.end(number)
        assert isinstance(end, Failed)
        assert end.code == "memory_pressure"
        assert "over its cap" in end.message
    assert not node.ends(1)
    assert not node.ends(2)
    node.limiter.end_lease()
    for number in (1, 2):
        assert isinstance(await node.end(number), Finished)
    assert node.poll.state.kills == 0
    assert node.poll.build_enforcement().over_caps == 1
    assert node.supervisor.state.counts.sheds == 2


@pytest.mark.slow
async def test_over_soft_no_request_is_admitted_and_the_report_shows_it(make: Callable[..., Awaitable[Node]]):
    node = await make()
    node.machine.free = 2 * GIB
    await node.until(
        lambda: node.supervisor.reports.latest and (node.supervisor.reports.latest.memory.headroom or 0) < 0
    )
    assert node.poll.state.level is MemoryLevel.OVER_SOFT
    node.generate(1)
    end = await node.end(1)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert node.poll.build_enforcement().remedy.startswith("close other programs")


@pytest.mark.slow
async def test_limits_are_confirmed_by_their_number(make: Callable[..., Awaitable[Node]]):
    node = await make()
    numbers = []
    for size in (36 * GIB, 0, 36 * GIB):
        node.limiter.begin_lease(size, LeaseHolder.VIDEO)
        node.poll.poll_once()
        numbers.append(node.supervisor.orders.limits_number)
    assert numbers == [2, 3, 4], "each limit was sent at once"
    await node.until(lambda: node.supervisor.reports.limits_number == 4)
    assert node.supervisor.reports.latest
    assert node.supervisor.reports.latest.memory.leases == 36 * GIB
    assert node.supervisor.reports.latest.memory.ceiling == 54 * GIB


@pytest.mark.slow
async def test_a_clock_that_jumps_ends_nothing_and_unarms_nothing(
    make: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
):
    node = await make(step_ms=2)
    for jump in (-1e9, 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        polls = node.poll.state.polls
        node.poll.poll_once()
        assert node.poll.state.polls == polls + 1
        assert node.poll.state.level is MemoryLevel.OK
        assert 0 <= node.poll.build_system_memory().age < 1
    node.generate(1, tokens=4)
    assert isinstance(await node.end(1), Finished)


@pytest.mark.slow
async def test_one_failed_reading_of_the_engine_or_of_the_machine_moves_no_limit(
    make: Callable[..., Awaitable[Node]],
):
    node = await make()
    node.machine.free = 60 * GIB
    node.poll.poll_once()
    told = node.supervisor.orders.limits_number
    source = failing(node.supervisor.child.sensor)  # type: ignore[union-attr]
    for fails in ("engine", "machine", "both"):
        standing = node.limiter.current_ceiling
        source.fails, node.machine.free = fails != "machine", 60 * GIB if fails == "engine" else None
        node.poll.poll_once()
        assert node.limiter.current_ceiling == standing
        assert node.poll.state.level is (MemoryLevel.OK if fails == "machine" else MemoryLevel.UNKNOWN)
        source.fails, node.machine.free = False, 60 * GIB
        assert node.poll.read_memory().phys, "a lease is judged by a new reading"
        node.poll.poll_once()
        assert node.poll.state.level is MemoryLevel.OK
    assert node.supervisor.orders.limits_number == told


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["engine", "machine"])
async def test_readings_that_fail_for_long_refuse_the_new_and_end_nothing(
    make: Callable[..., Awaitable[Node]], fails: str, monkeypatch: pytest.MonkeyPatch
):
    node = await make(step_ms=5)
    node.generate(1, tokens=400)
    await node.until(lambda: node.speaks(1))
    source = failing(node.supervisor.child.sensor)  # type: ignore[union-attr]
    source.fails, node.machine.free = fails == "engine", None if fails == "machine" else 128 * GIB
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    clock.by = STALE_AFTER_SECONDS + 1
    node.poll.poll_once()
    assert node.poll.read_memory().bound_by == UNREADABLE
    assert node.poll.state.level is MemoryLevel.UNKNOWN
    assert node.poll.build_enforcement().remedy.startswith("the memory of this machine cannot be read")
    await node.until(
        lambda: node.supervisor.reports.latest and node.supervisor.reports.latest.memory.bound_by == UNREADABLE
    )
    node.generate(2)
    end = await node.end(2)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.UNREADABLE
    assert isinstance(await node.end(1), Finished), "what ran was not disturbed"
    source.fails, node.machine.free = False, 128 * GIB
    node.poll.poll_once()
    await node.until(lambda: node.supervisor.reports.limits_number == node.supervisor.orders.limits_number)
    node.generate(3, tokens=4)
    assert isinstance(await node.end(3), Finished)
    assert (node.poll.state.kills, node.poll.state.over_caps, node.supervisor.state.restarts) == (0, 0, 0)


@pytest.mark.slow
async def test_what_is_read_outside_is_reported_with_source_and_age(
    make: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
):
    node = await make()
    system, enforcement = node.poll.build_system_memory(), node.poll.build_enforcement()
    assert (system.available, system.source) == (128 * GIB, "set")
    assert enforcement.level is MemoryLevel.OK
    assert enforcement.phys is not None
    assert 8 * MIB < enforcement.phys < 200 * MIB
    assert enforcement.highest is not None
    assert enforcement.highest >= enforcement.phys
    assert (enforcement.cap_bound_by, enforcement.tier) == ("setting", "custom")
    assert enforcement.polls == node.poll.state.polls > 0
    assert node.supervisor.child is not None
    node.supervisor.child.sensor.source = MarkedSource(node.supervisor.child.sensor.source)
    marked = node.poll.build_enforcement()
    assert (marked.highest, marked.interval) == (MARKS.lifetime, MARKS.interval)
    node.generate(1)
    handles = record_timers(monkeypatch)
    node.poll.poll_once()
    pause = handles[-1].when() - asyncio.get_running_loop().time()
    assert pause == pytest.approx(BUSY_POLL_SECONDS, abs=0.2), "a request is open"


async def test_a_weakened_guard_is_logged_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Node(tmp_path, {"cap": "90GiB", "margin": "0", "guard": "off"})
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    with structlog.testing.capture_logs() as logs:
        node.poll.poll_once()  # the start has logged them just before
        for _ in range(3):
            clock.by += WARNING_INTERVAL_SECONDS
            node.poll.poll_once()
            node.poll.poll_once()
    node.poll.stop()
    warnings = [line["warning"] for line in logs if line["event"] == "guard weakened"]
    assert len(warnings) == 6
    assert len(set(warnings)) == 2
    assert set(node.poll.build_enforcement().warnings) == set(warnings)
    monkeypatch.setattr(Supervisor, "warnings", ("memory stayed wired",))
    assert node.poll.build_enforcement().warnings == (*node.limiter.list_warnings(), "memory stayed wired")


def record_timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Return a list to which the running loop adds each timer from now on."""
    handles: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def record(when: float, *call: Any) -> asyncio.TimerHandle:
        handles.append(call_at(when, *call))
        return handles[-1]

    monkeypatch.setattr(loop, "call_at", record)
    return handles


@pytest.mark.parametrize(
    ("models", "pause"),
    [
        ((), EMPTY_POLL_SECONDS),
        ((Model("a"), Model("b", cause="broken")), EMPTY_POLL_SECONDS),
        ((Model("a", loaded=True), Model("b")), IDLE_POLL_SECONDS),
        ((Model("a", loaded=True), Model("b", loading=True), Model("c")), BUSY_POLL_SECONDS),
    ],
    ids=["none", "known", "loaded", "loading"],
)
async def test_the_next_poll_follows_after_the_pause_for_the_models_until_polling_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: tuple[Model, ...], pause: float
):
    node, loop, clock = Node(tmp_path, {"cap": "90GiB"}), asyncio.get_running_loop(), Later()
    handles = record_timers(monkeypatch)
    node.supervisor.reports.store(EngineReport(Memory(), models, 0, 0), 0.0)
    for _ in range(2):
        node.poll.poll_once()
    first, second = handles
    assert first.cancelled()
    assert second.when() - loop.time() == pytest.approx(pause, abs=0.2)
    node.poll.stop()
    assert second.cancelled()
    node.poll.poll_sooner()
    assert len(handles) == 2, "nothing moves a poll that is not scheduled"
    monkeypatch.setattr(time, "monotonic", clock)
    clock.by = 7.0
    assert node.poll.build_system_memory().age == pytest.approx(7.0, abs=1.0)


async def test_a_look_that_fails_does_not_end_the_polling(tmp_path: Path):
    node = Node(tmp_path, {"cap": "90GiB"})
    broken = node.machine.read_available
    looked = asyncio.Event()

    def fail() -> None:
        raise OSError("the sensor broke")

    node.machine.read_available = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="the sensor broke"):
        node.poll.start()

    def heal() -> object:
        looked.set()
        return broken()

    node.machine.read_available = heal  # type: ignore[method-assign, assignment]
    await asyncio.wait_for(looked.wait(), 30)
    node.poll.stop()
