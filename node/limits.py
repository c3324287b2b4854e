"""The limits in force on this node: settings and machine turned into a cap, a margin and a moving ceiling.

The cap and the margin are settled at start (and said in the log); the ceiling follows what the system can spare and is
looked at again at every poll. The engine gets new limits when the ceiling moved by more than STEP or when a term that
binds changed, so a quiet machine sends nothing.
"""

from collections.abc import Callable

import structlog

from node.memory.cap import Cap, Margin, ceiling, dynamic, limits, resolve_cap, resolve_margin
from node.memory.sensor import Machine
from node.settings import NodeSettings
from wire.frames import Limits
from wire.units import MIB, show_size

STEP = 64 * MIB
"""Bytes that the ceiling must move before the engine is told."""

log = structlog.get_logger("node.limits")


class Limiter:
    """Holds cap and margin, and gives the limits for a reading. SettingsError when the settings cannot be met here."""

    def __init__(self, settings: NodeSettings, machine: Machine) -> None:
        memory = settings.memory
        self._machine = machine
        self._guard = memory.guard == "on"
        self.cap: Cap = resolve_cap(
            memory.cap, memory.tier, machine.hardware.memory, machine.metal, above_metal=memory.above_metal
        )
        self.margin: Margin = resolve_margin(memory.margin, self.cap.bytes)
        self._told: Limits | None = None
        log.info(
            "guard resolved",
            guard=memory.guard,
            cap=show_size(self.cap.bytes),
            bound_by=self.cap.bound_by,
            margin=show_size(self.margin.bytes),
            total=show_size(machine.hardware.memory),
            tier=memory.tier,
        )
        for warning in self.warnings():
            log.warning("guard weakened", warning=warning)

    def warnings(self) -> list[str]:
        """Say what makes this node less safe than it could be."""
        off = "memory.guard is off: no request is refused for memory, and the machine may panic"
        return [text for text in (self.cap.warning, self.margin.warning, "" if self._guard else off) if text]

    def now(self, phys: int | None) -> Limits:
        """Give the limits for the engine's footprint (bytes; None before there is one, which counts as 0)."""
        reach = dynamic(phys or 0, self._machine.reclaimable())
        return limits(self.cap, self.margin, ceiling(self.cap, reach), guard=self._guard)

    def poll(self, phys: int | None, tell: Callable[[Limits], None]) -> None:
        """Look again, and tell the engine when the ceiling has moved."""
        found, told = self.now(phys), self._told
        if told is None or found.bound_by != told.bound_by or abs(found.ceiling - told.ceiling) >= STEP:
            self._told = found
            tell(found)
