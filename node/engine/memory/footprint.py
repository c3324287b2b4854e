"""Memory readings of the engine process, taken on the inference thread between forwards, and control of MLX's free
buffers and wired limit."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import structlog

from host.heap import trim
from node.engine.memory.gate import MemoryGate, MlxCounters
from node.engine.memory.trailing import PERIOD_SECONDS, TrailingFootprint
from node.engine.memory.wired_limit import WireMode, compute_wired_bytes
from node.memory.reading import PHYS_FOOTPRINT, MemoryReading, RecentPeak
from node.memory.sensor import open_sensor
from wire.report import Memory
from wire.units import MIB, show_size

FREE_BUFFER_SHARE = 0.01
"""Upper bound of MLX's free buffers as a share of the cap; at most `MAX_FREE_BUFFER_BYTES`."""
MAX_FREE_BUFFER_BYTES = 256 * MIB
"""Upper bound of MLX's free buffers, in bytes; `FREE_BUFFER_SHARE` of the cap applies if it is less. The next
forward reuses the buffers. Without them, page faults on Linux take much of the time to add a row to a decode batch.
The bound is small because footprint readings include the buffers. The engine frees them before it refuses a request."""

POLL_SECONDS = 0.02
"""Seconds between two readings of the footprint in `EngineMemory.wait_until_settled`."""

log = structlog.get_logger("engine.footprint")


class EngineMemory:
    """Memory sensor of this process and MLX, with the recent peak.

    Must be constructed before any model is loaded, because the first reading is the base: the footprint of the engine
    without models. `total` is the RAM in bytes. `known_bytes()` returns the bytes of weights, rows and cached prefixes.

    The recent peak is stored as the bytes above `known_bytes()`. Memory that the engine frees deliberately therefore
    does not count against later requests. On macOS the footprint contains freed memory for a moment longer
    (`node.engine.memory.trailing`): such bytes count in the footprint, and not in the recent peak.

    If the footprint cannot be read, the last good reading is used, changed by the bytes that MLX allocated or freed
    since then. After `node.memory.reading.STALE_AFTER_SECONDS` seconds that reading counts as stale, and the gate
    refuses all work, unless the guard is off.
    """

    def __init__(self, total: int, known_bytes: Callable[[], int]) -> None:
        self.sensor = open_sensor(os.getpid())
        self._recent = RecentPeak()
        self._trailing = TrailingFootprint()
        self._known_bytes = known_bytes
        self._total = total
        self._good = MemoryReading(None, "", 0.0)
        self._counted = 0
        self._base = self.sensor.read_footprint().phys or 0

    def read_memory(self, gate: MemoryGate, reserved: int, now: float, *, settled: bool = False) -> Memory:
        """Read the footprint now and count it in the recent peak. Return the `Memory` for the gate and the report.

        `reserved` is the bytes that are committed and not yet in use. `now` is in monotonic seconds. With `settled`,
        the result excludes trailing bytes, which are freed but still in the footprint (`node.engine.memory.trailing`).
        Use a settled reading only to decide whether to free more memory, never to decide whether work fits.
        """
        reading, known = self._read_footprint(), self._known_bytes()
        active, cache = mx.get_active_memory(), mx.get_cache_memory()
        # MLX's free buffers are released before a refusal. Their bytes therefore do not count in the recent peak.
        trailing = self._measure_trailing(reading, now)
        self._recent = self._recent.with_reading(max(active, (reading.phys or 0) - cache - trailing) - known, now)
        if settled and reading.phys is not None:
            reading = replace(reading, phys=reading.phys - trailing)
        use = MlxCounters(active, max(0, known + self._recent.find_highest(now)), reserved, cache, mx.get_peak_memory())
        return gate.build_memory(use, reading, self._total, now, self._base)

    def _read_footprint(self) -> MemoryReading:
        """Read the footprint. If that fails, return the last good reading at its own time, moved by MLX's counters
        since."""
        reading, counted = self.sensor.read_footprint(), mx.get_active_memory() + mx.get_cache_memory()
        if reading.phys is not None:
            self._good, self._counted = reading, counted
        last = self._good.phys
        return reading if last is None else replace(self._good, phys=max(0, last + counted - self._counted))

    def _measure_trailing(self, reading: MemoryReading, now: float) -> int:
        """Return the trailing bytes of a footprint, which the system takes back soon. Only macOS has such bytes."""
        if reading.phys is None or reading.source != PHYS_FOOTPRINT:
            return 0
        counted = mx.get_active_memory() + mx.get_cache_memory()
        return self._trailing.update(reading.phys, counted, mx.get_peak_memory(), now)

    def find_peak_expiry(self, now: float) -> float | None:
        """Return the monotonic time in seconds at which the recent peak or the footprint may next fall.

        With trailing bytes in the footprint (`node.engine.memory.trailing`), this is `now` plus `PERIOD_SECONDS`.
        Otherwise it is the time at which the highest recent reading expires. Return None if no recent reading is above
        the memory in use.
        """
        reading = self._read_footprint()
        if self._measure_trailing(reading, now):
            return now + PERIOD_SECONDS
        present = max(mx.get_active_memory(), reading.phys or 0)
        return self._recent.compute_peak_expiry(present - self._known_bytes(), now)

    def reset_peak(self) -> None:
        """Discard all readings of the recent peak, because memory was freed on purpose."""
        self._recent = RecentPeak()

    def wait_until_settled(self, seconds: float) -> None:
        """Block for up to `seconds` until the footprint no longer contains freed memory."""
        until = time.monotonic() + seconds
        while self._measure_trailing(self._read_footprint(), now := time.monotonic()) and now < until:
            time.sleep(POLL_SECONDS)


class MlxPeakTracker:
    """Peak of MLX's active memory since the last mark and since the start. MLX has one peak per process, and only this
    class resets it."""

    def __init__(self) -> None:
        self._ever = self._from = 0
        self.marks = 0
        """Number of calls of `mark`. If the number has changed since a caller's own mark, the peak belongs to another
        call."""

    def mark(self) -> None:
        """Start a measurement of the peak above the memory that is active now."""
        self.marks += 1
        self._ever = self.get_highest()
        mx.reset_peak_memory()
        self._from = mx.get_active_memory()

    def get_highest(self) -> int:
        """Return the highest active memory since the start of the process, in bytes."""
        return max(self._ever, self._read_peak())

    def measure_peak_above_mark(self) -> int:
        """Return the bytes by which the peak since the last mark exceeds the active memory at that mark."""
        return self._read_peak() - self._from

    def measure_peak_drop(self) -> int:
        """Return the bytes by which the peak since the last mark exceeds the active memory now."""
        return self._read_peak() - mx.get_active_memory()

    def _read_peak(self) -> int:
        return max(mx.get_peak_memory(), mx.get_active_memory())  # after a reset MLX's peak is 0, not the active memory


@dataclass(frozen=True, slots=True)
class MetalMemory:
    """GPU memory of this machine, as MLX describes it."""

    limit: int = 0
    """Largest working set that Metal recommends, in bytes; 0 without Metal."""
    set_wired: Callable[[int], object] = mx.set_wired_limit
    """Function of MLX that sets the wired limit, in bytes."""


def open_metal() -> MetalMemory:
    """Return the GPU memory of this machine; its limit is 0 without Metal. Not verified on macOS."""
    if not mx.metal.is_available():
        return MetalMemory()
    return MetalMemory(int(mx.device_info()["max_recommended_working_set_size"]))


class WiredLimit:
    """Setter of MLX's wired limit, which follows the weights of the loaded models.

    `wire` is the setting `memory.wire`. `open_metal()` returns the GPU memory of this machine. `wired` is the limit in
    force in bytes; 0: none.
    """

    def __init__(self, wire: WireMode, open_metal: Callable[[], MetalMemory]) -> None:
        self._wire = wire
        self._open = open_metal
        self._weights = 0
        self.wired = 0

    @cached_property
    def metal(self) -> MetalMemory:
        """GPU memory of this machine. It is read at first use because only the inference thread may call MLX."""
        metal = self._open()
        log.info("metal", limit=show_size(metal.limit) if metal.limit else "no Metal here", wire=self._wire)
        return metal

    def apply(self, weights: int) -> None:
        """Set the wired limit for loaded models with `weights` bytes of weights in total. With Metal, first free MLX's
        free buffers. Do nothing if `weights` is the same as in the last call.

        If MLX refuses the limit, log a warning and keep the old limit until the weights change again.
        """
        if weights == self._weights:
            return
        self._weights = weights
        if self.metal.limit:
            # MLX's residency set contains free buffers as well: they would take the place of weights.
            release_free_memory()
        size = compute_wired_bytes(self._wire, weights, mx.get_active_memory(), self.metal.limit)
        if size == self.wired:
            return
        try:
            self.metal.set_wired(size)
        except (RuntimeError, ValueError) as error:
            log.warning("not wired", limit=show_size(size), weights=show_size(weights), error=str(error))
            return
        self.wired = size
        log.info("wired", limit=show_size(size), weights=show_size(weights), wire=self._wire)


def limit_buffers(cap: int) -> None:
    """Limit MLX's free buffers to `FREE_BUFFER_SHARE` of `cap` (bytes), at most `MAX_FREE_BUFFER_BYTES`. MLX frees
    excess buffers at its next allocation."""
    mx.set_cache_limit(min(MAX_FREE_BUFFER_BYTES, int(cap * FREE_BUFFER_SHARE)))


def clear_buffers() -> None:
    """Wait for the work on MLX's default stream, then free MLX's free buffers; on Linux, trim malloc's heap as well.

    The wait is necessary because MLX's command buffers do not retain the buffers that they use. An array that was
    dropped while the GPU still writes to it may be among the free buffers. Freeing it then can cause a kernel panic
    (docs/decisions/0064).
    """
    mx.synchronize()
    mx.clear_cache()
    trim()


def release_free_memory() -> None:
    """Collect Python's reference cycles, wait for the work on MLX's default stream, and return MLX's free buffers to
    the system (`clear_buffers`)."""
    gc.collect()
    clear_buffers()
