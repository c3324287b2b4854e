"""Model of the routers of other products in a simulation: no memory filter, no reservations, no queue.

`PeerRouter` sends a request to the best node by its rule (`peer_policies`). After a refusal it tries another node if
there is one, after the pauses of sglang-router. A request is sent at most `MAX_TRIES` times.
"""

import itertools
from random import Random

from router.dispatch.request import Outcome, RequestFailure
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.policies import Policy
from simulation.cluster import SimulatedPool
from simulation.peer_policies import RoundRobin
from simulation.turn_requests import build_demand
from simulation.workload import ConversationTurn
from wire.frames import Deltas, Failed, Finished, Frame, Generate, GenerationParams, Refusal
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import FailureCode

MAX_TRIES = 5
"""Maximum number of times that a request is sent to a node."""
BACKOFF, BACKOFF_FACTOR = 0.05, 1.5
"""Pause in seconds between the refusal or loss of the first try and the second try, and its factor for later tries."""


class PeerRouter:
    """Model of a router of other projects: sends a request to the best node by `policy`, without reservations or queue.

    Only ready nodes that have the model are candidates. `sample` is the number of random nodes that are compared for a
    request; 0 for all nodes. `seed` is the seed of random choices.
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
        """Apply a new view. Tokens of requests that the new reports include are no longer added to the reports."""
        old = {node.id: node for node in self._view.nodes}
        self._view = view
        for node in view.nodes:
            if old.get(node.id) is not node:
                mine = self._on.get(node.id, {})
                for request in mine:
                    if request <= node.acked_seq:
                        mine[request] = 0

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Apply a frame of a request. After a refusal, retry after a pause, on another node if there is one.

        A request that is refused in its last try (`MAX_TRIES`) ends with that refusal.
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
        """Handle the loss of a node. Its requests with a first token, or in their last try (`MAX_TRIES`), fail.

        All other requests of the node are retried after a pause.
        """
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
        """Do nothing, because a real router learns of freed memory only by reports."""

    def submit(self, turn: ConversationTurn) -> None:
        """Send a request to the best node; fail the request if no ready node has its model.

        If the best node has no link, try again after a pause, on another node if there is one (`MAX_TRIES`).
        """
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
        """Do nothing, because this router has no resources to release."""
