"""Start one engine process, exchange frames and pings with it over its socket, and end it.

The child ends when the agent's end of the socket closes. No engine therefore survives the agent, even after a crash of
the agent.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import structlog

import node
from node.engine.process import crash_recorder
from node.engine.process.crash_recorder import CrashRecord
from node.engine_process.stderr_log import EngineLog
from node.engine_process.timeouts import ExitTimeouts, ExitUrgency, SupervisorTimeouts
from node.memory.sensor import Sensor, open_sensor
from node.memory.wired_leak import WiredReadings
from wire.codec import MAX_JOINED_BYTES, Splitter, WireError, encode
from wire.frames import Ping, Pong, StopEngine

EXIT_AFTER_CLOSE_SECONDS = 2.0
"""Seconds that a process has to exit after it has closed its socket. After that, the agent ends the process."""

log = structlog.get_logger("supervise")
_NO_PONG = Pong(0)


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line and environment with which an engine process is started."""

    arguments: Sequence[str]
    """Program and arguments, without those for socket and shared page."""
    environment: Mapping[str, str]
    """All environment variables of the process."""


@dataclass(slots=True, eq=False)
class EngineChild(asyncio.Protocol):
    """One engine process, and the agent's end of the socket to it. Times are monotonic seconds."""

    process: asyncio.subprocess.Process
    sensor: Sensor
    """Reader of the footprint of the process."""
    started: float
    """Time of the start."""
    page: int
    """File descriptor of the shared page in which the child records its native calls (`crash_recorder`)."""
    on_frame: Callable[[int, bytes], None]
    """Called with tag and body of each frame of the child."""
    on_fault: Callable[[str], None]
    """Called with the reason when the child violates the wire protocol."""
    wired: WiredReadings
    """Wired memory of the system before the start and during the lifetime of the child."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Event loop of the agent, stored because `asyncio.get_running_loop` costs a system call on Python 3.11."""
    splitter: Splitter = field(default_factory=lambda: Splitter(longest=MAX_JOINED_BYTES))
    """Parser of the received bytes into frames."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the child has ended or closed its socket."""
    transport: asyncio.Transport | None = None
    """Agent's end of the socket; None before the connection."""
    unsent: bytearray = field(default_factory=bytearray)
    """Encoded frames of this turn of the event loop, which are not written yet."""
    nonce: int = 0
    """Nonce of the last ping."""
    pinged: float | None = None
    """Time of the ping that is not answered yet; None without one."""
    pong: Pong = _NO_PONG
    """Last answer to a ping."""
    ponged: float = 0.0
    """Time at which `pong` arrived."""
    stop_requested: bool = False
    """Whether the child was asked to end. No more frames are sent to the child."""
    exit_task: asyncio.Task[None] | None = None
    """Task that waits for the end and sends signals; None before the child is asked to end."""
    killed_at: float = 0.0
    """Time at which SIGKILL is due while the child ends."""
    broken: bool = False
    """Whether the child has sent an invalid frame."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport to the child."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass each complete frame to `on_frame`.

        After an invalid frame, call `on_fault` once and discard all later bytes.
        """
        if self.broken:
            return
        try:
            for tag, body in self.splitter.feed(data):
                self.on_frame(tag, body)
        except WireError as error:
            self.broken = True
            self.on_fault(f"its frames cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Set `closed`, because the child has ended or closed its socket."""
        self.closed.set()

    def write(self, encoded: bytes) -> None:
        """Send an encoded frame; discard it if the socket is closed or the child was asked to end.

        Frames of one turn of the event loop are sent together, because each write costs a system call on both sides.
        """
        if self.transport is None or self.stop_requested or self.transport.is_closing():
            return
        if not self.unsent:
            self.loop.call_soon(self._flush)
        self.unsent += encoded

    def _flush(self) -> None:
        unsent, self.unsent = self.unsent, bytearray()
        if unsent and self.transport is not None and not self.transport.is_closing():
            self.transport.write(unsent)

    def count_unsent_bytes(self) -> int:
        """Return the bytes that wait in the agent because the child has not read them."""
        return len(self.unsent) + (self.transport.get_write_buffer_size() if self.transport is not None else 0)

    def ping(self, now: float) -> None:
        """Send a ping at `now`, unless an answer is pending."""
        if self.pinged is None:
            self.nonce += 1
            self.pinged = now
            self.write(encode(Ping(self.nonce)))

    def store_pong(self, pong: Pong, now: float) -> None:
        """Store a pong that arrived at `now` as the answer to the pending ping, without a comparison of the nonces."""
        self.pinged, self.pong, self.ponged = None, pong, now

    def measure_silence(self, now: float) -> float:
        """Return the seconds since the ping that is not answered yet; 0 without one."""
        return 0.0 if self.pinged is None else now - self.pinged

    def compute_call_deadline(self, factor: float) -> float:
        """Return the time at which the native call in progress will have taken `factor` times its expected duration.

        The time is in monotonic seconds, computed from the last pong; 0 if that names no call.
        """
        return self.ponged - self.pong.busy + factor * self.pong.expected if self.pong.expected else 0.0

    def end(self, urgency: ExitUrgency, timeouts: SupervisorTimeouts, cause: str) -> None:
        """Ask the process to end, and start a task that sends signals later. Do not wait for the end.

        `urgency` decides the timeouts of the signals (`SupervisorTimeouts.choose_exit_timeouts`). If the child was
        asked to end before, a new task replaces the running one only if its SIGKILL is earlier. `cause` is the reason
        in the log.
        """
        now = time.monotonic()
        busy = self.pong.busy + (now - self.ponged) if self.pong.busy else 0.0
        waits = timeouts.choose_exit_timeouts(urgency, busy, self.pong.expected)
        if self.exit_task is not None:
            if now + waits.total >= self.killed_at:
                return
            self.exit_task.cancel()
        self.killed_at = now + waits.total
        self._request_stop(waits.total)
        self.exit_task = asyncio.create_task(self._end_by_signals(waits, cause))

    def _request_stop(self, seconds: float) -> None:
        if self.transport is not None and not self.stop_requested and not self.transport.is_closing():
            self._flush()
            self.transport.write(encode(StopEngine(seconds)))
            self.transport.write_eof()
        self.stop_requested = True

    async def _end_by_signals(self, waits: ExitTimeouts, cause: str) -> None:
        """Wait for the end of the process. On timeout send SIGTERM, then SIGKILL."""
        if await self.wait_exit(waits.stop_requested):
            return
        log.warning("engine terminated", pid=self.process.pid, waited=waits.stop_requested, cause=cause)
        self._send_signal(signal.SIGTERM)
        if await self.wait_exit(waits.terminated):
            return
        log.error("engine killed", pid=self.process.pid, waited=waits.terminated, cause=cause)
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait_exit(self, seconds: float) -> bool:
        """Wait at most `seconds` for the process to end, without ending it. Return whether it has ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode is not None

    def release(self, *, hung: bool) -> CrashRecord | None:
        """Close the resources of an ended child. Return the native call in which the child died; None for no call.

        `hung` is whether the agent ended the child because the child hung.
        """
        if self.exit_task is not None:
            self.exit_task.cancel()
        self.sensor.close()
        record = crash_recorder.read_crash_record(self.page, hung=hung)
        os.close(self.page)
        return record


async def start_child(
    command: ChildCommand,
    engine_log: EngineLog,
    wired: WiredReadings,
    *,
    on_frame: Callable[[int, bytes], None],
    on_fault: Callable[[str], None],
) -> EngineChild:
    """Start an engine process and connect its socket. The caller must send settings to the child before other frames.

    `wired` has the wired memory of the system before the start. `EngineChild` describes `on_frame` and `on_fault`.
    Raise `OSError` if the shared page cannot be created, the log cannot be opened or the program cannot be started.
    After a failure or a cancellation, neither a process nor a file descriptor remains.
    """
    own_end, child_end = socket.socketpair()
    errors, page = -1, crash_recorder.create_page()
    try:
        errors = engine_log.open()
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            "--page",
            str(page),
            "--socket",
            str(child_end.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(child_end.fileno(), page),
            close_fds=True,
            start_new_session=True,
            cwd=Path(node.__file__).parents[1],
            env=command.environment,
        )
    except BaseException:
        own_end.close()
        os.close(page)
        raise
    finally:
        child_end.close()
        if errors >= 0:
            os.close(errors)
    child = EngineChild(process, open_sensor(process.pid), time.monotonic(), page, on_frame, on_fault, wired)
    own_end.setblocking(False)
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=own_end)
    except BaseException:
        own_end.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        child.release(hung=False)
        raise
    return child
