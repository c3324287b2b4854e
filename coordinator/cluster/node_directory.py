"""Directory of the members for people: search by name, rows of the API, and warnings."""

import asyncio
from typing import Any

from coordinator.cluster.node_records import NodeRecords
from coordinator.cluster.registry import Registry
from coordinator.observe.node_rows import NodeFacts, build_node_row, list_dangers, list_warnings
from coordinator.state.database import Database
from router.placement.cluster_view import NodeView
from wire.identity import NodeId
from wire.node_state import GONE, NodeState


class NodeDirectory:
    """Descriptions of the members, read from the registry, the records and the store."""

    def __init__(self, registry: Registry, records: NodeRecords, store: Database) -> None:
        self._registry = registry
        self._records = records
        self._store = store
        self._loop = asyncio.get_running_loop()

    def find_member(self, text: str) -> NodeId | None:
        """Return the id of the member with this id or name; None if there is none.

        If two members have the same name, return the one that has not left.
        """
        members = self._registry.pool.members
        matches = [node for node in members if text in (node, self._store.members[node].name)]
        return min(matches, key=lambda node: members[node].state == NodeState.LEFT, default=None)

    def get_name(self, node: NodeId) -> str:
        """Return the display name of a node that has ever joined; the id of an unknown node."""
        row = self._store.members.get(node)
        return str(node) if row is None else row.name

    def describe_host(self, node: NodeId) -> tuple[str, str, str]:
        """Return a member's chip, operating system and version of Macpool.

        The version is empty until the member has linked since the coordinator started. Raise `KeyError` for an unknown
        node.
        """
        hardware = self._store.members[node].hardware
        return hardware.chip, hardware.system, self._records.get_software(node)[0]

    def count_states(self) -> dict[str, int]:
        """Return the number of members in each state; 0 for a state without members."""
        counts = {state.value: 0 for state in NodeState}
        for member in self._registry.pool.members.values():
            counts[member.state.value] += 1
        return counts

    def list_warnings(self) -> list[str]:
        """Return warnings as texts for people: first dangers, then suspicion of the coordinator's network, then faults.

        The faults are those of nodes, named in the text. Nodes that are lost, asleep or have left are omitted.
        """
        texts = self.list_dangers()
        if self._registry.pool.self_suspect:
            texts.append("half of the nodes fell silent at once: look at this machine's own network first")
        for view in self._list_linked_views():
            texts += [f"{view.name}: {text}" for text in list_warnings(view)]
        return texts

    def list_dangers(self) -> list[str]:
        """Return the conditions of nodes that endanger memory, as texts with the name of the node.

        Such conditions are reduced memory protection, and usage above the cap minus leases. Nodes that are lost, asleep
        or have left are omitted.
        """
        return [f"{view.name}: {text}" for view in self._list_linked_views() for text in list_dangers(view)]

    def _list_linked_views(self) -> list[NodeView]:
        """Return the views of the nodes that have reported and whose state is not in `GONE`."""
        views = [self._registry.get_node_view(node) for node in self._records.list_reported()]
        return [view for view in views if view.state not in GONE]

    def build_node_row(self, node: NodeId, in_flight: int) -> dict[str, Any]:
        """Return one node as a row of the API. `in_flight` is the number of its requests.

        Sizes are in bytes; None means unknown. Raise `KeyError` if the node is not a member.
        """
        reported_at = self._records.get_reported_at(node)
        version, protocol = self._records.get_software(node)
        facts = NodeFacts(
            reported=reported_at is not None,
            version=version,
            protocol=protocol,
            in_flight=in_flight,
            reported_seconds_ago=None if reported_at is None else round(self._loop.time() - reported_at, 3),
        )
        registry = self._registry
        return build_node_row(
            registry.get_node_view(node), registry.pool.members[node], self._store.members[node], facts
        )
