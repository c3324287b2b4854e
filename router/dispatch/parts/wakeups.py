"""Wake-ups: retries of queued requests after changes of nodes, and waits for drained nodes."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from router.admission.queue import AdmissionQueue
from router.placement.cluster_view import NodeView
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId


class NodeChanges:
    """Nodes that changed since the last retry of the queued requests.

    The first change schedules a call of `wake` on the event loop. Further changes before that call do not schedule
    another call.
    """

    def __init__(self, queue: AdmissionQueue[Any], ledger: ReservationLedger, wake: Callable[[], None]) -> None:
        self._queue = queue
        self._ledger = ledger
        self._wake = wake
        self._changed: set[NodeId] = set()
        self._due = False

    def mark(self, node: NodeId) -> None:
        """Record a change of a node, and schedule a call of `wake` unless one is scheduled.

        Do nothing while no request is queued and no model swap is running.
        """
        if not (self._ledger.turns or len(self._queue)):
            return
        self._changed.add(node)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._wake)

    def begin_retry(self) -> None:
        """Begin a retry. The next change then schedules another call of `wake`."""
        self._due = False

    def take_nodes(self) -> set[NodeId]:
        """Return the nodes that changed since the last call, and forget them."""
        changed, self._changed = self._changed, set()
        return changed

    def remove_node(self, node: NodeId) -> None:
        """Remove a node that is no longer a member."""
        self._changed.discard(node)


class DrainWaits:
    """Waits until nodes have no request of this router."""

    def __init__(self, ledger: ReservationLedger) -> None:
        self._ledger = ledger
        self.waits: dict[NodeId, list[asyncio.Event]] = {}
        """Events of the callers that wait for each node. Only this class may change them."""

    def add_wait(self, node: NodeId) -> asyncio.Event:
        """Return an event that is set when the last request leaves the node, or by `end_uncordoned`.

        The event is not set if the node has no request at the time of this call. Pass the event to `remove_wait` after
        the wait.
        """
        empty = asyncio.Event()
        self.waits.setdefault(node, []).append(empty)
        return empty

    def remove_wait(self, node: NodeId, empty: asyncio.Event) -> None:
        """Remove an event of `add_wait`. Do nothing if `end_uncordoned` has already removed it."""
        waits = self.waits.get(node, [])
        if empty in waits:
            waits.remove(empty)
        if not waits:
            self.waits.pop(node, None)

    def end_uncordoned(self, before: Mapping[NodeId, NodeView], changed: Iterable[NodeView]) -> list[NodeId]:
        """End the waits for nodes that were uncordoned, even if these have requests.

        `before` has the former views of the nodes, `changed` the new views. Return the nodes for which a caller still
        waits.
        """
        for node in changed:
            former = before.get(node.id)
            if former is not None and former.cordoned and not node.cordoned:
                for empty in self.waits.pop(node.id, ()):
                    empty.set()
        return list(self.waits)

    def notify(self, node: NodeId) -> None:
        """Set the events of a node if it has no request of this router."""
        if node in self.waits and not self._ledger.count_in_flight(node):
            for empty in self.waits[node]:
                empty.set()
