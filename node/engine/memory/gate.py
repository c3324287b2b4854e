"""Memory gate of the engine: check whether a forward, a model load or a growing batch fits into memory now.

The arithmetic is in `wire/capacity/arithmetic.py`. The gate stores the limits from the agent, requires a live reading
and counts its checks. It fails closed: before the first limits, with a cap of 0 or without a reading it refuses every
request. With `memory.guard = "off"` (`MemoryLimits.guard`), it passes every request after limits have arrived, and does
not report itself as armed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from node.memory.reading import MemoryReading
from wire.capacity import arithmetic
from wire.capacity.arithmetic import Fits
from wire.frames import MemoryLimits
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, Histogram
from wire.refusals import RefusalCode, Refused
from wire.report import Memory

NOT_READY_RETRY_SECONDS = 1.0
"""Retry-After, in seconds, of a refusal because there are no limits yet or their cap is 0. The first limits usually
arrive sooner."""


class GateSite(StrEnum):
    """Kind of work for which the engine checks memory; also the label of these checks in the metrics."""

    PREFLIGHT = "preflight"
    """Admission of a request, return of a preempted request, or tokenization of a prompt by a prompt thread."""
    PREFILL = "prefill"
    """Forward over prompt tokens."""
    RESTORE = "restore"
    """Part of a prompt's cache that is read from the disk."""
    JOIN = "join"
    """Copy of a decode batch that new rows join."""
    GROW = "grow"
    """Extension of a row's commitment."""
    LOAD = "load"
    """Load of a model, or of its next piece."""
    EMBED = "embed"
    """Forward over texts for embeddings or scores."""
    PROBE = "probe"
    """Forward of a profile measurement, or the longest row that the new profile admits."""


@dataclass(frozen=True, slots=True)
class MlxCounters:
    """Memory counters of the engine for one reading, in bytes. `cache` and `peak` are only reported, not judged."""

    active: int
    """MLX's active memory now."""
    recent: int
    """Recent peak of the memory (`RecentPeak`)."""
    reserved: int
    """Bytes committed and not yet in use."""
    cache: int = 0
    """MLX's free buffers."""
    peak: int = 0
    """MLX's peak memory since the last reset (`MlxPeakTracker.mark`)."""


class MemoryGate:
    """Memory gate of an engine: checks bytes against the limits in force, and counts the checks.

    `residual()` returns the largest number of bytes by which a forward of a loaded model exceeded its estimate. It
    returns None without a loaded model, or if a loaded model has no profile up to the smallest chunk
    (`ModelTable.compute_residual`). An automatic margin follows from the residual.

    `checks` and `refusals` count by site, `reasons` counts refusals by code. The histogram `predicted` has the memory
    predicted by each check, as a share of the ceiling. The histogram `transient` has the peak bytes above the start of
    each prefill, join and forward for embeddings.
    """

    def __init__(self, residual: Callable[[], int | None] = lambda: None) -> None:
        self._residual = residual
        self.checks: Counter[GateSite] = Counter()
        self.refusals: Counter[GateSite] = Counter()
        self.reasons: Counter[RefusalCode] = Counter()
        self.predicted = Histogram(PREDICTED_BOUNDS)
        self.transient = Histogram(TRANSIENT_BOUNDS)
        self._limits: MemoryLimits | None = None

    def set_limits(self, limits: MemoryLimits) -> None:
        """Replace the limits in force by newer limits from the agent."""
        self._limits = limits

    @property
    def limits_number(self) -> int:
        """Sequence number (`MemoryLimits.number`) of the limits in force; 0 before the first."""
        return 0 if self._limits is None else self._limits.number

    @property
    def cap(self) -> int:
        """Cap in force, in bytes; 0 before the first limits."""
        return 0 if self._limits is None else self._limits.cap

    def is_armed(self, reading: MemoryReading, now: float) -> bool:
        """Return whether this gate can judge: limits arrived, the cap is above 0, the guard is on, and the reading is
        live. `now` is in monotonic seconds."""
        limits = self._limits
        return limits is not None and limits.guard and limits.cap > 0 and reading.is_live(now)

    def build_memory(self, use: MlxCounters, reading: MemoryReading, total: int, now: float, base: int = 0) -> Memory:
        """Combine a reading and counters with the limits in force into the `Memory` that is judged and reported.

        `total` is the RAM and `base` the footprint of the engine without models, in bytes. `now` is in monotonic
        seconds. If the reading is not live, `phys`, `current` and `headroom` of the result are None.
        """
        limits = self._limits or MemoryLimits(0, 0, 0, "")
        phys = reading.phys if reading.is_live(now) else None
        margin, current = self._compute_margin(limits), arithmetic.compute_current(use.active, phys, use.recent)
        return Memory(
            cap=limits.cap,
            ceiling=limits.ceiling,
            margin=margin,
            phys=phys,
            active=use.active,
            recent=use.recent,
            current=current,
            reserved=use.reserved,
            headroom=arithmetic.compute_headroom(limits.ceiling, margin, current, use.reserved),
            leases=limits.leases,
            bound_by=limits.bound_by,
            guard=limits.guard,
            armed=self.is_armed(reading, now),
            source=reading.source,
            age=max(0.0, now - reading.at),
            total=total,
            base=base,
            cache=use.cache,
            peak=use.peak,
        )

    def _compute_margin(self, limits: MemoryLimits) -> int:
        residual = self._residual() if limits.margin_auto else None
        return limits.margin if residual is None else arithmetic.compute_profiled_margin(limits.cap, residual)

    def compute_narrowed_bytes(self) -> int:
        """Return the bytes by which measured profiles make the margin smaller than the margin from the agent; 0 if they
        do not."""
        return 0 if self._limits is None else max(0, self._limits.margin - self._compute_margin(self._limits))

    def check(self, site: GateSite, memory: Memory, estimate: int, *, load: bool = False) -> Fits | Refused:
        """Check whether `estimate` more bytes fit under this reading, and count the check under `site`.

        Return `Fits`, or the refusal. With `load`, the bytes are for a model load, which is judged without the margin.
        """
        self.checks[site] += 1
        if memory.headroom is not None and memory.ceiling > 0:
            self.predicted.observe(1 + (estimate - memory.headroom) / memory.ceiling)
        answer = self._judge(memory, estimate, load=load)
        if isinstance(answer, Refused):
            self.refusals[site] += 1
            self.reasons[answer.code] += 1
        return answer

    def get_measures(self) -> GateMeasures:
        """Return the counts of checks by site and of refusals by code, and both histograms, since the engine
        started."""
        checks = tuple((site.value, count) for site, count in self.checks.items())
        refusals = tuple((code.value, count) for code, count in self.reasons.items())
        return GateMeasures(checks, refusals, self.predicted.tally(), self.transient.tally())

    def _judge(self, memory: Memory, estimate: int, *, load: bool) -> Fits | Refused:
        return self.refuse_unless_ready() or (arithmetic.judge_load if load else arithmetic.judge)(memory, estimate)

    def refuse_unless_ready(self) -> Refused | None:
        """Return the refusal of all work before the first limits, or while their cap is 0 and the guard is on; else
        None."""
        limits = self._limits
        if limits is not None and (limits.cap > 0 or not limits.guard):
            return None
        cause = "received no memory limits yet" if limits is None else f"memory limits with a cap of {limits.cap} bytes"
        return Refused(
            RefusalCode.NOT_READY,
            f"the engine has {cause} and starts no requests: retry",
            None,
            NOT_READY_RETRY_SECONDS,
        )

    def describe(self) -> dict[str, object]:
        """Return the resolved settings of the guard for the log: its state, the cap and margin in bytes, and the source
        of the margin. Before the first limits, return only the state `closed`.

        The ceiling is left out because it changes all the time.
        """
        limits = self._limits
        if limits is None:
            return {"state": "closed"}
        margin = self._compute_margin(limits)
        decided = "setting" if not limits.margin_auto else "no profile" if margin == limits.margin else "profiles"
        return {"state": "on" if limits.guard else "OFF", "cap": limits.cap, "margin": margin, "margin_from": decided}
