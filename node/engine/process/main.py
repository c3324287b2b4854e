"""Engine process: `python -m node.engine.process.main --socket FD`, started only by `node.engine_process`.

The main thread, called the I/O thread, reads the socket, answers pings and tokenizes short prompts. The inference
thread owns the engine. Two prompt threads tokenize all other prompts, one of them only long texts. Another thread
writes frames for which the socket had no room. Another thread waits for SIGTERM, because Python runs no signal handler
while the main thread is in native code.

The settings come first over the socket (`u32 length | JSON`), and therefore appear in no command line. Then follow
frames, encoded as on the link (`wire.codec`).

The process shuts down gracefully on SIGTERM, on a `StopEngine`, and when its socket closes. A closed socket means that
the agent crashed or was killed, because macOS has no signal for a parent's death. If a process with a large wired model
were killed instead, its memory could stay wired until the Mac restarts (docs/decisions/0018).

In a graceful shutdown no native call begins, the running call returns, and the engine releases its memory. The process
then calls `os._exit`. The time limit is `StopEngine.seconds` on a `StopEngine`, else `EXIT_TIMEOUT_SECONDS`. At the
limit the process calls `os._exit` in any state of its threads. A thread that fails also ends the process, because the
agent can then start a new process.
"""

import argparse
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

import msgspec
import structlog

from host.log_setup import log_to_stderr
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.device_errors import describe_device_error, is_device_error
from node.engine.process.interface import Engine, EngineKindError, import_builder
from node.engine.process.loop import EngineLoop
from node.settings import NodeSettings
from wire.codec import MAX_JOINED_BYTES, Splitter, WireError, decode, encode
from wire.frames import Frame, Ping, Pong, StopEngine

READ_BYTES = 64 * 1024
"""Maximum bytes of one read from the socket. Each read allocates this many, and glibc would map a block above 128 KiB
separately."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Maximum bytes queued for an agent that does not read. Above it the process ends."""
MAX_SETTINGS_BYTES = 1024 * 1024
"""Maximum bytes of the settings that the agent sends. Above it the process exits with `EXIT_SETTINGS`."""
EXIT_TIMEOUT_SECONDS = 5.0
"""Maximum seconds until a native call in flight has returned and the memory is released. A server with 373 GB of wired
weights took up to 4.1 s to release them (oMLX#2184)."""
EXIT_SETTINGS = 78
"""Exit code for settings that cannot be used, such as an unknown engine kind (EX_CONFIG of sysexits.h)."""
EXIT_FAILED = 70
"""Exit code after a failure of a thread or of the socket (EX_SOFTWARE)."""
EXIT_DEVICE = 71
"""Exit code after a failed command buffer of the GPU (EX_OSERR)."""

log = structlog.get_logger("engine")


class FrameWriter:
    """Sender of frames to the agent, in order and without waiting, for any thread.

    A thread writes its frames itself, because the wake-up of another thread takes longer than the write. One thread
    writes the bytes for which the socket had no room.

    `connection` is the socket. `on_stuck()` is called when more than `MAX_UNSENT_BYTES` are queued for an agent that
    does not read.
    """

    def __init__(self, connection: socket.socket, on_stuck: Callable[[], None]) -> None:
        self._connection = connection
        self._on_stuck = on_stuck
        self._unsent: deque[bytes] = deque()
        self._size = 0
        self._wake = threading.Condition()

    def send(self, frames: Iterable[Frame]) -> None:
        """Write frames together, and queue the bytes for which the socket has no room. Any thread may call this.

        Call `on_stuck` if more than `MAX_UNSENT_BYTES` are queued then.
        """
        encoded = b"".join(map(encode, frames))
        with self._wake:
            rest = encoded if self._size else self._write_now(encoded)
            if not rest:
                return
            self._unsent.append(rest)
            self._size += len(rest)
            self._wake.notify()
        if self._size > MAX_UNSENT_BYTES:
            log.error("agent does not read", bytes=self._size)
            self._on_stuck()

    def _write_now(self, encoded: bytes) -> bytes:
        """Write bytes without waiting. Return the bytes for which the socket has no room. If the socket has failed,
        return all bytes; `run` then returns."""
        try:
            return encoded[self._connection.send(encoded, socket.MSG_DONTWAIT) :]
        except OSError:
            return encoded

    def run(self) -> None:
        """Send queued bytes on the calling thread. Return when the socket has failed."""
        while True:
            with self._wake:
                while not self._unsent:
                    self._wake.wait()
                batch = b"".join(self._unsent)
                self._unsent.clear()
            try:
                self._connection.sendall(batch)
            except OSError:
                return
            with self._wake:
                self._size -= len(batch)


def read_settings(connection: socket.socket) -> NodeSettings:
    """Read the settings that precede all frames (`encode_settings`), and block until they have arrived. Raise
    `EOFError` if the agent closes the socket before they are complete. Raise `ValueError` if they are invalid or longer
    than `MAX_SETTINGS_BYTES`."""
    length = int.from_bytes(_receive_exactly(connection, 4), "big")
    if length > MAX_SETTINGS_BYTES:
        raise ValueError(f"settings of {length} bytes")
    return msgspec.json.decode(_receive_exactly(connection, length), type=NodeSettings)


def encode_settings(settings: NodeSettings) -> bytes:
    """Return the message with the settings (`u32 length | JSON`), which the agent sends before all frames."""
    body = msgspec.json.encode(settings)
    return len(body).to_bytes(4, "big") + body


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class ProcessExit:
    """Graceful shutdown of this process, which any thread may request. Only the inference thread releases the engine's
    memory."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._code = 0

    def request(self, code: int = 0) -> None:
        """Stop the loop; the inference thread then ends the process. The exit code is the first `code` other than 0.
        After a failure of the engine, `run_engine` sets another exit code."""
        self._code = self._code or code
        self._loop.stop()

    def exit_within(self, seconds: float, code: int = 0) -> NoReturn:
        """Stop the loop, and end the process after at most `seconds` in any state of the other threads. Must not be
        called on the inference thread."""
        self.request(code)
        threading.Event().wait(seconds)
        os._exit(self._code)

    def run_engine(self) -> NoReturn:
        """Run the engine on the calling thread until it is stopped or fails. Then release its memory and end the
        process. After a failed command buffer, the last line of the log names it, because the agent reports that
        line."""
        lost = ""
        try:
            self._loop.run()
        except BaseException as error:
            if is_device_error(error):
                self._code, lost = EXIT_DEVICE, describe_device_error(error)
            else:
                log.exception("thread")
                self._code = EXIT_FAILED
        try:
            self._engine.close()
        except BaseException:  # also `Halted` and `DeviceLost`: no other thread ends the process after a failure
            if not lost:
                log.exception("close")
        if lost:
            with suppress(OSError):
                sys.stderr.write(f"GPU error: {lost}\n")
        _end_process(self._code)

    def guard_thread(self, work: Callable[[], object]) -> Callable[[], NoReturn]:
        """Wrap the function of a thread so that the process ends within `EXIT_TIMEOUT_SECONDS` after it returns or
        raises. An exception is logged, and the exit code is then `EXIT_FAILED`."""

        def run() -> NoReturn:
            try:
                work()
            except BaseException:
                log.exception("thread")
                self.exit_within(EXIT_TIMEOUT_SECONDS, EXIT_FAILED)
            self.exit_within(EXIT_TIMEOUT_SECONDS)

        return run


def read_frames(connection: socket.socket, engine: Engine, loop: EngineLoop, writer: FrameWriter) -> float:
    """Receive frames until a `StopEngine` or the end of the socket: prepare each for the loop, and answer pings.

    A failure of the socket counts as its end, because the agent is gone. Return the seconds that this process may still
    run. Raise `WireError` for an invalid frame. Exceptions of the engine propagate.
    """
    splitter = Splitter(longest=MAX_JOINED_BYTES)
    while data := _receive_available(connection):
        for tag, body in splitter.feed(data):
            frame = decode(tag, body)
            if isinstance(frame, StopEngine):
                return frame.seconds
            if isinstance(frame, Ping):
                writer.send((Pong(frame.nonce, *loop.measure_busy_seconds(time.monotonic())),))
            work = engine.prepare(frame)
            if work is not None:
                loop.put(work)
    return EXIT_TIMEOUT_SECONDS


def _receive_available(connection: socket.socket) -> bytes:
    try:
        return connection.recv(READ_BYTES)
    except OSError:
        return b""


def serve(connection: socket.socket, recorder: CrashRecorder, terminations: int) -> int:
    """Serve one agent over one socket for the lifetime of the process.

    Return an exit code only if the engine does not start: `EXIT_SETTINGS` if the settings are invalid or the engine
    cannot be built, 0 if the agent closes the socket before the settings are complete. Otherwise the process ends in
    this call. A byte from the file descriptor `terminations` ends the process as well.
    """
    try:
        settings = read_settings(connection)
        engine = import_builder(settings.engine.kind)(settings, recorder)
    except EOFError:
        return 0
    except (ValueError, EngineKindError) as error:
        log.error("settings", error=str(error))  # noqa: TRY400 the sentence is for a person
        return EXIT_SETTINGS
    writer = FrameWriter(connection, lambda: process_exit.request(EXIT_FAILED))
    loop = EngineLoop(engine, writer.send, recorder.find_oldest_tokenization)
    process_exit = ProcessExit(engine, loop)

    def receive_until_end() -> None:
        try:
            process_exit.exit_within(read_frames(connection, engine, loop, writer))
        except WireError as error:
            log.error("wire", error=str(error))  # noqa: TRY400 the sentence is for a person
            process_exit.request(EXIT_FAILED)

    threading.Thread(target=process_exit.run_engine, name="inference", daemon=True).start()
    others = {
        "writer": writer.run,
        "prompts": loop.tokenize_prompts,
        "long prompts": loop.tokenize_long_prompts,
        "watchdog": lambda: os.read(terminations, 1),
    }
    for name, work in others.items():
        threading.Thread(target=process_exit.guard_thread(work), name=name, daemon=True).start()
    return process_exit.guard_thread(receive_until_end)()


def _open_termination_pipe() -> int:
    """Return a file descriptor that becomes readable after SIGTERM, whichever thread receives the signal. The
    interpreter writes to it in the signal handler itself. A signal mask would not do, because native libraries start
    threads before a mask could be set."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    return source


def _end_process(code: int) -> NoReturn:
    """Write the buffered log, unless its disk is full, and end the process."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the engine process on the descriptors of the command line, without core dumps, and ignore SIGINT. This call
    ends the process (`serve`)."""
    options = argparse.ArgumentParser(prog="node.engine.process.main")
    options.add_argument("--socket", type=int, required=True, help="inherited descriptor of a stream socket")
    options.add_argument("--page", type=int, help="inherited descriptor of the recorder's page")
    given = options.parse_args()
    log_to_stderr()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve(socket.socket(fileno=given.socket), CrashRecorder(given.page), _open_termination_pipe())
    _end_process(code)


if __name__ == "__main__":
    main()
