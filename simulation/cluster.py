"""Simulated pool around the router: links, reports, membership, faults, and the result of every request.

Frames take `latency` seconds one way and keep their order. A period of reports has `SLOTS` moments, and each node
reports at one of them. Reports of one moment reach the router as one view. An idle node reports every `IDLE_SECONDS`.
Each member uses the production state machine. The simulation lacks the rule by which the coordinator suspects its own
network when half of the pool is silent (`coordinator.cluster.membership`).
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace as changed
from random import Random
from typing import Protocol

from coordinator.cluster import membership
from coordinator.cluster.member_state import (
    CloseLink,
    Member,
    MemberConnected,
    MemberDisconnected,
    MemberEnrolled,
    MemberReported,
    MembershipTick,
    PublishMember,
    ResumeRequests,
)
from router.dispatch.request import Outcome
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from simulation.arrivals import Arrivals
from simulation.links import SimulatedLinks
from simulation.mac.simulated_node import SimulatedNode
from simulation.outcomes import OutcomeTable, RequestOutcome
from simulation.scenario import EventSpec, NodeSpec, Scenario
from simulation.workload import ConversationTurn, SimulatedConversation
from wire.frames import Frame, Generate, Report
from wire.identity import NodeId
from wire.units import parse_size

SLOTS = 20
"""Moments of a report period at which nodes report."""
IDLE_SECONDS = 1.0
"""Seconds between two reports of an idle node, rounded to whole periods of reports, at least one period."""
DIAL_SECONDS = 0.5
"""Seconds after which a Mac whose link was closed connects again: the first delay of a real node."""
GIVE_UP_SECONDS = 3600.0
"""Virtual seconds after the end of the arrivals at which an open request counts as failed."""


class SimulatedRouter(Protocol):
    """Router under test: the production dispatcher, the router of another project, or the clairvoyant router."""

    def set_view(self, view: ClusterView) -> None:
        """Apply a new cluster view."""
        ...

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Handle a frame of a node about a request. Reports arrive with `set_view`."""
        ...

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Handle the loss of a node, whose requests end there. `reason` is a text for people."""
        ...

    def submit(self, turn: ConversationTurn) -> None:
        """Accept a new request. The router reports the end of the request with `SimulatedPool.record_end`."""
        ...

    def handle_freed_memory(self, node: NodeId) -> None:
        """Handle memory that an ended or preempted request, or an ended lease, has freed on a node.

        The pool calls this without the delay of a report. Only the clairvoyant router may use this knowledge.
        """
        ...

    def close(self) -> None:
        """Release all resources at the end of the simulation."""
        ...


class SimulatedPool:
    """Nodes, links, membership and arrivals of one simulation, without the router.

    `conversations` are in order of arrival. `seed` decides which reports are lost. `log` receives one line for each
    notable event; None disables the log.
    """

    def __init__(
        self,
        scenario: Scenario,
        conversations: Iterable[SimulatedConversation],
        loop: asyncio.AbstractEventLoop,
        seed: int,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.scenario = scenario
        """Scenario that is run."""
        self.loop = loop
        """Event loop with virtual time."""
        self._random = Random(f"pool {seed}")  # noqa: S311  the draws must be reproducible
        self.log = OutcomeTable(loop, log)
        """Outcomes of all requests. The table also writes the log."""
        self._arrivals = Arrivals(conversations, loop, self._handle_arrival)
        self.machines: dict[NodeId, SimulatedNode] = {}
        """Running Macs by id. A crashed Mac is absent until its restart, which creates a new object."""
        self._latest: dict[NodeId, SimulatedNode] = {}
        self._specs: dict[NodeId, NodeSpec] = {}
        self.members: dict[NodeId, Member] = {}
        """Membership state of each node, including crashed ones."""
        self._views: dict[NodeId, NodeView] = {}
        self._links = SimulatedLinks(
            loop,
            scenario.latency,
            is_open=lambda node: self.members[node].link,
            down=lambda node, frame: self.machines[node].take(frame),
            up=self._handle_frames,
        )
        self._lives: dict[NodeId, int] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self.contender: SimulatedRouter | None = None
        """Router under test; None before `run`."""
        self.loads = self.preemptions = self.reports = 0
        """Numbers of model loads and of preemptions, and number of reports that were sent and not lost.

        The first two are complete after `run`. Before that, they count only those of crashed Macs.
        """
        for spec in scenario.nodes:
            for name in spec.list_names():
                self._join(NodeId(name), spec)

    @property
    def outcomes(self) -> dict[str, RequestOutcome]:
        """Outcomes of all requests that have arrived, by request id."""
        return self.log.by_id

    @property
    def finished_at(self) -> float:
        """Virtual time in seconds at which the last request ended; 0 before the end of all conversations."""
        return self._arrivals.finished_at

    def _join(self, node: NodeId, spec: NodeSpec) -> None:
        now = self.loop.time()
        self._specs[node] = spec
        self._lives[node] = 0
        self.members[node] = membership.step(Member(node, membership.NodeState.JOINING, now), MemberEnrolled(), now)[0]
        self.machines[node] = self._create_machine(node, loads=True)
        self._connect(node)

    def _create_machine(self, node: NodeId, *, loads: bool) -> SimulatedNode:
        self._latest[node] = SimulatedNode(
            node,
            self._specs[node],
            self.scenario.models,
            self.loop,
            loads=loads,
            send=lambda frame: self._links.send_up(node, frame),
            turn_of=self._arrivals.turns.__getitem__,
            changed=lambda: self.loop.call_soon(self._notify_contender, node),
        )
        return self._latest[node]

    def _notify_contender(self, node: NodeId) -> None:
        if self.contender is not None:
            self.contender.handle_freed_memory(node)

    def _connect(self, node: NodeId) -> None:
        self._step(node, MemberConnected(self._links.connect(node), f"life {self._lives[node]}"))

    # frames and requests

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send a frame to a node, where it arrives after the latency. Return False if the node has no link.

        Record a sent `Generate` as a try of its request. Raise `KeyError` for an unknown node.
        """
        if not self.members[node].link:
            return False
        if isinstance(frame, Generate):
            self.log.note_sent(node, frame)
        self._links.send_down(node, frame)
        return True

    def _handle_frames(self, frames: list[tuple[NodeId, Frame]]) -> None:
        """Handle the frames of one moment in order. Several reports make one view."""
        reported = False
        for node, frame in frames:
            if isinstance(frame, Report):
                self._handle_report(node, frame)
                reported = True
                continue
            self.log.note_frame(node, frame)
            if self.contender is not None:
                self.contender.receive(node, frame)
        if reported:
            self._publish()

    def _handle_arrival(self, turn: ConversationTurn) -> None:
        self.log.add(turn, fits=self.can_ever_hold(turn))
        if self.contender is not None:
            self.contender.submit(turn)

    def can_ever_hold(self, turn: ConversationTurn) -> bool:
        """Return whether a request with its complete answer would fit alone on any Mac, even one that is down now."""
        return any(machine.forecast.can_ever_hold(turn, self.loop.time()) for machine in self._latest.values())

    def record_end(self, request_id: str, outcome: Outcome) -> None:
        """Record the end of a request. The router must call this once for each request.

        After a complete answer, the conversation continues with its next turn.
        """
        served = self.log.end(request_id, outcome)
        self._arrivals.end(request_id, served=served)

    # reports and membership

    def _send_reports(self, slot: int, nodes: list[NodeId], round_: int) -> None:
        period = self.scenario.report_seconds
        when = (round_ + 1 + slot / SLOTS) * period
        self._timers[slot] = self.loop.call_at(when, self._send_reports, slot, nodes, round_ + 1)
        idle = max(1, round(IDLE_SECONDS / period))
        for node in nodes:
            machine = self.machines.get(node)
            if machine is None or self._links.is_silent(node) or not (machine.dirty or round_ % idle == 0):
                continue
            report = machine.report()
            if self.scenario.report_loss and self._random.random() < self.scenario.report_loss:
                continue
            self.reports += 1
            self._links.send_up(node, report)

    def _handle_report(self, node: NodeId, report: Report) -> None:
        now = self.loop.time()
        self._step(node, MemberReported(self._links.get_link_number(node), report.draining))
        member = self.members[node]
        self._views[node] = build_node_view(
            report, node=node, name=node, state=member.state, reported_at=now, epoch=self._lives[node]
        )

    def _step(self, node: NodeId, event: membership.Event) -> bool:
        member, actions = membership.step(self.members[node], event, self.loop.time())
        self.members[node] = member
        for action in actions:
            match action:
                case ResumeRequests():
                    self.log.log_line(f"{node} is gone: {action.reason}")
                    if self.contender is not None:
                        self.contender.handle_lost_node(node, action.reason)
                case CloseLink():
                    self._links.discard_held(node)
                    self.loop.call_later(DIAL_SECONDS, self._dial, node, self.machines[node])
                case PublishMember():
                    if node in self._views:
                        self._views[node] = changed(self._views[node], state=member.state)
                    self.log.log_line(f"{node} {member.state}")
                case _:
                    pass
        return bool(actions)

    def _tick(self) -> None:
        self.loop.call_later(self.scenario.report_seconds, self._tick)
        moved = sum(self._step(node, MembershipTick()) for node in self.members)
        if moved:
            self._publish()

    def _publish(self) -> None:
        if self.contender is not None:
            self.contender.set_view(ClusterView(tuple(self._views.values())))

    # faults

    def _start_event(self, event: EventSpec) -> None:
        node = NodeId(event.node)
        machine = self.machines.get(node)
        if machine is None or self._links.is_silent(node):
            self.log.log_line(f"{node} is down or silent: event {event.does} ignored")
            return
        self.log.log_line(f"{node} {event.does} for {event.seconds:g} s")
        if event.does == "lease":
            size = parse_size(event.size)
            given = machine.change_lease(size)
            self.log.log_line(f"{node} {'gives' if given else 'refuses'} a lease of {event.size}")
            if given:
                self.loop.call_later(event.seconds, self._end_lease, node, machine, size)
        elif event.does == "silent":
            self._links.hold_frames(node)
            self.loop.call_later(event.seconds, self._end_silence, node)
        else:
            self._crash_node(node, machine)
            self.loop.call_later(event.seconds, self._restart_node, node)

    def _end_lease(self, node: NodeId, machine: SimulatedNode, size: int) -> None:
        """End a lease, unless a crash of the node has ended it before."""
        if self.machines.get(node) is machine:
            machine.change_lease(-size)

    def _crash_node(self, node: NodeId, machine: SimulatedNode) -> None:
        machine.flush()
        self._links.deliver_up(node)
        self._retire(machine)
        del self.machines[node]
        self._step(node, MemberDisconnected(self._links.get_link_number(node)))
        self._publish()

    def _retire(self, machine: SimulatedNode) -> None:
        self.loads += machine.loads
        self.preemptions += machine.preemptions
        machine.stop()

    def _restart_node(self, node: NodeId) -> None:
        self._lives[node] += 1
        self.machines[node] = self._create_machine(node, loads=False)
        self._connect(node)
        self.log.log_line(f"{node} is back, without loaded models")

    def _end_silence(self, node: NodeId) -> None:
        if self._links.end_silence(node):
            self.log.log_line(f"{node} reports again")
            return
        self._dial(node, self.machines[node])

    def _dial(self, node: NodeId, machine: SimulatedNode) -> None:
        """Connect a node without a link again. Its requests end there.

        Ignore a silent node, and a process that has crashed.
        """
        if self.members[node].link or self._links.is_silent(node) or self.machines.get(node) is not machine:
            return
        machine.drop_requests()
        self._connect(node)
        self.log.log_line(f"{node} reconnects")

    # the run

    async def run(self, contender: SimulatedRouter) -> None:
        """Run the complete scenario with the router `contender`, until all requests have ended.

        Requests that are open `GIVE_UP_SECONDS` after the end of the arrivals count as failed. Finally, stop the nodes
        and close the router.
        """
        self.contender = contender
        nodes = list(self.machines)
        for slot in range(SLOTS):
            mine = nodes[slot::SLOTS]
            for node in mine:  # every node has reported once before the first request
                self._handle_report(node, self.machines[node].report())
            begins = slot / SLOTS * self.scenario.report_seconds
            self._timers.append(self.loop.call_at(begins, self._send_reports, slot, mine, 0))
        self._publish()
        self.loop.call_later(self.scenario.report_seconds, self._tick)
        for event in self.scenario.events:
            self.loop.call_at(event.at, self._start_event, event)
        self._arrivals.start()
        try:
            async with asyncio.timeout(self.scenario.seconds + GIVE_UP_SECONDS):
                await self._arrivals.wait()
        except TimeoutError:
            self.log.fail_open()
        for machine in self.machines.values():
            self._retire(machine)
        contender.close()
