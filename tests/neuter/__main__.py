"""`make neuter`: break each safety property in a copy of the repository and demand that its tests turn red.

Each entry of entries.toml names a property, the text to replace in one file, and tests. The tests must pass as the code
stands and fail once it is broken; an entry whose text is no longer there exactly once is itself a failure.
`python -m tests.neuter NAME…` runs only the entries with these names.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
"""What tests have made once: a copy need not make it again."""
RED = frozenset({1, -signal.SIGSEGV, -signal.SIGABRT})
"""pytest's exit code for red tests, and native code that died of what was let through; any other code means that the
tests did not run."""
PRECHECK_SECONDS = 3600
"""For all tests of all entries, before anything is broken."""
ENTRY_SECONDS = 600
TIMED_OUT = 124
"""In the place of an exit code, as coreutils' timeout says it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One property and how to break it."""

    name: str
    property: str
    file: str
    find: str
    replace: str
    tests: list[str]


def load() -> list[Entry]:
    """Read entries.toml."""
    entries = tomllib.loads((ROOT / "tests/neuter/entries.toml").read_text())["entry"]
    return [Entry(**entry) for entry in entries]


def tracked() -> list[str]:
    """List the files that git tracks or would."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def run(folder: Path, tests: list[str], seconds: float = ENTRY_SECONDS) -> tuple[int, str]:
    """Run tests in a copy; give pytest's exit code, and what failed with its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"no end within {seconds:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, "\n".join([*(line for line in lines if line.startswith(("FAILED", "ERROR"))), *lines[-1:]])


def check(entry: Entry, files: list[str]) -> str | None:
    """Break one property; give what is wrong, or None when its tests noticed."""
    path = ROOT / entry.file
    text = path.read_text() if path.is_file() else ""
    if text.count(entry.find) != 1:
        return f"its text stands {text.count(entry.find)} times in {entry.file}: the entry no longer applies"
    with tempfile.TemporaryDirectory(prefix="neuter-") as name:
        folder = Path(name)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
        if CACHE.is_dir():
            (folder / CACHE.name).symlink_to(CACHE.resolve())
        (folder / entry.file).write_text(text.replace(entry.find, entry.replace))
        code, last = run(folder, entry.tests)
    if code in RED:
        return None
    return f"its tests stay green: {last}" if code == 0 else f"its tests did not run (exit {code}): {last}"


def red_already(tests: list[str]) -> tuple[set[str], str | None]:
    """Run all tests as the code stands; give those that fail, by themselves once more, and why none could run."""
    code, last = run(ROOT, ["-n", "2", "--maxfail=20", *tests], PRECHECK_SECONDS)
    failed = [line.split()[1] for line in last.splitlines() if line.startswith("FAILED ")]
    if code != 0 and not 0 < len(failed) < 20:
        return set(), last
    return {test for test in failed if run(ROOT, [test])[0] != 0}, None


def verdict(entry: Entry, files: list[str], failing: set[str]) -> str | None:
    """Say at once how one entry ended; give what is wrong with it."""
    already = [test for test in entry.tests if any(one.startswith(test) for one in failing)]
    wrong = f"its tests fail as the code stands: {already}" if already else check(entry, files)
    word = "RED as it must be" if wrong is None else f"WRONG: {wrong}"
    print(f"{word}  {entry.name}: {entry.property}", flush=True)
    return wrong


def main() -> int:
    """Check all entries, or those named on the command line."""
    wanted = set(sys.argv[1:])
    entries = [entry for entry in load() if not wanted or entry.name in wanted]
    if unknown := wanted - {entry.name for entry in entries}:
        print(f"no entry has the name {', '.join(sorted(unknown))}")
        return 2
    failing, why = red_already(sorted({test for entry in entries for test in entry.tests}))
    if why is not None:
        print(f"the tests must be green before anything is broken: {why}")
        return 1
    files = tracked()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(verdict, entry, files, failing) for entry in entries]
        results = [one.result() for one in asked]
    bad = sum(wrong is not None for wrong in results)
    print(f"{len(entries) - bad} of {len(entries)} properties are guarded by tests that fail without them")
    return 1 if bad or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
