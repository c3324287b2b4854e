"""Simulated pool around the router: links, reports, membership, faults, and the result of every request.

Frames travel one way in `latency` seconds and keep their order. Reports come at fixed moments of a period: each node
has its own, of `SLOTS` in total. Reports of one moment reach the router as one view. An idle node reports once a
second. Membership is the production state machine without its suspicion of itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
from coordinator.simulation.scenario import EventSpec, NodeSpec, Scenario
from coordinator.simulation.simulated_node import SimulatedNode
from coordinator.simulation.workload import ConversationTurn, SimulatedConversation
from router.dispatch.request import Outcome, RequestFailure
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from wire.frames import Cancel, Deltas, Finished, Frame, Generate, Refusal, Report
from wire.identity import NodeId
from wire.refusals import Refused
from wire.units import parse_size

SLOTS = 20
"""Moments of a report period at which nodes report."""
IDLE_SECONDS = 1.0
"""Seconds between two reports of an idle node."""
GIVE_UP_SECONDS = 3600.0
"""Seconds after the last arrival at which an open request counts as failed."""


class SimulatedRouter(Protocol):
    """Router under test: the production dispatcher, a router with the rule of another project, or the clairvoyant."""

    def set_view(self, view: ClusterView) -> None:
        """Apply a new cluster view."""
        ...

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Handle a frame of a node about a request. Reports arrive with `set_view`."""
        ...

    def node_gone(self, node: NodeId, reason: str) -> None:
        """Handle the loss of a node, whose requests end there."""
        ...

    def submit(self, turn: ConversationTurn) -> None:
        """Accept a new request. The router reports the end of the request with `SimulatedPool.ended`."""
        ...

    def changed(self, node: NodeId) -> None:
        """Handle free memory on a node, without the delay of a report. Only the clairvoyant may use this."""
        ...

    def close(self) -> None:
        """Release all resources at the end of the simulation."""
        ...


@dataclass(slots=True)
class RequestOutcome:
    """Course and result of one request. Times are virtual, in seconds; None: not yet."""

    turn: ConversationTurn
    arrived: float
    fits: bool
    """Whether the request fits on some node that holds nothing else."""
    sent: float | None = None
    """Time of the last try before the first token."""
    first: float | None = None
    """Time of the first token."""
    ended: float | None = None
    outcome: Outcome | None = None
    tries: int = 0
    """Number of times that the request was sent to a node."""
    first_refused: bool = False
    """Whether the node of the first try refused."""
    gaps: int = 0
    """Not used; always 0."""
    nodes: list[str] = field(default_factory=list[str])
    """Node of each try, in order."""

    @property
    def served(self) -> bool:
        """Whether the answer is complete."""
        return isinstance(self.outcome, Finished)


class SimulatedPool:
    """Nodes, links, membership and arrivals of one simulation, without the router.

    `conversations` are in order of arrival. `seed` is for the loss of reports. `log` receives one line for each notable
    event; None disables the log.
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
        self.loop = loop
        self._log = log
        self._random = Random(f"pool {seed}")  # noqa: S311  the draws must be reproducible
        self._conversations = deque(conversations)
        self._turns: dict[str, ConversationTurn] = {}
        self._rest: dict[str, list[ConversationTurn]] = {}
        self.outcomes: dict[str, RequestOutcome] = {}
        self.machines: dict[NodeId, SimulatedNode] = {}
        self._specs: dict[NodeId, NodeSpec] = {}
        self.members: dict[NodeId, Member] = {}
        self._views: dict[NodeId, NodeView] = {}
        self._reported_at: dict[NodeId, float] = {}
        self._links: dict[NodeId, int] = {}
        self._silent: dict[NodeId, list[tuple[bool, Frame]]] = {}
        self._lives: dict[NodeId, int] = {}
        self._requests: dict[int, str] = {}
        self._up: deque[tuple[float, NodeId, int, Frame]] = deque()
        self._down: deque[tuple[float, NodeId, int, Frame]] = deque()
        self._open = 0
        self._over = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self.contender: SimulatedRouter | None = None
        self.loads = self.preemptions = self.reports = 0
        self.finished_at = 0.0
        for spec in scenario.nodes:
            for name in spec.names():
                self._join(NodeId(name), spec)

    def _join(self, node: NodeId, spec: NodeSpec) -> None:
        now = self.loop.time()
        self._specs[node] = spec
        self._links[node] = 0
        self._lives[node] = 0
        self.members[node] = membership.step(Member(node, membership.NodeState.JOINING, now), MemberEnrolled(), now)[0]
        self.machines[node] = self._machine(node, loads=True)
        self._connect(node)

    def _machine(self, node: NodeId, *, loads: bool) -> SimulatedNode:
        return SimulatedNode(
            node,
            self._specs[node],
            self.scenario.models,
            self.loop,
            loads=loads,
            send=lambda frame: self._send_up(node, frame),
            turn_of=self._turns.__getitem__,
            changed=lambda: self._schedule_notification(node),
        )

    def _schedule_notification(self, node: NodeId) -> None:
        self.loop.call_soon(self._notify_contender, node)

    def _notify_contender(self, node: NodeId) -> None:
        if self.contender is not None:
            self.contender.changed(node)

    def _connect(self, node: NodeId) -> None:
        self._links[node] += 1
        self._step(node, MemberConnected(self._links[node], f"life {self._lives[node]}"))

    # frames

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send a frame to a node, where it arrives after the latency. Return False if the node has no link."""
        member = self.members[node]
        if not member.link:
            return False
        if isinstance(frame, Generate):
            self.note_sent(node, frame)
        self._travel(self._down, node, frame)
        return True

    def _send_up(self, node: NodeId, frame: Frame) -> None:
        self._travel(self._up, node, frame)

    def _travel(self, way: "deque[tuple[float, NodeId, int, Frame]]", node: NodeId, frame: Frame) -> None:
        due = self.loop.time() + self.scenario.latency
        way.append((due, node, self._links[node], frame))
        if len(way) == 1:
            self.loop.call_at(due, self._arrive, way)

    def _arrive(self, way: "deque[tuple[float, NodeId, int, Frame]]") -> None:
        """Deliver the due frames in order. Several reports make one view."""
        reported = False
        while way and way[0][0] <= self.loop.time():
            _, node, link, frame = way.popleft()
            if link != self._links[node] or not self.members[node].link:
                continue
            if node in self._silent:
                self._silent[node].append((way is self._up, frame))
            elif way is self._down:
                self.machines[node].take(frame)
            else:
                reported |= self._handle_frame(node, frame)
        if way:
            self.loop.call_at(way[0][0], self._arrive, way)
        if reported:
            self._publish()

    def _handle_frame(self, node: NodeId, frame: Frame) -> bool:
        if isinstance(frame, Report):
            self._reported(node, frame)
            return True
        self._note(node, frame)
        if self.contender is not None:
            self.contender.receive(node, frame)
        return False

    # results of requests

    def note_sent(self, node: NodeId, frame: Generate) -> None:
        """Record in the outcome of a request that it was sent to a node."""
        outcome = self.outcomes[frame.request_id]
        self._requests[frame.request] = frame.request_id
        outcome.tries += 1
        outcome.nodes.append(str(node))
        if outcome.first is None:
            outcome.sent = self.loop.time()
        self.log_line(f"{frame.request_id} -> {node}")

    def _note(self, node: NodeId, frame: Frame) -> None:
        now = self.loop.time()
        if isinstance(frame, Deltas):
            for delta in frame.deltas:
                outcome = self._outcome(delta.request)
                if outcome is not None and outcome.first is None:
                    outcome.first = now
                    self.log_line(f"{outcome.turn.id} first token on {node} after {now - outcome.arrived:.2f} s")
        elif isinstance(frame, Refusal):
            outcome = self._outcome(frame.request)
            if outcome is not None:
                outcome.first_refused |= outcome.tries == 1
                self.log_line(f"{outcome.turn.id} refused by {node}: {frame.refused.code}")

    def _outcome(self, request: int) -> RequestOutcome | None:
        return self.outcomes.get(self._requests.get(request, ""))

    def ended(self, request_id: str, outcome: Outcome) -> None:
        """Record the end of a request. The router calls this. After a complete answer, the conversation continues."""
        record, now = self.outcomes[request_id], self.loop.time()
        record.ended, record.outcome = now, outcome
        self._open -= 1
        if isinstance(outcome, Finished):
            self.log_line(f"{request_id} done after {now - record.arrived:.2f} s")
        else:
            code = outcome.code.value if isinstance(outcome, Refused) else outcome.code
            self.log_line(f"{request_id} ended: {code}")
        rest = self._rest.pop(request_id, [])
        if rest and record.served:
            self.loop.call_later(rest[0].think, self._arrives, rest)
            self._open += 1
        self._check_over()

    def _check_over(self) -> None:
        if not self._open and not self._conversations:
            self.finished_at = self.loop.time()
            self._over.set()

    def log_line(self, line: str) -> None:
        """Write a line with the virtual time to the log, if there is one."""
        if self._log is not None:
            self._log(f"{self.loop.time():.3f} {line}")

    # arrivals

    def _next_conversation(self) -> None:
        conversation = self._conversations.popleft()
        self._open += 1
        if self._conversations:
            self.loop.call_at(max(self._conversations[0].at, self.loop.time()), self._next_conversation)
        self._arrives(conversation.turns)

    def _arrives(self, turns: list[ConversationTurn]) -> None:
        turn, *rest = turns
        self._turns[turn.id] = turn
        if rest:
            self._rest[turn.id] = rest
        fits = any(machine.ever(turn) for machine in self.machines.values())
        self.outcomes[turn.id] = RequestOutcome(turn, self.loop.time(), fits)
        self.log_line(
            f"{turn.id} of {turn.key} for {turn.model}: {turn.prompt} prompt tokens, {turn.output} to generate"
        )
        if self.contender is not None:
            self.contender.submit(turn)

    # reports and membership

    def _slot(self, slot: int, nodes: list[NodeId], round_: int) -> None:
        period = self.scenario.report_seconds
        when = (round_ + 1 + slot / SLOTS) * period
        self._timers[slot] = self.loop.call_at(when, self._slot, slot, nodes, round_ + 1)
        idle = max(1, round(IDLE_SECONDS / period))
        for node in nodes:
            machine = self.machines.get(node)
            if machine is None or node in self._silent or not (machine.dirty or round_ % idle == 0):
                continue
            report = machine.report()
            if self.scenario.report_loss and self._random.random() < self.scenario.report_loss:
                continue
            self.reports += 1
            self._travel(self._up, node, report)

    def _reported(self, node: NodeId, report: Report) -> None:
        now = self.loop.time()
        self._step(node, MemberReported(self._links[node], report.draining))
        member = self.members[node]
        self._reported_at[node] = now
        self._views[node] = build_node_view(
            report, node=node, name=node, state=member.state, reported_at=now, epoch=self._lives[node]
        )

    def _step(self, node: NodeId, event: membership.Event) -> bool:
        member, actions = membership.step(self.members[node], event, self.loop.time())
        self.members[node] = member
        for action in actions:
            match action:
                case ResumeRequests():
                    self.log_line(f"{node} is gone: {action.reason}")
                    if self.contender is not None:
                        self.contender.node_gone(node, action.reason)
                case CloseLink():
                    self._cut(node)
                case PublishMember():
                    if node in self._views:
                        self._views[node] = changed(self._views[node], state=member.state)
                    self.log_line(f"{node} {member.state}")
                case _:
                    pass
        return bool(actions)

    def _cut(self, node: NodeId) -> None:
        """Close the link of a silent node. Its held frames are lost."""
        if node in self._silent:
            self._silent[node] = []

    def _tick(self) -> None:
        self.loop.call_later(self.scenario.report_seconds, self._tick)
        moved = sum(self._step(node, MembershipTick()) for node in self.members)
        if moved:
            self._publish()

    def _publish(self) -> None:
        if self.contender is not None:
            self.contender.set_view(ClusterView(tuple(self._views.values())))

    # faults

    def _happen(self, event: EventSpec) -> None:
        node = NodeId(event.node)
        machine = self.machines.get(node)
        if machine is None or node in self._silent:
            self.log_line(f"{node} is down or silent: event {event.does} ignored")
            return
        self.log_line(f"{node} {event.does} for {event.seconds:g} s")
        if event.does == "lease":
            size = parse_size(event.size)
            given = machine.lease(size)
            self.log_line(f"{node} {'gives' if given else 'refuses'} a lease of {event.size}")
            if given:
                self.loop.call_later(event.seconds, machine.lease, -size)
        elif event.does == "silent":
            self._silent[node] = []
            self.loop.call_later(event.seconds, self._reconnects, node)
        else:
            self._dies(node, machine)
            self.loop.call_later(event.seconds, self._returns, node)

    def _dies(self, node: NodeId, machine: SimulatedNode) -> None:
        machine.flush()
        while self._up:  # frames in flight are read before the end of the connection
            _, node_id, _, frame = self._up.popleft()
            if self._handle_frame(node_id, frame):
                self._publish()
        self._retire(machine)
        del self.machines[node]
        self._step(node, MemberDisconnected(self._links[node]))
        self._publish()

    def _retire(self, machine: SimulatedNode) -> None:
        self.loads += machine.loads
        self.preemptions += machine.preemptions
        machine.stop()

    def _returns(self, node: NodeId) -> None:
        self._lives[node] += 1
        self.machines[node] = self._machine(node, loads=False)
        self._connect(node)
        self.log_line(f"{node} is back, without loaded models")

    def _reconnects(self, node: NodeId) -> None:
        queued = self._silent.pop(node)
        if self.members[node].link:
            for upward, frame in queued:
                self._travel(self._up if upward else self._down, node, frame)
            self.log_line(f"{node} reports again")
            return
        self.machines[node].forget()
        self._connect(node)
        self.log_line(f"{node} reconnects")

    # the run

    async def run(self, contender: SimulatedRouter) -> None:
        """Run the complete scenario with a router, until all requests have ended.

        Requests that have not ended `GIVE_UP_SECONDS` after the scenario count as failed.
        """
        self.contender = contender
        nodes = list(self.machines)
        for slot in range(SLOTS):
            mine = nodes[slot::SLOTS]
            for node in mine:  # every node has reported once before the first request
                self._reported(node, self.machines[node].report())
            begins = slot / SLOTS * self.scenario.report_seconds
            self._timers.append(self.loop.call_at(begins, self._slot, slot, mine, 0))
        self._publish()
        self.loop.call_later(self.scenario.report_seconds, self._tick)
        for event in self.scenario.events:
            self.loop.call_at(event.at, self._happen, event)
        if self._conversations:
            self.loop.call_at(self._conversations[0].at, self._next_conversation)
        else:
            self._over.set()
        try:
            async with asyncio.timeout(self.scenario.seconds + GIVE_UP_SECONDS):
                await self._over.wait()
        except TimeoutError:
            for request_id, outcome in self.outcomes.items():
                if outcome.outcome is None:
                    outcome.outcome = RequestFailure("never_ended", "the request has not ended")
                    self.log_line(f"{request_id} did not end")
        for machine in self.machines.values():
            self._retire(machine)
        contender.close()

    def cancel(self, node: NodeId, request: int) -> None:
        """Send a node the cancellation of the request with this number."""
        self.send(node, Cancel(request))
