"""Read memory on macOS by ctypes. Unverified on macOS: tested against a compiled stand-in with these signatures.

The footprint is `ri_phys_footprint` of `proc_pid_rusage` (`RUSAGE_INFO_V4`, 296 bytes, <sys/resource.h>). It includes
Metal's IOAccelerator pages, which resident sizes do not, and is readable for every process of the same user. The
structure also has two high-water marks: since the start of the process, and since `proc_reset_footprint_interval`
(<libproc.h>). psutil has none of them. The start time that psutil returns changes with the clock and therefore does not
identify a process. A value that cannot be read is None, never 0.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import ClassVar

from node.memory.reading import PHYS_FOOTPRINT, HighWaterMarks
from wire.units import MIB

SYSTEM = "/usr/lib/libSystem.B.dylib"
RUSAGE_INFO_V4 = 4
PROC_PIDTBSDINFO = 3
ZOMBIE = 5

_U64_BEFORE = ("user", "system", "idle_wakeups", "interrupt_wakeups", "pageins", "wired", "resident")
_U64_BETWEEN = 20
PRESSURES = {1: "normal", 2: "warn", 4: "critical"}
"""Names for `kern.memorystatus_vm_pressure_level`, as in <dispatch/source.h>."""


class RusageV4(ctypes.Structure):
    """`struct rusage_info_v4`: a uuid of 16 bytes, and 35 numbers of 8 bytes.

    Counted from 1, number 8 is phys_footprint, 29 its lifetime maximum, 34 its maximum in the interval.
    """

    phys_footprint: int
    lifetime_max_phys_footprint: int
    interval_max_phys_footprint: int
    _fields_: ClassVar = [
        ("uuid", c_uint8 * 16),
        *((name, c_uint64) for name in _U64_BEFORE),
        ("phys_footprint", c_uint64),
        ("others", c_uint64 * _U64_BETWEEN),
        ("lifetime_max_phys_footprint", c_uint64),
        ("work", c_uint64 * 4),
        ("interval_max_phys_footprint", c_uint64),
        ("runnable_time", c_uint64),
    ]


class ProcBsdInfo(ctypes.Structure):
    """`struct proc_bsdinfo`, 136 bytes (<sys/proc_info.h>): state and start time of a process."""

    status: int
    start_seconds: int
    start_microseconds: int
    _fields_: ClassVar = [
        ("flags", c_uint32),
        ("status", c_uint32),
        ("others", c_uint32 * 10),
        ("names", c_uint8 * 48),
        ("more", c_uint32 * 6),
        ("start_seconds", c_uint64),
        ("start_microseconds", c_uint64),
    ]


class LibSystem:
    """Functions of libSystem for the memory of processes and for values of sysctl, called by ctypes.

    The constructor raises `OSError` if the library cannot be loaded.
    """

    def __init__(self, library: str = SYSTEM) -> None:
        calls = ctypes.CDLL(library)
        self._rusage = calls.proc_pid_rusage
        self._rusage.argtypes, self._rusage.restype = [c_int, c_int, c_void_p], c_int
        self._reset_interval = getattr(calls, "proc_reset_footprint_interval", None)
        if self._reset_interval is not None:
            self._reset_interval.argtypes, self._reset_interval.restype = [c_int], c_int
        self._pid_info = calls.proc_pidinfo
        self._pid_info.argtypes, self._pid_info.restype = [c_int, c_int, c_uint64, c_void_p, c_int], c_int
        self._sysctl = calls.sysctlbyname
        self._sysctl.argtypes = [c_char_p, c_void_p, POINTER(c_size_t), c_void_p, c_size_t]
        self._sysctl.restype = c_int
        self._limit = 0

    def read_footprint(self, pid: int) -> int | None:
        """Return the footprint of a process in bytes; None for an ended, foreign or unreadable process."""
        usage = self._read_usage(pid)
        return None if usage is None else usage.phys_footprint or None

    def read_high_water_marks(self, pid: int) -> HighWaterMarks:
        """Return the high-water marks of a process's footprint; None in both fields for an ended or foreign process."""
        usage = self._read_usage(pid)
        if usage is None:
            return HighWaterMarks()
        return HighWaterMarks(usage.lifetime_max_phys_footprint or None, usage.interval_max_phys_footprint or None)

    def begin_interval(self, pid: int) -> bool:
        """Reset `HighWaterMarks.interval` of a process to its current footprint. Return whether that succeeded.

        Return False if the system does not have the call or refuses it.
        """
        return self._reset_interval is not None and self._reset_interval(pid) == 0

    def _read_usage(self, pid: int) -> RusageV4 | None:
        usage = RusageV4()
        return usage if self._rusage(pid, RUSAGE_INFO_V4, byref(usage)) == 0 else None

    def read_process_identity(self, pid: int) -> str:
        """Return an identifier that no later process with the same pid has: the start time of the process.

        The result is empty for an ended, foreign or unreadable process.
        """
        described, size = ProcBsdInfo(), ctypes.sizeof(ProcBsdInfo)
        if self._pid_info(pid, PROC_PIDTBSDINFO, 0, byref(described), size) != size or described.status == ZOMBIE:
            return ""
        return f"{described.start_seconds}.{described.start_microseconds}"

    def read_wired_limit(self) -> int | None:
        """Return the Metal limit in bytes that a person set with `iogpu.wired_limit_mb`; None for the default.

        After a failed read, the last value is returned, because a lower cap could end requests.
        """
        megabytes = self._read_number("iogpu.wired_limit_mb")
        if megabytes is not None:
            self._limit = megabytes
        return self._limit * MIB or None

    def read_pressure(self) -> str:
        """Return the memory pressure of the system: `normal`, `warn` or `critical`; empty if unknown."""
        return PRESSURES.get(self._read_number("kern.memorystatus_vm_pressure_level") or 0, "")

    def read_chip_name(self) -> str:
        """Return the name of the chip, such as "Apple M5 Max"; empty if unknown."""
        return (self._read_value("machdep.cpu.brand_string") or b"").split(b"\0")[0].decode(errors="replace")

    def _read_number(self, name: str) -> int | None:
        raw = self._read_value(name)
        return int.from_bytes(raw, "little") if raw and len(raw) in (4, 8) else None

    def _read_value(self, name: str) -> bytes | None:
        buffer, size = ctypes.create_string_buffer(256), c_size_t(256)
        if self._sysctl(name.encode(), buffer, byref(size), None, 0) != 0:
            return None
        return buffer.raw[: size.value]


class DarwinFootprint:
    """Reader of the footprint of one process on macOS (`FootprintSource`)."""

    source = PHYS_FOOTPRINT

    def __init__(self, pid: int, system: LibSystem) -> None:
        self._pid = pid
        self._system = system

    def read_footprint(self) -> int | None:
        """Return the footprint in bytes; None if it cannot be read."""
        return self._system.read_footprint(self._pid)

    def read_high_water_marks(self) -> HighWaterMarks:
        """Return the high-water marks of the footprint; None in both fields if they cannot be read."""
        return self._system.read_high_water_marks(self._pid)

    def begin_interval(self) -> bool:
        """Reset `HighWaterMarks.interval` to the current footprint. Return whether that succeeded."""
        return self._system.begin_interval(self._pid)

    def close(self) -> None:
        """Do nothing, because this reader has no resources to release."""
