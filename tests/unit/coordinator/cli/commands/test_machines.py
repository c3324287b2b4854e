"""Folder in which `cluster video install` installs the environment of videos."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli import cluster


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that are run in place of the installation."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        found.append(command)
        failed = len(found) > 1
        answer = json.dumps({"schema": 1, "engine": "1.2"})
        return subprocess.CompletedProcess(command, int(failed), "" if failed else answer, "error: no room\n")

    monkeypatch.setattr(subprocess, "run", run)
    return found


@pytest.mark.parametrize(
    ("file", "variable", "folder"),
    [
        ("", None, "STATE/node/video/environments"),
        ('[worker]\nenvironments = "/disk/a"\n', None, "/disk/a"),
        ('[worker]\nenvironments = "/disk/a"\n', "/disk/b", "/disk/b"),
    ],
)
def test_the_environment_is_installed_where_the_node_finds_it(
    tmp_path: Path, commands: list[list[str]], file: str, variable: str | None, folder: str
):
    (tmp_path / "config.toml").write_text(file)
    line = ["video", "install", "--state", str(tmp_path), "--wheelhouse", str(tmp_path)]
    runner = CliRunner(env={"MACPOOL_WORKER__ENVIRONMENTS": variable})
    assert runner.invoke(cluster, line).stdout == "the video engine 1.2 is installed\n"
    (command,) = commands
    expected = folder.replace("STATE", str(tmp_path))
    assert command[3:] == ["node.video.environment", "--folder", expected, "--wheelhouse", str(tmp_path)]
    failed = runner.invoke(cluster, line)
    assert (failed.exit_code, failed.stderr) == (1, "Error: no room\n")


def test_a_settings_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path, commands: list[list[str]]):
    (tmp_path / "config.toml").write_text("[worker\n")
    done = CliRunner().invoke(cluster, ["video", "install", "--state", str(tmp_path)])
    assert (done.exit_code, "config.toml: " in done.stderr) == (2, True)
    assert commands == []
