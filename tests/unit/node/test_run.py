"""Program of a node: its settings, the line that it prints once it is ready, and its exit codes."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import structlog.testing

from coordinator.tls.cluster_ca import ClusterCa
from host.node_marks import has_left
from node.agent.identity import NodeIdentity
from node.run import Announce, main
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.enrolment import opened
from tests.support.cluster.older_protocol import OldCoordinator
from tests.support.processes import environment
from wire.frames import Denied, Hello, Welcome
from wire.identity import NodeId
from wire.join_token import JoinToken, new_token

IDENTITY = NodeIdentity("c1", NodeId("n1"), "studio", "m1", Path("/nowhere"), b"", b"")


def test_node_announces_once_that_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("text", "json"):
        announce = Announce(output, IDENTITY)
        announce("mac:8081")
        announce("other:8081")
    text, facts = capsys.readouterr().out.splitlines()
    assert text == "studio is in the pool of mac:8081; Ctrl-C stops it"
    assert json.loads(facts) == {
        "schema": 1,
        "ready": True,
        "node": "n1",
        "name": "studio",
        "cluster": "c1",
        "cluster_url": "macpool://mac:8081",
    }


def test_output_without_a_reader_does_not_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(os.dup(write), "w") as closed, structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(sys, "stdout", closed)
        Announce("text", IDENTITY)("mac:8081")
        monkeypatch.undo()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), closed.fileno())  # the buffer still has the line
    os.close(write)
    assert [line["event"] for line in logs] == ["ready line not printed"]


@pytest.fixture
def mask() -> Iterator[None]:
    """Restore the signals that `main` blocks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("mask")
@pytest.mark.parametrize(
    ("words", "variables", "error"),
    [
        (["--models", "{none}"], {}, "models.folders: {none} is not a folder"),
        (["--models", "{none}", "--allow-missing-folders"], {}, "{used}: File exists"),
        (["--set", "models.folders={none}"], {"models.folders": "{own}"}, "models.folders: {none} is not a folder"),
        (["--set", "models.folders={own}"], {"models.folders": "{none}"}, "{used}: File exists"),
        ([], {"models.folders": "{none}"}, "models.folders: {none} is not a folder"),
        (
            ["--models", "{own}", "--set", "engine.kind=scripted"],
            {},
            "--models: the scripted engine serves engine.scripted.model and reads no model folders",
        ),
        (["--set", "models.huggingface_cache={own}/hub"], {}, "{used}: File exists"),
    ],
    ids=["argument", "missing folders allowed", "argument wrong", "variable wrong", "variable", "scripted", "cache"],
)
def test_arguments_come_before_the_environment(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    variables: dict[str, str],
    error: str,
) -> None:
    """The state folder cannot be used, so that a start with valid settings ends as well."""
    places = {"none": str(tmp_path / "none"), "own": str(tmp_path), "used": str(tmp_path / "node")}
    for variable in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    for name, value in variables.items():
        monkeypatch.setenv(f"MACPOOL_{name.upper().replace('.', '__')}", value.format(**places))
    (tmp_path / "node").write_text("a file in place of the folder")
    code = main(["--state", str(tmp_path), *(word.format(**places) for word in words)])
    assert capsys.readouterr().err == f"Error: {error.format(**places)}\n"
    assert code == (1 if "File exists" in error else 2)
    is_set = any("huggingface_cache" in word for word in words)
    assert os.environ["HF_HUB_CACHE"] == (str(tmp_path / "hub") if is_set else "/elsewhere")


async def run_node(state: Path, *words: str, token: JoinToken | None = None) -> tuple[int | None, str]:
    """Run a node in a process of its own, because its start configures the log. Its standard input ends.

    Return exit code and errors.
    """
    read, write = os.pipe()
    os.write(write, str(token or "").encode())
    os.close(write)
    settings = ("--set", "engine.kind=scripted", "--set", "node.machine=studio", "--token-fd", str(read))
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "node.run", "--state", str(state), *settings, *words),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        pass_fds=[read],
    )
    os.close(read)
    try:
        _, errors = await asyncio.wait_for(node.communicate(b""), 30)
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
    return node.returncode, errors.decode()


def is_member(state: Path) -> bool:
    return (state / "node" / "identity" / "identity.json").exists()


@pytest.mark.slow
async def test_exit_codes_of_a_node_that_cannot_join(tmp_path: Path) -> None:
    member = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    other = new_token(b"any authority")
    async with opened(tmp_path / "c") as coordinator:
        (wrong, wrong_text), (closed, closed_text), (elsewhere, elsewhere_text) = await asyncio.gather(
            run_node(tmp_path / "a", "--url", coordinator.address, token=other),
            run_node(tmp_path / "b", "--url", "127.0.0.1:1", token=other),
            run_node(member, token=other),
        )
    assert (wrong, "not the one that made the token" in wrong_text) == (9, True), wrong_text
    assert (closed, "127.0.0.1:1 cannot be reached" in closed_text) == (3, True), closed_text
    assert (elsewhere, "is a node of another cluster" in elsewhere_text) == (6, True), elsewhere_text
    assert [is_member(state) for state in (tmp_path / "a", tmp_path / "b", member)] == [False, False, True]


@pytest.mark.slow
async def test_a_node_leaves_without_a_coordinator_if_forced(tmp_path: Path) -> None:
    state = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    assert await run_node(state, "--leave", "--force") == (0, "left the cluster\n")
    assert (is_member(state), has_left(state / "node")) == (False, True)


@pytest.mark.slow
async def test_a_node_stops_at_the_end_of_its_lifeline(tmp_path: Path) -> None:
    state = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    code, errors = await run_node(state, "--lifeline")
    assert (code, "stopped" in errors) == (0, False), errors
    assert (is_member(state), has_left(state / "node")) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "welcome", "reason", "code", "stays"),
    [
        (["--leave"], False, "removed", 0, False),
        ([], False, "protocol", 8, True),
        ([], False, "removed", 4, True),
        (["token"], True, "removed", 4, True),
    ],
    ids=["leaves", "other version", "removed", "removed after its join"],
)
async def test_exit_codes_of_a_node_that_is_denied(
    tmp_path: Path, words: list[str], welcome: bool, reason: str, code: int, stays: bool
) -> None:
    authority = ClusterCa(tmp_path / "authority", time.time)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        await line.until(Hello)
        if welcome:
            line.send(Welcome(1, authority.cluster, "home", time.time(), "0", (), 0, b""))
        line.send(Denied(reason, "its reason", final=True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=authority.get_server_context())
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    state = OldCoordinator(authority, tmp_path, address).node("studio")
    token = new_token(authority.ca) if words == ["token"] else None
    try:
        found, errors = await run_node(state, *(word for word in words if word != "token"), token=token)
    finally:
        server.close()
    assert found == code, errors
    assert errors.splitlines()[-1] == ("Error: its reason" if code else "left the cluster")
    assert (is_member(state), has_left(state / "node")) == (stays, not stays)
