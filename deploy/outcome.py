"""What an entry of the Mac check gives, and how the entries ask this machine's own tools."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.units import GIB, KIB, MIB

ROOT = Path(__file__).parents[1]
TOOL_SECONDS = 60.0
"""Longest wait for one of the system's tools."""
_UNITS = {"": 1, "B": 1, "K": KIB, "KB": KIB, "M": MIB, "MB": MIB, "G": GIB, "GB": GIB}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Pass, fail or skip, with the numbers that decided it."""

    status: Literal["pass", "fail", "skip"]
    text: str


def judged(good: bool, text: str) -> Outcome:
    """Give pass or fail."""
    return Outcome("pass" if good else "fail", text)


def skipped(why: str) -> Outcome:
    """Give a skip with its reason."""
    return Outcome("skip", why)


class ToolError(Exception):
    """A tool of the system is missing, failed or was not understood; the text says which and how."""


def ask(*command: str) -> str:
    """Run a tool in the repository's folder and give what it printed; ToolError when it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise ToolError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def number_in(text: str, pattern: str) -> int:
    """Give the first group of a pattern as a number; ToolError when it is not there."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ToolError(f"{pattern!r} is not in what was printed: {text.strip()[:200]!r}")
    return int(found[1])


def size_in(text: str, title: str) -> int:
    """Give the size after `title` as `footprint` (`1034 MB`) and `vmmap` (`1.0G`) write it, in bytes; else ToolError.

    Both tools count in powers of 1024 whatever the unit is called.
    """
    found = re.search(re.escape(title) + r":\s+([\d.]+)\s*([KMG]?B?)\b", text)
    if found is None:
        raise ToolError(f"{title!r} is not in what was printed: {text.strip()[:200]!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def near(one: int, other: int, share: float) -> bool:
    """Say whether two sizes differ by at most a share of the greater."""
    return abs(one - other) <= share * max(one, other)
