"""Registry of members, their links and newest reports. Drives membership and publishes the cluster view.

All of this has one owner on one event loop. `membership` decides (pure), the store persists, links transport, the
dispatcher places requests. Every path by which a node goes ends in `_delete_node_data`, which deletes the node from
every map.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import structlog

from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.cluster import membership
from coordinator.cluster.link_server import LinkServer
from coordinator.cluster.membership import CloseLink, DeleteMember, PublishMember, ResumeRequests
from coordinator.joining.enrollment import EnrollmentConnection, EnrollmentServer, sanitize_hardware
from coordinator.observe.node_rows import NodeFacts, build_node_row, can_answer, list_dangers, list_warnings
from coordinator.state.database import Database, MemberRow
from coordinator.tls.cluster_ca import CertificateRequestError, ClusterCa
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from wire.bonjour_record import plain
from wire.certificate import read_certificate
from wire.frames import (
    CertificateRenewed,
    Denied,
    Frame,
    Goodbye,
    GoodbyeReason,
    Hello,
    MemberQuery,
    PauseNode,
    RenewCertificate,
    Report,
    Welcome,
)
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, PeerIdentity
from wire.node_state import GONE, NodeState
from wire.report import Sharing

log = structlog.get_logger("coordinator.cluster.registry")
MAX_IMMEDIATE_MEMBERS = 32
"""Maximum number of members with which every report publishes a new view at once."""
PAUSE_TIMEOUT_SECONDS = 10.0
"""Longest wait for a node's report that it is paused or resumed, in seconds."""
ALIVE_REPORT_AGE_SECONDS = 3.0
"""Age of the newest report, in seconds, below which a link counts as alive. A second process with its identity is
refused."""
VIEW_BATCH_SECONDS = 0.02
"""Seconds over which the reports of a larger cluster are collected into one view."""


class RegistryListener(Protocol):
    """Callbacks of the registry, implemented by the dispatcher."""

    def set_view(self, view: ClusterView) -> None:
        """Replace the cluster view, after a change of any node."""
        ...

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Handle a frame of a node that is not about its membership, such as a frame of a request."""
        ...

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Resume the requests of a node on other nodes, because its link has ended for `reason`."""
        ...

    def remove_node(self, node: NodeId) -> None:
        """Delete all data of a node that is no longer a member."""
        ...


class Registry:
    """Members of the cluster, their links and their newest reports.

    `wall` returns Unix seconds; all other times are seconds of the loop's clock. `epoch` is sent to nodes in Welcome.
    """

    def __init__(
        self,
        store: Database,
        authority: ClusterCa,
        enrolment: EnrollmentServer,
        *,
        name: str,
        version: str,
        epoch: int,
        wall: Callable[[], float] = time.time,
        fence: GenerationFence | None = None,
    ) -> None:
        self._store = store
        self._authority = authority
        self._enrolment = enrolment
        self._name = name
        self._version = version
        self._epoch = epoch
        self._wall = wall
        self._fence = fence or GenerationFence(authority, store.meta.generation)
        self._seal = authority.seal_generation(self._fence.generation)
        self.on_superseded: Callable[[SupersededMark], None] = lambda mark: None
        """Called once a node has proved that another coordinator of this cluster has a newer generation."""
        self._loop = asyncio.get_running_loop()
        members = [row for row in store.members.values() if row.removed is None]
        self._pool = membership.restore_membership(
            (row.node for row in members), self._loop.time(), (row.node for row in members if row.cordoned)
        )
        self._reports: dict[NodeId, Report] = {}
        self._reported_at: dict[NodeId, float] = {}
        self._versions: dict[NodeId, str] = {}
        self._protocols: dict[NodeId, int] = {}
        self._views: dict[NodeId, NodeView] = {}
        self._link_numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._report_events: dict[NodeId, asyncio.Event] = {}
        self._due = 0.0
        """Loop time at which `_timer` fires. Stored because uvloop's handle has no `when` within half a millisecond of
        that time."""
        self._published = asyncio.Event()
        """Set whenever a new view is published."""
        self.listener: RegistryListener | None = None
        self.readable: Mapping[str, Callable[[], Mapping[str, Any]]] = {}
        """API paths that members may read, each with the function that returns its content."""
        self.links = LinkServer(self)
        self.addresses: tuple[str, ...] = ()
        """Addresses of the coordinator for nodes, sent in Welcome."""

    # -- callbacks of the link server -----------------------------------------------------

    def start_enrollment(self, address: str) -> EnrollmentConnection | Denied:
        """Begin an enrolment of a peer at `address`. Return `Denied` if the enrolment server refuses."""
        return self._enrolment.start_enrollment(address, self._loop.time())

    async def wait_stored(self) -> None:
        """Wait until all changes so far are on disk. Raise `StoreError` if a write failed."""
        await self._store.flush()

    def authorize(self, peer: PeerIdentity, serial: str, hello: Hello) -> Welcome | Denied:
        """Return `Welcome` if a node with this certificate may link, else `Denied` with the reason."""
        if peer.node == hello.node and hello.node in self._pool.members:
            node = NodeId(hello.node)
            self._versions[node], self._protocols[node] = plain(hello.version), hello.protocol
        if not OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL:
            older = "node" if hello.protocol < OLDEST_PROTOCOL else "coordinator"
            return Denied(
                "protocol",
                f"the node speaks protocol {hello.protocol}, the coordinator {OLDEST_PROTOCOL} to {PROTOCOL}: update "
                f"macpool on the {older}",
                final=True,
            )
        if self._fence.is_newer(hello.generation, hello.seal):
            self.on_superseded(SupersededMark(hello.generation, hello.seal, plain(hello.name), self._wall()))
            return Denied(
                "superseded", "this coordinator is not the cluster's any more: a backup was restored elsewhere"
            )
        row = self._authenticate_member(peer, serial, hello.node, hello.machine)
        if isinstance(row, Denied):
            return row
        if self._is_linked_by_another(row.node, hello):
            log.warning("linked twice", node=row.node, name=row.name, address=self.links.get_address(row.node))
            return Denied(
                "linked_elsewhere",
                f"{row.name} is linked now by another process, from {self.links.get_address(row.node)}: if its disk or "
                "state folder was copied, remove STATE/node on the copy, then join there with a new token and "
                "`--set node.machine=NAME`",
                retry_after=ALIVE_REPORT_AGE_SECONDS,
            )
        return Welcome(
            self._epoch,
            self._authority.cluster,
            self._name,
            self._wall(),
            self._version,
            self.addresses,
            self._fence.generation,
            self._seal,
        )

    def _authenticate_member(self, peer: PeerIdentity, serial: str, node: str, machine: str) -> MemberRow | Denied:
        """Return the member with this certificate, or `Denied` if it is not a member (any more)."""
        row = self._store.members.get(NodeId(node))
        if peer.node != node:
            return Denied("identity", "the node's name is not the one of its certificate", final=True)
        if row is None or row.removed is not None or self._store.is_denied(row.node, serial):
            return Denied("removed", "this node was removed from the cluster: join again with a new token", final=True)
        if row.machine != machine:
            log.warning("cloned identity", node=row.node, name=row.name)
            return Denied(
                "cloned",
                f"this identity belongs to another machine ({row.name}): join again with a new token",
                final=True,
            )
        return row

    def answer_query(self, peer: PeerIdentity, serial: str, query: MemberQuery) -> bytes | Denied:
        """Return the content of an API path as JSON. Return `Denied` to peers that are not members, and for paths not
        in `readable`."""
        row = self._authenticate_member(peer, serial, query.node, query.machine)
        if isinstance(row, Denied):
            return row
        get_content = self.readable.get(query.path)
        if get_content is None:
            paths = ", ".join(sorted(self.readable)) or "nothing yet"
            return Denied("not_readable", f"a member may read {paths}, not {plain(query.path)[:80]}", final=True)
        return json.dumps(get_content()).encode()

    def _is_linked_by_another(self, node: NodeId, hello: Hello) -> bool:
        """Return whether another process with this node's identity is linked and reports.

        A restarted node has no link, and a node whose network broke has not reported within `ALIVE_REPORT_AGE_SECONDS`.
        """
        linked = self.links.get_hello(node)
        if linked is None or linked.instance == hello.instance:
            return False
        return self._loop.time() - self._reported_at.get(node, -math.inf) < ALIVE_REPORT_AGE_SECONDS

    def on_link_up(self, node: NodeId, hello: Hello) -> int:
        """Record a new link of a member and return its sequence number."""
        number = next(self._link_numbers)
        row, hardware = self._store.members[node], sanitize_hardware(hello.hardware)
        if row.hardware != hardware:
            self._store.put_member(replace(row, hardware=hardware))
        log.info("node linked", node=node, name=row.name, link=number, takeover=hello.takeover)
        self._apply_event(node, membership.MemberConnected(number, hello.instance, hello.takeover))
        return number

    def on_link_down(self, node: NodeId, number: int, reason: str) -> None:
        """Record the end of the link with this number. Ignore a link that is not the newest of its node."""
        if node in self._pool.members and self._pool.members[node].link == number:
            log.info("node unlinked", node=node, reason=reason)
            self._apply_event(node, membership.MemberDisconnected(number, reason))

    def handle_frame(self, node: NodeId, number: int, frame: Frame) -> None:
        """Handle a frame of the link `number`: a report, goodbye or renewal. Pass other frames to the listener."""
        if type(frame) is Report:
            self._handle_report(node, number, frame)
        elif type(frame) is Goodbye:
            self._handle_goodbye(node, number, frame)
        elif type(frame) is RenewCertificate:
            self._renew_certificate(node, frame)
        elif self.listener is not None:
            self.listener.receive(node, frame)

    def _handle_report(self, node: NodeId, number: int, report: Report) -> None:
        if self._pool.members[node].link != number:
            return
        self._reports[node] = report
        self._reported_at[node] = self._loop.time()
        if (report_event := self._report_events.pop(node, None)) is not None:
            report_event.set()
        self._apply_event(node, membership.MemberReported(number, report.draining, report.sharing.paused), always=True)

    def _handle_goodbye(self, node: NodeId, number: int, goodbye: Goodbye) -> None:
        if self._pool.members[node].link != number:
            return
        log.info("node signed off", node=node, reason=goodbye.reason)
        self._apply_event(node, membership.MemberGoodbye(number, goodbye.reason))
        if goodbye.reason == GoodbyeReason.LEAVE:
            self._deny_member(node, "it left")

    def _renew_certificate(self, node: NodeId, renew: RenewCertificate) -> None:
        row = self._store.members[node]
        try:
            certificate = self._authority.sign_request(renew.csr, node, row.name)
        except CertificateRequestError as error:
            self.links.disconnect_node(node, "bad renewal", Denied("bad_request", str(error)))
            return
        self._store.put_member(replace(row, serial=read_certificate(certificate).serial))
        self.links.call_when_stored(lambda: self._send_certificate(node, certificate))

    def _send_certificate(self, node: NodeId, certificate: bytes) -> None:
        """Send a renewed certificate whose serial is on disk."""
        self.links.send(node, CertificateRenewed(certificate))

    def add_member(self, row: MemberRow) -> None:
        """Add a machine that has received a certificate to the members."""
        log.info("node enrolled", node=row.node, name=row.name)
        self._apply_event(row.node, membership.MemberEnrolled())

    # -- administration ------------------------------------------------------------------

    def find_member(self, text: str) -> NodeId | None:
        """Return the id of the member with this id or name; None if there is none.

        Of two members with the same name, prefer the member that has not left, because it has joined again.
        """
        matches = [node for node in self._pool.members if text in (node, self._get_row(node).name)]
        return min(matches, key=lambda node: self._pool.members[node].state == NodeState.LEFT, default=None)

    def set_cordoned(self, node: NodeId, *, on: bool) -> None:
        """Exclude a node from new work if `on`, otherwise admit it again. Raise `IllegalEventError` if it has left."""
        self._store.put_member(replace(self._get_row(node), cordoned=on))
        self._apply_event(node, membership.MemberCordoned() if on else membership.MemberUncordoned())

    def set_video_allowed(self, node: NodeId, *, on: bool) -> None:
        """Allow or forbid video jobs on a node. A running video job is finished."""
        self._store.put_member(replace(self._get_row(node), video=on))
        self._views.pop(node, None)
        self._publish_view()

    async def pause_node(self, node: NodeId, seconds: float | None, by: str) -> Sharing | None:
        """Order a node to pause or to resume, and return its sharing state once its report confirms that.

        `seconds` is the duration of the pause; None: until a resume; 0: resume now. `by` names the person for the
        node's owner. Return None if no report confirms the order within `PAUSE_TIMEOUT_SECONDS`. Raise `LookupError` if
        the node is not linked or cannot be paused remotely.
        """
        if not self._get_node_view(node).sharing.when:
            raise LookupError("it has not reported yet, or runs a macpool that cannot be paused from here: drain it")
        if not self.links.send(node, PauseNode(seconds, by)):
            raise LookupError("it is not linked: run the same command on that machine, without a name")
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_TIMEOUT_SECONDS):
                while self._get_node_view(node).sharing.by_hand != (seconds != 0):
                    await self._report_events.setdefault(node, asyncio.Event()).wait()
                return self._get_node_view(node).sharing
        return None

    def set_labels(self, node: NodeId, labels: tuple[str, ...]) -> None:
        """Replace all labels of a node."""
        self._store.put_member(replace(self._get_row(node), labels=labels))
        self._views.pop(node, None)
        self._publish_view()

    def remove_node(self, node: NodeId) -> None:
        """Revoke a node at once: its certificate, links and membership.

        Raise `IllegalEventError` if the node has left.
        """
        self.links.disconnect_node(
            node, "removed", Denied("removed", "this node was removed from the cluster by an administrator", final=True)
        )
        self._apply_event(node, membership.MemberRemoved())
        self._deny_member(node, "it was removed")

    def _deny_member(self, node: NodeId, why: str) -> None:
        row, now = self._get_row(node), self._wall()
        self._store.deny_node(node, now, why)
        self._store.put_member(replace(row, removed=now))

    # -- membership ------------------------------------------------------------------------

    def _apply_event(self, node: NodeId, event: membership.Event, *, always: bool = False) -> None:
        self._pool, actions = membership.advance(self._pool, node, event, self._loop.time())
        self._views.pop(node, None)
        self._perform_actions(actions, always=always)

    def tick(self, now: float | None = None) -> None:
        """Apply the transitions that are due at `now`, in seconds of the loop's clock; None for the current time."""
        self._timer = None
        self._pool, actions = membership.tick(self._pool, self._loop.time() if now is None else now)
        self._perform_actions(actions)

    def _perform_actions(self, actions: tuple[membership.Action, ...], *, always: bool = False) -> None:
        for action in actions:
            match action:
                case CloseLink():
                    self.links.close_link(action.node, action.link, action.reason)
                case ResumeRequests():
                    log.warning("node gone", node=action.node, reason=action.reason)
                    if self.listener is not None:
                        self.listener.handle_lost_node(action.node, action.reason)
                case DeleteMember():
                    self._delete_node_data(action.node)
                case PublishMember():
                    self._views.pop(action.node, None)
                    member = self._pool.members[action.node]
                    log.info("node state", node=action.node, state=member.state, reason=member.reason)
        if actions or always:
            self._publish_view()
        if actions or self._timer is None:  # a report only postpones deadlines, and an early tick has no effect
            self._schedule_tick()

    def _delete_node_data(self, node: NodeId) -> None:
        for by_node in (
            self._reports,
            self._reported_at,
            self._report_events,
            self._versions,
            self._protocols,
            self._views,
        ):
            by_node.pop(node, None)
        if self.listener is not None:
            self.listener.remove_node(node)

    def _schedule_tick(self) -> None:
        due = membership.next_deadline(self._pool, self._loop.time())
        if self._timer is not None:
            if due is not None and self._due <= due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self.tick)
        self._due = due or 0.0

    def _publish_view(self) -> None:
        """Publish a new view: at once, or in a large cluster with all changes of the next `VIEW_BATCH_SECONDS`."""
        if len(self._pool.members) <= MAX_IMMEDIATE_MEMBERS:
            self._publish_view_now()
        elif self._publishing is None:
            self._publishing = self._loop.call_later(VIEW_BATCH_SECONDS, self._publish_view_now)

    def _publish_view_now(self) -> None:
        self._publishing = None
        view = self.build_view()
        self._published.set()
        if self.listener is not None:
            self.listener.set_view(view)

    async def wait_until_node_answers(self, get_node_id: Callable[[], str]) -> None:
        """Wait until the node whose id `get_node_id` returns is a member and can answer requests."""
        while (node := NodeId(get_node_id())) not in self._pool.members or not can_answer(self._get_node_view(node)):
            self._published.clear()
            await self._published.wait()

    def close(self) -> None:
        """Cancel the timers."""
        if self._publishing is not None:
            self._publishing.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # -- pictures ------------------------------------------------------------------------------

    def build_view(self) -> ClusterView:
        """Return the view for placement: every member, including sleeping and lost ones.

        The view of a node stays the same object until a value of that node changes.
        """
        return ClusterView(tuple(self._get_node_view(node) for node in self._pool.members))

    def _get_node_view(self, node: NodeId) -> NodeView:
        view = self._views.get(node)
        if view is None:
            view = self._views[node] = self._build_node_view(node)
        return view

    def _build_node_view(self, node: NodeId) -> NodeView:
        member, name, report = self._pool.members[node], self._get_row(node).name, self._reports.get(node)
        if report is None:
            row = self._get_row(node)
            return NodeView(
                node, name, member.state, member.cordoned, labels=frozenset(row.labels), video_allowed=row.video
            )
        return build_node_view(
            report,
            node=node,
            name=name,
            state=member.state,
            reported_at=self._reported_at[node],
            cordoned=member.cordoned,
            epoch=member.link,
            labels=frozenset(self._get_row(node).labels),
            video_allowed=self._get_row(node).video,
        )

    def _get_row(self, node: NodeId) -> MemberRow:
        return self._store.members[node]

    @property
    def pool(self) -> membership.Membership:
        """Current membership."""
        return self._pool

    def describe_host(self, node: NodeId) -> tuple[str, str, str]:
        """Return a member's chip, operating system and macpool version. The version is empty before its first link."""
        hardware = self._get_row(node).hardware
        return hardware.chip, hardware.system, self._versions.get(node, "")

    def count_states(self) -> dict[str, int]:
        """Count the members by state, including states without members."""
        counts = {state.value: 0 for state in NodeState}
        for member in self._pool.members.values():
            counts[member.state.value] += 1
        return counts

    def list_warnings(self) -> list[str]:
        """Return texts on all conditions of the pool and of linked nodes that need a person, dangers first."""
        texts = self.list_dangers()
        if self._pool.self_suspect:
            texts.append("half of the nodes fell silent at once: look at this machine's own network first")
        for view in self._list_linked_views():
            texts += [f"{view.name}: {text}" for text in list_warnings(view)]
        return texts

    def list_dangers(self) -> list[str]:
        """Return the conditions of linked nodes that endanger memory, as texts with the name of the node.

        Such conditions are reduced memory protection and usage over the cap. They persist until a person acts.
        """
        return [f"{view.name}: {text}" for view in self._list_linked_views() for text in list_dangers(view)]

    def _list_linked_views(self) -> list[NodeView]:
        """Return the views of nodes with a current report; a node that is gone reports nothing."""
        views = [self._get_node_view(node) for node in self._reports]
        return [view for view in views if view.state not in GONE]

    def build_node_row(self, node: NodeId, in_flight: int) -> dict[str, Any]:
        """Return one node as a row of the API, with `in_flight` as its number of requests.

        Sizes are in bytes; None means unknown.
        """
        reported_at = self._reported_at.get(node)
        facts = NodeFacts(
            reported=node in self._reports,
            version=self._versions.get(node, ""),
            protocol=self._protocols.get(node, 0),
            in_flight=in_flight,
            reported_seconds_ago=None if reported_at is None else round(self._loop.time() - reported_at, 3),
        )
        return build_node_row(self._get_node_view(node), self._pool.members[node], self._get_row(node), facts)
