"""Children of orders: their input and output, and their ends with SIGTERM and with the agent."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from node.hub.child_messages import ChildEnd, ChildMessage, ChildProgress, DownloadOrder, VerifyOrder
from tests.support.processes import ROOT, environment
from wire.frames.model_files import ModelOrderCode
from wire.models.files import PIECE_BYTES, ModelManifest

CHILD = """
import threading, time
from pathlib import Path

from node.hub.child_messages import ChildProgress, VerifyOrder, build_end, perform_order


def work(order, channel):
    channel.send(ChildProgress(phase="checking", done=order.max_bytes_per_second, message=order.folder))
    if order.digests == "quick":
        threading.Thread(target=time.sleep, args=(60,)).start()
        return build_end("completed", "all done")
    while not channel.stop.wait(0.02):
        if order.digests == "busy":
            channel.send(ChildProgress(phase="serving"))
    return build_end("cancelled")


perform_order(VerifyOrder, work, lambda order: Path(order.folder, "ended").touch())
"""
Start = Callable[[bytes], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a child and writes a line to its input."""
    children = list["subprocess.Popen[bytes]"]()

    def start_child(line: bytes) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(PYTHONUNBUFFERED=""),
            cwd=ROOT,
        )
        children.append(child)
        assert child.stdin is not None
        child.stdin.write(line + b"\n")
        child.stdin.flush()
        return child

    yield start_child
    for child in children:
        child.kill()
        child.communicate()


def encode_order(folder: Path, kind: str) -> bytes:
    return msgspec.json.encode(VerifyOrder(folder=str(folder), digests=kind, max_bytes_per_second=7))


def read(child: "subprocess.Popen[bytes]") -> ChildProgress | ChildEnd:
    assert child.stdout is not None
    return msgspec.json.decode(child.stdout.readline(), type=ChildMessage)


def test_a_child_gets_its_order_and_ends_with_its_end(start: Start, tmp_path: Path):
    child = start(encode_order(tmp_path, "quick"))
    assert read(child) == ChildProgress(phase="checking", done=7, message=str(tmp_path))
    assert read(child) == ChildEnd(code=ModelOrderCode.COMPLETED, message="all done")
    assert child.wait(20) == 0, "a thread that still works ends with the process"
    assert not (tmp_path / "ended").exists()


def test_an_interrupted_download_loses_at_most_one_piece_of_the_manifest():
    order = DownloadOrder(manifest=ModelManifest("a/b", "c" * 40, ()), sources=(), hub="", digests="")
    assert order.piece_bytes * order.connections == PIECE_BYTES


@pytest.mark.parametrize("line", [b"", b"{", b"5", b'{"folder": "/"}'])
def test_an_unreadable_order_is_answered(start: Start, line: bytes):
    child = start(line)
    assert read(child) == ChildEnd(code=ModelOrderCode.INVALID, message="the order cannot be read")
    assert child.wait(20) == 2


def test_sigterm_ends_the_work_and_the_end_is_sent(start: Start, tmp_path: Path):
    child = start(encode_order(tmp_path, "slow"))
    read(child)
    child.send_signal(signal.SIGTERM)
    assert read(child) == ChildEnd(code=ModelOrderCode.CANCELLED)
    assert child.wait(20) == 0


def test_the_end_of_the_agent_ends_the_work(start: Start, tmp_path: Path):
    child = start(encode_order(tmp_path, "slow"))
    read(child)
    assert child.stdin is not None
    child.stdin.close()
    child.stdin = None
    assert child.wait(20) == 0
    assert (tmp_path / "ended").exists(), "first the child undoes what must not stay"


def test_an_agent_that_reads_no_more_ends_the_work(start: Start, tmp_path: Path):
    child = start(encode_order(tmp_path, "busy"))
    read(child)
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    assert child.wait(20) == 0
