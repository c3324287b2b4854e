"""Dispatcher: places, sends, tracks and ends every request on the event loop.

All methods run on one event loop, and none of them awaits, except the two waits for a drain. A decision and its
reservation are therefore one step, without locks. `request_state` is the state machine of a request. The dispatcher
applies its events and performs its actions with these parts:

- `intake` accepts a request, `assignment` asks nodes for it, `attempts` sends it,
- `waiting` has the requests without a node, `swap_turns` unloads models for them,
- `losses` resumes requests elsewhere, `migration` moves them off a live node,
- `stream_watchdog` ends readers that fall behind, `endings` settles every end.

The parts change a request's state by `Dispatcher.apply` only.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from router.admission.cache_scope import CacheScopes
from router.admission.rate_limits import RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.counters import Counters
from router.dispatch.parts.composition import Parts, Surroundings, get_policy
from router.dispatch.request import CANCELLED, RequestFailure, RequestSpec
from router.dispatch.request_events import (
    Delivered,
    Event,
    FirstTokens,
    RequestDenied,
    StartAttempt,
    Stopped,
    Undelivered,
)
from router.placement.cluster_view import ClusterView
from router.placement.policies import Policy
from router.settings import RouterSettings
from wire.frames import Deltas, Frame
from wire.identity import NodeId
from wire.node_state import SERVING, NodeState
from wire.refusals import FailureCode
from wire.state_machine import IllegalEventError, InvariantError, StateMachine

log = structlog.get_logger("router.dispatch.dispatcher")
STOPPING = "the coordinator is stopping: retry when it runs again"


def _ignore_failure(_: ActiveRequest, __: str) -> None:
    return


def _record_decode_steps(counters: Counters, node: NodeId, requests: Sequence[ActiveRequest], now: float) -> None:
    """Record the decode step of each model in one frame, which extended the streams of `requests` at `now`.

    A node orders the rows of a frame by model. The first and the last row therefore show whether there is more than one
    model.
    """
    first = requests[0]
    if first.demand.model == requests[-1].demand.model:
        counters.record_decode_step(node, first.demand.model, first.number, len(requests), now)
        return
    for model, group in itertools.groupby(requests, key=lambda request: request.demand.model):
        of_model = list(group)
        counters.record_decode_step(node, model, of_model[0].number, len(of_model), now)


class Dispatcher:
    """Dispatcher of one router: places requests on nodes and tracks them to their end.

    `send` writes a frame to a node's link and returns whether there is a link. It must not call the dispatcher.
    `numbers` returns the next number of an attempt or command, and the next sequence number. `clock` returns monotonic
    seconds. `draw`, the only source of randomness, returns numbers in [0, 1). `policy` overrides the setting.
    `counters`, `quotas` and `scopes` default to new objects. `on_failure` is called with the request and the failure
    code when a request fails on its node or the node is lost, before recovery.
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
        on_failure: Callable[[ActiveRequest, str], None] = _ignore_failure,
    ) -> None:
        surroundings = Surroundings(
            send=send,
            numbers=numbers,
            clock=clock,
            draw=draw,
            settings=settings,
            counters=counters or Counters(),
            quotas=quotas or RateLimits(),
            scopes=scopes or CacheScopes(),
            policy=policy or get_policy(settings),
            on_failure=on_failure,
        )
        self._clock = clock
        self._slow_bytes = settings.slow_client_bytes
        self._interval = surroundings.interval
        self._parts = parts = Parts(surroundings, self.apply, self._wake)
        self.counters = surroundings.counters
        self.quotas = surroundings.quotas
        self.ledger, self.queue, self.breakers = parts.ledger, parts.queue, parts.breakers
        self.affinity, self.usage, self.history = parts.affinity, parts.usage, parts.history
        self.placer, self.intake, self.names = parts.placer, parts.intake, parts.intake.names
        self.upstreams = parts.upstreams
        self.commands = parts.commands
        self._attempts, self._crowds, self._live = parts.attempts, parts.crowds, parts.attempts.live
        self.receivers: Mapping[type[Frame], Callable[[NodeId, Any], None]] = {
            Deltas: self._receive_deltas,
            **parts.frames.receivers,
        }
        """Function that applies a frame from a node, by the type of the frame."""
        self._open: dict[int, ActiveRequest] = {}
        self._count = 0
        self._closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._timer: asyncio.TimerHandle | None = None
        self._perform = parts.build_performers(self._start_attempt)

    # state machine

    def apply(self, request: ActiveRequest, event: Event) -> None:
        """Apply an event to a request, and perform the actions that result.

        An illegal event is counted, and ends only this request, with a failure.
        """
        try:
            actions = request.step(event, self._clock())
        except (IllegalEventError, InvariantError) as error:
            self.counters.illegal_events[StateMachine.REQUEST] += 1
            log.exception("illegal event", request_id=request.spec.request_id, state=request.state.value)
            text = f"the request ended because of an internal error of the router: retry, and report its log ({error})"
            self.apply(request, Stopped(RequestFailure(FailureCode.ROUTER_ERROR, text)))
            return
        perform = self._perform
        for action in actions:
            perform[type(action)](request, action)

    def _start_attempt(self, request: ActiveRequest, action: StartAttempt) -> None:
        """Reserve the resources of an attempt, send its request, and apply the event that follows, if there is any."""
        self._attempts.reserve(request, action)
        sent = False
        try:
            sent = self._attempts.send(request, action)
        finally:
            placed = action.placed
            if not sent:
                self.apply(request, Undelivered(placed.attempt))
                self._attempts.record_undelivered(request, placed.chosen.node, placed.chosen.name)
            elif request.life.origin is not None:
                self.apply(request, Delivered(placed.attempt))

    # cluster events

    @property
    def view(self) -> ClusterView:
        """Newest view of the cluster."""
        return self.placer.view

    def set_view(self, view: ClusterView) -> None:
        """Apply a new view: settle reservations, drop evicted prefixes, readmit nodes, schedule retries and moves."""
        parts, old = self._parts, {node.id: node for node in self.view.nodes}
        self.placer.set_view(view)
        changed = [node for node in view.nodes if old.get(node.id) is not node]
        parts.swaps.update_loaded(changed)
        draining: list[NodeId] = []
        for node in changed:
            self.ledger.acknowledge(node.id, node.acked_seq)
            cache = node.engine.cache
            self.affinity.apply_report(node.id, node.engine_instance, cache.evictions, cache.evicted, cache.store)
            parts.attempts.release_reported_weights(node)
            before = old.get(node.id)
            if node.state == NodeState.READY and before is not None and before.state not in SERVING:
                for request in self._open.values():
                    request.tried.readmit(node.id)
            parts.changes.mark(node.id)
            if (node.draining or node.state == NodeState.DRAINING) and self.ledger.count_in_flight(node.id):
                draining.append(node.id)
        for node_id in (*draining, *parts.drains.end_uncordoned(old, changed)):
            asyncio.get_running_loop().call_soon(self.migrate_node, node_id)

    def _wake(self) -> None:
        """Advance the running model swaps, and retry the queued requests on the nodes that have changed."""
        changes = self._parts.changes
        changes.begin_retry()
        if self.ledger.turns:
            self._parts.swaps.advance(self._clock())
        self._parts.waiting.retry_requests(changes.take_nodes())

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame from a node with the receiver of its type. Ignore a frame without a receiver."""
        receive = self.receivers.get(type(frame))
        if receive is not None:
            receive(node, frame)

    def _receive_deltas(self, node: NodeId, frame: Deltas) -> None:
        """Add the tokens of one decode step to their answers.
        Only the first tokens of an attempt are an event, because this runs for every token."""
        live, slow_bytes = self._live, self._slow_bytes
        touched: list[ActiveRequest] = []
        tokens = 0
        for delta in frame.deltas:
            request = live.get(delta.request)
            if request is None or request.node != node:
                continue
            if not request.streaming:
                self.apply(request, FirstTokens(delta.request))
            tokens += len(delta.ids)
            if request.add_delta(delta):
                touched.append(request)
            if request.answer.buffered > slow_bytes:
                self._parts.watchdog.end_oversized(request)
        if tokens:
            self.counters.count_generated(node, tokens)
        if touched:
            _record_decode_steps(self.counters, node, touched, self._clock())
        for request in touched:
            request.answer.flush()

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Handle the end of a node's link for `reason`: resume, restart or end its requests, and fail its commands."""
        self.commands.handle_lost_node(node, reason)
        self.placer.remove_node(node)
        self._parts.migration.remove_node(node)
        self._parts.losses.handle_lost_node(node, reason)

    def remove_node(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member. A new map keyed by node must be cleared here."""
        parts = self._parts
        self.affinity.remove_node(node)
        self.breakers.remove_node(node)
        self.counters.remove_node(node)
        self.ledger.remove_node(node)
        self.placer.remove_node(node)
        parts.swaps.remove_node(node)
        parts.changes.remove_node(node)
        parts.migration.remove_node(node)
        for request in self._open.values():
            request.remove_node(node)

    def migrate_node(self, node: NodeId) -> int:
        """Migrate the requests of a live node to other nodes. Return the number of requests left (`Migration`)."""
        return self._parts.migration.migrate_node(node)

    async def wait_drained(self, node: NodeId, seconds: float) -> int:
        """Migrate a node's requests, and wait at most `seconds` until all are gone. Return the number of those left."""
        return await self._parts.migration.wait_drained(node, seconds)

    # client requests

    def submit(self, spec: RequestSpec) -> ActiveRequest:
        """Accept a request: place it, queue it, hand it to an upstream, or end it with a refusal. During a stop, end it
        with a failure and without a charge. The caller must `close` the returned request."""
        self._count += 1
        request, refused = self.intake.accept(spec, self._count, charges_quota=not self._closing)
        if self._closing:
            self.apply(request, RequestDenied(RequestFailure(FailureCode.SHUTTING_DOWN, STOPPING)))
        elif refused is not None:
            self.apply(request, RequestDenied(refused))
        else:
            self.placer.record_request(request.demand.model)
            self._parts.assignment.assign_new(request)
        if not self._open:
            self._quiet.clear()
        self._open[request.number] = request
        self._crowds.add(request)
        self._arm_timer()
        return request

    def close(self, request: ActiveRequest) -> None:
        """Close a request, whose client reads no more. Cancel a request that has not ended, also on its node."""
        if request.life.outcome is None:
            self.apply(request, Stopped(CANCELLED))
        if self._open.pop(request.number, None) is not None:
            self._crowds.remove(request)
        if not self._open:
            self._quiet.set()

    def list_open_requests(self) -> list[ActiveRequest]:
        """Return the requests that have not ended, oldest first."""
        unended = (request for request in self._open.values() if request.outcome is None)
        return sorted(unended, key=lambda request: request.number)

    # questions

    def find_outage_reason(self) -> str:
        """Return why no new request could be placed on a node now; empty if one could. Upstreams are ignored."""
        if self._closing:
            return STOPPING
        if len(self.queue) >= self.queue.compute_limit(len(self.view.nodes)):
            return f"the queue is full with {len(self.queue)} requests"
        return self.placer.find_outage_reason()

    def count_leaks(self) -> int:
        """Return the number of leaked reservations and holds. Any number but 0 is a bug.

        A reservation has leaked if its request is on no node, a hold if its request is not open.
        """
        reserved, holders = self.ledger.get_reserved_requests(), self.ledger.get_holders()
        return len(reserved - self._live.keys()) + len(holders - self._open.keys())

    @property
    def idle(self) -> bool:
        """Whether no request is open, which completes a drain."""
        return not self._open

    def get_time(self) -> float:
        """Return the current time in monotonic seconds, from the clock of the dispatcher."""
        return self._clock()

    def count_in_flight(self, node: NodeId) -> int:
        """Return the number of requests that are on a node."""
        return self.ledger.count_in_flight(node)

    def count_queued(self) -> int:
        """Return the number of queued requests."""
        return len(self.queue)

    # time and end

    def _arm_timer(self) -> None:
        if self._timer is None and self._open:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self.sweep)

    def sweep(self) -> None:
        """Advance model swaps and deadlines, move requests off silent nodes and to idle ones, and check streams.

        Runs several times per second while requests are open. One sweep checks all requests, which have no timers.
        """
        self._timer = None
        now, parts = self._clock(), self._parts
        parts.swaps.advance(now)
        parts.waiting.expire(now)
        parts.migration.migrate_from_silent_nodes(now)
        if not len(self.queue) and not self._closing:
            parts.migration.rebalance(now)
        parts.watchdog.retain_requests(self._open)
        for request in list(self._open.values()):
            parts.watchdog.check(request)
        self._arm_timer()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait at most `seconds` for the open ones to be closed. Then call `shutdown`."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        self.shutdown()

    def shutdown(self, message: str = STOPPING) -> None:
        """End all requests, also on their nodes, and all commands with the failure `message`. Stop the sweeps."""
        self.commands.shutdown(message)
        for request in list(self._open.values()):
            self.apply(request, Stopped(RequestFailure(FailureCode.SHUTTING_DOWN, message)))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
