"""Copies of the repository in which tests run against changed files, one for each worker."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.neuter.guards import ROOT
from tests.neuter.warm import TIMED_OUT

CACHE = ROOT / ".cache"
"""Files that tests make once. A copy of the repository reuses them."""
OLDEST = 1_000_000_000
"""A time before any file was written, given to the files of a copy. Python compares times in whole seconds to find
stale compiled code; a changed file therefore needs a different time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run of tests."""

    code: int
    """pytest's exit code, or TIMED_OUT."""
    took: float
    """Seconds, including the start."""
    seconds: dict[str, float]
    """Seconds of each test that ran."""
    failed: list[str] = field(default_factory=list[str])
    last: str = ""
    """The last lines of the output."""

    @property
    def timed_out(self) -> bool:
        """Return whether the limit ended the run."""
        return self.code == TIMED_OUT


def tracked(root: Path = ROOT) -> list[str]:
    """List the files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listing.stdout.splitlines() if (root / name).is_file()]


class Copy:
    """A copy of the repository in a folder, with a process that runs tests in it."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self._changes = 0
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        if CACHE.is_dir():
            (folder / CACHE.name).symlink_to(CACHE.resolve())
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.neuter.warm"],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: list[str], limit: float, stop: bool = True) -> Outcome:
        """Run tests; end them after `limit` seconds. With `stop`, the first failure ends the run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"tests": tests, "limit": limit, "stop": stop}) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def run_changed(self, file: str, text: str, tests: list[str], limit: float) -> Outcome:
        """Run tests with a changed text of one file, and restore the text."""
        path = self.folder / file
        original, times = path.read_bytes(), path.stat()
        self._changes += 1
        path.write_text(text)
        time = OLDEST + self._changes
        os.utime(path, (time, time))
        try:
            return self.run(tests, limit)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def close(self) -> None:
        """End the process and its tests."""
        self._process.terminate()
        self._process.communicate()
