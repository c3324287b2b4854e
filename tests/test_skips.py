"""The rule of conftest.py: with CI set, a skip with an unlisted reason fails the run, for any way of running it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SKIPPING = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("needs a moon")
"""
WHOLE_FILE = """
import pytest

pytest.skip("needs a moon", allow_module_level=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project with our conftest and one file that skips."""
    tests = tmp_path / "tests"
    (tests / "support").mkdir(parents=True)
    shutil.copy(HERE / "conftest.py", tests)
    for name in ("__init__.py", "processes.py"):
        shutil.copy(HERE / "support" / name, tests / "support")
    (tests / "skips.txt").write_text("# reasons\nneeds a comet\n")
    (tests / "test_it.py").write_text(SKIPPING)
    return tmp_path


def run(project: Path, *arguments: str, ci: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST_"))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing all plugins takes longer than these runs
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments, "tests"]
    return subprocess.run(
        command, cwd=project, env=environment | ({"CI": "true"} if ci else {}), capture_output=True, text=True
    )


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "two workers"])
@pytest.mark.parametrize("text", [SKIPPING, WHOLE_FILE], ids=["a test", "a whole file"])
def test_a_skip_that_is_not_listed_fails_the_run(project: Path, workers: tuple[str, ...], text: str):
    (project / "tests" / "test_it.py").write_text(text)
    (project / "tests" / "test_more.py").write_text("def test_runs():\n    pass\n")
    done = run(project, *workers)
    assert done.returncode == 10, done.stdout + done.stderr
    assert "UNLISTED SKIP" in done.stdout
    assert "needs a moon" in done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "two workers"])
def test_a_listed_skip_does_not(project: Path, workers: tuple[str, ...]):
    (project / "tests" / "skips.txt").write_text("# reasons\nneeds a moon\n")
    done = run(project, *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UNLISTED" not in done.stdout


def test_without_ci_a_skip_is_only_printed(project: Path):
    done = run(project, "-ra", ci=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a moon" in done.stdout


def test_a_failure_stays_a_failure(project: Path):
    (project / "tests" / "test_it.py").write_text("def test_fails():\n    assert False\n")
    assert run(project).returncode == 1
