"""`make neuter`: break each guarded property in a copy of the repository and demand that its tests fail.

The tests of a guard must pass on the unchanged code and fail once it is changed. A guard that no longer applies is also
an error. tests/neuter/guards.py describes the guards; CONTRIBUTING.md describes the work with them.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.neuter.changes import VERIFIED, git, select_changed
from tests.neuter.guards import ROOT, Guard, load
from tests.neuter.pool import Copy, Outcome, tracked
from tests.neuter.syntax import NotApplicable

WORKERS = 2
RED = frozenset({1, -signal.SIGSEGV, -signal.SIGABRT})
"""pytest's exit code for failed tests, and native code that crashed; after any other code the tests did not run."""
GREEN_LIMIT_SECONDS = 900
"""Limit of the tests of one file on the unchanged code."""
SLACK_SECONDS = 5
"""Seconds added to the limit of a run with a change."""
SLOWDOWN = 3
"""Factor in that limit on the unchanged time of a guard's tests, including their start. It bounds changes that hang."""
REPORT = ROOT / ".neuter/report.md"
SLOWEST = 10


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one guard."""

    guard: Guard
    wrong: str
    """The error of a guard; empty when its tests failed as they must."""
    took: float
    timed_out: bool = False


class Run:
    """One run of guards: a queue that several workers empty."""

    def __init__(self, guards: list[Guard], budget: float | None = None) -> None:
        self._waiting = list(guards)
        self._tests = sorted({test for guard in guards for test in guard.tests})
        self._begun = set[str]()
        self._green: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._ends = None if budget is None else time.monotonic() + budget
        self.results: list[Result] = []

    @property
    def left_out(self) -> int:
        """Return the number of guards that were not run because the budget was spent."""
        return len(self._waiting)

    def work(self, copy: Copy) -> None:
        """Run guards until none is left, or the budget is spent."""
        for guard in self._take():
            began = time.monotonic()
            wrong, timed_out = self._check(copy, guard)
            result = Result(guard, wrong, time.monotonic() - began, timed_out)
            with self._lock:
                self.results.append(result)
            verdict = f"WRONG: {wrong}" if wrong else "red by its limit" if timed_out else "red"
            print(f"{verdict}  {guard.name} ({result.took:.1f} s): {guard.property}", flush=True)

    def _take(self) -> Iterator[Guard]:
        """Take guards for one worker: those of its last test file, then of a file that no worker has begun.

        The tests of a file run once on the unchanged code. Another worker would wait for this run.
        """
        last = ""
        while self._ends is None or time.monotonic() < self._ends:
            with self._lock:
                if not self._waiting:
                    return
                same = (guard for guard in self._waiting if guard.test_files()[0] == last)
                new = (guard for guard in self._waiting if guard.test_files()[0] not in self._begun)
                guard = next(same, None) or next(new, self._waiting[0])
                self._waiting.remove(guard)
                last = guard.test_files()[0]
                self._begun.add(last)
            yield guard

    def _check(self, copy: Copy, guard: Guard) -> tuple[str, bool]:
        """Return the error of a guard, and whether its tests were ended by the limit."""
        try:
            text = guard.broken(copy.folder)
        except NotApplicable as error:
            return f"{error} (tests/**/guards/*.toml)", False
        seconds = 0.0
        for file in guard.test_files():
            green = self._as_it_stands(copy, file)
            if green.code not in (0, 1):
                return f"the tests of {file} do not run as the code stands: {green.last}", False
            if already := [one for one in green.failed if any(_is_part(one, test) for test in guard.tests)]:
                return f"its tests fail as the code stands: {', '.join(already)}", False
            seconds += green.took - sum(green.seconds.values())  # for start and collection
            seconds += sum(s for one, s in green.seconds.items() if any(_is_part(one, test) for test in guard.tests))
        limit = SLOWDOWN * seconds + SLACK_SECONDS
        outcome = copy.run_changed(guard.path(copy.folder), text, guard.tests, limit)
        if outcome.code in RED or outcome.timed_out:
            return "", outcome.timed_out
        if outcome.code == 0:
            return "its tests pass although the code is changed: make them check the property", False
        return f"its tests did not run (exit code {outcome.code}): {outcome.last}", False

    def _as_it_stands(self, copy: Copy, file: str) -> Outcome:
        """Run the guarded tests of a file once on the unchanged code, and failures a second time."""
        with self._lock:
            known = self._green.get(file)
            mine: Future[Outcome] = Future()
            if known is None:
                self._green[file] = mine
        if known is not None:
            return known.result()
        try:
            named = [test for test in self._tests if test.partition("::")[0] == file]
            outcome = copy.run([file] if file in named else named, GREEN_LIMIT_SECONDS, stop=False)
            if outcome.code == 1 and outcome.failed:
                again = copy.run(outcome.failed, GREEN_LIMIT_SECONDS, stop=False)
                outcome = Outcome(again.code, outcome.took, outcome.seconds | again.seconds, again.failed, again.last)
            mine.set_result(outcome)
        except BaseException as error:
            mine.set_exception(error)
            raise
        return outcome


def _is_part(one: str, test: str) -> bool:
    """Return whether a guard's name of a file, a function or a case covers this test."""
    return one == test or one.startswith((f"{test}::", f"{test}["))


def in_order(guards: list[Guard]) -> list[Guard]:
    """Sort by test file. Files that start processes come first, because they take longest."""
    return sorted(guards, key=lambda guard: (guard.tests[0].startswith("tests/unit"), guard.tests[0]))


def report(run: Run, seconds: float, what: str) -> str:
    """Render the report."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    results = sorted(run.results, key=lambda result: result.guard.name)
    wrong = [result for result in results if result.wrong]
    limited = [result.guard.name for result in results if result.timed_out]
    lines = [
        "# Guards",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {what}, {WORKERS} workers, {seconds / 60:.1f} minutes, "
        f"{cpu / 60:.1f} minutes of CPU time.",
        "",
        f"{len(results) - len(wrong)} of {len(results)} guards: the tests fail without the property.",
    ]
    if run.left_out:
        lines.append(f"{run.left_out} guards were left out: the time was spent.")
    if limited:
        lines.append(f"Ended by their limit: {', '.join(limited)}.")
    if wrong:
        lines += ["", "## Wrong", *(f"- {result.guard.name}: {result.wrong}" for result in wrong)]
    slowest = sorted(results, key=lambda result: -result.took)[:SLOWEST]
    lines += ["", "## Slowest", *(f"- {result.took:.1f} s {result.guard.name}" for result in slowest)]
    return "\n".join(lines) + "\n"


def selected(arguments: argparse.Namespace) -> list[Guard]:
    """Return the guards that the command line selects, in the order in which they run. Raise SystemExit for an unknown
    name."""
    guards = load()
    if unknown := set(arguments.names) - {guard.name for guard in guards}:
        sys.exit(f"no guard has the name {', '.join(sorted(unknown))}")
    if arguments.names:
        guards = [guard for guard in guards if guard.name in arguments.names]
    if arguments.changed:
        guards = select_changed(guards)
        random.Random(f"{datetime.now(UTC):%Y%m%d}").shuffle(guards)
        return guards
    guards = in_order(guards)
    if arguments.shard:
        number, count = (int(part) for part in arguments.shard.split("/"))
        files = list(dict.fromkeys(guard.test_files()[0] for guard in guards))
        guards = [guard for guard in guards if files.index(guard.test_files()[0]) % count == number - 1]
    return guards


def main() -> int:
    """Check the selected guards, and write the report. Return 1 if a guard is wrong, otherwise 0.

    Record a clean commit as verified if all its guards are right, or with --changed all changed ones.
    """
    parser = argparse.ArgumentParser("python -m tests.neuter", description="Break guarded properties; tests must fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only the guards with these names")
    parser.add_argument(
        "--changed", action="store_true", help="only guards that are new or have other code than at the verified commit"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no guard after N seconds")
    parser.add_argument("--shard", metavar="K/N", help="only the K-th of N parts")
    arguments = parser.parse_args()
    guards = selected(arguments)
    if not guards:
        print("no guard is selected")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    commit, is_clean = git("rev-parse", "HEAD"), not git("status", "--porcelain")
    run = Run(guards, arguments.seconds)
    files = tracked()
    with tempfile.TemporaryDirectory(prefix="neuter-") as folder, ThreadPoolExecutor(WORKERS) as pool:
        copies = [Copy(Path(folder) / str(number), files) for number in range(min(WORKERS, len(guards)))]
        try:
            for one in [pool.submit(run.work, copy) for copy in copies]:
                one.result()
        finally:
            for copy in copies:
                copy.close()
    some = arguments.names or arguments.shard
    what = "some guards" if some else "guards of changed code" if arguments.changed else "all guards"
    what += "" if is_clean else ", with changes"
    text = report(run, time.monotonic() - began, f"commit {(commit or 'unknown')[:8]}, {what}")
    print(text, end="")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(text)
    if any(result.wrong for result in run.results):
        return 1
    if not some and not run.left_out and is_clean:
        VERIFIED.write_text(f"{commit} {datetime.now(UTC):%Y-%m-%d}\n")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
