"""Routers of a simulation: the dispatcher under any policy, rules of other projects, and a clairvoyant router.

`ProductionRouter` is the unchanged dispatcher with queue and ledger. The policy under test orders the nodes that the
memory filter leaves. `PeerRouter` models a common router: no filter, no reservations, no queue. It sends a request to
the first node of its rule. After a refusal it tries another node if there is one, with the pauses of sglang-router. A
request is sent at most `MAX_TRIES` times.

The clairvoyant router knows every answer's length and every node's exact state without delay. It sends a request at
once to the node with room for the complete request and the soonest first token, by the node's own forecast. If no node
has room, the request waits. Waiting requests are tried whenever a node frees memory or the set of ready nodes changes,
in the order in which they began to wait. The router does not know future arrivals: it is the best one-by-one placement,
not the best of all schedules.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from random import Random
from types import MappingProxyType

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import Outcome, RequestFailure, RequestSpec
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.policies import POLICIES, Policy
from router.settings import RouterSettings
from simulation.cluster import SimulatedPool, SimulatedRouter
from simulation.peer_policies import LeastInFlight, LeastLoad, LinearCost, RoundRobin, WeightedScorers
from simulation.workload import ConversationTurn
from wire.frames import Deltas, Failed, Finished, Frame, Generate, GenerationParams, Message, Refusal
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import FailureCode

MAX_TRIES = 5
"""Maximum number of times that `PeerRouter` sends a request to a node."""
BACKOFF, BACKOFF_FACTOR = 0.05, 1.5
"""Seconds from the refusal or loss of the first try to the second try, and factor of the pause for each further try."""
_MOST_MESSAGE = 4


def build_demand(turn: ConversationTurn) -> ResourceDemand:
    """Return the facts of a request that a router knows: model, bytes of the prompt, and limit of output tokens."""
    return ResourceDemand(turn.model, turn.bytes, None, turn.max_tokens)


def build_messages(turn: ConversationTurn) -> tuple[Message, ...]:
    """Return the messages of a turn, earlier turns first, each padded to four characters for each of its tokens.

    Return no messages for a turn without shared texts.
    """
    return tuple(
        Message("user" if number % 2 == 0 else "assistant", text.ljust(tokens * _MOST_MESSAGE, "."))
        for number, (text, tokens) in enumerate(turn.conversation)
    )


class ProductionRouter:
    """Router that uses the production dispatcher with a placement policy. `seed` is for random choices."""

    def __init__(self, pool: SimulatedPool, seed: int, policy: Policy) -> None:
        self._pool = pool
        self._policy = policy
        scenario = pool.scenario
        settings = RouterSettings(
            queue_timeout_seconds=scenario.queue_timeout_seconds,
            queue_limit=scenario.queue_limit,
            keepalive_seconds=1e6,
            slow_client_seconds=1e6,
        )
        numbers = itertools.count(1)
        random = Random(f"draw {seed}")  # noqa: S311  the draws must be reproducible
        self.dispatcher = Dispatcher(
            self._send,
            settings,
            numbers=lambda: (number := next(numbers), number),
            clock=pool.loop.time,
            draw=random.random,
            policy=policy,
        )
        """Production dispatcher, on the virtual time of the pool."""

    def _send(self, node: NodeId, frame: Frame) -> bool:
        if isinstance(frame, Generate) and isinstance(self._policy, RoundRobin):
            self._policy.count_request(node)
        return self._pool.send(node, frame)

    def set_view(self, view: ClusterView) -> None:
        """Pass a new cluster view to the dispatcher."""
        self.dispatcher.set_view(view)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Pass a frame to the dispatcher."""
        self.dispatcher.receive(node, frame)

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Pass the loss of a node to the dispatcher."""
        self.dispatcher.handle_lost_node(node, reason)

    def handle_freed_memory(self, node: NodeId) -> None:
        """Ignore freed memory, of which a real router learns only by reports."""

    def submit(self, turn: ConversationTurn) -> None:
        """Submit a turn as a streaming request to the dispatcher, and consume its stream."""
        job = RequestSpec(
            build_demand(turn),
            turn.key,
            turn.id,
            build_messages(turn),
            GenerationParams(max_tokens=turn.max_tokens, seed=0),  # the simulated answers do not depend on it
            0,
            stream=True,
        )
        request = self.dispatcher.submit(job)
        request.answer.attach(lambda: self._read(request))
        self._read(request)

    def _read(self, request: ActiveRequest) -> None:
        assert isinstance(request.answer, StreamedAnswer)  # noqa: S101  the job asks for a stream
        request.answer.take_deltas()
        if request.outcome is not None:
            request.answer.detach()
            self.dispatcher.close(request)
            self._pool.record_end(request.spec.request_id, request.outcome)

    def close(self) -> None:
        """Stop the dispatcher. Raise `LedgerError` if its reservation ledger is inconsistent."""
        self.dispatcher.shutdown()
        self.dispatcher.ledger.check()


class PeerRouter:
    """Router of other projects: sends a request to the best node by `policy`, without reservations and queue.

    Only ready nodes that have the model are candidates.
    `sample` is the number of random nodes that are compared for a request; 0: all. `seed` is for random choices.
    """

    def __init__(self, pool: SimulatedPool, seed: int, policy: Policy, sample: int = 0) -> None:
        self._pool = pool
        self._policy = policy
        self._sample = sample
        self._random = Random(f"peer {seed}")  # noqa: S311  the draws must be reproducible
        self._view = ClusterView()
        self._numbers = itertools.count(1)
        self._live: dict[int, tuple[ConversationTurn, NodeId, int, frozenset[NodeId]]] = {}
        self._on: dict[NodeId, dict[int, int]] = {}
        self._begun: set[int] = set()

    def set_view(self, view: ClusterView) -> None:
        """Apply a new view. Do not count the tokens of requests that the new reports already include."""
        old = {node.id: node for node in self._view.nodes}
        self._view = view
        for node in view.nodes:
            if old.get(node.id) is not node:
                mine = self._on.get(node.id, {})
                for request in mine:
                    if request <= node.acked_seq:
                        mine[request] = 0

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame of a request. After a refusal, retry on another node after a backoff.

        A request that is refused in its last try (`MAX_TRIES`) ends.
        """
        if isinstance(frame, Deltas):
            self._begun.update(delta.request for delta in frame.deltas)
        elif isinstance(frame, Refusal):
            self._retry_later(frame.request, frame.refused)
        elif isinstance(frame, Finished):
            self._pool.record_end(self._leave(frame.request)[0].id, frame)
        elif isinstance(frame, Failed):
            self._pool.record_end(self._leave(frame.request)[0].id, RequestFailure(frame.code, frame.message))

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Handle the loss of a node. Requests with a first token fail; all other requests are retried after a pause."""
        failure = RequestFailure(FailureCode.NODE_LOST, reason)
        for request in [number for number, live in self._live.items() if live[1] == node]:
            if request in self._begun:
                self._pool.record_end(self._leave(request)[0].id, failure)
            else:
                self._retry_later(request, failure)

    def _retry_later(self, request: int, outcome: Outcome) -> None:
        """Retry a request after a pause, on another node if there is one. End it with `outcome` after `MAX_TRIES`."""
        turn, node, tries, refused = self._leave(request)
        if tries >= MAX_TRIES:
            self._pool.record_end(turn.id, outcome)
            return
        pause = BACKOFF * BACKOFF_FACTOR ** (tries - 1)
        self._pool.loop.call_later(pause, self._try, turn, tries + 1, refused | {node})

    def _leave(self, request: int) -> tuple[ConversationTurn, NodeId, int, frozenset[NodeId]]:
        live = self._live.pop(request)
        self._on[live[1]].pop(request, None)
        self._begun.discard(request)
        return live

    def handle_freed_memory(self, node: NodeId) -> None:
        """Ignore freed memory, of which a real router learns only by reports."""

    def submit(self, turn: ConversationTurn) -> None:
        """Send a turn to the best node; fail the turn if no ready node has its model. Retry without a link."""
        self._try(turn, 1, frozenset())

    def _try(self, turn: ConversationTurn, tries: int, refused: frozenset[NodeId]) -> None:
        nodes = [node for node in self._view.nodes if node.state == NodeState.READY and turn.model in node.models]
        fresh = [node for node in nodes if node.id not in refused] or nodes
        if self._sample and len(fresh) > self._sample:
            fresh = self._random.sample(fresh, self._sample)
        if not fresh:
            self._pool.record_end(turn.id, RequestFailure("no_node", "there is no node"))
            return
        demand = build_demand(turn)
        draw = self._random.random
        best = min(fresh, key=lambda node: (*self._policy.score(self._build_candidate(node, demand), demand), draw()))
        number = next(self._numbers)
        if isinstance(self._policy, RoundRobin):
            self._policy.count_request(best.id)
        self._live[number] = (turn, best.id, tries, refused)
        self._on.setdefault(best.id, {})[number] = demand.estimate_prompt_tokens(best.models[turn.model])
        frame = Generate(number, number, turn.id, turn.model, (), GenerationParams(max_tokens=turn.max_tokens), 0)
        if not self._pool.send(best.id, frame):
            self._retry_later(number, RequestFailure(FailureCode.NODE_LOST, "the node accepts no connection"))

    def _build_candidate(self, node: NodeView, demand: ResourceDemand) -> Candidate:
        model, mine = node.models[demand.model], self._on.get(node.id, {})
        tokens = demand.estimate_prompt_tokens(model)
        wait = (node.engine.queued_tokens + sum(mine.values()) + tokens) / model.prefill_speed
        return Candidate(
            node.id,
            node.name,
            node.state,
            memory=node.memory,
            prompt_tokens=tokens,
            expected_ttft=wait,
            in_flight=len(mine),
            model=model,
            headroom=0,
        )

    def close(self) -> None:
        """Do nothing."""


class OracleRouter:
    """Clairvoyant router, with exact knowledge of all nodes and of the lengths of answers."""

    def __init__(self, pool: SimulatedPool) -> None:
        self._pool = pool
        self._numbers = itertools.count(1)
        self._waiting: list[ConversationTurn] = []
        self._live: dict[int, tuple[ConversationTurn, NodeId]] = {}
        self._ready: frozenset[NodeId] = frozenset()

    def set_view(self, view: ClusterView) -> None:
        """Update the set of ready nodes, and place waiting requests if the set changed.

        All other facts are read from the nodes directly.
        """
        ready = frozenset(node.id for node in view.nodes if node.state == NodeState.READY)
        if ready != self._ready:
            self._ready = ready
            self._wake(ready)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame of a request. Enqueue a refused request again.

        A refusal is possible because two requests at one moment may collide on a node.
        """
        if isinstance(frame, Refusal):
            self._waiting.append(self._live.pop(frame.request)[0])
            self._wake(self._ready)
        elif isinstance(frame, Finished | Failed):
            turn = self._live.pop(frame.request)[0]
            outcome = frame if isinstance(frame, Finished) else RequestFailure(frame.code, frame.message)
            self._pool.record_end(turn.id, outcome)

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Restart the requests of a lost node on ready nodes with room, or let them wait. A loss is not foreseen."""
        for request in [number for number, live in self._live.items() if live[1] == node]:
            self._waiting.append(self._live.pop(request)[0])
        self._wake(self._ready)

    def submit(self, turn: ConversationTurn) -> None:
        """Place a turn now, or let it wait for memory; fail a turn that fits on no Mac of the scenario."""
        if not self._pool.can_ever_hold(turn):
            self._pool.record_end(turn.id, RequestFailure("fits_nowhere", "no node could hold it"))
        elif not self._place(turn, self._ready):
            self._waiting.append(turn)

    def handle_freed_memory(self, node: NodeId) -> None:
        """Try to place the waiting requests on this node only, because they did not fit on any other node before."""
        self._wake(self._ready & {node})

    def _wake(self, nodes: Collection[NodeId]) -> None:
        if self._waiting and nodes:
            self._waiting = [turn for turn in self._waiting if not self._place(turn, nodes)]

    def _place(self, turn: ConversationTurn, nodes: Collection[NodeId]) -> bool:
        """Send a turn to the node of `nodes` that has room and the earliest first token. Return False if none has
        room."""
        machines, now = self._pool.machines, self._pool.loop.time()
        able = [
            (machine.forecast.estimate_first_token(turn, now), number, node)
            for number, (node, machine) in enumerate(machines.items())
            if node in nodes and turn.model in machine.models
        ]
        chosen = next((node for _, _, node in sorted(able) if machines[node].forecast.fits(turn, now)), None)
        if chosen is None:
            return False
        number = next(self._numbers)
        frame = Generate(
            number, number, turn.id, turn.model, (), GenerationParams(max_tokens=turn.max_tokens), 0, turn.output
        )
        self._pool.log.note_sent(chosen, frame)
        self._live[number] = (turn, chosen)
        machines[chosen].take(frame)
        return True

    def close(self) -> None:
        """Do nothing."""


CLAIRVOYANT = "clairvoyant"
"""Name of the policy of `OracleRouter`."""
FILTERED = "+filter"
"""Suffix of a policy of another project that runs in the dispatcher, with memory filter, ledger and queue."""
RULES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "least-in-flight": LeastInFlight,
        "power-of-two": LeastInFlight,
        "least-load": LeastLoad,
        "linear": LinearCost,
        "weighted": WeightedScorers,
    }
)
"""Constructors of the policies of other projects, by name."""
_SAMPLES = {"power-of-two": 2}
NAMES = (
    *(name.replace("_", "-") for name in POLICIES),
    *RULES,
    *(name + FILTERED for name in RULES if name not in _SAMPLES),
)
"""Names of all policies to compare. `CLAIRVOYANT` is not among them, because every comparison includes it."""


def create_router(name: str, pool: SimulatedPool, seed: int) -> SimulatedRouter:
    """Create the router for the policy `name`. Raise `LookupError` unless `name` is in `NAMES` or is `CLAIRVOYANT`."""
    ours = name.replace("-", "_")
    if name == CLAIRVOYANT:
        return OracleRouter(pool)
    if ours in POLICIES:
        return ProductionRouter(pool, seed, POLICIES[ours])
    if name in RULES:
        return PeerRouter(pool, seed, RULES[name](), _SAMPLES.get(name, 0))
    if name in NAMES:
        return ProductionRouter(pool, seed, RULES[name.removesuffix(FILTERED)]())
    raise LookupError(f"there is no policy {name!r}; there are {', '.join(NAMES)}")
