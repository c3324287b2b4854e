"""`make coverage`: run unit, contract and simulation tests with branch coverage, and compare each room with its floor.

The floors are in tests/coverage.toml; the report is .test-report/coverage.md. A covered branch may still be wrong
without a failing test: docs/mutation.md reports which changes the tests detect. Other arguments than TESTS are
pytest's.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / ".test-report/coverage.md"
CONFIG = """\
[run]
branch = true
parallel = true
source = coordinator,host,node,router,simulation,wire
patch = subprocess,_exit
sigterm = true
disable_warnings = no-data-collected,module-not-measured,couldnt-parse
"""
TESTS = ("-n", "2", "--dist", "worksteal", "-m", "not hosts", "tests/unit", "tests/contract", "tests/sim")


@dataclass(frozen=True, slots=True)
class Room:
    """Files, and the minimum share of their branches in percent that tests must take."""

    name: str
    files: tuple[str, ...]
    floor: float


@dataclass(frozen=True, slots=True)
class Covered:
    """Branches of a room, and the taken ones."""

    room: Room
    branches: int
    taken: int

    @property
    def percent(self) -> float:
        """Return the share of the taken branches; 100 where there are none."""
        return 100.0 * self.taken / self.branches if self.branches else 100.0


def rooms(file: Path = ROOT / "tests/coverage.toml") -> list[Room]:
    """Read the rooms and their floors."""
    return [
        Room(one["name"], tuple(one["files"]), float(one["floor"])) for one in tomllib.loads(file.read_text())["room"]
    ]


def covered(found: Mapping[str, Any], wanted: Iterable[Room]) -> list[Covered]:
    """Add up the branches of each room from the JSON report of coverage. A file counts in every room that names it."""
    sums = list[Covered]()
    for room in wanted:
        files = [one["summary"] for name, one in found["files"].items() if any(fnmatch(name, at) for at in room.files)]
        taken, branches = (sum(one[key] for one in files) for key in ("covered_branches", "num_branches"))
        sums.append(Covered(room, branches, taken))
    return sums


def table(sums: Iterable[Covered]) -> str:
    """Return the report as a Markdown table."""
    lines = ["| room | branches | taken | share | floor |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.room.name} | {one.branches} | {one.taken} | {one.percent:.1f} % | {one.room.floor:g} % |"
        for one in sums
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests and compare; return 1 when a room is below its floor."""
    folder = ROOT / ".test-report/coverage"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config").write_text(CONFIG)
    tool = [sys.executable, "-m", "coverage"]
    rc = f"--rcfile={folder / 'config'}"
    env = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    for command in (["erase", rc], ["run", rc, "-m", "tests.suite", *(sys.argv[1:] or TESTS)], ["combine", "-q", rc]):
        subprocess.run([*tool, *command], cwd=ROOT, env=env, check=command[0] != "run")
    subprocess.run([*tool, "json", "-q", rc, "-o", str(folder / "data.json")], cwd=ROOT, env=env, check=True)
    sums = covered(json.loads((folder / "data.json").read_text()), rooms())
    REPORT.write_text(table(sums))
    print(table(sums))
    low = [one for one in sums if one.percent < one.room.floor]
    for one in low:
        print(f"{one.room.name}: {one.percent:.1f} % of its branches are taken, the floor is {one.room.floor:g} %")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
