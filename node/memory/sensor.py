"""Read the memory of processes and of this machine on macOS and Linux, or of a simulated machine."""

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
from node.memory.cap import TIERS, MachineBounds, estimate_metal_limit
from node.memory.reading import AvailableMemory, HighWaterMarks, MemoryReading
from node.settings import NodeSettings
from wire.report import Hardware
from wire.units import parse_size


class FootprintSource(Protocol):
    """Reader of the footprint of one process, for one operating system."""

    source: str
    """Name of the source of readings, for reports: `phys_footprint` or `statm`."""

    def read_footprint(self) -> int | None:
        """Return the footprint in bytes; None if it cannot be read."""
        ...

    def read_high_water_marks(self) -> HighWaterMarks:
        """Return the high-water marks of the footprint; None in both fields if they cannot be read."""
        ...

    def begin_interval(self) -> bool:
        """Reset `HighWaterMarks.interval` to the current footprint. Return whether that succeeded."""
        ...

    def close(self) -> None:
        """Release the resources of the reader."""
        ...


class PageCounts(Protocol):
    """Memory of the system in bytes, as psutil counts it."""

    total: int
    """RAM."""
    available: int
    """Free and inactive pages on macOS, MemAvailable on Linux."""
    active: int
    """Active pages."""


class Sensor:
    """Reader of the footprint of one process, with the time of each reading."""

    def __init__(self, source: FootprintSource) -> None:
        self.source = source

    def read_footprint(self) -> MemoryReading:
        """Read the footprint of the process now; `phys` of the result is None if it cannot be read."""
        return MemoryReading(self.source.read_footprint(), self.source.source, time.monotonic())

    def read_high_water_marks(self) -> HighWaterMarks:
        """Read the high-water marks of the footprint; None in both fields if they cannot be read."""
        return self.source.read_high_water_marks()

    def begin_interval(self) -> bool:
        """Reset `HighWaterMarks.interval` to the current footprint. Return whether that succeeded."""
        return self.source.begin_interval()

    def close(self) -> None:
        """Release the resources of the source."""
        self.source.close()


def open_sensor(pid: int) -> Sensor:
    """Return a sensor for the process `pid`, which must belong to this user.

    The readings have the value None after the process has ended. The caller must close the sensor.
    """
    return Sensor(
        darwin.DarwinFootprint(pid, _get_libsystem()) if sys.platform == "darwin" else linux.LinuxFootprint(pid)
    )


def measure_group_footprint(group: int) -> int | None:
    """Return the total footprint of a process group in bytes, such as that of the video worker.

    Return None without living processes, or if a living one cannot be read. `group` is a process group id.
    """
    return measure_footprint(list_group_members(group))


def measure_footprint(pids: tuple[int, ...]) -> int | None:
    """Return the total footprint of processes in bytes; None if none is alive, or if a living one is unreadable."""
    total = 0
    for pid in pids:
        footprint = _read_footprint(pid)
        if footprint is None and read_process_identity(pid):
            return None
        total += footprint or 0
    return total or None


def _read_footprint(pid: int) -> int | None:
    sensor = open_sensor(pid)
    try:
        return sensor.read_footprint().phys
    finally:
        sensor.close()


def list_group_members(group: int) -> tuple[int, ...]:
    """Return the ids of the living processes of a process group, without zombies."""
    return tuple(pid for pid in psutil.pids() if _get_group(pid) == group and read_process_identity(pid))


def _get_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def read_virtual_memory() -> "PageCounts | None":
    """Return the memory of this machine as psutil counts it; None if psutil fails."""
    try:
        return psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError, psutil.Error):
        return None


def read_process_identity(pid: int) -> str:
    """Return an identifier that no later process with the same pid has; empty for an ended or unreadable process."""
    return _get_libsystem().read_process_identity(pid) if sys.platform == "darwin" else linux.read_process_identity(pid)


class MachineMemory(Protocol):
    """Reader of the memory of a machine. Every call reads the system."""

    @property
    def hardware(self) -> Hardware:
        """Description of the machine for `wire.frames.Hello`."""
        ...

    def read_bounds(self) -> MachineBounds:
        """Return RAM, Metal limit and limit of the container in bytes."""
        ...

    def read_reclaimable(self) -> int | None:
        """Return the bytes that the system can free for the engine; None if unknown."""
        ...

    def read_available(self) -> AvailableMemory:
        """Return the available memory and the memory pressure, for display."""
        ...

    def read_wired(self) -> int | None:
        """Return the wired bytes of the system, on Linux without kernel memory; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Mac:
    """Reader of the memory of this Mac. Unverified on macOS."""

    hardware: Hardware
    active_share: float
    """Share of active pages that counts as reclaimable."""
    system: darwin.LibSystem
    pages: Callable[[], PageCounts | None] = read_virtual_memory
    """Reads the memory of the system; None if unreadable."""

    def read_bounds(self) -> MachineBounds:
        """Return RAM and Metal limit in bytes.

        The Metal limit is the one that a person set (`iogpu.wired_limit_mb`), or an estimate of the default.
        """
        wired, hardware = self.system.read_wired_limit(), self.hardware
        return MachineBounds(
            hardware.memory, wired or estimate_metal_limit(hardware.memory, hardware.system), wired=wired
        )

    def read_reclaimable(self) -> int | None:
        """Return the bytes of free and inactive pages and of `active_share` of the active ones; None if unreadable."""
        pages = self.pages()
        return None if pages is None else int(pages.available + pages.active * self.active_share)

    def read_available(self) -> AvailableMemory:
        """Return free and inactive pages as available memory, and the memory pressure."""
        pages = self.pages()
        available = None if pages is None else pages.available
        return AvailableMemory(available, self.system.read_pressure(), "psutil", time.monotonic())

    def read_wired(self) -> int | None:
        """Return the bytes of wired pages; None if they cannot be read."""
        return getattr(self.pages(), "wired", None)


@dataclass(frozen=True, slots=True)
class LinuxMachine:
    """Reader of the memory of this Linux machine, or of its container."""

    hardware: Hardware

    def read_bounds(self) -> MachineBounds:
        """Return the RAM (0 if unreadable) and the lowest limit of the cgroups in bytes."""
        memory = read_virtual_memory()
        return MachineBounds(0 if memory is None else memory.total, None, linux.read_container_limit())

    def read_reclaimable(self) -> int | None:
        """Return MemAvailable in bytes, at most the free memory of the cgroups; None if it cannot be read."""
        memory, container_free = read_virtual_memory(), linux.read_container_free_bytes()
        return (
            None
            if memory is None
            else memory.available
            if container_free is None
            else min(memory.available, container_free)
        )

    def read_available(self) -> AvailableMemory:
        """Return the reclaimable memory as available memory, and the memory pressure."""
        return AvailableMemory(self.read_reclaimable(), linux.read_pressure(), "psutil", time.monotonic())

    def read_wired(self) -> int | None:
        """Return `Unevictable` of /proc/meminfo in bytes (`linux.read_unevictable_bytes`); None if unreadable."""
        return linux.read_unevictable_bytes()


@dataclass(frozen=True, slots=True)
class PretendedMachine:
    """Simulated memory of a Mac without other programs, for the scripted engine."""

    hardware: Hardware
    readings: str = ""
    """Path of a JSON file with the bytes `reclaimable` and `wired`, which is read at each call; empty for none."""

    def read_bounds(self) -> MachineBounds:
        """Return the simulated RAM and its default Metal limit in bytes."""
        return MachineBounds(self.hardware.memory, estimate_metal_limit(self.hardware.memory))

    def read_reclaimable(self) -> int | None:
        """Return `reclaimable` of the file `readings`, in bytes; the RAM if the file has no such value."""
        return self._read_value("reclaimable", self.hardware.memory)

    def read_available(self) -> AvailableMemory:
        """Return the reclaimable memory as available memory, with normal pressure."""
        return AvailableMemory(self.read_reclaimable(), "normal", "pretended", time.monotonic())

    def read_wired(self) -> int | None:
        """Return `wired` of the file `readings`, in bytes; None if the file has no such value."""
        return self._read_value("wired", None)

    def _read_value(self, name: str, otherwise: int | None) -> int | None:
        """Return a value in the file; `otherwise` if the file is missing or invalid, or lacks the name."""
        try:
            readings = msgspec.json.decode(Path(self.readings).read_bytes(), type=dict[str, int | None])
        except (OSError, msgspec.MsgspecError):
            return otherwise
        return readings.get(name, otherwise)


def open_machine(settings: NodeSettings) -> MachineMemory:
    """Return the reader of this machine's memory; for the scripted engine, that of a simulated machine.

    Raise `ValueError` if `engine.scripted.memory` is not a size.
    """
    if settings.engine.kind == "scripted":
        scripted = settings.engine.scripted
        return PretendedMachine(describe_machine(parse_size(scripted.memory)), scripted.readings)
    if sys.platform == "darwin":
        return Mac(describe_machine(), TIERS[settings.memory.tier].active_share, _get_libsystem())
    return LinuxMachine(describe_machine())


def describe_machine(memory: int | None = None) -> Hardware:
    """Return the description of this machine for `wire.frames.Hello`.

    `memory` is the RAM of a simulated machine in bytes; None reads the RAM of this machine. On Linux, a lower limit of
    the container counts as RAM. `Hardware.memory` is 0 if the RAM is unreadable.
    """
    apple = sys.platform == "darwin"
    chip = _get_libsystem().read_chip_name() if apple else linux.read_chip_name()
    if memory is None:
        ram, limit = read_virtual_memory(), None if apple else linux.read_container_limit()
        memory = 0 if ram is None else ram.total if limit is None else min(ram.total, limit)
    return Hardware(
        chip or platform.machine(),
        memory,
        os.cpu_count() or 0,
        f"{'macOS' if apple else platform.system()} {platform.mac_ver()[0] if apple else platform.release()}",
        platform.python_version(),
    )


@functools.cache
def _get_libsystem() -> darwin.LibSystem:
    return darwin.LibSystem()
