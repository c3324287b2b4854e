"""Frames from the agent to its engine process: order, and writes of one turn of the event loop."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

from node.engine_process.child import EngineChild
from node.engine_process.timeouts import ExitUrgency, SupervisorTimeouts
from node.memory.sensor import open_sensor
from node.memory.wired_leak import WiredReadings
from wire.codec import TAG_OF, Splitter, encode
from wire.frames import Cancel, StopEngine


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
