"""Frames from the agent to its engine process: order, and writes of one turn of the event loop."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.engine_process.child import EngineChild
from node.engine_process.timeouts import ExitUrgency, SupervisorTimeouts
from node.memory.sensor import open_sensor
from node.memory.wired_leak import WiredReadings
from wire.codec import TAG_OF, Splitter, encode
from wire.frames import Cancel, Ping, Pong, StopEngine
from wire.units import MIB


async def test_frames_of_a_turn_are_sent_together_and_before_the_end(tmp_path: Path):
    own_end, engine_end = socket.socketpair()
    with engine_end:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        page = os.open(tmp_path, os.O_RDONLY)
        child = EngineChild(
            process,
            open_sensor(os.getpid()),
            time.monotonic(),
            page,
            lambda *_: None,
            lambda _: None,
            WiredReadings(None),
        )
        own_end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=own_end)
        first, second = encode(Cancel(1)), encode(Cancel(2))
        child.write(first)
        child.write(second)
        assert child.count_unsent_bytes() == len(first) + len(second)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (child.count_unsent_bytes(), engine_end.recv(4096)) == (0, first + second), "one write for both"
        child.write(first)
        child.end(ExitUrgency.GRACEFUL, SupervisorTimeouts(), "the test ends it")
        received = engine_end.recv(4096)
        tags = [tag for tag, _ in Splitter().feed(received)]
        assert tags == [TAG_OF[Cancel], TAG_OF[StopEngine]], "the end discards no frame"
        assert child.exit_task is not None
        assert child.transport is not None
        await child.exit_task
        child.transport.close()
        child.sensor.close()
        os.close(page)


class Connected:
    """A child of a test: an ended process, and the engine's end of its socket."""

    def __init__(self, child: EngineChild, engine_end: socket.socket, frames: list[int], faults: list[str]) -> None:
        self.child, self.engine_end, self.frames, self.faults = child, engine_end, frames, faults


@pytest.fixture
async def connected(tmp_path: Path) -> AsyncIterator[Connected]:
    own_end, engine_end = socket.socketpair()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    page, frames, faults = os.open(tmp_path, os.O_RDONLY), list[int](), list[str]()
    child = EngineChild(
        process,
        open_sensor(os.getpid()),
        time.monotonic(),
        page,
        lambda tag, body: frames.append(tag),
        faults.append,
        WiredReadings(None),
    )
    own_end.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=own_end)
    with engine_end:
        yield Connected(child, engine_end, frames, faults)
        assert child.transport is not None
        child.transport.close()
        child.sensor.close()
        os.close(page)


async def test_after_an_invalid_frame_a_child_is_at_fault_once_and_not_heard_any_more(connected: Connected):
    valid = encode(Cancel(1))
    connected.child.data_received(valid)
    for data in (b"\xff" * 8, valid, b"\xff" * 8):
        connected.child.data_received(data)
    assert connected.frames == [TAG_OF[Cancel]]
    (fault,) = connected.faults
    assert fault.startswith("its frames cannot be read: ")


async def test_a_ping_without_an_answer_is_not_repeated_and_measures_the_silence(connected: Connected):
    child = connected.child
    assert (child.measure_silence(100.0), child.compute_call_deadline(5.0)) == (0.0, 0.0)
    child.ping(100.0)
    child.ping(103.0)
    assert child.measure_silence(104.0) == 4.0
    child.store_pong(Pong(1, busy=2.0, expected=0.5), 105.0)
    assert child.measure_silence(106.0) == 0.0
    assert child.compute_call_deadline(5.0) == 105.0 - 2.0 + 5 * 0.5, "the call began before the answer"
    child.ping(107.0)
    child.store_pong(Pong(2), 108.0)
    assert child.compute_call_deadline(5.0) == 0.0, "no call runs"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connected.engine_end.recv(4096) == encode(Ping(1)) + encode(Ping(2))


async def test_nothing_is_sent_to_a_closed_child(connected: Connected):
    child = connected.child
    child.write(encode(Cancel(1)))
    assert child.transport is not None
    child.transport.close()
    child.write(encode(Cancel(2)))
    await asyncio.wait_for(child.closed.wait(), 30)
    assert connected.engine_end.recv(4096) == b""
    assert child.count_unsent_bytes() == 0


async def test_bytes_that_the_engine_has_not_read_are_counted_until_it_reads_them(connected: Connected):
    child, engine_end, size = connected.child, connected.engine_end, 4 * MIB
    child.write(bytes(size))
    for _ in range(3):
        await asyncio.sleep(0)
    left = child.count_unsent_bytes()
    assert 0 < left < size, "the socket has taken a part"
    child.write(bytes(100))
    assert child.count_unsent_bytes() == left + 100
    engine_end.setblocking(False)
    read = 0
    while read < size + 100:
        read += len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(engine_end, MIB), 30))
    assert (read, child.count_unsent_bytes()) == (size + 100, 0)


async def test_no_frame_follows_the_request_to_end(connected: Connected):
    child = connected.child
    child.end(ExitUrgency.GRACEFUL, SupervisorTimeouts(), "the test ends it")
    child.write(encode(Cancel(1)))
    assert child.exit_task is not None
    await child.exit_task
    assert [tag for tag, _ in Splitter().feed(connected.engine_end.recv(4096))] == [TAG_OF[StopEngine]]
    assert connected.engine_end.recv(4096) == b""
