"""Routers of other projects: the chosen node, tries after refusals and losses, and expected tokens."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from router.dispatch.request import RequestFailure
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.policies import Policy
from simulation.clock import VirtualLoop
from simulation.cluster import SimulatedPool
from simulation.peer_policies import LeastLoad, RoundRobin, WeightedScorers
from simulation.peer_router import BACKOFF, BACKOFF_FACTOR, MAX_TRIES, PeerRouter
from simulation.workload import ConversationTurn
from wire.frames import Channel, Delta, Deltas, Failed, Finished, Frame, Generate, Refusal
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import EngineState, Memory, Model
from wire.units import GIB

CHAT = Model("chat", loaded=True, prefill_speed=100.0, bytes_per_token=4.0)
NO_ROOM = Refused(RefusalCode.NO_ROOM, "no room")


class ByName:
    """A policy that prefers the first name, and keeps the candidates."""

    def __init__(self) -> None:
        self.seen: list[Candidate] = []

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        self.seen.append(candidate)
        return (float(ord(candidate.name)),)


class Pool:
    """The links of a pool and the ends of its requests."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.sent: list[tuple[float, str, Generate]] = []
        self.ends: dict[str, object] = {}
        self.down: set[str] = set()

    def send(self, node: NodeId, frame: Frame) -> bool:
        assert isinstance(frame, Generate)
        self.sent.append((self.loop.time(), node, frame))
        return node not in self.down

    def record_end(self, request_id: str, outcome: object) -> None:
        assert request_id not in self.ends
        self.ends[request_id] = outcome

    @property
    def places(self) -> list[str]:
        return [node for _, node, _ in self.sent]

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


def view(*names: str, **changes: object) -> ClusterView:
    fields: dict[str, object] = {"state": NodeState.READY, "models": {"chat": CHAT}, **changes}
    return ClusterView(tuple(NodeView(NodeId(name), name, **fields) for name in names))  # type: ignore[arg-type]


def start(policy: object, *names: str) -> tuple[Pool, PeerRouter]:
    pool = Pool()
    router = PeerRouter(cast("SimulatedPool", pool), 1, cast("Policy", policy))
    router.set_view(view(*names))
    return pool, router


def turn(name: str = "r0", tokens: int = 100) -> ConversationTurn:
    return ConversationTurn(name, "k", "chat", tokens, 10, tokens * 4, 50, 0.0)


def test_a_refused_request_is_tried_on_other_nodes_with_longer_pauses_and_ends_with_its_last_refusal():
    pool, router = start(ByName(), "a", "b")
    router.submit(turn())
    for number in range(1, MAX_TRIES + 1):
        assert pool.ends == {}
        router.receive(NodeId("a"), Refusal(number, NO_ROOM))
        pool.wait(1.0)
    assert pool.ends == {"r0": NO_ROOM}
    assert pool.places == ["a", "b", "a", "a", "a"]
    pauses = [at - refused_at for refused_at, (at, _, _) in enumerate(pool.sent[1:])]
    assert pauses == pytest.approx([BACKOFF * BACKOFF_FACTOR**place for place in range(MAX_TRIES - 1)], abs=1e-6)
    assert {frame.request_id for _, _, frame in pool.sent} == {"r0"}
    assert [frame.seq for _, _, frame in pool.sent] == [1, 2, 3, 4, 5]
    assert pool.sent[0][2].params.max_tokens == 50
    pool.loop.close()


def test_requests_of_a_lost_node_are_retried_unless_they_had_a_token():
    pool, router = start(ByName(), "a", "b")
    for name in ("begun", "waiting"):
        router.submit(turn(name))
    router.receive(NodeId("a"), Deltas((Delta(1, 0, (7,), ((Channel.CONTENT, "x"),)),)))
    router.handle_lost_node(NodeId("b"), "another node")
    assert (pool.ends, pool.places) == ({}, ["a", "a"])
    router.handle_lost_node(NodeId("a"), "it is gone")
    assert pool.ends == {"begun": RequestFailure(FailureCode.NODE_LOST, "it is gone")}
    pool.wait(1.0)
    assert pool.places == ["a", "a", "b"]
    end = Finished(3, ("stop",), 100, 10)
    router.receive(NodeId("b"), end)
    assert pool.ends["waiting"] == end
    pool.loop.close()


def test_a_node_without_a_link_costs_a_try():
    pool, router = start(ByName(), "a", "b")
    pool.down.add("a")
    router.submit(turn())
    pool.wait(1.0)
    assert (pool.places, pool.ends) == (["a", "b"], {})
    router.receive(NodeId("b"), Failed(2, "engine_error", "broken"))
    assert pool.ends == {"r0": RequestFailure("engine_error", "broken")}
    pool.down.add("b")
    router.submit(turn("r1"))
    pool.wait(9.0)
    assert len(pool.sent) == 2 + MAX_TRIES
    assert isinstance(pool.ends["r1"], RequestFailure)
    assert pool.ends["r1"].code == FailureCode.NODE_LOST
    pool.loop.close()


def test_only_ready_nodes_with_the_model_are_candidates():
    policy = ByName()
    pool, router = start(policy)
    nodes = (*view("a", state=NodeState.SUSPECT).nodes, *view("b", models={}).nodes, *view("c").nodes)
    router.set_view(ClusterView(nodes))
    router.submit(turn())
    assert (pool.places, {candidate.name for candidate in policy.seen}) == (["c"], {"c"})
    router.set_view(ClusterView(nodes[:2]))
    router.submit(turn("r1"))
    assert pool.ends == {"r1": RequestFailure("no_node", "there is no node")}
    pool.loop.close()


def test_tokens_of_requests_that_no_report_includes_are_expected_as_well():
    policy = ByName()
    pool, router = start(policy)

    def expect(acked: int) -> tuple[float, int, int]:
        router.set_view(view("a", engine=EngineState(queued_tokens=300), acked_seq=acked))
        router.submit(turn(f"r{len(pool.sent)}"))
        last = policy.seen[-1]
        return last.expected_ttft, last.prompt_tokens, last.in_flight

    assert expect(0) == (4.0, 100, 0)
    assert expect(0) == (5.0, 100, 1)
    assert expect(1) == (5.0, 100, 2), "the report includes the first one"
    assert expect(3) == (4.0, 100, 3)
    router.receive(NodeId("a"), Finished(1, ("stop",), 100, 10))
    router.receive(NodeId("a"), Finished(4, ("stop",), 100, 10))
    assert expect(3) == (4.0, 100, 2)
    pool.loop.close()


def test_round_robin_sends_each_node_its_share():
    pool, router = start(RoundRobin(), "a", "b", "c")
    for number in range(12):
        router.submit(turn(f"r{number}"))
    rounds = [sorted(pool.places[place : place + 3]) for place in range(0, 12, 3)]
    assert rounds == [["a", "b", "c"]] * 4
    pool.loop.close()


def candidate(**changes: object) -> Candidate:
    """Return a node on which half of the memory is in use, with 300 tokens before the 100 of the request."""
    memory = Memory(
        cap=100 * GIB, ceiling=100 * GIB, margin=20 * GIB, phys=30 * GIB, active=30 * GIB, reserved=10 * GIB
    )
    fields: dict[str, object] = {
        "memory": memory,
        "prompt_tokens": 100,
        "expected_ttft": 4.0,
        "in_flight": 32,
        "model": CHAT,
        **changes,
    }
    return Candidate(NodeId("a"), "a", NodeState.READY, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("score", "changes", "wanted"),
    [
        (LeastLoad().score, {}, 3.0 + 0.15),
        (LeastLoad().score, {"cached_share": 0.5}, 3.5 + 0.15),
        (LeastLoad().score, {"expected_ttft": 0.5}, 0.15),
        (WeightedScorers().score, {}, -(2 * 0.375 + 2 * 0.5)),
        (WeightedScorers().score, {"cached_share": 0.5}, -(3 * 0.5 + 2 * 0.375 + 2 * 0.5)),
        (WeightedScorers().score, {"in_flight": 200}, -(2 * 0.5)),
    ],
)
def test_scores_of_other_projects(
    score: Callable[[Candidate, ResourceDemand], tuple[float, ...]], changes: dict[str, object], wanted: float
):
    assert score(candidate(**changes), ResourceDemand("chat", 400)) == pytest.approx((wanted,))
