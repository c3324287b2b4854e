"""Poll the memory of the engine and the machine from the agent, set the limits, and run the enforcer.

Polls run from `start` to `stop`. A poll that fails still schedules the next one. A new report or a new process of the
engine can move the next poll forward.
"""

import asyncio
import time

import structlog
from msgspec.structs import replace

from node.engine_process.supervisor import Supervisor
from node.memory import enforcer
from node.memory.enforcer import EndEngine, EnforcerInput, EnforcerState, SendOrder
from node.memory.limits import Limiter
from node.memory.reading import AvailableMemory
from node.memory.sensor import MachineMemory
from node.memory.timer import Timer
from wire.capacity.arithmetic import Fits, judge_load
from wire.enforcer_report import Enforcement
from wire.frames import MemoryLimits
from wire.machine import SystemMemory
from wire.report import Memory, MemoryLevel

WARNING_INTERVAL_SECONDS = 600.0
"""Seconds between log events about settings that weaken the memory safety of this node."""

log = structlog.get_logger("node.memory.poll")


def compute_margin_in_force(limits: MemoryLimits, reported: Memory) -> int:
    """Return the margin in bytes that the engine's gate uses, from the memory that the engine `reported`.

    An automatic margin is the one in the engine's report, because only the engine has the profiles to compute it.
    Before the first report under the current cap, the result is the margin without profiles.
    """
    decided = limits.margin_auto and reported.cap == limits.cap > 0
    return reported.margin if decided else limits.margin


class MemoryPoll:
    """Periodic memory poll of the agent. Call all methods on the loop that called `start`."""

    def __init__(self, limiter: Limiter, machine: MachineMemory, supervisor: Supervisor) -> None:
        self._limiter = limiter
        self._machine = machine
        self._supervisor = supervisor
        self._alarm = Timer(self.poll_once)
        self._polled_at = 0.0
        self._warned_at = time.monotonic()
        self._phys: int | None = None
        self._spare: AvailableMemory = machine.read_available()
        self.state = EnforcerState()
        """State of the enforcer after the last poll."""

    def start(self) -> None:
        """Poll now, and then periodically. Call before the first engine starts, because an engine needs limits."""
        self.poll_once()

    def stop(self) -> None:
        """Stop polling. A later `poll_once` starts it again."""
        self._alarm.cancel()

    def poll_sooner(self) -> None:
        """Move the next poll forward after a change of the engine.

        If the engine is a new process, poll at once. Otherwise poll when the pause for the engine's new state
        (`compute_pause_seconds`) has passed since the last poll. Do nothing before `start` and after `stop`.
        """
        now = asyncio.get_running_loop().time()
        new = self._supervisor.ready is not None and self._supervisor.ready != self.state.engine
        self._alarm.move_forward(now if new else max(now, self._polled_at + self._compute_pause_seconds()))

    def poll_once(self) -> None:
        """Read the memory, set the limits, run the enforcer, and reschedule the next poll.

        The next poll is scheduled even if this one raises.
        """
        loop = asyncio.get_running_loop()
        self._polled_at = loop.time()
        try:
            self._poll(time.monotonic())
        finally:
            self._alarm.set(self._polled_at + self._compute_pause_seconds())

    def _poll(self, now: float) -> None:
        supervisor = self._supervisor
        self._phys, self._spare = supervisor.probe.read_footprint().phys, self._machine.read_available()
        report = supervisor.reports.latest
        if report is not None and supervisor.ready is not None:
            self._limiter.report_metal(supervisor.ready, report.metal_limit)
        limits = self._limiter.poll(self._get_ceiling_footprint(), supervisor.orders.set_limits)
        reading = EnforcerInput(
            supervisor.ready,
            self._build_memory(limits),
            report.enforced if report else 0,
            supervisor.probe.call_until,
        )
        before = self.state.level
        self.state, actions = enforcer.step(self.state, reading, now)
        if self.state.level != before and self._should_warn(reading.memory):
            log.warning(
                "engine over cap",
                level=self.state.level.name,
                phys=self._phys,
                cap=limits.cap,
                ceiling=limits.ceiling,
                margin=reading.memory.margin,
                leases=limits.leases,
                bound_by=limits.bound_by,
            )
        for action in actions:
            self._run_action(action)
        if self.state.order_number:
            supervisor.probe.ping()
        if now - self._warned_at >= WARNING_INTERVAL_SECONDS:
            self._warned_at = now
            self._limiter.warn()

    def _should_warn(self, memory: Memory) -> bool:
        """Return whether the level deserves a warning.

        A load may use the margin (`arithmetic.judge_load`): a headroom below 0 deserves no warning while all loaded
        models and all commitments fit under the ceiling.
        """
        if self.state.level is not MemoryLevel.OVER_SOFT:
            return self.state.level is MemoryLevel.OVER_HARD
        return not isinstance(judge_load(memory, 0), Fits)

    def _get_ceiling_footprint(self) -> int | None:
        """Return the footprint in bytes that the ceiling follows from: 0 without an engine, None when unreadable."""
        return 0 if self._supervisor.pid is None else self._phys

    def _build_memory(self, limits: MemoryLimits) -> Memory:
        """Return the memory part of the engine's last report, with the agent's own reading and the current limits."""
        report = self._supervisor.reports.latest
        reported = report.memory if report else Memory()
        return replace(
            reported,
            phys=self._phys,
            cap=limits.cap,
            ceiling=limits.ceiling,
            margin=compute_margin_in_force(limits, reported),
            leases=limits.leases,
            bound_by=limits.bound_by,
            guard=limits.guard,
        )

    def _run_action(self, action: enforcer.Action) -> None:
        match action:
            case SendOrder():
                self._supervisor.orders.reduce_memory(action.order)
            case EndEngine():
                log.error("engine ended", reason=action.cause)
                self._supervisor.end(action.cause)

    def _compute_pause_seconds(self) -> float:
        report = self._supervisor.reports.latest
        models = report.models if report else ()
        busy = bool(self._supervisor.live) or any(model.loading for model in models)
        return enforcer.compute_pause_seconds(self.state, busy=busy, loaded=any(model.loaded for model in models))

    def read_memory(self) -> Memory:
        """Read the footprint of the engine and the machine now, and return the engine's memory with current limits.

        The limits are not sent to the engine.
        """
        self._phys = self._supervisor.probe.read_footprint().phys
        return self._build_memory(self._limiter.compute_limits(self._get_ceiling_footprint()))

    # parts of the report

    def build_system_memory(self) -> SystemMemory:
        """Return the last reading of the machine's memory for the node's report.

        The result includes the current footprint of the process group that uses a lease, which is read now.
        """
        spare = self._spare
        age = max(0.0, time.monotonic() - spare.at)
        return SystemMemory(
            spare.available, spare.pressure, spare.source, age, self._limiter.measure_worker_footprint()
        )

    def build_enforcement(self) -> Enforcement:
        """Return the enforcer's level, readings and counts for the node's report, with limiting terms and warnings."""
        state, limiter, highs = self.state, self._limiter, self._supervisor.probe.read_high_water_marks()
        return Enforcement(
            state.level,
            self._phys,
            highs.lifetime,
            highs.interval,
            limiter.cap.bound_by,
            limiter.current_ceiling.remedy,
            limiter.tier,
            (*limiter.list_warnings(), *self._supervisor.warnings),
            state.polls,
            state.over_caps,
            state.kills,
        )
