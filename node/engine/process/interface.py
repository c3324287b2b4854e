"""Interface of an engine: frames in, frames out, and a memory gate; and the loader of engine kinds.

Two threads drive an engine. The I/O thread, the main thread of the process, calls `prepare`, which touches no memory of
the inference thread. The inference thread calls all other methods, except `read_running_call` and `halt`, which any
thread may call. Prompt threads tokenize the prompts that `prepare` has not tokenized, after `handle` has admitted them
(`tokenize_admission`).

A kind is named by its module and not imported. The agent can therefore list kinds without loading any model library.
Every kind provides `build` and runs its gate before every prefill, join and forward for embeddings; a test checks this
for each kind.
"""

import importlib
import resource
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from host.imports import pause_collection
from node.engine.process.kinds import KINDS
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from node.engine.requests.tokenize_admission import TokenizeResult, UntokenizedPrompt
from wire.frames import EngineReport, Frame

if TYPE_CHECKING:
    from node.engine.memory.gate import MemoryGate
    from node.settings import NodeSettings


MIN_OPEN_FILES = 4096
"""Hard limit of open files that mlx-lm sets when it is imported. The import fails below it."""
FLUSH_INTERVAL_SECONDS = 0.5
"""Seconds for which tokens of a request without streaming are gathered before they are sent."""
MAX_CANCELLED_REMEMBERED = 1024
"""Maximum number of cancelled requests that are remembered until they arrive or are tokenized."""
ROUTES: Final = ("chat", "completions", "embeddings", "rerank")
"""Kinds of requests that every engine kind serves, and that its gate therefore guards."""


class EngineKindError(ValueError):
    """Error of an engine kind that is unknown or lacks a dependency; the text names the next step."""


class Halted(BaseException):
    """Raised instead of a native call after the engine was halted. An engine must not catch this, because it is no
    fault."""


Work = Frame | PreparedRequest | PreparedEmbedding | UntokenizedPrompt | TokenizeResult
"""Work for `Engine.handle`."""


class NativeCallKind(IntEnum):
    """Kind of a native call, as recorded for crashes and published by its name."""

    NOTHING = 0
    """No call."""
    PREFILL = 1
    """Forward over prompt tokens."""
    JOIN = 2
    """Copy of a decode batch that rows join."""
    DECODE = 3
    """Decode step of a batch."""
    LOAD = 4
    """Piece of a model load."""
    READ = 5
    """Tokenization of a prompt. It is recorded as well, because a model's template or tokenizer may crash or hang."""
    EMBED = 6
    """Forward over texts for vectors or scores."""


class CallRecording(Protocol):
    """Recorder of native calls, from which the agent can explain a crash (`crash_recorder`)."""

    def begin(self, doing: NativeCallKind, model: str, request: int = 0) -> None:
        """Record the start of a native call. `request` is the number of its request; 0 for several or none."""
        ...

    def end(self) -> None:
        """Record the end of the native call that `begin` recorded."""
        ...

    def record_tokenization(self, model: str, request: int = 0) -> AbstractContextManager[None]:
        """Record that this thread tokenizes a prompt for a model, until the context ends."""
        ...

    def crash(self, model: str, request: int) -> None:
        """Simulate a native crash in the prefill of this request: end the process by SIGABRT."""
        ...


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Native call that is running now."""

    kind: str
    """Name of its `NativeCallKind` in lower case."""
    since: float
    """Start in monotonic seconds."""
    expected: float
    """Expected duration in seconds."""


class Engine(Protocol):
    """Interface of an engine, which `EngineLoop` drives. `now` is the inference thread's monotonic clock in seconds."""

    gate: "MemoryGate"
    """Gate of the engine, which checks every forward."""

    @property
    def loads(self) -> int:
        """Number of model loads that have succeeded. A change causes a report before the next answers."""
        ...

    def prepare(self, frame: Frame) -> Work | None:
        """Convert a frame into work for `handle`, on the I/O thread; tokenize a short prompt. Return None if there is
        no work.

        A `Ping` arrives here as well, after it was answered.
        """
        ...

    def handle(self, work: Work, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Process one piece of work. Return immediate answers, and prompts that may now be tokenized."""
        ...

    def step(self, now: float) -> Iterable[Sequence[Frame]]:
        """Run due work: at most one decode step of every running row, then other gated work in short parts.

        Other work is a prefill, a forward for embeddings, a piece of a load, or a forward of a profile.
        The frames of each part are returned together. The work proceeds as the caller consumes them. Raise `Halted` if
        a native call is due after `halt`.
        """
        ...

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next `step`; None if only a frame can bring work."""
        ...

    def read_running_call(self) -> NativeCall | None:
        """Return the running native call; None if none runs. Any thread may call this."""
        ...

    def report(self, now: float) -> EngineReport:
        """Read the memory and return the state of the engine, to be sent to the agent."""
        ...

    def halt(self) -> None:
        """Forbid further native calls. Any thread may call this; `step` then raises `Halted` in place of one."""
        ...

    def close(self) -> None:
        """Wait for work on the device, and release all memory. This is the last call."""
        ...


class EngineFactory(Protocol):
    """Type of the function `build` in the module of each engine kind."""

    def __call__(self, settings: "NodeSettings", recorder: CallRecording) -> Engine:
        """Return a new engine for the settings of a node. The engine calls `recorder` before every native call."""
        ...


def import_builder(kind: str) -> EngineFactory:
    """Import the module of an engine kind and return its `build`. Raise `EngineKindError` if the kind is unknown, a
    library is not installed, or the limit of open files is too low for mlx-lm."""
    module = KINDS.get(kind)
    if module is None:
        raise EngineKindError(f"unknown engine kind {kind!r}: use {', '.join(KINDS)}")
    try:
        with pause_collection():
            return cast("EngineFactory", importlib.import_module(module).build)
    except ImportError as error:
        raise EngineKindError(
            f"engine.kind is {kind}, and {error.name} is not installed: install macpool[node], or start the "
            "coordinator with --no-local-node"
        ) from None
    except ValueError:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if most == resource.RLIM_INFINITY or most >= MIN_OPEN_FILES:
            raise
        raise EngineKindError(
            f"the hard limit is {most} open files, and mlx-lm needs {MIN_OPEN_FILES}: raise it (`ulimit -Hn`, or "
            "LimitNOFILE of the service)"
        ) from None
