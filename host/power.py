"""Read the power supply, the battery, and the time since a person last used this machine.

None means that a value cannot be read, never "no". psutil reads supply and battery; `ioreg` of macOS reads the idle
time in about 10 ms. The values change slowly: call `read_power` in a thread, every few seconds at most. Unverified on
macOS: the entry `power` of the checklist.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import psutil

TOOL_TIMEOUT_SECONDS = 5.0
TOUCHED = ("/usr/sbin/ioreg", "-rd1", "-c", "IOHIDSystem")

RunCommand = Callable[[tuple[str, ...]], str]
"""Function that runs a tool and returns its output; empty after an error."""


class Battery(Protocol):
    """Battery as psutil describes it: charge in percent; `power_plugged` is None if unknown."""

    percent: float
    power_plugged: bool | None


@dataclass(frozen=True, slots=True)
class PowerState:
    """Power state of this machine."""

    plugged: bool | None = None
    """Whether the machine runs on mains."""
    battery: float | None = None
    """Charge in percent; None also without a battery."""
    idle_s: float | None = None
    """Seconds since the keyboard, mouse or screen was last used."""


def read_battery() -> Battery | None:
    """Read the battery or uninterruptible supply; None without one. Raises OSError."""
    read = cast("Callable[[], Battery | None] | None", getattr(psutil, "sensors_battery", None))
    return None if read is None else read()


def read_power(
    platform: str = sys.platform, run: RunCommand | None = None, battery: Callable[[], Battery | None] = read_battery
) -> PowerState:
    """Read the power state; blocks for at most TOOL_TIMEOUT_SECONDS. Does not raise."""
    idle = idle_in((run or _run)(TOUCHED)) if platform == "darwin" else None
    try:
        found = battery()
    except (OSError, RuntimeError, psutil.Error):
        return PowerState(idle_s=idle)
    return PowerState(True, None, idle) if found is None else PowerState(found.power_plugged, found.percent, idle)


def idle_in(listing: str) -> float | None:
    """Parse the idle seconds from HIDIdleTime (nanoseconds) in the output of `ioreg`."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', listing)
    return None if found is None else int(found[1]) / 1e9


def _run(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
