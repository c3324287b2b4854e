"""Choice of the files and tests of `make quick`."""

import subprocess
from pathlib import Path

import pytest

from tests import quick
from tests.quick import ALWAYS, PACKAGES, choose_tests, choose_typed, list_changed

TESTS = ("tests/unit/wire/test_units.py", "tests/unit/node/test_run.py", "tests/contract/test_links.py")
SOURCES = (
    "from wire.units import GIB\n",
    "import node.run\n",
    "from wire.link.endpoint import LinkEndpoint\nfrom tests.support.processes import Pool\n",
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["wire/units.py"], [TESTS[0]]),
        (["node/run.py", "docs/cli.md"], [TESTS[1]]),
        (["wire/link/endpoint.py", "wire/unit.py"], [TESTS[0], TESTS[2]]),
        (["tests/e2e/test_pool.py", "tests/support/processes.py"], ["tests/e2e/test_pool.py", TESTS[2]]),
        (["wire/frames/session.py", "host/files.py"], [TESTS[0]]),
        ([], []),
    ],
)
def test_choose_tests_takes_changed_tests_importing_tests_and_the_folder_of_a_module_without_test(
    changed: list[str], expected: list[str]
) -> None:
    assert choose_tests(changed, TESTS, SOURCES) == sorted({*expected, *ALWAYS})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with two commits."""
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    for command in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
        subprocess.run(["git", "commit", "-qm", name], cwd=tmp_path, check=True)
    return tmp_path


def test_list_changed_compares_a_clean_tree_with_the_commit_before(repository: Path) -> None:
    assert list_changed("") == ["second"]


def test_list_changed_compares_other_trees_with_head_and_lists_new_files(repository: Path) -> None:
    (repository / "first").write_text("changed")
    (repository / "new").write_text("new")
    (repository / "second").unlink()
    assert list_changed("") == ["first", "new"]


def test_list_changed_of_an_unknown_commit_ends_with_the_message_of_git(repository: Path) -> None:
    with pytest.raises(SystemExit, match="nonsense"):
        list_changed("nonsense")


TYPED_TESTS = ("tests/unit/wire/test_units.py", "tests/unit/node/test_run.py")
TYPED_SOURCES = ("from wire.units import GIB\n", "from tests.support.processes import Pool\n")


def test_choose_typed_takes_packages_changed_files_of_tests_and_tests_that_import_a_changed_module() -> None:
    changed = ["wire/units.py", "docs/cli.md", "tests/support/processes.py", "tests/data.json", ALWAYS[0]]
    assert choose_typed(changed, TYPED_TESTS, TYPED_SOURCES) == [
        *PACKAGES,
        *sorted([*TYPED_TESTS, ALWAYS[0], "tests/support/processes.py"]),
    ]


def test_choose_typed_without_changes_takes_the_packages_alone() -> None:
    assert choose_typed([], TYPED_TESTS, TYPED_SOURCES) == list(PACKAGES)


def test_choose_typed_takes_everything_where_the_verified_commit_is_unknown() -> None:
    assert choose_typed(None, TYPED_TESTS, TYPED_SOURCES) == []
