"""The engine process over a real socketpair, without its supervisor."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from node.engine.process import main
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.interface import import_builder
from node.engine.process.loop import EngineLoop
from node.engine.process.main import (
    EXIT_FAILED,
    EXIT_SETTINGS,
    EXIT_TIMEOUT_SECONDS,
    FrameWriter,
    encode_settings,
    read_frames,
)
from node.settings import EngineSettings, NodeSettings, ScriptedSettings
from wire.codec import MAX_JOINED_BYTES, Splitter, decode, encode
from wire.frames import (
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    MemoryLimits,
    Message,
    Ping,
    Pong,
)
from wire.units import GIB

pytestmark = pytest.mark.slow
LIMITS = MemoryLimits(96 * GIB, 96 * GIB, 2 * GIB, "metal")
WAIT = 15.0
F = TypeVar("F", bound=Frame)


class Process:
    """The child and the agent's end of its socket."""

    def __init__(self, first: bytes, errors: Path) -> None:
        self.line, theirs = socket.socketpair()
        self.line.settimeout(WAIT)
        self.errors = errors
        with errors.open("wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "node.engine.process.main", "--socket", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=file,
            )
        theirs.close()
        self.line.sendall(first)
        self._frames = self._read()

    def _read(self) -> Iterator[Frame]:
        splitter = Splitter(longest=MAX_JOINED_BYTES)
        while data := self.line.recv(65536):
            for tag, body in splitter.feed(data):
                yield decode(tag, body)

    def send(self, *frames: Frame) -> None:
        self.line.sendall(b"".join(map(encode, frames)))

    def until(self, kind: type[F], wanted: Callable[[F], bool] = lambda frame: True) -> F:
        return next(frame for frame in self._frames if isinstance(frame, kind) and wanted(frame))

    def exit_code(self) -> int:
        return self.child.wait(WAIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(first: bytes | None = None, **scripted: object) -> Process:
        engine = EngineSettings(kind="scripted", scripted=ScriptedSettings(**scripted))  # type: ignore[arg-type]
        settings = NodeSettings(engine=engine)
        started.append(Process(encode_settings(settings) if first is None else first, tmp_path / "errors"))
        return started[-1]

    yield make
    for process in started:
        process.line.close()
        with suppress(ProcessLookupError):
            process.child.kill()
        process.child.wait(WAIT)


class Writing:
    """A writer on a socket with little room, and the agent's end."""

    def __init__(self) -> None:
        ours, self.line = socket.socketpair()
        self.line.settimeout(WAIT)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.ours = ours
        self.stuck: list[None] = []
        self.writer = FrameWriter(ours, lambda: self.stuck.append(None))
        self.splitter = Splitter(longest=MAX_JOINED_BYTES)

    def read(self, count: int) -> list[Frame]:
        """Read until `count` frames have arrived."""
        frames: list[Frame] = []
        while len(frames) < count:
            frames += [decode(tag, body) for tag, body in self.splitter.feed(self.line.recv(65536))]
        return frames


@pytest.fixture
def writing() -> Iterator[Writing]:
    made = Writing()
    yield made
    made.ours.close()
    made.line.close()


LONG = Failed(1, "engine_error", "x" * 60_000)
"""A frame that no socket of `Writing` has room for."""


def test_frames_are_written_by_the_thread_that_sends_them(writing: Writing):
    writing.writer.send((Pong(1), Pong(2)))
    assert writing.read(2) == [Pong(1), Pong(2)]


def test_frames_behind_a_frame_without_room_are_sent_after_it(writing: Writing):
    writing.writer.send((LONG,))
    begun = writing.line.recv(65536)  # the socket has room again
    writing.writer.send((Pong(1),))
    assert not list(writing.splitter.feed(begun))
    threading.Thread(target=writing.writer.run, daemon=True).start()
    assert writing.read(2) == [LONG, Pong(1)]


def test_an_agent_that_does_not_read_is_noticed(writing: Writing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(main, "MAX_UNSENT_BYTES", 100_000)
    writing.writer.send((LONG,))
    assert not writing.stuck
    writing.writer.send((LONG,))
    assert writing.stuck


def generate(number: int, content: str = "hi", tokens: int = 16) -> Generate:
    return Generate(
        number, number, "r", "scripted-1", (Message("user", content),), GenerationParams(max_tokens=tokens), 0
    )


def test_it_serves_a_request_and_answers_pings(start: Callable[..., Process]):
    process = start(step_ms=5)
    process.send(LIMITS, generate(1), Ping(77))
    assert process.until(Pong).nonce == 77
    assert process.until(Finished).completion_tokens == 16


def test_at_the_end_of_its_socket_it_ends_even_in_the_middle_of_work(start: Callable[..., Process]):
    process = start()
    process.send(LIMITS, generate(1, tokens=10_000))
    process.until(Deltas)
    process.line.close()
    begun = time.monotonic()
    assert process.exit_code() == 0
    assert time.monotonic() - begun < 4.0


def test_at_the_end_of_its_socket_a_resting_one_is_gone_too(start: Callable[..., Process]):
    process = start()
    process.send(LIMITS)
    process.until(EngineReport, lambda report: report.memory.armed)
    process.send(Ping(1))
    process.until(Pong)
    process.line.close()
    begun = time.monotonic()
    assert process.exit_code() == 0
    assert time.monotonic() - begun < 4.0


def test_it_exits_when_the_socket_ends_before_any_settings(start: Callable[..., Process]):
    process = start(b"\0\0")
    process.line.close()
    assert process.exit_code() == 0


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (encode_settings(NodeSettings(engine=EngineSettings(kind="metal"))), "unknown engine kind"),
        (b"\0\0\0\2[]", "settings"),
        (b"\xff\xff\xff\xff", "4294967295"),
    ],
)
def test_bad_settings_end_it_with_a_sentence(start: Callable[..., Process], first: bytes, words: str):
    process = start(first)
    assert process.exit_code() == EXIT_SETTINGS
    assert words in process.errors.read_text()


def test_garbage_instead_of_frames_ends_it_with_a_sentence(start: Callable[..., Process]):
    process = start()
    process.until(EngineReport)
    process.line.sendall(b"\0\0\0\x05\xf0garbage")
    assert process.exit_code() == EXIT_FAILED
    assert "unknown frame 240" in process.errors.read_text()


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, Callable[[], float]]]:
    """Yield the agent's end of a socket, and a function that reads its frames until the end. The engine cannot prepare
    the prompt "disk"."""
    agent, engine_end = socket.socketpair()
    recorder = CrashRecorder(None)
    engine = import_builder("scripted")(NodeSettings(engine=EngineSettings(kind="scripted")), recorder)
    writer = FrameWriter(engine_end, lambda: None)
    loop = EngineLoop(engine, writer.send, recorder.find_oldest_tokenization)

    def prepare(frame: Frame) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(engine, "prepare", prepare)
    writer.send((Pong(5),))
    with agent, engine_end:
        yield agent, lambda: read_frames(engine_end, engine, loop, writer)
    engine.close()


def test_a_socket_that_fails_has_ended(receive: tuple[socket.socket, Callable[[], float]]):
    agent, read = receive
    agent.close()  # with a frame that it has not read, which resets a Unix socket
    assert read() == EXIT_TIMEOUT_SECONDS


def test_an_error_of_the_engine_is_not_taken_for_the_end_of_the_socket(
    receive: tuple[socket.socket, Callable[[], float]],
):
    agent, read = receive
    agent.sendall(encode(generate(1)))
    with pytest.raises(OSError, match="Input/output error"):
        read()


def test_the_crash_word_ends_it_by_a_signal_and_leaves_no_core(start: Callable[..., Process]):
    process = start(crash="boom", step_ms=5)
    process.send(LIMITS, generate(1, "boom"))
    assert process.exit_code() == -signal.SIGABRT
    assert "engine.scripted.crash" in process.errors.read_text()


def test_an_interrupt_from_the_terminal_does_not_end_it(start: Callable[..., Process]):
    process = start()
    process.until(EngineReport)
    process.child.send_signal(signal.SIGINT)
    process.send(Ping(5))
    assert process.until(Pong).nonce == 5


def test_its_socket_is_all_that_it_inherits_and_no_setting_is_in_its_command_line(start: Callable[..., Process]):
    process = start(model="a-model-name")
    process.until(EngineReport, lambda report: report.models[0].name == "a-model-name")
    assert "a-model-name" not in " ".join(psutil.Process(process.child.pid).cmdline())
    if sys.platform == "linux":
        held = [os.readlink(f"/proc/{process.child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.child.pid}/fd")]
        assert sum(target.startswith("socket:") for target in held) == 1


def test_64_rows_at_50_steps_a_second_cost_little(start: Callable[..., Process]):
    process = start()
    process.send(LIMITS, *(generate(number, tokens=150) for number in range(1, 65)))
    process.until(Deltas, lambda frame: len(frame.deltas) == 64)
    watched, begun = psutil.Process(process.child.pid), time.monotonic()
    before = watched.cpu_times()
    for number in range(1, 65):
        process.until(Finished, lambda frame, number=number: frame.request == number)
    used = watched.cpu_times()
    share = (used.user + used.system - before.user - before.system) / (time.monotonic() - begun)
    assert share < 0.15, f"{share:.1%} of a core"
