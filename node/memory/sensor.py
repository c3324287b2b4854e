"""The one place that picks this system's readings, or a pretended machine where the engine pretends too."""

import functools
import os
import platform
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from node.memory import darwin, linux
from node.memory.cap import TIERS, default_metal
from node.memory.reading import Reading
from node.settings import NodeSettings
from wire.report import Hardware
from wire.units import parse_size


class Source(Protocol):
    """A way to read one process's footprint in bytes; None when it cannot be read."""

    source: str

    def phys(self) -> int | None:
        """Read now."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Sensor:
    """Dated readings of one process."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def phys(self) -> Reading:
        """Read the footprint now, dated by the monotonic clock."""
        return Reading(self._source.phys(), self._source.source, time.monotonic())

    def close(self) -> None:
        """Stop reading."""
        self._source.close()


def open_sensor(pid: int) -> Sensor:
    """Start reading a process of this user; a process that is gone reads as unknown."""
    return Sensor(darwin.Footprint(pid, _system()) if sys.platform == "darwin" else linux.Statm(pid))


class Machine(Protocol):
    """What the cap follows from: RAM, the Metal limit (None: no Metal), and what the system can free now, in bytes."""

    @property
    def hardware(self) -> Hardware:
        """What `Hello` tells of it."""
        ...

    @property
    def metal(self) -> int | None:
        """Metal's wired limit in bytes; None: no Metal."""
        ...

    def reclaimable(self) -> int | None:
        """Read what the system can free for the engine; None when it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Mac:
    """This Mac."""

    hardware: Hardware
    metal: int | None
    active_share: float

    def reclaimable(self) -> int | None:
        """Count free and inactive pages and the tier's share of active ones."""
        return _system().reclaimable(self.active_share)


@dataclass(frozen=True, slots=True)
class LinuxMachine:
    """This Linux machine, or the container's share of it."""

    hardware: Hardware
    metal: int | None = None

    def reclaimable(self) -> int | None:
        """Read MemAvailable and the cgroups' room."""
        return linux.available_memory()


@dataclass(frozen=True, slots=True)
class PretendedMachine:
    """A Mac that does not exist: nobody else uses its memory, so the dynamic term never binds."""

    hardware: Hardware
    metal: int | None

    def reclaimable(self) -> int | None:
        """Give all of the RAM."""
        return self.hardware.memory


def open_machine(settings: NodeSettings) -> Machine:
    """Give the machine that the engine's memory is judged on: pretended for the scripted kind, else this one."""
    if settings.engine.kind == "scripted":
        total = parse_size(settings.engine.scripted.memory)
        return PretendedMachine(machine(total), default_metal(total))
    if sys.platform == "darwin":
        hardware = machine()
        metal = _system().wired_limit() or default_metal(hardware.memory)
        return Mac(hardware, metal, TIERS[settings.memory.tier].active_share)
    return LinuxMachine(machine())


def machine(memory: int | None = None) -> Hardware:
    """Describe this machine for `Hello`; `memory` overrides its RAM in bytes. 0 RAM means: it could not be read."""
    apple = sys.platform == "darwin"
    chip = _system().chip_name() if apple else linux.chip_name()
    if memory is None:
        memory = _system().total_memory() if apple else linux.total_memory()
    return Hardware(
        chip or platform.machine(), memory or 0, os.cpu_count() or 0,
        f"{'macOS' if apple else platform.system()} {platform.mac_ver()[0] if apple else platform.release()}",
        platform.python_version(),
    )  # fmt: skip


@functools.cache
def _system() -> darwin.System:
    return darwin.System()
