"""What feeds this machine, how full its battery is, and how long ago a person last touched it.

The readings of a policy, not the policy: None always means "cannot be read here", never "no". macOS is asked through
`pmset` and `ioreg`, whose words are parsed by pure functions; Linux through /sys/class/power_supply. Both tools take
some ten milliseconds and neither reading changes quickly: call `read_power` in a thread, and not oftener than every
few seconds. The macOS half is unverified until somebody ran it there: the entry `power` of the checklist.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")
TOOL_SECONDS = 5.0
BATTERIES = ("/usr/bin/pmset", "-g", "batt")
TOUCHED = ("/usr/sbin/ioreg", "-rd1", "-c", "IOHIDSystem")
_FIELDS = ("type", "scope", "online", "status", "capacity", "present")

Ask = Callable[[tuple[str, ...]], str]
"""Runs a tool and gives what it printed; an empty text when it cannot."""


@dataclass(frozen=True, slots=True)
class Power:
    """One look: on mains or not, charge in percent of full (0 to 100; None also where there is no battery), and
    seconds since the keyboard, mouse or screen was last touched."""

    plugged: bool | None = None
    battery: float | None = None
    idle_s: float | None = None


def read_power(platform: str = sys.platform, ask: Ask | None = None, supplies: Path = SUPPLIES) -> Power:
    """Look at this machine; blocks for as long as the tools take, TOOL_SECONDS each at most. Never raises."""
    ask = ask or _ask
    if platform == "darwin":
        plugged, battery = batteries_in(ask(BATTERIES))
        return Power(plugged, battery, idle_in(ask(TOUCHED)))
    found = _linux_supplies(supplies)
    return Power() if found is None else Power(*supplied_by(found))


def batteries_in(listing: str) -> tuple[bool | None, float | None]:
    """Read `pmset -g batt`: on mains or not, and the emptiest battery in percent.

    A Mac behind an uninterruptible supply that has taken over draws from 'UPS Power': that is not mains.
    """
    source = re.search(r"drawing from '([^']+)'", listing)
    charges = [float(percent) for percent in re.findall(r"^\s*-.*?\s(\d{1,3})%;", listing, re.MULTILINE)]
    return None if source is None else source[1] == "AC Power", min(charges, default=None)


def idle_in(listing: str) -> float | None:
    """Read the seconds since the last touch from `ioreg`'s HIDIdleTime, which counts nanoseconds."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', listing)
    return None if found is None else int(found[1]) / 1e9


def supplied_by(supplies: Iterable[Mapping[str, str]]) -> tuple[bool | None, float | None]:
    """Read Linux's power supplies, each as the contents of its files. A machine without a battery of its own is on
    mains; batteries of mice and keyboards (scope Device) do not count."""
    own = [one for one in supplies if one.get("scope", "").casefold() != "device"]
    batteries = [one for one in own if one.get("type") in ("Battery", "UPS") and one.get("present") != "0"]
    charges = [float(one["capacity"]) for one in batteries if one.get("capacity", "").isdecimal()]
    if not batteries:
        return True, None
    mains = [one["online"] == "1" for one in own if one.get("type") in ("Mains", "USB") and "online" in one]
    plugged = any(mains) if mains else all(one.get("status") != "Discharging" for one in batteries)
    return plugged, min(charges, default=None)


def _linux_supplies(folder: Path) -> list[dict[str, str]] | None:
    """Give the files of every supply; None where the kernel shows none at all, as in some containers."""
    try:
        return [_read(one) for one in sorted(folder.iterdir())]
    except OSError:
        return None


def _read(supply: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _FIELDS:
        try:
            found[name] = (supply / name).read_text().strip()
        except (OSError, ValueError):
            continue
    return found


def _ask(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS,
                              stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
