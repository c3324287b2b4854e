"""Start of a node: its lock, and folders that it cannot use."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from node import node_lock
from node.node_lock import NodeLock, NodeStartError, name_unusable_files
from node.run import main
from tests.support.cluster.older_protocol import OldCoordinator
from tests.support.processes import environment


@pytest.fixture(autouse=True)
def mask() -> Iterator[None]:
    """Restore the signals that `main` blocks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_second_node_in_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_lock, "LOCK_TIMEOUT_SECONDS", 0.0)
    with NodeLock(tmp_path / "node"):
        assert (tmp_path / "node" / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(NodeStartError, match=f"a node is already running in {tmp_path}/node"):
            NodeLock(tmp_path / "node").__enter__()
    with NodeLock(tmp_path / "node"):
        pass


def test_a_command_that_looks_for_a_node_does_not_prevent_the_start_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_lock, "LOCK_TIMEOUT_SECONDS", 30.0)
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        end = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        end.start()
        with NodeLock(tmp_path):
            end.join()


def test_a_relative_state_folder_is_that_of_the_command(tmp_path: Path) -> None:
    """In a process of its own, because the start of a node configures the log of its process."""
    command = [sys.executable, "-P", "-m", "node.run", "--state", "pool", "--leave"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert f"there is no node in {tmp_path / 'pool'}" in done.stderr


@pytest.mark.parametrize("folder", ["node", "logs"])
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    for variable in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(variable)
    (tmp_path / folder).write_text("a file in place of the folder")
    assert main(["--state", str(tmp_path), "--set", "engine.kind=scripted"]) == 1
    assert capsys.readouterr().err == f"Error: {tmp_path / folder}: File exists\n"


@pytest.mark.parametrize("folder", ["~no-such-user/models", "/" + "n" * 300], ids=["no home", "not readable"])
def test_a_model_folder_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    for variable in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(variable)
    assert main(["--state", str(tmp_path), "--set", f"models.folders={folder}"]) == 2
    assert capsys.readouterr().err == f"Error: models.folders: {folder} is not a folder\n"


@pytest.mark.parametrize("lost", ["state", "models"])
def test_a_disk_that_does_not_answer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    for variable in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(node_lock, "ACCESS_TIMEOUT_SECONDS", 0.05)
    returned, models, is_folder = threading.Event(), tmp_path / "models", os.path.isdir
    models.mkdir()
    if lost == "state":
        os.mkfifo(tmp_path / "config.toml")  # blocks a reader, as a lost disk does
    else:
        monkeypatch.setattr(os.path, "isdir", lambda path: returned.wait(30) and is_folder(path))
    try:
        assert main(["--state", str(tmp_path), "--models", str(models)]) == 1
        place = tmp_path if lost == "state" else models
        assert capsys.readouterr().err == f"Error: {place} does not answer: check its disk, or its network mount\n"
    finally:
        returned.set()
        if lost == "state":
            (tmp_path / "config.toml").write_text("")


def test_a_log_of_the_engine_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    state = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1").node("studio")
    log = state / "logs" / "engine.log"
    log.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "node.run", "--state", str(state), "--set", "engine.kind=scripted"]
    done = subprocess.run([*command, "--set", "node.machine=studio"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(f"Error: {log}: Is a directory\n")


def test_a_folder_of_another_user_is_named_with_the_next_step() -> None:
    with pytest.raises(NodeStartError) as refused, name_unusable_files():
        raise PermissionError(1, "Operation not permitted", "/srv/pool/node")
    assert (refused.value.code, str(refused.value)) == (
        1,
        "/srv/pool/node: Operation not permitted: run the node as the owner of that folder, or use another one with "
        "--state",
    )
