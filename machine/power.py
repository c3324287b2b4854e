"""Read the power supply, the battery, and the time since a person last used this machine.

None means "cannot be read here", never "no". psutil reads supply and battery; macOS tells the idle time through
`ioreg`, which takes some ten milliseconds. Neither reading changes quickly: call `read_power` in a thread, every few
seconds at most. Unverified on macOS: the entry `power` of the checklist.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import psutil

TOOL_SECONDS = 5.0
TOUCHED = ("/usr/sbin/ioreg", "-rd1", "-c", "IOHIDSystem")

Ask = Callable[[tuple[str, ...]], str]
"""Runs a tool and returns what it printed; an empty text when it cannot."""


class Battery(Protocol):
    """What psutil says of a battery, in percent; `power_plugged` is None where it is not known."""

    percent: float
    power_plugged: bool | None


@dataclass(frozen=True, slots=True)
class Power:
    """A reading of this machine's power."""

    plugged: bool | None = None
    """On mains."""
    battery: float | None = None
    """Charge in percent; None also where there is no battery."""
    idle_s: float | None = None
    """Seconds since the keyboard, mouse or screen was last used."""


def read_battery() -> Battery | None:
    """Read the battery or uninterruptible supply; None where there is none. OSError when it cannot be read."""
    read = cast("Callable[[], Battery | None] | None", getattr(psutil, "sensors_battery", None))
    return None if read is None else read()


def read_power(
    platform: str = sys.platform, ask: Ask | None = None, battery: Callable[[], Battery | None] = read_battery
) -> Power:
    """Read this machine's power; blocks for TOOL_SECONDS at most. Never raises."""
    idle = idle_in((ask or _ask)(TOUCHED)) if platform == "darwin" else None
    try:
        found = battery()
    except (OSError, RuntimeError, psutil.Error):
        return Power(idle_s=idle)
    return Power(True, None, idle) if found is None else Power(found.power_plugged, found.percent, idle)


def idle_in(listing: str) -> float | None:
    """Parse the seconds since the last use from `ioreg`'s HIDIdleTime, which counts nanoseconds."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', listing)
    return None if found is None else int(found[1]) / 1e9


def _ask(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS,
                              stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
