"""Select the memory readings of this system, or a simulated machine for the scripted engine."""

import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from node.memory import darwin, linux
from node.memory.cap import TIERS, MachineBounds, default_metal
from node.memory.reading import AvailableMemory, HighWaterMarks, MemoryReading
from node.settings import NodeSettings
from wire.report import Hardware
from wire.units import parse_size


class FootprintSource(Protocol):
    """Reader of the footprint of a process."""

    source: str

    def phys(self) -> int | None:
        """Return the footprint in bytes; None if it cannot be read."""
        ...

    def highs(self) -> HighWaterMarks:
        """Return the high-water marks."""
        ...

    def begin_interval(self) -> bool:
        """Reset the high-water mark of the interval; return whether that succeeded."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class PageCounts(Protocol):
    """Counts of psutil in bytes. `available` are free and inactive pages on macOS, MemAvailable on Linux."""

    total: int
    available: int
    active: int


class Sensor:
    """Readings of a process with their time."""

    def __init__(self, source: FootprintSource) -> None:
        self.source = source

    def phys(self) -> MemoryReading:
        """Read the footprint; the time is that of the monotonic clock."""
        return MemoryReading(self.source.phys(), self.source.source, time.monotonic())

    def highs(self) -> HighWaterMarks:
        """Read the high-water marks, for calibration and display."""
        return self.source.highs()

    def begin_interval(self) -> bool:
        """Reset the high-water mark of the interval; return whether that succeeded."""
        return self.source.begin_interval()

    def close(self) -> None:
        """Release the source."""
        self.source.close()


def open_sensor(pid: int) -> Sensor:
    """Return a sensor for a process of this user. Readings of an ended process are None."""
    return Sensor(darwin.DarwinFootprint(pid, _system()) if sys.platform == "darwin" else linux.LinuxFootprint(pid))


def footprint(group: int) -> int | None:
    """Return the footprint of a process group, such as the video worker; None without processes or after an error."""
    return footprint_of(members(group))


def footprint_of(pids: tuple[int, ...]) -> int | None:
    """Return the total footprint of processes; None without processes or if a living one cannot be read."""
    total = 0
    for pid in pids:
        found = _footprint(pid)
        if found is None and born(pid):
            return None
        total += found or 0
    return total or None


def _footprint(pid: int) -> int | None:
    sensor = open_sensor(pid)
    try:
        return sensor.phys().phys
    finally:
        sensor.close()


def members(group: int) -> tuple[int, ...]:
    """Return the living processes of a group, without zombies."""
    return tuple(pid for pid in psutil.pids() if _group(pid) == group and born(pid))


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def virtual_memory() -> "PageCounts | None":
    """Return the memory counts of this machine; None if they cannot be read."""
    try:
        return psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError, psutil.Error):
        return None


def born(pid: int) -> str:
    """Return an identifier of a process that a later process with the same pid does not have; empty if it ended."""
    return _system().born(pid) if sys.platform == "darwin" else linux.born(pid)


class MachineMemory(Protocol):
    """Memory of a machine. Every call reads the system."""

    @property
    def hardware(self) -> Hardware:
        """Description of the machine for `Hello`."""
        ...

    def bounds(self) -> MachineBounds:
        """Return RAM, Metal limit and limit of the container."""
        ...

    def reclaimable(self) -> int | None:
        """Return the bytes that the system can free for the engine; None if unknown."""
        ...

    def spare(self) -> AvailableMemory:
        """Return the available memory, for display."""
        ...

    def wired(self) -> int | None:
        """Return the bytes wired by all processes and the kernel; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Mac:
    """This Mac. Unverified on macOS."""

    hardware: Hardware
    active_share: float
    system: darwin.LibSystem
    pages: Callable[[], PageCounts | None] = virtual_memory

    def bounds(self) -> MachineBounds:
        """Return the RAM and the Metal limit, which a person can change at any time."""
        wired, hardware = self.system.wired_limit(), self.hardware
        return MachineBounds(hardware.memory, wired or default_metal(hardware.memory, hardware.system), wired=wired)

    def reclaimable(self) -> int | None:
        """Return free and inactive pages, and `active_share` of the active pages, in bytes."""
        found = self.pages()
        return None if found is None else int(found.available + found.active * self.active_share)

    def spare(self) -> AvailableMemory:
        """Return free and inactive pages as available memory."""
        found = self.pages()
        available = None if found is None else found.available
        return AvailableMemory(available, self.system.pressure(), "psutil", time.monotonic())

    def wired(self) -> int | None:
        """Return wired pages in bytes."""
        found = self.pages()
        return None if found is None else getattr(found, "wired", None)


@dataclass(frozen=True, slots=True)
class LinuxMachine:
    """This Linux machine, or its container."""

    hardware: Hardware

    def bounds(self) -> MachineBounds:
        """Return the RAM and the limit of the cgroups."""
        found = virtual_memory()
        return MachineBounds(0 if found is None else found.total, None, linux.container_limit())

    def reclaimable(self) -> int | None:
        """Return the minimum of MemAvailable and the free memory of the cgroups."""
        found, container_free = virtual_memory(), linux.container_free_bytes()
        return (
            None
            if found is None
            else found.available
            if container_free is None
            else min(found.available, container_free)
        )

    def spare(self) -> AvailableMemory:
        """Return reclaimable memory as available memory, and the pressure."""
        return AvailableMemory(self.reclaimable(), linux.pressure(), "psutil", time.monotonic())

    def wired(self) -> int | None:
        """Return Unevictable: locked memory and memory of drivers."""
        return linux.unevictable_memory()


@dataclass(frozen=True, slots=True)
class PretendedMachine:
    """A simulated Mac without other programs.

    `readings` is the path of a JSON file with values of `reclaimable` and `wired`, which is read at each call.
    """

    hardware: Hardware
    readings: str = ""

    def bounds(self) -> MachineBounds:
        """Return the RAM and the default Metal limit."""
        return MachineBounds(self.hardware.memory, default_metal(self.hardware.memory))

    def reclaimable(self) -> int | None:
        """Return the value in the file, or the RAM."""
        return self._reading("reclaimable", self.hardware.memory)

    def spare(self) -> AvailableMemory:
        """Return reclaimable memory as available memory."""
        return AvailableMemory(self.reclaimable(), "normal", "pretended", time.monotonic())

    def wired(self) -> int | None:
        """Return the value in the file, or None."""
        return self._reading("wired", None)

    def _reading(self, name: str, otherwise: int | None) -> int | None:
        """Return a value in the file; `otherwise` if the file or the name is missing."""
        try:
            found = msgspec.json.decode(Path(self.readings).read_bytes(), type=dict[str, int | None])
        except (OSError, msgspec.MsgspecError):
            return otherwise
        return found.get(name, otherwise)


def open_machine(settings: NodeSettings) -> MachineMemory:
    """Return a simulated machine for the scripted engine, else this machine."""
    if settings.engine.kind == "scripted":
        scripted = settings.engine.scripted
        return PretendedMachine(machine(parse_size(scripted.memory)), scripted.readings)
    if sys.platform == "darwin":
        return Mac(machine(), TIERS[settings.memory.tier].active_share, _system())
    return LinuxMachine(machine())


def machine(memory: int | None = None) -> Hardware:
    """Describe this machine for `Hello`. `memory` overrides its RAM in bytes; 0 if the RAM cannot be read."""
    apple = sys.platform == "darwin"
    chip = _system().chip_name() if apple else linux.chip_name()
    if memory is None:
        found, limit = virtual_memory(), None if apple else linux.container_limit()
        memory = 0 if found is None else found.total if limit is None else min(found.total, limit)
    return Hardware(
        chip or platform.machine(),
        memory,
        os.cpu_count() or 0,
        f"{'macOS' if apple else platform.system()} {platform.mac_ver()[0] if apple else platform.release()}",
        platform.python_version(),
    )


@functools.cache
def _system() -> darwin.LibSystem:
    return darwin.LibSystem()
