"""Compute the memory limits of this node from settings and machine: a cap, a margin and a ceiling.

Each poll reads all inputs, because the Metal limit, the container's limit and the memory of the system can change. The
engine receives new limits after a change of the leases, the cap, the margin or the limiting term. Otherwise, a change
of the ceiling is sent if it is at least a step.

If the available memory cannot be read, its last good value is used for `reading.STALE_AFTER_SECONDS` seconds. After
that, the engine admits no request, unless the guard is off, but frees no memory because of the unknown value. If the
RAM cannot be read, the last cap stays in force.
"""

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import structlog

from node.memory.cap import (
    Ceiling,
    MachineBounds,
    Margin,
    MemoryCap,
    MetalDevice,
    build_limits,
    compute_ceiling,
    compute_reach,
    resolve_cap,
    resolve_margin,
    with_device,
)
from node.memory.metal_limit import read_metal_device, write_device
from node.memory.reading import LastGood
from node.memory.sensor import MachineMemory, list_group_members, measure_group_footprint
from node.settings import NodeSettings
from wire.frames import MemoryLimits
from wire.units import MIB, show_size

CEILING_STEP_BYTES = 64 * MIB
"""Maximum size of the step in bytes: a change of the ceiling by at least one step is sent to the engine."""
CEILING_STEP_SHARE = 0.01
"""Size of the step as a share of the cap, at most `CEILING_STEP_BYTES`."""

log = structlog.get_logger("node.memory.limits")


class LeaseHolder(StrEnum):
    """Kind of process to which memory is leased. The values are texts for messages."""

    VIDEO = "a video job"
    QUANTIZATION = "a quantization"


class Limiter:
    """Calculator of this node's memory limits, with its cap, margin, lease and last readings.

    `origins` has the origin of each setting that is not a default, for the log. `folder` is the folder in which the
    Metal limit that the device reports is stored; None does not store it. The constructor raises `SettingsError` if
    this machine cannot satisfy the settings.
    """

    def __init__(
        self,
        settings: NodeSettings,
        machine: MachineMemory,
        origins: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._settings = settings.memory
        self._machine = machine
        self._guard = settings.memory.guard == "on"
        self._folder = folder
        self._leases = 0
        self._holder: LeaseHolder | None = None
        self._worker: int | None = None
        bounds = machine.read_bounds()
        self._device = None if folder is None else read_metal_device(folder, machine.hardware, bounds.wired)
        self._engine = 0
        self.cap: MemoryCap = self._resolve(bounds, starting=True)
        """Cap by the last reading of the machine in which the RAM was readable."""
        self.margin: Margin = resolve_margin(settings.memory.margin, self.cap.bytes)
        """Margin for `cap`."""
        self.current_ceiling = Ceiling(self.cap.bytes, self.cap.bound_by, self.cap.remedy)
        """Ceiling of the last `compute_limits`, with the limiting term and advice; before the first, the cap."""
        self._reach = LastGood()
        self._last_limits: MemoryLimits | None = None
        self._log_guard(origins or {})

    @property
    def leases(self) -> int:
        """Bytes leased to a process other than the engine; 0 without a lease."""
        return self._leases

    @property
    def holder(self) -> LeaseHolder | None:
        """Kind of process that holds the lease; None without a lease."""
        return self._holder

    @property
    def worker(self) -> int | None:
        """Id of the process group that uses the lease; None without one.

        The footprint of the group counts as leased memory, not as memory of other programs.
        """
        return self._worker

    def begin_lease(self, size: int, holder: LeaseHolder) -> None:
        """Record a lease of `size` bytes to a process of the kind `holder`, in place of an earlier lease.

        The next poll lowers the ceiling.
        """
        self._leases, self._holder = size, holder

    def set_worker(self, group: int) -> None:
        """Set the process group that uses the lease."""
        self._worker = group

    def end_lease(self) -> None:
        """Remove the lease, its holder and its process group. The next poll restores the ceiling."""
        self._leases, self._holder, self._worker = 0, None, None

    @property
    def tier(self) -> str:
        """Memory tier in force (`memory.tier`)."""
        return self._settings.tier

    def list_warnings(self) -> list[str]:
        """Return a warning for each setting that weakens the memory safety of this node; empty if there is none."""
        off = "memory.guard is off: no request is refused for memory, and the machine may panic"
        return [text for text in (self.cap.warning, self.margin.warning, "" if self._guard else off) if text]

    def warn(self) -> None:
        """Log the warnings that `list_warnings` returns."""
        for warning in self.list_warnings():
            log.warning("guard weakened", warning=warning)

    def measure_worker_footprint(self) -> int:
        """Return the footprint of the process group that uses the lease, in bytes; 0 without one or if unreadable."""
        return 0 if self._worker is None else measure_group_footprint(self._worker) or 0

    def report_metal(self, engine: int, limit: int) -> None:
        """Use the Metal limit (bytes) that an engine reports, and store it for later starts of the node.

        `engine` is the process id. Only the first report of a process counts, because MLX reads the limit once. The
        limit 0, which an engine without Metal reports, is ignored.
        """
        if not limit or engine == self._engine:
            return
        self._engine = engine
        known, bounds = self._device, self._machine.read_bounds()
        self._device = MetalDevice(limit, bounds.wired)
        if self._device == known:
            return
        log.info("metal limit", reported=show_size(limit), before=show_size(with_device(bounds, known).metal))
        if self._folder is not None:
            write_device(self._folder, self._machine.hardware, self._device)

    def read_wired(self) -> int | None:
        """Return the wired bytes of this machine without the footprint of the process group that uses the lease.

        Return None if they cannot be read.
        """
        wired = self._machine.read_wired()
        return None if wired is None else max(0, wired - self.measure_worker_footprint())

    def compute_limits(self, phys: int | None) -> MemoryLimits:
        """Read the machine, update `cap`, `margin` and `current_ceiling`, and return the limits without sending them.

        A changed cap is logged. `phys` is the footprint of the engine in bytes; 0 without an engine, None if
        unreadable.
        """
        self._look()
        reach = self._reach.update(self._compute_reach(phys), time.monotonic())
        self.current_ceiling = compute_ceiling(self.cap, reach, self._leases)
        return build_limits(self.cap, self.margin, self.current_ceiling, guard=self._guard, leases=self._leases)

    def poll(self, phys: int | None, send: Callable[[MemoryLimits], object]) -> MemoryLimits:
        """Compute the limits (`compute_limits`), pass them to `send` if they have changed, and return them.

        A change of the ceiling alone must be at least one step (`CEILING_STEP_BYTES`, `CEILING_STEP_SHARE`). `phys` is
        the footprint of the engine in bytes; 0 without an engine, None if unreadable.
        """
        limits, last = self.compute_limits(phys), self._last_limits
        if (
            last is None
            or _get_fixed_values(limits) != _get_fixed_values(last)
            or abs(limits.ceiling - last.ceiling) >= self._step
        ):
            self._last_limits = limits
            send(limits)
        return limits

    def _compute_reach(self, phys: int | None) -> int | None:
        """Return the result of `compute_reach` for the present readings; None if one of the readings fails."""
        worker = self._worker
        lent = 0 if worker is None else measure_group_footprint(worker)
        if lent is None and worker is not None and list_group_members(worker):
            return None
        return compute_reach(phys, self._machine.read_reclaimable(), worker=lent or 0, lease=self._leases)

    @property
    def _step(self) -> int:
        return max(1, min(CEILING_STEP_BYTES, int(self.cap.bytes * CEILING_STEP_SHARE)))

    def _look(self) -> None:
        """Update cap and margin. An unreadable RAM size keeps the last cap, because RAM does not change."""
        bounds = self._machine.read_bounds()
        if not bounds.total:
            return
        cap = self._resolve(bounds, starting=False)
        if cap != self.cap:
            self.cap, self.margin = cap, resolve_margin(self._settings.margin, cap.bytes)
            log.warning("cap changed", cap=show_size(cap.bytes), bound_by=cap.bound_by, remedy=cap.remedy)
            self.warn()

    def _resolve(self, bounds: MachineBounds, *, starting: bool) -> MemoryCap:
        memory, bounds = self._settings, with_device(bounds, self._device)
        return resolve_cap(
            memory.cap, memory.tier, bounds, above_metal=memory.allow_above_metal_limit, starting=starting
        )

    def _log_guard(self, origins: Mapping[str, str]) -> None:
        log.info(
            "guard resolved",
            guard=self._settings.guard,
            cap=show_size(self.cap.bytes),
            bound_by=self.cap.bound_by,
            remedy=self.cap.remedy,
            margin=show_size(self.margin.bytes),
            margin_from="no profile yet" if self.margin.automatic else "setting",
            total=show_size(self._machine.hardware.memory),
            tier=self.tier,
            sources={key: origin for key, origin in origins.items() if key.startswith("memory.")} or "defaults",
        )
        self.warn()


def _get_fixed_values(limits: MemoryLimits) -> tuple[object, ...]:
    """Return all values except the ceiling."""
    return limits.cap, limits.margin, limits.bound_by, limits.guard, limits.leases
