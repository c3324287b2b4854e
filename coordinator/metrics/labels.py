"""Limits for label values that nodes send. A node that changes its texts in every report creates no new series.

Texts of a node (model names; chip, system and version together) are admitted in order of arrival, up to a maximum for
each node. An admitted text counts until its node is removed or the coordinator restarts. A later text becomes `OTHER`,
or has no series.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from coordinator.metrics.families import MAX_MODELS_PER_NODE, OTHER
from wire.identity import NodeId
from wire.report import Model

MAX_HOST_LABELS = 4
"""Maximum combinations of chip, system and version of a node. Updates of the node change the combination."""
HostLabels = tuple[str, str, str]
"""Chip, operating system and version of Macpool."""
T = TypeVar("T", bound=Hashable)


class _AdmittedValues(Generic[T]):
    """Bounded sets of values, one per node."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._known: dict[NodeId, set[T]] = {}

    def admit(self, node: NodeId, value: T) -> bool:
        known = self._known.setdefault(node, set())
        if len(known) < self._max_values:
            known.add(value)
        return value in known

    def retain_members(self, members: set[NodeId]) -> None:
        for node in self._known.keys() - members:
            del self._known[node]


class AdmittedLabels:
    """Texts that are admitted as label values, by node, until the node is removed or the coordinator restarts."""

    def __init__(self) -> None:
        self._models: _AdmittedValues[str] = _AdmittedValues(MAX_MODELS_PER_NODE)
        self._hosts: _AdmittedValues[HostLabels] = _AdmittedValues(MAX_HOST_LABELS)

    def admit_models(self, node: NodeId, models: Iterable[Model]) -> tuple[Model, ...]:
        """Return those of a node's models that may have their own series.

        New models are admitted in the given order, until the node has `MAX_MODELS_PER_NODE`.
        """
        return tuple(model for model in models if self._models.admit(node, model.name))

    def admit_host(self, node: NodeId, about: HostLabels) -> HostLabels:
        """Return a node's chip, system and version, or `OTHER` for all three above `MAX_HOST_LABELS` combinations."""
        return about if self._hosts.admit(node, about) else (OTHER, OTHER, OTHER)

    def retain_members(self, members: Iterable[NodeId]) -> None:
        """Delete the admitted label values of all nodes that are not in `members`."""
        left = set(members)
        self._models.retain_members(left)
        self._hosts.retain_members(left)
