"""Counters of the actions for wishes, and the wishes' part of a metrics snapshot. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.models.wishes import LoadWish, WishAction


class ActionOutcome(StrEnum):
    """Outcome of an action for a wish."""

    DONE = "done"
    REFUSED = "refused"
    """The node refused the action."""
    FAILED = "failed"


@dataclass(slots=True)
class WishCounters:
    """Ended actions since the start of the coordinator, by model and outcome."""

    loads: dict[tuple[str, ActionOutcome], int] = field(default_factory=dict[tuple[str, ActionOutcome], int])
    unloads: dict[tuple[str, ActionOutcome], int] = field(default_factory=dict[tuple[str, ActionOutcome], int])

    def count_end(self, action: WishAction, outcome: ActionOutcome) -> None:
        """Count the end of an action, by its model and `outcome`."""
        counts = self.loads if isinstance(action, LoadWish) else self.unloads
        counts[action.model, outcome] = counts.get((action.model, outcome), 0) + 1


@dataclass(frozen=True, slots=True)
class WishSnapshot:
    """Counters of wishes, and the numbers of their replicas at one moment, for metrics."""

    counters: WishCounters = field(default_factory=WishCounters)
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Number of wanted and of ready replicas, by model."""
