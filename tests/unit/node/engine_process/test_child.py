"""Frames from the agent to its engine process: order, and writes of one turn of the event loop."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from node.engine_process.child import ChildCommand, EngineChild, start_child
from node.engine_process.probe import EngineProbe
from node.engine_process.stderr_log import EngineLog
from node.engine_process.timeouts import ExitUrgency, SupervisorTimeouts
from node.memory.reading import HighWaterMarks
from node.memory.sensor import open_sensor
from node.memory.wired_leak import WiredReadings
from tests.support.processes import ROOT
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
    """A child of a test, and the engine's end of its socket."""

    def __init__(self, child: EngineChild, engine_end: socket.socket, frames: list[int], faults: list[str]) -> None:
        self.child, self.engine_end, self.frames, self.faults = child, engine_end, frames, faults

    def list_received(self) -> list[int]:
        """Return the tags of the frames that the engine received before its socket was closed."""
        return [tag for tag, _ in Splitter().feed(self.engine_end.recv(4096))]


Connect = Callable[..., Awaitable[Connected]]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    """Yield a function that starts a program as a child. The program must write a line once it runs."""
    made: list[Connected] = []

    async def start(*command: str) -> Connected:
        own_end, engine_end = socket.socketpair()
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
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
        made.append(Connected(child, engine_end, frames, faults))
        return made[-1]

    yield start
    for one in made:
        if one.child.process.returncode is None:
            one.child.process.kill()
        await one.child.process.wait()
        assert one.child.transport is not None
        one.child.transport.close()
        one.child.sensor.close()
        os.close(one.child.page)
        one.engine_end.close()


@pytest.fixture
async def connected(connect: Connect) -> Connected:
    """Return a child whose program has ended."""
    one = await connect("true")
    await one.child.process.wait()
    return one


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
    assert child.count_unsent_bytes() == 0
    assert child.exit_task is not None
    await child.exit_task
    assert connected.list_received() == [TAG_OF[StopEngine]]
    assert connected.engine_end.recv(4096) == b""


SHORT = SupervisorTimeouts(over=0.05)
WAITS = "echo ready; exec sleep 60"
IGNORES = "trap '' TERM; echo ready; exec sleep 60"
ENDS = "echo ready; exit 3"


@pytest.mark.parametrize(
    ("script", "code"),
    [(WAITS, -signal.SIGTERM), (IGNORES, -signal.SIGKILL), (ENDS, 3)],
    ids=["waits", "ignores SIGTERM", "ends"],
)
async def test_a_process_that_does_not_end_is_terminated_and_then_killed(connect: Connect, script: str, code: int):
    one = await connect("sh", "-c", script)
    one.child.end(ExitUrgency.OVER_CAP, SHORT, "the test ends it")
    assert one.child.exit_task is not None
    await asyncio.wait_for(one.child.exit_task, 30)
    assert await asyncio.wait_for(one.child.process.wait(), 30) == code


async def test_only_an_earlier_end_replaces_the_one_that_is_under_way(connect: Connect):
    one = await connect("sh", "-c", WAITS)
    child, long = one.child, SupervisorTimeouts(over=30.0)
    child.end(ExitUrgency.OVER_CAP, long, "first")
    first = child.exit_task
    child.end(ExitUrgency.OVER_CAP, SupervisorTimeouts(over=60.0), "later")
    assert child.exit_task is first
    child.end(ExitUrgency.OVER_CAP, SHORT, "earlier")
    assert child.exit_task is not first
    assert await asyncio.wait_for(child.process.wait(), 20) == -signal.SIGTERM
    assert one.list_received() == [TAG_OF[StopEngine]], "the engine is asked once"


async def test_a_healthy_child_may_end_the_call_that_it_is_in(connect: Connect):
    child, timeouts = (await connect("sh", "-c", WAITS)).child, SupervisorTimeouts()
    now = time.monotonic()
    child.store_pong(Pong(1, busy=2.0, expected=10.0), now - 1.0)
    child.end(ExitUrgency.GRACEFUL, timeouts, "the test ends it")
    wanted = timeouts.choose_exit_timeouts(ExitUrgency.GRACEFUL, 3.0, 10.0).total
    assert child.killed_at - now == pytest.approx(wanted, abs=0.5)
    assert wanted > timeouts.choose_exit_timeouts(ExitUrgency.GRACEFUL, 0.0, 0.0).total + 5.0
    assert child.exit_task is not None
    child.exit_task.cancel()


async def start_and_release(folder: Path, *command: str) -> EngineChild:
    """Start a program as an engine, await its end and release it."""
    child = await start_child(
        ChildCommand(command, dict(os.environ)),
        EngineLog(folder / "engine.log"),
        WiredReadings(None),
        on_frame=lambda *_: None,
        on_fault=lambda _: None,
    )
    child.end(ExitUrgency.GRACEFUL, SupervisorTimeouts(), "the test ends it")
    await asyncio.wait_for(child.closed.wait(), 30)
    assert await child.wait_exit(30)
    assert child.release(hung=False) is None, "the engine was in no native call"
    assert child.exit_task is not None
    await asyncio.wait([child.exit_task])
    return child


async def test_a_released_child_holds_no_descriptor_and_its_output_is_in_the_log(tmp_path: Path):
    descriptors: list[list[str]] = []
    for _ in range(2):
        child = await start_and_release(tmp_path, "sh", "-c", "pwd; echo trouble >&2; exit 3")
        assert child.process.returncode == 3
        await asyncio.sleep(0)
        descriptors.append(sorted(os.listdir("/dev/fd")))
    assert descriptors[0] == descriptors[1]
    assert (tmp_path / "engine.log").read_text() == f"{ROOT}\ntrouble\n" * 2, "the program runs where its modules are"


async def test_a_child_has_a_session_of_its_own(tmp_path: Path):
    """Ctrl-C in the terminal of the node does not reach it: the agent ends it in order."""
    program = "import os; print(os.getpid() == os.getpgid(0) == os.getsid(0))"
    await start_and_release(tmp_path, sys.executable, "-c", program)
    assert (tmp_path / "engine.log").read_text() == "True\n"


async def test_a_program_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path):
    await start_and_release(tmp_path, "true")
    before = sorted(os.listdir("/dev/fd"))
    with pytest.raises(FileNotFoundError):
        await start_and_release(tmp_path, str(tmp_path / "gone"))
    assert sorted(os.listdir("/dev/fd")) == before
    (tmp_path / "engine.log").unlink()
    (tmp_path / "engine.log").mkdir()
    with pytest.raises(OSError, match=r"engine\.log"):
        await start_and_release(tmp_path, "true")
    assert sorted(os.listdir("/dev/fd")) == before, "also if its log cannot be opened"


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
async def test_a_child_whose_socket_cannot_be_opened_is_ended_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    kept: list[socket.socket] = []

    async def fail(create: object, *, sock: socket.socket) -> None:
        kept.append(sock.dup())
        raise error

    await start_and_release(tmp_path, "true")
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", fail)
    with pytest.raises(error):
        await start_and_release(tmp_path, "sleep", "60")
    with kept[0] as own_end:
        own_end.setblocking(False)
        assert own_end.recv(1) == b"", "no process has the other end"
    await asyncio.sleep(0)
    assert len(os.listdir("/dev/fd")) == before


async def test_without_a_child_nothing_is_known_and_nothing_is_sent(connected: Connected):
    children: list[EngineChild] = []
    probe = EngineProbe(lambda: children[0] if children else None, SupervisorTimeouts(turn_factor=4.0))
    probe.ping()
    reading = probe.read_footprint()
    assert (reading.phys, reading.source, probe.call_until) == (None, "no engine", 0.0)
    assert probe.read_high_water_marks() == HighWaterMarks()
    children.append(connected.child)
    for _ in range(2):
        probe.ping()
    connected.child.store_pong(Pong(1, busy=2.0, expected=0.5), 50.0)
    assert probe.call_until == 50.0 - 2.0 + 4.0 * 0.5
    assert probe.read_footprint().phys
    assert probe.read_high_water_marks().lifetime
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connected.engine_end.recv(4096) == encode(Ping(1))
