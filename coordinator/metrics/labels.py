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
"""Chips, systems and versions of a node: it is updated now and then."""
About = tuple[str, str, str]
T = TypeVar("T", bound=Hashable)


class _Admitted(Generic[T]):
    """A bounded number of values of each node."""

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
    """The texts that were admitted, by node."""

    def __init__(self) -> None:
        self._models: _Admitted[str] = _Admitted(MAX_MODELS_PER_NODE)
        self._about: _Admitted[About] = _Admitted(MAX_HOST_LABELS)

    def models(self, node: NodeId, models: Iterable[Model]) -> tuple[Model, ...]:
        """Return a node's models that have series, in order of priority."""
        return tuple(model for model in models if self._models.admits(node, model.name))

    def about(self, node: NodeId, about: About) -> About:
        """Return a node's description, or `OTHER` values at its limit."""
        return about if self._about.admits(node, about) else (OTHER, OTHER, OTHER)

    def keep(self, members: Iterable[NodeId]) -> None:
        """Delete the texts of all nodes except these."""
        left = set(members)
        self._models.keep(left)
        self._about.keep(left)
