"""Output and exit codes of `cluster status`, `nodes`, `node` and `approve`, against a server with a coordinator's
answers."""

import json
from typing import Any

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import REFUSED
from tests.support.coordinator.answering_server import Server
from tests.unit.coordinator.cli.test_tables import a_node
from wire.node_state import NodeState
from wire.units import GIB


@pytest.mark.parametrize("form", ["text", "json"])
def test_drain_fails_while_requests_are_left_and_names_their_number(server: Server, form: str):
    server.answer = {"schema": 1, "node": "id-1", "cordoned": True, "left": 2}
    done = server.run("node", "drain", "studio", "--wait", "3s", "-o", form)
    assert server.asked == [("/api/v1/nodes/studio/drain", {"wait_seconds": 3.0})]
    assert done.exit_code == REFUSED
    assert "studio is cordoned, and still runs 2 requests" in done.stderr
    assert (json.loads(done.stdout) if form == "json" else done.stdout) == (server.answer if form == "json" else "")
    server.answer = {**server.answer, "left": 0}
    done = server.run("node", "drain", "studio", "-o", form)
    assert done.exit_code == 0
    assert ("studio is empty and cordoned" in done.stdout) is (form == "text")


@pytest.mark.parametrize(
    ("options", "method", "text"),
    [
        ((), "POST", "is approved: `cluster nodes` shows it once it has joined"),
        (("--reject",), "DELETE", "is rejected"),
    ],
)
def test_decision_about_a_code_says_what_is_decided(server: Server, options: tuple[str, ...], method: str, text: str):
    server.answer = {"schema": 1, "name": "air", "decision": "any"}
    done = server.run("approve", "123456", *options)
    assert (done.exit_code, done.stdout) == (0, f"air {text}\n")
    assert (server.methods, server.asked) == ([method], [("/api/v1/joins/123456", None)])


def test_approve_without_a_code_lists_the_waiting_machines(server: Server):
    server.answer = {"schema": 1, "joins": [{"name": "air", "address": "10.0.0.9", "chip": "M2", "replaces": "old"}]}
    done = server.run("approve")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["NAME", "ADDRESS", "CHIP", "REPLACES"],
        ["air", "10.0.0.9", "M2", "old"],
    ]
    server.answer = {"schema": 1, "joins": []}
    assert server.run("approve").stdout == "no machine waits for approval\n"
    assert json.loads(server.run("approve", "-o", "json").stdout) == server.answer


def test_drain_of_a_node_that_was_uncordoned_meanwhile_does_not_call_it_cordoned(server: Server):
    server.answer = {"schema": 1, "node": "id-1", "cordoned": False, "left": 2}
    done = server.run("node", "drain", "studio", "--wait", "3s")
    assert done.exit_code == REFUSED
    assert "studio was uncordoned during the drain" in done.stderr


@pytest.mark.parametrize(
    ("models", "text"),
    [(0, "none"), (6, "m0, m1, m2, m3, m4, m5"), (9, "m0, m1, m2, m3, m4, m5 and 3 more: `cluster models`")],
)
def test_status_names_six_models_and_counts_the_others(server: Server, models: int, text: str):
    server.answer = {
        "cluster": {"name": "home", "id": "c1"},
        "uptime_seconds": 7200.0,
        "base_url": "http://127.0.0.1:8080/v1",
        "nodes": {"ready": 2, "lost": 0, "asleep": 1},
        "models": [f"m{number}" for number in range(models)],
        "in_flight": 3,
        "queued": 4,
        "conditions": [
            {"severity": "critical", "name": "GuardOff", "summary": "off on a", "remedy": "set it"},
            {"severity": "warning", "name": "NoHeadroomAnywhere", "summary": "none", "remedy": "unload"},
        ],
        "dangers": ["a: its guard is off"],
        "warnings": ["a: its guard is off", "b: its engine is hung"],
    }
    done = server.run("status")
    assert done.stdout.splitlines() == [
        "cluster   home (c1), up 2h",
        "endpoint  http://127.0.0.1:8080/v1",
        "nodes     2 ready, 1 asleep",
        f"models    {text}",
        "requests  3 in flight, 4 queued",
        "critical  GuardOff: off on a",
        "          set it",
        "warning   NoHeadroomAnywhere: none",
        "          unload",
        "warning   a: its guard is off",
        "warning   b: its engine is hung",
    ]


@pytest.mark.parametrize(("words", "wait"), [((), 0.0), (("--wait", "2m"), 120.0)])
def test_a_drain_waits_for_its_answer_longer_than_the_coordinator_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], wait: float
):
    sent = list[tuple[object, object]]()

    def record(_: ApiSession, _method: str, _path: str, body: object, timeout: float) -> dict[str, Any]:
        sent.append((body, timeout))
        return {"cordoned": True, "left": 0}

    monkeypatch.setattr(ApiSession, "request_json", record)
    assert server.run("node", "drain", "studio", *words).exit_code == 0
    assert sent == [({"wait_seconds": wait}, wait + 30)]


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("cordon", "lab/a b cordoned"),
        ("uncordon", "lab/a b uncordoned"),
        ("allow-video", "lab/a b may make videos"),
        ("deny-video", "lab/a b makes no new videos"),
    ],
)
def test_an_order_is_sent_to_the_named_node(server: Server, verb: str, text: str):
    done = server.run("node", verb, "lab/a b")
    assert (done.exit_code, done.stdout) == (0, f"{text}\n")
    assert (server.methods, server.asked) == (["POST"], [(f"/api/v1/nodes/lab%2Fa%20b/{verb}", None)])


def test_labels_are_replaced_and_a_wrong_one_is_refused_before_a_request(server: Server):
    server.answer = {"labels": ["gpu=large", "x" * 63]}
    done = server.run("node", "label", "lab/a", "gpu=large", "x" * 63)
    assert done.stdout == f"lab/a: gpu=large, {'x' * 63}\n"
    assert (server.methods, server.asked) == (
        ["PUT"],
        [("/api/v1/nodes/lab%2Fa/labels", {"labels": ["gpu=large", "x" * 63]})],
    )
    server.answer = {"labels": []}
    assert server.run("node", "label", "studio").stdout == "studio: no labels\n"
    for wrong in ("x" * 64, "-x", "a b"):
        done = server.run("node", "label", "studio", "--", "fast", wrong)
        assert (done.exit_code, f"{wrong!r} is not a valid label" in done.stderr) == (2, True)
    assert len(server.asked) == 2


def test_a_node_is_removed_only_after_a_confirmation(server: Server):
    server.answer = {"node": {"name": "studio"}}
    done = server.run("node", "remove", "id/1")
    assert (done.exit_code, "Remove studio?" in done.stderr) == (2, True)
    assert server.methods == ["GET"]
    done = server.run("node", "remove", "id/1", "--yes")
    assert (done.exit_code, done.stdout) == (0, "id/1 removed\n")
    assert server.methods == ["GET", "GET", "DELETE"]
    assert {path for path, _ in server.asked} == {"/api/v1/nodes/id%2F1"}


def test_the_log_of_a_node_has_the_wanted_size(server: Server):
    server.run("node", "logs", "lab/a")
    server.run("node", "logs", "lab/a", "--bytes", "7")
    assert server.run("node", "logs", "lab/a", "--bytes", "0").exit_code == 2
    assert [path for path, _ in server.asked] == [f"/api/v1/nodes/lab%2Fa/logs?bytes={size}" for size in (65536, 7)]


NO_ROOM: dict[str, Any] = {"headroom": 0, "bound_by": "static", "remedy": "raise memory.cap"}


@pytest.mark.parametrize(
    ("state", "changes", "note"),
    [
        (NodeState.READY, NO_ROOM, "a: no headroom, limited by static: raise memory.cap"),
        (NodeState.READY, {**NO_ROOM, "headroom": -1}, "a: no headroom, limited by static: raise memory.cap"),
        (NodeState.READY, {**NO_ROOM, "headroom": 1}, ""),
        (NodeState.READY, {**NO_ROOM, "headroom": None}, ""),
        (NodeState.READY, {**NO_ROOM, "remedy": ""}, ""),
        (NodeState.LOST, NO_ROOM, ""),
        (NodeState.PAUSED, {"sharing": {"paused": True, "why": "in use", "until": None}}, "a: paused: in use"),
        (NodeState.DRAINING, {"sharing": {"paused": True, "why": "in use", "until": None}}, ""),
        (
            NodeState.READY,
            {"breaker": {"state": "open", "until": 0.0, "why": "code 9"}},
            "a: its engine keeps failing: the node gets no requests for 0 s, then one request is tried; "
            "last failure: code 9",
        ),
        (NodeState.READY, {"guard": False}, "a: guard OFF: `cluster node show a`"),
    ],
)
def test_faults_and_pauses_are_below_the_table_of_nodes(
    server: Server, state: NodeState, changes: dict[str, Any], note: str
):
    server.answer = {"nodes": [a_node("a", 2, state, **changes), a_node("b", 2)]}
    notes = server.run("nodes").stdout.splitlines()[3:]
    assert len(notes) == bool(note)
    assert all(line.startswith(note) for line in notes)


def test_the_column_of_videos_is_shown_if_a_node_has_one(server: Server):
    server.answer = {"nodes": [a_node("a", 2), a_node("b", 2)]}
    assert "VIDEO" not in server.run("nodes").stdout
    server.answer["nodes"][1]["video"] |= {"allowed": True, "packages": ["wan"], "state": "ready"}
    assert "VIDEO" in server.run("nodes").stdout


def test_a_node_is_shown_with_its_memory_faults_work_and_models(server: Server):
    row = a_node("a", 1, labels=["fast"], reserve=GIB, breaker={"state": "open", "until": 0.0, "why": "code 9"})
    row["enforcement"]["warnings"] = ["memory.guard is off"]
    server.answer = {"node": row}
    lines = [" ".join(line.split()) for line in server.run("node", "show", "a").stdout.splitlines()]
    heads = [line.partition(" ")[0] for line in lines]
    assert heads[heads.index("") + 1 : heads.index("cap") + 2] == ["cap", "ceiling"], (
        "a blank line is before the memory"
    )
    for line in (
        "name a (a)",
        "labels fast",
        "cap 96.0 GiB, limited by -, tier -",
        "breaker its engine keeps failing: the node gets no requests for 0 s, then one request is tried; last failure: "
        "code 9",
        "warning memory.guard is off",
        "MODEL STATE WEIGHTS CONTEXT PREFILL DECODE CACHED",
    ):
        assert line in lines
    assert heads.index("counts") < heads.index("breaker") < heads.index("warning") < heads.index("work")
    assert server.asked == [("/api/v1/nodes/a", None)]
    server.answer = {"node": a_node("a", 0)}
    assert "MODEL" not in server.run("node", "show", "a").stdout
