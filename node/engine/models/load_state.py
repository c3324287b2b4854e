"""State machine of a model load, as data: from the order to the loaded model, or to the reason of its failure. Pure.

    queued ──began──► loading ──piece due──► loading … ──finished──► loaded
       │                 │ broken: its files cannot be used
       │ refused,        │ aborted: no room, an order, or its files changed
       │ aborted         │
       └─────────────────┴──────────────────────────────────────────► failed

Rules
- One load is in `loading` at a time. The gate is checked before `LoadBegan` and before each piece: `loaded_model.load`
  yields the cost of a piece before the piece is read.
- Weights still to load (`bytes_left`) count as reserved. They are at most `total`, which is exact from the first piece
  on.
- No event is legal in `loaded` and `failed`. An illegal event is an error of this program, and ends the load as failed.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from node.engine.models.model_descriptor import ModelDescriptor
from wire.state_machine import IllegalEventError


class LoadPhase(StrEnum):
    """Phase of a load."""

    QUEUED = "queued"
    """The load waits in the queue."""
    LOADING = "loading"
    """The pieces of the model are loaded one by one."""
    LOADED = "loaded"
    """The model is in memory."""
    FAILED = "failed"
    """The load was refused or aborted, or the files of the model cannot be used."""


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Cost of the next step of a load, in bytes. A step without costs is a forward of a profile's probe, which checks
    the gate itself."""

    bytes_left: int = 0
    """Bytes of weights still to load."""
    transient: int = 0
    """Transient bytes of the step in addition to the weights."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Load of one model. Sizes are in bytes."""

    descriptor: ModelDescriptor
    """Model to load."""
    phase: LoadPhase = LoadPhase.QUEUED
    """Phase of the load."""
    total: int = 0
    """Bytes of all weights: 0 while queued, then an estimate; exact once the model is built."""
    bytes_left: int = 0
    """Bytes of weights still to load; 0 while queued and after the end."""
    begun: float = 0.0
    """Monotonic time of the start; 0.0 while queued."""
    due: LoadStep = LoadStep()
    """Cost of the next piece."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.descriptor.name

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights that are in memory in the phase `LOADING`; 0 in all other phases."""
        return self.total - self.bytes_left if self.phase is LoadPhase.LOADING else 0

    @property
    def progress(self) -> float:
        """Loaded share of the weights, 0 to 1, in the phase `LOADING`; 0.0 in all other phases, even `LOADED`."""
        return 1.0 - self.bytes_left / max(1, self.total) if self.phase is LoadPhase.LOADING else 0.0

    def check(self) -> list[str]:
        """Return one sentence for each violated invariant; an empty list if there is none."""
        loading = self.phase is LoadPhase.LOADING
        checks = [
            (not 0 <= self.bytes_left <= max(0, self.total), f"{self.bytes_left} of {self.total} bytes are left"),
            (not loading and self.bytes_left > 0, f"{self.bytes_left} bytes are left in the phase {self.phase}"),
            (self.phase is LoadPhase.QUEUED and self.total > 0, f"{self.total} bytes are known before the start"),
        ]
        return [f"load of {self.name}: {text}" for wrong, text in checks if wrong]


# events


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """Event: the gate has passed the load of `weights` bytes, which begins at the monotonic time `now`."""

    weights: int
    now: float


@dataclass(frozen=True, slots=True)
class PieceDue:
    """Event: the next piece has this cost."""

    step: LoadStep


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """Event: the model is complete."""


@dataclass(frozen=True, slots=True)
class LoadRefused:
    """Event: the load was refused before its start."""


@dataclass(frozen=True, slots=True)
class LoadAborted:
    """Event: the load ends before its model is complete: for lack of memory, by an order, or by changed files."""


@dataclass(frozen=True, slots=True)
class LoadBroke:
    """Event: the files of the model cannot be used."""


LoadEvent = LoadBegan | PieceDue | LoadFinished | LoadRefused | LoadAborted | LoadBroke

TABLE: dict[type[LoadEvent], dict[LoadPhase, LoadPhase]] = {
    LoadBegan: {LoadPhase.QUEUED: LoadPhase.LOADING},
    PieceDue: {LoadPhase.LOADING: LoadPhase.LOADING},
    LoadFinished: {LoadPhase.LOADING: LoadPhase.LOADED},
    LoadRefused: {LoadPhase.QUEUED: LoadPhase.FAILED},
    LoadAborted: {LoadPhase.QUEUED: LoadPhase.FAILED, LoadPhase.LOADING: LoadPhase.FAILED},
    LoadBroke: {LoadPhase.LOADING: LoadPhase.FAILED},
}
"""Legal events, each with the phases in which it is legal and the phase that follows."""


def step(load: ModelLoad, event: LoadEvent) -> ModelLoad:
    """Return the state of `load` after an event. Raise `IllegalEventError` if the event is illegal in its phase."""
    phase = TABLE[type(event)].get(load.phase)
    if phase is None:
        raise IllegalEventError(f"the event {type(event).__name__} is illegal for a load in the phase {load.phase}")
    match event:
        case LoadBegan(weights, now):
            return replace(load, phase=phase, total=weights, bytes_left=weights, begun=now)
        case PieceDue(due):
            return _set_piece(load, due)
        case _:
            return replace(load, phase=phase, bytes_left=0, due=LoadStep())


def _set_piece(load: ModelLoad, due: LoadStep) -> ModelLoad:
    """Return a load whose next piece has this cost. The first piece with weights has the exact size of the model."""
    total = due.bytes_left if load.due.bytes_left == 0 and due.bytes_left else load.total
    return replace(load, total=max(total, due.bytes_left), bytes_left=due.bytes_left, due=due)
