"""Select the guards that may have a different result than at the verified commit."""

import ast
import subprocess
import tomllib
from pathlib import Path

from tests.neuter.guards import ROOT, Guard, load

VERIFIED = ROOT / "tests/neuter/verified"
"""Commit and date of the last state of the repository in which all guards were right. A run that leaves no guard out
writes the file: a run of all guards, or of all that changed since the commit before."""


def git(*arguments: str, folder: Path = ROOT) -> str | None:
    """Return git's output, or None where it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def select_changed(guards: list[Guard], folder: Path = ROOT, verified: Path = VERIFIED) -> list[Guard]:
    """Return the guards that may have another result than at the verified commit; all where that commit is unknown.

    These guards are new or changed, or the code of the file that they change, or of a test file, is another one.
    Comments, docstrings and line breaks of Python files are no code.
    """
    commit = verified.read_text().split()[0] if verified.is_file() else ""
    listing = git("diff", "--name-only", commit, folder=folder) if commit else None
    if listing is None:
        return guards
    untracked = git("ls-files", "--others", "--exclude-standard", folder=folder) or ""
    files = {file for file in (*listing.splitlines(), *untracked.splitlines()) if _has_other_code(file, commit, folder)}
    known, listed = list[Guard](), list[Guard]()
    for file in (file for file in files if "/guards/" in file and file.endswith(".toml")):
        former = git("show", f"{commit}:{file}", folder=folder)
        known += [Guard(**guard) for guard in tomllib.loads(former or "guard = []")["guard"]]
        listed += load(folder, file) if (folder / file).is_file() else []
    return [
        guard
        for guard in guards
        if files & {guard.path(folder), *guard.test_files()} or (guard in listed and guard not in known)
    ]


def _has_other_code(file: str, commit: str, folder: Path) -> bool:
    """Return whether the code of a file differs from that at a commit. Every file that is not Python differs."""
    former = git("show", f"{commit}:{file}", folder=folder) if file.endswith(".py") else None
    if former is None or not (folder / file).is_file():
        return True
    return _code(former) != _code((folder / file).read_text())


def _code(text: str) -> str:
    """Return the syntax tree of a module without its docstrings, as text."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a string alone, as docstrings are."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
