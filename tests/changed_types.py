"""`make changed-types`: check the types of the packages, and of the tests that may have other types than verified ones.

The check of all tests takes as much CPU time as that of the packages, a twentieth of the whole of `make test`. Hence
`make test` checks only tests that differ from the commit in `tests/neuter/verified`, or import a module that does.
`make types` and `make nightly` check all of them.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import quick
from tests.neuter.changes import VERIFIED, git

PACKAGES = ("coordinator", "host", "node", "router", "simulation", "wire", "dashboards", "deploy", "docs")


def choose_paths(
    changed: Sequence[str] | None, tests: Sequence[str], sources: Sequence[str] | None = None
) -> list[str]:
    """Return the paths to check: the packages, the changed Python files of the tests, and tests that import a changed
    module.

    `changed` has the paths that differ from the verified commit; None if they are unknown: everything is checked.
    `sources` has the texts of `tests`; None: they are read from the repository.
    """
    if changed is None:
        return []
    importing = {*quick.choose_tests(changed, tests, sources)} - {*quick.ALWAYS}
    own = {name for name in changed if name.startswith("tests/") and name.endswith(".py")}
    return [*PACKAGES, *sorted(importing | own)]


def main() -> int:
    """Run the check; return its exit code."""
    commit = VERIFIED.read_text().split()[0]
    known = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is not None
    tests = sorted(path.relative_to(quick.ROOT).as_posix() for path in (quick.ROOT / "tests").rglob("test_*.py"))
    paths = choose_paths(quick.list_changed(commit) if known else None, tests)
    checker = Path(sys.executable).with_name("basedpyright")
    return subprocess.run([checker, "--level", "error", *paths], cwd=quick.ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
