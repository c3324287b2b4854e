"""The kinds of engine, and what each of them must give: frames in, frames out, and a gate.

A kind is named by its module, not imported, so that the agent can list kinds without loading any model library. Every
kind provides `build` and asks its gate before every prefill and every join; a test builds each and tries.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

from wire.frames import EngineReport, Frame

if TYPE_CHECKING:
    from node.engine.gate import Gate
    from node.settings import EngineSettings

KINDS: Final = {"scripted": "node.engine.scripted"}
"""Kind → the module with its `build`."""

ROUTES: Final = ("chat",)
"""What every kind serves, and its gate therefore guards."""


class UnknownKindError(ValueError):
    """No engine kind has this name; the text lists those that exist."""


class Engine(Protocol):
    """One engine, driven by one thread. `now` is that thread's monotonic clock in seconds."""

    gate: "Gate"

    def take(self, frame: Frame, now: float) -> Sequence[Frame]:
        """Take in one frame (Generate, Cancel, Limits) and give what is answered at once."""
        ...

    def step(self, now: float) -> Sequence[Frame]:
        """Do what is due: at most one decode step of every running row, then at most one gated prefill."""
        ...

    def due(self, now: float) -> float | None:
        """Say when `step` must be called next; None: only a frame can bring work."""
        ...

    def expected(self) -> float:
        """Say how many seconds one `step` should take at most: the measure of what counts as hung."""
        ...

    def report(self, now: float) -> EngineReport:
        """Read the memory and give the snapshot to publish."""
        ...


class Build(Protocol):
    """What each kind's module has as `build`. `crash` ends the process by a signal, where settings ask for it."""

    def __call__(self, settings: "EngineSettings", crash: Callable[[], None]) -> Engine:
        """Make the engine."""
        ...


def builder(kind: str) -> Build:
    """Load a kind's builder; UnknownKindError lists the kinds that exist."""
    module = KINDS.get(kind)
    if module is None:
        raise UnknownKindError(f"unknown engine kind {kind!r}: there is {', '.join(KINDS)}")
    return cast("Build", importlib.import_module(module).build)
