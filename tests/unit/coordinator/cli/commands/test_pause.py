"""Output, requests and exit codes of `cluster pause` and `cluster resume`."""

import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.commands.pause import describe_sharing
from coordinator.client.errors import NOT_FOUND
from host.node_marks import PauseFile
from tests.support.coordinator.answering_server import Server


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the state folder of a machine with a node."""
    identity = tmp_path / "state" / "node" / "identity"
    identity.mkdir(parents=True)
    (identity / "identity.json").write_text("{}")
    return tmp_path / "state"


def sharing(**changes: Any) -> dict[str, Any]:
    return {"paused": False, "when": "always", "until": None, "why": ""} | changes


def test_another_mac_is_paused_for_a_duration_or_until_it_is_resumed(server: Server):
    server.answer = {"sharing": sharing(paused=True, why="by laptop"), "in_flight": 2}
    done = server.run("pause", "my mac", "2h")
    assert done.stdout == "my mac is paused: by laptop; it still runs 2 requests, which will move or end soon\n"
    server.answer = {"sharing": sharing(paused=True, why="by laptop"), "in_flight": 0}
    assert server.run("pause", "studio").stdout == "studio is paused: by laptop\n"
    server.answer = {"sharing": sharing()}
    assert server.run("resume", "studio").stdout == "studio is shared\n"
    assert server.asked == [
        ("/api/v1/nodes/my%20mac/pause", {"seconds": 7200.0}),
        ("/api/v1/nodes/studio/pause", {"seconds": None}),
        ("/api/v1/nodes/studio/resume", None),
    ]


def test_this_mac_is_paused_without_a_coordinator(server: Server, state: Path):
    file = PauseFile(state / "node")
    assert "this Mac was not paused" in server.run("resume", "--state", str(state)).stdout
    done = server.run("pause", "2h", "--state", str(state))
    assert done.stdout.startswith("this Mac accepts no new requests, until ")
    assert file.read().until == pytest.approx(time.time() + 7200, abs=60)
    done = server.run("pause", "--state", str(state))
    assert "no new requests, until `cluster resume`;" in done.stdout
    assert file.read().until is None
    assert "accepts requests again within 1 s" in server.run("resume", "--state", str(state)).stdout
    assert (file.path.exists(), server.asked) == (False, [])


@pytest.mark.parametrize(
    ("words", "code"), [(("2x",), 2), (("",), 2), (("studio", "soon"), 2), (("2h",), NOT_FOUND), ((), NOT_FOUND)]
)
def test_a_wrong_duration_and_a_machine_without_a_node_are_refused(
    server: Server, tmp_path: Path, words: tuple[str, ...], code: int
):
    assert server.run("pause", *words, "--state", str(tmp_path / "none")).exit_code == code
    assert server.asked == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (sharing(), "shared"),
        (sharing(when=""), "shared"),
        (sharing(when="idle"), "shared (idle)"),
        (sharing(paused=True, why="by hand"), "paused: by hand"),
    ],
)
def test_sharing_is_described_with_its_reason(fields: dict[str, Any], text: str):
    assert describe_sharing(fields) == text


def test_the_end_of_a_pause_is_described():
    assert describe_sharing(sharing(paused=True, why="by hand", until=time.time())).startswith("paused until ")
