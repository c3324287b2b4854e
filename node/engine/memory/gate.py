"""The engine's side of the memory verdict: may this prefill, this join, this growth be written now?

The arithmetic is wire/verdict's; the gate holds the limits that the agent sent, insists on a live reading, and counts.
It fails closed: before the first limits, with a cap of 0 or without a reading, nothing passes. Only `memory.guard =
"off"` (`Limits.guard`) lets everything pass, and then the gate does not call itself armed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from node.memory.reading import Reading
from wire.capacity import arithmetic
from wire.capacity.arithmetic import Fits
from wire.frames import Limits
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, Buckets, GateMeasures
from wire.refusals import Code, Refused
from wire.report import Memory

RETRY_NOT_READY = 1.0
"""Seconds until the agent's first limits should have come."""


class Site(StrEnum):
    """Where the gate stands."""

    PREFLIGHT = "preflight"
    PREFILL = "prefill"
    JOIN = "join"
    GROW = "grow"
    LOAD = "load"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Use:
    """What the engine itself knows of its memory, in bytes: active now, the recent height, promised and not written;
    and MLX's free buffers and highest mark, which are told and not judged."""

    active: int
    recent: int
    reserved: int
    cache: int = 0
    peak: int = 0


class Gate:
    """Limits in force, and every check against them. `residual()` is what the profiles say that no estimate sees, in
    bytes; None where a loaded model has none. An automatic margin follows from it."""

    def __init__(self, residual: Callable[[], int | None] = lambda: None) -> None:
        self._residual = residual
        self.checks: Counter[Site] = Counter()
        self.refusals: Counter[Site] = Counter()
        self.reasons: Counter[Code] = Counter()
        self.predicted = Buckets(PREDICTED_BOUNDS)
        self.transient = Buckets(TRANSIENT_BOUNDS)
        self._limits: Limits | None = None

    def hold(self, limits: Limits) -> None:
        """Judge by these limits from now on."""
        self._limits = limits

    @property
    def held(self) -> int:
        """The number of the limits in force, 0 before the first."""
        return 0 if self._limits is None else self._limits.number

    def armed(self, reading: Reading, now: float) -> bool:
        """Whether this gate could refuse on facts: limits came, they are not 0, not off, and the reading is live."""
        limits = self._limits
        return limits is not None and limits.guard and limits.cap > 0 and reading.live(now)

    def memory(self, use: Use, reading: Reading, total: int, now: float, base: int = 0) -> Memory:
        """Put one consistent reading and the limits in force into the form that is judged and reported."""
        limits = self._limits or Limits(0, 0, 0, "")
        phys = reading.phys if reading.live(now) else None
        margin, current = self._margin(limits), arithmetic.current(use.active, phys, use.recent)
        return Memory(
            cap=limits.cap, ceiling=limits.ceiling, margin=margin, phys=phys, active=use.active,
            recent=use.recent, current=current, reserved=use.reserved,
            headroom=arithmetic.headroom(limits.ceiling, margin, current, use.reserved),
            leases=limits.leases, bound_by=limits.bound_by, guard=limits.guard, armed=self.armed(reading, now),
            source=reading.source, age=max(0.0, now - reading.at), total=total, base=base,
            cache=use.cache, peak=use.peak,
        )  # fmt: skip

    def _margin(self, limits: Limits) -> int:
        residual = self._residual() if limits.margin_auto else None
        return limits.margin if residual is None else arithmetic.profiled_margin(limits.cap, residual)

    def narrowed(self) -> int:
        """Give the bytes by which the margin in force is narrower than it would be without profiles."""
        return 0 if self._limits is None else max(0, self._limits.margin - self._margin(self._limits))

    def check(self, site: Site, memory: Memory, estimate: int, *, load: bool = False) -> Fits | Refused:
        """Judge whether `estimate` more bytes may be written under this reading; with `load` as the bytes of a load,
        which are judged without the margin."""
        self.checks[site] += 1
        if memory.headroom is not None and memory.ceiling > 0:
            self.predicted.observe(1 + (estimate - memory.headroom) / memory.ceiling)
        answer = self._judge(memory, estimate, load=load)
        if isinstance(answer, Refused):
            self.refusals[site] += 1
            self.reasons[answer.code] += 1
        return answer

    def measures(self) -> GateMeasures:
        """Give what was counted since the start."""
        checks = tuple((site.value, count) for site, count in self.checks.items())
        refusals = tuple((code.value, count) for code, count in self.reasons.items())
        return GateMeasures(checks, refusals, self.predicted.tally(), self.transient.tally())

    def _judge(self, memory: Memory, estimate: int, *, load: bool) -> Fits | Refused:
        return self.closed() or (arithmetic.judge_load if load else arithmetic.judge)(memory, estimate)

    def closed(self) -> Refused | None:
        """Say why nothing at all is started here; None once limits are in force."""
        limits = self._limits
        if limits is not None and (limits.cap > 0 or not limits.guard):
            return None
        return Refused(
            Code.NOT_READY, "the engine has no memory limits yet, so it starts nothing", None, RETRY_NOT_READY
        )

    def describe(self) -> dict[str, object]:
        """Give what the guard resolved to, for the log: everything but the ceiling, which moves all the time."""
        limits = self._limits
        if limits is None:
            return {"state": "closed"}
        margin = self._margin(limits)
        decided = "setting" if not limits.margin_auto else "no profile" if margin == limits.margin else "profiles"
        return {"state": "on" if limits.guard else "OFF", "cap": limits.cap, "margin": margin, "margin_from": decided}
