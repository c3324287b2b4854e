"""Guards: one property each, a change that breaks it, and the tests that must fail then.

The guards of a module are in the folder `guards/` next to the unit tests of its package, in a file with the module's
name:

    [[guard]]
    name = "suspects-are-not-placed"          # unique
    property = "A request goes to a ready node only."
    at = "router.placement.feasibility.unavailable_reason"        # module, class or function that is changed
    node = 'node.state != "ready"'            # a snippet that stands there once: see tests/neuter/syntax.py
    becomes = "False"                         # what replaces it; "" removes statements
    tests = ["tests/unit/router/placement/test_place.py::test_excluded_candidate_has_a_reason"]

A file that is not Python is changed by text: `file`, `find` and `replace` take the place of `at`, `node` and `becomes`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.neuter.syntax import NotApplicable, replaced

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One property and how to break it."""

    name: str
    property: str
    tests: list[str]
    at: str = ""
    node: str = ""
    becomes: str = ""
    file: str = ""
    find: str = ""
    replace: str = ""

    def path(self, root: Path = ROOT) -> str:
        """Return the path of the file that this guard changes, relative to the root."""
        return self.file or module_file(self.at, root)[0]

    def test_files(self) -> list[str]:
        """Return the test files, each once, in order."""
        return list(dict.fromkeys(test.partition("::")[0] for test in self.tests))

    def broken(self, root: Path = ROOT) -> str:
        """Return the changed source of the file; raise NotApplicable where the guard no longer applies."""
        if not self.file:
            name, path = module_file(self.at, root)
            return replaced((root / name).read_text(), path, self.node, self.becomes)
        text = (root / self.file).read_text()
        if text.count(self.find) != 1:
            raise NotApplicable(f"its text was found {text.count(self.find)} times in {self.file}: correct `find`")
        return text.replace(self.find, self.replace)


def module_file(at: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """Return the file of a qualified name, relative to the root, and the names of classes and functions below it."""
    names = at.split(".")
    for length in range(len(names), 0, -1):
        stem = "/".join(names[:length])
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if (root / name).is_file():
                return name, names[length:]
    raise NotApplicable(f"no module has the name {at}: correct `at`")


def load(root: Path = ROOT, files: str = "tests/**/guards/*.toml") -> list[Guard]:
    """Read the guards of all files that match a pattern."""
    guards = [Guard(**guard) for path in sorted(root.glob(files)) for guard in tomllib.loads(path.read_text())["guard"]]
    names = [guard.name for guard in guards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several guards have the name {', '.join(sorted(twice))}: rename them")
    return guards
