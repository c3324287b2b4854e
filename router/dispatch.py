"""The loop's owner of view, queue and ledger: places, sends, follows and ends every request.

All methods run on one event loop and none awaits, so a decision and its reservation are one step without locks. A
request is in exactly one of three places: in the line (`entry`), on a node (`_live`, by the number of this attempt), or
ended (`outcome`). Every attempt gets numbers of its own, so what a node still says about an earlier one is unknown here
and ignored; a node is heard only about requests that are on it.

What happens when
- a node refuses: the reservation is freed, its headroom is corrected until it reports again, the next node is asked at
  once (four in a row at most, then the line). A refusal is never a failure.
- a node is lost: what has sent nothing to its client is placed elsewhere, never on a lost node again, at most three
  times; what has begun ends with `node_lost`.
- an engine crashes: the request in the forward ends, it may be the cause and is never placed again. The others are
  placed once more if nothing was sent yet, and end if it was; no request survives a second crash.
- no node can load the model: the request ends with the cause, also when it stood in line.
- a reader falls behind: its stream alone is ended and cancelled.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from router.loads import Choice, choose
from router.metrics import Counters
from router.orders import Orders
from router.placement import (
    POLICIES,
    Candidate,
    Correction,
    Demand,
    NoPlacement,
    Placement,
    away,
    explain,
    place,
)
from router.queue import AdmissionQueue
from router.reservations import Ledger
from router.settings import RouterSettings
from router.ticket import CANCELLED, LONGEST_WHOLE, SLOW, Failure, Job, Outcome, StreamTicket, Ticket, WholeTicket
from router.view import ClusterView, NodeView
from wire.frames import Admitted, Cancel, Deltas, Failed, Finished, Frame, Generate, Refusal
from wire.identity import NodeId
from wire.refusals import FINAL, Code, Refused

MOST_IN_A_ROW = 4
"""Nodes asked at once for one request before it waits in line."""
LOST = "engine_lost"
"""A node's word for requests that its engine had when it died, but that were not in the forward."""
MOST_CRASHES = 2
MOST_LOSSES = 3
"""Lost nodes that one request may survive."""
DECISIONS_KEPT = 1000
ROWS_KEPT = 16
"""Nodes kept of each decision: enough to explain, bounded in a large cluster."""
SWEEP_SECONDS = 0.25
ELSEWHERE = frozenset({Code.TOO_LARGE, Code.CONTEXT, Code.NO_MODEL, Code.LOAD_FAILED})
"""Final on one node, not in the cluster: another may be larger."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One placement as it was made. `at` in monotonic seconds."""

    at: float
    request_id: str
    key: str
    demand: Demand
    result: Placement | NoPlacement

    def rows(self) -> list[dict[str, object]]:
        """Give every node's arithmetic as plain rows."""
        return explain(self.result)


STOPPING = "the coordinator is stopping: send it again"


class Dispatcher:
    """See the module. `send` writes a frame to a node's link and says whether there is one, without calling back in
    here; `numbers` gives the next request number and seq; `draw` gives numbers in [0, 1) for ties."""

    def __init__(
        self,
        send: Callable[[NodeId, Frame], bool],
        settings: RouterSettings,
        *,
        numbers: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        counters: Counters | None = None,
    ) -> None:
        self._send = send
        self._settings = settings
        self._numbers = numbers
        self._clock = clock
        self._draw = draw
        self._slow_bytes = settings.slow_client_bytes
        self._policy = POLICIES[settings.policy]
        self.counters = counters or Counters()
        self.view = ClusterView()
        self.ledger = Ledger()
        self.queue: AdmissionQueue[Ticket] = AdmissionQueue(settings.queue_limit)
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self.orders = Orders(send, lambda: numbers()[0])
        self._corrections: dict[NodeId, Correction] = {}
        self._live: dict[int, Ticket] = {}
        self._open: dict[int, Ticket] = {}
        self._closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._count = 0
        self._changed: set[NodeId] = set()
        self._wake_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._interval = min(SWEEP_SECONDS, settings.queue_seconds / 4, settings.keepalive_seconds / 4,
                             settings.slow_client_seconds / 4)  # fmt: skip

    # what the cluster tells

    def set_view(self, view: ClusterView) -> None:
        """Take a new picture: settle what the reports acknowledge, then try those in line on the nodes that changed."""
        old = {node.id: node for node in self.view.nodes}
        self.view = view
        for node in view.nodes:
            if old.get(node.id) is node:
                continue
            self.ledger.acknowledge(node.id, node.acked_seq)
            self._read_in(node)
            correction = self._corrections.get(node.id)
            if correction is not None and correction.heard_at != node.heard_at:
                del self._corrections[node.id]
            self._wake_soon(node.id)

    def _read_in(self, node: NodeView) -> None:
        """Count the weights of a load once: now that the report has them, no request promises them any more."""
        reading = {model.name for model in node.models.values() if node.reads(model)}
        if reading:
            for ticket in self._live.values():
                if ticket.node == node.id and ticket.demand.model in reading:
                    self.ledger.read_in(ticket.request)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Take a frame about requests or orders from a node; what is about none that is open there is ignored."""
        if isinstance(frame, Deltas):
            self._deltas(node, frame)
            return
        if not isinstance(frame, Admitted | Finished | Refusal | Failed):
            return
        ticket = self._live.get(frame.request)
        if ticket is None or ticket.node != node:
            self.orders.receive(node, frame)
            return
        if isinstance(frame, Admitted):
            self._admitted(ticket, frame)
        elif isinstance(frame, Finished):
            self._finished(ticket, frame)
        elif isinstance(frame, Refusal):
            self._refused(ticket, node, frame)
        elif frame.code == LOST:
            self._engine_lost(ticket, frame)
        else:
            self._end(ticket, Failure(frame.code, frame.message))

    def _engine_lost(self, ticket: Ticket, failed: Failed) -> None:
        """Follow the death of an engine that a request was on, but not in the forward: once more, if nothing was sent.

        Nothing survives a second crash: what was near two may well be the cause."""
        ticket.crashes += 1
        if ticket.begun or ticket.crashes >= MOST_CRASHES:
            self._end(ticket, Failure("engine_crashed", failed.message))
            return
        if ticket.node is not None:  # its last report still calls the engine ready
            ticket.refused[ticket.node] = self._heard_at(ticket.node)
        self._leave_node(ticket)
        ticket.discard()
        ticket.in_a_row = 0
        self._place(ticket)

    def node_gone(self, node: NodeId, reason: str) -> None:
        """Follow the end of a node's link: place elsewhere what has sent nothing, end the rest."""
        self.orders.node_gone(node, reason)
        self._corrections.pop(node, None)
        for ticket in [ticket for ticket in self._live.values() if ticket.node == node]:
            self.counters.nodes_lost += 1
            name = ticket.node_name
            self._leave_node(ticket)
            ticket.losses += 1
            ticket.lost.add(node)
            if ticket.begun or ticket.losses > MOST_LOSSES or not self._others(ticket):
                self._end(ticket, Failure("node_lost", f"{name} was lost while it answered ({reason}): send it again"))
                continue
            ticket.discard()
            ticket.in_a_row = 0
            self._place(ticket)

    def _others(self, ticket: Ticket) -> bool:
        return any(ticket.demand.model in node.models and node.id not in ticket.lost for node in self.view.nodes)

    # what clients ask

    def submit(self, job: Job) -> Ticket:
        """Take a request: place it now, put it in line, or end it with the refusal. Always `close` the ticket."""
        self._count += 1
        kind = StreamTicket if job.stream else WholeTicket
        ticket = kind(job, self._count, self._clock())
        if self._closing:
            self._end(ticket, Failure("shutting_down", STOPPING))
        else:
            self._place(ticket)
        self._open[ticket.number] = ticket
        self._quiet.clear()
        self._arm()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Let go of a ticket; if it has not ended, its client is gone and the node is told."""
        if ticket.outcome is None:
            self._cancel(ticket)
            self._end(ticket, CANCELLED)
        self._open.pop(ticket.number, None)
        if not self._open:
            self._quiet.set()

    def preview(self, demand: Demand) -> Placement | NoPlacement:
        """Decide without acting, for `cluster place` and for health."""
        return place(self.view, demand, self.ledger, now=self._clock(), draw=self._draw, policy=self._policy,
                     corrections=self._corrections)  # fmt: skip

    def choose_load(self, model: str, tried: Mapping[NodeId, Refused]) -> Choice | Refused:
        """Say which node should load a model, after those that have refused to."""
        return choose(self.view, model, self.ledger, now=self._clock(), draw=self._draw, policy=self._policy,
                      corrections=self._corrections, tried=tried)  # fmt: skip

    def away(self, node: NodeView) -> Refused | None:
        """Say why a node can be given nothing now; None when it can."""
        why, code = away(node, self._clock())
        return None if code is None else Refused(code, f"{node.name} {why}", None, 2.0, node.name)

    def servable(self) -> str:
        """Say why no request could be served now; empty when one could."""
        if self._closing:
            return STOPPING
        models = self.view.models()
        if len(self.queue) >= self.queue.limit(len(self.view.nodes)):
            return f"{len(self.queue)} requests wait already"
        refused = "no node of the cluster has reported a model"
        for name in models:
            result = self.preview(Demand(name, prompt_bytes=64))
            if isinstance(result, Placement):
                return ""
            refused = result.refused.message
        return refused

    @property
    def idle(self) -> bool:
        """Whether nobody is here: what a drain waits for."""
        return not self._open

    def in_flight(self, node: NodeId) -> int:
        """Give how many requests are on a node."""
        return self.ledger.in_flight(node)

    def explained(self, request_id: str) -> list[Decision]:
        """Give the kept decisions about one request, oldest first."""
        return [decision for decision in self.decisions if decision.request_id == request_id]

    def waiting(self) -> int:
        """Give how many requests wait for a node."""
        return len(self.queue)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs end for at most `seconds`, then end the rest."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        self.shutdown()

    def shutdown(self, message: str = STOPPING) -> None:
        """End everything; nodes are told to stop."""
        self.orders.shutdown(message)
        for ticket in list(self._open.values()):
            if ticket.outcome is None:
                self._cancel(ticket)
                self._end(ticket, Failure("shutting_down", message))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # the way to a node

    def _place(self, ticket: Ticket) -> None:
        """Ask nodes in turn until one link takes the request; else it waits in line or ends."""
        result = self._decide(ticket, self.view)
        while isinstance(result, Placement) and ticket.in_a_row < MOST_IN_A_ROW:
            if self._start(ticket, result.chosen, result.chosen.need):
                if len(self.queue):
                    self.queue.overtake()
                return
            result = self._decide(ticket, self.view)
        if isinstance(result, NoPlacement) and result.refused.final:
            self._end(ticket, result.refused)
            return
        if isinstance(result, NoPlacement) and result.ask is not None and self._start(ticket, result.ask, 0):
            return
        self._wait(ticket, None if isinstance(result, Placement) else result.refused)

    def _decide(self, ticket: Ticket, view: ClusterView) -> Placement | NoPlacement:
        now = self._clock()
        result = place(view, ticket.demand, self.ledger, now=now, draw=self._draw, policy=self._policy,
                       corrections=self._corrections, trials=ticket.trials())  # fmt: skip
        self.decisions.append(Decision(now, ticket.job.request_id, ticket.job.key, ticket.demand, _short(result)))
        return result

    def _start(self, ticket: Ticket, chosen: Candidate, need: int) -> bool:
        """Reserve `need` bytes and send; False when the link is gone, which the next view will say too."""
        job = ticket.job
        request, seq = self._numbers()
        ticket.attempts += 1
        ticket.in_a_row += 1
        self.counters.attempts += 1
        self.counters.retries += ticket.attempts > 1
        frame = Generate(request, seq, job.request_id, job.demand.model, job.messages, job.params, job.created,
                         chosen.output_tokens, job.stream, job.tools, job.template, text=job.text,
                         ids=job.ids)  # fmt: skip
        self.ledger.claim(chosen.node, request, seq, need, chosen.prompt_tokens, min(need, chosen.weights))
        ticket.request, ticket.node, ticket.node_name = request, chosen.node, chosen.name
        self._live[request] = ticket
        sent = False
        try:
            sent = self._send(chosen.node, frame)
        finally:
            if not sent:
                self._leave_node(ticket)
                ticket.refused[chosen.node] = self._heard_at(chosen.node)
        return sent

    def _leave_node(self, ticket: Ticket) -> None:
        """Take the request off its node: the one place where a reservation ends."""
        if ticket.node is None:
            return
        self._live.pop(ticket.request, None)
        self.ledger.release(ticket.request)
        self._wake_soon(ticket.node)
        ticket.node = None

    def _heard_at(self, node: NodeId) -> float:
        seen = self.view.node(node)
        return -1.0 if seen is None else seen.heard_at

    # the line

    def _wait(self, ticket: Ticket, why: Refused | None) -> None:
        now = self._clock()
        ticket.in_a_row = 0
        if ticket.deadline is None:
            ticket.deadline = now + self._settings.queue_seconds
        cost = ticket.demand.prompt_tokens or ticket.demand.prompt_bytes // 4
        cost += (ticket.demand.max_tokens or 256) * ticket.demand.choices
        entry = self.queue.offer(ticket, ticket.job.key, cost, now, ticket.deadline, len(self.view.nodes))
        if isinstance(entry, Refused):
            numbers = why.numbers if why is not None else None
            self._end(ticket, Refused(entry.code, entry.message, numbers, entry.retry_after))
            return
        ticket.entry, ticket.queued_at = entry, now
        self.counters.queue_entries += 1

    def _wake_soon(self, node: NodeId) -> None:
        """Try those in line on this node before anything else comes in; several changes make one try."""
        if not len(self.queue):
            return
        self._changed.add(node)
        if not self._wake_due:
            self._wake_due = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_due = False
        changed = ClusterView(tuple(node for node in self.view.nodes if node.id in self._changed))
        self._changed.clear()
        self.queue.wake(self._clock(), lambda ticket, keep: self._attempt(ticket, keep, changed))

    def _attempt(self, ticket: Ticket, keep: bool, changed: ClusterView) -> bool:
        """Try one in line on the nodes that changed: on all others it did not fit before."""
        result = place(changed, ticket.demand, self.ledger, now=self._clock(), draw=self._draw, policy=self._policy,
                       corrections=self._corrections, trials=ticket.trials())  # fmt: skip
        if isinstance(result, Placement) and self._start(ticket, result.chosen, result.chosen.need):
            self.decisions.append(
                Decision(self._clock(), ticket.job.request_id, ticket.job.key, ticket.demand, _short(result))
            )
            self._left_line(ticket)
            return True
        if isinstance(result, NoPlacement) and self._settled_by_all(ticket, result):
            return True
        if keep:
            self._keep(ticket, result)
        return False

    def _settled_by_all(self, ticket: Ticket, part: NoPlacement) -> bool:
        """Look at all nodes where those that changed say that waiting may be of no use: the model can no longer be
        loaded there, or only after others were given back."""
        if part.ask is None and part.refused.code is not Code.LOAD_FAILED:
            return False
        whole = self._decide(ticket, self.view)
        if isinstance(whole, Placement):
            return False
        if whole.refused.code is Code.LOAD_FAILED:
            self._end(ticket, whole.refused)
            return True
        if whole.ask is None or not self._start(ticket, whole.ask, 0):
            return False
        self._left_line(ticket)
        return True

    def _keep(self, ticket: Ticket, result: Placement | NoPlacement) -> None:
        """Keep room on the node that lacks least, unless some is kept already on a node that is still ready."""
        held = self.ledger.held_on(ticket.number)
        if held is not None and any(node.id == held and node.state == "ready" for node in self.view.nodes):
            return
        short = [one for one in result.candidates if one.code is Code.NO_ROOM and one.need <= one.most]
        if short:
            best = max(short, key=lambda one: (one.headroom or 0) - one.need)
            self.ledger.hold(ticket.number, best.node, best.need)

    def _left_line(self, ticket: Ticket) -> None:
        self.counters.queue_seconds += self._clock() - ticket.queued_at
        self.ledger.drop_hold(ticket.number)
        ticket.entry = None

    def _expire(self, now: float) -> None:
        for ticket in self.queue.expire(now):
            self._left_line(ticket)
            result = self._decide(ticket, self.view)
            waited = f" (waited {now - ticket.arrived:.0f} s in the queue)"
            if isinstance(result, Placement):
                text = f"the queue's deadline passed just as {result.chosen.name} had room: send it again{waited}"
                self._end(ticket, Refused(Code.DEADLINE, text, None, 1.0))
                continue
            refused = result.refused
            self._end(ticket, Refused(refused.code, refused.message + waited, refused.numbers, refused.retry_after,
                                      refused.node))  # fmt: skip

    # what nodes say of requests

    def _deltas(self, node: NodeId, frame: Deltas) -> None:
        live = self._live
        touched: list[Ticket] = []
        for delta in frame.deltas:
            ticket = live.get(delta.request)
            if ticket is None or ticket.node != node:
                continue
            if ticket.first_at is None:
                self._first(ticket)
            if ticket.add(delta):
                touched.append(ticket)
            if ticket.held > self._slow_bytes:
                self._too_much(ticket)
        for ticket in touched:
            ticket.flush()

    def _first(self, ticket: Ticket) -> None:
        now = self._clock()
        ticket.first_at = now
        self.ledger.admitted(ticket.request)
        self.counters.first_tokens += 1
        self.counters.first_token_seconds += now - ticket.arrived

    def _admitted(self, ticket: Ticket, frame: Admitted) -> None:
        self.ledger.admitted(frame.request)
        ticket.deadline = None
        ticket.demand = _counted(ticket.demand, frame.prompt_tokens)

    def _finished(self, ticket: Ticket, frame: Finished) -> None:
        counters = self.counters
        counters.prompt_tokens += frame.prompt_tokens
        counters.cached_tokens += frame.cached_tokens
        counters.completion_tokens += frame.completion_tokens
        self._end(ticket, frame)

    def _refused(self, ticket: Ticket, node: NodeId, frame: Refusal) -> None:
        refused = frame.refused
        self.counters.refused(refused.code.value)
        self._leave_node(ticket)
        if refused.code in FINAL and refused.code not in ELSEWHERE:
            self._end(ticket, refused)
            return
        if frame.prompt_tokens is not None:
            ticket.demand = _counted(ticket.demand, frame.prompt_tokens)
        if refused.final:
            ticket.never[node] = refused
        heard_at = self._heard_at(node)
        ticket.refused[node] = heard_at
        if refused.code is Code.NO_ROOM and refused.numbers is not None and refused.numbers.headroom is not None:
            self._corrections[node] = Correction(heard_at, refused.numbers.headroom)
        self._place(ticket)

    # ends

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.node is not None:
            self._send(ticket.node, Cancel(ticket.request))

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        """Take a request out of wherever it is and tell its reader: the one way to end."""
        if ticket.outcome is not None:
            return
        if ticket.entry is not None:
            self.queue.remove(ticket.entry)
            self._left_line(ticket)
        self._leave_node(ticket)
        self.counters.ended(_label(outcome))
        self.counters.durations += 1
        self.counters.duration_seconds += self._clock() - ticket.arrived
        ticket.end(outcome)

    def _too_much(self, ticket: Ticket) -> None:
        if isinstance(ticket, StreamTicket):
            self._stuck(ticket)
        elif ticket.held > LONGEST_WHOLE:
            self._cancel(ticket)
            self._end(ticket, Failure("answer_too_long", f"the answer is longer than {LONGEST_WHOLE} characters"))

    def _stuck(self, ticket: StreamTicket) -> None:
        """End a stream whose reader does not read."""
        self.counters.slow_clients += 1
        self._cancel(ticket)
        ticket.discard()
        self._end(ticket, SLOW)

    # time

    def _arm(self) -> None:
        if self._timer is None and self._open:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._sweep)

    def _sweep(self) -> None:
        """Look at everybody who is here a few times a second, instead of a timer for each."""
        self._timer = None
        self._expire(self._clock())
        for ticket in list(self._open.values()):
            if isinstance(ticket, StreamTicket):
                self._look_after(ticket)
        self._arm()

    def _look_after(self, ticket: StreamTicket) -> None:
        if ticket.takes != ticket.seen_takes:
            ticket.seen_takes, ticket.still = ticket.takes, 0.0
            return
        if ticket.node is None and ticket.outcome is None and not ticket.opened:
            ticket.still = 0.0  # in line, and a clean 503 is still possible
            return
        ticket.still += self._interval
        if ticket.blocked and ticket.opened:
            if ticket.still >= self._settings.slow_client_seconds:
                self._stuck(ticket)
        elif ticket.still >= self._settings.keepalive_seconds:
            ticket.nudged = True
            ticket.flush()


def _counted(demand: Demand, tokens: int) -> Demand:
    return Demand(demand.model, demand.prompt_bytes, max(0, tokens), demand.max_tokens, demand.choices, demand.features)


def _short(result: Placement | NoPlacement) -> Placement | NoPlacement:
    if len(result.candidates) <= ROWS_KEPT:
        return result
    kept = result.candidates[:ROWS_KEPT]
    if isinstance(result, Placement):
        return Placement(result.chosen, (result.chosen, *(one for one in kept if one is not result.chosen)))
    return NoPlacement(result.refused, kept, result.ask)


def _label(outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return "ok"
    return outcome.code.value if isinstance(outcome, Refused) else outcome.code
