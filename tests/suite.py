"""`make test`: run the suite, and repeat failed tests without hiding the cause.

A busy machine can make a correct test of time fail. At most MAX_SECOND_TRIES test functions with MAX_CASES cases in all
are tried again. Each case runs alone, and then after the tests that ran before it on its worker, in the same order and
with the same seeds. A test that fails alone is wrong. A test that passes alone but not in order depends on an earlier
test, and is also wrong. Only a test that passes both ways does not fail the run; it is printed and kept.

The folder .test-report/ has the last run (`last.json`) and the table of its slowest tests (`slowest.md`). Every failure
of all runs is in `failures.jsonl` with its seeds, order and load. Arguments are pytest's: `python -m tests.suite -n 2
tests/unit`.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.history import History

ROOT = Path(__file__).parents[1]
REPORT = ".test-report"
MAX_SECOND_TRIES = 2
MAX_CASES = 6
BEFORE_SECONDS = 120.0
"""Limit, in seconds of test time, for the earlier tests of a worker that run again before a failed test."""
SLOWEST = 25
SOUND = "it passes alone and in its order"
RED = 1
"""pytest's exit code for failed tests. Any other code except 0 means that the suite did not run completely."""


def run(folder: Path, arguments: Sequence[str], history: str) -> History:
    """Run pytest in a folder; return its history."""
    file = folder / REPORT / history
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.history", "--history", str(file), *arguments]
    code = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode
    found = History.read(file) if file.exists() else History()
    found.exit_code = code  # a plugin may change it after the history is written
    return found


def before(order: list[tuple[str, float]], test: str) -> list[str]:
    """Return a test and, before it, the tests that ran earlier on its worker, up to BEFORE_SECONDS of them, in
    order."""
    ids = [name for name, _ in order]
    place = ids.index(test)
    first, seconds = place, 0.0
    while first > 0 and seconds + order[first - 1][1] <= BEFORE_SECONDS:
        first -= 1
        seconds += order[first][1]
    return ids[first : place + 1]


def passes(folder: Path, tests: list[str], seed: int | None) -> bool:
    """Run tests in one process in this order, with the seed of the first run; return whether the last one passes."""
    order = folder / REPORT / "order.txt"
    order.write_text("".join(f"{test}\n" for test in tests))
    seeds = [] if seed is None else [f"--randomly-seed={seed}"]
    arguments = [*seeds, "-q", "--no-header", "--tb=no", "--in-order", str(order), f"@{order}"]
    tried = run(folder, arguments, "again.json")
    ran = {name for names in tried.workers.values() for name, _ in names}
    return tests[-1] in ran and tests[-1] not in tried.failed


def again(folder: Path, test: str, first: History, worker: str) -> str:
    """Run a failed test alone and in its order; return the verdict."""
    if not passes(folder, [test], first.random_seed):
        return "it fails alone, too"
    order = before(first.workers[worker], test)
    if not passes(folder, order, first.random_seed):
        return f"it passes alone and fails after the {len(order) - 1} tests before it ({REPORT}/order.txt)"
    return SOUND


def keep(folder: Path, first: History, verdicts: dict[str, str]) -> None:
    """Append failures to failures.jsonl, with seeds, order, load and the verdict of the second try."""
    with (folder / REPORT / "failures.jsonl").open("a") as kept:
        for one in first.failures:
            order = before(first.workers[one.worker], one.test)[:-1]
            line = {**asdict(one), "random_seed": first.random_seed, "verdict": verdicts[one.test], "before": order}
            kept.write(json.dumps(line) + "\n")


def slowest(first: History) -> str:
    """Return a Markdown table of the slowest tests, and of the seconds of each folder."""
    ran = [one for order in first.workers.values() for one in order]
    folders = defaultdict[str, float](float)
    for test, seconds in ran:
        folders[str(Path(test.partition("::")[0]).parent)] += seconds
    rows = [f"| {test} | {seconds:.1f} |" for test, seconds in sorted(ran, key=lambda one: -one[1])[:SLOWEST]]
    sums = [f"| {folder} | {seconds:.0f} |" for folder, seconds in sorted(folders.items(), key=lambda one: -one[1])]
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    head = f"# Slowest tests, {date}, {len(ran)} tests on {len(first.workers)} workers\n"
    return "\n".join([head, "| test | s |", "|---|---|", *rows, "", "| folder | s |", "|---|---|", *sums, ""])


def main(arguments: Sequence[str], folder: Path = ROOT) -> int:
    """Run the suite in a folder; return 0 when every test passed, at first or alone and in its order."""
    (folder / REPORT).mkdir(exist_ok=True)
    first = run(folder, arguments, "last.json")
    (folder / REPORT / "slowest.md").write_text(slowest(first))
    if first.exit_code != RED or not first.failures:
        return first.exit_code
    workers = {failure.test: failure.worker for failure in reversed(first.failures)}
    verdicts = dict.fromkeys(workers, f"not tried again, as more than {MAX_SECOND_TRIES} tests failed")
    if len({test.partition("[")[0] for test in workers}) <= MAX_SECOND_TRIES and len(workers) <= MAX_CASES:
        for test, worker in workers.items():
            print(f"\nfailed, tried again alone and in its order: {test}", flush=True)
            verdicts[test] = again(folder, test, first, worker)
    keep(folder, first, verdicts)
    print()
    for test, verdict in verdicts.items():
        print(f"FAILED at first: {test}: {verdict}")
    load = max(failure.load for failure in first.failures)
    print(f"seed of the order {first.random_seed}, load up to {load:.1f}; kept in {REPORT}/failures.jsonl", flush=True)
    return 0 if set(verdicts.values()) == {SOUND} else RED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
