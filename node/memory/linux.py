"""Memory readings on Linux: the stand-in for a Mac in development, tests and coordinators.

The footprint is the resident set of `/proc/PID/statm`, read by pread on a descriptor that stays open (1.6 µs; opening
it each time costs 17). Resident pages count shared libraries too, so it is never below what the process holds alone.
Where a cgroup limits the machine, the lower number counts: a container's RAM is its limit. The kernel keeps one
high-water mark (VmHWM), which `clear_refs` sets back: ours of all time is then the highest that we saw before.
"""

import os
from pathlib import Path

from node.memory.reading import Highs

DEAD = (b"Z", b"X")
PAGE = os.sysconf("SC_PAGE_SIZE")
KIB = 1024
UNLIMITED = 2**60
"""cgroup v1 writes "no limit" as a number near 2^63."""
STALLED = (("critical", 60.0), ("warn", 10.0))
"""Share of the last 10 s, in percent, that some task waited for memory. systemd-oomd ends work at 60."""


class Statm:
    """The resident set of one process."""

    source = "statm"

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._highest = 0
        try:
            self._file = os.open(proc / str(pid) / "statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def phys(self) -> int | None:
        """Give resident bytes; None when the process is gone or cannot be read (a zombie reads 0, which is no size)."""
        try:
            resident = int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return resident * PAGE or None

    def highs(self) -> Highs:
        """Give the high-water marks."""
        mark = _kilobytes(self._folder / "status").get("VmHWM")
        if mark is None:
            return Highs()
        self._highest = max(self._highest, mark)
        return Highs(self._highest, mark)

    def begin_interval(self) -> bool:
        """Let the interval's mark begin anew; whether the kernel let us."""
        self.highs()
        try:
            (self._folder / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def born(pid: int, proc: Path = Path("/proc")) -> str:
    """Give what tells a process from a later one of the same number: the boot and its start in it; empty when gone."""
    stat = _stat(f"{proc}/{pid}")
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot}:{int(stat[19])}" if stat is not None and stat[0] not in DEAD else ""


def _stat(folder: str) -> list[bytes] | None:
    """Read the fields behind the name, which may hold anything: state, parent, group, session, …"""
    try:
        file = os.open(f"{folder}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fields = os.read(file, 1024).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(file)
    return fields if len(fields) > 19 else None


def _kilobytes(path: Path) -> dict[str, int]:
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (KIB if words[1:] == ["kB"] else 1)
    return fields


def container_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Give the lowest cgroup limit above this process in bytes; None where nothing limits it."""
    limits = [limit for folder in _folders(proc, cgroups) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def pressure(proc: Path = Path("/proc")) -> str:
    """Give a word for the memory pressure, after how long tasks waited for memory; empty when it is not told."""
    try:
        line = next(line for line in (proc / "pressure" / "memory").read_text().splitlines() if line.startswith("some"))
        share = float(line.split()[1].removeprefix("avg10="))
    except (OSError, StopIteration, IndexError, ValueError):
        return ""
    return next((word for word, least in STALLED if share >= least), "normal")


def container_room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the least room in the cgroups above this process in bytes; None where nothing limits it."""
    rooms = [room for folder in _folders(proc, cgroups) if (room := _room(folder)) is not None]
    return min(rooms, default=None)


def unevictable_memory(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that can be neither paged out nor given back: locked, or held by drivers."""
    return _kilobytes(proc / "meminfo").get("Unevictable")


def chip_name(proc: Path = Path("/proc")) -> str:
    """Give the processor's name, empty when it is not told."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """List this process's memory cgroups and all above them; limits of each level apply."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            top = cgroups / "memory" if controllers else cgroups
            inner = top / path.strip("/")
            found += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return found


def _limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
    return None if limit is None or limit >= UNLIMITED else limit


def _room(folder: Path) -> int | None:
    limit = _limit(folder)
    used = _number(folder / "memory.current")
    if used is None:
        used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _reclaimable_files(folder))


def _reclaimable_files(folder: Path) -> int:
    """Page cache that nobody used lately is charged to the cgroup, and free for the asking."""
    try:
        fields = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
