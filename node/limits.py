"""The limits in force on this node: settings and machine turned into a cap, a margin and a moving ceiling.

Everything is read anew at each poll: Metal's limit and the container's may be changed under us, and what the system can
spare moves all the time. The engine gets new limits when the ceiling moved by more than a step, and at once when
anything else did: a lease, the cap, the term that binds. So a quiet machine sends nothing.
"""

from collections.abc import Callable, Mapping

import structlog

from node.memory.cap import Bounds, Cap, Ceiling, Margin, ceiling, dynamic, limits, resolve_cap, resolve_margin
from node.memory.sensor import Machine, footprint
from node.settings import NodeSettings
from wire.frames import Limits
from wire.units import MIB, show_size

STEP = 64 * MIB
STEP_SHARE = 0.01
"""The ceiling must move by so many bytes, or by this share of the cap where that is less, before the engine is told."""

log = structlog.get_logger("node.limits")


class Limiter:
    """Holds cap and margin, and gives the limits for a reading. SettingsError when the settings cannot be met here.

    `origins` says where each setting came from that is not a default. `leases` are bytes granted to others, and
    `worker` the process that lives on them: its footprint is taken off nobody twice.
    """

    def __init__(self, settings: NodeSettings, machine: Machine, origins: Mapping[str, str] | None = None) -> None:
        self._settings = settings.memory
        self._machine = machine
        self._guard = settings.memory.guard == "on"
        self.leases = 0
        self.worker: int | None = None
        self.cap: Cap = self._resolve(machine.bounds(), starting=True)
        self.margin: Margin = resolve_margin(settings.memory.margin, self.cap.bytes)
        self.standing = Ceiling(self.cap.bytes, self.cap.bound_by, self.cap.remedy)
        """The ceiling of the last look, with the term that binds and its remedy."""
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

    def now(self, phys: int | None) -> Limits:
        """Give the limits for the engine's footprint (bytes; None before there is one, which counts as 0)."""
        self._look()
        reach = dynamic(phys or 0, self._machine.reclaimable(), worker=self.worker_phys(), lease=self.leases)
        self.standing = ceiling(self.cap, reach, self.leases)
        return limits(self.cap, self.margin, self.standing, guard=self._guard, leases=self.leases)

    def poll(self, phys: int | None, tell: Callable[[Limits], object]) -> Limits:
        """Look again, tell the engine when something moved, and give the limits of this moment."""
        found, told = self.now(phys), self._told
        if told is None or _fixed(found) != _fixed(told) or abs(found.ceiling - told.ceiling) >= self._step:
            self._told = found
            tell(found)
        return found

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
        memory = self._settings
        return resolve_cap(memory.cap, memory.tier, bounds, above_metal=memory.above_metal, starting=starting)

    def _say(self, origins: Mapping[str, str]) -> None:
        log.info(
            "guard resolved",
            guard=self._settings.guard,
            cap=show_size(self.cap.bytes),
            bound_by=self.cap.bound_by,
            remedy=self.cap.remedy,
            margin=show_size(self.margin.bytes),
            total=show_size(self._machine.hardware.memory),
            tier=self.tier,
            sources={key: origin for key, origin in origins.items() if key.startswith("memory.")} or "defaults",
        )
        self.warn()


def _fixed(limits: Limits) -> tuple[object, ...]:
    """Give all but the ceiling."""
    return limits.cap, limits.margin, limits.bound_by, limits.guard, limits.leases
