"""Compute the memory limits of this node: a cap, a margin and a moving ceiling, from settings and machine.

Each poll reads all inputs, because Metal's limit, the container's limit and the spare memory of the system can change.
The engine receives new limits when the ceiling moved by more than a step, or when a lease, the cap or the binding term
changed. An idle machine sends nothing.

A failed reading says nothing about memory: the last good reading holds for `reading.STALE_AFTER_SECONDS` seconds. After
that the reach of the engine is unknown; the engine admits no request and evicts nothing for this reason.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from node.memory.cap import (
    Ceiling,
    MachineBounds,
    Margin,
    MemoryCap,
    MetalDevice,
    ceiling,
    dynamic,
    limits,
    resolve_cap,
    resolve_margin,
    with_device,
)
from node.memory.metal_limit import read_device, write_device
from node.memory.reading import LastGood
from node.memory.sensor import MachineMemory, footprint, members
from node.settings import NodeSettings
from wire.frames import MemoryLimits
from wire.units import MIB, show_size

CEILING_STEP_BYTES = 64 * MIB
CEILING_STEP_SHARE = 0.01
"""Change of the ceiling that is sent to the engine: the lesser of these bytes and this share of the cap."""

log = structlog.get_logger("node.memory.limits")


class Limiter:
    """Cap and margin of this node, and the limits for each reading.

    `origins` names the origin of each setting that differs from its default. Metal's limit as the device reported it is
    stored in `folder` (None: not stored). Raises SettingsError when this machine cannot meet the settings.
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
        self.leases = 0
        """Bytes leased to video jobs."""
        self.worker: int | None = None
        """Process that uses the leases. Its footprint is subtracted once."""
        bounds = machine.bounds()
        self._device = None if folder is None else read_device(folder, machine.hardware, bounds.wired)
        self._engine = 0
        self.cap: MemoryCap = self._resolve(bounds, starting=True)
        self.margin: Margin = resolve_margin(settings.memory.margin, self.cap.bytes)
        self.current_ceiling = Ceiling(self.cap.bytes, self.cap.bound_by, self.cap.remedy)
        """Ceiling of the last poll, with the binding term and its remedy."""
        self._reach = LastGood()
        self._last_limits: MemoryLimits | None = None
        self._log_guard(origins or {})

    @property
    def tier(self) -> str:
        """The tier in force."""
        return self._settings.tier

    def warnings(self) -> list[str]:
        """Return the settings that weaken the memory safety of this node, as sentences."""
        off = "memory.guard is off: no request is refused for memory, and the machine may panic"
        return [text for text in (self.cap.warning, self.margin.warning, "" if self._guard else off) if text]

    def warn(self) -> None:
        """Log the warnings."""
        for warning in self.warnings():
            log.warning("guard weakened", warning=warning)

    def worker_phys(self) -> int:
        """Return the footprint of the process that uses the leases, in bytes; 0 without one or when unreadable."""
        return 0 if self.worker is None else footprint(self.worker) or 0

    def report_metal(self, engine: int, limit: int) -> None:
        """Use Metal's limit (bytes; 0: no Metal) as this engine process reports it, and store it for later starts.

        Only the first report of a process counts: MLX reads the figure once.
        """
        if not limit or engine == self._engine:
            return
        self._engine = engine
        known, bounds = self._device, self._machine.bounds()
        self._device = MetalDevice(limit, bounds.wired)
        if self._device == known:
            return
        log.info("metal limit", reported=show_size(limit), before=show_size(with_device(bounds, known).metal))
        if self._folder is not None:
            write_device(self._folder, self._machine.hardware, self._device)

    def wired(self) -> int | None:
        """Return the wired bytes of this machine without those of the process that uses the leases.

        None when unreadable.
        """
        wired = self._machine.wired()
        return None if wired is None else max(0, wired - self.worker_phys())

    def now(self, phys: int | None) -> MemoryLimits:
        """Return the limits for the engine's footprint in bytes: 0 while there is no engine, None when unreadable."""
        self._look()
        reach = self._reach.update(self._reaches(phys), time.monotonic())
        self.current_ceiling = ceiling(self.cap, reach, self.leases)
        return limits(self.cap, self.margin, self.current_ceiling, guard=self._guard, leases=self.leases)

    def poll(self, phys: int | None, send: Callable[[MemoryLimits], object]) -> MemoryLimits:
        """Return the current limits, and pass them to `send` when they changed."""
        found, last = self.now(phys), self._last_limits
        if last is None or _fixed(found) != _fixed(last) or abs(found.ceiling - last.ceiling) >= self._step:
            self._last_limits = found
            send(found)
        return found

    def _reaches(self, phys: int | None) -> int | None:
        """Return the bytes that the engine can reach; None when one of its readings fails."""
        worker = self.worker
        lent = 0 if worker is None else footprint(worker)
        if lent is None and worker is not None and members(worker):
            return None
        return dynamic(phys, self._machine.reclaimable(), worker=lent or 0, lease=self.leases)

    @property
    def _step(self) -> int:
        return max(1, min(CEILING_STEP_BYTES, int(self.cap.bytes * CEILING_STEP_SHARE)))

    def _look(self) -> None:
        """Update cap and margin. An unreadable RAM size keeps the last cap, because RAM does not change."""
        bounds = self._machine.bounds()
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


def _fixed(limits: MemoryLimits) -> tuple[object, ...]:
    """Return all values except the ceiling."""
    return limits.cap, limits.margin, limits.bound_by, limits.guard, limits.leases
