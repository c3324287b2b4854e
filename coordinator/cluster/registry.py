"""The registry: members, their links and newest reports; it drives membership and publishes the view.

One owner of all of it, on one loop. Membership decides (`membership`, pure), the store remembers, links carry, the
dispatcher places. Every path by which a node goes ends in `_forget`, so nothing of it stays behind in any map.
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

from coordinator.backup.generation_fence import Fence, Mark
from coordinator.cluster import membership
from coordinator.cluster.link_server import LinkServer
from coordinator.cluster.membership import GONE, Changed, CloseLink, Forget, NodeGone, State
from coordinator.joining.enrollment import Conversation, Enrolment, plain_hardware
from coordinator.observe.node_rows import Told, can_answer, dangers_of, node_row, warnings_of
from coordinator.state.database import MemberRow, Store
from coordinator.tls.cluster_ca import Authority, BadRequestError
from router.placement.cluster_view import ClusterView, NodeView, view_of
from wire.bonjour_record import plain
from wire.certificate import read_certificate
from wire.frames import Denied, Frame, Goodbye, Hello, Pause, Query, Renew, Renewed, Report, Welcome
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, Peer
from wire.report import Sharing

log = structlog.get_logger("coordinator.cluster.registry")
AT_ONCE = 32
"""Members up to which every report makes a new picture at once."""
PAUSE_SECONDS = 10.0
"""Longest wait for a node's report that it is paused, or resumed."""
LINKED_SECONDS = 3.0
"""Age of the newest report below which a link counts as alive: a second process with its identity is refused."""
MOMENT = 0.02
"""Seconds in which the reports of a larger cluster are gathered into one picture."""


class Placing(Protocol):
    """What the registry tells the dispatcher."""

    def set_view(self, view: ClusterView) -> None:
        """The picture of the cluster changed."""
        ...

    def receive(self, node: NodeId, frame: Frame) -> None:
        """A node said something about a request."""
        ...

    def node_gone(self, node: NodeId, reason: str) -> None:
        """What ran there must go on elsewhere."""
        ...

    def forget(self, node: NodeId) -> None:
        """It is no member any more."""
        ...


class Registry:
    """Members and their state. `wall` gives Unix seconds; everything else is in the loop's seconds."""

    def __init__(
        self,
        store: Store,
        authority: Authority,
        enrolment: Enrolment,
        *,
        name: str,
        version: str,
        epoch: int,
        wall: Callable[[], float] = time.time,
        fence: Fence | None = None,
    ) -> None:
        self._store = store
        self._authority = authority
        self._enrolment = enrolment
        self._name = name
        self._version = version
        self._epoch = epoch
        self._wall = wall
        self._fence = fence or Fence(authority, store.meta.generation)
        self._seal = authority.seal(self._fence.generation)
        self.on_superseded: Callable[[Mark], None] = lambda mark: None
        """Told once a node has proved that another coordinator of this cluster counts more than we do."""
        self._loop = asyncio.get_running_loop()
        members = [row for row in store.members.values() if row.removed is None]
        self._pool = membership.restored(
            (row.node for row in members), self._loop.time(), (row.node for row in members if row.cordoned)
        )
        self._reports: dict[NodeId, Report] = {}
        self._heard: dict[NodeId, float] = {}
        self._versions: dict[NodeId, str] = {}
        self._protocols: dict[NodeId, int] = {}
        self._views: dict[NodeId, NodeView] = {}
        self._link_numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._heard_of: dict[NodeId, asyncio.Event] = {}
        self._due = 0.0
        """Kept beside the timer: due within half a millisecond, uvloop's handle has no `when`."""
        self._published = asyncio.Event()
        """Set whenever there is a new picture."""
        self.placing: Placing | None = None
        self.readable: Mapping[str, Callable[[], Mapping[str, Any]]] = {}
        """Paths of the API that members may read, and what they show."""
        self.links = LinkServer(self)
        self.addresses: tuple[str, ...] = ()
        """Where nodes can reach us, told in Welcome."""

    # -- what the link server asks -----------------------------------------------------

    def converse(self, address: str) -> Conversation | Denied:
        """Begin an enrolment."""
        return self._enrolment.converse(address, self._loop.time())

    async def stored(self) -> None:
        """Wait until every change so far is on the disk. StoreError when one could not be written."""
        await self._store.flush()

    def greet(self, peer: Peer, serial: str, hello: Hello) -> Welcome | Denied:
        """Say whether a node with this certificate may link, and why not."""
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
        if self._fence.newer(hello.generation, hello.seal):
            self.on_superseded(Mark(hello.generation, hello.seal, plain(hello.name), self._wall()))
            return Denied(
                "superseded", "this coordinator is not the cluster's any more: a backup was restored elsewhere"
            )
        row = self._member(peer, serial, hello.node, hello.machine)
        if isinstance(row, Denied):
            return row
        if self._linked_by_another(row.node, hello):
            log.warning("linked twice", node=row.node, name=row.name, address=self.links.address(row.node))
            return Denied(
                "linked_elsewhere",
                f"{row.name} is linked now by another process, from {self.links.address(row.node)}: if its disk or "
                "state folder was copied, remove STATE/node on the copy, then join there with a new token and "
                "`--set node.machine=NAME`",
                retry_after=LINKED_SECONDS,
            )
        return Welcome(self._epoch, self._authority.cluster, self._name, self._wall(), self._version, self.addresses,
                       self._fence.generation, self._seal)  # fmt: skip

    def _member(self, peer: Peer, serial: str, node: str, machine: str) -> MemberRow | Denied:
        """Return the member with this certificate, or why it is none (any more)."""
        row = self._store.members.get(NodeId(node))
        if peer.node != node:
            return Denied("identity", "the node's name is not the one of its certificate", final=True)
        if row is None or row.removed is not None or self._store.denied(row.node, serial):
            return Denied("removed", "this node was removed from the cluster: join again with a new token", final=True)
        if row.machine != machine:
            log.warning("cloned identity", node=row.node, name=row.name)
            return Denied(
                "cloned",
                f"this identity belongs to another machine ({row.name}): join again with a new token",
                final=True,
            )
        return row

    def answer(self, peer: Peer, serial: str, query: Query) -> bytes | Denied:
        """Return what a path of the API shows to a member, as JSON; Denied for who is none, and for every path that
        `readable` does not name."""
        row = self._member(peer, serial, query.node, query.machine)
        if isinstance(row, Denied):
            return row
        show = self.readable.get(query.path)
        if show is None:
            paths = ", ".join(sorted(self.readable)) or "nothing yet"
            return Denied("not_readable", f"a member may read {paths}, not {plain(query.path)[:80]}", final=True)
        return json.dumps(show()).encode()

    def _linked_by_another(self, node: NodeId, hello: Hello) -> bool:
        """Return whether another process with this node's identity is linked and reports.

        A node that was restarted has no link any more, and one whose network broke has not reported for a while.
        """
        linked = self.links.hello(node)
        if linked is None or linked.instance == hello.instance:
            return False
        return self._loop.time() - self._heard.get(node, -math.inf) < LINKED_SECONDS

    def linked(self, node: NodeId, hello: Hello) -> int:
        """Count a new link; give its number."""
        number = next(self._link_numbers)
        row, hardware = self._store.members[node], plain_hardware(hello.hardware)
        if row.hardware != hardware:
            self._store.put_member(replace(row, hardware=hardware))
        log.info("node linked", node=node, name=row.name, link=number, takeover=hello.takeover)
        self._happen(node, membership.Connected(number, hello.instance, hello.takeover))
        return number

    def unlinked(self, node: NodeId, number: int, reason: str) -> None:
        """The link with this number ended."""
        if node in self._pool.members and self._pool.members[node].link == number:
            log.info("node unlinked", node=node, reason=reason)
            self._happen(node, membership.Disconnected(number, reason))

    def received(self, node: NodeId, number: int, frame: Frame) -> None:
        """Take a frame that came over a link."""
        if type(frame) is Report:
            self._take_report(node, number, frame)
        elif type(frame) is Goodbye:
            self._take_goodbye(node, number, frame)
        elif type(frame) is Renew:
            self._renew(node, frame)
        elif self.placing is not None:
            self.placing.receive(node, frame)

    def _take_report(self, node: NodeId, number: int, report: Report) -> None:
        if self._pool.members[node].link != number:
            return
        self._reports[node] = report
        self._heard[node] = self._loop.time()
        if (waited := self._heard_of.pop(node, None)) is not None:
            waited.set()
        self._happen(node, membership.Reported(number, report.draining, report.sharing.paused), always=True)

    def _take_goodbye(self, node: NodeId, number: int, goodbye: Goodbye) -> None:
        if self._pool.members[node].link != number:
            return
        log.info("node said goodbye", node=node, reason=goodbye.reason)
        self._happen(node, membership.SaidGoodbye(number, goodbye.reason))
        if goodbye.reason == "leave":
            self._strike_off(node, "it left")

    def _renew(self, node: NodeId, renew: Renew) -> None:
        row = self._store.members[node]
        try:
            certificate = self._authority.sign(renew.csr, node, row.name)
        except BadRequestError as error:
            self.links.hang_up(node, "bad renewal", Denied("bad_request", str(error)))
            return
        self._store.put_member(replace(row, serial=read_certificate(certificate).serial))
        self.links.when_stored(lambda: self._hand_over(node, certificate))

    def _hand_over(self, node: NodeId, certificate: bytes) -> None:
        """Send a renewed certificate whose serial is on the disk."""
        self.links.send(node, Renewed(certificate))

    def enrolled(self, row: MemberRow) -> None:
        """A machine was given a certificate."""
        log.info("node enrolled", node=row.node, name=row.name)
        self._happen(row.node, membership.Enrolled())

    # -- what people do ------------------------------------------------------------------

    def find(self, text: str) -> NodeId | None:
        """Find a member by id or by name; of two with one name the one that has not left: it joined again."""
        found = [node for node in self._pool.members if text in (node, self._row(node).name)]
        return min(found, key=lambda node: self._pool.members[node].state == "left", default=None)

    def cordon(self, node: NodeId, *, on: bool) -> None:
        """Give a node no new work, or work again."""
        self._store.put_member(replace(self._row(node), cordoned=on))
        self._happen(node, membership.Cordoned() if on else membership.Uncordoned())

    def allow_video(self, node: NodeId, *, on: bool) -> None:
        """Allow a node to make videos, or no longer: a video that it makes then is finished."""
        self._store.put_member(replace(self._row(node), video=on))
        self._views.pop(node, None)
        self._publish()

    async def pause(self, node: NodeId, seconds: float | None, by: str) -> Sharing | None:
        """Ask a node to take nothing new for so many seconds (None: until it is resumed; 0: resume), and give what it
        says of itself once it has done so; None when it does not answer in PAUSE_SECONDS. LookupError when it is not
        here, or cannot be paused from here."""
        if not self._node_view(node).sharing.when:
            raise LookupError("it has not reported yet, or runs a macpool that cannot be paused from here: drain it")
        if not self.links.send(node, Pause(seconds, by)):
            raise LookupError("it is not linked: run the same command on that machine, without a name")
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_SECONDS):
                while self._node_view(node).sharing.by_hand != (seconds != 0):
                    await self._heard_of.setdefault(node, asyncio.Event()).wait()
                return self._node_view(node).sharing
        return None

    def label(self, node: NodeId, labels: tuple[str, ...]) -> None:
        """Give a node these labels, in place of all that it had."""
        self._store.put_member(replace(self._row(node), labels=labels))
        self._views.pop(node, None)
        self._publish()

    def remove(self, node: NodeId) -> None:
        """Revoke a node at once: its certificate, its links, its membership."""
        self.links.hang_up(
            node, "removed", Denied("removed", "this node was removed from the cluster by an administrator", final=True)
        )
        self._happen(node, membership.Removed())
        self._strike_off(node, "it was removed")

    def _strike_off(self, node: NodeId, why: str) -> None:
        row, now = self._row(node), self._wall()
        self._store.deny_node(node, now, why)
        self._store.put_member(replace(row, removed=now))

    # -- membership ------------------------------------------------------------------------

    def _happen(self, node: NodeId, event: membership.Event, *, always: bool = False) -> None:
        self._pool, actions = membership.advance(self._pool, node, event, self._loop.time())
        self._views.pop(node, None)
        self._act(actions, always=always)

    def tick(self, now: float | None = None) -> None:
        """Apply the transitions that are due at `now`, in seconds of the loop's clock; None for the current time."""
        self._timer = None
        self._pool, actions = membership.tick(self._pool, self._loop.time() if now is None else now)
        self._act(actions)

    def _act(self, actions: tuple[membership.Action, ...], *, always: bool = False) -> None:
        for action in actions:
            match action:
                case CloseLink():
                    self.links.close_link(action.node, action.link, action.reason)
                case NodeGone():
                    log.warning("node gone", node=action.node, reason=action.reason)
                    if self.placing is not None:
                        self.placing.node_gone(action.node, action.reason)
                case Forget():
                    self._forget(action.node)
                case Changed():
                    self._views.pop(action.node, None)
                    member = self._pool.members[action.node]
                    log.info("node state", node=action.node, state=member.state, reason=member.reason)
        if actions or always:
            self._publish()
        if actions or self._timer is None:  # a report only moves deadlines away, and a tick too early does nothing
            self._plan()

    def _forget(self, node: NodeId) -> None:
        for kept in (self._reports, self._heard, self._heard_of, self._versions, self._protocols, self._views):
            kept.pop(node, None)
        if self.placing is not None:
            self.placing.forget(node)

    def _plan(self) -> None:
        due = membership.next_deadline(self._pool, self._loop.time())
        if self._timer is not None:
            if due is not None and self._due <= due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self.tick)
        self._due = due or 0.0

    def _publish(self) -> None:
        """Give placement the new picture: at once, or in a large cluster with what else comes in the next moment."""
        if len(self._pool.members) <= AT_ONCE:
            self._publish_now()
        elif self._publishing is None:
            self._publishing = self._loop.call_later(MOMENT, self._publish_now)

    def _publish_now(self) -> None:
        self._publishing = None
        view = self.view()
        self._published.set()
        if self.placing is not None:
            self.placing.set_view(view)

    async def wait_for_answers(self, which: Callable[[], str]) -> None:
        """Wait until the node with the id that `which` returns can answer a request."""
        while (node := NodeId(which())) not in self._pool.members or not can_answer(self._node_view(node)):
            self._published.clear()
            await self._published.wait()

    def close(self) -> None:
        """Stop the clock."""
        if self._publishing is not None:
            self._publishing.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # -- pictures ------------------------------------------------------------------------------

    def view(self) -> ClusterView:
        """Give the picture that placement decides on: every member, also those that sleep or are lost.

        The view of a node is the same object until something about that node changes.
        """
        return ClusterView(tuple(self._node_view(node) for node in self._pool.members))

    def _node_view(self, node: NodeId) -> NodeView:
        found = self._views.get(node)
        if found is None:
            found = self._views[node] = self._new_view(node)
        return found

    def _new_view(self, node: NodeId) -> NodeView:
        member, name, report = self._pool.members[node], self._row(node).name, self._reports.get(node)
        if report is None:
            row = self._row(node)
            return NodeView(
                node, name, member.state, member.cordoned, labels=frozenset(row.labels), video_allowed=row.video
            )  # fmt: skip
        return view_of(
            report,
            node=node,
            name=name,
            state=member.state,
            heard_at=self._heard[node],
            cordoned=member.cordoned,
            epoch=member.link,
            labels=frozenset(self._row(node).labels),
            video_allowed=self._row(node).video,
        )

    def _row(self, node: NodeId) -> MemberRow:
        return self._store.members[node]

    @property
    def pool(self) -> membership.Pool:
        """The membership as it is now."""
        return self._pool

    def about(self, node: NodeId) -> tuple[str, str, str]:
        """Give a member's chip, its system and the version that it runs, as it says."""
        hardware = self._row(node).hardware
        return hardware.chip, hardware.system, self._versions.get(node, "")

    def states(self) -> dict[str, int]:
        """Count the members by state; every state is there."""
        counts = {state.value: 0 for state in State}
        for member in self._pool.members.values():
            counts[member.state.value] += 1
        return counts

    def warnings(self) -> list[str]:
        """Say what needs a person, with the next step; what is dangerous first."""
        found = self.dangers()
        if self._pool.self_suspect:
            found.append("half of the nodes fell silent at once: look at this machine's own network first")
        for view in self._linked():
            found += [f"{view.name}: {text}" for text in warnings_of(view)]
        return found

    def dangers(self) -> list[str]:
        """Say which nodes are less safe than they could be, or stand over their cap, and why: these last for ever."""
        return [f"{view.name}: {text}" for view in self._linked() for text in dangers_of(view)]

    def _linked(self) -> list[NodeView]:
        """Return the nodes whose newest report is of now: one that is gone says nothing any more."""
        views = [self._node_view(node) for node in self._reports]
        return [view for view in views if view.state not in GONE]

    def describe(self, node: NodeId, in_flight: int) -> dict[str, Any]:
        """Give one node as the API shows it; sizes in bytes, None where nothing is known."""
        heard = self._heard.get(node)
        told = Told(
            reported=node in self._reports,
            version=self._versions.get(node, ""),
            protocol=self._protocols.get(node, 0),
            in_flight=in_flight,
            heard_seconds=None if heard is None else round(self._loop.time() - heard, 3),
        )
        return node_row(self._node_view(node), self._pool.members[node], self._row(node), told)
