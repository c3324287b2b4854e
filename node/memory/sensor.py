"""The one place that picks this system's readings, or a pretended machine where the engine pretends too."""

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
from node.memory.cap import TIERS, Bounds, default_metal
from node.memory.reading import Highs, Reading, Spare
from node.settings import NodeSettings
from wire.report import Hardware
from wire.units import parse_size


class Source(Protocol):
    """A way to read one process's footprint in bytes; None when it cannot be read."""

    source: str

    def phys(self) -> int | None:
        """Read now."""
        ...

    def highs(self) -> Highs:
        """Read the kernel's high-water marks."""
        ...

    def begin_interval(self) -> bool:
        """Let the interval's mark begin anew; whether the system let us."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Pages(Protocol):
    """psutil's counts in bytes. `available` are free and inactive pages on macOS, MemAvailable on Linux; `active` and
    `wired` are macOS's."""

    total: int
    available: int
    active: int


class Sensor:
    """Dated readings of one process, from `source`."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def phys(self) -> Reading:
        """Read the footprint now, dated by the monotonic clock."""
        return Reading(self.source.phys(), self.source.source, time.monotonic())

    def highs(self) -> Highs:
        """Read the kernel's high-water marks, which calibrate and never judge."""
        return self.source.highs()

    def begin_interval(self) -> bool:
        """Let the interval's high-water mark begin anew; whether the system let us."""
        return self.source.begin_interval()

    def close(self) -> None:
        """Stop reading."""
        self.source.close()


def open_sensor(pid: int) -> Sensor:
    """Start reading a process of this user; a process that is gone reads as unknown."""
    return Sensor(darwin.Footprint(pid, _system()) if sys.platform == "darwin" else linux.Statm(pid))


def footprint(group: int) -> int | None:
    """Read all living processes of a group once, as the video worker's; None when there is none, or not all can be."""
    return footprint_of(members(group))


def footprint_of(pids: tuple[int, ...]) -> int | None:
    """Read some processes once and add them up; None when there is none, or one of those that live cannot be read."""
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
    """List the living processes of a group; a process that has ended and was not waited for holds no memory."""
    return tuple(pid for pid in psutil.pids() if _group(pid) == group and born(pid))


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def virtual_memory() -> "Pages | None":
    """Read the counts of this machine's memory in bytes; None when they cannot be read."""
    try:
        return psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError, psutil.Error):
        return None


def born(pid: int) -> str:
    """Give what tells a process from a later one of the same number; empty when it is gone."""
    return _system().born(pid) if sys.platform == "darwin" else linux.born(pid)


class Machine(Protocol):
    """What the cap follows from, and what the system can spare now, all read anew by each call."""

    @property
    def hardware(self) -> Hardware:
        """What `Hello` tells of it."""
        ...

    def bounds(self) -> Bounds:
        """Read RAM, Metal's limit and the container's."""
        ...

    def reclaimable(self) -> int | None:
        """Read what the system can free for the engine in bytes; None when it cannot be read."""
        ...

    def spare(self) -> Spare:
        """Read what the system has left, for those who look."""
        ...

    def wired(self) -> int | None:
        """Read the bytes that all processes and the kernel have wired; None when it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Mac:
    """This Mac. `active_share` of its active pages counts as reclaimable. Unverified on macOS."""

    hardware: Hardware
    active_share: float
    system: darwin.System
    pages: Callable[[], Pages | None] = virtual_memory

    def bounds(self) -> Bounds:
        """Read the limit that somebody may have set just now; the RAM stays what it was."""
        wired, hardware = self.system.wired_limit(), self.hardware
        return Bounds(hardware.memory, wired or default_metal(hardware.memory, hardware.system), wired=wired)

    def reclaimable(self) -> int | None:
        """Count free and inactive pages and the tier's share of active ones."""
        found = self.pages()
        return None if found is None else int(found.available + found.active * self.active_share)

    def spare(self) -> Spare:
        """Count free and inactive pages alone."""
        found = self.pages()
        available = None if found is None else found.available
        return Spare(available, self.system.pressure(), "psutil", time.monotonic())

    def wired(self) -> int | None:
        """Count wired pages."""
        found = self.pages()
        return None if found is None else getattr(found, "wired", None)


@dataclass(frozen=True, slots=True)
class LinuxMachine:
    """This Linux machine, or the container's share of it."""

    hardware: Hardware

    def bounds(self) -> Bounds:
        """Read the RAM and the cgroups' limits."""
        found = virtual_memory()
        return Bounds(0 if found is None else found.total, None, linux.container_limit())

    def reclaimable(self) -> int | None:
        """Read MemAvailable and the cgroups' room."""
        found, room = virtual_memory(), linux.container_room()
        return None if found is None else found.available if room is None else min(found.available, room)

    def spare(self) -> Spare:
        """Read the same, and how long tasks waited for memory."""
        return Spare(self.reclaimable(), linux.pressure(), "psutil", time.monotonic())

    def wired(self) -> int | None:
        """Read Unevictable, which is locked memory and what drivers hold."""
        return linux.unevictable_memory()


@dataclass(frozen=True, slots=True)
class PretendedMachine:
    """A Mac that does not exist: nobody else uses its memory, so the dynamic term never binds. Readings that stand in a
    file are read from there at each call."""

    hardware: Hardware
    readings: str = ""

    def bounds(self) -> Bounds:
        """Return its RAM and a Mac's default limit."""
        return Bounds(self.hardware.memory, default_metal(self.hardware.memory))

    def reclaimable(self) -> int | None:
        """Return all of the RAM, or what the file says."""
        return self._reading("reclaimable", self.hardware.memory)

    def spare(self) -> Spare:
        """Return the same."""
        return Spare(self.reclaimable(), "normal", "pretended", time.monotonic())

    def wired(self) -> int | None:
        """Return what the file says; without one it cannot be read."""
        return self._reading("wired", None)

    def _reading(self, name: str, otherwise: int | None) -> int | None:
        """Read a number or null from the file; `otherwise` where the file or the name is missing."""
        try:
            found = msgspec.json.decode(Path(self.readings).read_bytes(), type=dict[str, int | None])
        except (OSError, msgspec.MsgspecError):
            return otherwise
        return found.get(name, otherwise)


def open_machine(settings: NodeSettings) -> Machine:
    """Give the machine that the engine's memory is judged on: pretended for the scripted kind, else this one."""
    if settings.engine.kind == "scripted":
        scripted = settings.engine.scripted
        return PretendedMachine(machine(parse_size(scripted.memory)), scripted.readings)
    if sys.platform == "darwin":
        return Mac(machine(), TIERS[settings.memory.tier].active_share, _system())
    return LinuxMachine(machine())


def machine(memory: int | None = None) -> Hardware:
    """Describe this machine for `Hello`; `memory` overrides its RAM in bytes. 0 RAM means: it could not be read."""
    apple = sys.platform == "darwin"
    chip = _system().chip_name() if apple else linux.chip_name()
    if memory is None:
        found, limit = virtual_memory(), None if apple else linux.container_limit()
        memory = 0 if found is None else found.total if limit is None else min(found.total, limit)
    return Hardware(
        chip or platform.machine(), memory, os.cpu_count() or 0,
        f"{'macOS' if apple else platform.system()} {platform.mac_ver()[0] if apple else platform.release()}",
        platform.python_version(),
    )  # fmt: skip


@functools.cache
def _system() -> darwin.System:
    return darwin.System()
