"""The pool as its users drive it: real processes, the openai library, the command."""

import fcntl
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import AuthenticationError, DefaultHttpxClient, OpenAI

from tests.support.cluster.engine_pool import engine_of
from tests.support.processes import CLI, ENGINE_MODULE, NO_TLS, ROOT, Pool, Process, environment, gone, pool, until

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "hello pool"}]


def client(made: Pool, retries: int = 0) -> OpenAI:
    return api_of(made, made.key, retries)


def api_of(made: Pool, key: str, retries: int = 0) -> OpenAI:
    direct = DefaultHttpxClient(trust_env=False, verify=NO_TLS, timeout=60)
    return OpenAI(base_url=made.facts["base_url"], api_key=key, max_retries=retries, http_client=direct)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Start `studio` and `macbook`, for tests that change neither."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        made.join("studio", "memory.cap=64GiB")
        made.join("macbook", "engine.scripted.memory=8GiB", "engine.scripted.weights=1GiB")
        yield made


@pytest.fixture(scope="module")
def single() -> Iterator[Pool]:
    """Start a coordinator and the node `one`, with umask 0: a file that is made without a mode is writable for all
    users. A test that cordons the node ends that."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        before = os.umask(0)
        try:
            made.up()
            made.join("one")
        finally:
            os.umask(before)
        yield made


@pytest.fixture(scope="module")
def home() -> Iterator[Pool]:
    """Start a coordinator for tests that join nodes with names of their own, and end these nodes."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        yield made


def test_one_command_each_and_a_streamed_chat(pair: Pool) -> None:
    facts = pair.facts
    assert facts["schema"] == 1
    assert facts["ready"] is True
    assert facts["base_url"].endswith("/v1")
    assert facts["cluster_url"] in facts["join"]
    api = client(pair)
    assert [model.id for model in api.models.list()] == ["scripted-1"]
    stream = api.chat.completions.create(
        model="scripted-1", messages=MESSAGES, stream=True, max_tokens=10, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text.split()) == 10
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    whole = api.chat.completions.with_raw_response.create(model="scripted-1", messages=MESSAGES, max_tokens=10)
    assert whole.headers["x-macpool-node"] in ("studio", "macbook")
    assert whole.headers["x-macpool-attempts"] == "1"
    assert whole.headers["x-request-id"]
    assert whole.parse().choices[0].message.content == text


def test_what_the_scripted_engine_does_not_offer_is_a_clear_400(pair: Pool) -> None:
    api = client(pair)
    tool: Any = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(openai.BadRequestError, match="no node supports tools with scripted-1") as caught:
        api.chat.completions.create(model="scripted-1", messages=MESSAGES, tools=[tool])
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError, match="no node supports logprobs with scripted-1"):
        api.chat.completions.create(model="scripted-1", messages=MESSAGES, logprobs=True, stream=True)


def test_nodes_list_holds_the_arithmetic(pair: Pool) -> None:
    (node,) = [node for node in pair.cli("nodes")["nodes"] if node["name"] == "studio"]
    for field in (
        "id",
        "name",
        "state",
        "cap",
        "ceiling",
        "margin",
        "phys",
        "current",
        "headroom",
        "reserved",
        "in_flight",
        "models",
        "gate_armed",
    ):
        assert field in node
    assert node["cap"] == 64 * 2**30
    assert node["gate_armed"] is True
    assert node["headroom"] == node["ceiling"] - node["margin"] - node["current"] - node["reserved"]
    inspected = pair.cli("node", "show", "studio")["node"]
    assert (inspected["bound_by"], inspected["cap_bound_by"], inspected["tier"]) == ("setting", "setting", "custom")
    assert inspected["remedy"] == "raise memory.cap"
    assert inspected["enforcement"]["level"] == "ok"
    assert inspected["enforcement"]["polls"] > 0
    assert inspected["enforcement"]["phys"] > 0
    assert inspected["system_memory"]["available"] > 0
    shown = pair.run("node", "show", "studio", "--state", str(pair.state)).stdout
    for line in (
        "cap       64.0 GiB, limited by setting, tier custom",
        "headroom  ",
        "guard     armed; level ok",
        "remedy    raise memory.cap",
        "counts    ",
    ):
        assert line in shown
    table = pair.run("nodes", "--state", str(pair.state)).stdout
    assert "raise memory.cap" not in table, "no advice where all is well"
    assert "64.0 GiB" in table


@pytest.mark.nightly
def test_a_node_with_a_dying_engine_shows_reason_and_end_of_its_exclusion(cluster_pool: Pool) -> None:
    """CI has these tests:

    - `tests/unit/router/dispatch/test_circuit_breaker.py`
    - `tests/unit/coordinator/observe/test_node_rows.py::test_a_row_of_a_node_has_every_value_in_its_place`
    """
    cluster_pool.up()
    cluster_pool.join("frail", "engine.scripted.step_ms=50")
    assert cluster_pool.node("frail")["breaker"] == {"state": "closed", "why": "", "until": None, "opened": 0}
    api = client(cluster_pool)
    deaths = 0

    def dies() -> bool:
        """Kill the engine of `frail` during an answer. Return whether the breaker is not closed after that.

        Return False at once if the engine is not ready.
        """
        nonlocal deaths
        if not cluster_pool.serves("frail"):
            return False
        with api.chat.completions.create(model="scripted-1", messages=MESSAGES, stream=True, max_tokens=400) as stream:
            next(iter(stream))
            engine_of(cluster_pool, "frail").kill()
            deaths += 1
            until(lambda: cluster_pool.node("frail")["engine"]["restarts"] == deaths, what="its death to be told")
        return cluster_pool.node("frail")["breaker"]["state"] != "closed"

    until(dies, 40, "a breaker that opens")
    assert deaths >= 3
    node = cluster_pool.node("frail")
    assert (node["breaker"]["state"], node["breaker"]["opened"]) == ("open", 1)
    assert "SIGKILL" in node["breaker"]["why"]
    assert node["breaker"]["until"] > time.time() - 1
    table = cluster_pool.run("nodes", "--state", str(cluster_pool.state)).stdout
    assert re.search("(ready|restarting|starting), failing", table)
    assert "frail: its engine keeps failing: the node gets no requests" in table
    assert "breaker " in cluster_pool.run("node", "show", "frail", "--state", str(cluster_pool.state)).stdout
    answer = api.with_options(timeout=60).chat.completions.create(model="scripted-1", messages=MESSAGES)
    assert answer.choices[0].finish_reason, "it waits for its turn, and is the probe"
    assert cluster_pool.node("frail")["breaker"]["state"] == "closed"


def test_place_prints_every_node_and_why_not(pair: Pool) -> None:
    placed = pair.cli("place", "scripted-1", "--prompt-tokens", "30000")
    assert placed["name"] == "studio"
    rows = {row["name"]: row for row in placed["candidates"]}
    assert rows["macbook"]["why_not"]
    assert rows["macbook"]["need"] > rows["macbook"]["headroom"]
    refused = pair.cli("place", "nothing", code=6)
    assert "nothing" in refused["stderr"]


def test_a_prompt_that_can_never_fit_is_400_with_numbers(cluster_pool: Pool) -> None:
    cluster_pool.up()
    cluster_pool.join("small", "engine.scripted.memory=8GiB", "engine.scripted.weights=1GiB")
    words: Any = [{"role": "user", "content": "word " * 30_000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client(cluster_pool).chat.completions.create(model="scripted-1", messages=words)
    error = caught.value.response.json()["error"]
    assert error["code"] == "prefill_memory_exceeded"
    assert "GiB" in error["message"]


@pytest.mark.nightly
def test_second_start_needs_no_token_and_keys_persist(cluster_pool: Pool) -> None:
    """CI has these tests:

    - `tests/e2e/test_versions.py::test_a_pool_is_upgraded_in_turns`
    - `tests/unit/coordinator/state/test_database.py::test_everything_survives_a_restart`
    """
    cluster_pool.up()
    first = cluster_pool.join("studio")
    made = cluster_pool.cli("key", "create", "laptop")
    before = cluster_pool.node("studio")["id"]
    assert first.stop() == 0
    until(lambda: cluster_pool.node("studio")["state"] == "lost", what="studio lost")
    assert cluster_pool.coordinator is not None
    assert cluster_pool.coordinator.stop() == 0
    again = cluster_pool.up()
    assert "api_key" not in again
    assert cluster_pool.node("studio")["state"] == "lost"
    # The port differs from the one that the node remembers; `join` passes the new address.
    node = cluster_pool.join("studio", wait=False)
    del node
    listed = {key["name"] for key in cluster_pool.cli("key", "list")["keys"]}
    assert listed == {"first", "laptop"}
    assert cluster_pool.get("/api/v1/nodes")["nodes"][0]["id"] == before
    api_of(cluster_pool, made["key"]).models.list()


def test_an_engine_and_then_the_coordinator_is_killed_and_the_node_comes_back(cluster_pool: Pool) -> None:
    port = 18000 + (psutil.Process().pid % 1000) * 2
    cluster_pool.up(cluster_listen=f"127.0.0.1:{port}", listen=f"127.0.0.1:{port + 1}")
    node = cluster_pool.join("studio", "engine.scripted.step_ms=50")
    kill_engine_under_load(cluster_pool, node)
    engine = node.children()
    assert cluster_pool.coordinator is not None
    cluster_pool.coordinator.kill()
    cluster_pool.up(cluster_listen=f"127.0.0.1:{port}", listen=f"127.0.0.1:{port + 1}")
    until(lambda: cluster_pool.node("studio")["state"] == "ready", what="studio back")
    assert cluster_pool.node("studio")["engine"]["restarts"] == 1
    assert node.children() == engine, "losing the coordinator must not end the engine"
    answer = client(cluster_pool).chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"


def kill_engine_under_load(made: Pool, node: Process) -> None:
    """Kill the engine of studio during an answer, and check that this answer and the next are complete."""
    stream = client(made).chat.completions.create(model="scripted-1", messages=MESSAGES, stream=True, max_tokens=100)
    parts = iter(stream)
    words = [next(parts).choices[0].delta.content or ""]
    (engine,) = node.children()
    engine.kill()
    words += [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert len("".join(words).split()) == 100, "the answer was resumed after the engine's restart"
    until(lambda: made.node("studio")["engine"]["restarts"] == 1, what="a restart")
    until(lambda: made.serves("studio"), what="the engine again")
    assert "SIGKILL" in made.node("studio")["engine"]["cause"]
    answer = client(made, 5).chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.nightly
def test_a_refusing_node_costs_nothing_and_is_no_failure(cluster_pool: Pool) -> None:
    """CI has these tests:

    - `tests/contract/dialects/test_chat.py::test_refused_request_is_retried_without_delay`
    - `tests/contract/dialects/test_chat.py::test_when_all_refuse_the_answer_is_a_503_with_the_numbers`
    """
    cluster_pool.up("router.queue_timeout_seconds=1")
    cluster_pool.join("willing")
    cluster_pool.join("refusing", "engine.scripted.refuse=*", "engine.scripted.memory=256GiB")
    api = client(cluster_pool)
    nodes = set()
    for _ in range(12):
        raw = api.chat.completions.with_raw_response.create(model="scripted-1", messages=MESSAGES, max_tokens=1)
        nodes.add(raw.headers["x-macpool-node"])
    assert nodes == {"willing"}
    assert cluster_pool.node("refusing")["state"] == "ready"
    assert cluster_pool.nodes["willing"].stop() == 0
    refused_with_numbers(cluster_pool)


def refused_with_numbers(made: Pool) -> None:
    """Check the answer of a pool whose only node refuses every request: 503, the numbers and Retry-After."""
    with pytest.raises(openai.APIStatusError) as caught:
        client(made).chat.completions.create(model="scripted-1", messages=MESSAGES)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    error = caught.value.response.json()["error"]
    assert error["code"] == "no_headroom"
    assert set(error["memory"]) >= {"predicted", "ceiling", "current", "reserved", "estimate", "margin", "headroom"}


WORKER = ("engine.scripted.step_ms=20", "engine.scripted.max_batch_size=8")


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    """Start the nodes `one` and `two`. Each test leaves both ready."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        for name in ("one", "two"):
            made.join(name, *WORKER)
        yield made


def test_many_streams_of_mixed_lengths_all_end(workers: Pool) -> None:
    api = client(workers)

    def ask(number: int) -> int:
        count = 1 + number * 7 % 60
        words: Any = [{"role": "user", "content": "word " * (1 + number * 37 % 900)}]
        stream = api.chat.completions.create(model="scripted-1", messages=words, stream=True, max_tokens=count)
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        return len(text.split()) - count

    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, range(64))) == [0] * 64
    until(lambda: all(n["reserved"] == 0 and n["in_flight"] == 0 for n in workers.nodes_now()), 5, "all given back")


def test_a_node_is_drained_under_a_stream_and_no_client_notices(workers: Pool) -> None:
    api = client(workers)
    asked: Any = {"model": "scripted-1", "messages": MESSAGES, "max_tokens": 150}
    undisturbed = api.chat.completions.create(**asked).choices[0].message.content
    response = api.chat.completions.with_raw_response.create(**asked, stream=True)
    chunks = iter(response.parse())
    text = [next(chunks).choices[0].delta.content or "" for _ in range(5)]
    where = response.headers["x-macpool-node"]
    drained = workers.cli("node", "drain", where, "--wait", "20s")
    assert drained["left"] == 0
    text += [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == undisturbed
    assert workers.node(where)["cordoned"] is True
    assert workers.node(where)["in_flight"] == 0
    acts = [(act["action"], act["actor"]) for act in workers.cli("audit")["acts"]]
    assert ("drain", "local") in acts
    assert acts.count(("joined", "node")) == 2
    workers.cli("node", "uncordon", where)


def test_node_killed_mid_stream_is_not_noticed_and_the_other_serves(workers: Pool) -> None:
    api = client(workers)
    raw = api.chat.completions.with_raw_response.create(
        model="scripted-1", messages=MESSAGES, stream=True, max_tokens=100
    )
    parts = iter(raw.parse())
    words = [next(parts).choices[0].delta.content or ""]
    victim = workers.nodes[raw.headers["x-macpool-node"]]
    below = victim.children()
    victim.kill()
    words += [part.choices[0].delta.content or "" for part in parts if part.choices]
    whole = api.chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=100)
    assert "".join(words) == whole.choices[0].message.content
    gone(below, 5)
    for _ in range(10):
        api.chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=1)
    name = raw.headers["x-macpool-node"]
    workers.join(name, *WORKER, wait=False)
    until(lambda: workers.serves(name), what=f"{name} is back")


def test_client_gone_is_cancelled_on_the_node(workers: Pool) -> None:
    response = client(workers).chat.completions.with_raw_response.create(
        model="scripted-1", messages=MESSAGES, stream=True, max_tokens=20_000
    )
    name, stream = response.headers["x-macpool-node"], response.parse()
    next(iter(stream))
    until(lambda: workers.node(name)["running"] == 1, what="running")
    stream.close()
    until(lambda: workers.node(name)["running"] == 0, 5, "cancelled")
    until(lambda: workers.node(name)["reserved"] == 0, 5, "given back")
    assert workers.node(name)["in_flight"] == 0


@pytest.mark.nightly
def test_running_requests_end_after_sigterm(cluster_pool: Pool) -> None:
    """Of a node, and then of the coordinator.

    CI has the same of a node on the coordinator's Mac, and these tests:

    - `tests/contract/dialects/test_chat.py::test_stopping_ends_streams_honestly`
    - `tests/unit/node/agent/test_agent.py::test_a_stop_waits_for_a_request_sends_goodbye_and_ends_longer_ones`
    """
    cluster_pool.up()
    node = cluster_pool.join("one", "engine.scripted.step_ms=50")
    parts = begin_stream(cluster_pool, 40)
    node.popen.send_signal(signal.SIGTERM)
    assert sum(1 for chunk in parts if chunk.choices and chunk.choices[0].delta.content) >= 38
    assert node.popen.wait(30) == 0

    cluster_pool.join("one", "engine.scripted.step_ms=50", wait=False)
    until(lambda: cluster_pool.serves("one"), what="it serves again")
    assert cluster_pool.coordinator is not None
    parts = begin_stream(cluster_pool, 30)
    cluster_pool.coordinator.popen.send_signal(signal.SIGTERM)
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        client(cluster_pool).chat.completions.create(model="scripted-1", messages=MESSAGES)
    assert sum(1 for chunk in parts if chunk.choices and chunk.choices[0].delta.content) >= 28
    assert cluster_pool.coordinator.popen.wait(20) == 0


def begin_stream(made: Pool, tokens: int) -> Iterator[Any]:
    """Start a stream of this length; return the chunks after the first one."""
    stream = client(made).chat.completions.create(model="scripted-1", messages=MESSAGES, stream=True, max_tokens=tokens)
    parts = iter(stream)
    next(parts)
    return parts


def test_requests_on_the_local_node_end_before_it_is_ended(cluster_pool: Pool) -> None:
    cluster_pool.up("engine.scripted.step_ms=100", local_node=True, cluster_listen="127.0.0.2:0")
    assert cluster_pool.coordinator is not None
    until(lambda: _healthy(cluster_pool), what="healthy")
    stream = client(cluster_pool).chat.completions.create(
        model="scripted-1", messages=MESSAGES, stream=True, max_tokens=120
    )
    parts = iter(stream)
    next(parts)
    cluster_pool.coordinator.popen.send_signal(signal.SIGINT)
    assert sum(1 for chunk in parts if chunk.choices and chunk.choices[0].delta.content) >= 118
    assert cluster_pool.coordinator.popen.wait(20) == 0


def test_a_coordinator_that_waits_for_its_local_node_can_be_stopped(tmp_path: Path) -> None:
    lock = tmp_path / "state" / "node" / "lock"
    lock.parent.mkdir(parents=True)
    command = [*CLI, "up", "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "-o", "json"]
    command += ["--cluster-listen", "127.0.0.1:0", "--set", "cluster.bonjour=false", "--set", "engine.kind=scripted"]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # no node can start
        coordinator = Process(command, tmp_path / "up.err")
        try:
            until(lambda: "a node is already running" in coordinator.log.read_text(), what="the node has ended")
            assert coordinator.stop(20) == 0
            facts = coordinator.ready()
            assert facts["local_node_ready"] is False
            assert facts["api_key"], "the key of a new cluster is printed, whether or not a node starts"
        finally:
            coordinator.close()


def test_nothing_is_left_after_kill_9_of_one_process(cluster_pool: Pool) -> None:
    cluster_pool.up(local_node=True)
    assert cluster_pool.coordinator is not None
    until(lambda: _healthy(cluster_pool), what="healthy")
    for module in ("node.run", ENGINE_MODULE):
        everything = cluster_pool.coordinator.children()
        victim, engine = (next(p for p in everything if name in p.cmdline()) for name in (module, ENGINE_MODULE))
        victim.kill()
        gone([engine], 5)
        until(lambda: _healthy(cluster_pool), 20, f"healthy again after the end of {module}")
    everything = cluster_pool.coordinator.children()
    cluster_pool.coordinator.kill()
    gone(everything, 8)
    cluster_pool.up(local_node=True)
    until(lambda: _healthy(cluster_pool), 20, "healthy again")
    assert cluster_pool.coordinator.stop() == 0


def _healthy(made: Pool) -> bool:
    try:
        return made.get("/health")["status"] == "ok"
    except urllib.error.HTTPError:
        return False


def test_removed_node_is_out_at_once_and_cannot_come_back(home: Pool) -> None:
    node = home.join("removed")
    home.cli("node", "remove", "--yes", "removed")
    assert node.popen.wait(30) == 4
    assert "removed" in node.log.read_text()
    again = home.join("removed", wait=False)
    assert again.popen.wait(15) == 4
    former = identity_of(home, "removed")
    rejoined = joined_by_token(home, "removed")
    assert identity_of(home, "removed") != former
    assert rejoined.stop() == 0

    state = home.folder / "removed"
    (state / "config.toml").write_text('[node]\nmachine = "removed"\n')
    foreign = "mpj1." + "a" * 52 + home.token()[57:]
    away = home.run("join", "127.0.0.1:1", "--token-file", home.token_file("away", foreign), "--state", str(state))
    assert away.returncode == 6
    assert "a node of another cluster" in away.stderr
    home.cli("node", "remove", "--yes", "removed")
    left = home.run("leave", "--yes", "--state", str(state))
    assert left.returncode == 0, "a removed node may leave"
    assert not (state / "node" / "identity" / "identity.json").exists()


def identity_of(made: Pool, name: str) -> str:
    return json.loads((made.folder / name / "node" / "identity" / "identity.json").read_text())["node"]


def joined_by_token(made: Pool, name: str) -> Process:
    """Type the join line on a machine that already has an identity; return the node once it serves."""
    command = [
        *CLI,
        "join",
        made.facts["cluster_url"],
        "--token-file",
        made.token_file(name),
        "--state",
        str(made.folder / name),
        "--name",
        name,
        "-o",
        "json",
        "--set",
        f"node.machine={name}",
        "--set",
        "engine.kind=scripted",
    ]
    process = Process(command, made.folder / f"{name}.again.err")
    made.nodes[name] = process
    process.ready()
    until(lambda: made.serves(name), what=f"{name} ready again")
    return process


def test_leave_takes_the_node_out_for_good(home: Pool) -> None:
    node = home.join("leaver")
    done = home.run("leave", "--yes", "--state", str(home.folder / "leaver"))
    assert done.returncode == 0, done.stderr
    assert node.popen.wait(30) == 0
    until(lambda: home.node("leaver")["state"] == "left", 5, "left")
    assert not (home.folder / "leaver" / "node" / "identity" / "node.pem").exists()
    assert home.run("leave", "--yes", "--state", str(home.folder / "leaver")).returncode == 5


IMPATIENT = "import sys; from node import run; run.LEAVE_TIMEOUT_SECONDS = 0.5; sys.exit(run.main(sys.argv[1:]))"


def test_leave_fails_without_a_coordinator_and_names_the_next_step(cluster_pool: Pool) -> None:
    cluster_pool.up()
    node, coordinator = cluster_pool.join("one"), cluster_pool.coordinator
    assert coordinator is not None
    assert (node.stop(), coordinator.stop()) == (0, 0)
    folder = cluster_pool.folder / "one"
    leave = [sys.executable, "-P", "-c", IMPATIENT, "--leave", "--state", str(folder), "--set", "node.machine=one"]
    done = subprocess.run(leave, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "`cluster leave --force`" in done.stderr) == (3, True), done.stderr
    assert (folder / "node" / "identity" / "identity.json").exists()
    assert cluster_pool.run("leave", "--yes", "--force", "--state", str(folder)).returncode == 0
    assert not (folder / "node" / "identity" / "identity.json").exists()


def test_cloned_identity_is_refused(home: Pool) -> None:
    home.join("original")
    until(lambda: home.node("original")["state"] == "ready")
    (home.folder / "clone").mkdir()
    source, target = (
        home.folder / "original" / "node" / "identity",
        home.folder / "clone" / "node" / "identity",
    )
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    clone = home.join("clone", wait=False)
    assert clone.popen.wait(15) == 1
    assert "another machine" in clone.log.read_text()
    own = joined_by_token(home, "clone")
    assert identity_of(home, "clone") != identity_of(home, "original")
    assert home.node("original")["state"] == "ready"
    assert own.stop() == 0
    folder = home.folder / "clone"
    assert home.run("leave", "--yes", "--force", "--state", str(folder)).returncode == 0, (
        "a forced leave sends no message"
    )
    assert not (folder / "node" / "identity" / "identity.json").exists()
    assert home.nodes["original"].stop() == 0


def test_certificates_renew_over_a_second_link_without_ending_a_stream(cluster_pool: Pool) -> None:
    seconds = 9.0
    cluster_pool.up(f"cluster.certificate_days={seconds / 86400}")
    cluster_pool.join("one", "engine.scripted.step_ms=100")
    before = _serial(cluster_pool)
    stream = client(cluster_pool).chat.completions.create(
        model="scripted-1", messages=MESSAGES, stream=True, max_tokens=130
    )
    words = [chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert _serial(cluster_pool) != before
    assert cluster_pool.node("one")["state"] == "ready"
    assert sum(len((chunk.choices[0].delta.content or "").split()) for chunk in words) == 130


def _serial(made: Pool) -> bytes:
    return (made.folder / "one" / "node" / "identity" / "node.pem").read_bytes()


def test_approval_by_code(home: Pool) -> None:
    command = ["join", home.facts["cluster_url"], "--state", str(home.folder / "new"), "--name", "new"]
    settings = ("--set", "node.machine=new", "--set", "engine.kind=scripted")
    process = Process([*CLI, *command, "-o", "json", *settings], home.folder / "new.err")
    try:
        text = until(lambda: "code " in process.log.read_text() and process.log.read_text(), what="a code")
        code = text.partition("code ")[2][:6]
        assert home.cli("approve")["joins"][0]["name"] == "new"
        wrong = f"{(int(code) + 1) % 1_000_000:06d}"
        home.cli("approve", wrong, code=5)
        assert home.cli("approve", code)["name"] == "new"
        assert process.ready()["name"] == "new"
        until(lambda: home.node("new")["state"] == "ready", what="new ready")
    finally:
        process.close()


def test_tokens_at_the_command(single: Pool) -> None:
    token = single.cli("token", "create", "--ttl", "10m", "--uses", "2", "--name", "lab")["token"]
    listed = single.cli("token", "list")["tokens"]
    assert [entry["uses_left"] for entry in listed if entry["name"] == "lab"] == [2]
    assert token not in json.dumps(listed)
    assert token.rsplit(".", 1)[1] not in json.dumps(listed)
    lab = next(entry["id"] for entry in listed if entry["name"] == "lab")
    single.cli("token", "revoke", "--yes", lab)
    refused = single.run(
        "join",
        single.facts["cluster_url"],
        "--token-file",
        single.token_file("late", token),
        "--state",
        str(single.folder / "late"),
    )
    assert refused.returncode == 4
    assert (
        single.run(
            "join",
            "127.0.0.1:1",
            "--token-file",
            single.token_file("x", "nonsense"),
            "--state",
            str(single.folder / "x"),
        ).returncode
        == 4
    )
    pinned = "mpj1." + "a" * 52 + token[57:]
    wrong = single.run(
        "join",
        single.facts["cluster_url"],
        "--token-file",
        single.token_file("y", pinned),
        "--state",
        str(single.folder / "y"),
    )
    assert wrong.returncode == 9
    assert "an attacker is on the network" in wrong.stderr


def test_access_verbs_work_without_a_running_coordinator(cluster_pool: Pool) -> None:
    cluster_pool.up()
    assert cluster_pool.coordinator is not None
    assert cluster_pool.coordinator.stop() == 0
    made = cluster_pool.cli("key", "create", "offline", "--scope", "metrics")
    assert cluster_pool.run("nodes", "--state", str(cluster_pool.state)).returncode == 3
    cluster_pool.up()
    request = urllib.request.Request(
        cluster_pool.base + "/api/v1/status", headers={"Authorization": f"Bearer {made['key']}"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        assert json.load(response)["cluster"]["name"] == "home"


def test_a_second_coordinator_and_a_second_node_in_one_folder_are_refused(single: Pool) -> None:
    other = single.run("up", "--state", str(single.state), "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0")
    assert other.returncode == 1
    assert "in use" in other.stderr
    twin = single.run("join", "--state", str(single.folder / "one"))
    assert twin.returncode == 1
    assert "already running" in twin.stderr


def test_secrets_are_private_and_nowhere_else(single: Pool) -> None:
    token = single.token()
    client(single).chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=2)
    secrets = [single.key, single.secret, token.rsplit(".", 1)[1]]
    for file in (path for name in ("coordinator", "one") for path in (single.folder / name).rglob("*")):
        assert file.is_symlink() or file.stat().st_mode & 0o077 == 0, f"{file} can be read by others"
        if file.is_file() and file.name != "run.json":
            content = file.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), file
    for process in (single.coordinator, *single.nodes.values()):
        assert process is not None
        for each in [psutil.Process(process.pid), *process.children()]:
            assert not any(secret in " ".join(each.cmdline()) for secret in secrets)


def test_load_and_unload_end_with_the_code_that_the_help_lists(single: Pool) -> None:
    loaded = single.cli("model", "load", "scripted-1")
    assert (loaded["node"]["name"], loaded["node"]["already"]) == ("one", True)
    assert "no node serves the model" in single.cli("model", "load", "nothing", code=5)["stderr"]
    assert "is loaded on no node" in single.cli("model", "unload", "nothing", code=5)["stderr"]
    assert "no node 'nowhere'" in single.cli("model", "load", "scripted-1", "--node", "nowhere", code=5)["stderr"]
    single.cli("node", "cordon", "one")
    assert "one is cordoned" in single.cli("model", "load", "scripted-1", "--node", "one", code=6)["stderr"]
    single.cli("node", "uncordon", "one")


def test_status_env_version_models_chat(single: Pool) -> None:
    status = single.cli("status")
    assert status["nodes"]["ready"] == 1
    assert status["warnings"] == []
    assert single.cli("env")["OPENAI_BASE_URL"] == single.facts["base_url"]
    version = single.cli("version", "--cluster")
    assert version["nodes"] == {"one": version["version"]}
    (model,) = single.cli("models")["models"]
    assert [(node["name"], node["model"]) for node in model["nodes"]] == [("one", "loaded")]
    shown = single.run("models", "-o", "wide", "--state", str(single.state)).stdout
    assert re.search(r"scripted-1 on one: prefill [\d,]+ tokens/s, decode [\d,]+ tokens/s for one request", shown)
    assert len(single.cli("chat", "hello", "--max-tokens", "4")["choices"][0]["message"]["content"].split()) == 4
    spoken = single.run("chat", "hello", "--max-tokens", "4", "--state", str(single.state))
    assert len(spoken.stdout.split()) == 4
    logs = single.run("node", "logs", "one", "--state", str(single.state))
    assert "linked" in logs.stdout
    for shell in ("bash", "zsh", "fish"):
        assert "_CLUSTER_COMPLETE" in single.run("completion", shell).stdout
    single.cli("node", "cordon", "one")
    assert single.node("one")["cordoned"] is True
    with pytest.raises(urllib.error.HTTPError, match="503"):
        single.get("/health")
    single.cli("node", "uncordon", "one")
    assert single.get("/health")["status"] == "ok"


def test_a_disabled_guard_is_reported_everywhere(home: Pool) -> None:
    home.join("bold", "memory.guard=off")
    until(lambda: home.node("bold").get("guard") is False, what="reported")
    assert home.node("bold")["gate_armed"] is False
    status = home.cli("status")
    assert any("memory.guard is off" in warning for warning in status["warnings"])
    assert [danger for danger in status["dangers"] if "memory.guard is off" in danger] == status["dangers"]
    assert "OFF" in home.run("nodes", "--state", str(home.state)).stdout
    assert "memory.guard is off" in home.nodes["bold"].log.read_text()
    assert home.nodes["bold"].stop() == 0


def test_https_with_our_own_authority(cluster_pool: Pool) -> None:
    facts = cluster_pool.up("http.tls=on")
    assert facts["base_url"].startswith("https://127.0.0.1:")
    cluster_pool.join("studio")
    status = cluster_pool.cli("status")
    assert status["nodes"]["ready"] == 1, "the owner's command trusts it"
    made = cluster_pool.cli("trust-ca", "--print")
    context = ssl.create_default_context(cadata=made["pem"])
    trusting = DefaultHttpxClient(trust_env=False, timeout=60, verify=context)
    api = OpenAI(base_url=facts["base_url"], api_key=cluster_pool.key, max_retries=0, http_client=trusting)
    whole = api.chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=5)
    stream = api.chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=5, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    with pytest.raises(openai.APIConnectionError):
        client(cluster_pool).models.list()
    url = facts["base_url"].removesuffix("/v1")
    wrong = cluster_pool.run("trust-ca", url, "--fingerprint", "0" * 64)
    assert wrong.returncode == 9
    assert "do not trust it" in wrong.stderr
    assert facts["trust"] == f"cluster trust-ca {url} --fingerprint {made['fingerprint']}"
    told = cluster_pool.run("env", "--state", str(cluster_pool.state)).stdout
    assert f"export ANTHROPIC_BASE_URL={url}\n" in told
    assert "`cluster trust-ca` once" in told


def test_contradicting_tls_settings_are_refused_at_start(cluster_pool: Pool) -> None:
    for pairs, said in (
        (("http.tls=off", "http.tls_cert_file=/x.pem"), "leave one of them out"),
        (("http.tls=maybe",), "http.tls"),
    ):
        arguments = [part for pair in pairs for part in ("--set", pair)]
        refused = cluster_pool.run(
            "up",
            "--listen",
            "127.0.0.1:0",
            "--cluster-listen",
            "127.0.0.1:0",
            "--no-local-node",
            "--state",
            str(cluster_pool.state),
            *arguments,
        )
        assert refused.returncode in (1, 2)
        assert said in refused.stderr


def test_a_request_is_explained_and_its_decision_taken_again(pair: Pool) -> None:
    answer = client(pair).chat.completions.with_raw_response.create(
        model="scripted-1", messages=MESSAGES, max_tokens=5, extra_headers={"x-request-id": "why-there"}
    )
    told = pair.cli("explain", "why-there")
    (story,) = told["requests"]
    assert [step["what"] for step in story["steps"]] == ["sent", "first token"]
    assert story["steps"][0]["node"] == answer.headers["x-macpool-node"]
    milliseconds = [1000 * step["at"] for step in story["steps"]]
    assert any(abs(one - round(one)) > 0.01 for one in milliseconds), "finer than the loop's clock"
    (decision,) = told["decisions"]
    assert {one["name"] for one in decision["candidates"]} == {"studio", "macbook"}
    shown = pair.run("explain", "why-there", "--state", str(pair.state)).stdout
    assert "first token" in shown
    assert "HEADROOM" in shown
    assert "why-there" in pair.run("explain", "--state", str(pair.state)).stdout
    file = pair.folder / "decisions.jsonl"
    assert pair.run("explain", "--export", str(file), "--state", str(pair.state)).returncode == 0
    again = pair.run("replay", str(file), "--policy", "most_headroom")
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    assert "why-there" in {one["request_id"] for one in exported}
    refusals = sum(one["refused"] is not None for one in exported)
    assert f"{len(exported)} decisions, {refusals} of them refusals" in again.stdout
    file.write_text("junk\n")
    wrong = pair.run("replay", str(file), "--policy", "balanced")
    assert wrong.returncode == 2
    assert "line 1" in wrong.stderr
    assert pair.run("explain", "unknown", "--state", str(pair.state)).returncode == 5


def test_local_programs_need_no_key_if_configured(cluster_pool: Pool) -> None:
    facts = cluster_pool.up("http.anonymous=true")
    cluster_pool.join("studio")
    api = api_of(cluster_pool, "ollama")
    assert api.chat.completions.create(model="scripted-1", messages=MESSAGES, max_tokens=3).choices[0].message.content
    with pytest.raises(AuthenticationError, match="a proxy forwarded this request"):
        api.chat.completions.create(
            model="scripted-1", messages=MESSAGES, extra_headers={"x-forwarded-for": "203.0.113.9"}
        )
    assert httpx.get(facts["base_url"] + "/models", trust_env=False, verify=NO_TLS).status_code == 200
    assert (
        httpx.get(facts["base_url"].removesuffix("/v1") + "/api/v1/nodes", trust_env=False, verify=NO_TLS).status_code
        == 401
    )
    assert [row["key"] for row in cluster_pool.cli("key", "usage")["usage"]] == ["anonymous"]
    refused = cluster_pool.run(
        "up",
        "--listen",
        "0.0.0.0:0",
        "--cluster-listen",
        "127.0.0.1:0",
        "--no-local-node",
        "--set",
        "http.anonymous=true",
        "--state",
        str(cluster_pool.folder / "other"),
    )
    assert refused.returncode == 2
    assert "other machines can reach" in refused.stderr
