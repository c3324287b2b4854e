"""The engine's own memory, read on the inference thread between forwards: the readings that its gate judges by."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import structlog

from host.heap import trim
from node.engine.memory.gate import Gate, Use
from node.engine.memory.wired_limit import Wire, wired_bytes
from node.memory.reading import Reading, Recent
from node.memory.sensor import open_sensor
from wire.report import Memory
from wire.units import MIB, show_size

POOL_SHARE = 0.01
POOL_MOST = 256 * MIB
"""MLX keeps free buffers for the next forward: to fault in fresh memory for each cost much of a join on Linux. At
most this, and this share of the cap, because a reading counts them; they are given back before anything is refused."""

log = structlog.get_logger("engine.footprint")


class Footprint:
    """Reads this process and MLX; remembers the highest of the last polls. Made before any model is loaded: what is
    read then is the engine's own base.

    `held()` gives the bytes that the engine knows it holds: weights, rows, kept prefixes. What is remembered is how far
    a reading stood above them, so that what was given back on purpose is not held against anybody afterwards.

    A footprint that cannot be read is the last good one, and what MLX has taken or given back since, for
    `reading.STALE` seconds.
    """

    def __init__(self, total: int, held: Callable[[], int]) -> None:
        self.sensor = open_sensor(os.getpid())
        self._recent = Recent()
        self._held = held
        self._total = total
        self._good = Reading(None, "", 0.0)
        self._counted = 0
        self._base = self.sensor.phys().phys or 0

    def judged(self, gate: Gate, reserved: int, now: float) -> Memory:
        """Read now, and put it into the form that is judged and reported. `reserved` in bytes."""
        reading, held = self._read(), self._held()
        active, cache = mx.get_active_memory(), mx.get_cache_memory()
        # The pool is given back before a refusal, so a height that it had a moment ago is held against nobody.
        self._recent = self._recent.observed(max(active, (reading.phys or 0) - cache) - held, now)
        use = Use(active, max(0, held + self._recent.highest(now)), reserved, cache, mx.get_peak_memory())
        return gate.memory(use, reading, self._total, now, self._base)

    def _read(self) -> Reading:
        """Read the footprint, or return the last good one, of its own time, moved by what MLX counts since."""
        reading, counted = self.sensor.phys(), mx.get_active_memory() + mx.get_cache_memory()
        if reading.phys is not None:
            self._good, self._counted = reading, counted
        last = self._good.phys
        return reading if last is None else replace(self._good, phys=max(0, last + counted - self._counted))

    def falls_at(self, now: float) -> float | None:
        """Say when the recent height falls; None when nothing changes by itself."""
        present = max(mx.get_active_memory(), self._read().phys or 0)
        return self._recent.falls_at(present - self._held(), now)

    def forget(self) -> None:
        """Let go of the recent height: what stood there was given back on purpose."""
        self._recent = Recent()


class Height:
    """MLX's peak from one mark to the next, and ever. MLX keeps one for the process, so nobody else sets it back."""

    def __init__(self) -> None:
        self._ever = self._from = 0
        self.marks = 0
        """Marks so far: who finds another number than at his own measures something else."""

    def mark(self) -> None:
        """Measure from here: what is active now is the ground."""
        self.marks += 1
        self._ever = self.ever()
        mx.reset_peak_memory()
        self._from = mx.get_active_memory()

    def ever(self) -> int:
        """Give the highest that was ever active, in bytes."""
        return max(self._ever, self._top())

    def above(self) -> int:
        """Give how far above the ground it went since the mark, in bytes."""
        return self._top() - self._from

    def sunk(self) -> int:
        """Give how far it has come down from its highest since the mark, in bytes."""
        return self._top() - mx.get_active_memory()

    def _top(self) -> int:
        return max(mx.get_peak_memory(), mx.get_active_memory())  # a peak that was set back is 0, not what is active


@dataclass(frozen=True, slots=True)
class Metal:
    """The GPU's memory as MLX knows it: its limit in bytes (0: no Metal), and the call that sets the wired limit."""

    limit: int = 0
    set_wired: Callable[[int], object] = mx.set_wired_limit


def open_metal() -> Metal:
    """Return this machine's Metal. MLX reads the limit once for each process. Unverified on macOS."""
    if not mx.metal.is_available():
        return Metal()
    return Metal(int(mx.device_info()["max_recommended_working_set_size"]))


class Wiring:
    """The wired limit in force (`wired`, bytes; 0: none), set for the weights in memory (`wiring`)."""

    def __init__(self, wire: Wire, open_metal: Callable[[], Metal]) -> None:
        self._wire = wire
        self._open = open_metal
        self._weights = 0
        self.wired = 0

    @cached_property
    def metal(self) -> Metal:
        """This machine's Metal, opened when it is first needed, because only the inference thread may call MLX."""
        metal = self._open()
        log.info("metal", limit=show_size(metal.limit) if metal.limit else "no Metal here", wire=self._wire)
        return metal

    def follow(self, weights: int) -> None:
        """Set the wired limit for these weights (bytes), unless they are the same as at the last call."""
        if weights == self._weights:
            return
        self._weights = weights
        if self.metal.limit:
            give_back()  # free buffers are in MLX's residency set, too, and would take the place of weights
        size = wired_bytes(self._wire, weights, mx.get_active_memory(), self.metal.limit)
        if size == self.wired:
            return
        try:
            self.metal.set_wired(size)
        except (RuntimeError, ValueError) as error:
            log.warning("not wired", limit=show_size(size), weights=show_size(weights), error=str(error))
            return
        self.wired = size
        log.info("wired", limit=show_size(size), weights=show_size(weights), wire=self._wire)


def limit_pool(cap: int) -> None:
    """Bound MLX's pool of free buffers for this cap (bytes)."""
    mx.set_cache_limit(min(POOL_MOST, int(cap * POOL_SHARE)))


def clear_pool() -> None:
    """Give MLX's free buffers back, and on Linux what malloc kept of those who made them."""
    mx.clear_cache()
    trim()


def give_back() -> None:
    """Give free memory back to the system: what Python holds in cycles, MLX in its pool, and on Linux malloc."""
    gc.collect()
    mx.clear_cache()
    trim()
