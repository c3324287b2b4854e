"""`make quick`: check the differences from a commit, in less than a minute. `make test` checks everything.

Compared with HEAD, or with the commit before it if the working tree is clean; another commit: `python -m tests.quick
main`. Checked are the format and the import rules of the repository, and of the changed files the style and the types.
Tests that run: changed test modules, the unit and contract tests that import a changed module, and those in `ALWAYS`.
For a changed module without a test module of its name, the tests of its folder run as well. Tests marked `slow` or
`hosts` do not run.

With `--types`, check only the types of the packages, and of tests that differ from the commit in
`tests/neuter/verified` or import a module that does. The check of all tests takes as much CPU time as that of the
packages, a twentieth of the whole of `make test`. `make types` and `make nightly` check all of them.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.neuter.changes import VERIFIED, git

ROOT = Path(__file__).parents[1]
IMPORTED = ("coordinator", "dashboards", "deploy", "host", "node", "router", "simulation", "tests/support", "wire")
"""Folders whose modules tests import."""
TESTS = ("tests/unit", "tests/contract")
"""Folders whose tests run if they import a changed module."""
ALWAYS = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
    "tests/test_routes.py",
    "tests/test_structure.py",
    "tests/contract/test_conventions.py",
    "tests/neuter/test_guards.py::test_every_guard_changes_its_module",
    "tests/neuter/test_guards.py::test_every_guard_names_tests_that_exist",
)
STYLED = (".py", ".md", ".js", ".html")
PACKAGES = ("coordinator", "host", "node", "router", "simulation", "wire", "dashboards", "deploy", "docs")
"""Folders whose types are always checked."""


def list_changed(base: str) -> list[str]:
    """Return the paths that differ from the commit `base` and exist, those that git does not know included."""
    if base == "":
        base = "HEAD" if _run_git("status", "--porcelain") else "HEAD~1"
    names = {*_run_git("diff", "--name-only", base), *_run_git("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if (ROOT / name).is_file())


def _run_git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip() or f"git {' '.join(words)} failed")
    return done.stdout.splitlines()


def choose_tests(changed: Sequence[str], tests: Sequence[str], sources: Sequence[str] | None = None) -> list[str]:
    """Return the test modules for changed paths: those of `choose_importing`, `ALWAYS`, and whole folders.

    For a changed module without a test module of its name, all tests in the folder of its tests are chosen.
    `sources` has the texts of `tests`; None: they are read from the repository.
    """
    folders = {folder for name in changed if name.endswith(".py") and (folder := find_test_folder(name, tests))}
    in_folders = {path for path in tests if path.rpartition("/")[0] in folders}
    return sorted({*choose_importing(changed, tests, sources), *in_folders, *ALWAYS})


def find_test_folder(name: str, tests: Iterable[str]) -> str:
    """Return the nearest folder of unit tests for a module; empty if a test module has its name, or without folder."""
    module = Path(name)
    if not name.startswith(IMPORTED) or f"tests/unit/{module.with_name('test_' + module.name)}" in tests:
        return ""
    known = {path.rpartition("/")[0] for path in tests}
    above = (f"tests/unit/{folder}" for folder in module.parents if folder.name)
    return next((folder for folder in above if folder in known), "")


def choose_importing(changed: Iterable[str], tests: Sequence[str], sources: Sequence[str] | None = None) -> set[str]:
    """Return the changed test modules, and those of `tests` that import a changed module.

    `sources` has the texts of `tests`; None: they are read from the repository.
    """
    if sources is None:
        sources = [(ROOT / path).read_text(encoding="utf-8") for path in tests]
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in changed
        if name.endswith(".py") and name.startswith(IMPORTED)
    ]
    chosen = {name for name in changed if name.startswith("tests/") and Path(name).match("test_*.py")}
    for path, source in zip(tests, sources, strict=True):
        if any(f"from {module} import" in source or f"import {module}\n" in source for module in modules):
            chosen.add(path)
    return chosen


def choose_typed(
    changed: Sequence[str] | None, tests: Sequence[str], sources: Sequence[str] | None = None
) -> list[str]:
    """Return the paths to check: the packages, the changed Python files of the tests, and tests that import a changed
    module.

    `changed` has the paths that differ from the verified commit; None if they are unknown. The result is then an empty
    list, which stands for everything.
    `sources` has the texts of `tests`; None: they are read from the repository.
    """
    if changed is None:
        return []
    importing = choose_importing(changed, tests, sources) - {*ALWAYS}
    own = {name for name in changed if name.startswith("tests/") and name.endswith(".py")}
    return [*PACKAGES, *sorted(importing | own)]


def check_types() -> int:
    """Check the types of the packages and of tests that may have other types than verified ones. Return the exit
    code of the check."""
    commit = VERIFIED.read_text().split()[0]
    known = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is not None
    tests = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    paths = choose_typed(list_changed(commit) if known else None, tests)
    checker = Path(sys.executable).with_name("basedpyright")
    return subprocess.run([checker, "--level", "error", *paths], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    """Run the checks, and the types and tests at the same time; return 1 if one fails."""
    if arguments == ["--types"]:
        return check_types()
    changed = list_changed(arguments[0] if arguments else "")
    modules = [name for name in changed if name.endswith(".py")]
    styled = [name for name in changed if name.endswith(STYLED)]
    candidates = sorted(path.relative_to(ROOT).as_posix() for top in TESTS for path in (ROOT / top).rglob("test_*.py"))
    tests = choose_tests(changed, candidates)
    print(f"{len(changed)} changed files, {len(tests)} test modules", flush=True)
    python = Path(sys.executable)
    first = [
        [python.with_name("ruff"), "format", "--check", "--quiet", "."],
        [python.with_name("ruff"), "check", "--quiet", "."],
        [python.with_name("lint-imports"), "--no-cache"],
        *([[python, "-m", "docs.style_check", *styled]] if styled else []),
    ]
    for command in first:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr)
            return 1
    checker = [python.with_name("basedpyright"), "--level", "error", *modules]
    types = subprocess.Popen(checker, cwd=ROOT) if modules else None
    suite = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not hosts and not slow", *tests]
    code = subprocess.run(suite, cwd=ROOT, check=False).returncode
    wrong_types = types is not None and types.wait() != 0
    return 1 if code or wrong_types else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
