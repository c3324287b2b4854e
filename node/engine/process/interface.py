"""Interface of an engine: frames in, frames out, and a memory gate; and the loader of engine kinds.

Two threads drive an engine. The I/O thread, the main thread of the process, calls `prepare`, which touches no memory of
the inference thread. The inference thread calls all other methods, except `read_running_call` and `halt`, which any
thread may call. Prompt threads tokenize the prompts that `prepare` has not tokenized, after `handle` has admitted them
(`tokenize_admission`).

`kinds` names the module of each kind and does not import it. The agent can therefore list kinds without loading any
model library. Every kind provides `build` and runs its gate before every prefill, join and forward for embeddings; a
test checks this for each kind.
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
"""Maximum number of recorded cancellations of requests that have not arrived or are not tokenized yet."""
ROUTES: Final = ("chat", "completions", "embeddings", "rerank")
"""Kinds of requests that every engine kind serves, and that its gate therefore guards."""


class EngineKindError(ValueError):
    """Error: an engine kind is unknown or lacks a dependency. The text names the next step."""


class Halted(BaseException):
    """Raised instead of running a native call after the engine was halted. An engine must not catch it, because it is
    not a fault."""


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
        """Record, while the context is open, that the calling thread tokenizes a prompt for a model. `request` is the
        number of its request; 0: unknown."""
        ...

    def crash(self, model: str, request: int) -> None:
        """Simulate a native crash in the prefill of this request: end the process by SIGABRT."""
        ...


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Native call that is running now."""

    kind: str
    """Name of the call's `NativeCallKind` in lower case."""
    since: float
    """Start in monotonic seconds."""
    expected: float
    """Expected duration in seconds."""


class Engine(Protocol):
    """Interface of an engine, which `EngineLoop` drives. `now` is in monotonic seconds in all methods."""

    gate: "MemoryGate"
    """Gate of the engine, which checks every forward."""

    @property
    def loads(self) -> int:
        """Number of model loads that have succeeded. A change causes a report before the next answers."""
        ...

    def prepare(self, frame: Frame) -> Work | None:
        """Convert a frame into work for `handle`. Tokenize a short prompt at once. Return None if there is no work.

        Only the I/O thread calls this. A `Ping` also arrives here, after it was answered.
        """
        ...

    def handle(self, work: Work, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Process one piece of work. Return immediate answers, and prompts that may now be tokenized."""
        ...

    def step(self, now: float) -> Iterable[Sequence[Frame]]:
        """Run due work: at most one decode step of every running row, then other gated work in short parts.

        Other work is a prefill, a forward for embeddings, a piece of a load, or a forward of a profile. Each item has
        the frames of one part. The caller must consume all items, because a part may run only when its item is
        requested. Raise `Halted` if a native call is due after `halt`.
        """
        ...

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time at which `step` is next due; None if the next step needs a frame first."""
        ...

    def read_running_call(self) -> NativeCall | None:
        """Return the running native call; None if none runs. Any thread may call this."""
        ...

    def report(self, now: float) -> EngineReport:
        """Read the memory, and return the state of the engine for the agent."""
        ...

    def halt(self) -> None:
        """Forbid further native calls: `step` then raises `Halted` instead. Any thread may call this."""
        ...

    def close(self) -> None:
        """Wait for work on the device, and release all memory. No other method may be called afterwards."""
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
