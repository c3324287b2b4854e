"""Limits for label values that nodes send. A node that changes its texts in every report creates no new series.

Texts of a node (model names; chip, system and version together) are admitted in order of arrival. Their number is
bounded for the coordinator's run. A later text becomes `OTHER`, or has no series.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from coordinator.metrics.families import MAX_MODELS_PER_NODE, OTHER
from wire.identity import NodeId
from wire.report import Model

MAX_HOST_LABELS = 4
"""Maximum combinations of chip, system and version of a node, which change with updates."""
About = tuple[str, str, str]
T = TypeVar("T", bound=Hashable)


class _Admitted(Generic[T]):
    """Bounded sets of values, one per node."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[NodeId, set[T]] = {}

    def admits(self, node: NodeId, value: T) -> bool:
        known = self._known.setdefault(node, set())
        if len(known) < self._most:
            known.add(value)
        return value in known

    def keep(self, members: set[NodeId]) -> None:
        for gone in self._known.keys() - members:
            del self._known[gone]


class AdmittedLabels:
    """Texts of nodes that were admitted as label values, until the coordinator restarts."""

    def __init__(self) -> None:
        self._models: _Admitted[str] = _Admitted(MAX_MODELS_PER_NODE)
        self._about: _Admitted[About] = _Admitted(MAX_HOST_LABELS)

    def models(self, node: NodeId, models: Iterable[Model]) -> tuple[Model, ...]:
        """Return those of a node's models that may have series.

        Further models are admitted in the given order, which is by priority, up to `MAX_MODELS_PER_NODE`.
        """
        return tuple(model for model in models if self._models.admits(node, model.name))

    def about(self, node: NodeId, about: About) -> About:
        """Return a node's chip, system and version, or `OTHER` for all three above `MAX_HOST_LABELS` combinations."""
        return about if self._about.admits(node, about) else (OTHER, OTHER, OTHER)

    def keep(self, members: Iterable[NodeId]) -> None:
        """Delete the texts of all nodes except these."""
        left = set(members)
        self._models.keep(left)
        self._about.keep(left)
