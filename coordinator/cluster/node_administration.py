"""Administrators' orders about a node: cordon, permission for videos, labels, pause and removal."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.member_authentication import MemberAuthentication
from coordinator.cluster.member_state import MemberCordoned, MemberRemoved, MemberUncordoned
from coordinator.cluster.node_records import NodeRecords
from coordinator.cluster.registry import Registry
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from wire.frames import Denied, PauseNode
from wire.identity import NodeId
from wire.report import Sharing

PAUSE_TIMEOUT_SECONDS = 10.0
"""Maximum wait for a node's report that it is paused or resumed, in seconds."""


@dataclass(frozen=True, slots=True)
class NodeAdministration:
    """Administrators' orders about nodes, with their effects on the store, the membership and the links.

    If a method raises `StoreError`, its change is in effect and waits for the disk.
    """

    store: Database
    registry: Registry
    records: NodeRecords
    links: LinkTable
    authentication: MemberAuthentication

    def set_cordoned(self, node: NodeId, *, on: bool) -> None:
        """Exclude a node from new work if `on`, otherwise admit it again.

        Raise `IllegalEventError`, without any change, if the node has left or is unknown. Raise `StoreError` after a
        failed write.
        """
        self.registry.apply_event(node, MemberCordoned() if on else MemberUncordoned())
        self.store.members.put(replace(self.store.members[node], cordoned=on))

    def set_video_allowed(self, node: NodeId, *, on: bool) -> None:
        """Allow or forbid video jobs on a node. A running video job continues to its end.

        Raise `KeyError` for an unknown node, `StoreError` after a failed write.
        """
        self._store_row(replace(self.store.members[node], video=on))

    def set_labels(self, node: NodeId, labels: tuple[str, ...]) -> None:
        """Replace all labels of a node. Raise `KeyError` for an unknown node, `StoreError` after a failed write."""
        self._store_row(replace(self.store.members[node], labels=labels))

    def remove_node(self, node: NodeId) -> None:
        """Close the links of a node at once, end its membership and revoke its certificates.

        Other nodes resume its requests if possible. Raise `IllegalEventError` if the node has left or is unknown. Raise
        `StoreError` after a failed write; the removal is then in effect, and its changes wait for the disk.
        """
        self.links.disconnect_node(
            node, "removed", Denied("removed", "this node was removed from the cluster by an administrator", final=True)
        )
        self.registry.apply_event(node, MemberRemoved())
        self.authentication.revoke(node, "it was removed")

    async def pause_node(self, node: NodeId, seconds: float | None, by: str) -> Sharing | None:
        """Order a node to pause or to resume, and return its sharing state once its report confirms that.

        `seconds` is the duration of the pause; None: until a resume; 0: resume immediately. `by` names the person who
        orders the pause, as text for the node's owner.

        If the newest report already has the ordered state, its sharing state is returned at once. A pause of `seconds`
        is confirmed when the reported end differs from the former one. Return None if no report confirms the order
        within `PAUSE_TIMEOUT_SECONDS`. Raise `LookupError` if the node is unknown, has not reported, is not linked, or
        cannot be paused remotely.
        """
        before = self._get_sharing(node)
        if not before.when:
            raise LookupError("it has not reported yet, or runs a macpool that cannot be paused from here: drain it")
        if not self.links.send(node, PauseNode(seconds, by)):
            raise LookupError("it is not linked: run the same command on that machine, without a name")
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_TIMEOUT_SECONDS):
                while not _is_confirmed(seconds, before, self._get_sharing(node)):
                    await self.records.wait_for_report(node)
                return self._get_sharing(node)
        return None

    def _store_row(self, row: MemberRow) -> None:
        """Store the row of a member and publish the view, also if the row is not written now."""
        try:
            self.store.members.put(row)
        finally:
            self.registry.publish_view()

    def _get_sharing(self, node: NodeId) -> Sharing:
        return self.registry.get_node_view(node).sharing


def _is_confirmed(seconds: float | None, before: Sharing, now: Sharing) -> bool:
    """Return whether a node's sharing state `now` confirms an order of `pause_node`.

    `before` is the sharing state at the time of the order.
    """
    if seconds == 0:
        return not now.by_hand
    if seconds is None:
        return now.by_hand and now.until is None
    return now.by_hand and now.until not in (None, before.until)
