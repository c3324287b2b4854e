"""Output and exit codes of `cluster config`, with a fixed report of the node's settings."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.cli.commands import config as config_commands
from coordinator.client import config_inspect
from coordinator.client.errors import NOT_FOUND, UNREACHABLE

NODE: dict[str, Any] = {
    "faults": [],
    "unsuitable": "",
    "error": "",
    "settings": [{"key": "node.models", "value": ["/a", "/b"], "origin": "default", "description": ""}],
}


@pytest.fixture(autouse=True)
def node_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a fixed report in place of that of a child process, and hide the settings of this environment."""
    for module in (config_inspect, config_commands):
        monkeypatch.setattr(module, "read_node_settings", lambda *_: NODE)
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MACPOOL_ROUTER__QUEUE_LIMIT", "1")


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cluster, ["config", *words, "--state", str(folder)])


def test_settings_are_shown_with_their_origins_and_those_that_changed_alone(tmp_path: Path):
    (tmp_path / "config.toml").write_text('[router]\npolicy = "most_headroom"\n')
    words = ("show", "--set", "cluster.name=lab", "-o", "json")
    everything = json.loads(run(tmp_path, *words).stdout)
    changed = json.loads(run(tmp_path, *words, "--changed").stdout)
    rows = {row["key"]: (row["value"], row["origin"]) for row in changed["settings"]}
    assert (changed["schema"], changed["wrong"]) == (1, [])
    assert rows == {
        "router.policy": ("most_headroom", str(tmp_path / "config.toml")),
        "router.queue_limit": (1, "environment"),
        "cluster.name": ("lab", "--set"),
    }
    assert [row for row in everything["settings"] if row["origin"] != "default"] == changed["settings"]
    assert everything["settings"][-1] == NODE["settings"][0]


@pytest.mark.parametrize(
    ("prefix", "line"),
    [
        ("http.anonymous", "http.anonymous  false  default"),
        ("alerts.webhook_url", 'alerts.webhook_url  ""     default'),
        ("node.", 'node.models  ["/a", "/b"]  default'),
    ],
)
def test_a_prefix_selects_settings_and_values_are_those_of_the_file(tmp_path: Path, prefix: str, line: str):
    done = run(tmp_path, "show", prefix)
    assert done.exit_code == 0
    assert [" ".join(row.split()) for row in done.stdout.splitlines()] == ["KEY VALUE ORIGIN", " ".join(line.split())]


def test_a_text_within_a_name_is_no_prefix(tmp_path: Path):
    shown = json.loads(run(tmp_path, "show", "c", "-o", "json").stdout)["settings"]
    assert {row["key"].partition(".")[0] for row in shown} == {"cache", "cluster"}
    done = run(tmp_path, "show", "policy")
    assert (done.exit_code, "there is no setting policy" in done.stderr) == (NOT_FOUND, True)


@pytest.mark.parametrize("verb", ["show", "check"])
def test_every_fault_is_named_and_fails_the_command(tmp_path: Path, verb: str):
    file = tmp_path / "config.toml"
    file.write_text("[router]\npolicy = 5\n[nothing]\nx = 1\n")
    done = run(tmp_path, verb)
    assert done.exit_code == 2
    for words in (f"{file}:2: router.policy", f"{file}:4: nothing.x"):
        assert words in done.stderr
    wrong = json.loads(run(tmp_path, verb, "-o", "json").stdout)["wrong"]
    assert [(fault["key"], fault["line"]) for fault in wrong] == [("router.policy", 2), ("nothing.x", 4)]


def test_only_the_default_file_is_checked_with_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "other.toml"
    file.write_text("[router]\nqueue_limit = 2\n")
    done = run(tmp_path, "check")
    assert done.stdout.splitlines() == [
        f"there is no {tmp_path / 'config.toml'}: every setting has its default",
        f"{tmp_path / 'config.toml'}: valid; settings that are not the default: 1",
    ]
    monkeypatch.setenv("MACPOOL_ROUTER__QUEUE_LIMIT", "many")
    done = run(tmp_path, "check")
    assert (done.exit_code, "environment: router.queue_limit" in done.stderr) == (2, True)
    done = run(tmp_path, "check", str(file))
    assert (done.exit_code, done.stdout) == (0, f"{file}: valid; settings that are not the default: 1\n")
    done = run(tmp_path, "check", str(tmp_path / "nothing.toml"))
    assert (done.exit_code, "there is no file" in done.stderr) == (NOT_FOUND, True)


def test_running_settings_are_those_of_a_process(tmp_path: Path):
    done = run(tmp_path, "show", "--running")
    assert (done.exit_code, f"neither a coordinator nor a node runs in {tmp_path}" in done.stderr) == (
        UNREACHABLE,
        True,
    )
    done = run(tmp_path, "show", "--running", "--set", "cluster.name=lab")
    assert (done.exit_code, "--running and --set exclude each other" in done.stderr) == (2, True)
