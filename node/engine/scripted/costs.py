"""Costs of a simulated engine: the durations of its forwards. Pure.

The scripted engine of a node has fixed costs. The simulation has the costs of Apple chips (`simulation.mac.hardware`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from node.engine.scheduling.rules.chunk_policy import ChunkPace


class DecodeLoad(NamedTuple):
    """Decoding rows of one model."""

    rows: int
    """Number of the rows."""
    tokens: int
    """Committed tokens of all these rows."""


class EngineCosts(Protocol):
    """Interface of the durations of forwards, in seconds. `FixedCosts` and `simulation.mac.hardware` implement it."""

    @property
    def free_prefill(self) -> bool:
        """Whether a prefill takes no time. It then runs at once, also within a decode step, and returns no
        token."""
        ...

    def get_pace(self, model: str) -> ChunkPace:
        """Return the pace of a model's prefill chunks, from which their durations follow."""
        ...

    def estimate_step_seconds(self, loads: Mapping[str, DecodeLoad]) -> float:
        """Return the seconds of a decode step of all rows, given by model; there is at least one row."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Costs without hardware: every decode step takes the same time, and a prefill takes none."""

    step: float
    """Seconds of a decode step."""

    @property
    def free_prefill(self) -> bool:
        """Whether a prefill takes no time: always True."""
        return True

    def get_pace(self, model: str) -> ChunkPace:
        """Return a pace by which every chunk takes 0 s."""
        return ChunkPace()

    def estimate_step_seconds(self, loads: Mapping[str, DecodeLoad]) -> float:
        """Return the seconds of a decode step."""
        return self.step
