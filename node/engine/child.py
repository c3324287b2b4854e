"""The engine process: `python -m node.engine.child --socket FD`, started by node/supervise and by nobody else.

Threads: the main one reads the socket, answers pings, puts short prompts into tokens and watches for the socket's end;
one writes; one owns the engine; one puts long prompts into tokens. The
settings come first over the socket (`u32 length | JSON`), so they are in no command line; then frames as on the link.

The life line is the socket: at its end, because the agent stopped, crashed or was killed, the reader leaves by
os._exit, whatever the other threads are doing (macOS has no signal for a parent's death). A thread that fails ends
the process too: half an engine is worse than none, and the agent starts a new one.
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

import msgspec
import structlog

from machine.journal import log_to_stderr
from node.engine.kinds import Engine, UnknownKindError, builder
from node.engine.loop import Loop
from node.engine.recorder import Recorder
from node.settings import NodeSettings
from wire.codec import LONGEST_JOINED, Splitter, WireError, decode, encode
from wire.frames import Frame, Ping, Pong

READ_AT_ONCE = 256 * 1024
MOST_UNSENT = 64 * 1024 * 1024
"""Bytes that may wait for an agent that does not read; more, and there is no agent worth waiting for."""
LONGEST_SETTINGS = 1024 * 1024
EXIT_SETTINGS = 78
EXIT_FAILED = 70
"""sysexits.h: EX_CONFIG, EX_SOFTWARE."""

log = structlog.get_logger("engine")


class Writer:
    """The socket's writing side: anybody hands in frames and never waits, one thread sends them in order."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._unsent: deque[bytes] = deque()
        self._size = 0
        self._wake = threading.Condition()

    def send(self, frame: Frame) -> None:
        """Queue a frame. Ends the process when the agent stopped reading long ago."""
        encoded = encode(frame)
        with self._wake:
            self._unsent.append(encoded)
            self._size += len(encoded)
            self._wake.notify()
        if self._size > MOST_UNSENT:
            log.error("unsent", bytes=self._size)
            os._exit(EXIT_FAILED)

    def run(self) -> None:
        """Send whatever is queued, for ever. A closed socket ends the process, as the reader would."""
        while True:
            with self._wake:
                while not self._unsent:
                    self._wake.wait()
                batch = b"".join(self._unsent)
                self._unsent.clear()
            try:
                self._line.sendall(batch)
            except OSError:
                os._exit(0)
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


def read_frames(line: socket.socket, engine: Engine, loop: Loop, writer: Writer) -> None:
    """Prepare every frame for the loop and answer pings, until the socket ends."""
    splitter = Splitter(longest=LONGEST_JOINED)
    while data := line.recv(READ_AT_ONCE):
        for tag, body in splitter.feed(data):
            frame = decode(tag, body)
            if isinstance(frame, Ping):
                writer.send(Pong(frame.nonce, *loop.busy(time.monotonic())))
            work = engine.prepare(frame)
            if work is not None:
                loop.put(work)


def _guarded(work: Callable[[], None]) -> Callable[[], None]:
    """Make a thread's failure the end of the process, told on stderr."""

    def run() -> None:
        try:
            work()
        except BaseException:
            log.exception("thread")
            os._exit(EXIT_FAILED)

    return run


def serve(line: socket.socket, recorder: Recorder) -> int:
    """Serve one agent over one socket; give the exit code."""
    try:
        settings = read_settings(line)
        engine = builder(settings.engine.kind)(settings, recorder)
    except EOFError:
        return 0
    except (ValueError, UnknownKindError) as error:
        log.error("settings", error=str(error))  # noqa: TRY400  the sentence is for a person
        return EXIT_SETTINGS
    writer = Writer(line)
    loop = Loop(engine, writer.send)
    for name, work in (("inference", loop.run), ("writer", writer.run), ("prompts", loop.read)):
        threading.Thread(target=_guarded(work), name=name, daemon=True).start()
    try:
        read_frames(line, engine, loop, writer)
    except WireError as error:
        log.error("wire", error=str(error))  # noqa: TRY400  the sentence is for a person
        return EXIT_FAILED
    except OSError:
        return 0
    return 0


def main() -> None:
    """Run the engine process until its socket ends."""
    options = argparse.ArgumentParser(prog="node.engine.child")
    options.add_argument("--socket", type=int, required=True, help="inherited descriptor of a stream socket")
    options.add_argument("--page", type=int, help="inherited descriptor of the recorder's page")
    given = options.parse_args()
    log_to_stderr()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve(socket.socket(fileno=given.socket), Recorder(given.page))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
