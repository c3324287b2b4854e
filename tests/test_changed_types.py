"""Choice of the files whose types `make test` checks."""

from tests.changed_types import PACKAGES, choose_paths
from tests.quick import ALWAYS

TESTS = ("tests/unit/wire/test_units.py", "tests/unit/node/test_run.py")
SOURCES = ("from wire.units import GIB\n", "from tests.support.processes import Pool\n")


def test_choose_paths_takes_packages_changed_files_of_tests_and_tests_that_import_a_changed_module() -> None:
    changed = ["wire/units.py", "docs/cli.md", "tests/support/processes.py", "tests/data.json", ALWAYS[0]]
    assert choose_paths(changed, TESTS, SOURCES) == [
        *PACKAGES,
        *sorted([*TESTS, ALWAYS[0], "tests/support/processes.py"]),
    ]


def test_choose_paths_without_changes_takes_the_packages_alone() -> None:
    assert choose_paths([], TESTS, SOURCES) == list(PACKAGES)


def test_choose_paths_takes_everything_where_the_verified_commit_is_unknown() -> None:
    assert choose_paths(None, TESTS, SOURCES) == []
