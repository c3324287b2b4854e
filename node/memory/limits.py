"""The limits in force on this node: settings and machine turned into a cap, a margin and a moving ceiling.

Everything is read anew at each poll: Metal's limit and the container's may be changed under us, and what the system can
spare moves all the time. The engine gets new limits when the ceiling moved by more than a step, and at once when
anything else did: a lease, the cap, the term that binds. So a quiet machine sends nothing.

A reading that fails says nothing about memory. What the engine can reach is then what it was at the last good reading,
for `reading.STALE` seconds; after that it is unknown, and the engine starts nothing new and gives nothing up for it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from node.memory.cap import (
    Bounds,
    Cap,
    Ceiling,
    Device,
    Margin,
    ceiling,
    dynamic,
    limits,
    resolve_cap,
    resolve_margin,
    with_device,
)
from node.memory.metal_limit import read_device, write_device
from node.memory.reading import LastGood
from node.memory.sensor import Machine, footprint, members
from node.settings import NodeSettings
from wire.frames import Limits
from wire.units import MIB, show_size

STEP = 64 * MIB
STEP_SHARE = 0.01
"""The ceiling must move by so many bytes, or by this share of the cap where that is less, before the engine is told."""

log = structlog.get_logger("node.memory.limits")


class Limiter:
    """Holds cap and margin, and gives the limits for a reading. SettingsError when the settings cannot be met here.

    `origins` says where each setting came from that is not a default. `leases` are bytes granted to others, and
    `worker` the process that lives on them: its footprint is taken off nobody twice. Metal's limit as the device
    reported it is kept in `folder` (None: nowhere).
    """

    def __init__(
        self, settings: NodeSettings, machine: Machine, origins: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings.memory
        self._machine = machine
        self._guard = settings.memory.guard == "on"
        self._folder = folder
        self.leases = 0
        self.worker: int | None = None
        bounds = machine.bounds()
        self._device = None if folder is None else read_device(folder, machine.hardware, bounds.wired)
        self._engine = 0
        self.cap: Cap = self._resolve(bounds, starting=True)
        self.margin: Margin = resolve_margin(settings.memory.margin, self.cap.bytes)
        self.standing = Ceiling(self.cap.bytes, self.cap.bound_by, self.cap.remedy)
        """The ceiling of the last look, with the term that binds and its remedy."""
        self._reach = LastGood()
        self._told: Limits | None = None
        self._say(origins or {})

    @property
    def tier(self) -> str:
        """The tier in force."""
        return self._settings.tier

    def warnings(self) -> list[str]:
        """Say what makes this node less safe than it could be."""
        off = "memory.guard is off: no request is refused for memory, and the machine may panic"
        return [text for text in (self.cap.warning, self.margin.warning, "" if self._guard else off) if text]

    def warn(self) -> None:
        """Put the warnings into the log."""
        for warning in self.warnings():
            log.warning("guard weakened", warning=warning)

    def worker_phys(self) -> int:
        """Read the footprint of the process that lives on the leases; 0 when there is none, or it cannot be read."""
        return 0 if self.worker is None else footprint(self.worker) or 0

    def report_metal(self, engine: int, limit: int) -> None:
        """Use Metal's limit (bytes; 0: no Metal) as this engine process reports it, and keep it for later starts.

        Only the first report of a process counts: MLX reads the figure once.
        """
        if not limit or engine == self._engine:
            return
        self._engine = engine
        known, bounds = self._device, self._machine.bounds()
        self._device = Device(limit, bounds.wired)
        if self._device == known:
            return
        log.info("metal limit", reported=show_size(limit), before=show_size(with_device(bounds, known).metal))
        if self._folder is not None:
            write_device(self._folder, self._machine.hardware, self._device)

    def wired(self) -> int | None:
        """Read the bytes that are wired on this machine, less those of the process that lives on the leases; None when
        they cannot be read."""
        wired = self._machine.wired()
        return None if wired is None else max(0, wired - self.worker_phys())

    def now(self, phys: int | None) -> Limits:
        """Return the limits for the engine's footprint in bytes: 0 while there is no engine, None when unreadable."""
        self._look()
        reach = self._reach.take(self._reaches(phys), time.monotonic())
        self.standing = ceiling(self.cap, reach, self.leases)
        return limits(self.cap, self.margin, self.standing, guard=self._guard, leases=self.leases)

    def poll(self, phys: int | None, tell: Callable[[Limits], object]) -> Limits:
        """Look again, tell the engine when something moved, and give the limits of this moment."""
        found, told = self.now(phys), self._told
        if told is None or _fixed(found) != _fixed(told) or abs(found.ceiling - told.ceiling) >= self._step:
            self._told = found
            tell(found)
        return found

    def _reaches(self, phys: int | None) -> int | None:
        """Return the bytes that the engine can reach; None when a reading fails that this follows from."""
        worker = self.worker
        lent = 0 if worker is None else footprint(worker)
        if lent is None and worker is not None and members(worker):
            return None
        return dynamic(phys, self._machine.reclaimable(), worker=lent or 0, lease=self.leases)

    @property
    def _step(self) -> int:
        return max(1, min(STEP, int(self.cap.bytes * STEP_SHARE)))

    def _look(self) -> None:
        """Settle the cap anew. RAM does not change, so where it cannot be read for once the last cap stands."""
        bounds = self._machine.bounds()
        if not bounds.total:
            return
        cap = self._resolve(bounds, starting=False)
        if cap != self.cap:
            self.cap, self.margin = cap, resolve_margin(self._settings.margin, cap.bytes)
            log.warning("cap changed", cap=show_size(cap.bytes), bound_by=cap.bound_by, remedy=cap.remedy)
            self.warn()

    def _resolve(self, bounds: Bounds, *, starting: bool) -> Cap:
        memory, bounds = self._settings, with_device(bounds, self._device)
        return resolve_cap(memory.cap, memory.tier, bounds, above_metal=memory.above_metal, starting=starting)

    def _say(self, origins: Mapping[str, str]) -> None:
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


def _fixed(limits: Limits) -> tuple[object, ...]:
    """Give all but the ceiling."""
    return limits.cap, limits.margin, limits.bound_by, limits.guard, limits.leases
