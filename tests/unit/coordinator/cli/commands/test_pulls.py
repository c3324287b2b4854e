"""Output and exit codes of `cluster pull`, against a server with the answers of a coordinator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.errors import REFUSED
from tests.support.cluster.answering_server import Server

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()


def place(name: str, state: str, message: str = "") -> dict[str, Any]:
    return {"id": name, "name": name, "state": state, "message": message, "fetched": 0, "linked": True, "total": 0}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_pull_that_a_node_does_not_complete_fails_and_names_the_node(server: Server, state: str):
    nodes = [place("studio", "completed"), place("mini", state, "stopped there")]
    server.answer = {**PLAN, "pull": {"id": "p-1", "repo": "a/b", "state": state, "nodes": nodes}}
    done = server.run("pull", "a/b", "--all")
    assert done.exit_code == REFUSED
    assert "a/b is not on mini: see the messages above" in done.stderr
    assert done.stdout.splitlines()[-2:] == ["studio: completed, it had the files", f"mini: {state}: stopped there"]


def test_a_pull_that_every_node_completes_succeeds(server: Server):
    nodes = [place("studio", "completed"), place("mini", "completed")]
    server.answer = {**PLAN, "pull": {"id": "p-1", "repo": "a/b", "state": "completed", "nodes": nodes}}
    done = server.run("pull", "a/b")
    assert (done.exit_code, done.stderr) == (0, "")
