"""Read the power supply, the battery, and the time since a person last used this machine.

None means that a value cannot be read, never "no". psutil reads supply and battery; `ioreg` of macOS reads the idle
time in about 10 ms. Call `read_power` in a thread, at most every few seconds, because the values change slowly.
Unverified on macOS: the entry `power` of the checklist.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import psutil

from host.subprocesses import RunTool, run_tool

TOUCHED = ("/usr/sbin/ioreg", "-rd1", "-c", "IOHIDSystem")
"""Command that prints the idle time of macOS."""


class Battery(Protocol):
    """Battery as psutil describes it."""

    percent: float
    """Charge in percent."""
    power_plugged: bool | None
    """Whether the machine is on mains power; None if unknown."""


@dataclass(frozen=True, slots=True)
class PowerState:
    """Reading of power supply, battery and idle time of this machine. A value is None if it cannot be read."""

    plugged: bool | None = None
    """Whether the machine is on mains power; None if that is unknown."""
    battery: float | None = None
    """Charge of the battery in percent; None also without a battery."""
    idle_s: float | None = None
    """Seconds since the last input at keyboard, mouse or screen; None on systems other than macOS."""


def read_battery() -> Battery | None:
    """Read the battery or uninterruptible power supply; None if there is none, or if psutil cannot read batteries here.

    Raise OSError, RuntimeError or psutil.Error if the read fails.
    """
    read = cast("Callable[[], Battery | None] | None", getattr(psutil, "sensors_battery", None))
    return None if read is None else read()


def read_power(
    platform: str = sys.platform, run: RunTool = run_tool, battery: Callable[[], Battery | None] = read_battery
) -> PowerState:
    """Return the power state of this machine, with None for values that cannot be read.

    The call blocks for at most `host.subprocesses.TOOL_TIMEOUT_SECONDS`. A machine without a battery, and a system
    whose battery psutil cannot read, count as plugged in. In tests, the arguments replace the platform, the tool runner
    and the battery.
    """
    idle = parse_idle_seconds(run(TOUCHED)) if platform == "darwin" else None
    try:
        reading = battery()
    except (OSError, RuntimeError, psutil.Error):
        return PowerState(idle_s=idle)
    return PowerState(True, None, idle) if reading is None else PowerState(reading.power_plugged, reading.percent, idle)


def parse_idle_seconds(listing: str) -> float | None:
    """Return the idle seconds from the output of `ioreg` (HIDIdleTime, nanoseconds); None if they are missing."""
    match = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', listing)
    return None if match is None else int(match[1]) / 1e9
