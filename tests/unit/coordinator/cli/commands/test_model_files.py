"""Copies that `cluster model files`, `rm` and `verify` name, and the orders that they send."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.errors import NOT_FOUND
from tests.support.coordinator.answering_server import Server
from wire.units import GIB

NOW = time.time()


def copy(name: str, **changes: Any) -> dict[str, Any]:
    """Return the row of a model on a node, used an hour ago."""
    return {
        "id": f"n-{name}",
        "name": name,
        "state": "ready",
        "model": "known",
        "cause": "",
        "stored": 2 * GIB,
        "quantization": "4-bit",
        "identity": "content",
        "used": NOW - 3600,
        "removable": True,
        **changes,
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    models = [
        {
            "name": "a/b",
            "nodes": [
                copy("studio"),
                copy("mini", state="lost"),
                copy("air", removable=False),
                copy("x", state="left"),
            ],
        },
        {"name": "c", "nodes": [copy("studio", used=NOW - 86400, model="loaded"), copy("air", used=0)]},
    ]
    disk = {"free": 3 * GIB, "total": 8 * GIB}
    ended = {"model": "m", "node": {"name": "N"}, "content": "", "freed": GIB}
    made.answer = {"models": models, "nodes": [{"id": "n-studio", "name": "studio", "disk": disk}], **ended}
    yield made
    made.http.shutdown()
    made.http.server_close()


def list_copies(server: Server, *options: str) -> list[tuple[str, str]]:
    answer = json.loads(server.run("model", "files", "-o", "json", *options).stdout)
    return [(row["copy_of"], row["name"]) for row in answer["copies"]]


def list_orders(server: Server, verb: str) -> list[tuple[str, str]]:
    """Return model and node of each order of this verb."""
    return [(body["model"], body["node"]) for path, body in server.asked if path == f"/api/v1/models/{verb}"]


def test_copies_of_members_are_listed_or_those_without_a_use(server: Server):
    every = [("a/b", "studio"), ("a/b", "mini"), ("a/b", "air"), ("c", "studio"), ("c", "air")]
    assert list_copies(server) == every
    assert list_copies(server, "--unused-since", "30m") == [*every[:3], ("c", "air")], "a loaded model is in use"
    assert list_copies(server, "--unused-since", "2h") == [("c", "air")]
    lines = server.run("model", "files").stdout.splitlines()
    assert lines[1].split() == ["a/b", "studio", "2.0", "GiB", "4-bit", "same", "content", "1h"]
    assert lines[5].split()[-1] == "never"
    assert lines[6] == "studio: 3.0 GiB of 8.0 GiB free"


def test_a_model_that_was_just_downloaded_is_not_deleted_as_unused(server: Server):
    new, old = copy("studio", used=0, written=NOW - 60), copy("mini", used=0, written=NOW - 86400)
    ended = {"model": "c", "node": {"name": "mini"}, "content": "", "freed": GIB}
    server.answer = {"models": [{"name": "c", "nodes": [new, old]}], "nodes": [], **ended}
    assert list_copies(server, "--unused-since", "2h") == [("c", "mini")]
    assert server.run("model", "rm", "--unused-since", "2h", "--yes").exit_code == 0
    assert list_orders(server, "remove") == [("c", "n-mini")]


def test_a_model_is_deleted_where_a_linked_node_may(server: Server):
    done = server.run("model", "rm", "a/b", "--yes")
    assert done.stdout == "m deleted on N, 1.0 GiB freed\n"
    assert done.stderr.splitlines() == [
        "a/b stays on mini: the node is lost",
        "a/b stays on air: the node may not delete these files",
    ]
    assert list_orders(server, "remove") == [("a/b", "n-studio")]


def test_models_without_a_use_are_deleted_on_the_named_nodes(server: Server):
    server.run("model", "rm", "--unused-since", "30m", "--node", "studio", "--yes")
    assert list_orders(server, "remove") == [("a/b", "n-studio")]


def test_an_incomplete_download_is_deleted_on_its_node(server: Server):
    server.run("model", "rm", "d", "--node", "other", "--yes")
    assert list_orders(server, "remove") == [("d", "other")]
    assert server.run("model", "rm", "d", "--yes").exit_code == NOT_FOUND


@pytest.mark.parametrize("words", [(), ("a/b", "--unused-since", "1d")])
def test_rm_needs_a_model_or_a_time(server: Server, words: tuple[str, ...]):
    assert server.run("model", "rm", *words, "--yes").exit_code == 2
    assert server.asked == []


def test_nothing_is_deleted_without_a_confirmation(server: Server):
    assert server.run("model", "rm", "a/b").exit_code == 2
    assert list_orders(server, "remove") == []


def test_linked_copies_are_verified_one_after_the_other(server: Server):
    server.run("model", "verify", "a/b")
    assert list_orders(server, "verify") == [("a/b", "n-studio"), ("a/b", "n-air")]
    server.asked.clear()
    server.run("model", "verify", "a/b", "--node", "air")
    assert list_orders(server, "verify") == [("a/b", "n-air")]
    assert server.run("model", "verify", "d").exit_code == NOT_FOUND
