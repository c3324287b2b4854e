"""`make quick`: check the differences from a commit, in less than a minute. `make test` checks everything.

Compared with HEAD, or with the commit before it if the working tree is clean; another commit: `python -m tests.quick
main`. Checked are the format and the import rules of the repository, and of the changed files the style and the types.
Tests that run: changed test modules, the unit and contract tests that import a changed module, and those of the
structure. Tests marked `slow` or `hosts` do not run.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = ("coordinator", "host", "node", "router", "simulation", "tests/support", "wire")
"""Folders whose modules tests import."""
TESTS = ("tests/unit", "tests/contract")
"""Folders whose tests run if they import a changed module."""
ALWAYS = ("tests/test_architecture.py", "tests/test_structure.py", "tests/contract/test_conventions.py")
STYLED = (".py", ".md", ".js", ".html")


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


def choose_tests(changed: Iterable[str], tests: Iterable[str], sources: Sequence[str] | None = None) -> list[str]:
    """Return the test modules for changed paths: changed ones, and those of `tests` that import a changed module.

    `sources` has the texts of `tests`; None: they are read from the repository.
    """
    paths = list(tests)
    if sources is None:
        sources = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in changed
        if name.endswith(".py") and name.startswith(IMPORTED)
    ]
    chosen = {name for name in changed if name.startswith("tests/") and Path(name).match("test_*.py")}
    for path, source in zip(paths, sources, strict=True):
        if any(f"from {module} import" in source or f"import {module}\n" in source for module in modules):
            chosen.add(path)
    return sorted({*chosen, *ALWAYS})


def main(arguments: list[str]) -> int:
    """Run the checks, and the types and tests at the same time; return 1 if one fails."""
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
