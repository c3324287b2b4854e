"""`cluster leave` while a process holds the node's lock: success needs a deleted identity."""

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
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the arguments of each process that takes the place of the command."""
    found: list[list[str]] = []
    monkeypatch.setattr(verbs.os, "execv", lambda _, arguments: found.append(arguments[arguments.index("--state") :]))
    return found


def test_a_node_that_deletes_its_identity_has_left(node: Node, started: list[list[str]]) -> None:
    node.write_process(f"{os.getpid()}\n")
    done = node.leave()
    assert (done.exit_code, done.output) == (0, "left the cluster\n")
    assert not started


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_node_that_ends_without_leaving_is_taken_out_by_the_command(
    node: Node, started: list[list[str]], force: list[str]
) -> None:
    node.leaves = False
    node.write_process(f"{os.getpid()}\n")
    done = node.leave(*force)
    assert done.output == f"the node (process {os.getpid()}) ended before it left: leaving without that process\n"
    assert started == [["--state", str(node.state), "--leave", *force]]


def test_a_node_that_has_just_ended_is_taken_out_by_the_command(
    node: Node, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
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
    assert started == [["--state", str(node.state), "--leave"]]


def test_a_node_that_has_not_written_its_process_id_is_asked_again(node: Node, started: list[list[str]]) -> None:
    done = node.leave()
    assert done.exit_code == 1
    assert f"the node in {node.state} has just started: run `cluster leave` again" in done.output
    assert node.identity.exists()
    assert not started


def test_a_node_that_does_not_leave_in_time_is_an_error_and_the_alarm_is_off(
    node: Node, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "LEAVE_TIMEOUT_SECONDS", 0.05)
    before, got = signal.getsignal(signal.SIGALRM), list[int]()
    signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    node.write_process(f"{os.getpid()}\n")
    done = node.leave()
    assert (done.exit_code, "did not leave within 0 s" in done.stderr) == (TIMED_OUT, True)
    assert (got, started, node.identity.exists()) == ([signal.SIGUSR1], [], True)
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


def test_the_alarm_of_a_node_that_has_left_is_off(node: Node, started: list[list[str]]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    node.write_process(f"{os.getpid()}\n")
    assert node.leave().exit_code == 0
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


def test_without_a_node_or_a_confirmation_nothing_is_done(node: Node, started: list[list[str]], tmp_path: Path) -> None:
    node.write_process(f"{os.getpid()}\n")
    done = CliRunner().invoke(cluster, ["leave", "--state", str(node.state)])
    assert (done.exit_code, "there is no terminal to ask on, add --yes" in done.stderr) == (2, True)
    assert node.identity.exists()
    done = CliRunner().invoke(cluster, ["leave", "--yes", "--state", str(tmp_path / "other")])
    assert (done.exit_code, f"there is no node in {tmp_path / 'other'}" in done.stderr) == (NOT_FOUND, True)
    assert started == []
