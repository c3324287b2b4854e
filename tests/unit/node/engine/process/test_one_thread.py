"""MLX belongs to the inference thread: the real loop and engine in a thread, with a check on every call of MLX.

The I/O thread's part of a request runs here on the test's own thread. It makes the engine, prepares frames, asks for
pings, cancels requests, and loads and unloads models. Any call into `mlx.core` from there raises. An exception is
making an array of Python numbers, because that constructor cannot be checked.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from node.engine.build import compose
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.loop import EngineLoop
from node.models.catalogue import ModelCatalogue
from node.settings import EngineSettings, MlxSettings, ModelSettings, NodeSettings
from tests import models
from wire.frames import (
    Cancel,
    Deltas,
    EngineReport,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    Ping,
    ReduceMemory,
    Refusal,
    UnloadModel,
)
from wire.report import Hardware, MemoryLevel
from wire.units import GIB, MIB

ARRAY = mx.array([1.0])
INFERENCE = "inference"
SUBMODULES = ("fast", "random", "linalg", "fft", "metal")
SPARED = frozenset(
    {
        "__class__",
        "__new__",
        "__init_subclass__",
        "__subclasshook__",
        "__getattribute__",
        "__hash__",
        "__repr__",
        "__str__",
        "__doc__",
        "__module__",
        "__dict__",
        "__sizeof__",
        "__reduce__",
        "__reduce_ex__",
        "__dir__",
        "__delattr__",
        "__setattr__",
        "__format__",
        "__getstate__",
    }
)
"""Attributes of every Python object, and those that the interpreter itself reads."""


class Watch:
    """The callers of MLX: by name and thread."""

    def __init__(self) -> None:
        self.calls = 0
        self.strangers: list[tuple[str, str]] = []

    def guarded(self, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that raises on every thread except the inference thread."""

        @functools.wraps(native, updated=())
        def guard(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread().name
            if thread != INFERENCE:
                self.strangers.append((name, thread))
                raise AssertionError(f"mlx.core.{name} was called on the thread {thread!r}")
            self.calls += 1
            return native(*args, **kwargs)

        return guard

    def module(self, patch: pytest.MonkeyPatch, module: ModuleType, prefix: str = "") -> int:
        """Watch a module's public functions; return their number."""
        found = {name: one for name, one in vars(module).items() if callable(one) and not isinstance(one, type)}
        for name, one in found.items():
            if not name.startswith("_"):
                patch.setattr(module, name, self.guarded(prefix + name, one))
        return len(found)

    def methods(self, patch: pytest.MonkeyPatch, kind: type) -> int:
        """Watch a class's methods and operators; return their number."""
        found = {name: one for name, one in vars(kind).items() if callable(one) and name not in SPARED}
        for name, one in found.items():
            patch.setattr(kind, name, self.guarded(f"{kind.__name__}.{name}", one))
        return len(found)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    with pytest.MonkeyPatch.context() as patch:
        assert made.module(patch, mx) > 150
        for name in SUBMODULES:
            made.module(patch, getattr(mx, name), f"{name}.")
        assert made.methods(patch, mx.array) > 50
        yield made


class Io:
    """The I/O thread, which is the test's own."""

    def __init__(self) -> None:
        settings = NodeSettings(
            engine=EngineSettings(kind="mlx", mlx=MlxSettings(prefill_step_size=64, min_prefill_step=32)),
            models=ModelSettings(
                folders=(str(models.path("llama")),), use_huggingface_cache=False, profile="auto", trial=False
            ),
        )
        library = ModelCatalogue(settings.models)
        library.scan()
        self.model = next(iter(library.get_models()))
        self.engine = compose(settings, library, CrashRecorder(), Hardware("test", 16 * GIB), None)
        self.said: queue.Queue[Frame] = queue.Queue()
        self.loop = EngineLoop(self.engine, self._keep)
        self.thread = threading.Thread(target=self.loop.run, name=INFERENCE, daemon=True)
        for name, work in (("prompts", self.loop.tokenize_prompts), ("long prompts", self.loop.tokenize_long_prompts)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def _keep(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.said.put(frame)

    def hand_in(self, frame: Frame) -> None:
        """Process a frame like `main.read_frames`."""
        self.loop.measure_busy_seconds(time.monotonic())
        work = self.engine.prepare(frame)
        if work is not None:
            self.loop.put(work)

    def ask(self, number: int, content: str, tokens: int = 8, **params: object) -> None:
        sampling = GenerationParams(max_tokens=tokens, **params)  # type: ignore[arg-type]
        request = Generate(number, number, "r", self.model, (Message("user", content),), sampling, 0, tokens)
        self.hand_in(request)

    def until(self, wanted: Callable[[Frame], object]) -> Frame:
        """Wait for a frame, and send pings meanwhile."""
        deadline = time.monotonic() + 40.0
        while time.monotonic() < deadline:
            assert self.thread.is_alive()
            self.hand_in(Ping(1))
            try:
                frame = self.said.get(timeout=0.5)
            except queue.Empty:
                continue
            if wanted(frame):
                return frame
        raise AssertionError("it was never said")

    def end(self, number: int) -> Frame:
        return self.until(lambda frame: isinstance(frame, Finished | Refusal) and frame.request == number)


def test_no_thread_but_one_calls_mlx(watch: Watch):
    io = Io()
    io.thread.start()
    try:
        io.hand_in(MemoryLimits(8 * GIB, 8 * GIB, 64 * MIB, "static"))
        io.ask(1, "Hello! " * 60, logprobs=True, top_logprobs=3, seed=7, temperature=0.8)
        assert isinstance(io.end(1), Finished)
        io.ask(2, "Say something that nobody has trained.", 2000)
        io.until(lambda frame: isinstance(frame, Deltas))
        io.hand_in(ReduceMemory(1, MemoryLevel.OVER_SOFT))
        io.until(lambda frame: isinstance(frame, EngineReport) and frame.enforced == 1)
        io.hand_in(Cancel(2))
        io.ask(3, "word " * 40_000)
        assert isinstance(io.end(3), Refusal)
        io.hand_in(MemoryLimits(8 * GIB, 8 * MIB, 0, "dynamic"))
        io.ask(4, "Hello!")
        assert isinstance(io.end(4), Refusal)
        io.hand_in(UnloadModel(5, io.model))
        assert isinstance(io.end(5), Finished)
        io.hand_in(MemoryLimits(8 * GIB, 8 * GIB, 64 * MIB, "static"))
        io.hand_in(LoadModel(6, io.model))
        assert isinstance(io.end(6), Finished)
    finally:
        io.loop.stop()
        io.thread.join(20.0)
    assert not watch.strangers
    assert watch.calls > 1000, "the watch sees what the inference thread does"


@pytest.mark.parametrize(
    "call", [lambda: mx.zeros((2,)), lambda: mx.get_active_memory(), lambda: ARRAY.tolist(), lambda: ARRAY + 1]
)
def test_a_call_from_another_thread_is_detected(watch: Watch, call: Callable[[], object]):
    with pytest.raises(AssertionError, match="thread"):
        call()
    assert len(watch.strangers) == 1
