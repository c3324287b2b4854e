"""Output and exit codes of `cluster pull`, against a server with the answers of a coordinator."""

import json
from typing import Any

import pytest

from coordinator.cli.commands import pulls
from coordinator.cli.commands.pulls import PullProgressLines, describe_node, format_seconds
from coordinator.client.errors import REFUSED
from tests.support.coordinator.answering_server import Server
from wire.units import GIB, MIB

PLAN = {
    "schema": 1,
    "repo": "a/b",
    "commit": "c" * 40,
    "size": 4,
    "files": 1,
    "skipped": {"files": 0, "size": 0},
    "model": {"quantization": "", "context": 4096},
    "nodes": [],
}
"""Plan of a pull, as the coordinator answers."""


def place(name: str, state: str, message: str = "") -> dict[str, Any]:
    return {"id": name, "name": name, "state": state, "message": message, "fetched": 0, "linked": True, "total": 0}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_pull_that_a_node_does_not_complete_fails_and_names_the_node(server: Server, state: str):
    nodes = [place("studio", "completed"), place("mini", state, "stopped there")]
    server.answer = {**PLAN, "pull": {"id": "p-1", "repo": "a/b", "state": state, "nodes": nodes}}
    done = server.run("pull", "a/b", "--all")
    assert done.exit_code == REFUSED
    assert "a/b is not on mini: see the messages above" in done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "studio: completed, already had the files",
        f"mini: {state}: stopped there",
    ]


def test_a_pull_that_every_node_completes_succeeds(server: Server):
    nodes = [place("studio", "completed"), place("mini", "completed")]
    server.answer = {**PLAN, "pull": {"id": "p-1", "repo": "a/b", "state": "completed", "nodes": nodes}}
    done = server.run("pull", "a/b")
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_wait_asks_until_the_pull_has_ended(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "POLL_INTERVAL_SECONDS", 0.001)

    def answer() -> None:
        state = "completed" if len(server.asked) == 3 else "pulling"
        server.answer = {"pull": {"id": "p/1", "repo": "a/b", "state": state, "nodes": [place("mini", state)]}}

    server.on_request = answer
    done = server.run("pulls", "wait", "p/1")
    assert (done.exit_code, done.stdout) == (0, "mini: completed, already had the files\n")
    assert server.asked == [("/api/v1/pulls/p%2F1", None)] * 3


def test_a_wait_prints_only_json_with_that_output(server: Server):
    nodes = [place("mini", "failed", "full")]
    server.answer = {"pull": {"id": "p-1", "repo": "a/b", "state": "failed", "nodes": nodes}}
    done = server.run("pulls", "wait", "p-1", "-o", "json")
    assert done.exit_code == REFUSED
    assert json.loads(done.stdout)["pull"]["nodes"] == nodes
    assert "mini: failed" not in done.stderr


PULLING = {"done": GIB, "total": 4 * GIB, "speed": 2.0 * MIB, "seconds_left": 90.0, "source": "hub"}


@pytest.mark.parametrize(
    ("state", "changes", "text"),
    [
        ("completed", {}, "completed, already had the files"),
        ("completed", {"fetched": GIB}, "completed, 1.0 GiB received"),
        ("waiting", {}, "waiting for a source"),
        ("waiting", {"message": "no room"}, "waiting for a source (no room)"),
        ("waiting", {"linked": False}, "waits until the node is back"),
        ("waiting", {"linked": False, "message": "it sleeps"}, "waits until the node is back (it sleeps)"),
        ("pulling", {}, "starts"),
        ("pulling", PULLING, "1.0 GiB of 4.0 GiB (25%) from the hub, 2.0 MiB/s, 90 s left"),
        ("pulling", PULLING | {"source": "mirror"}, "1.0 GiB of 4.0 GiB (25%) from another node, 2.0 MiB/s, 90 s left"),
        ("pulling", PULLING | {"seconds_left": None}, "1.0 GiB of 4.0 GiB (25%) from the hub, 2.0 MiB/s"),
        ("failed", {}, "failed"),
        ("failed", {"message": "full"}, "failed: full"),
    ],
)
def test_a_pull_on_a_node_is_one_line(state: str, changes: dict[str, Any], text: str):
    assert describe_node(place("studio", state) | changes) == f"studio: {text}"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (119.4, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2.0 h")]
)
def test_a_duration_has_its_largest_unit(seconds: float, text: str):
    assert format_seconds(seconds) == text


def test_choices_of_nodes_exclude_each_other(server: Server):
    for words in (("--all", "--auto"), ("--all", "--node", "studio"), ("--auto", "--node", "studio")):
        assert server.run("pull", "a/b", *words).exit_code == 2
    assert server.asked == []


def test_a_plan_is_printed_and_starts_nothing(server: Server):
    node = {"name": "studio", "disk_free": 9 * GIB, "max_context": 8192, "chosen": True, "reason": ""}
    away = {"name": "mini", "disk_free": 0, "max_context": 0, "chosen": False, "reason": "it is away"}
    server.answer = {**PLAN, "size": 4 * GIB, "skipped": {"files": 2, "size": GIB}, "nodes": [node, away]}
    done = server.run("pull", "a/b", "--dry-run", "--revision", "v1", "--node", "studio", "--node", "mini")
    assert server.asked == [
        (
            "/api/v1/pulls",
            {"repo": "a/b", "revision": "v1", "nodes": ["studio", "mini"], "all": False, "dry_run": True},
        )
    ]
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == ["a/b at cccccccc: 4.0 GiB in 1 file, context 4,096 tokens", "not needed: 2 files, 1.0 GiB"]
    assert lines[-2:] == ["studio 9.0 GiB 8,192 yes", "mini - - no: it is away"]


def test_a_detached_pull_is_named(server: Server):
    server.answer = {**PLAN, "pull": {"id": "p-1", "repo": "a/b", "state": "pulling", "nodes": []}}
    done = server.run("pull", "a/b", "--detach", "--all")
    assert done.stdout.splitlines()[-1] == "p-1 started: `cluster pulls` shows its progress"
    assert [body["all"] for _, body in server.asked] == [True]


def test_pulls_are_listed_with_the_progress_of_those_that_run(server: Server):
    nodes = [place("studio", "completed"), place("mini", "pulling")]
    listed = [
        {"id": f"p-{number}", "repo": "a/b", "size": GIB, "state": state, "started": 0.0, "nodes": nodes}
        for number, state in enumerate(("pulling", "failed"))
    ]
    server.answer = {"schema": 1, "pulls": listed}
    for words in (("pulls",), ("pulls", "list")):
        lines = [" ".join(line.split()) for line in server.run(*words).stdout.splitlines()]
        assert lines[1].startswith("p-0 a/b 1.0 GiB pulling 1/2 ")
        assert lines[2].startswith("p-1 a/b 1.0 GiB failed 1/2 ")
        assert lines[3:] == ["studio: completed, already had the files", "mini: starts"]


def test_a_pull_is_cancelled_by_its_id(server: Server):
    server.answer = {"schema": 1, "pull": {"id": "p/1", "state": "cancelled"}}
    assert server.run("pulls", "cancel", "p/1").stdout == "p/1 cancelled\n"
    assert server.asked == [("/api/v1/pulls/p%2F1", None)]


def test_progress_has_a_line_for_each_change_and_after_an_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    progress = PullProgressLines()
    running = place("mini", "pulling")
    for nodes in ([place("studio", "completed"), running], [running], [running | {"message": "again"}]):
        progress.show({"nodes": nodes})
    assert capsys.readouterr().err.splitlines() == ["mini: starts"] * 2
    monkeypatch.setattr(pulls, "LINE_INTERVAL_SECONDS", 0.0)
    progress.show({"nodes": [running | {"message": "again"}, place("desk", "waiting")]})
    progress.show({"nodes": [place("desk", "waiting")]})
    assert capsys.readouterr().err.splitlines() == ["mini: starts", "desk: waiting for a source"]
