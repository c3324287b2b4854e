"""Transfer of a token to a new Mac through a pipe or a file, never as an argument that every user could read.

Also `cluster leave` while a process holds the node's lock: success needs a deleted identity.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import coordinator.cli.commands.join as verbs
from coordinator.cli import cluster
from coordinator.client.errors import NOT_FOUND, TIMED_OUT
from coordinator.joining.join_tokens import build_join_command

TOKEN = "mpj1.pin.id.secret"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Return the arguments of the started node, and the text that its token descriptor holds."""
    found: list[tuple[list[str], str]] = []

    def execute(_: str, arguments: list[str]) -> None:
        descriptor = int(arguments[arguments.index("--token-fd") + 1])
        assert os.get_inheritable(descriptor)
        os.set_blocking(descriptor, False)
        text = os.read(descriptor, 1000)
        assert os.read(descriptor, 1000) == b"", "the other end is closed"
        found.append((arguments, text.decode()))
        os.close(descriptor)

    monkeypatch.setattr(verbs.os, "execv", execute)
    return found


def test_join_refuses_a_token_argument_and_prints_the_right_command(started: list[tuple[list[str], str]]) -> None:
    refused = CliRunner().invoke(cluster, ["join", "127.0.0.1:8081", "--token", TOKEN])
    assert refused.exit_code == 2
    assert "echo TOKEN | cluster join URL --token-file -" in " ".join(refused.output.split())
    assert TOKEN not in refused.output
    assert not started


@pytest.mark.parametrize("how", ["file", "pipe"])
def test_a_token_comes_from_a_file_or_a_pipe(how: str, tmp_path: Path, started: list[tuple[list[str], str]]) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    source = str(tmp_path / "token") if how == "file" else "-"
    CliRunner().invoke(cluster, ["join", "127.0.0.1:8081", "--token-file", source], input=f"{TOKEN}\n")
    ((arguments, read),) = started
    assert read.strip() == TOKEN
    assert not any("secret" in argument for argument in arguments)


def test_options_of_join_are_those_of_the_node(tmp_path: Path, started: list[tuple[list[str], str]]) -> None:
    line = ["join", "10.0.0.1:8081", "--token-file", "-", "--state", str(tmp_path), "--name", "studio", "--models", "a"]
    line += ["--models", "b", "--allow-missing-folders", "--set", "memory.cap=8GiB", "-o", "json"]
    CliRunner().invoke(cluster, line, input=f"{TOKEN}\n")
    ((arguments, _),) = started
    assert arguments[:4] == [sys.executable, "-P", "-m", "node.run"], "the working directory has no modules of it"
    words = arguments[arguments.index("node.run") + 1 : arguments.index("--token-fd")]
    assert words == [
        *("--state", str(tmp_path), "--output", "json", "--url", "10.0.0.1:8081", "--models", "a", "--models", "b"),
        *("--allow-missing-folders", "--set", "memory.cap=8GiB", "--set", "node.name=studio"),
    ]


def test_with_joined_only_a_machine_without_a_cluster_ends_at_once(
    tmp_path: Path, started: list[tuple[list[str], str]]
) -> None:
    words = ["join", "--state", str(tmp_path), "--joined-only"]
    done = CliRunner().invoke(cluster, words)
    assert (done.exit_code, done.stdout, started) == (0, "", [])
    assert done.stderr == f"{tmp_path} is in no cluster: there is no node to start\n"
    (tmp_path / "node" / "identity").mkdir(parents=True)
    (tmp_path / "node" / "identity" / "identity.json").write_text("{}")
    CliRunner().invoke(cluster, [*words, "--token-file", "-"], input=f"{TOKEN}\n")
    ((arguments, _),) = started
    words = arguments[arguments.index("node.run") + 1 : arguments.index("--token-fd")]
    assert words == ["--state", str(tmp_path), "--output", "text"]


def test_printed_join_command_passes_the_token_through_a_pipe() -> None:
    line = build_join_command("macpool://10.0.0.1:8081", TOKEN)
    echo, _, command = line.partition(" | ")
    assert echo == f"echo {TOKEN}"
    assert command == "cluster join macpool://10.0.0.1:8081 --token-file -"


@pytest.mark.parametrize("url", ["https://studio.local:8080", "https://studio.local:8080/v1", "http://studio.local"])
def test_join_refuses_the_http_endpoint_and_prints_the_right_command(
    url: str, started: list[tuple[list[str], str]]
) -> None:
    refused = CliRunner().invoke(cluster, ["join", url])
    assert refused.exit_code == 2
    text = " ".join(refused.output.split())
    assert "cluster join macpool://studio.local:8081 --token-file FILE" in text
    assert "`cluster token create` on the coordinator prints the complete command" in text
    assert not started


# leave


class Node:
    """State folder of a node whose lock this process holds. The signal ends the node, which leaves if `leaves`."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.leaves = True
        self.identity = state / "node" / "identity" / "identity.json"
        self.identity.parent.mkdir(parents=True)
        self.identity.write_text("{}")
        self.lock = (state / "node" / "lock").open("w+")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def write_process(self, text: str) -> None:
        self.lock.write(text)
        self.lock.flush()

    def end(self, *_: object) -> None:
        if self.leaves:
            self.identity.unlink()
        self.lock.close()

    def leave(self, *options: str) -> Result:
        return CliRunner().invoke(cluster, ["leave", "--yes", "--state", str(self.state), *options])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "state")
    before = signal.signal(signal.SIGUSR1, made.end)
    yield made
    signal.signal(signal.SIGUSR1, before)
    made.lock.close()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the arguments of each process that takes the place of the command."""
    found: list[list[str]] = []
    monkeypatch.setattr(verbs.os, "execv", lambda _, arguments: found.append(arguments[arguments.index("--state") :]))
    return found


def test_a_node_that_deletes_its_identity_has_left(node: Node, replaced: list[list[str]]) -> None:
    node.write_process(f"{os.getpid()}\n")
    done = node.leave()
    assert (done.exit_code, done.output) == (0, "left the cluster\n")
    assert not replaced


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_node_that_ends_without_leaving_is_taken_out_by_the_command(
    node: Node, replaced: list[list[str]], force: list[str]
) -> None:
    node.leaves = False
    node.write_process(f"{os.getpid()}\n")
    done = node.leave(*force)
    assert done.output == f"the node (process {os.getpid()}) ended before it left: leaving without that process\n"
    assert replaced == [["--state", str(node.state), "--leave", *force]]


def test_a_node_that_has_just_ended_is_taken_out_by_the_command(
    node: Node, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    node.write_process(f"{ended.pid}\n")
    kill = os.kill

    def kill_and_release(process: int, number: int) -> None:
        node.lock.close()
        kill(process, number)

    monkeypatch.setattr(verbs.os, "kill", kill_and_release)
    node.leave()
    assert replaced == [["--state", str(node.state), "--leave"]]


def test_a_node_that_has_not_written_its_process_id_is_asked_again(node: Node, replaced: list[list[str]]) -> None:
    done = node.leave()
    assert done.exit_code == 1
    assert f"the node in {node.state} has just started: run `cluster leave` again" in done.output
    assert node.identity.exists()
    assert not replaced


def test_a_node_that_does_not_leave_in_time_is_an_error_and_the_alarm_is_off(
    node: Node, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "LEAVE_TIMEOUT_SECONDS", 0.05)
    before, got = signal.getsignal(signal.SIGALRM), list[int]()
    signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    node.write_process(f"{os.getpid()}\n")
    done = node.leave()
    assert (done.exit_code, "did not leave within 0 s" in done.stderr) == (TIMED_OUT, True)
    assert (got, replaced, node.identity.exists()) == ([signal.SIGUSR1], [], True)
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


def test_the_alarm_of_a_node_that_has_left_is_off(node: Node, replaced: list[list[str]]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    node.write_process(f"{os.getpid()}\n")
    assert node.leave().exit_code == 0
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


def test_without_a_node_or_a_confirmation_nothing_is_done(
    node: Node, replaced: list[list[str]], tmp_path: Path
) -> None:
    node.write_process(f"{os.getpid()}\n")
    done = CliRunner().invoke(cluster, ["leave", "--state", str(node.state)])
    assert (done.exit_code, "there is no terminal to ask on, add --yes" in done.stderr) == (2, True)
    assert node.identity.exists()
    done = CliRunner().invoke(cluster, ["leave", "--yes", "--state", str(tmp_path / "other")])
    assert (done.exit_code, f"there is no node in {tmp_path / 'other'}" in done.stderr) == (NOT_FOUND, True)
    assert replaced == []
