"""The engine process: `python -m node.engine.process.main --socket FD`, started by node/supervise and by nobody else.

Threads: the main one reads the socket, answers pings, tokenizes short prompts and watches for the socket's end; one
writes; one owns the engine; one tokenizes prompts, one long texts; one waits for SIGTERM, because Python runs no signal
handler while the main thread is in native code. The settings come first over the socket (`u32 length | JSON`), so they
are in no command line; then frames as on the link.

The life line is the socket: at its end, because the agent crashed or was killed, this process ends (macOS has no signal
for a parent's death). It ends in order, as it does on a `Stop` and on SIGTERM, because a process that is cut down with
a large wired model can leave that memory wired until the Mac restarts (docs/decisions/0018): no native call begins, the
one in flight returns, the engine gives its memory back, os._exit. At rest that takes no time. It is bounded: at the end
of the socket and on SIGTERM by LEAVE_SECONDS, on a `Stop` by what it says; then os._exit whatever the other threads are
doing. A thread that fails ends the process too: half an engine is worse than none, and the agent starts a new one.
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
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from host.log_setup import log_to_stderr
from node.engine.process.crash_recorder import Recorder
from node.engine.process.interface import Engine, UnknownKindError, builder
from node.engine.process.loop import Loop
from node.settings import NodeSettings
from wire.codec import LONGEST_JOINED, Splitter, WireError, decode, encode
from wire.frames import Frame, Ping, Pong, Stop

READ_AT_ONCE = 256 * 1024
MOST_UNSENT = 64 * 1024 * 1024
"""Bytes that may wait for an agent that does not read; more, and there is no agent worth waiting for."""
LONGEST_SETTINGS = 1024 * 1024
LEAVE_SECONDS = 5.0
"""For a native call in flight to return and for the memory to be given back. A server with 373 GB of wired weights took
up to 4.1 s to give them back (oMLX#2184)."""
EXIT_SETTINGS = 78
EXIT_FAILED = 70
"""sysexits.h: EX_CONFIG, EX_SOFTWARE."""

log = structlog.get_logger("engine")


class Writer:
    """The socket's writing side: any thread hands in frames and never waits, one thread sends them in order.
    `on_stuck()` is called once too many bytes wait for an agent that does not read."""

    def __init__(self, line: socket.socket, on_stuck: Callable[[], None]) -> None:
        self._line = line
        self._on_stuck = on_stuck
        self._unsent: deque[bytes] = deque()
        self._size = 0
        self._wake = threading.Condition()

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        encoded = encode(frame)
        with self._wake:
            self._unsent.append(encoded)
            self._size += len(encoded)
            self._wake.notify()
        if self._size > MOST_UNSENT:
            log.error("unsent", bytes=self._size)
            self._on_stuck()

    def run(self) -> None:
        """Send whatever is queued until the socket is closed."""
        while True:
            with self._wake:
                while not self._unsent:
                    self._wake.wait()
                batch = b"".join(self._unsent)
                self._unsent.clear()
            try:
                self._line.sendall(batch)
            except OSError:
                return
            with self._wake:
                self._size -= len(batch)


def read_settings(line: socket.socket) -> NodeSettings:
    """Read the settings that come before all frames. EOFError when the agent is gone, ValueError for nonsense."""
    length = int.from_bytes(_exactly(line, 4), "big")
    if length > LONGEST_SETTINGS:
        raise ValueError(f"settings of {length} bytes")
    return msgspec.json.decode(_exactly(line, length), type=NodeSettings)


def settings_message(settings: NodeSettings) -> bytes:
    """Give what the agent writes first."""
    body = msgspec.json.encode(settings)
    return len(body).to_bytes(4, "big") + body


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = line.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class Ending:
    """The one way out of this process, for every thread. Only the inference thread gives the memory back."""

    def __init__(self, engine: Engine, loop: Loop) -> None:
        self._engine = engine
        self._loop = loop
        self._code = 0

    def ask(self, code: int = 0) -> None:
        """Stop the loop, so that the inference thread ends the process with this code."""
        self._code = self._code or code
        self._loop.stop()

    def within(self, seconds: float, code: int = 0) -> NoReturn:
        """Ask, and end the process after so many seconds whatever the inference thread does. Not to be called there."""
        self.ask(code)
        threading.Event().wait(seconds)
        os._exit(self._code)

    def infer(self) -> NoReturn:
        """Run the engine until stopped, give its memory back, and end the process."""
        try:
            self._loop.run()
        except BaseException:
            log.exception("thread")
            self._code = EXIT_FAILED
        try:
            self._engine.close()
        except Exception:
            log.exception("close")
        sys.stderr.flush()
        os._exit(self._code)

    def guarded(self, work: Callable[[], object]) -> Callable[[], NoReturn]:
        """Return `work` for a thread whose end is the end of the process; a failure is told on stderr."""

        def run() -> NoReturn:
            try:
                work()
            except BaseException:
                log.exception("thread")
                self.within(LEAVE_SECONDS, EXIT_FAILED)
            self.within(LEAVE_SECONDS)

        return run


def read_frames(line: socket.socket, engine: Engine, loop: Loop, writer: Writer) -> float:
    """Prepare every frame for the loop and answer pings, until a `Stop` or the socket's end. Return the seconds that
    this process has left then."""
    splitter = Splitter(longest=LONGEST_JOINED)
    while data := line.recv(READ_AT_ONCE):
        for tag, body in splitter.feed(data):
            frame = decode(tag, body)
            if isinstance(frame, Stop):
                return frame.seconds
            if isinstance(frame, Ping):
                writer.send(Pong(frame.nonce, *loop.busy(time.monotonic())))
            work = engine.prepare(frame)
            if work is not None:
                loop.put(work)
    return LEAVE_SECONDS


def serve(line: socket.socket, recorder: Recorder, terminations: int) -> int:
    """Serve one agent over one socket, for as long as the process lives; return an exit code where it cannot begin. A
    byte from the descriptor `terminations` ends it, too."""
    try:
        settings = read_settings(line)
        engine = builder(settings.engine.kind)(settings, recorder)
    except EOFError:
        return 0
    except (ValueError, UnknownKindError) as error:
        log.error("settings", error=str(error))  # noqa: TRY400  the sentence is for a person
        return EXIT_SETTINGS
    writer = Writer(line, lambda: ending.ask(EXIT_FAILED))
    loop = Loop(engine, writer.send, recorder.oldest_read)
    ending = Ending(engine, loop)

    def read() -> None:
        try:
            ending.within(read_frames(line, engine, loop, writer))
        except WireError as error:
            log.error("wire", error=str(error))  # noqa: TRY400  the sentence is for a person
            ending.ask(EXIT_FAILED)
        except OSError:
            return  # the agent is gone, as at the end of its socket

    threading.Thread(target=ending.infer, name="inference", daemon=True).start()
    others = {
        "writer": writer.run, "prompts": loop.read, "long prompts": loop.read_long,
        "watchdog": lambda: os.read(terminations, 1),
    }  # fmt: skip
    for name, work in others.items():
        threading.Thread(target=ending.guarded(work), name=name, daemon=True).start()
    return ending.guarded(read)()


def _terminations() -> int:
    """Return a descriptor from which a byte can be read once SIGTERM has come, whatever thread the system gave it to:
    the interpreter writes it in the signal handler itself. A mask would not do, because native libraries have threads
    from before it could be set."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    return source


def main() -> None:
    """Run the engine process until its socket ends."""
    options = argparse.ArgumentParser(prog="node.engine.process.main")
    options.add_argument("--socket", type=int, required=True, help="inherited descriptor of a stream socket")
    options.add_argument("--page", type=int, help="inherited descriptor of the recorder's page")
    given = options.parse_args()
    log_to_stderr()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve(socket.socket(fileno=given.socket), Recorder(given.page), _terminations())
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
