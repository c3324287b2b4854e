"""The end of an engine process: no call begins, the running one returns, memory is released, in bounded time."""

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.footprint import release_free_memory
from node.engine.process.interface import Halted
from node.engine.process.main import EXIT_DEVICE, EXIT_FAILED, encode_settings
from node.settings import EngineSettings, MlxSettings, ModelSettings, NodeSettings
from tests import models
from tests.support.engine.text_engine import GREEDY, Driver
from tests.support.processes import until
from wire.codec import MAX_JOINED_BYTES, Splitter, decode, encode
from wire.frames import (
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    Ping,
    Pong,
    ProfileModel,
    StopEngine,
)
from wire.units import GIB, KIB, MIB

LIMITS = MemoryLimits(8 * GIB, 8 * GIB, 64 * MIB, "static")
WAIT = 30.0


def test_all_that_an_engine_holds_is_given_back(tmp_path: Path):
    """Two models, one of them in a sweep, a third being loaded; decoding rows, a partly prefilled prompt, cached
    prefixes."""
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(models.path("llama"))
    release_free_memory()
    before = mx.get_active_memory()
    driver = Driver(tmp_path, max_batch_size=4, prefill_step_size=64)
    for name in ("a", "b"):
        driver.answer("Hello!", GREEDY, model=name)
        number = driver.ask("Hello!", GenerationParams(temperature=0.0, max_tokens=400), model=name)
        driver.until(lambda number=number: driver.ids[number, 0])
    driver.ask("word " * 300, model="a")
    driver.take(ProfileModel(50, "b"))
    driver.turn()
    driver.take(LoadModel(60, "c"))
    driver.turn()
    engine = driver.engine
    assert engine.parts.model_manager.next_name == "c"
    assert any(one.cache for one in engine.parts.scheduler.prefills)
    assert engine.parts.sweeps.measuring == "b"
    assert mx.get_active_memory() > before + 2 * engine.parts.models.loaded["a"].weights
    engine.halt()
    with pytest.raises(Halted):
        driver.turn()
    engine.close()
    assert mx.get_active_memory() <= before + 64 * KIB
    assert mx.get_cache_memory() == 0


class Process:
    """A real engine process with models, and the agent's end of its socket. `patch` runs in the process first."""

    def __init__(self, folder: Path, patch: str = "") -> None:
        self.bound = WAIT
        self.line, theirs = socket.socketpair()
        self.line.settimeout(WAIT)
        self.errors = folder / "errors"
        program = f"from node.engine.process import main as child\n{textwrap.dedent(patch)}\nchild.main()"
        with self.errors.open("wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, "-c", program, "--socket", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=file,
            )
        theirs.close()
        settings = ModelSettings(folders=(str(folder),), use_huggingface_cache=False, profile="off", trial=False)
        engine = EngineSettings(mlx=MlxSettings(prefill_step_size=256, min_prefill_step=64))
        self.line.sendall(encode_settings(NodeSettings(engine=engine, models=settings)))
        self._splitter = Splitter(longest=MAX_JOINED_BYTES)
        self.send(LIMITS)

    def send(self, *frames: Frame) -> None:
        self.line.sendall(b"".join(map(encode, frames)))

    def frames(self) -> Iterator[Frame]:
        while data := self.line.recv(65536):
            for tag, body in self._splitter.feed(data):
                yield decode(tag, body)

    def busy(self) -> Pong:
        """Send pings until a native call is running, and return the last pong. Fail if none runs."""
        for nonce in range(10_000):
            self.send(Ping(nonce))
            pong = next(frame for frame in self.frames() if isinstance(frame, Pong))
            if pong.expected:
                return pong
            time.sleep(0.002)
        raise AssertionError("no call was ever under way")

    def code(self) -> tuple[int, float]:
        """Wait for the end; return the exit code and the seconds."""
        begun = time.monotonic()
        return self.child.wait(WAIT), time.monotonic() - begun

    def said(self) -> str:
        return self.errors.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    (tmp_path / "a").symlink_to(models.path("llama"))
    started: list[Process] = []

    def make(patch: str = "") -> Process:
        started.append(Process(tmp_path, patch))
        return started[-1]

    yield make
    for process in started:
        process.line.close()
        with suppress(ProcessLookupError):
            process.child.kill()
        process.child.wait(WAIT)


SLOW = textwrap.dedent("""
    import os, time
    from node.engine.scheduling import prefill_runner as generation
    run_forward = generation.run_forward

    def slow(*args, **more):
        time.sleep({seconds})
        found = run_forward(*args, **more)
        os.write(2, b"the forward returned\\n")
        return found

    generation.run_forward = slow
""")
"""Forwards of prompts that take this number of seconds: native calls, during which Python runs no signal handler."""


def writes(process: Process) -> None:
    """Start the prefill of a prompt, and wait until the engine is in the forward."""
    process.send(Generate(1, 1, "r", "a", (Message("user", "word " * 300),), GenerationParams(max_tokens=4), 0))
    while process.busy().expected > 5:  # its load
        pass


def ask_to_stop(process: Process) -> None:
    process.send(StopEngine(process.bound))
    process.line.shutdown(socket.SHUT_WR)


def cut(process: Process) -> None:
    process.line.close()


def terminate(process: Process) -> None:
    process.child.terminate()


ENDS = pytest.mark.parametrize("end", [ask_to_stop, cut, terminate])


def bound(seconds: float) -> str:
    """Return code that limits the engine's end to `seconds`."""
    return f"child.EXIT_TIMEOUT_SECONDS = {seconds}\n"


@pytest.mark.slow
@ENDS
def test_the_forward_in_flight_returns_and_the_model_is_given_back(
    start: Callable[..., Process], end: Callable[[Process], None]
):
    process = start(bound(WAIT) + SLOW.format(seconds=1.0))
    writes(process)
    end(process)
    code, _ = process.code()
    assert code == 0
    said = process.said()
    assert said.count("the forward returned") == 1, "the one in flight, and no other"
    assert said.index("the forward returned") < said.index("model unloaded")


@pytest.mark.slow
@ENDS
def test_a_forward_that_does_not_return_is_not_waited_for_for_ever(
    start: Callable[..., Process], end: Callable[[Process], None]
):
    process = start(bound(1.0) + SLOW.format(seconds=60.0))
    process.bound = 1.0
    writes(process)
    end(process)
    code, seconds = process.code()
    assert code == 0
    assert 0.5 < seconds < 4.0
    assert "the forward returned" not in process.said()


@pytest.mark.slow
def test_a_stop_may_leave_more_time_than_the_end_of_the_socket(start: Callable[..., Process]):
    process = start(bound(0.1) + SLOW.format(seconds=1.5))
    writes(process)
    ask_to_stop(process)
    assert process.code()[0] == 0
    assert "model unloaded" in process.said()


@pytest.mark.slow
def test_sigterm_takes_effect_while_the_main_thread_is_in_a_call(start: Callable[..., Process]):
    process = start(
        """
        import os, time
        from node.engine.engine import TextEngine

        def prepare(engine, frame):
            os.write(2, b"stuck\\n")
            time.sleep(60)

        TextEngine.prepare = prepare
        """
    )
    until(lambda: "stuck" in process.said(), what="a frame being prepared")
    process.child.terminate()
    code, seconds = process.code()
    assert code == 0
    assert seconds < 4.0


@pytest.mark.slow
def test_an_engine_that_failed_gives_its_memory_back_too(start: Callable[..., Process]):
    process = start(
        """
        from node.engine.engine import TextEngine
        step = TextEngine.step

        def breaks(engine, now):
            yield from step(engine, now)
            if engine.parts.models.loaded:
                raise KeyError("a bug")

        TextEngine.step = breaks
        """
    )
    process.send(LoadModel(1, "a"))
    code, _ = process.code()
    assert code == EXIT_FAILED
    said = process.said()
    assert "a bug" in said
    assert "model unloaded" in said


def test_a_command_buffer_that_fails_again_at_the_end_keeps_no_process_alive(start: Callable[..., Process]):
    process = start(
        """
        from node.engine.process.device_errors import DeviceLost
        from node.engine.scheduling.scheduler import Scheduler

        def lost(scheduler):
            raise DeviceLost("[METAL] Command buffer execution failed: Caused GPU Timeout Error.")

        Scheduler.synchronize = lost
        """
    )
    process.send(LoadModel(1, "a"))
    assert process.code()[0] == EXIT_DEVICE
    assert process.said().endswith("GPU error: Caused GPU Timeout Error\n")


@pytest.mark.slow
def test_a_failed_command_buffer_is_the_last_line_of_an_engine_that_ends(start: Callable[..., Process]):
    process = start(
        """
        import mlx.core as mx
        from node.engine.scheduling import prefill_runner as generation

        def lost(*_, **__):
            mx.synchronize = lost
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error.")

        generation.run_forward = lost
        """
    )
    process.send(Generate(1, 1, "r", "a", (Message("user", "Hello!"),), GenerationParams(max_tokens=4), 0))
    assert process.code()[0] == EXIT_DEVICE
    *_, last = process.said().splitlines()
    assert last == "GPU error: Caused GPU Timeout Error"
    assert "model unloaded" in process.said(), "its memory is released first: a killed process can leave it wired"
