"""One measured target, and its statistics: medians, and ratios of pairs."""

import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support.processes import ROOT

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured target."""

    name: str
    target: str
    figure: str
    ok: bool
    commit: str


def commit() -> str:
    """Return the commit, marked when the tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Describe the machine: processor, cores, memory, system and Python."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{models[0] if models else platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
        f"{memory:.0f} GiB, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def at_most(name: str, limit: float, ratio: float, words: str, peer: str) -> Row:
    """Return the row of a ratio that may be at most `limit`."""
    return Row(name, f"<= {limit} x {peer}", f"{ratio:.2f} x {words}", ratio <= limit, commit())


def at_least(name: str, limit: float, ratio: float, words: str, peer: str) -> Row:
    """Return the row of a ratio that must be at least `limit`."""
    return Row(name, f">= {limit} x {peer}", f"{ratio:.2f} x {words}", ratio >= limit, commit())


def not_measured(name: str, target: str, reason: str) -> Row:
    """Return the row of a target that cannot be measured here: a miss with its reason."""
    return Row(name, target, f"not measured: {reason}", False, commit())


def p99(figures: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(figures)[int(0.99 * len(figures))]


def spread(ratios: Sequence[float]) -> str:
    """Return all ratios as text, which shows how reliable their median is."""
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def in_turn(ours: Callable[[int], T], theirs: Callable[[int], T], rounds: int) -> list[tuple[T, T]]:
    """Measure both in every round, every second time the peer first; round 0 is not counted."""
    pairs: list[tuple[T, T]] = []
    for number in range(rounds + 1):
        if number % 2:
            second = theirs(number)
            pairs.append((ours(number), second))
        else:
            pairs.append((ours(number), theirs(number)))
    return pairs[1:]


def ratio_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float, list[float]]:
    """Return the medians of both sides, the median of the ratios of the pairs, and these ratios."""
    ours, theirs = zip(*pairs, strict=True)
    ratios = [one / other for one, other in pairs]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios), ratios
