"""Interface of an engine: frames in, frames out, and a memory gate; and the loader of engine kinds.

Two threads drive an engine. The I/O thread calls `prepare`, which touches no memory of the inference thread. The
inference thread calls all other methods. Further threads tokenize long prompts after `handle` has admitted them
(`tokenize_admission`).

A kind is named by its module and not imported. The agent can therefore list kinds without loading any model library.
Every kind provides `build` and runs its gate before every prefill and every join; a test checks this for each kind.
"""

import importlib
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from node.engine.process.kinds import KINDS
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.tokenize_admission import TokenizeResult, UntokenizedPrompt
from wire.frames import EngineReport, Frame

if TYPE_CHECKING:
    from node.engine.memory.gate import MemoryGate
    from node.settings import NodeSettings


FLUSH_INTERVAL_SECONDS = 0.5
"""Seconds for which tokens of a request without streaming are gathered."""
MAX_CANCELLED_REMEMBERED = 1024
"""Number of cancelled requests that are remembered until their `Generate` arrives."""
ROUTES: Final = ("chat", "completions")
"""Routes that every kind serves, and that its gate therefore guards."""


class UnknownKindError(ValueError):
    """Unknown engine kind, or one with a missing dependency; the text names the next step."""


class Halted(BaseException):
    """The engine was halted: no native call may begin. An engine must not catch this, because it is no fault."""


Work = Frame | PreparedRequest | UntokenizedPrompt | TokenizeResult


class NativeCallKind(IntEnum):
    """Kind of a native call."""

    NOTHING = 0
    PREFILL = 1
    JOIN = 2
    DECODE = 3
    LOAD = 4
    READ = 5
    """Tokenization of a prompt: template and tokenizer are files of the model."""


class CallRecording(Protocol):
    """Record of native calls from which a crash can be explained (`crash_recorder`)."""

    def begin(self, doing: NativeCallKind, model: str, request: int = 0) -> None:
        """Record the start of a native call for this request; 0: for several."""
        ...

    def end(self) -> None:
        """Record the end of the native call."""
        ...

    def reading(self, model: str, request: int = 0) -> AbstractContextManager[None]:
        """Record that this thread tokenizes a prompt for a model, until the context ends."""
        ...

    def crash(self, model: str, request: int) -> None:
        """End the process like a native crash in this request's prefill."""
        ...


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Running native call."""

    kind: str
    """Kind of the call."""
    since: float
    """Start in monotonic seconds."""
    expected: float
    """Expected duration in seconds."""


class Engine(Protocol):
    """Engine. `now` is the inference thread's monotonic clock in seconds."""

    gate: "MemoryGate"

    def prepare(self, frame: Frame) -> Work | None:
        """Convert a frame into work for `handle`, on the I/O thread; a prompt into tokens. An answered `Ping` is passed
        as well, and for it the result is usually None."""
        ...

    def handle(self, work: Work, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Process one piece of work; return immediate answers and prompts that may now be tokenized."""
        ...

    def step(self, now: float) -> Iterable[Frame]:
        """Run due work: at most one decode step of every running row, then at most one gated prefill. The work proceeds
        as the caller consumes the frames."""
        ...

    def next_step_at(self, now: float) -> float | None:
        """Return the time of the next `step`; None: only a frame can bring work."""
        ...

    def running_call(self) -> NativeCall | None:
        """Return the running native call, on any thread; None: no long call is running."""
        ...

    def report(self, now: float) -> EngineReport:
        """Read the memory and return the report to publish."""
        ...

    def halt(self) -> None:
        """Begin no further native call, on any thread. `handle` and `step` may raise `Halted` from now on."""
        ...

    def close(self) -> None:
        """Wait for work on the device, and release all memory. No method is called after it."""
        ...


class EngineFactory(Protocol):
    """Type of `build` in each kind's module. The recorder is called before every native call."""

    def __call__(self, settings: "NodeSettings", recorder: CallRecording) -> Engine:
        """Return the engine."""
        ...


def builder(kind: str) -> EngineFactory:
    """Return a kind's builder. `UnknownKindError` lists the kinds that exist."""
    module = KINDS.get(kind)
    if module is None:
        raise UnknownKindError(f"unknown engine kind {kind!r}: use {', '.join(KINDS)}")
    try:
        return cast("EngineFactory", importlib.import_module(module).build)
    except ImportError as error:
        raise UnknownKindError(
            f"engine.kind is {kind}, and {error.name} is not installed: install macpool[node], or start the "
            "coordinator with --no-local-node"
        ) from None
