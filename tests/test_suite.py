"""`tests.suite` tries a failed test again alone and in its order, and hides nothing."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.effort import thin_cases
from tests.suite import main

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
