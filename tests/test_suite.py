"""`tests.suite` tries a failed test again alone and in its order, and hides nothing.

Tests with the marker `nightly` do not run in CI. Each names the tests that hold its rules there.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from tests.effort import deal_slow_modules, thin_cases
from tests.suite import main

HERE = Path(__file__).parent
MARKER = "pytest.mark.nightly"
MARKED = re.compile(rf"^@{re.escape(MARKER)}\n(?:[@ )].*\n)*(?:async )?def (test_\w+)", re.MULTILINE)
"""A nightly test with its decorators."""
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(test_\w+))?")
TWO_TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.nightly
def test_is_long():
    assert False
"""
MODULE_THAT_KEEPS = """
    kept = []

    def test_keeps():
        kept.extend([place] for place in range(50_000))
"""
MODULE_AFTER_IT = """
    import gc

    def test_is_after_it():
        assert len(gc.get_objects()) < 25_000
"""
FLAKY = """
    from pathlib import Path

    def test_flaky():
        marker = Path(__file__).with_suffix(".marker")
        seen = marker.exists()
        marker.touch()
        assert seen
"""
DEPENDENT = """
    state = []

    def test_first():
        state.append(1)

    def test_second():
        assert not state
"""
WRONG = """
    import pytest

    @pytest.mark.parametrize("number", range({count}))
    def test_wrong(number):
        assert False, "wrong"
"""
RIGHT = """
    def test_right():
        assert True
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load few plugins, because importing all takes longer than these suites."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def _suite(folder: Path, program: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, list[dict[str, object]]]:
    """Run a suite of one file in its order; return the exit code, the output and the recorded failures."""
    (folder / "test_it.py").write_text(dedent(program))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p pytest_randomly\n")
    code = main(["-q", "--randomly-dont-reorganize", "--randomly-seed=7"], folder)
    kept = folder / ".test-report/failures.jsonl"
    return (
        code,
        capfd.readouterr().out,
        [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else [],
    )


def test_a_suite_without_failures_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, kept = _suite(tmp_path, RIGHT, capfd)
    assert (code, kept) == (0, [])
    assert "FAILED at first" not in out
    assert "| test_it.py::test_right |" in (tmp_path / ".test-report/slowest.md").read_text()


def test_a_test_that_passes_alone_and_in_its_order_does_not_fail_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, kept = _suite(tmp_path, FLAKY, capfd)
    assert code == 0
    assert "FAILED at first: test_it.py::test_flaky: it passes alone and in its order" in out
    assert [(one["test"], one["random_seed"]) for one in kept] == [("test_it.py::test_flaky", 7)]
    assert "assert seen" in str(kept[0]["text"])


def test_a_test_that_fails_alone_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, kept = _suite(tmp_path, WRONG.format(count=2), capfd)
    assert code == 1
    assert out.count("it fails alone, too") == 2
    assert len(kept) == 2


def test_a_test_that_depends_on_those_before_it_fails_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, kept = _suite(tmp_path, DEPENDENT, capfd)
    assert code == 1
    assert "test_second: it passes alone and fails after the 1 tests before it" in out
    assert kept[0]["before"] == ["test_it.py::test_first"]


def test_more_than_two_failed_tests_are_not_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    three = "".join(f"\ndef test_wrong_{number}():\n    assert False\n" for number in range(3))
    code, out, kept = _suite(tmp_path, three, capfd)
    assert code == 1
    assert out.count("not tried again") == 3
    assert len(kept) == 3


def test_an_exit_code_that_a_plugin_sets_last_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As for a skip that is not listed, next to a failure that a second try would forgive."""
    plugin = "def pytest_terminal_summary(terminalreporter):\n    terminalreporter._session.exitstatus = 10\n"
    (tmp_path / "conftest.py").write_text(plugin)
    assert _suite(tmp_path, RIGHT, capfd)[0] == 10
    assert _suite(tmp_path, FLAKY, capfd)[0] == 10


def test_a_suite_that_cannot_be_collected_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, kept = _suite(tmp_path, "import nothing_of_this_name", capfd)
    assert code > 1
    assert kept == []


def test_thin_cases_reaches_every_case_within_a_week() -> None:
    cases = list(range(7))
    days = [thin_cases(cases, 3, seed=20261128 + day, is_nightly=False) for day in range(3)]
    assert sorted(case for day in days for case in day) == cases
    kept = [thin_cases(cases, 3, kept=2, seed=20261128 + day, is_nightly=False) for day in range(3)]
    assert [day[:2] for day in kept] == [[0, 1]] * 3
    assert sorted(case for day in kept for case in day[2:]) == cases[2:]
    assert thin_cases(cases, 3, seed=20261128, is_nightly=True) == cases


def test_each_worker_begins_with_whole_slow_modules_and_ends_with_short_tests() -> None:
    limits = {"e2e/a": 240.0, "e2e/b": 600.0, "unit/c": 900.0, "unit/d": 0.0, "unit/e": 0.0}
    tests = [(module, number) for number in range(6) for module in limits]
    dealt = deal_slow_modules(tests, lambda test: Path(test[0]), lambda test: limits[test[0]] * (test[1] == 3), 2)
    assert sorted(dealt) == sorted(tests)
    modules = [[module for module, _ in part] for part in (dealt[:15], dealt[15:])]
    assert modules[0][:12] == ["e2e/b"] * 6 + ["unit/c"] * 6
    assert modules[1][:6] == ["e2e/a"] * 6
    assert {*modules[0][12:], *modules[1][6:]} == {"unit/d", "unit/e"}
    assert [number for module, number in dealt if module == "e2e/b"] == list(range(6)), "the random order of a module"


def test_one_worker_of_four_begins_with_tests_that_compute() -> None:
    modules = ["e2e/a", "e2e/b", "e2e/c", "unit/d"]
    tests = [(module, number) for number in range(4) for module in modules]
    tests += [("unit/e", number) for number in range(24)]
    dealt = deal_slow_modules(tests, lambda test: Path(test[0]), lambda test: 9.0 * (test[0] != "unit/e"), 4)
    assert sorted(dealt) == sorted(tests)
    parts = [[module for module, _ in dealt[begin : begin + 10]] for begin in range(0, 40, 10)]
    assert parts[0][:8] == ["e2e/a"] * 4 + ["unit/d"] * 4
    assert [part[:4] for part in parts[1:3]] == [["e2e/b"] * 4, ["e2e/c"] * 4]
    assert [*parts[0][8:], *parts[1][4:], *parts[2][4:], *parts[3]] == ["unit/e"] * 24


@cache
def list_tests(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the tests of a module by name."""
    return {
        node.name: node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def is_nightly(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).startswith(MARKER) for one in test.decorator_list)


def list_nightly() -> Iterator[str]:
    """Yield the id of each nightly test. Every worker runs this, and the syntax trees would take 0.2 s."""
    for file in sorted(HERE.rglob("test_*.py")):
        text = file.read_text() if file != Path(__file__) else ""
        found = MARKED.findall(text)
        assert len(found) == text.count(MARKER), f"{file}: the marker belongs to single tests, as a decorator"
        yield from (f"tests/{file.relative_to(HERE)}::{name}" for name in found)


NIGHTLY = tuple(list_nightly())


@pytest.mark.parametrize("test", NIGHTLY)
def test_nightly_test_names_tests_that_run_in_ci(test: str):
    path, _, name = test.partition("::")
    named = NAMED.findall(ast.get_docstring(list_tests(HERE.parent / path)[name]) or "")
    assert named, "its docstring names no test"
    for file, name in named:
        tests = list_tests(HERE.parent / file)
        chosen = [tests[name]] if name else list(tests.values())
        assert any(not is_nightly(one) for one in chosen), f"{file}::{name}"


def test_no_guard_and_no_guarantee_names_a_nightly_test():
    places = [*HERE.rglob("guards/*.toml"), *(HERE / "guarantees").glob("*.md")]
    assert [(place.name, test) for place in places for test in NIGHTLY if test in place.read_text()] == []


@pytest.mark.parametrize(("workers", "nightly"), [(("-n", "1"), False), ((), True)], ids=["ci", "nightly"])
def test_nightly_tests_are_deselected_and_counted_except_in_the_nightly_run(
    tmp_path: Path, workers: tuple[str, ...], nightly: bool
):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(HERE / "conftest.py", tests)
    (tests / "test_it.py").write_text(TWO_TESTS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST_", "MACPOOL_"))}
    known = kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({"MACPOOL_NIGHTLY": "1"} if nightly else {})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *workers, "tests"]
    done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True)
    assert done.returncode == int(nightly), done.stdout + done.stderr
    assert ("nightly tests that did not run: 1 (`make nightly`" in done.stdout) is not nightly


def test_objects_that_a_module_leaves_are_not_collected_in_later_modules(tmp_path: Path):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(HERE / "conftest.py", tests)
    (tests / "test_1.py").write_text(dedent(MODULE_THAT_KEEPS))
    (tests / "test_2.py").write_text(dedent(MODULE_AFTER_IT))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST_", "MACPOOL_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "tests"]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
