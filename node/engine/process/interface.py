"""The kinds of engine, and what each of them must give: frames in, frames out, and a gate.

Two threads drive an engine. The I/O thread calls `prepare`, which touches no memory that the other owns; all else is
called by the inference thread. A third does what `take` lets it: it reads the prompts that are too long to be read
unasked (`unread`).

A kind is named by its module, not imported, so that the agent can list kinds without loading any model library. Every
kind provides `build` and asks its gate before every prefill and every join; a test builds each and tries.
"""

import importlib
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from node.engine.process.kinds import KINDS
from node.engine.requests.prepared import Prepared
from node.engine.requests.tokenize_admission import Read, Unread
from wire.frames import EngineReport, Frame

if TYPE_CHECKING:
    from node.engine.memory.gate import Gate
    from node.settings import NodeSettings


ROUTES: Final = ("chat", "completions")
"""What every kind serves, and its gate therefore guards."""


class UnknownKindError(ValueError):
    """No engine kind has this name, or what it needs is not installed; the text says what to do."""


class Halted(BaseException):
    """The engine was halted, so no native call begins any more. No fault of an engine, which may not catch it."""


Work = Frame | Prepared | Unread | Read


class Doing(IntEnum):
    """What a native call is for."""

    NOTHING = 0
    PREFILL = 1
    JOIN = 2
    DECODE = 3
    LOAD = 4
    READ = 5
    """Put a prompt into tokens: the template and the tokenizer come with the model."""


class Recording(Protocol):
    """Where it is written what an engine is about to do, so that its death can be understood (`recorder`)."""

    def begin(self, doing: Doing, model: str, request: int = 0) -> None:
        """A native call begins, for this request or (0) for many."""
        ...

    def end(self) -> None:
        """It came back."""
        ...

    def reading(self, model: str, request: int = 0) -> AbstractContextManager[None]:
        """Record that this thread puts a prompt of a model into tokens, until the context ends."""
        ...

    def crash(self, model: str, request: int) -> None:
        """End the process as a native crash in this request's prefill would."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A native call under way: what, since when (monotonic seconds), and how long it should take."""

    kind: str
    since: float
    expected: float


class Engine(Protocol):
    """One engine. `now` is the inference thread's monotonic clock in seconds."""

    gate: "Gate"

    def prepare(self, frame: Frame) -> Work | None:
        """On the I/O thread: put a frame into the form that `take` takes, a prompt into tokens. A Ping that has been
        answered comes here too, and None is its usual answer: there is nothing to take."""
        ...

    def take(self, work: Work, now: float) -> Collection[Frame | Unread]:
        """Take in one piece of work and give what is answered at once, and what may be read now."""
        ...

    def step(self, now: float) -> Iterable[Frame]:
        """Do what is due: at most one decode step of every running row, then at most one gated prefill. It is done as
        what it has to say is taken."""
        ...

    def due(self, now: float) -> float | None:
        """Say when `step` must be called next; None: only a frame can bring work."""
        ...

    def call(self) -> Call | None:
        """Say which native call is under way, on any thread; None: none that could last."""
        ...

    def report(self, now: float) -> EngineReport:
        """Read the memory and give the snapshot to publish."""
        ...

    def halt(self) -> None:
        """On any thread: begin no further native call. `take` and `step` may raise Halted from now on."""
        ...

    def close(self) -> None:
        """Wait for what runs on the device, and give all memory back. Nothing is called after it."""
        ...


class Build(Protocol):
    """What each kind's module has as `build`. The recorder is told of every native call before it begins."""

    def __call__(self, settings: "NodeSettings", recorder: Recording) -> Engine:
        """Make the engine."""
        ...


def builder(kind: str) -> Build:
    """Load a kind's builder; UnknownKindError lists the kinds that exist."""
    module = KINDS.get(kind)
    if module is None:
        raise UnknownKindError(f"unknown engine kind {kind!r}: there is {', '.join(KINDS)}")
    try:
        return cast("Build", importlib.import_module(module).build)
    except ImportError as error:
        raise UnknownKindError(
            f"engine.kind is {kind}, and {error.name} is not installed: install macpool[node], or start the "
            "coordinator with --no-local-node"
        ) from None
