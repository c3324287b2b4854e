"""`make mutants`: change the functions of functions.toml with operators and count the mutants that their tests kill.

A mutant that no test fails on has survived. A mutant that no test can detect is listed with its reason in
equivalent.toml and does not count. An area fails when less than TARGET of its mutants are killed.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.neuter.guards import ROOT
from tests.neuter.operators import OPERATORS

WORKERS = 2
TARGET = 0.95
FOLDER = ROOT / ".neuter"
REPORT = FOLDER / "mutants.md"


@dataclass(frozen=True, slots=True)
class Row:
    """The mutants of one function."""

    name: str
    killed: int
    survived: list[str]
    equivalent: int


@dataclass(frozen=True, slots=True)
class Area:
    """Functions and the tests that must detect their mutants."""

    name: str
    functions: list[str]
    tests: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of the mutants of an area."""

    area: Area
    wrong: str
    """The reason why its tests could not run; empty when they passed on the unchanged code."""
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def share(self) -> float:
        """Return the share of killed mutants among those that can be detected."""
        killed, survived = sum(row.killed for row in self.rows), sum(len(row.survived) for row in self.rows)
        return killed / (killed + survived) if killed + survived else 1.0


def areas(names: list[str]) -> list[Area]:
    """Read functions.toml; return the named areas, or all."""
    found = [Area(**one) for one in tomllib.loads((ROOT / "tests/neuter/functions.toml").read_text())["area"]]
    if unknown := set(names) - {area.name for area in found}:
        sys.exit(f"no area has the name {', '.join(sorted(unknown))}")
    return [area for area in found if not names or area.name in names]


def equivalents() -> dict[str, set[str]]:
    """Read equivalent.toml: the mutants of each function that no test can detect."""
    found: dict[str, set[str]] = {}
    for one in tomllib.loads((ROOT / "tests/neuter/equivalent.toml").read_text()).get("equivalent", []):
        found.setdefault(one["at"], set()).add(one["mutant"])
    return found


def run(area: Area, operators: Iterable[str]) -> Outcome:
    """Run the mutants of an area in a process of its own."""
    FOLDER.mkdir(exist_ok=True)
    result = FOLDER / f"{area.name.replace(' ', '-')}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.neuter.mutate", str(result), ",".join(operators)]
    command += [*area.functions, "--", *area.tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.is_file():
        made, known = json.loads(result.read_text()), equivalents()
        wrong = f"this test fails as the code stands: {made['wrong']}" if made["wrong"] else ""
        outcome = Outcome(area, wrong, [_row(one, known.get(one["name"], set())) for one in made["functions"]])
    else:
        wrong = f"the tests do not run: {(done.stdout + done.stderr)[-1000:]}"
        outcome = Outcome(area, wrong)
    print(f"{area.name}: {wrong or f'{outcome.share:.1%} killed'}", flush=True)
    return outcome


def _row(made: dict[str, Any], known: set[str]) -> Row:
    survived = [one for one in made["survived"] if one.partition(": ")[2] not in known]
    return Row(made["name"], len(made["killed"]), survived, len(made["survived"]) - len(survived))


def report(outcomes: list[Outcome]) -> str:
    """Render the report."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [
        "# Operator mutants",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit.stdout.strip()}, {WORKERS} workers.",
        "",
        "| area | function | killed | survived | equivalent |",
        "|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lines += [
            f"| {outcome.area.name} | `{row.name}` | {row.killed} | {len(row.survived)} | {row.equivalent} |"
            for row in outcome.rows
        ]
        lines.append(f"| **{outcome.area.name}** | {outcome.wrong} | **{outcome.share:.1%}** | | |")
    lines += ["", "## Survivors"]
    for outcome in outcomes:
        lines += [f"- `{row.name}` line {one}".replace("\n", " ") for row in outcome.rows for one in row.survived]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the selected areas, and write the report. Return 1 if an area fails, otherwise 0."""
    parser = argparse.ArgumentParser(
        "python -m tests.neuter.mutants", description="Operator mutants of functions.toml."
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help="only these areas")
    parser.add_argument("--only", nargs="+", metavar="OPERATOR", choices=OPERATORS, help=f"of {', '.join(OPERATORS)}")
    arguments = parser.parse_args()
    chosen = areas(arguments.areas)
    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(lambda area: run(area, arguments.only or OPERATORS), chosen))
    text = report(outcomes)
    REPORT.write_text(text)
    print(text, end="")
    return 1 if any(outcome.wrong or outcome.share < TARGET for outcome in outcomes) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
