"""Costs of a simulated engine: the durations of its forwards. Pure.

The scripted engine of a node has fixed costs. The simulation has the costs of Apple chips (`simulation.mac.hardware`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from node.engine.scheduling.rules.chunk_policy import ChunkPace


class DecodeLoad(NamedTuple):
    """Number and tokens of the decoding rows of one model."""

    rows: int
    """Number of decoding rows."""
    tokens: int
    """Sum of the committed tokens of these rows."""


class EngineCosts(Protocol):
    """Interface of the durations of forwards, in seconds. `FixedCosts` and `simulation.mac.hardware` implement it."""

    @property
    def free_prefill(self) -> bool:
        """Whether a prefill takes no time. It then runs at once, even during a decode step, and returns no token."""
        ...

    def get_pace(self, model: str) -> ChunkPace:
        """Return the pace of a model's prefill chunks, which determines their durations."""
        ...

    def estimate_step_seconds(self, loads: Mapping[str, DecodeLoad]) -> float:
        """Return the seconds of a decode step of all rows. `loads` has the decoding rows by model, at least one."""
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
        """Return `step`, the seconds of any decode step."""
        return self.step
