"""Output of `cluster models`, `load` and `unload`, against a server with the answers of a coordinator."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.errors import NOT_FOUND, REFUSED, TIMED_OUT
from router.errors import Problem, from_failure, from_refused
from tests.support.coordinator.answering_server import Server
from tests.support.processes import CLI, environment
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.units import GIB


def row(
    name: str, model: str = "loaded", cause: str = "", state: str = "ready", progress: float = 0.0
) -> dict[str, object]:
    return {"id": name, "name": name, "state": state, "model": model, "cause": cause, "progress": progress}


def test_models_names_the_nodes_that_hold_different_models(server: Server):
    nodes = [
        {**row("studio"), "fingerprint": "abcdef0123456789"},
        {**row("mini"), "fingerprint": "fedcba9876543210"},
        {**row("gone", state="left"), "fingerprint": "0000"},
        {**row("old", "failed", "truncated"), "fingerprint": ""},
    ]
    one = {"name": "a/b", "nodes": nodes, "weights": 4 * GIB, "context": 4096, "fingerprint": "fedcba9876543210"}
    server.answer = {"models": [{**one, "conflict": True}, {**one, "name": "same", "conflict": False}]}
    text = server.run("models").output
    assert "a/b is not the same model everywhere: fedcba98 (served) on mini; abcdef01 on studio. New requests" in text
    assert "same is not the same" not in text


def test_models_reports_copies_with_equal_samples_and_different_content(server: Server):
    places = [
        {"name": name, "state": "ready", "model": "known", "cause": "", "fingerprint": "f" * 32, "content": content}
        for name, content in (("a", "1" * 64), ("b", "2" * 64), ("c", ""))
    ]
    model = {"name": "m", "nodes": places, "weights": 1, "context": 1, "conflict": True}
    server.answer = {"models": [{**model, "fingerprint": "f" * 32, "content": "2" * 64}]}
    text = server.run("models").output
    assert "ffffffff with content 22222222 (served) on b, c; ffffffff with content 11111111 on a" in text


def test_models_prints_the_state_of_each_model_on_each_node(server: Server):
    nodes = [
        row("studio"),
        row("mini", "loading", progress=0.426),
        row("air", "known", state="lost"),
        row("old", "failed", "truncated"),
    ]
    server.answer = {"models": [{"name": "a/b", "nodes": nodes, "weights": 4 * GIB, "context": 4096}]}
    text = server.run("models").output
    assert "studio, mini (loading, 43%)  " in text
    assert "air" not in text
    wide = server.run("models", "-o", "wide").output
    assert "studio, mini (loading, 43%), air (not loaded) lost, old (cannot load)" in wide
    assert "old cannot load a/b: truncated" in text
    assert "4.0 GiB" in text
    assert "prefill" not in wide, "an older coordinator reports no speeds"


def test_models_counts_the_nodes_that_have_a_model_and_have_not_left(server: Server):
    nodes = [row("studio"), row("mini", "known", state="lost"), row("gone", state="left")]
    server.answer = {"models": [{"name": "a/b", "nodes": nodes, "weights": 4 * GIB, "context": 4096}]}
    text = server.run("models").output
    assert text.splitlines()[1].split() == ["a/b", "studio", "2", "4.0", "GiB", "4096"]


def test_models_prints_the_speeds_of_a_node(server: Server):
    nodes = [
        row("studio") | {"prefill_speed": 1234.5, "decode_speed": 61.2},
        row("air", "known") | {"prefill_speed": 300.0, "decode_speed": 20.0},
    ]
    server.answer = {"models": [{"name": "a/b", "nodes": nodes, "weights": 4 * GIB, "context": 4096}]}
    text = server.run("model", "show", "A/B").output
    assert "a/b on studio: prefill 1,234 tokens/s, decode 61 tokens/s for one request\n" in text
    assert "prefill" not in server.run("models").output
    assert "a/b on air" not in text, "nothing is loaded there"


def test_load_prints_node_and_duration(server: Server):
    server.answer = {"model": "a/b", "node": {"id": "n", "name": "studio", "seconds": 12.34, "already": False}}
    assert server.run("model", "load", "a/b").output == "a/b loaded on studio in 12.3 s\n"
    assert server.asked == [("/api/v1/models/load", {"model": "a/b", "node": None})]
    server.answer["node"]["already"] = True
    assert server.run("model", "load", "a/b", "--node", "studio").output == "a/b is loaded on studio already\n"
    assert server.asked[1][1]["node"] == "studio"


def test_unload_prints_the_node(server: Server):
    nodes = [{"id": name, "name": name, "seconds": 0.2, "already": False} for name in ("one", "two")]
    server.answer = {"model": "a/b", "nodes": nodes}
    result = server.run("model", "unload", "a/b")
    assert result.output == "a/b unloaded on one in 0.2 s\na/b unloaded on two in 0.2 s\n"
    assert server.asked == [("/api/v1/models/unload", {"model": "a/b", "node": None})]


MEASURED = {"max_context": 5000, "max_batch": 7, "kv_per_token": 2048, "transient": GIB, "residual": 0, "covered": 512}
TOLD = (
    "rows of up to 5000 tokens, 7 typical rows at once; 2.0 KiB per token, 1.0 GiB per forward pass, residual 0.0 MiB"
)


def test_profile_prints_measurements_and_models_lists_them(server: Server):
    found = {"id": "n", "name": "studio", "seconds": 61.0, "already": False, "measured": MEASURED}
    server.answer = {"model": "a/b", "nodes": [found]}
    assert server.run("model", "profile", "a/b").output == f"a/b measured on studio in 61.0 s: {TOLD}\n"
    assert server.asked == [("/api/v1/models/profile", {"model": "a/b", "node": None})]
    nodes = [{**row("studio"), "measured": MEASURED}]
    server.answer = {"models": [{"name": "a/b", "nodes": nodes, "weights": 4 * GIB, "context": 4096}]}
    assert f"a/b on studio: {TOLD}" in server.run("models", "-o", "wide").output


ENDS = [
    (from_refused(Refused(RefusalCode.NO_ROOM, "needs 5 GiB", MemoryNumbers(headroom=GIB, estimate=5 * GIB))), REFUSED),
    (
        from_refused(Refused(RefusalCode.TOO_LARGE, "needs 50 GiB", MemoryNumbers(headroom=GIB, estimate=5 * GIB))),
        REFUSED,
    ),
    (from_refused(Refused(RefusalCode.IN_USE, "2 requests")), REFUSED),
    (from_refused(Refused(RefusalCode.NO_MODEL, "no such model")), NOT_FOUND),
    (from_refused(Refused(RefusalCode.LOAD_FAILED, "truncated")), 1),
    (from_failure("node_lost", "studio was lost"), 1),
    (from_failure("command_timeout", "nothing for 3600 s"), TIMED_OUT),
]


@pytest.mark.parametrize(("problem", "code"), ENDS)
@pytest.mark.parametrize("verb", ["load", "unload", "profile"])
def test_model_command_errors_have_numbers_and_exit_codes(server: Server, verb: str, problem: Problem, code: int):
    server.answer = problem
    result = server.run("model", verb, "a/b")
    assert result.exit_code == code
    assert problem.message in result.output
    assert ("estimate 5.0 GiB, headroom 1.0 GiB" in result.output) == (problem.memory is not None)


@pytest.mark.slow
def test_a_terminal_shows_that_it_lasts_and_a_pipe_does_not(server: Server, tmp_path: Path):
    server.answer = {"model": "a/b", "node": {"id": "n", "name": "studio", "seconds": 1.5, "already": False}}
    server.may.clear()
    ours, theirs = os.openpty()
    command = [*CLI, "model", "load", "a/b", *server.options]
    terminal = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment(**terminal), cwd=tmp_path
    ) as load:
        os.close(theirs)
        seen = b""
        while b"loading a/b" not in seen:
            seen += os.read(ours, 4096)
        server.may.set()
        assert load.stdout is not None
        assert load.stdout.read() == "a/b loaded on studio in 1.5 s\n"
    assert load.returncode == 0
    os.close(ours)
    assert server.run("model", "load", "a/b").stderr == ""


def test_a_wish_is_sent_with_all_its_properties(server: Server):
    server.answer = {"schema": 1, "wish": {"model": "a/b", "replicas": 2}}
    words = ("--replicas", "2", "--label", "lab", "--allow", "studio", "--deny", "mini", "--deny", "old")
    done = server.run("model", "want", "a/b", *words, "--idle-unload", "30m", "--cost", "7", "--on-first-request")
    assert done.output == "a/b: 2 replicas wanted; `cluster model plan` shows the progress\n"
    assert server.asked == [
        (
            "/api/v1/models/wishes/a/b",
            {
                "replicas": 2,
                "labels": ["lab"],
                "allow": ["studio"],
                "deny": ["mini", "old"],
                "idle_unload_seconds": 1800.0,
                "eviction_cost": 7,
                "load_at_boot": False,
            },
        )
    ]


def test_a_wish_is_ended(server: Server):
    server.answer = {"schema": 1, "model": "a/b"}
    assert server.run("model", "unwant", "a/b").output == "a/b is not wanted any more\n"
    assert server.asked == [("/api/v1/models/wishes/a/b", None)]


def test_the_name_of_a_wish_keeps_its_slashes_and_no_other_special_character(server: Server):
    server.answer = {"schema": 1, "model": "a/b c?", "wish": {"model": "a/b c?", "replicas": 1}}
    for verb in ("want", "unwant"):
        server.run("model", verb, "a/b c?")
    assert [path for path, _ in server.asked] == ["/api/v1/models/wishes/a/b%20c%3F"] * 2
    assert server.methods == ["PUT", "DELETE"]


def test_one_model_is_shown_by_its_name_in_any_case(server: Server):
    base = {"nodes": [row("studio")], "weights": 4 * GIB, "context": 4096}
    server.answer = {"models": [{"name": "other", **base}, {"name": "A/b", **base}]}
    text = server.run("model", "show", "a/B").stdout
    assert ("A/b" in text, "other" in text) == (True, False)
    done = server.run("model", "show", "c")
    assert (done.exit_code, "no node has the model c; models: other, A/b" in done.stderr) == (NOT_FOUND, True)


def test_models_that_are_not_for_chats_and_aliases_are_below_the_table(server: Server):
    base = {"nodes": [], "weights": 1, "context": 1}
    kinds = {"talks": "chat", "v1": "embed", "v2": "embed", "scores": "rerank"}
    aliases = [{"name": "coder", "candidates": ["big", "talks"], "upstream": None, "served": "talks"}]
    server.answer = {"models": [{"name": n, "kind": k, **base} for n, k in kinds.items()], "aliases": aliases}
    lines = server.run("models").stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines[5:7]] == ["v1, v2", "scores"]
    assert lines[7] == "alias coder: big, then talks (first one on a node: talks)"


def wished(model: str, **changes: Any) -> dict[str, Any]:
    base = {"model": model, "replicas": 1, "wanted": 1, "met": False, "ready": [], "loading": [], "away": []}
    return {**base, "missing": "", **changes}


def test_the_plan_names_nodes_actions_and_the_missing_number(server: Server):
    missing = "needs 2 nodes with the model on disk, 1 has it: pull it to another node"
    server.answer = {
        "schema": 1,
        "wishes": [
            wished("a/b", replicas=2, wanted=2, ready=["studio"], missing=missing),
            wished("c", loading=["mini"], away=["old"]),
            wished("d", wanted=0, met=True),
        ],
        "running": [{"action": "load", "model": "c", "node": "n2", "name": "mini", "why": "wish"}],
        "next": [{"action": "unload", "model": "x", "node": "n1", "name": "studio", "why": "memory for c"}],
    }
    lines = server.run("model", "plan").output.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["MODEL", "WANTED", "READY", "NODES"],
        ["a/b", "2", "1", "studio"],
        ["c", "1", "0", "mini", "(loading),", "old", "(away)"],
        ["d", "0", "0", "at", "rest", "until", "a", "request"],
    ]
    assert lines[4:] == ["now: load c on mini", "next: unload x from studio (memory for c)", f"a/b: {missing}"]
    assert max(map(len, lines)) <= 80
    assert json.loads(server.run("model", "plan", "-o", "json").output) == server.answer


def test_plan_without_wishes_names_the_command_to_create_one(server: Server):
    server.answer = {"schema": 1, "wishes": [], "running": [], "next": []}
    assert server.run("model", "plan").output == ("no model is wanted: `cluster model want MODEL` keeps one loaded\n")


@pytest.mark.parametrize("words", [("models",), ("model", "list"), ("models", "-o", "text")])
def test_models_are_listed_without_a_verb(server: Server, words: tuple[str, ...]):
    server.answer = {"models": [{"name": "a/b", "nodes": [row("studio")], "weights": 4 * GIB, "context": 4096}]}
    assert "a/b" in server.run(*words).output
    assert server.asked == [("/api/v1/models", None)]


def test_an_unknown_verb_of_models_is_refused(server: Server):
    done = server.run("models", "wants")
    assert done.exit_code == 2
    assert server.asked == []


def test_rm_deletes_an_incomplete_download_on_a_named_node(server: Server):
    places = [{**row("mini", "known"), "removable": True, "stored": 5, "used": 0.0}]
    model = {"name": "a/b", "nodes": places}
    node = {"id": "node-1", "name": "studio"}
    server.answer = {"models": [model], "model": "a/b", "node": node, "content": "", "freed": GIB}
    done = server.run("model", "rm", "a/b", "--node", "studio", "--yes")
    assert (done.exit_code, done.stdout) == (0, "a/b deleted on studio, 1.0 GiB freed\n")
    assert server.asked[1:] == [("/api/v1/models/remove", {"model": "a/b", "node": "studio"})]
    server.asked.clear()
    done = server.run("model", "rm", "a/c", "--yes")
    assert done.exit_code == NOT_FOUND
    assert "no copy of a/c to delete; name the node of an incomplete download with --node" in done.stderr


def test_bench_shows_the_stored_speeds_of_the_named_nodes_only(server: Server):
    rows = [
        {"model": "a/b", "node": {"id": f"n-{name}", "name": name}, "measured": 0, "max_prompt": 4096, "runs": []}
        for name in ("studio", "mini", "air")
    ]
    server.answer = {"schema": 1, "benchmarks": rows, "nodes": [{"id": "n-new", "name": "new"}]}
    shown = server.run("model", "bench", "--show", "--node", "mini", "--node", "n-air", "-o", "json").output
    assert [row["node"]["name"] for row in json.loads(shown)["benchmarks"]] == ["mini", "air"]
    assert "a/b on studio" in server.run("model", "bench", "--show").output


@pytest.mark.parametrize("force", [True, False])
def test_bench_measures_linked_nodes_that_can_load_the_model(server: Server, force: bool):
    lost, broken = row("lost", "known", state="lost"), row("broken", "failed", "truncated")
    benchmark = {"model": "a/b", "node": {"id": "studio", "name": "studio"}, "measured": 0, "max_prompt": 4096}
    server.answer = {
        "models": [{"name": "a/b", "nodes": [lost, broken, row("studio", "known"), row("mini", state="draining")]}],
        "benchmark": {**benchmark, "runs": []},
    }
    done = server.run("model", "bench", "a/b", *(["--force"] if force else []))
    assert done.stdout.count("a/b on studio") == 2
    assert server.asked[1:] == [
        ("/api/v1/benchmarks", {"model": "a/b", "node": name, "force": force}) for name in ("studio", "mini")
    ]


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("cancelled", REFUSED), ("failed", REFUSED)])
def test_quantize_ends_with_the_state_of_the_quantization(server: Server, state: str, code: int):
    row = {"id": "q1", "name": "a-8bit", "node": {"name": "studio", "linked": True}, "state": state, "message": ""}
    server.answer = {"quantization": row | {"bits": 8, "stored": 4 * GIB, "peak": GIB}}
    done = server.run("model", "quantize", "a", "--bits", "8", "--node", "studio", "--name", "a-8bit")
    assert server.asked == [("/api/v1/quantizations", {"model": "a", "bits": 8, "node": "studio", "name": "a-8bit"})]
    assert done.exit_code == code
    text = "a-8bit on studio: 8 bits, 4.0 GiB of weights" if code == 0 else "studio: the quantization was cancelled"
    assert text in done.output


def test_bench_and_verify_refuse_a_node_that_does_not_exist_and_name_the_others(server: Server):
    places = [{**row(name, "known"), "id": f"n-{name}", "used": 0.0, "removable": True} for name in ("studio", "mini")]
    server.answer = {"schema": 1, "benchmarks": [], "nodes": places, "models": [{"name": "a/b", "nodes": places}]}
    names = ("--node", "n-mini", "--node", "typo")
    for words, problem in {
        ("bench", "--show"): "there is no such node",
        ("bench", "a/b"): "no linked node of this name can load the model a/b",
        ("verify", "a/b"): "no linked node of this name has the model a/b",
        ("rm", "--unused-since", "1d", "--yes"): "there is no such node",
    }.items():
        done = server.run("model", *words, *names)
        assert (done.exit_code, done.stderr) == (NOT_FOUND, f"Error: typo: {problem}; nodes: mini, studio\n")
    assert {body for _, body in server.asked} == {None}, "no order was sent"
