"""Dispatcher: owner of view, queue and ledger on the event loop; places, sends, tracks and ends every request.

All methods run on one event loop and none awaits. A decision and its reservation are therefore one step without locks.
A request has exactly one of three places: in the queue (`entry`), on a node (`_live`, by the number of this attempt),
or ended (`outcome`). Every attempt gets new numbers. Late frames about an earlier attempt are unknown here and ignored;
a node is believed only about requests that are on it.

Events

A node refuses: the reservation is released and the node's headroom is corrected until its next report. The next node is
asked at once, at most four in a row, then the request is queued. A refusal is never a failure.

A node is lost or an engine crashes: its requests resume elsewhere from the received token ids, by the rules of
`router.placement.recovery`. The text that the client has received stays valid. A request without room waits in the
queue before all new requests. It ends with the reason if the deadline passes. It ends at once where no other node has
that model.

A node drains, or its silence lasts longer than a resume elsewhere would take. Its requests are migrated while the node
is alive, if another node has room. The remaining requests continue on their node.

An engine fails repeatedly: its node gets no requests for a while (`circuit_breaker`).

No node can load the model: the request ends with the cause, also when it was queued.

A reader falls behind: only its stream is ended and cancelled.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.admission.cache_scope import CacheScopes
from router.admission.key_scope import visible
from router.admission.load_share import LoadShare
from router.admission.queue import AdmissionQueue, QueuedRequest
from router.admission.rate_limits import KeyLimits, RateLimits, probable_tokens
from router.admission.usage import UsageCounter
from router.dispatch import work_stealing
from router.dispatch.accounting import Accounting, bounded_usage, most_prompt
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.decision_log import DecisionLog
from router.dispatch.model_swaps import BeginTurn, EndTurn, SendRequest, SwapPlanner, fits_beside
from router.dispatch.node_commands import NodeCommands
from router.dispatch.request import (
    CANCELLED,
    MAX_ANSWER_CHARS,
    SLOW,
    SWAP,
    ActiveRequest,
    BufferedRequest,
    Outcome,
    RequestFailure,
    RequestSpec,
    StreamingRequest,
)
from router.dispatch.swap_input import swap_input
from router.placement.candidate import (
    FIRST,
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
)
from router.placement.cluster_view import ClusterView, NodeView, with_state
from router.placement.feasibility import unavailable_reason
from router.placement.model_load import LoadPlacement, choose
from router.placement.place import consider, place
from router.placement.policies import POLICIES, Policy
from router.placement.prefix_affinity import PrefixAffinity, PrefixHashChain, chain_of
from router.placement.recovery import LossKind, is_fault, loss_kind, may_recover, resume_after_seconds
from router.placement.reservations import ReservationLedger, SwapTurn
from router.placement.weights import QUEUE_BACKLOG_SECONDS, SPARE_MEMORY_SHARE
from router.settings import RouterSettings
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, Cancel, Deltas, Failed, Finished, Frame, Generate, Message, Refusal
from wire.identity import NodeId
from wire.node_state import SERVING, NodeState
from wire.refusals import FINAL, FailureCode, RefusalCode, Refused
from wire.report import Model

MIN_AFFINITY_BYTES = 1024
"""Minimum bytes of a prompt for prefix affinity: a shorter prompt is prefilled in an instant."""
MAX_NODES_IN_A_ROW = 4
"""Maximum nodes asked at once for one request before it is queued."""
FAILING = "failing"
"""State that placement sees for a node whose breaker is open."""
SWEEP_INTERVAL_SECONDS = 0.25
"""Maximum interval between two sweeps, in seconds."""
ELSEWHERE = frozenset({RefusalCode.TOO_LARGE, RefusalCode.CONTEXT, RefusalCode.NO_MODEL, RefusalCode.LOAD_FAILED})
"""Refusals that are final on one node, not in the cluster: another node may be larger."""
ABOUT_ONE = Finished, Admitted, Refusal, Failed
"""Frames of a node about one request."""
STOPPING = "the coordinator is stopping: retry when it runs again"


class Dispatcher:
    """Dispatcher of one router: places requests on nodes and tracks them to their end.

    The function `send` writes a frame to a node's link and returns whether there is a link. It must not call the
    dispatcher. The function `numbers` returns the next request number and sequence number. The function `draw` returns
    numbers in [0, 1) for ties. The parameter `policy` overrides the policy of the settings.
    """

    def __init__(
        self,
        send: Callable[[NodeId, Frame], bool],
        settings: RouterSettings,
        *,
        numbers: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        counters: Counters | None = None,
        quotas: RateLimits | None = None,
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
        self.ledger = ReservationLedger()
        self.breakers: CircuitBreakers[NodeId] = CircuitBreakers()
        self.affinity = PrefixAffinity()
        self.quotas = quotas or RateLimits()
        self.usage = UsageCounter()
        self.queue: AdmissionQueue[ActiveRequest] = AdmissionQueue(settings.queue_limit)
        self.history = DecisionLog()
        self._endings = Accounting(self.counters, self.usage, self.history)
        self.orders = NodeCommands(send, lambda: numbers()[0])
        self.on_failure: Callable[[ActiveRequest, str], None] = _ignore_failure
        """Callback for a request that failed on its node, with the failure code."""
        self._corrections: dict[NodeId, HeadroomCorrection] = {}
        self._live: dict[int, ActiveRequest] = {}
        self._open: dict[int, ActiveRequest] = {}
        self._estimated_load = LoadShare()
        self._swaps = SwapPlanner(settings.swap_timeout_seconds)
        self._closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._count = 0
        self._changed: set[NodeId] = set()
        self._wake_due = False
        self._silent: dict[NodeId, float] = {}
        self._emptying: dict[NodeId, list[asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._interval = min(
            SWEEP_INTERVAL_SECONDS,
            settings.queue_timeout_seconds / 4,
            settings.keepalive_seconds / 4,
            settings.slow_client_seconds / 4,
        )

    # cluster events

    def set_view(self, view: ClusterView) -> None:
        """Apply a new view: settle acknowledged reservations, then retry queued requests on the changed nodes."""
        old = {node.id: node for node in self.view.nodes}
        self.view = view
        self._swaps.update_loaded((node for node in view.nodes if old.get(node.id) is not node), self._clock())
        for node in view.nodes:
            if old.get(node.id) is node:
                continue
            self.ledger.acknowledge(node.id, node.acked_seq)
            cache = node.engine.cache
            self.affinity.apply_report(node.id, node.life, cache.evictions, cache.evicted)
            self._read_in(node)
            correction = self._corrections.get(node.id)
            if correction is not None and correction.reported_at != node.reported_at:
                del self._corrections[node.id]
            self._returned(old.get(node.id), node)
            self._wake_soon(node.id)
            if (node.draining or node.state == NodeState.DRAINING) and self.ledger.in_flight(node.id):
                asyncio.get_running_loop().call_soon(self.move, node.id)
        for node_id in self._emptying:
            asyncio.get_running_loop().call_soon(self.move, node_id)

    def _returned(self, before: NodeView | None, node: NodeView) -> None:
        """Allow a node that is ready again to serve the requests that were lost with it."""
        if node.state == NodeState.READY and before is not None and before.state not in SERVING:
            for request in self._open.values():
                request.lost.discard(node.id)

    def _read_in(self, node: NodeView) -> None:
        """Release the reserved weights of a load, now that the node's report counts them."""
        reading = {model.name for model in node.models.values() if node.is_loading(model)}
        if reading:
            for request in self._live.values():
                if request.node == node.id and request.demand.model in reading:
                    self.ledger.read_in(request.request)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame from a node about a request or command; a frame about neither is ignored."""
        if type(frame) is Deltas:
            self._deltas(node, frame)
            return
        if not isinstance(frame, ABOUT_ONE):
            return
        request = self._live.get(frame.request)
        if request is None or request.node != node:
            self.orders.receive(node, frame)
        elif isinstance(frame, Admitted):
            self._admitted(request, frame)
        elif isinstance(frame, Finished):
            self._finished(request, frame)
        elif isinstance(frame, Refusal):
            self._refused(request, node, frame)
        else:
            self._failed(request, node, frame)

    def _failed(self, request: ActiveRequest, node: NodeId, frame: Failed) -> None:
        """Handle a request that broke on its node, alone or because the engine died."""
        if is_fault(frame.code):
            self.breakers.record_fault(node, frame.request, self._clock(), frame.message)
        self.on_failure(request, frame.code)
        fall = loss_kind(frame.code)
        if fall is None:
            self._end(request, RequestFailure(frame.code, frame.message))
            return
        if fall is LossKind.NODE:
            if frame.code == FailureCode.NODE_STOPPING:
                request.lost.add(node)
            self._fell(
                request,
                fall,
                RequestFailure(FailureCode.NODE_LOST, f"{request.node_name} gave the request up: {frame.message}"),
            )
            return
        request.refused[node] = self._reported_at(node)  # its last report still shows a ready engine, or the room
        code = frame.code if fall is LossKind.MEMORY else FailureCode.ENGINE_CRASHED
        self._fell(request, fall, RequestFailure(code, frame.message))

    def node_gone(self, node: NodeId, reason: str) -> None:
        """Handle the end of a node's link: resume its requests on other nodes, and end those that cannot resume."""
        self.orders.node_gone(node, reason)
        self._corrections.pop(node, None)
        self._silent.pop(node, None)
        for request in self._on(node):
            self.counters.nodes_lost += 1
            name = request.node_name
            self.on_failure(request, FailureCode.NODE_LOST)
            request.lost.add(node)
            why = RequestFailure(FailureCode.NODE_LOST, f"node {name} was lost during the answer ({reason}): retry")
            self._fell(request, LossKind.NODE, why)

    def forget(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member. A new map by node must be cleared here as well."""
        self.affinity.forget(node)
        self.breakers.forget(node)
        self.counters.forget(node)
        self.ledger.forget(node)
        self._swaps.forget(node)
        self._changed.discard(node)
        for kept in (self._corrections, self._silent):
            kept.pop(node, None)
        for request in self._open.values():
            request.lost.discard(node)
            request.warm = {other: share for other, share in request.warm.items() if other != node}
            for tried in (request.refused, request.never):
                tried.pop(node, None)

    async def wait_drained(self, node: NodeId, seconds: float) -> int:
        """Move the requests off a node and wait until it has none, for at most `seconds`.

        A request without room elsewhere is moved once there is room, or ends on the node. Return the number of requests
        left.
        """
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
    def unclosed_requests(self) -> tuple[ActiveRequest, ...]:
        """Requests that are not closed, including ended ones."""
        return tuple(self._open.values())

    def open_requests(self) -> list[ActiveRequest]:
        """Return the requests that have not ended, the oldest first."""
        return sorted((one for one in self._open.values() if one.outcome is None), key=lambda one: one.number)

    def move(self, node: NodeId) -> int:
        """Migrate the requests of a live node to other nodes, where their answers continue without a gap.

        Return the number of requests that stay, because no other node has room for them now. They continue on the node
        and may be moved later.
        """
        return sum(not self._moved(request) for request in self._on(node))

    def _on(self, node: NodeId) -> list[ActiveRequest]:
        """List the requests on a node, the oldest first."""
        return sorted((one for one in self._live.values() if one.node == node), key=lambda one: one.number)

    def _fell(self, request: ActiveRequest, fall: LossKind, why: RequestFailure) -> None:
        """Resume a request elsewhere after its node failed, if that is allowed and possible; else end it."""
        request.add_step(self._clock(), f"lost: {why.message}", request.node_name)
        self._leave_node(request)
        if fall in (LossKind.NODE, LossKind.MEMORY):
            request.losses += 1
        else:
            request.crashes += 1
        if not may_recover(fall, request.losses, request.crashes):
            self._end(request, why)
            return
        if not self._continues(request):
            self._end(request, self._named(request, why))
            return
        request.fallen, request.in_a_row = why, 0
        self._place(request)

    def _continues(self, request: ActiveRequest) -> bool:
        """Return whether any node could continue a request, now or later.

        A request of which the client has received nothing restarts where no other node has the model that began it.
        """
        others = self._others(request)
        if request.resumable and any(one.fingerprint == request.fingerprint for one in others):
            request.demand = replace(request.demand, written=request.written)
            return True
        if request.begun or not others:
            return False
        request.discard()
        request.demand = replace(request.demand, written=0)
        return True

    def _named(self, request: ActiveRequest, why: RequestFailure) -> RequestFailure:
        """Add to a failure that other nodes hold a different model under the same name."""
        if not request.fingerprint or all(one.fingerprint == request.fingerprint for one in self._others(request)):
            return why
        text = f"the other nodes have a different model with the name {request.demand.model} (`cluster models`)"
        return replace(why, message=f"{why.message}; {text}, which cannot resume the answer")

    def _others(self, request: ActiveRequest) -> list[Model]:
        """List the models of a request's name on the members with which it was not lost."""
        name = request.demand.model
        nodes = (node for node in self.view.nodes if node.state != NodeState.LEFT and node.id not in request.lost)
        return [node.models[name] for node in nodes if name in node.models]

    def _moved(self, request: ActiveRequest, silent: float | None = None) -> bool:
        """Move a request to another node with room for it, and only then cancel it on its node; return whether it
        moved.

        Where the node has been `silent` for some seconds, the move must also pay.
        """
        nothing = request.generated_ids and not request.written and not request.begun
        if not (nothing or request.resumable) or not may_recover(LossKind.NODE, request.losses + 1, 0):
            return False
        others = ClusterView(tuple(one for one in self.view.nodes if one.id != request.node))
        if not self._moved_to(
            others, request, lambda there: silent is None or silent >= resume_after_seconds(there.expected_ttft)
        ):
            return False
        request.losses += 1
        return True

    def _moved_to(self, others: ClusterView, request: ActiveRequest, worth: Callable[[Candidate], bool]) -> bool:
        """Send a request to the best of `others` if `worth` allows it, then cancel it on its node; return whether it
        moved."""
        where = request.request, request.node, request.node_name
        node, demand = where[1], replace(request.demand, written=request.written)
        result = self._judged(request, others, demand)
        if node is None or not isinstance(result, Placement) or not worth(result.chosen):
            return False
        request.in_a_row = 0
        if not self._start(request, result.chosen, result.chosen.need):
            request.request, request.node, request.node_name = where
            return False
        request.demand = demand
        self._kept(request, result)
        request.add_step(self._clock(), "migrated", where[2])
        self.counters.moves += 1
        self._free(node, where[0])
        self._send(node, Cancel(where[0]))
        return True

    # client requests

    def submit(self, job: RequestSpec) -> ActiveRequest:
        """Accept a request: place it now, queue it, or end it with the refusal. The caller must `close` the returned
        request."""
        self._count += 1
        kind = StreamingRequest if job.stream else BufferedRequest
        limits = self.quotas.limits(job.key)
        name = self.canonical_name(job.demand.model, limits)
        if name != job.demand.model:
            job = replace(job, demand=replace(job.demand, model=name))
        owner = WeightedKey(job.key, limits.weight)
        request = kind(job, owner, self._count, self._clock())
        if job.params.seed is None:  # without a seed no other node could resume the answer with the same draws
            request.params = replace(job.params, seed=random.getrandbits(53))
        if len(self.view.nodes) > 1 and (job.demand.prompt_bytes >= MIN_AFFINITY_BYTES or job.session):
            request.chain = chain = self._chain(job)
            request.warm = self.affinity.shares(chain)
        if self._closing:
            self._end(request, RequestFailure(FailureCode.SHUTTING_DOWN, STOPPING))
        elif isinstance(charged := self.quotas.admit(job.key, job.demand, request.arrived), Refused):
            request.rates = self.quotas.rates(job.key, request.arrived)
            self._end(request, charged)
        else:
            request.charged = charged
            request.rates = self.quotas.rates(job.key, request.arrived)
            if limits.labels:
                request.demand = replace(request.demand, labels=frozenset(limits.labels))
            self._place(request)
        self._open[request.number] = request
        request.estimated_tokens = estimate = probable_tokens(job.demand)
        self._estimated_load.add(owner, estimate)
        self._quiet.clear()
        self._arm()
        return request

    def canonical_name(self, model: str, limits: KeyLimits) -> str:
        """Return the model that a client means (`ClusterView.canonical_name`), among those that its key may use."""
        if any(model in node.models for node in self.view.nodes):
            return model
        return visible(self.view, limits).canonical_name(model)

    def _chain(self, job: RequestSpec) -> PrefixHashChain:
        fingerprint = self.view.identity(job.demand.model).fingerprint
        root = (job.demand.model, fingerprint, job.tools, job.template, job.ids)
        messages = (Message("", job.text),) if job.text else job.messages
        shared = self._scopes.shares(messages)
        return chain_of(root, messages, job.session, self._scopes.of(job.key), shared=shared)

    def close(self, request: ActiveRequest) -> None:
        """Close a request. If the request has not ended, its client is gone: end it as cancelled and send its node a
        cancel."""
        if request.outcome is None:
            self._cancel(request)
            self._end(request, CANCELLED)
        if self._open.pop(request.number, None) is not None:
            self._estimated_load.drop(request.owner, request.estimated_tokens)
        if not self._open:
            self._quiet.set()

    def preview(self, demand: ResourceDemand) -> Placement | NoPlacement:
        """Compute the placement of a demand now, without a reservation and without sending."""
        now = self._clock()
        return place(
            self._seen(self.view, now),
            demand,
            self.ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            trials=self._one_model(FIRST, demand.model),
        )

    def choose_load(self, model: str, tried: Mapping[NodeId, Refused]) -> LoadPlacement | Refused:
        """Return the node that should load a model, or the refusal if there is none.

        `tried` are the nodes that have refused the load, with their refusals.
        """
        now = self._clock()
        return choose(
            self._seen(self.view, now),
            model,
            self.ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            tried=tried,
            fingerprint=self._one_model(FIRST, model).fingerprint,
        )

    def unavailable_reason(self, node: NodeView) -> Refused | None:
        """Return the refusal of a node that takes no request now; None if the node takes requests."""
        why, code = unavailable_reason(node, self._clock())
        return None if code is None else Refused(code, f"{node.name} {why}", None, 2.0, node.name)

    def outage_reason(self) -> str:
        """Return why no request could be served now; empty if one could."""
        if self._closing:
            return STOPPING
        models = self.view.models()
        if len(self.queue) >= self.queue.limit(len(self.view.nodes)):
            return f"the queue is full with {len(self.queue)} requests"
        refused = "no node has reported a model"
        for name in models:
            result = self.preview(ResourceDemand(name, prompt_bytes=64))
            if isinstance(result, Placement):
                return ""
            refused = result.refused.message
        return refused

    def leaks(self) -> int:
        """Return the number of reservations of requests that are on no node, and of holds of requests that are not
        open.

        Any number but 0 is a bug.
        """
        return len(self.ledger.promised() - self._live.keys()) + len(self.ledger.holders() - self._open.keys())

    @property
    def idle(self) -> bool:
        """Whether no request is open, which ends a drain."""
        return not self._open

    def now(self) -> float:
        """Return the current time in seconds, on the clock of the dispatcher's other times."""
        return self._clock()

    def in_flight(self, node: NodeId) -> int:
        """Return the number of requests that are on a node."""
        return self.ledger.in_flight(node)

    def waiting(self) -> int:
        """Return the number of queued requests."""
        return len(self.queue)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait at most `seconds` for the open requests, then end the remaining ones."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        self.shutdown()

    def shutdown(self, message: str = STOPPING) -> None:
        """End all requests and commands with a failure, whose text is `message`. Nodes get a cancel of each request."""
        self.orders.shutdown(message)
        for request in list(self._open.values()):
            if request.outcome is None:
                self._cancel(request)
                self._end(request, RequestFailure(FailureCode.SHUTTING_DOWN, message))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # placement and sending

    def _place(self, request: ActiveRequest) -> None:
        """Ask nodes in turn until one link takes the request; else queue or end it."""
        result = self._decide(request, self.view)
        while isinstance(result, Placement) and request.in_a_row < MAX_NODES_IN_A_ROW:
            if self._crowded(request, result.chosen):
                self._wait(request, result)
                return
            if self._start(request, result.chosen, result.chosen.need):
                self.queue.count_overtake()
                return
            result = self._decide(request, self.view)
        if isinstance(result, NoPlacement) and result.refused.final:
            self._deny(request, result.refused)
            return
        if isinstance(result, NoPlacement) and (
            self._send_to_decider(request, result.candidate) or self._send_for_share(request, result)
        ):
            return
        self._wait(request, result)

    def _send_to_decider(self, request: ActiveRequest, candidate: Candidate | None) -> bool:
        """Send a request to the node that alone can decide, unless it has a model swap; return whether it was sent."""
        return candidate is not None and candidate.node not in self.ledger.turns and self._start(request, candidate, 0)

    def _send_for_share(self, request: ActiveRequest, result: NoPlacement) -> bool:
        """Send a request to a node that is full of another key's requests; return whether it was sent.

        Its engine preempts one of those requests where that key holds more than its share.
        """
        if request.in_a_row >= MAX_NODES_IN_A_ROW:
            return False
        full = [
            one
            for one in result.candidates
            if one.code is RefusalCode.NO_ROOM
            and one.model is not None
            and one.model.loaded
            and one.node not in self.ledger.turns
            and request.refused.get(one.node) != self._reported_at(one.node)
        ]
        rows = (
            Counter((one.node, one.owner) for one in self._live.values())
            if full
            else Counter[tuple[NodeId, WeightedKey]]()
        )
        for one in sorted(full, key=lambda one: one.expected_ttft):
            mine = request.owner.load(rows[one.node, request.owner] + 1)
            others = (owner.load(count - 1) for (node, owner), count in rows.items() if node == one.node)
            if any(load >= mine for load in others) and self._start(request, one, 0):
                return True
        return False

    def _decide(self, request: ActiveRequest, view: ClusterView) -> Placement | NoPlacement:
        return self._kept(request, self._judged(request, view, request.demand))

    def _judged(self, request: ActiveRequest, view: ClusterView, demand: ResourceDemand) -> Placement | NoPlacement:
        now, trials = self._clock(), self._one_model(request.trials(), demand.model)
        seen = self._seen(view, now)
        result = place(
            seen,
            demand,
            self.ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            trials=trials,
            warm=request.warm,
        )
        self.counters.placement.observe(self._clock() - now)
        return result

    def _one_model(self, trials: AttemptHistory, name: str) -> AttemptHistory:
        """Restrict a request to one fingerprint of a name with several.

        It is the fingerprint that began the answer, or the one served by the nodes that the request has not lost.
        """
        if trials.fingerprint:
            return trials
        view = self._seen(self.view, self._clock())
        if trials.lost:
            view = ClusterView(tuple(node for node in view.nodes if node.id not in trials.lost))
        identity = view.identity(name)
        return replace(trials, fingerprint=identity.fingerprint) if identity.conflict else trials

    def _kept(self, request: ActiveRequest, result: Placement | NoPlacement) -> Placement | NoPlacement:
        """Record a decision for later explanation."""
        job = request.job
        self.history.record_decision(
            self._clock(), job.request_id, job.key, request.demand, result, len(self.view.nodes)
        )
        return result

    def _seen(self, view: ClusterView, now: float) -> ClusterView:
        """Return the view for placement, in which nodes with an open breaker are not ready."""
        barred = self.breakers.barred_nodes(now)
        if not barred:
            return view
        return ClusterView(tuple(with_state(node, FAILING) if node.id in barred else node for node in view.nodes))

    def _start(self, entry: ActiveRequest, chosen: Candidate, need: int) -> bool:
        """Reserve `need` bytes and send the request; return False without a link, as the next view will show."""
        job = entry.job
        request, seq = self._numbers()
        entry.attempts += 1
        entry.in_a_row += 1
        self.counters.attempts += 1
        self.counters.retries += entry.attempts > 1
        self.counters.placed(chosen.node)
        known = entry.token_ids() if entry.attempts > 1 else ()
        if known:
            self.counters.resumes += 1
        elif chosen.model is not None:
            entry.fingerprint = chosen.model.fingerprint
        frame = Generate(
            request,
            seq,
            job.request_id,
            job.demand.model,
            job.messages,
            entry.params,
            job.created,
            chosen.output_tokens,
            job.stream,
            job.tools,
            job.template,
            known,
            job.text,
            job.ids,
            entry.owner,
            entry.fingerprint if known else "",
            self._scopes.scope,
            self._scopes.shares(job.messages),
        )
        seconds = chosen.reading / chosen.model.prefill_speed if chosen.model else 0.0
        self.ledger.reserve(
            chosen.node, request, seq, need, chosen.reading, min(need, chosen.weights), seconds, job.demand.choices
        )
        if known:
            self.ledger.read(request)
        entry.request, entry.node, entry.node_name = request, chosen.node, chosen.name
        self._live[request] = entry
        now = self._clock()
        self.breakers.record_attempt(chosen.node, request, now)
        entry.add_step(now, "resumed" if known else "sent", chosen.name)
        sent = False
        try:
            sent = self._send(chosen.node, frame)
        finally:
            if not sent:
                self._leave_node(entry)
                entry.refused[chosen.node] = self._reported_at(chosen.node)
                entry.add_step(now, "no link", chosen.name)
        return sent

    def _leave_node(self, request: ActiveRequest) -> None:
        """Remove the request from its node."""
        if request.node is not None:
            self._free(request.node, request.request)
            request.node = None

    def _free(self, node: NodeId, request: int) -> None:
        """End an attempt: the only place where a reservation is released."""
        self._live.pop(request, None)
        self.ledger.release(request)
        self.breakers.record_departure(node, request)
        if node in self._emptying and not self.ledger.in_flight(node):
            for waits in self._emptying[node]:
                waits.set()
        self._wake_soon(node)

    def _reported_at(self, node: NodeId) -> float:
        seen = self.view.node(node)
        return -1.0 if seen is None else seen.reported_at

    # queue

    def _wait(self, request: ActiveRequest, result: Placement | NoPlacement) -> None:
        """Queue a request, or end it."""
        now = self._clock()
        request.in_a_row = 0
        if request.deadline is None:
            request.deadline = now + self._settings.queue_timeout_seconds
        entry = self.queue.offer(
            request,
            request.job.key,
            probable_tokens(request.demand),
            now,
            request.deadline,
            len(self.view.nodes),
            weight=request.owner.weight,
            share=self.quotas.limits(request.job.key).waiting,
            begun=request.fallen is not None,
        )
        if isinstance(entry, Refused):
            numbers = result.refused.numbers if isinstance(result, NoPlacement) else None
            self._end(request, Refused(entry.code, entry.message, numbers, entry.retry_after))
            return
        request.entry, request.queued_at = entry, now
        request.add_step(now, "queued")
        self.counters.queue_entries += 1
        if request.fallen is not None and isinstance(result, NoPlacement):
            self._keep(request, result)

    def _wake_soon(self, node: NodeId) -> None:
        """Schedule a retry of the queued requests on this node before any new frame; several changes make one retry."""
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
        self.queue.place_waiting(self._clock(), lambda ticket, keep: self._attempt(ticket, keep, changed))

    def _attempt(self, request: ActiveRequest, keep: bool, changed: ClusterView) -> bool:
        """Try a queued request on the changed nodes: on all other nodes it did not fit before."""
        result = self._judged(request, changed, request.demand)
        if isinstance(result, Placement):
            return self._go(request)
        if self._settled_by_all(request, result):
            return True
        if keep or request.fallen is not None:
            self._keep(request, result)
        return False

    def _go(self, request: ActiveRequest) -> bool:
        """Send a queued request to the best of all nodes, unless it is better off in the queue; return whether it was
        sent."""
        result = self._judged(request, self.view, request.demand)
        if not isinstance(result, Placement) or self._crowded(request, result.chosen):
            return False
        if not self._start(request, result.chosen, result.chosen.need):
            return False
        self._kept(request, result)
        self._left_line(request)
        return True

    def _crowded(self, request: ActiveRequest, chosen: Candidate) -> bool:
        """Return whether a request must be queued although a node has room for it.

        This applies where many prompt tokens are ahead of it and its key asks for far more than its share. A resumed
        answer never waits for that.
        """
        model = chosen.model
        if request.fallen is not None or model is None or not model.loaded:
            return False
        return chosen.ahead > QUEUE_BACKLOG_SECONDS * model.prefill_speed and self._estimated_load.exceeds_share(
            request.job.key
        )

    def _scarce(self, chosen: Candidate) -> bool:
        """Return whether a request would use the last half of its node's memory for prompts and answers."""
        node = self.view.node(chosen.node)
        loaded = sum(model.weights for model in node.models.values() if model.loaded) if node else 0
        return (chosen.headroom or 0) - chosen.need < SPARE_MEMORY_SHARE * (chosen.most - loaded)

    def _settled_by_all(self, request: ActiveRequest, part: NoPlacement) -> bool:
        """Decide over all nodes where the changed nodes show that waiting may be useless; return whether it settled.

        It may be useless if the model can no longer be loaded there, or only after other models are unloaded.
        """
        if part.candidate is None and part.refused.code is not RefusalCode.LOAD_FAILED:
            return False
        result = self._decide(request, self.view)
        if isinstance(result, Placement):
            return False
        if result.refused.code is RefusalCode.LOAD_FAILED:
            self._deny(request, result.refused)
            return True
        if not self._send_to_decider(request, result.candidate):
            return False
        self._left_line(request)
        return True

    def _keep(self, request: ActiveRequest, result: Placement | NoPlacement) -> None:
        """Hold room on the node that lacks least, unless the request has a hold on a node that is still ready.

        Where a model is in the way, nothing can be held before the slice of that model has ended.
        """
        held_node = self.ledger.node_of_hold(request.number)
        if held_node is not None and any(
            node.id == held_node and node.state == NodeState.READY for node in self.view.nodes
        ):
            return
        nodes = {node.id: node for node in self.view.nodes}
        short = [
            one
            for one in result.candidates
            if one.code is RefusalCode.NO_ROOM
            and fits_beside(nodes[one.node], one)
            and self.ledger.holder(one.node) is None
            and one.node not in self.ledger.turns
        ]
        if short:
            best = max(short, key=lambda one: (one.headroom or 0) - one.need)
            self.ledger.hold(request.number, best.node, best.need)

    def _left_line(self, request: ActiveRequest) -> None:
        self.counters.count_queue_exit(self._clock() - request.queued_at)
        self.ledger.drop_hold(request.number)
        request.entry, request.swap = None, ""

    def _expire(self, now: float) -> None:
        for request in self.queue.expire(now):
            self._left_line(request)
            result = self._decide(request, self.view)
            waited = f" (waited {now - request.arrived:.0f} s in the queue)"
            if isinstance(result, Placement):
                chosen = result.chosen
                kept = self._crowded(request, chosen) and self._scarce(chosen)
                if kept or not self._start(request, chosen, chosen.need):
                    text = f"other API keys use {chosen.name} up to its limit: retry{waited}"
                    self._deny(request, Refused(RefusalCode.DEADLINE, text, None, 1.0))
                continue
            refused = result.refused
            self._deny(
                request,
                Refused(refused.code, refused.message + waited, refused.numbers, refused.retry_after, refused.node),
            )

    # model swaps

    def _swap(self, now: float) -> None:
        """Advance the model swaps under way and begin those that are due."""
        if not len(self.queue) and not self.ledger.turns:
            return
        entries = sorted(self.queue.entries(), key=lambda entry: entry.item.arrived)
        queued = [entry.item for entry in entries]
        snapshot = swap_input(self._seen(self.view, now), queued, self._live.values(), self.ledger, self._judge_at)
        plan = self._swaps.step(snapshot, now)
        for action in plan.actions:
            turn = action.turn
            if isinstance(action, EndTurn):
                self._end_turn(action)
            elif isinstance(action, BeginTurn):
                self.ledger.turns[turn.node] = turn
                holder = self.ledger.holder(turn.node)
                if holder is not None:
                    self.ledger.drop_hold(holder)
                self.ledger.hold(turn.request, turn.node, action.hold)
            else:
                self._take_turn(action)
        for entry in entries:
            self._wait_for_swap(entry, plan.waits, now)

    def _end_turn(self, ended: EndTurn) -> None:
        turn = self.ledger.turns.pop(ended.turn.node)
        self.counters.swapped(done=not ended.why)
        self.ledger.drop_hold(turn.request)
        self._wake_soon(turn.node)

    def _take_turn(self, action: SendRequest) -> None:
        """Send the request for which a node has unloaded models."""
        request = self._open[action.turn.request]
        entry = request.entry
        if entry is not None and self._start(request, action.candidate, action.candidate.need):
            self.ledger.turns[action.turn.node] = action.turn
            self.queue.remove(entry)
            self._left_line(request)

    def _wait_for_swap(
        self, entry: QueuedRequest[ActiveRequest], waits: Mapping[str, SwapTurn | None], now: float
    ) -> None:
        """Extend the deadline of a request while it waits for a swap, and record the swap."""
        request, model = entry.item, entry.item.demand.model
        if request.entry is not entry:
            return
        if model not in waits:
            request.swap = ""
            return
        turn = waits[model]
        swap = f"{SWAP}: no node can unload a model for it yet"
        if turn is not None:
            swap = f"{SWAP} on {turn.name} ({turn.models})"
        if swap != request.swap:
            request.swap = swap
            if turn is None:
                request.add_step(now, swap)
            else:
                request.add_step(now, f"{SWAP}: {turn.models}", turn.name)
        later = min(request.arrived + self._settings.swap_timeout_seconds, now + self._settings.queue_timeout_seconds)
        entry.deadline = request.deadline = max(entry.deadline, later)

    def _judge_at(self, request: ActiveRequest, node: NodeView) -> Candidate:
        trials = self._one_model(request.trials(), request.demand.model)
        return consider(node, request.demand, self.ledger, self._clock(), self._corrections, trials, request.warm)

    # frames about requests

    def _deltas(self, node: NodeId, frame: Deltas) -> None:
        live = self._live
        touched: list[ActiveRequest] = []
        tokens = 0
        for delta in frame.deltas:
            request = live.get(delta.request)
            if request is None or request.node != node:
                continue
            if request.first_at is None:
                self._first(request, node)
            tokens += len(delta.ids)
            if request.add(delta):
                touched.append(request)
            if request.buffered > self._slow_bytes:
                self._too_much(request)
        if tokens:
            self.counters.node(node).generated_tokens += tokens
        if touched:
            first = touched[0]
            self.counters.stepped(node, first.demand.model, first.number, len(touched), self._clock())
        for request in touched:
            request.flush()

    def _first(self, request: ActiveRequest, node: NodeId) -> None:
        now = self._clock()
        request.first_at = now
        request.add_step(now, "first token", request.node_name)
        self.ledger.admitted(request.request)
        self.ledger.read(request.request)
        self.counters.first(node, request.demand.model, request.read[0], now - request.arrived)

    def _admitted(self, request: ActiveRequest, frame: Admitted) -> None:
        self.ledger.admitted(frame.request)
        request.deadline = None
        prompt = min(frame.prompt_tokens, most_prompt(request))
        cached = min(frame.cached_tokens, prompt)
        request.demand = _counted(request.demand, prompt)
        request.read = prompt, cached
        if request.chain is not None and request.node is not None:
            self.affinity.read(request.chain, request.node, frame.prompt_hash, prompt, cached)

    def _finished(self, request: ActiveRequest, frame: Finished) -> None:
        if request.node is not None:
            self.breakers.record_success(request.node, frame.request)
        frame = bounded_usage(request, frame)
        counters = self.counters
        counters.prompt_tokens += frame.prompt_tokens
        counters.cached_tokens += frame.cached_tokens
        counters.completion_tokens += frame.completion_tokens
        self._end(request, frame)

    def _refused(self, request: ActiveRequest, node: NodeId, frame: Refusal) -> None:
        refused = frame.refused
        self.counters.refused(refused.code.value)
        request.add_step(self._clock(), f"refused: {refused.code}", request.node_name)
        self._leave_node(request)
        if refused.code in FINAL and refused.code not in ELSEWHERE:
            self._deny(request, refused)
            return
        if frame.prompt_tokens is not None:
            request.demand = _counted(request.demand, min(frame.prompt_tokens, most_prompt(request)))
        if refused.final:
            request.never[node] = refused
        reported_at = self._reported_at(node)
        request.refused[node] = reported_at
        if refused.code is RefusalCode.NO_ROOM and refused.numbers is not None and refused.numbers.headroom is not None:
            self._corrections[node] = HeadroomCorrection(reported_at, refused.numbers.headroom)
        self._place(request)

    # ends

    def _cancel(self, request: ActiveRequest) -> None:
        if request.node is not None:
            self._send(request.node, Cancel(request.request))

    def _deny(self, request: ActiveRequest, refused: Refused) -> None:
        """End a request that no node takes: as refused, or as failed when its client has a part of the answer."""
        fallen = request.fallen
        if refused.code is RefusalCode.NO_MODEL and self.quotas.limits(request.job.key).models:
            # the message names similar models, which the key may not use
            refused = replace(refused, message=f"no node serves the model {request.demand.model[:256]!r}")
        if fallen is None or not request.begun:
            self._end(request, refused)
        else:
            self._end(
                request,
                RequestFailure(
                    fallen.code, f"{fallen.message}; no other node can resume the answer: {refused.message}"
                ),
            )

    def _end(self, request: ActiveRequest, outcome: Outcome) -> None:
        """Remove a request from its place and notify its reader: the only way to end."""
        if request.outcome is not None:
            return
        if request.entry is not None:
            self.queue.remove(request.entry)
            self._left_line(request)
            for node in self.ledger.turns:
                self._wake_soon(node)
        self._leave_node(request)
        self._endings.ended(request, outcome, self._model_of(request), self.quotas, self._clock())
        request.end(outcome)

    def _model_of(self, request: ActiveRequest) -> str:
        """Return the model name for a request's counters; empty for a name that no member has.

        An invented name must not add a row to the database.
        """
        model = request.job.demand.model
        known = request.attempts or any(model in node.models for node in self.view.nodes)
        return model if known else ""

    def _too_much(self, request: ActiveRequest) -> None:
        if isinstance(request, StreamingRequest):
            self._stuck(request)
        elif request.buffered > MAX_ANSWER_CHARS:
            self._cancel(request)
            self._end(
                request,
                RequestFailure(
                    FailureCode.ANSWER_TOO_LONG,
                    f"the answer is longer than {MAX_ANSWER_CHARS} characters: use stream or lower max_tokens",
                ),
            )

    def _stuck(self, request: StreamingRequest) -> None:
        """End a stream whose reader does not read."""
        self.counters.slow_clients += 1
        self._cancel(request)
        request.drop()
        self._end(request, SLOW)

    # time

    def _arm(self) -> None:
        if self._timer is None and self._open:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self.sweep)

    def sweep(self) -> None:
        """Advance model swaps and deadlines, move waiting requests, and check streams. Runs several times per second.

        One sweep checks all open requests, instead of a timer for each.
        """
        self._timer = None
        now = self._clock()
        self._swap(now)
        self._expire(now)
        self._leave_silent(now)
        self._relieve(now)
        for request in list(self._open.values()):
            request.discard_excess()
            if isinstance(request, StreamingRequest):
                self._look_after(request)
        self._arm()

    def _leave_silent(self, now: float) -> None:
        """Migrate requests off nodes that are silent for too long.

        A migration starts at the second check only. After a stall of this event loop, the waiting socket data is
        processed first.
        """
        silent = {node.id: node.reported_at for node in self.view.nodes if node.state == NodeState.SUSPECT}
        for node, reported_at in silent.items():
            if self._silent.setdefault(node, now) < now:
                for request in self._on(node):
                    self._moved(request, now - reported_at)
        for node in self._silent.keys() - silent:
            del self._silent[node]

    def _relieve(self, now: float) -> None:
        """Rebalance: move requests that wait on other nodes to idle nodes. Queued requests go first."""
        waiting = [] if len(self.queue) or self._closing else work_stealing.waiting(self._live.values(), now)
        if not waiting:
            return
        view, judged = self._seen(self.view, now), 0
        nodes, helpers = {node.id: node for node in view.nodes}, work_stealing.idle_nodes(view, self.ledger)
        for request in waiting:
            node = None if request.node is None else nodes.get(request.node)
            others = helpers.get(request.demand.model)
            if node is None or others is None or others.node(node.id) is not None:
                continue
            here = consider(node, request.demand, self.ledger, now, self._corrections, FIRST, request.warm)
            if work_stealing.queue_wait(here) > work_stealing.MIN_GAIN_SECONDS and judged < work_stealing.MAX_JUDGED:
                self._moved_to(others, request, lambda there, here=here: work_stealing.is_worth_moving(here, there))
                judged += 1

    def _look_after(self, request: StreamingRequest) -> None:
        if request.takes != request.seen_takes:
            request.seen_takes, request.still = request.takes, 0.0
            return
        if request.node is None and request.outcome is None and not request.opened and not request.swap:
            request.still = 0.0  # queued, and a clean 503 is still possible
            return
        request.still += self._interval
        if request.blocked and request.opened:
            if request.still >= self._settings.slow_client_seconds:
                self._stuck(request)
        elif request.still >= self._settings.keepalive_seconds:
            request.keepalive_due = True
            request.flush()


def _ignore_failure(_: ActiveRequest, __: str) -> None:
    return


def _counted(demand: ResourceDemand, tokens: int) -> ResourceDemand:
    return replace(demand, prompt_tokens=tokens)
