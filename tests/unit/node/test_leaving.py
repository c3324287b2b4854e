"""Complete node process that leaves the cluster: by the signal of `cluster leave`, or started with `--leave`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from host.node_marks import has_left
from node.run import LEAVE_TIMEOUT_SECONDS
from tests.support.cluster.older_protocol import OldCoordinator
from tests.support.processes import environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def _blocks_the_signal(thread: Path) -> bool:
    """Return whether a thread (/proc/PID/task/ID) blocks SIGUSR1."""
    fields = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
    return bool(int(fields["SigBlk"], 16) >> (signal.SIGUSR1 - 1) & 1)


def test_a_node_that_gets_the_signal_to_leave_during_its_start_leaves(tmp_path: Path) -> None:
    state = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    identity, lock = state / "node" / "identity" / "identity.json", state / "node" / "lock"
    config = state / "config.toml"
    os.mkfifo(config)
    read, write = os.pipe()
    command = [sys.executable, "-P", "-m", "node.run", "--state", str(state), "--token-fd", str(read)]
    settings = ["--set", "engine.kind=scripted", "--set", "node.machine=studio"]
    with subprocess.Popen(
        [*command, *settings], env=environment(), pass_fds=[read], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as node:
        try:
            os.close(read)
            with config.open("w"):  # a thread of the node reads it now
                threads = Path(f"/proc/{node.pid}/task")  # on Linux
                assert not threads.exists() or all(map(_blocks_the_signal, threads.iterdir()))
            until(lambda: lock.exists() and lock.read_text(), what="the process id in the lock")
            assert identity.exists()
            node.send_signal(signal.SIGUSR1)
            os.close(write)  # the node waits for a token until here
            _, errors = node.communicate(timeout=30)
        except BaseException:
            node.kill()
            raise
    assert node.returncode == 0, errors
    assert errors.endswith("left the cluster\n")
    assert not identity.exists()
    assert has_left(state / "node"), "the service of this node does not start it again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_leave_without_a_coordinator_can_be_interrupted_and_keeps_the_identity(tmp_path: Path, number: int) -> None:
    state = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    log = state / "logs" / "node.log"
    command = [sys.executable, "-P", "-m", "node.run", "--state", str(state), "--leave", "--set", "node.machine=studio"]
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as node:
        try:
            until(lambda: log.exists() and "127.0.0.1:1" in log.read_text(), what="an attempt to connect in the log")
            began = time.monotonic()
            node.send_signal(number)
            _, errors = node.communicate(timeout=30)
        except BaseException:
            node.kill()
            raise
    assert node.returncode == 130, errors
    assert time.monotonic() - began < LEAVE_TIMEOUT_SECONDS / 2
    assert "stopped before the coordinator was reached: run `cluster leave --force`" in errors
    assert (state / "node" / "identity" / "identity.json").exists()
