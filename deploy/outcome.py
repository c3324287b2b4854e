"""Create the outcomes of the Mac check's entries, and run the system's tools."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.units import GIB, KIB, MIB

ROOT = Path(__file__).parents[1]
"""Folder of the repository."""
TOOL_TIMEOUT_SECONDS = 60.0
"""Timeout of a system tool, in seconds."""
_UNITS = {"": 1, "B": 1, "K": KIB, "KB": KIB, "M": MIB, "MB": MIB, "G": GIB, "GB": GIB}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one entry of the Mac check."""

    status: Literal["pass", "fail", "skip"]
    """Result of the check; `skip` if this machine cannot run it."""
    text: str
    """Numbers that decided the status, or the reason for a skip."""


def create_outcome(good: bool, text: str) -> Outcome:
    """Return the outcome `pass` if `good`, otherwise `fail`."""
    return Outcome("pass" if good else "fail", text)


def create_skip(why: str) -> Outcome:
    """Return the outcome `skip` with a reason."""
    return Outcome("skip", why)


class ToolError(Exception):
    """Raised if a system tool is missing, fails, or prints unknown output, or if an engine of the check fails.

    The text names the tool or the engine, and the problem.
    """


def run_tool(*command: str) -> str:
    """Run a tool in the repository's folder and return its standard output.

    Raise `ToolError` if the tool is missing, fails, or runs longer than `TOOL_TIMEOUT_SECONDS`.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, check=False, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise ToolError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def parse_number(text: str, pattern: str) -> int:
    """Return the number in the first group of a pattern's first match in a text. Raise `ToolError` without a match."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ToolError(f"{pattern!r} is not in the output: {text.strip()[:200]!r}")
    return int(found[1])


def parse_size(text: str, title: str) -> int:
    """Return the size in bytes that follows `title` in the output of `footprint` (`1034 MB`) or `vmmap` (`1.0G`).

    With every unit name, both tools count in powers of 1024. Raise `ToolError` if there is no size.
    """
    found = re.search(re.escape(title) + r":\s+([\d.]+)\s*([KMG]?B?)\b", text)
    if found is None:
        raise ToolError(f"{title!r} is not in the output: {text.strip()[:200]!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def is_near(one: int, other: int, share: float) -> bool:
    """Return whether two sizes differ by at most `share` (0 to 1) of the larger size."""
    return abs(one - other) <= share * max(one, other)
