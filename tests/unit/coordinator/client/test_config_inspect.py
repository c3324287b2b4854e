"""Settings of a state folder: those of a start with faults, and those of the running coordinator."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.config_inspect import inspect_settings, read_node_settings, read_running_settings
from tests.support.coordinator.answering_server import Server

NODE: dict[str, Any] = {"faults": [], "error": "", "settings": []}
HOOK = "https://hooks.example/services/SECRET"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[router]\npolicy = 5\n", [("router.policy", 2)]),
        ("[router.upstreams.home]\nurl = 5\n", [("router.upstreams.home", 1)]),
        ("[router.aliases]\ncoder = 5\n", [("router.aliases.coder", 2)]),
        ("router = 5\n", [("router", 1)]),
        ("[nothing]\nx = 1\ny = 2\n", [("nothing.x", 2), ("nothing.y", 3)]),
        ("[router]\npolicy =\n", [("", 2)]),
        ('[alerts]\nwebhook_url = "https://[bad"\n', [("alerts.webhook_url", 2)]),
        ('[alerts]\nwebhook_url = "http://lan.example/SECRET"\n', [("alerts.webhook_url", 2)]),
        ('[alerts]\nwebhook_url = "https://hooks.example/SECRET"\n', []),
    ],
)
def test_faults_are_named_and_every_setting_is_listed(tmp_path: Path, text: str, faults: list[tuple[str, int]]):
    file = tmp_path / "config.toml"
    file.write_text(text)
    report = inspect_settings(tmp_path, file, {}, (), NODE)
    assert [(fault.key, fault.line) for fault in report.faults] == faults
    assert not any("SECRET" in fault.render() for fault in report.faults)
    policy = next(row for row in report.rows if row["key"] == "router.policy")
    assert (policy["value"], policy["origin"]) == ("balanced", "default")


def test_the_fault_of_a_node_is_kept_without_another_one(tmp_path: Path):
    report = inspect_settings(tmp_path, tmp_path / "config.toml", {}, (), NODE | {"error": "memory.cap: too large"})
    assert [fault.render() for fault in report.faults] == [f"{tmp_path / 'config.toml'}: memory.cap: too large"]


def test_a_file_that_cannot_be_read_is_a_fault_with_the_reason(tmp_path: Path):
    (tmp_path / "config.toml").mkdir()
    report = inspect_settings(tmp_path, tmp_path / "config.toml", {}, (), NODE)
    reason = "cannot be read: Is a directory: check the owner and the mode of the file"
    assert [fault.render() for fault in report.faults] == [f"{tmp_path / 'config.toml'}: {reason}"]


def test_the_fault_of_a_node_is_not_repeated_after_those_of_the_file(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[router]\npolicy = 5\n")
    report = inspect_settings(tmp_path, tmp_path / "config.toml", {}, (), NODE | {"error": "the settings are invalid"})
    assert [fault.key for fault in report.faults] == ["router.policy"]


@pytest.mark.parametrize("on_this_machine", [False, True])
def test_a_cap_that_this_machine_cannot_have_is_a_fault_only_of_a_start_here(tmp_path: Path, on_this_machine: bool):
    row = {"key": "memory.cap", "value": "99GiB", "origin": "--set", "description": ""}
    node = NODE | {"unsuitable": "setting memory.cap: larger than the memory of 64 GiB", "settings": [row]}
    report = inspect_settings(tmp_path, tmp_path / "config.toml", {}, (), node, on_this_machine=on_this_machine)
    expected = ["--set: memory.cap: larger than the memory of 64 GiB"] if on_this_machine else []
    assert [fault.render() for fault in report.faults] == expected


def test_the_process_of_the_node_gets_the_given_variables_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf \'{"cap": "%s", "other": "%s", "words": "%s"}\' ')
    with program.open("a") as script:
        script.write('"$MACPOOL_MEMORY__CAP" "$MACPOOL_NODE__NAME$EXTRA" "$*"\n')
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setenv("MACPOOL_MEMORY__CAP", "of this process")
    monkeypatch.setenv("MACPOOL_NODE__NAME", "of this process")
    environ = {"MACPOOL_MEMORY__CAP": "9GiB", "EXTRA": "no setting"}
    found = read_node_settings(tmp_path, tmp_path / "config.toml", environ, ("node.name=a", "memory.cap=1GiB"))
    assert (found["cap"], found["other"]) == ("9GiB", "")
    words = f"-P -m node.inspect.report --settings-only --state {tmp_path} --file {tmp_path / 'config.toml'}"
    assert found["words"] == f"{words} --set node.name=a --set memory.cap=1GiB"


def test_settings_of_the_running_coordinator_are_read_without_secrets(server: Server, tmp_path: Path):
    rows = [
        {"key": "router.policy", "value": "balanced", "origin": "default", "description": ""},
        {"key": "router.max_retries", "value": 3, "origin": "--set", "description": ""},
        {"key": "alerts.webhook_url", "value": HOOK, "origin": "file", "description": ""},
    ]
    server.answer = {"settings": rows}
    state = tmp_path / "state"
    state.mkdir()
    (state / "run.json").write_text(json.dumps({"url": server.options[1], "secret": "mp_x", "pid": os.getpid()}))
    (state / "config.toml").write_text(f'[alerts]\nwebhook_url = "{HOOK}"\n[router]\npolicy = "most_headroom"\n')
    running = read_running_settings(ApiSession(state, None, None, "json"), NODE)
    assert running.roles == ("coordinator",)
    assert [row["value"] for row in running.rows] == ["balanced", 3, "https://hooks.example/…"]
    assert [drift["key"] for drift in running.drifts] == ["router.policy"], "an address is hidden, and not compared"
    assert [row["key"] for row in running.overrides] == ["router.max_retries"]
    elsewhere = ApiSession(state, server.options[1], server.key, "json")
    assert read_running_settings(elsewhere, NODE | {"running": {"settings": [], "drift": []}}).roles == ("node",)


def test_a_coordinator_that_does_not_answer_does_not_run(tmp_path: Path):
    (tmp_path / "run.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "secret": "mp_x"}))
    running = read_running_settings(ApiSession(tmp_path, None, None, "json"), NODE)
    assert (running.roles, running.rows, running.drifts) == ((), (), ())
