"""The poll: reads the engine and the machine from outside, puts limits in force, and lets the enforcer act.

It is the agent's half of the memory safety, and runs for as long as the agent does: whatever happens in one look, the
next is planned. What changes at the engine (work came, a new process is up) brings the next look forward.
"""

import asyncio
import time

import structlog
from msgspec.structs import replace

from node import enforcer
from node.alarm import Alarm
from node.enforcer import End, Seen, State, Tell
from node.limits import Limiter
from node.memory.reading import Spare
from node.memory.sensor import Machine
from node.supervise import Supervisor
from wire.frames import Limits
from wire.report import Enforcement, Level, Memory, System

WARN_EVERY = 600.0
"""Seconds after which the log says again what makes this node less safe than it could be."""

log = structlog.get_logger("node.poll")


class Poll:
    """Drives limiter and enforcer over one engine. Everything runs on the loop that called `start`."""

    def __init__(self, limiter: Limiter, machine: Machine, supervisor: Supervisor) -> None:
        self._limiter = limiter
        self._machine = machine
        self._supervisor = supervisor
        self._alarm = Alarm(self.look)
        self._looked = 0.0
        self._warned = time.monotonic()
        self._phys: int | None = None
        self._spare: Spare = machine.spare()
        self.state = State()

    def start(self) -> None:
        """Look now, so that the first engine finds its limits, and from now on."""
        self.look()

    def stop(self) -> None:
        """Look no more."""
        self._alarm.cancel()

    def changed(self) -> None:
        """Something changed at the engine: look sooner where that is due, and at once at a new process."""
        now = asyncio.get_running_loop().time()
        new = self._supervisor.ready is not None and self._supervisor.ready != self.state.engine
        self._alarm.sooner(now if new else max(now, self._looked + self._pause()))

    def look(self) -> None:
        """Read, put limits in force, enforce."""
        loop = asyncio.get_running_loop()
        self._looked = loop.time()
        try:
            self._look(time.monotonic())
        finally:
            self._alarm.set(self._looked + self._pause())

    def _look(self, now: float) -> None:
        supervisor = self._supervisor
        reading = supervisor.phys()
        self._phys, self._spare = reading.phys, self._machine.spare()
        limits = self._limiter.poll(reading.phys, supervisor.set_limits)
        report = supervisor.report
        seen = Seen(supervisor.ready, self._judged(limits), report.enforced if report else 0)
        before = self.state.level
        self.state, actions = enforcer.step(self.state, seen, now)
        if self.state.level != before and self.state.level >= Level.OVER_SOFT:
            log.warning("over", level=self.state.level.name, phys=self._phys, cap=limits.cap, ceiling=limits.ceiling,
                        leases=limits.leases, bound_by=limits.bound_by)  # fmt: skip
        for action in actions:
            self._act(action)
        if now - self._warned >= WARN_EVERY:
            self._warned = now
            self._limiter.warn()

    def _judged(self, limits: Limits) -> Memory:
        """Put our own reading, and the limits of this moment, into what the engine last said of itself."""
        report = self._supervisor.report
        return replace(
            report.memory if report else Memory(), phys=self._phys, cap=limits.cap, ceiling=limits.ceiling,
            margin=limits.margin, leases=limits.leases, bound_by=limits.bound_by, guard=limits.guard,
        )  # fmt: skip

    def _act(self, action: enforcer.Action) -> None:
        match action:
            case Tell():
                self._supervisor.enforce(action.order)
            case End():
                log.error("engine ended", reason=action.blame)
                self._supervisor.end(action.blame)

    def _pause(self) -> float:
        report = self._supervisor.report
        models = report.models if report else ()
        busy = bool(self._supervisor.live) or any(model.loading for model in models)
        return enforcer.pause(self.state, busy=busy, loaded=any(model.loaded for model in models))

    def memory(self) -> Memory:
        """Read the engine now, and put it beside the limits of this moment."""
        self._phys = self._supervisor.phys().phys
        return self._judged(self._limiter.now(self._phys))

    # what the report says of it

    def system(self) -> System:
        """Give the last reading of the machine, with its age."""
        spare = self._spare
        age = max(0.0, time.monotonic() - spare.at)
        return System(spare.available, spare.pressure, spare.source, age, self._limiter.worker_phys())

    def enforcement(self) -> Enforcement:
        """Give what the engine is held to, and how that went."""
        state, limiter, highs = self.state, self._limiter, self._supervisor.highs()
        return Enforcement(
            state.level, self._phys, highs.lifetime, highs.interval, limiter.cap.bound_by, limiter.standing.remedy,
            limiter.tier, tuple(limiter.warnings()), state.polls, state.over_caps, state.kills,
        )  # fmt: skip
