"""Settings of a state folder: those of a start with faults, and those of the running coordinator."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.config_inspect import inspect_settings, read_running_settings
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
    ],
)
def test_faults_are_named_and_every_setting_is_listed(tmp_path: Path, text: str, faults: list[tuple[str, int]]):
    file = tmp_path / "config.toml"
    file.write_text(text)
    report = inspect_settings(tmp_path, file, {}, (), NODE)
    assert [(fault.key, fault.line) for fault in report.faults] == faults
    policy = next(row for row in report.rows if row["key"] == "router.policy")
    assert (policy["value"], policy["origin"]) == ("balanced", "default")


def test_the_fault_of_a_node_is_kept_without_another_one(tmp_path: Path):
    report = inspect_settings(tmp_path, tmp_path / "config.toml", {}, (), NODE | {"error": "memory.cap: too large"})
    assert [fault.render() for fault in report.faults] == [f"{tmp_path / 'config.toml'}: memory.cap: too large"]


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
