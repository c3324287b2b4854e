"""Registry of members, which passes events of links and administrators to membership, and publishes the cluster view.

All of this runs on one event loop. `membership` decides (pure), `NodeRecords` has the newest reports, the link table
transports, the dispatcher places requests. Every deletion of a node ends in `_delete_node`, which deletes it from the
records and from the listener.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import structlog

from coordinator.cluster import membership
from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.member_authentication import MemberAuthentication
from coordinator.cluster.member_state import (
    START_SECONDS,
    Action,
    CloseLink,
    DeleteMember,
    Event,
    MemberConnected,
    MemberDisconnected,
    MemberEnrolled,
    MemberGoodbye,
    MemberReported,
    PublishMember,
    ResumeRequests,
)
from coordinator.cluster.node_records import NodeRecords
from coordinator.cluster.store_barrier import StoreBarrier
from coordinator.joining.enrollment import sanitize_hardware
from coordinator.observe.node_rows import can_answer
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import CertificateRequestError
from router.placement.cluster_view import ClusterView, NodeView
from wire.frames import CertificateRenewed, Denied, Frame, Goodbye, GoodbyeReason, Hello, RenewCertificate, Report
from wire.identity import NodeId
from wire.state_machine import IllegalEventCounts, StateMachine

log = structlog.get_logger("coordinator.cluster.registry")
MAX_IMMEDIATE_MEMBERS = 32
"""Maximum number of members up to which every report publishes a new view at once."""
VIEW_BATCH_SECONDS = 0.02
"""Seconds over which the changes of a larger cluster are combined into one view."""


class RegistryListener(Protocol):
    """Callbacks of the registry, implemented by the dispatcher and by `ListenerFanout`, which forwards to several."""

    def set_view(self, view: ClusterView) -> None:
        """Replace the cluster view, because a node has changed."""
        ...

    @property
    def receivers(self) -> Mapping[type[Frame], Callable[[NodeId, Any], None]]:
        """Functions for frames that are not about membership, such as frames of a request, by the type of frame."""
        ...

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Resume the requests of a node on other nodes, because its link has ended for `reason`."""
        ...

    def remove_node(self, node: NodeId) -> None:
        """Delete all data of a node that is no longer a member."""
        ...


class Registry:
    """Membership of all nodes, changed by their links and by administrators. Times are seconds of the loop's clock."""

    def __init__(
        self,
        store: Database,
        records: NodeRecords,
        links: LinkTable,
        authentication: MemberAuthentication,
        barrier: StoreBarrier,
        listener: RegistryListener,
        illegal_events: IllegalEventCounts,
    ) -> None:
        self._store = store
        self._records = records
        self._links = links
        self._authentication = authentication
        self._barrier = barrier
        self._listener = listener
        self._receivers = listener.receivers
        self._illegal_events = illegal_events
        self._loop = asyncio.get_running_loop()
        members = [row for row in store.members.values() if row.removed is None]
        self._expected = frozenset(row.node for row in members)
        """Members that are expected to connect until `_connected_by`, after the start of the coordinator."""
        self._connected_by = self._loop.time() + START_SECONDS
        self._pool = membership.restore_membership(
            (row.node for row in members), self._loop.time(), (row.node for row in members if row.cordoned)
        )
        self._link_numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """Loop time at which `_timer` fires. Stored because uvloop's handle has no `when` within half a millisecond of
        that time."""
        self._publishing: asyncio.TimerHandle | None = None
        self._published = asyncio.Event()
        """Set whenever a new view is published."""

    @property
    def pool(self) -> membership.Membership:
        """Current membership."""
        return self._pool

    def build_view(self) -> ClusterView:
        """Return the view for placement with every listed node, including nodes that sleep, are lost or have left.

        The view of a node stays the same object until a value of that node changes.
        """
        expected = self._list_expected()
        return ClusterView(
            tuple(
                self._records.get_view(member, expected=node in expected) for node, member in self._pool.members.items()
            )
        )

    def get_node_view(self, node: NodeId) -> NodeView:
        """Return the view of a listed node for placement. The view of a node that has left omits its last report.

        Raise `KeyError` if the node is not listed.
        """
        return self._records.get_view(self._pool.members[node], expected=node in self._list_expected())

    def _list_expected(self) -> frozenset[NodeId]:
        return self._expected if self._loop.time() < self._connected_by else frozenset()

    def close(self) -> None:
        """Cancel the timers for deadlines of members and for the next cluster view."""
        if self._publishing is not None:
            self._publishing.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # -- events of links -------------------------------------------------------------------

    def on_link_up(self, node: NodeId, hello: Hello) -> int:
        """Record a new link of a member and return its sequence number. Store changed hardware of the machine.

        If the hardware cannot be stored, the link stays open, because the pool serves without the store. Raise
        `IllegalEventError` if the member has left.
        """
        number = next(self._link_numbers)
        row, hardware = self._store.members[node], sanitize_hardware(hello.hardware)
        if row.hardware != hardware:
            try:
                self._store.members.put(replace(row, hardware=hardware))
            except StoreError as error:
                log.warning("hardware not stored", node=node, name=row.name, error=str(error))
        log.info("node linked", node=node, name=row.name, link=number, takeover=hello.takeover)
        self.apply_event(node, MemberConnected(number, hello.instance, hello.takeover))
        return number

    def on_link_down(self, node: NodeId, number: int, reason: str) -> None:
        """Record the end of the link `number`. Ignore a link that is not the newest of its node."""
        if node in self._pool.members and self._pool.members[node].link == number:
            log.info("node unlinked", node=node, reason=reason)
            self.apply_event(node, MemberDisconnected(number, reason))

    def handle_frame(self, node: NodeId, number: int, frame: Frame) -> None:
        """Process a frame of the link `number`: a report, goodbye or renewal. Pass other frames to their receivers.

        Reports and goodbyes of an older link are ignored. An invalid renewal disconnects the node. If changes cannot be
        written, the error is logged and the link stays open.
        """
        receive = self._receivers.get(type(frame))
        try:
            if receive is not None:
                receive(node, frame)
            elif type(frame) is Report:
                self._handle_report(node, number, frame)
            elif type(frame) is Goodbye:
                self._handle_goodbye(node, number, frame)
            elif type(frame) is RenewCertificate:
                self._renew_certificate(node, frame)
        except StoreError as error:
            log.warning("frame not stored", node=node, frame=type(frame).__name__, error=str(error))

    def _handle_report(self, node: NodeId, number: int, report: Report) -> None:
        if self._pool.members[node].link != number:
            return
        self._records.record_report(node, report, self._loop.time())
        event = MemberReported(number, report.draining, report.sharing.paused)
        actions = self._advance(node, event)
        self._perform_actions(actions)
        if not actions:
            self.publish_view()

    def _handle_goodbye(self, node: NodeId, number: int, goodbye: Goodbye) -> None:
        if self._pool.members[node].link != number:
            return
        log.info("node signed off", node=node, reason=goodbye.reason)
        self.apply_event(node, MemberGoodbye(number, goodbye.reason))
        if goodbye.reason == GoodbyeReason.LEAVE:
            self._authentication.revoke(node, "it left")

    def _renew_certificate(self, node: NodeId, renew: RenewCertificate) -> None:
        try:
            certificate = self._authentication.renew_certificate(node, renew.csr)
        except CertificateRequestError as error:
            self._links.disconnect_node(node, "bad renewal", Denied("bad_request", str(error)))
            return
        self._barrier.call_when_stored(lambda: self._send_certificate(node, certificate))

    def _send_certificate(self, node: NodeId, certificate: bytes) -> None:
        """Send a renewed certificate whose serial is on disk."""
        self._links.send(node, CertificateRenewed(certificate))

    # -- membership ------------------------------------------------------------------------

    def add_member(self, row: MemberRow) -> None:
        """Make the machine in `row`, which has received a certificate, a member. The store already has the row."""
        log.info("node enrolled", node=row.node, name=row.name)
        self.apply_event(row.node, MemberEnrolled())

    def apply_event(self, node: NodeId, event: Event) -> None:
        """Apply an event to the membership of a node and perform the resulting actions.

        Raise `IllegalEventError`, without any change, if the event is illegal in the node's state.
        """
        self._perform_actions(self._advance(node, event))

    def _advance(self, node: NodeId, event: Event) -> tuple[Action, ...]:
        with self._illegal_events.count_errors(StateMachine.MEMBERSHIP):
            self._pool, actions = membership.advance(self._pool, node, event, self._loop.time())
        return actions

    def tick(self, now: float | None = None) -> None:
        """Apply the transitions that are due at `now`, in seconds of the loop's clock; None for the current time."""
        self._timer = None
        self._pool, actions = membership.tick(self._pool, self._loop.time() if now is None else now)
        self._perform_actions(actions)

    def _perform_actions(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case CloseLink():
                    self._links.close_link(action.node, action.link, action.reason)
                case ResumeRequests():
                    log.warning("node gone", node=action.node, reason=action.reason)
                    self._links.abort_retired_links(action.node, f"its requests are resumed: {action.reason}")
                    self._listener.handle_lost_node(action.node, action.reason)
                case DeleteMember():
                    self._delete_node(action.node)
                case PublishMember():
                    member = self._pool.members[action.node]
                    log.info("node state", node=action.node, state=member.state, reason=member.reason)
        if actions:
            self.publish_view()
        if actions or self._timer is None:  # a report only postpones deadlines, and an early tick has no effect
            self._schedule_tick()

    def _delete_node(self, node: NodeId) -> None:
        self._records.delete(node)
        self._listener.remove_node(node)

    def _schedule_tick(self) -> None:
        due = membership.next_deadline(self._pool, self._loop.time())
        if self._timer is not None:
            if due is not None and self._due <= due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self.tick)
        self._due = due or 0.0

    # -- publication -----------------------------------------------------------------------

    def publish_view(self) -> None:
        """Publish a new view: at once, or, in a large cluster, with all changes of the next `VIEW_BATCH_SECONDS`."""
        if len(self._pool.members) <= MAX_IMMEDIATE_MEMBERS:
            self._publish_view_now()
        elif self._publishing is None:
            self._publishing = self._loop.call_later(VIEW_BATCH_SECONDS, self._publish_view_now)

    def _publish_view_now(self) -> None:
        self._publishing = None
        view = self.build_view()
        self._published.set()
        self._listener.set_view(view)

    async def wait_until_node_answers(self, get_node_id: Callable[[], str]) -> None:
        """Wait until the node with the id `get_node_id()` is a member and can answer requests (`can_answer`).

        The wait has no time limit. `get_node_id` is called again for each new view.
        """
        while (node := NodeId(get_node_id())) not in self._pool.members or not can_answer(self.get_node_view(node)):
            self._published.clear()
            await self._published.wait()
