"""The loop's owner of view, queue and ledger: places, sends, follows and ends every request.

All methods run on one event loop and none awaits, so a decision and its reservation are one step without locks. A
request is in exactly one of three places: in the line (`entry`), on a node (`_live`, by the number of this attempt), or
ended (`outcome`). Every attempt gets numbers of its own, so what a node still says about an earlier one is unknown here
and ignored; a node is heard only about requests that are on it.

What happens when
- a node refuses: the reservation is freed, its headroom is corrected until it reports again, the next node is asked at
  once (four in a row at most, then the line). A refusal is never a failure.
- a node is lost or an engine crashes: its requests go on elsewhere from the token ids that were heard, by the rules of
  `resume`; what the client has got stays as it is. Who finds no room waits in line before all newcomers, and ends with
  the reason if the deadline passes; where nobody else has that model it ends at once.
- a node drains, or is silent for so long that writing anew is quicker: its requests are moved while it still lives,
  those for which there is room elsewhere; the others go on where they are.
- an engine fails again and again: its node gets nothing for a while (`breaker`).
- no node can load the model: the request ends with the cause, also when it stood in line.
- a reader falls behind: its stream alone is ended and cancelled.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from router.placement.vectorized import Columns
from router.admission.cache_scope import CacheScopes
from router.admission.key_scope import visible
from router.admission.load_share import Asked
from router.admission.queue import AdmissionQueue, Entry
from router.admission.rate_limits import KeyLimits, Quotas, work
from router.admission.usage import Usage
from router.dispatch import work_stealing
from router.dispatch.accounting import Endings, credible, most_prompt
from router.dispatch.circuit_breaker import Breakers
from router.dispatch.counters import Counters
from router.dispatch.decision_log import History
from router.dispatch.model_swaps import Ask, Begun, Ended, Swaps, fits_beside, picture_of
from router.dispatch.node_commands import Orders
from router.dispatch.request import (
    CANCELLED,
    LONGEST_WHOLE,
    SLOW,
    SWAP,
    Failure,
    Job,
    Outcome,
    StreamTicket,
    Ticket,
    WholeTicket,
)
from router.placement.cluster_view import LEFT, ClusterView, NodeView, seen_as
from router.placement.model_load import Choice, choose
from router.placement.place import (
    FIRST,
    POLICIES,
    Candidate,
    Correction,
    Demand,
    NoPlacement,
    Placement,
    Policy,
    Trials,
    away,
    consider,
    place,
)
from router.placement.prefix_affinity import Affinity, Chain, chain_of
from router.placement.recovery import STOPS, Fall, fall_of, is_fault, patience, survives
from router.placement.reservations import Ledger, Turn
from router.settings import RouterSettings
from wire.capacity.fairness import Owner
from wire.frames import Admitted, Cancel, Deltas, Failed, Finished, Frame, Generate, Message, Refusal
from wire.identity import NodeId
from wire.refusals import FINAL, Code, Refused
from wire.report import Model

WORTH_KNOWING = 1024
"""Bytes of a prompt from which it matters where its beginning was read: less is read anew in a blink."""
LARGE = 32
"""Nodes above which arrays find the best one sooner."""
MOST_IN_A_ROW = 4
"""Nodes asked at once for one request before it waits in line."""
BACKLOG = 5.0
"""Seconds of prompts in front of a request on the best node from which it waits in line if its key asks for far more
than its part. Nodes are fair between owners, but their memory is promised to who comes first: without this such a key
fills it, and others find none (simulated)."""
SPARE = 0.5
"""Share of a node's memory for prompts and answers that is kept for others then: at its deadline such a request is sent
if that stays free, else refused."""
FAILING = "failing"
"""The state that placement sees of a node whose breaker is open."""
READY, SUSPECT, DRAINING = "ready", "suspect", "draining"
LINKED = frozenset({READY, SUSPECT, DRAINING})
"""States that placement and moves tell apart; in all others a node has no link that serves."""
SWEEP_SECONDS = 0.25
ELSEWHERE = frozenset({Code.TOO_LARGE, Code.CONTEXT, Code.NO_MODEL, Code.LOAD_FAILED})
"""Final on one node, not in the cluster: another may be larger."""
ABOUT_ONE = Finished, Admitted, Refusal, Failed
"""What a node says of one request."""
STOPPING = "the coordinator is stopping: send it again"


class Dispatcher:
    """See the module. `send` writes a frame to a node's link and says whether there is one, without calling back in
    here; `numbers` gives the next request number and seq; `draw` gives numbers in [0, 1) for ties; `policy` is one that
    the settings cannot name."""

    def __init__(
        self,
        send: Callable[[NodeId, Frame], bool],
        settings: RouterSettings,
        *,
        numbers: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        counters: Counters | None = None,
        quotas: Quotas | None = None,
        policy: Policy | None = None,
        scopes: CacheScopes | None = None,
    ) -> None:
        self._send = send
        self._settings = settings
        self._numbers = numbers
        self._clock = clock
        self._draw = draw
        self._scopes = scopes or CacheScopes()
        self._slow_bytes = settings.slow_client_bytes
        self._policy = policy or POLICIES[settings.policy]
        self.counters = counters or Counters()
        self.view = ClusterView()
        self.ledger = Ledger()
        self.breakers: Breakers[NodeId] = Breakers()
        self.affinity = Affinity()
        self.quotas = quotas or Quotas()
        self.usage = Usage()
        self._columns: Columns | None = None
        self.queue: AdmissionQueue[Ticket] = AdmissionQueue(settings.queue_limit)
        self.history = History()
        self._endings = Endings(self.counters, self.usage, self.history)
        self.orders = Orders(send, lambda: numbers()[0])
        self.on_trouble: Callable[[Ticket, str], None] = _nobody_told
        """Told of a request that broke on its node, and of the code."""
        self._corrections: dict[NodeId, Correction] = {}
        self._live: dict[int, Ticket] = {}
        self._open: dict[int, Ticket] = {}
        self._asked = Asked()
        self._swaps = Swaps(settings.swap_seconds)
        self._closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._count = 0
        self._changed: set[NodeId] = set()
        self._wake_due = False
        self._silent: dict[NodeId, float] = {}
        self._emptying: dict[NodeId, list[asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._interval = min(SWEEP_SECONDS, settings.queue_seconds / 4, settings.keepalive_seconds / 4,
                             settings.slow_client_seconds / 4)  # fmt: skip

    # what the cluster tells

    def set_view(self, view: ClusterView) -> None:
        """Take a new picture: settle what the reports acknowledge, then try those in line on the nodes that changed."""
        old = {node.id: node for node in self.view.nodes}
        self.view = view
        self._follow(view)
        self._swaps.follow((node for node in view.nodes if old.get(node.id) is not node), self._clock())
        for node in view.nodes:
            if old.get(node.id) is node:
                continue
            self.ledger.acknowledge(node.id, node.acked_seq)
            cache = node.engine.cache
            self.affinity.heard(node.id, node.life, cache.evictions, cache.evicted)
            self._read_in(node)
            correction = self._corrections.get(node.id)
            if correction is not None and correction.heard_at != node.heard_at:
                del self._corrections[node.id]
            self._returned(old.get(node.id), node)
            self._wake_soon(node.id)
            if (node.draining or node.state == DRAINING) and self.ledger.in_flight(node.id):
                asyncio.get_running_loop().call_soon(self.move, node.id)
        for node_id in self._emptying:
            asyncio.get_running_loop().call_soon(self.move, node_id)

    def _returned(self, before: NodeView | None, node: NodeView) -> None:
        """Let a node that was away have again what was lost with it."""
        if node.state == READY and before is not None and before.state not in LINKED:
            for ticket in self._open.values():
                ticket.lost.discard(node.id)

    def _follow(self, view: ClusterView) -> None:
        """Keep the arrays of a large cluster. They are imported here: a household need not carry numpy."""
        if self._columns is None and len(view.nodes) > LARGE:
            from router.placement.vectorized import Columns

            self._columns = Columns(self.ledger)
        if self._columns is not None:
            self._columns.follow(view)

    def _read_in(self, node: NodeView) -> None:
        """Count the weights of a load once: now that the report has them, no request promises them any more."""
        reading = {model.name for model in node.models.values() if node.reads(model)}
        if reading:
            for ticket in self._live.values():
                if ticket.node == node.id and ticket.demand.model in reading:
                    self.ledger.read_in(ticket.request)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Take a frame about requests or orders from a node; what is about none that is open there is ignored."""
        if type(frame) is Deltas:
            self._deltas(node, frame)
            return
        if not isinstance(frame, ABOUT_ONE):
            return
        ticket = self._live.get(frame.request)
        if ticket is None or ticket.node != node:
            self.orders.receive(node, frame)
        elif isinstance(frame, Admitted):
            self._admitted(ticket, frame)
        elif isinstance(frame, Finished):
            self._finished(ticket, frame)
        elif isinstance(frame, Refusal):
            self._refused(ticket, node, frame)
        else:
            self._failed(ticket, node, frame)

    def _failed(self, ticket: Ticket, node: NodeId, frame: Failed) -> None:
        """Follow a request that broke on its node: by itself, or because the engine died with it or beside it."""
        if is_fault(frame.code):
            self.breakers.fault(node, frame.request, self._clock(), frame.message)
        self.on_trouble(ticket, frame.code)
        fall = fall_of(frame.code)
        if fall is None:
            self._end(ticket, Failure(frame.code, frame.message))
            return
        if fall is Fall.NODE:
            if frame.code == STOPS:
                ticket.lost.add(node)
            self._fell(ticket, fall, Failure("node_lost", f"{ticket.node_name} let go of it: {frame.message}"))
            return
        ticket.refused[node] = self._heard_at(node)  # its last report still calls the engine ready, or shows the room
        code = frame.code if fall is Fall.MEMORY else "engine_crashed"
        self._fell(ticket, fall, Failure(code, frame.message))

    def node_gone(self, node: NodeId, reason: str) -> None:
        """Follow the end of a node's link: what was there goes on elsewhere."""
        self.orders.node_gone(node, reason)
        self._corrections.pop(node, None)
        self._silent.pop(node, None)
        for ticket in self._on(node):
            self.counters.nodes_lost += 1
            name = ticket.node_name
            self.on_trouble(ticket, "node_lost")
            ticket.lost.add(node)
            why = Failure("node_lost", f"{name} was lost while it answered ({reason}): send it again")
            self._fell(ticket, Fall.NODE, why)

    def forget(self, node: NodeId) -> None:
        """Forget all that is known of a node that is no member any more. Whatever is kept by node is dropped here."""
        self.affinity.forget(node)
        self.breakers.forget(node)
        self.counters.forget(node)
        self.ledger.forget(node)
        self._swaps.forget(node)
        self._changed.discard(node)
        for kept in (self._corrections, self._silent):
            kept.pop(node, None)
        for ticket in self._open.values():
            ticket.lost.discard(node)
            ticket.warm = {other: share for other, share in ticket.warm.items() if other != node}
            for tried in (ticket.refused, ticket.never):
                tried.pop(node, None)

    async def emptied(self, node: NodeId, seconds: float) -> int:
        """Take the requests off a node and wait until it has none, for `seconds` at most; those for which nobody has
        room are moved when somebody has, or end there. Give how many are left."""
        empty = asyncio.Event()
        self._emptying.setdefault(node, []).append(empty)
        self.move(node)
        try:
            if self.ledger.in_flight(node):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await empty.wait()
        finally:
            waiting = self._emptying[node]
            waiting.remove(empty)
            if not waiting:
                del self._emptying[node]
        return self.ledger.in_flight(node)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Requests that are not closed, with those that have ended."""
        return tuple(self._open.values())

    def under_way(self) -> list[Ticket]:
        """List the requests that are here, the oldest first."""
        return sorted((one for one in self._open.values() if one.outcome is None), key=lambda one: one.number)

    def move(self, node: NodeId) -> int:
        """Take the requests off a node that still lives, so that nobody notices that it goes: they go on elsewhere from
        where they are. Give how many stay, because nobody else has room for them now; they run on, and may be moved
        later."""
        return sum(not self._moved(ticket) for ticket in self._on(node))

    def _on(self, node: NodeId) -> list[Ticket]:
        """List the requests on a node, the oldest first."""
        return sorted((one for one in self._live.values() if one.node == node), key=lambda one: one.number)

    def _fell(self, ticket: Ticket, fall: Fall, why: Failure) -> None:
        """Go on elsewhere with a request that its node let fall, if that is allowed and possible; else end it."""
        ticket.mark(self._clock(), f"dropped: {why.message}", ticket.node_name)
        self._leave_node(ticket)
        if fall in (Fall.NODE, Fall.MEMORY):
            ticket.losses += 1
        else:
            ticket.crashes += 1
        if not survives(fall, ticket.losses, ticket.crashes):
            self._end(ticket, why)
            return
        if not self._continues(ticket):
            self._end(ticket, self._named(ticket, why))
            return
        ticket.fallen, ticket.in_a_row = why, 0
        self._place(ticket)

    def _continues(self, ticket: Ticket) -> bool:
        """Say whether any node could go on with a request, now or later. One that nobody has read a word of begins anew
        where nobody has the model that began it."""
        others = self._others(ticket)
        if ticket.resumable and any(one.fingerprint == ticket.fingerprint for one in others):
            ticket.demand = replace(ticket.demand, written=ticket.written)
            return True
        if ticket.begun or not others:
            return False
        ticket.discard()
        ticket.demand = replace(ticket.demand, written=0)
        return True

    def _named(self, ticket: Ticket, why: Failure) -> Failure:
        """Add to a failure that other nodes have the name of the model, but another model."""
        if not ticket.fingerprint or all(one.fingerprint == ticket.fingerprint for one in self._others(ticket)):
            return why
        text = f"the other nodes hold another model under the name {ticket.demand.model} (`cluster models`)"
        return replace(why, message=f"{why.message}; {text}, which cannot resume it")

    def _others(self, ticket: Ticket) -> list[Model]:
        """List the models of a request's name on the members with which it was not lost."""
        name = ticket.demand.model
        nodes = (node for node in self.view.nodes if node.state != LEFT and node.id not in ticket.lost)
        return [node.models[name] for node in nodes if name in node.models]

    def _moved(self, ticket: Ticket, silent: float | None = None) -> bool:
        """Go on with a request elsewhere, if another node has room for it, and only then let go of its node. Where that
        has only been `silent` for some seconds, it must be worth it."""
        nothing = ticket.heard and not ticket.written and not ticket.begun
        if not (nothing or ticket.resumable) or not survives(Fall.NODE, ticket.losses + 1, 0):
            return False
        others = ClusterView(tuple(one for one in self.view.nodes if one.id != ticket.node))
        if not self._moved_to(others, ticket, lambda there: silent is None or silent >= patience(there.expected_ttft)):
            return False
        ticket.losses += 1
        return True

    def _moved_to(self, others: ClusterView, ticket: Ticket, worth: Callable[[Candidate], bool]) -> bool:
        """Send a request to the best of other nodes if it is worth that, and then let go of its own."""
        where = ticket.request, ticket.node, ticket.node_name
        node, asked = where[1], replace(ticket.demand, written=ticket.written)
        result = self._judged(ticket, others, asked)
        if node is None or not isinstance(result, Placement) or not worth(result.chosen):
            return False
        ticket.in_a_row = 0
        if not self._start(ticket, result.chosen, result.chosen.need):
            ticket.request, ticket.node, ticket.node_name = where
            return False
        ticket.demand = asked
        self._kept(ticket, result)
        ticket.mark(self._clock(), "moved away", where[2])
        self.counters.moves += 1
        self._free(node, where[0])
        self._send(node, Cancel(where[0]))
        return True

    # what clients ask

    def submit(self, job: Job) -> Ticket:
        """Take a request: place it now, put it in line, or end it with the refusal. Always `close` the ticket."""
        self._count += 1
        kind = StreamTicket if job.stream else WholeTicket
        limits = self.quotas.limits(job.key)
        name = self.canonical_name(job.demand.model, limits)
        if name != job.demand.model:
            job = replace(job, demand=replace(job.demand, model=name))
        owner = Owner(job.key, limits.weight)
        ticket = kind(job, owner, self._count, self._clock())
        if job.params.seed is None:  # else what one node draws no other could go on with
            ticket.params = replace(job.params, seed=random.getrandbits(53))
        if len(self.view.nodes) > 1 and (job.demand.prompt_bytes >= WORTH_KNOWING or job.session):
            ticket.chain = chain = self._chain(job)
            ticket.warm = self.affinity.shares(chain)
        if self._closing:
            self._end(ticket, Failure("shutting_down", STOPPING))
        elif isinstance(charged := self.quotas.take(job.key, job.demand, ticket.arrived), Refused):
            ticket.rates = self.quotas.rates(job.key, ticket.arrived)
            self._end(ticket, charged)
        else:
            ticket.charged = charged
            ticket.rates = self.quotas.rates(job.key, ticket.arrived)
            if limits.labels:
                ticket.demand = replace(ticket.demand, labels=frozenset(limits.labels))
            self._place(ticket)
        self._open[ticket.number] = ticket
        ticket.asked = asked = work(job.demand)
        self._asked.add(owner, asked)
        self._quiet.clear()
        self._arm()
        return ticket

    def canonical_name(self, model: str, limits: KeyLimits) -> str:
        """Return the model that a client means (`ClusterView.canonical_name`), among those that its key may use."""
        if any(model in node.models for node in self.view.nodes):
            return model
        return visible(self.view, limits).canonical_name(model)

    def _chain(self, job: Job) -> Chain:
        fingerprint = self.view.identity(job.demand.model).fingerprint
        root = (job.demand.model, fingerprint, job.tools, job.template, job.ids)
        messages = (Message("", job.text),) if job.text else job.messages
        shared = self._scopes.shares(messages)
        return chain_of(root, messages, job.session, self._scopes.of(job.key), shared=shared)

    def close(self, ticket: Ticket) -> None:
        """Let go of a ticket; if it has not ended, its client is gone and the node is told."""
        if ticket.outcome is None:
            self._cancel(ticket)
            self._end(ticket, CANCELLED)
        if self._open.pop(ticket.number, None) is not None:
            self._asked.drop(ticket.owner, ticket.asked)
        if not self._open:
            self._quiet.set()

    def preview(self, demand: Demand) -> Placement | NoPlacement:
        """Decide without acting, for `cluster place` and for health."""
        now = self._clock()
        return place(self._seen(self.view, now), demand, self.ledger, now=now, draw=self._draw,
                     policy=self._policy, corrections=self._corrections,
                     trials=self._one_model(FIRST, demand.model))  # fmt: skip

    def choose_load(self, model: str, tried: Mapping[NodeId, Refused]) -> Choice | Refused:
        """Say which node should load a model, after those that have refused to."""
        now = self._clock()
        return choose(self._seen(self.view, now), model, self.ledger, now=now, draw=self._draw,
                      policy=self._policy, corrections=self._corrections, tried=tried,
                      fingerprint=self._one_model(FIRST, model).fingerprint)  # fmt: skip

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

    def leaks(self) -> int:
        """Count reservations of requests that are on no node, and room kept for those that are not in line: 0, or a bug
        of ours."""
        return len(self.ledger.promised() - self._live.keys()) + len(self.ledger.holders() - self._open.keys())

    @property
    def idle(self) -> bool:
        """Whether nobody is here: what a drain waits for."""
        return not self._open

    def now(self) -> float:
        """Give the time of the clock that all times here are of."""
        return self._clock()

    def in_flight(self, node: NodeId) -> int:
        """Give how many requests are on a node."""
        return self.ledger.in_flight(node)

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
            if self._crowded(ticket, result.chosen):
                self._wait(ticket, result)
                return
            if self._start(ticket, result.chosen, result.chosen.need):
                self.queue.overtake()
                return
            result = self._decide(ticket, self.view)
        if isinstance(result, NoPlacement) and result.refused.final:
            self._deny(ticket, result.refused)
            return
        if isinstance(result, NoPlacement) and (self._ask(ticket, result.ask) or self._ask_for_share(ticket, result)):
            return
        self._wait(ticket, result)

    def _ask(self, ticket: Ticket, ask: Candidate | None) -> bool:
        """Ask the node that only itself can know, unless it makes room for another model; return whether it was."""
        return ask is not None and ask.node not in self.ledger.turns and self._start(ticket, ask, 0)

    def _ask_for_share(self, ticket: Ticket, result: NoPlacement) -> bool:
        """Send a request to a node that is full of another key's requests: its engine preempts one of them where that
        key holds more than its share. Return whether it was sent."""
        if ticket.in_a_row >= MOST_IN_A_ROW:
            return False
        full = [
            one for one in result.candidates
            if one.code is Code.NO_ROOM and one.model is not None and one.model.loaded
            and one.node not in self.ledger.turns and ticket.refused.get(one.node) != self._heard_at(one.node)
        ]  # fmt: skip
        rows = (
            Counter((one.node, one.owner) for one in self._live.values()) if full else Counter[tuple[NodeId, Owner]]()
        )
        for one in sorted(full, key=lambda one: one.expected_ttft):
            mine = ticket.owner.load(rows[one.node, ticket.owner] + 1)
            others = (owner.load(count - 1) for (node, owner), count in rows.items() if node == one.node)
            if any(held >= mine for held in others) and self._start(ticket, one, 0):
                return True
        return False

    def _decide(self, ticket: Ticket, view: ClusterView) -> Placement | NoPlacement:
        return self._kept(ticket, self._judged(ticket, view, ticket.demand))

    def _judged(self, ticket: Ticket, view: ClusterView, demand: Demand) -> Placement | NoPlacement:
        now, trials = self._clock(), self._one_model(ticket.trials(), demand.model)
        seen = self._seen(view, now)
        if self._columns is not None:
            result = self._columns.place(seen, demand, now=now, draw=self._draw, policy=self._policy,
                                         corrections=self._corrections, trials=trials, warm=ticket.warm)  # fmt: skip
        else:
            result = place(seen, demand, self.ledger, now=now, draw=self._draw, policy=self._policy,
                           corrections=self._corrections, trials=trials, warm=ticket.warm)  # fmt: skip
        self.counters.placement.observe(self._clock() - now)
        return result

    def _one_model(self, trials: Trials, name: str) -> Trials:
        """Restrict a request to one of several models of a name: the one that began the answer, or the one that is
        served by the nodes that the request has not lost."""
        if trials.fingerprint:
            return trials
        view = self._seen(self.view, self._clock())
        if trials.lost:
            view = ClusterView(tuple(node for node in view.nodes if node.id not in trials.lost))
        identity = view.identity(name)
        return replace(trials, fingerprint=identity.fingerprint) if identity.conflict else trials

    def _kept(self, ticket: Ticket, result: Placement | NoPlacement) -> Placement | NoPlacement:
        """Keep a decision, to be explained later."""
        job = ticket.job
        self.history.decided(self._clock(), job.request_id, job.key, ticket.demand, result, len(self.view.nodes))
        return result

    def _seen(self, view: ClusterView, now: float) -> ClusterView:
        """Give the view as placement may see it: nodes whose breakers are open get nothing."""
        barred = self.breakers.barred(now)
        if not barred:
            return view
        return ClusterView(tuple(seen_as(node, FAILING) if node.id in barred else node for node in view.nodes))

    def _start(self, ticket: Ticket, chosen: Candidate, need: int) -> bool:
        """Reserve `need` bytes and send; False when the link is gone, which the next view will say too."""
        job = ticket.job
        request, seq = self._numbers()
        ticket.attempts += 1
        ticket.in_a_row += 1
        self.counters.attempts += 1
        self.counters.retries += ticket.attempts > 1
        self.counters.placed(chosen.node)
        known = ticket.known() if ticket.attempts > 1 else ()
        if known:
            self.counters.resumes += 1
        elif chosen.model is not None:
            ticket.fingerprint = chosen.model.fingerprint
        frame = Generate(request, seq, job.request_id, job.demand.model, job.messages, ticket.params, job.created,
                         chosen.output_tokens, job.stream, job.tools, job.template, known, job.text,
                         job.ids, ticket.owner, ticket.fingerprint if known else "", self._scopes.scope,
                         self._scopes.shares(job.messages))  # fmt: skip
        seconds = chosen.reading / chosen.model.prefill_speed if chosen.model else 0.0
        self.ledger.claim(
            chosen.node, request, seq, need, chosen.reading, min(need, chosen.weights), seconds, job.demand.choices
        )
        if known:
            self.ledger.read(request)
        ticket.request, ticket.node, ticket.node_name = request, chosen.node, chosen.name
        self._live[request] = ticket
        now = self._clock()
        self.breakers.tried(chosen.node, request, now)
        ticket.mark(now, "resumed" if known else "sent", chosen.name)
        sent = False
        try:
            sent = self._send(chosen.node, frame)
        finally:
            if not sent:
                self._leave_node(ticket)
                ticket.refused[chosen.node] = self._heard_at(chosen.node)
                ticket.mark(now, "no link", chosen.name)
        return sent

    def _leave_node(self, ticket: Ticket) -> None:
        """Take the request off its node."""
        if ticket.node is not None:
            self._free(ticket.node, ticket.request)
            ticket.node = None

    def _free(self, node: NodeId, request: int) -> None:
        """Forget an attempt: the one place where a reservation ends."""
        self._live.pop(request, None)
        self.ledger.release(request)
        self.breakers.let_go(node, request)
        if node in self._emptying and not self.ledger.in_flight(node):
            for waits in self._emptying[node]:
                waits.set()
        self._wake_soon(node)

    def _heard_at(self, node: NodeId) -> float:
        seen = self.view.node(node)
        return -1.0 if seen is None else seen.heard_at

    # the line

    def _wait(self, ticket: Ticket, result: Placement | NoPlacement) -> None:
        """Put it in line, or end it."""
        now = self._clock()
        ticket.in_a_row = 0
        if ticket.deadline is None:
            ticket.deadline = now + self._settings.queue_seconds
        entry = self.queue.offer(ticket, ticket.job.key, work(ticket.demand), now, ticket.deadline,
                                 len(self.view.nodes), weight=ticket.owner.weight,
                                 share=self.quotas.limits(ticket.job.key).waiting,
                                 begun=ticket.fallen is not None)  # fmt: skip
        if isinstance(entry, Refused):
            numbers = result.refused.numbers if isinstance(result, NoPlacement) else None
            self._end(ticket, Refused(entry.code, entry.message, numbers, entry.retry_after))
            return
        ticket.entry, ticket.queued_at = entry, now
        ticket.mark(now, "queued")
        self.counters.queue_entries += 1
        if ticket.fallen is not None and isinstance(result, NoPlacement):
            self._keep(ticket, result)

    def _wake_soon(self, node: NodeId) -> None:
        """Try those in line on this node before anything else comes in; several changes make one try."""
        if not len(self.queue) and not self.ledger.turns:
            return
        self._changed.add(node)
        if not self._wake_due:
            self._wake_due = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_due = False
        if self.ledger.turns:
            self._swap(self._clock())
        changed = ClusterView(tuple(node for node in self.view.nodes if node.id in self._changed))
        self._changed.clear()
        self.queue.wake(self._clock(), lambda ticket, keep: self._attempt(ticket, keep, changed))

    def _attempt(self, ticket: Ticket, keep: bool, changed: ClusterView) -> bool:
        """Try one in line on the nodes that changed: on all others it did not fit before."""
        result = self._judged(ticket, changed, ticket.demand)
        if isinstance(result, Placement):
            return self._go(ticket)
        if self._settled_by_all(ticket, result):
            return True
        if keep or ticket.fallen is not None:
            self._keep(ticket, result)
        return False

    def _go(self, ticket: Ticket) -> bool:
        """Send it to the best of all nodes, not of those that changed, unless it is better off in line."""
        result = self._judged(ticket, self.view, ticket.demand)
        if not isinstance(result, Placement) or self._crowded(ticket, result.chosen):
            return False
        if not self._start(ticket, result.chosen, result.chosen.need):
            return False
        self._kept(ticket, result)
        self._left_line(ticket)
        return True

    def _crowded(self, ticket: Ticket, chosen: Candidate) -> bool:
        """Whether a request has to wait in line for a node that has room for it: much is to be read there before, and
        its key asks for far more than its part. An answer that was begun waits for no turn."""
        model = chosen.model
        if ticket.fallen is not None or model is None or not model.loaded:
            return False
        return chosen.ahead > BACKLOG * model.prefill_speed and self._asked.much(ticket.job.key)

    def _scarce(self, chosen: Candidate) -> bool:
        """Whether a request takes of the last half of what its node has for prompts and answers."""
        node = self.view.node(chosen.node)
        loaded = sum(model.weights for model in node.models.values() if model.loaded) if node else 0
        return (chosen.headroom or 0) - chosen.need < SPARE * (chosen.most - loaded)

    def _settled_by_all(self, ticket: Ticket, part: NoPlacement) -> bool:
        """Look at all nodes where those that changed say that waiting may be of no use: the model can no longer be
        loaded there, or only after others were given back."""
        if part.ask is None and part.refused.code is not Code.LOAD_FAILED:
            return False
        whole = self._decide(ticket, self.view)
        if isinstance(whole, Placement):
            return False
        if whole.refused.code is Code.LOAD_FAILED:
            self._deny(ticket, whole.refused)
            return True
        if not self._ask(ticket, whole.ask):
            return False
        self._left_line(ticket)
        return True

    def _keep(self, ticket: Ticket, result: Placement | NoPlacement) -> None:
        """Keep room on the node that lacks least, unless some is kept already on a node that is still ready. Where a
        model is in the way there is none to keep before that one's slice has ended."""
        held = self.ledger.held_on(ticket.number)
        if held is not None and any(node.id == held and node.state == "ready" for node in self.view.nodes):
            return
        nodes = {node.id: node for node in self.view.nodes}
        short = [
            one for one in result.candidates
            if one.code is Code.NO_ROOM and fits_beside(nodes[one.node], one) and self.ledger.holder(one.node) is None
            and one.node not in self.ledger.turns
        ]  # fmt: skip
        if short:
            best = max(short, key=lambda one: (one.headroom or 0) - one.need)
            self.ledger.hold(ticket.number, best.node, best.need)

    def _left_line(self, ticket: Ticket) -> None:
        self.counters.left_line(self._clock() - ticket.queued_at)
        self.ledger.drop_hold(ticket.number)
        ticket.entry, ticket.swap = None, ""

    def _expire(self, now: float) -> None:
        for ticket in self.queue.expire(now):
            self._left_line(ticket)
            result = self._decide(ticket, self.view)
            waited = f" (waited {now - ticket.arrived:.0f} s in the queue)"
            if isinstance(result, Placement):
                chosen = result.chosen
                kept = self._crowded(ticket, chosen) and self._scarce(chosen)
                if kept or not self._start(ticket, chosen, chosen.need):
                    text = f"others need {chosen.name}, too: send it again{waited}"
                    self._deny(ticket, Refused(Code.DEADLINE, text, None, 1.0))
                continue
            refused = result.refused
            self._deny(ticket, Refused(refused.code, refused.message + waited, refused.numbers, refused.retry_after,
                                       refused.node))  # fmt: skip

    # model swaps

    def _swap(self, now: float) -> None:
        """Follow the turns under way and begin those that are due."""
        if not len(self.queue) and not self.ledger.turns:
            return
        entries = sorted(self.queue.entries(), key=lambda entry: entry.item.arrived)
        queued = [entry.item for entry in entries]
        picture = picture_of(self._seen(self.view, now), queued, self._live.values(), self.ledger, self._judge_at)
        plan = self._swaps.step(picture, now)
        for action in plan.actions:
            turn = action.turn
            if isinstance(action, Ended):
                self._end_turn(action)
            elif isinstance(action, Begun):
                self.ledger.turns[turn.node] = turn
                held = self.ledger.holder(turn.node)
                if held is not None:
                    self.ledger.drop_hold(held)
                self.ledger.hold(turn.ticket, turn.node, action.hold)
            else:
                self._take_turn(action)
        for entry in entries:
            self._wait_for_swap(entry, plan.waits, now)

    def _end_turn(self, ended: Ended) -> None:
        turn = self.ledger.turns.pop(ended.turn.node)
        self.counters.swapped(done=not ended.why)
        self.ledger.drop_hold(turn.ticket)
        self._wake_soon(turn.node)

    def _take_turn(self, ask: Ask) -> None:
        """Send the request that a node has made room for."""
        ticket = self._open[ask.turn.ticket]
        entry = ticket.entry
        if entry is not None and self._start(ticket, ask.candidate, ask.candidate.need):
            self.ledger.turns[ask.turn.node] = ask.turn
            self.queue.remove(entry)
            self._left_line(ticket)

    def _wait_for_swap(self, entry: Entry[Ticket], waits: Mapping[str, Turn | None], now: float) -> None:
        """Let the deadline of a request stand still while it waits for a swap, and remember what it waits for."""
        ticket, model = entry.item, entry.item.demand.model
        if ticket.entry is not entry:
            return
        if model not in waits:
            ticket.swap = ""
            return
        turn = waits[model]
        swap = f"{SWAP}: no node may unload a model for it yet"
        if turn is not None:
            swap = f"{SWAP} on {turn.name} ({turn.models})"
        if swap != ticket.swap:
            ticket.swap = swap
            if turn is None:
                ticket.mark(now, swap)
            else:
                ticket.mark(now, f"{SWAP}: {turn.models}", turn.name)
        later = min(ticket.arrived + self._settings.swap_seconds, now + self._settings.queue_seconds)
        entry.deadline = ticket.deadline = max(entry.deadline, later)

    def _judge_at(self, ticket: Ticket, node: NodeView) -> Candidate:
        trials = self._one_model(ticket.trials(), ticket.demand.model)
        return consider(node, ticket.demand, self.ledger, self._clock(), self._corrections, trials, ticket.warm)

    # what nodes say of requests

    def _deltas(self, node: NodeId, frame: Deltas) -> None:
        live = self._live
        touched: list[Ticket] = []
        tokens = 0
        for delta in frame.deltas:
            ticket = live.get(delta.request)
            if ticket is None or ticket.node != node:
                continue
            if ticket.first_at is None:
                self._first(ticket, node)
            tokens += len(delta.ids)
            if ticket.add(delta):
                touched.append(ticket)
            if ticket.held > self._slow_bytes:
                self._too_much(ticket)
        if tokens:
            self.counters.node(node).generated_tokens += tokens
        if touched:
            first = touched[0]
            self.counters.stepped(node, first.demand.model, first.number, len(touched), self._clock())
        for ticket in touched:
            ticket.flush()

    def _first(self, ticket: Ticket, node: NodeId) -> None:
        now = self._clock()
        ticket.first_at = now
        ticket.mark(now, "first token", ticket.node_name)
        self.ledger.admitted(ticket.request)
        self.ledger.read(ticket.request)
        self.counters.first(node, ticket.demand.model, ticket.read[0], now - ticket.arrived)

    def _admitted(self, ticket: Ticket, frame: Admitted) -> None:
        self.ledger.admitted(frame.request)
        ticket.deadline = None
        prompt = min(frame.prompt_tokens, most_prompt(ticket))
        cached = min(frame.cached_tokens, prompt)
        ticket.demand = _counted(ticket.demand, prompt)
        ticket.read = prompt, cached
        if ticket.chain is not None and ticket.node is not None:
            self.affinity.read(ticket.chain, ticket.node, frame.prompt_hash, prompt, cached)

    def _finished(self, ticket: Ticket, frame: Finished) -> None:
        if ticket.node is not None:
            self.breakers.good(ticket.node, frame.request)
        frame = credible(ticket, frame)
        counters = self.counters
        counters.prompt_tokens += frame.prompt_tokens
        counters.cached_tokens += frame.cached_tokens
        counters.completion_tokens += frame.completion_tokens
        self._end(ticket, frame)

    def _refused(self, ticket: Ticket, node: NodeId, frame: Refusal) -> None:
        refused = frame.refused
        self.counters.refused(refused.code.value)
        ticket.mark(self._clock(), f"refused: {refused.code}", ticket.node_name)
        self._leave_node(ticket)
        if refused.code in FINAL and refused.code not in ELSEWHERE:
            self._deny(ticket, refused)
            return
        if frame.prompt_tokens is not None:
            ticket.demand = _counted(ticket.demand, min(frame.prompt_tokens, most_prompt(ticket)))
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

    def _deny(self, ticket: Ticket, refused: Refused) -> None:
        """End a request that no node takes: refused, or, when its client has read a part of the answer, as broken."""
        fallen = ticket.fallen
        if refused.code is Code.NO_MODEL and self.quotas.limits(ticket.job.key).models:
            # the nearest names are of models that the key may not use
            refused = replace(refused, message=f"no node serves the model {ticket.demand.model[:256]!r}")
        if fallen is None or not ticket.begun:
            self._end(ticket, refused)
        else:
            self._end(ticket, Failure(fallen.code, f"{fallen.message}; nobody could go on with it: {refused.message}"))

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        """Take a request out of wherever it is and tell its reader: the one way to end."""
        if ticket.outcome is not None:
            return
        if ticket.entry is not None:
            self.queue.remove(ticket.entry)
            self._left_line(ticket)
            for node in self.ledger.turns:
                self._wake_soon(node)
        self._leave_node(ticket)
        self._endings.ended(ticket, outcome, self._model_of(ticket), self.quotas, self._clock())
        ticket.end(outcome)

    def _model_of(self, ticket: Ticket) -> str:
        """Name the model that a request is counted for: none where no member has heard of it, for a name that a client
        makes up must not make a row in the database."""
        model = ticket.job.demand.model
        known = ticket.attempts or any(model in node.models for node in self.view.nodes)
        return model if known else ""

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
        ticket.drop()
        self._end(ticket, SLOW)

    # time

    def _arm(self) -> None:
        if self._timer is None and self._open:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self.sweep)

    def sweep(self) -> None:
        """Look at everybody who is here a few times a second, instead of a timer for each."""
        self._timer = None
        now = self._clock()
        self._swap(now)
        self._expire(now)
        self._leave_silent(now)
        self._relieve(now)
        for ticket in list(self._open.values()):
            ticket.bound()
            if isinstance(ticket, StreamTicket):
                self._look_after(ticket)
        self._arm()

    def _leave_silent(self, now: float) -> None:
        """Move requests off nodes that are silent for too long; at the second look only, so that after a stall of our
        own loop what waits in the sockets is read first."""
        silent = {node.id: node.heard_at for node in self.view.nodes if node.state == SUSPECT}
        for node, heard_at in silent.items():
            if self._silent.setdefault(node, now) < now:
                for ticket in self._on(node):
                    self._moved(ticket, now - heard_at)
        for node in self._silent.keys() - silent:
            del self._silent[node]

    def _relieve(self, now: float) -> None:
        """Give nodes that have their hands free what waits elsewhere. Those in line go before."""
        waiting = [] if len(self.queue) or self._closing else work_stealing.waiting(self._live.values(), now)
        if not waiting:
            return
        view, judged = self._seen(self.view, now), 0
        nodes, helpers = {node.id: node for node in view.nodes}, work_stealing.helpers(view, self.ledger)
        for ticket in waiting:
            node = None if ticket.node is None else nodes.get(ticket.node)
            others = helpers.get(ticket.demand.model)
            if node is None or others is None or others.node(node.id) is not None:
                continue
            here = consider(node, ticket.demand, self.ledger, now, self._corrections, FIRST, ticket.warm)
            if work_stealing.behind(here) > work_stealing.SOONER and judged < work_stealing.MOST:
                self._moved_to(others, ticket, lambda there, here=here: work_stealing.worth(here, there))
                judged += 1

    def _look_after(self, ticket: StreamTicket) -> None:
        if ticket.takes != ticket.seen_takes:
            ticket.seen_takes, ticket.still = ticket.takes, 0.0
            return
        if ticket.node is None and ticket.outcome is None and not ticket.opened and not ticket.swap:
            ticket.still = 0.0  # in line, and a clean 503 is still possible
            return
        ticket.still += self._interval
        if ticket.blocked and ticket.opened:
            if ticket.still >= self._settings.slow_client_seconds:
                self._stuck(ticket)
        elif ticket.still >= self._settings.keepalive_seconds:
            ticket.nudged = True
            ticket.flush()


def _nobody_told(_: Ticket, __: str) -> None:
    return


def _counted(demand: Demand, tokens: int) -> Demand:
    return replace(demand, prompt_tokens=tokens)
