"""An idle node takes over requests that wait on other nodes."""

import dataclasses
from collections.abc import AsyncIterator

import pytest

from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts import rebalancing
from router.dispatch.request import RequestSpec
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.reservations import ReservationLedger
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster
from tests.support.requests import send, speak
from wire.capacity.fairness import WeightedKey
from wire.frames import Cancel, GenerationParams, Message
from wire.identity import NodeId
from wire.refusals import RefusalCode
from wire.report import EngineState

ROWS = 2


@pytest.fixture
async def joining() -> AsyncIterator[Cluster]:
    """Yield a cluster for a test in which a second node joins.

    The first node has two rows, and alone has accepted ten requests for 10 s; the first two have output.
    """
    cluster = Cluster(A, B)
    cluster.engine = EngineState("x", "ready", rows=ROWS)
    cluster.state[B] = "lost"
    cluster.report()
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


def batch(cluster: Cluster, count: int = 10) -> list[ActiveRequest]:
    tickets: list[ActiveRequest] = []
    for number in range(count):
        tickets.append(cluster.submit())
        if number < ROWS:
            cluster.speak()
    cluster.now += 2 * rebalancing.MIN_GAIN_SECONDS
    cluster.report()
    assert {ticket.node for ticket in tickets} == {A}
    return tickets


def comes(cluster: Cluster, node: NodeId = B) -> None:
    """Make a node ready, and sweep."""
    cluster.state[node] = "ready"
    cluster.report()
    cluster.dispatcher.sweep()


def on(cluster: Cluster, tickets: list[ActiveRequest], node: NodeId) -> list[int]:
    return [number for number, ticket in enumerate(tickets) if ticket.node == node]


async def test_rebalance_moves_the_longest_waiting_request_to_a_new_node(joining: Cluster):
    tickets = batch(joining)
    before = {ticket.number: ticket.attempt for ticket in tickets}
    comes(joining)
    moved = on(joining, tickets, B)
    assert moved == list(range(ROWS, ROWS + len(moved)))
    assert ROWS <= len(moved) < len(tickets) - ROWS, "a part of them, not all"
    told = [frame.request for node, frame in joining.sent if isinstance(frame, Cancel) and node == A]
    assert told == [before[tickets[number].number] for number in moved], "its node lets go of each"
    assert [frame.resume for node, frame in joining.generates() if node == B] == [()] * len(moved)
    assert all(tickets[number].life.losses == 0 for number in moved), "that was no loss"
    assert joining.dispatcher.counters.moves == len(moved)


async def test_rebalanced_requests_are_not_moved_again(joining: Cluster):
    tickets = batch(joining)
    comes(joining)
    moved = on(joining, tickets, B)
    for _ in range(3):
        joining.now += 2 * rebalancing.MIN_GAIN_SECONDS
        joining.report()
        joining.dispatcher.sweep()
        assert on(joining, tickets, B) == moved, "it has prompts to read itself"


async def test_one_pass_judges_a_bounded_number_of_requests(joining: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rebalancing, "MAX_JUDGED", 1)
    tickets = batch(joining)
    comes(joining)
    assert on(joining, tickets, B) == [ROWS]
    joining.speak()  # its prompt is prefilled, and the node is idle again
    comes(joining)
    assert on(joining, tickets, B) == [ROWS, ROWS + 1]


async def test_request_is_rebalanced_once(joining: Cluster):
    tickets = batch(joining)
    comes(joining)
    moved = on(joining, tickets, B)
    for number in on(joining, tickets, A):
        joining.dispatcher.close(tickets[number])
    joining.now += 10 * rebalancing.MIN_GAIN_SECONDS
    joining.models = (a_model(decode_speed=1.0),)
    comes(joining, A)
    assert on(joining, tickets, B) == moved


async def test_no_request_is_moved_to_gain_little(joining: Cluster):
    tickets = batch(joining, ROWS + 1)
    comes(joining)
    assert on(joining, tickets, B) == []


def test_is_worth_moving_needs_a_third_of_the_time_and_a_gain_of_five_seconds():
    here = Candidate(
        A, "a", "ready", expected_ttft=11.6, prefill_tokens=1000, model=a_model()
    )  # 1.6 of them are its own
    assert rebalancing.estimate_wait_seconds(here) == pytest.approx(10)
    assert rebalancing.is_worth_moving(here, Candidate(B, "b", "ready", expected_ttft=1.6))
    assert not rebalancing.is_worth_moving(here, Candidate(B, "b", "ready", expected_ttft=1.7))


def test_it_is_not_worth_it_to_gain_exactly_five_seconds():
    model = a_model(prefill_speed=1000.0)
    here = Candidate(A, "a", "ready", expected_ttft=8.0, prefill_tokens=0, model=model)
    assert not rebalancing.is_worth_moving(here, Candidate(B, "b", "ready", expected_ttft=1.0))
    assert rebalancing.estimate_wait_seconds(Candidate(A, "a", "ready", expected_ttft=8.0)) == 0.0, (
        "it has no model there"
    )


@pytest.mark.parametrize(
    ("state", "engine", "taken", "unread", "free"),
    [
        ("ready", EngineState("x", "ready", rows=ROWS), ROWS - 1, False, True),
        ("ready", EngineState("x", "ready", rows=ROWS), ROWS, False, False),
        ("ready", EngineState("x", "ready"), 9, False, True),
        ("ready", EngineState("x", "ready"), 1, True, False),
        ("ready", EngineState("x", "ready", waiting=1), 0, False, False),
        ("ready", EngineState("x", "ready", queued_tokens=1), 0, False, False),
        ("suspect", EngineState("x", "ready"), 0, False, False),
    ],
)
def test_find_idle_nodes_needs_a_free_row_and_no_open_prefill(
    state: str, engine: EngineState, taken: int, unread: bool, free: bool
):
    ledger = ReservationLedger()
    for number in range(taken):
        ledger.reserve(A, number, number, 0)
        if not unread:
            ledger.mark_prefilled(number)
    node = NodeView(A, "a", state, engine=engine, models={"tiny": a_model(), "other": a_model("other")})
    view = ClusterView((node,))
    assert rebalancing.find_idle_nodes(view, ledger) == ({"tiny": view, "other": view} if free else {})


def test_list_movable_requests_is_oldest_first(monkeypatch: pytest.MonkeyPatch):
    job = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)
    tickets = [ActiveRequest(job, WeightedKey("k"), number, 100.0 if number else 99.0) for number in (3, 1, 2, 0)]
    for ticket in tickets:
        send(ticket, "a")
    assert [one.number for one in rebalancing.list_movable_requests(tickets, 100.0 + rebalancing.MIN_GAIN_SECONDS)] == [
        0
    ], "they waited no longer"
    assert [one.number for one in rebalancing.list_movable_requests(tickets, 100.1 + rebalancing.MIN_GAIN_SECONDS)] == [
        0,
        1,
        2,
        3,
    ]
    with monkeypatch.context() as patch:
        patch.setattr(rebalancing, "MAX_EXAMINED", 3)
        movable = rebalancing.list_movable_requests(tickets, 100.1 + rebalancing.MIN_GAIN_SECONDS)
        assert [one.number for one in movable] == [0, 1, 2]
    speak(tickets[0], 101.0)
    send(tickets[1], "a", 2)
    tickets[2] = ActiveRequest(job, WeightedKey("k"), 2, 100.0)
    assert [one.number for one in rebalancing.list_movable_requests(tickets, 100.1 + rebalancing.MIN_GAIN_SECONDS)] == [
        0
    ]


@pytest.mark.parametrize(
    "engine",
    [
        EngineState("x", "ready", rows=ROWS, waiting=1),
        EngineState("x", "ready", rows=ROWS, queued_tokens=1),
        EngineState("x", "starting", rows=ROWS),
    ],
)
async def test_node_with_open_prefill_gets_no_rebalanced_request(joining: Cluster, engine: EngineState):
    tickets = batch(joining)
    joining.engine = engine
    comes(joining)
    assert on(joining, tickets, B) == []


async def test_node_without_a_free_row_gets_no_rebalanced_request(joining: Cluster):
    tickets = batch(joining)
    joining.state[A] = "suspect"
    joining.state[B] = "ready"
    joining.report()
    for _ in range(ROWS):
        assert joining.submit().node == B
        joining.speak()
    joining.state[A] = "ready"
    joining.report()
    joining.dispatcher.sweep()
    assert on(joining, tickets, B) == []


async def test_rebalance_starts_queued_requests_first(joining: Cluster):
    tickets = batch(joining)
    in_line = joining.submit(prompt_tokens=3000, choices=64)
    assert in_line.entry is not None
    comes(joining)
    assert on(joining, tickets, B) == []
    joining.dispatcher.close(in_line)
    joining.dispatcher.sweep()
    assert on(joining, tickets, B) != []


async def test_rebalance_does_not_repeat_a_refused_move(joining: Cluster):
    tickets = batch(joining)
    comes(joining)
    moved = on(joining, tickets, B)
    assert joining.last()[0] == B
    joining.refuse(RefusalCode.NO_ROOM)
    assert tickets[moved[-1]].node == A, "it goes back, to wait there"
    joining.now += 2 * rebalancing.MIN_GAIN_SECONDS
    joining.report()
    joining.dispatcher.sweep()
    assert tickets[moved[-1]].node == A


class Uneven(Cluster):
    """A cluster whose second node has only the first model."""

    def seen(self, node: NodeId) -> NodeView:
        view = super().seen(node)
        return view if node == A else dataclasses.replace(view, models={"tiny": view.models["tiny"]})


async def test_rebalance_skips_a_model_without_another_node():
    cluster = Uneven(A, B)
    cluster.models = (a_model(), a_model("rare"))
    cluster.engine = EngineState("x", "ready", rows=ROWS)
    cluster.state[B] = "lost"
    cluster.report()
    rare = [
        cluster.dispatcher.submit(
            RequestSpec(
                ResourceDemand("rare", 100), "k", f"r{n}", (Message("user", "hi"),), GenerationParams(), 0, True
            )
        )
        for n in range(rebalancing.MAX_JUDGED)
    ]
    tickets = batch(cluster)
    comes(cluster)
    assert on(cluster, rare, B) == []
    assert on(cluster, tickets, B) != []
    cluster.dispatcher.shutdown()
    cluster.settled()


def test_find_idle_nodes_is_bounded_for_each_model():
    nodes = [NodeView(NodeId(f"n{at}"), f"n{at}", "ready", models={"tiny": a_model()}) for at in range(20)]
    other = NodeView(NodeId("o"), "o", "ready", models={"other": a_model("other")})
    idle = rebalancing.find_idle_nodes(ClusterView((*nodes, other)), ReservationLedger())
    assert idle == {"tiny": ClusterView(tuple(nodes[: rebalancing.MAX_TARGETS])), "other": ClusterView((other,))}
