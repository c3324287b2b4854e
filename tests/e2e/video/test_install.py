"""`cluster video install` as a user runs it: with an existing environment, and from a folder that lacks a package."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import CLI, environment
from tests.support.video.studio import environments

pytestmark = pytest.mark.slow


def install(*words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "video", "install", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**extra), timeout=300)


@pytest.mark.timeout(400)
def test_what_is_installed_is_not_installed_again(tmp_path: Path):
    where = environments()
    (tmp_path / "config.toml").write_text(f'worker.environments = "{where}"\n')
    before = sorted(where.iterdir())
    done = install("--state", tmp_path, "-o", "json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["engine"] == "0.18.14"
    assert Path(said["environment"]).parent == where
    assert sorted(where.iterdir()) == before
    done = install("--state", tmp_path / "other", MACPOOL_WORKER__ENVIRONMENTS=str(where))
    assert (done.returncode, done.stdout) == (0, "the video engine 0.18.14 is installed\n")


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_wheelhouse_is_the_only_source_and_nothing_is_left_when_it_lacks_something(tmp_path: Path):
    """CI has this test:

    - `tests/unit/node/video/test_environment.py::test_a_failed_build_leaves_nothing_and_its_error_has_the_last_output`
    """
    (tmp_path / "wheels").mkdir()
    done = install("--state", tmp_path / "state", "--wheelhouse", tmp_path / "wheels")
    assert done.returncode == 1
    assert "the packages could not be installed" in done.stderr
    assert list((tmp_path / "state" / "node" / "video" / "environments").iterdir()) == []
