"""Requests and placements as the command prints them."""

from typing import Any

import pytest

from coordinator.cli.request_table import print_placement, print_request, print_requests
from wire.units import GIB

STEPS = [
    {"at": 0.0, "what": "queued", "node": ""},
    {"at": 1.25, "what": "refused: no_headroom", "node": "studio"},
    {"at": 2.0, "what": "sent", "node": "mini"},
]
REQUEST: dict[str, Any] = {
    "request_id": "r1",
    "model": "tiny",
    "key": "laptop",
    "seconds": 3.5,
    "outcome": "ok",
    "message": "",
    "prompt_tokens": 25,
    "cached_tokens": 10,
    "completion_tokens": 3,
    "steps": STEPS,
    "ignored": [],
    "timings": None,
}
SIZES = {"headroom": 8 * GIB, "ceiling": 24 * GIB, "current": None, "reserved": 0, "margin": 2 * GIB}
CANDIDATES = [
    {"name": "studio", "need": 2 * GIB, "why_not": "", "chosen": True, **SIZES},
    {"name": "mini", "need": 2 * GIB, "why_not": "", "chosen": False, **SIZES},
    {"name": "desk", "need": 2 * GIB, "why_not": "it is cordoned", "chosen": False, **SIZES},
]


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the printed lines with single spaces."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_placement_names_the_verdict_of_each_node(capsys: pytest.CaptureFixture[str]):
    passed_over = [{"model": "big", "reason": "no node serves big"}]
    answer = {"candidates": CANDIDATES, "node": "n1", "name": "studio", "model": "tiny"}
    print_placement(answer | {"passed_over": passed_over, "alias": "coder"})
    lines = read_lines(capsys)
    assert lines[0] == "passed over big: no node serves big"
    assert [line.split()[-1] for line in lines[2:5]] == ["chosen", "fits", "refused"]
    assert lines[5] == "desk: it is cordoned"
    assert lines[2].startswith("studio 2.0 GiB 8.0 GiB ")
    assert lines[-1] == "would go to studio with tiny"
    print_placement(answer)
    assert read_lines(capsys)[-1] == "would go to studio"
    print_placement(answer | {"node": None})
    assert read_lines(capsys)[-1].startswith("desk: ")
    unread = {"need": 0, "headroom": None, "ceiling": 0, "current": None, "reserved": 0, "margin": 0}
    refused = {"name": "old", "why_not": "does not serve big", "chosen": False, **unread}
    print_placement(answer | {"candidates": [refused], "node": None})
    assert read_lines(capsys)[-2:] == ["old - - - - - - refused", "old: does not serve big"]


def test_requests_are_rows_with_their_node_and_with_all_steps_if_wide(capsys: pytest.CaptureFixture[str]):
    invalid = REQUEST | {"model": "", "prompt_tokens": None, "steps": [], "message": "top_k is wrong", "seconds": 0.0}
    print_requests({"requests": [REQUEST, invalid]})
    assert read_lines(capsys) == [
        "ID MODEL NODE OUTCOME SECONDS PROMPT ANSWER",
        "r1 tiny mini ok 3.50 25 3",
        "r1 - - ok 0.00 - 3",
    ]
    print_requests({"requests": [REQUEST, invalid]}, wide=True)
    assert read_lines(capsys) == [
        "ID MODEL NODE OUTCOME SECONDS PROMPT ANSWER CACHED KEY STEPS",
        "r1 tiny mini ok 3.50 25 3 10 laptop queued, refused studio, sent mini",
        "r1 - - ok 0.00 - 3 10 laptop top_k is wrong",
    ]


def test_a_request_has_its_steps_and_decisions(capsys: pytest.CaptureFixture[str]):
    shown = REQUEST | {
        "message": "it failed",
        "alias": "coder",
        "passed_over": [{"model": "big", "reason": "no room"}],
        "profile": "calm",
        "ignored": ["user", "store"],
        "timings": {"prefill": 0.5},
    }
    running = REQUEST | {"phase": "queued", "request_id": "r2", "seconds": 1.25}
    decisions = [
        {"demand": {"model": model}, "refused": refused, "seconds_ago": 2.0, "nodes": 3, "candidates": CANDIDATES}
        for model, refused in (("big", "no room"), ("tiny", ""))
    ]
    print_request({"under_way": [running], "requests": [shown], "decisions": decisions})
    lines = read_lines(capsys)
    steps = ["0.000 s queued", "1.250 s refused: no_headroom studio", "2.000 s sent mini"]
    assert lines[:4] == ["r2 tiny, key laptop: queued, for 1.2 s", *steps]
    assert lines[4:15] == [
        "r1 tiny, key laptop: ok after 3.500 s",
        "it failed",
        "alias coder",
        "big passed over: no room",
        "profile calm",
        "ignored: user, store",
        *steps,
        "on the node: prefill 0.500 s",
        "tokens: 25 prompt (10 cached), 3 generated",
    ]
    assert "decided about big 2.0 s ago among 3 nodes: no room" in lines
    assert "decided about tiny 2.0 s ago among 3 nodes: placed" in lines
    print_request({"requests": [REQUEST], "decisions": [decisions[1], decisions[1]]})
    lines = read_lines(capsys)
    assert lines[:5] == [
        "r1 tiny, key laptop: ok after 3.500 s",
        *steps,
        "tokens: 25 prompt (10 cached), 3 generated",
    ]
    assert "decided 2.0 s ago among 3 nodes: placed" in lines


def test_a_request_that_no_node_accepted_has_an_unknown_prompt(capsys: pytest.CaptureFixture[str]):
    refused = REQUEST | {"outcome": "queue_full", "prompt_tokens": None, "cached_tokens": 0, "completion_tokens": 0}
    print_request({"requests": [refused], "decisions": []})
    assert read_lines(capsys)[-1] == "tokens: prompt unknown, 0 generated"
