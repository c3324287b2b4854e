"""Commands typed as by a user, on Macs that are nodes already: up, join, leave, chat."""

import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import thin_cases
from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import MLX
from tests.support.processes import CLI, ROOT, Pool, Process, environment, pool, until

pytestmark = pytest.mark.slow


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path) as one:
        yield one


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    """Start a coordinator for tests that leave it running, without a running node."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as one:
        one.up()
        yield one


def identity(state: Path) -> Path:
    return state / "node" / "identity" / "identity.json"


# leave


def test_the_coordinators_own_mac_stays_left_until_a_person_wants_it_back(made: Pool):
    made.up(local_node=True)
    until(lambda: identity(made.state).exists(), what="joined")
    (node,) = made.nodes_now()
    done = made.run("leave", "--yes", "--state", str(made.state))
    assert done.returncode == 0, done.stderr
    until(lambda: made.nodes_now()[0]["state"] == "left", what="left")
    assert made.coordinator is not None
    log = made.state / "logs" / "coordinator.log"
    until(lambda: "local node left" in log.read_text(), what="no further start of the node")
    assert [one["state"] for one in made.nodes_now()] == ["left"]
    assert not identity(made.state).exists()
    for _ in range(2):
        assert made.coordinator.stop() == 0
        facts = made.up(local_node=True)
        assert facts["local_node_ready"] is None
        assert all(one["state"] == "left" for one in made.nodes_now())
        assert not identity(made.state).exists()
    assert made.coordinator.stop() == 0
    command = [
        *CLI,
        "up",
        "--local-node",
        "--state",
        str(made.state),
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        "127.0.0.1:0",
        "-o",
        "json",
        "--set",
        "cluster.bonjour=false",
        "--set",
        "engine.kind=scripted",
    ]
    back = Process(command, made.folder / "back.err")
    try:
        assert back.ready()["local_node_ready"] is True
        assert json.loads(identity(made.state).read_text())["node"] != node["id"]
    finally:
        back.close()


# up


def test_up_on_a_node_of_another_cluster_is_refused_with_the_ways_out(running: Pool, tmp_path: Path):
    running.join("studio").stop()
    state = running.folder / "studio"
    listen = ["--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0", "--set", "cluster.bonjour=false"]
    before = sorted(file.name for file in state.iterdir())
    done = running.run("up", "--state", str(state), *listen)
    assert done.returncode == 6
    for way in ("a node of another cluster at 127.0.0.1:", "`cluster join`", "`cluster leave`", "--state"):
        assert way in done.stderr
    assert sorted(file.name for file in state.iterdir()) == before
    told = Process([*CLI, "up", "--state", str(state), *listen, "--no-local-node", "-o", "json"], tmp_path / "told.err")
    try:
        assert told.ready()["local_node_ready"] is None
    finally:
        told.close()
    done = running.run("up", "--state", str(state), *listen)
    assert (done.returncode, "a node of another cluster" in done.stderr) == (6, True), done.stderr


IMPOSSIBLE = (
    (["--models", "/no/such/folder"], "--models: /no/such/folder is not a folder"),
    (["--set", "http.tls_cert_file=/x"], "/x"),
    (["--set", "models.folders=/no/such/folder"], "models.folders (--set): /no/such/folder is not a folder"),
    (["--models", "~unknown-user/models"], "--models: ~unknown-user/models is not a folder"),
    (["--set", "models.folders=~unknown-user/models"], "~unknown-user/models is not a folder"),
    (["--set", "memory.cap=lots"], "is not a size"),
    (["--set", "router.queue_timeout_seconds=soon"], "router.queue_timeout_seconds"),
    (["--set", "alerts.webhook_url=here"], "alerts.webhook_url"),
    (["--set", "http.tls_key_file=/x"], "http.tls_cert_file"),
    (["--lan", "--set", "http.anonymous=true"], "http.anonymous"),
)


@pytest.mark.parametrize(("arguments", "words"), thin_cases(IMPOSSIBLE, 6, kept=2))
def test_a_start_that_cannot_work_creates_nothing(tmp_path: Path, arguments: list[str], words: str):
    listen = [] if "--lan" in arguments else ["--listen", "127.0.0.1:0"]
    command = [*CLI, "up", "--state", str(tmp_path / "s"), *listen, "--cluster-listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=60)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "s").exists()


def test_a_taken_port_creates_nothing(running: Pool, tmp_path: Path):
    port = running.base.rpartition(":")[2]
    twice = running.run("up", "--state", str(running.state), "--listen", f"127.0.0.1:{port}")
    assert (twice.returncode, "is in use by process" in twice.stderr) == (1, True), twice.stderr
    done = running.run(
        "up",
        "--state",
        str(tmp_path / "s"),
        "--listen",
        f"127.0.0.1:{port}",
        "--cluster-listen",
        "127.0.0.1:0",
        "--set",
        "cluster.bonjour=false",
    )
    assert (done.returncode, f"cannot listen on 127.0.0.1:{port}" in done.stderr) == (1, True), done.stderr
    assert f"-iTCP:{port}" in done.stderr
    assert "set --listen to another port" in done.stderr
    assert not (tmp_path / "s" / "cluster.db").exists()


def test_a_cluster_without_its_authority_gets_no_new_one(made: Pool):
    """A new authority would refuse all nodes, for example after a copy of the state folder without `authority`."""
    made.up()
    assert made.coordinator is not None
    made.coordinator.close()
    authority = made.state / "authority" / "authority.pem"
    authority.unlink()
    command = [*CLI, "up", "--state", str(made.state), "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"]
    command += ["--no-local-node", "--set", "cluster.bonjour=false"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=60)
    assert (done.returncode, "restore it from a backup" in done.stderr) == (1, True), done.stderr
    assert not authority.exists()


def test_a_start_that_fails_after_the_cluster_was_created_leaves_the_first_key_to_the_next_one(made: Pool):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*CLI, "up", "--state", str(made.state), "--listen", "127.0.0.1:0", "--cluster-listen", address]
        command += ["--no-local-node", "--set", "cluster.bonjour=false"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=60)
    assert (done.returncode, "Address already in use" in done.stderr) == (1, True), done.stderr
    assert (made.state / "cluster.db").exists()
    assert made.up()["api_key"].startswith("mp_")


# a Mac that is a node


def test_commands_on_a_joined_mac_use_its_certificate_or_name_the_coordinator(made: Pool):
    made.up()
    made.join("studio")
    state = ["--state", str(made.folder / "studio")]
    for verb in ("nodes", "top", "status"):
        done = made.run(verb, *state)
        assert (done.returncode, "studio" in done.stdout or "1 ready" in done.stdout) == (0, True), done.stderr
    assert "scripted-1" in made.run("models", *state).stdout
    assert made.run("model", "show", "scripted-1", *state).returncode == 0
    verbs = (["chat", "hello"], ["key", "list"], ["node", "show", "studio"], ["events"], ["place", "scripted-1"])
    for words in thin_cases(verbs, 3, kept=2):
        done = made.run(*words, *state)
        assert done.returncode in (3, 5), done.stdout
        assert "its coordinator runs on 127.0.0.1" in done.stderr, done.stderr
        assert "`cluster login https://127.0.0.1:8080`" in done.stderr
        assert "cluster up`" not in done.stderr.replace("`endpoint` of `cluster up`", "")
    assert made.serves("studio")
    assert made.coordinator is not None
    assert made.coordinator.stop() == 0
    gone = made.run("nodes", *state)
    assert (gone.returncode, "cannot be reached" in gone.stderr) == (3, True), gone.stderr


# ready means that the engine can answer


def test_ready_means_that_the_first_request_is_answered(made: Pool):
    made.up(*MLX, local_node=True)
    assert made.facts["local_node_ready"] is True
    said = made.run("chat", "hello", "--wait", "0", "--max-tokens", "4", "--state", str(made.state))
    assert (said.returncode, said.stdout.strip() != "") == (0, True), said.stderr


def test_a_node_starts_without_an_external_disk_and_finds_its_models_later(made: Pool, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ("--allow-missing-folders", "--models", str(first))
    made.up(*MLX, f"models.folders={second}", local_node=True, flags=flags)
    assert made.facts["local_node_ready"] is True
    assert [model["name"] for model in made.get("/api/v1/models")["models"]] == [EMBEDDED.name]
    shutil.copytree(EMBEDDED, first / "one")
    shutil.copytree(EMBEDDED, second / "two")
    (node,) = made.nodes_now()
    load = ("model", "load", "one", "--node", node["name"], "--state", str(made.state))
    until(lambda: made.run(*load).returncode == 0, 30, "a new scan of the folders")
    assert {model["name"] for model in made.get("/api/v1/models")["models"]} == {"one", "two"}


def test_a_chat_waits_for_a_node_that_starts(made: Pool):
    made.up()
    late = made.run("chat", "hello", "--wait", "1", "--state", str(made.state))
    assert (late.returncode, "no node serves a model" in late.stderr) == (6, True), late.stderr
    command = [*CLI, "chat", "hello", "--max-tokens", "4", "--state", str(made.state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT) as chat:
        made.join("one")
        told, _ = chat.communicate(timeout=30)
    assert (chat.returncode, len(told.split())) == (0, 4)


# Ctrl-C


@pytest.mark.parametrize("verb", ["up", "join"])
def test_ctrl_c_prints_only_stopped(running: Pool, tmp_path: Path, verb: str):
    if verb == "join":
        command = [
            *CLI,
            "join",
            running.facts["cluster_url"],
            "--token-file",
            running.token_file("stopped"),
            "--state",
            str(tmp_path / "one"),
            "--set",
            "engine.kind=scripted",
            "--set",
            "node.machine=stopped",
        ]
        awaited = "Ctrl-C stops it"
    else:
        command = [
            *CLI,
            "up",
            "--state",
            str(tmp_path / "two"),
            "--listen",
            "127.0.0.1:0",
            "--cluster-listen",
            "127.0.0.1:0",
            "--set",
            "engine.kind=scripted",
            "--set",
            "cluster.bonjour=false",
        ]
        awaited = "Ctrl-C stops it"
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    with out.open("wb") as first, err.open("wb") as second:
        process = subprocess.Popen(command, stdout=first, stderr=second, env=environment(), cwd=ROOT)
    try:
        until(lambda: awaited in out.read_text(), 30, awaited)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert err.read_text().splitlines()[-1] == "stopped"
    assert not re.search(r"warning|\d{4}-\d\d-\d\dT", err.read_text()), err.read_text()
