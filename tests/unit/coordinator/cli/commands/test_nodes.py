"""Output and exit codes of `cluster status` and `cluster node drain`, against a server with a coordinator's answers."""

import json

import pytest

from coordinator.client.errors import REFUSED
from tests.support.coordinator.answering_server import Server


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
