"""Read memory on Linux, for coordinators, and in place of a Mac in development and tests.

The footprint is the resident set in `/proc/PID/statm`, read by pread on an open descriptor (1.6 µs, 17 µs with open).
It includes shared libraries and is therefore at least the private memory of the process. A limit of a cgroup counts as
RAM. The kernel has one high-water mark (VmHWM), which `clear_refs` resets. `LinuxFootprint` stores the lifetime
maximum.
"""

import os
from pathlib import Path

from node.memory.reading import HighWaterMarks

DEAD = (b"Z", b"X")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KIB = 1024
UNLIMITED = 2**60
"""Bytes from which on the limit of a cgroup means no limit: cgroup v1 uses a number near 2^63."""
STALLED = (("critical", 60.0), ("warn", 10.0))
"""Levels of the memory pressure, each with its threshold in percent, highest first.

The threshold is the share of the last 10 s in which a task waited for memory. systemd-oomd kills processes at 60 %.
"""


class LinuxFootprint:
    """Reader of the footprint of one process on Linux (`FootprintSource`): its resident set."""

    source = "statm"

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._highest = 0
        try:
            self._file = os.open(proc / str(pid) / "statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read_footprint(self) -> int | None:
        """Return the resident bytes of the process; None for an ended or unreadable process."""
        try:
            resident = int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return resident * PAGE_BYTES or None

    def read_high_water_marks(self) -> HighWaterMarks:
        """Return the high-water marks of the resident set; None in both fields if they cannot be read.

        `lifetime` is the highest mark that calls of this reader have read, because `begin_interval` resets the mark of
        the kernel.
        """
        mark = _read_sizes(self._folder / "status").get("VmHWM")
        if mark is None:
            return HighWaterMarks()
        self._highest = max(self._highest, mark)
        return HighWaterMarks(self._highest, mark)

    def begin_interval(self) -> bool:
        """Reset `HighWaterMarks.interval` to the current resident set. Return whether that succeeded."""
        self.read_high_water_marks()
        try:
            (self._folder / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_process_identity(pid: int, proc: Path = Path("/proc")) -> str:
    """Return an identifier that no later process with the same pid has: boot id and start time of the process.

    The result is empty for an ended or unreadable process.
    """
    stat = _read_stat_fields(f"{proc}/{pid}")
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot}:{int(stat[19])}" if stat is not None and stat[0] not in DEAD else ""


def _read_stat_fields(folder: str) -> list[bytes] | None:
    """Return the fields after the name of the process: state, parent, group, session, …; None if unreadable."""
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


def _read_sizes(path: Path) -> dict[str, int]:
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


def read_container_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest memory limit of the cgroups of this process in bytes; None without a limit."""
    limits = [limit for folder in _find_cgroup_folders(proc, cgroups) if (limit := _read_limit(folder)) is not None]
    return min(limits, default=None)


def read_pressure(proc: Path = Path("/proc")) -> str:
    """Return the memory pressure of the system: `normal`, `warn` or `critical` by `STALLED`; empty if unknown."""
    try:
        line = next(line for line in (proc / "pressure" / "memory").read_text().splitlines() if line.startswith("some"))
        share = float(line.split()[1].removeprefix("avg10="))
    except (OSError, StopIteration, IndexError, ValueError):
        return ""
    return next((word for word, least in STALLED if share >= least), "normal")


def read_container_free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest number of free bytes below the limits of this process's cgroups; None without a limit.

    Page cache that the kernel can free counts as free.
    """
    limits = [free for folder in _find_cgroup_folders(proc, cgroups) if (free := _read_free_bytes(folder)) is not None]
    return min(limits, default=None)


def read_unevictable_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return `Unevictable` of /proc/meminfo in bytes: user memory that the kernel cannot reclaim, such as locked pages.

    Kernel memory and most memory of drivers do not count. Return None if the value cannot be read.
    """
    return _read_sizes(proc / "meminfo").get("Unevictable")


def read_chip_name(proc: Path = Path("/proc")) -> str:
    """Return the name of the processor; empty if unknown."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _find_cgroup_folders(proc: Path, cgroups: Path) -> list[Path]:
    """Return the memory cgroups of this process and their parents, because limits of each level apply."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            top = cgroups / "memory" if controllers else cgroups
            inner = top / path.strip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return folders


def _read_limit(folder: Path) -> int | None:
    limit = _read_number(folder / "memory.max")
    if limit is None:
        limit = _read_number(folder / "memory.limit_in_bytes")
    return None if limit is None or limit >= UNLIMITED else limit


def _read_free_bytes(folder: Path) -> int | None:
    limit = _read_limit(folder)
    used = _read_number(folder / "memory.current")
    if used is None:
        used = _read_number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _read_reclaimable_bytes(folder))


def _read_reclaimable_bytes(folder: Path) -> int:
    """Return the bytes of inactive page cache, which the kernel frees on demand."""
    try:
        fields = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
