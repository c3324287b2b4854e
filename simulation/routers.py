"""Routers of a simulation: the dispatcher under any policy, rules of other projects, and a clairvoyant router.

`ProductionRouter` is the unchanged dispatcher with queue and ledger. The policy under test orders the nodes that pass
the memory filter. `peer_router.PeerRouter` models a common router of another product.

The clairvoyant router knows every answer's length and every node's exact state without delay. Of the nodes with room
for the complete request, it chooses the one with the earliest first token by the node's own forecast. If no node has
room, the request waits. Whenever a node frees memory or the set of ready nodes changes, the router tries the waiting
requests again, longest wait first. A request that fits on no node fails. The router does not know future arrivals, so
that better schedules can exist.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from random import Random
from types import MappingProxyType

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestFailure, RequestSpec
from router.placement.cluster_view import ClusterView
from router.placement.policies import POLICIES, Policy
from router.settings import RouterSettings
from simulation.cluster import SimulatedPool, SimulatedRouter
from simulation.peer_policies import LeastInFlight, LeastLoad, LinearCost, RoundRobin, WeightedScorers
from simulation.peer_router import PeerRouter
from simulation.turn_requests import build_demand, build_messages
from simulation.workload import ConversationTurn
from wire.frames import Failed, Finished, Frame, Generate, GenerationParams, Refusal
from wire.identity import NodeId
from wire.node_state import NodeState


class ProductionRouter:
    """Router that uses the production dispatcher with a placement policy. `seed` is the seed of random choices."""

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
        """Do nothing, because a real router learns of freed memory only by reports."""

    def submit(self, turn: ConversationTurn) -> None:
        """Submit a request to the dispatcher as a stream, and consume the stream."""
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
        """Stop the dispatcher. Raise `LedgerError` if its reservations are inconsistent."""
        self.dispatcher.shutdown()
        self.dispatcher.ledger.check()


class OracleRouter:
    """Clairvoyant router, which knows the exact state of all nodes and the length of every answer."""

    def __init__(self, pool: SimulatedPool) -> None:
        self._pool = pool
        self._numbers = itertools.count(1)
        self._waiting: list[ConversationTurn] = []
        self._live: dict[int, tuple[ConversationTurn, NodeId]] = {}
        self._ready: frozenset[NodeId] = frozenset()

    def set_view(self, view: ClusterView) -> None:
        """Update the set of ready nodes, and try waiting requests if the set has changed.

        The router reads everything else directly from the nodes.
        """
        ready = frozenset(node.id for node in view.nodes if node.state == NodeState.READY)
        if ready != self._ready:
            self._ready = ready
            self._wake(ready)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame of a request. After a refusal, queue the request, and try all waiting requests at once.

        A node refuses if the router has sent it two requests at one moment and only one of them fits.
        """
        if isinstance(frame, Refusal):
            self._waiting.append(self._live.pop(frame.request)[0])
            self._wake(self._ready)
        elif isinstance(frame, Finished | Failed):
            turn = self._live.pop(frame.request)[0]
            outcome = frame if isinstance(frame, Finished) else RequestFailure(frame.code, frame.message)
            self._pool.record_end(turn.id, outcome)

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Restart the requests of a lost node on ready nodes with room, or queue them."""
        for request in [number for number, live in self._live.items() if live[1] == node]:
            self._waiting.append(self._live.pop(request)[0])
        self._wake(self._ready)

    def submit(self, turn: ConversationTurn) -> None:
        """Place a request now, or queue it until memory is free. Fail a request that fits on no Mac of the scenario."""
        if not self._pool.can_ever_hold(turn):
            self._pool.record_end(turn.id, RequestFailure("fits_nowhere", "no node could hold it"))
        elif not self._place(turn, self._ready):
            self._waiting.append(turn)

    def handle_freed_memory(self, node: NodeId) -> None:
        """Try to place the waiting requests on this node. On the other nodes, they were tried before."""
        self._wake(self._ready & {node})

    def _wake(self, nodes: Collection[NodeId]) -> None:
        if self._waiting and nodes:
            self._waiting = [turn for turn in self._waiting if not self._place(turn, nodes)]

    def _place(self, turn: ConversationTurn, nodes: Collection[NodeId]) -> bool:
        """Send a turn to the node of `nodes` that has room and the earliest first token.

        Return False if none has room.
        """
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
