import tomllib
from pathlib import Path

import pytest

from tests.neuter.changes import git, select_changed
from tests.neuter.guards import Guard, load

CODE = """\
def twice(number):
    \"\"\"Return a number twice.\"\"\"
    return 2 * number
"""
TEST = "from part import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
GUARD = """\
[[guard]]
name = "twice"
property = "A number is doubled."
at = "part.twice"
node = "2"
becomes = "3"
tests = ["tests/test_part.py"]
"""
GUARDS = "tests/guards/part.toml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a repository with one guard, whose only commit is verified."""
    for file, text in {"part.py": CODE, "other.py": CODE, "tests/test_part.py": TEST, GUARDS: GUARD}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    commit = ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "-m", "a"]
    for command in (["init", "-q"], ["add", "."], commit):
        assert git(*command, folder=tmp_path) is not None
    (tmp_path / "verified").write_text(f"{git('rev-parse', 'HEAD', folder=tmp_path)} 2026-11-26\n")
    return tmp_path


def names(folder: Path) -> list[str]:
    guards = load(folder)
    return [guard.name for guard in select_changed(guards, folder, folder / "verified")]


def test_no_guard_is_selected_without_a_change(folder: Path):
    assert names(folder) == []


@pytest.mark.parametrize(
    ("file", "find", "replace", "selected"),
    [
        ("part.py", "2 * number", "number * 2", ["twice"]),
        ("part.py", "a number twice", "the double of a number", []),
        ("part.py", "    return 2 * number", "    # the double\n    return (2 *\n            number)", []),
        ("tests/test_part.py", "twice(2) == 4", "twice(3) == 6", ["twice"]),
        ("other.py", "2 * number", "number * 2", []),
        (GUARDS, 'becomes = "3"', 'becomes = "4"', ["twice"]),
    ],
    ids=["code", "docstring", "layout", "test", "another file", "guard"],
)
def test_a_guard_is_selected_if_it_or_its_code_changed(
    folder: Path, file: str, find: str, replace: str, selected: list[str]
):
    text = (folder / file).read_text()
    assert text.count(find) == 1
    (folder / file).write_text(text.replace(find, replace))
    assert names(folder) == selected


def test_a_new_guard_is_selected_in_a_known_and_in_a_new_file(folder: Path):
    (folder / GUARDS).write_text(GUARD + GUARD.replace('"twice"', '"again"'))
    (folder / "tests/guards/other.toml").write_text(GUARD.replace('"twice"', '"other"').replace("part.", "other."))
    assert names(folder) == ["other", "again"]


def test_all_guards_are_selected_without_a_known_commit(folder: Path):
    guards = [Guard(**one) for one in tomllib.loads(GUARD)["guard"]]
    (folder / "verified").write_text("0000000000000000000000000000000000000000 2026-11-26\n")
    assert select_changed(guards, folder, folder / "verified") == guards
    assert select_changed(guards, folder, folder / "missing") == guards
