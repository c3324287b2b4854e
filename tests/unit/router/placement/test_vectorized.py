"""Placement by arrays: the same decisions as placement itself, but faster."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.dispatcher import LARGE_CLUSTER_NODES
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, ClusterView, NodeView
from router.placement.place import (
    POLICIES,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
    place,
)
from router.placement.reservations import ReservationLedger
from router.placement.vectorized import RANKS, VectorIndex
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.report import BatchGroup, EngineState
from wire.units import GIB, MIB

NOW = 1000.0
COUNT = LARGE_CLUSTER_NODES + 8
seeds = st.integers(0, 2**32 - 1)


def a_node(number: int, random: Random, most: int) -> NodeView:
    groups = (BatchGroup(random.randint(1, 8), random.randint(10, 4000), 500),) if random.random() < 0.5 else ()
    loaded = random.random() < 0.7
    model = a_model(
        loaded=loaded,
        weights=random.randint(0, 4) * GIB,
        groups=groups,
        prefill_speed=random.choice((50.0, 400.0, 3e3)),
        kv_per_token=random.choice((8, 64, 256)) * 1024,
        kv_step=random.choice((1, 256)),
        load_seconds=4.0,
        loading=not loaded and random.random() < 0.3,
        cause="it is broken" if random.random() < 0.1 else "",
    )
    memory = a_memory(random.randint(-64, most) * MIB, cap=64 * GIB, reserved=random.randint(0, 99) * MIB)
    return NodeView(
        NodeId(f"n{number}"),
        f"n{number}",
        random.choice(("ready", "ready", "ready", "asleep")),
        reported_at=NOW - random.choice((0.0, 0.0, 0.5, MAX_REPORT_AGE_SECONDS + 1)),
        memory=memory,
        engine=EngineState("mlx", "ready", queued_tokens=random.choice((0, 0, 5000)), rows=random.choice((0, 1, 32))),
        models={model.name: model} if random.random() < 0.9 else {},
    )


def a_view(random: Random, count: int = COUNT) -> ClusterView:
    most = random.choice((8, 128, 8192))
    return ClusterView(tuple(a_node(number, random, most) for number in range(count)))


def promised(view: ClusterView, random: Random) -> ReservationLedger:
    ledger = ReservationLedger()
    for number in range(random.randint(0, 60)):
        ledger.reserve(random.choice(view.nodes).id, number, number, random.randint(0, 2048) * MIB, 100)
    return ledger


def both(
    view: ClusterView,
    request: ResourceDemand,
    ledger: ReservationLedger,
    columns: VectorIndex | None = None,
    **more: object,
) -> tuple[Placement | NoPlacement, Placement | NoPlacement]:
    if columns is None:
        columns = VectorIndex(ledger)
        columns.apply_view(view)
    exact = place(view, request, ledger, now=NOW, draw=lambda: 0.5, **more)  # pyright: ignore
    return exact, columns.place(view, request, now=NOW, draw=lambda: 0.5, **more)  # pyright: ignore


def as_good(exact: Placement | NoPlacement, quick: Placement | NoPlacement, request: ResourceDemand) -> None:
    if isinstance(exact, NoPlacement):
        assert quick == exact
        return
    assert isinstance(quick, Placement)
    assert quick.chosen.feasible
    same = {one.node: one for one in exact.candidates}[quick.chosen.node]
    assert same == quick.chosen
    marks = [POLICIES["balanced"].score(one, request)[0] for one in (exact.chosen, quick.chosen)]
    assert marks[0] == marks[1]


@given(seeds, st.integers(1, 4000))
def test_it_finds_a_node_exactly_where_there_is_one(seed: int, tokens: int):
    random = Random(seed)
    view = a_view(random)
    request = ResourceDemand("tiny", 0, tokens, random.choice((None, 5, 2000)))
    exact, quick = both(view, request, promised(view, random))
    assert type(exact) is type(quick)
    if isinstance(quick, Placement):
        assert quick.chosen.feasible
        assert {one.node: one for one in exact.candidates}[quick.chosen.node] == quick.chosen


@given(seeds)
def test_where_needs_are_straight_lines_it_is_as_good_as_the_exact_rule(seed: int):
    random = Random(seed)
    nodes = tuple(
        NodeView(
            NodeId(str(number)),
            str(number),
            "ready",
            reported_at=NOW,
            memory=a_memory(random.randint(0, 999) * MIB),
            engine=EngineState("mlx", "ready"),
            models={"tiny": a_model()},
        )
        for number in range(COUNT)
    )
    request = ResourceDemand("tiny", 0, random.randint(1, 4000))
    view = ClusterView(nodes)
    as_good(*both(view, request, promised(view, random)), request)


def the(candidates: tuple[Candidate, ...], name: str) -> Candidate:
    return next(one for one in candidates if one.name == name)


def equal_nodes(count: int = COUNT) -> tuple[NodeView, ...]:
    return tuple(
        NodeView(
            NodeId(str(number)),
            str(number),
            "ready",
            reported_at=NOW,
            memory=a_memory(),
            engine=EngineState("mlx", "ready"),
            models={"tiny": a_model()},
        )
        for number in range(count)
    )


def test_it_follows_reports_and_promises():
    ledger, view = ReservationLedger(), ClusterView(equal_nodes())
    columns = VectorIndex(ledger)
    columns.apply_view(view)
    request = ResourceDemand("tiny", 0, 100)
    for number, node in enumerate(view.nodes[:-1]):
        ledger.reserve(node.id, number, number, 9 * GIB)
    last = str(COUNT - 1)
    for _ in range(3):
        result = columns.place(view, request, now=NOW, draw=lambda: 0.0)
        assert isinstance(result, Placement)
        assert result.chosen.name == last
        assert len(result.candidates) == 1, "no other node was examined"
    ledger.release(3)
    ledger.reserve(NodeId(last), 1000, 1000, 9 * GIB)
    result = columns.place(view, request, now=NOW, draw=lambda: 0.0)
    assert isinstance(result, Placement)
    assert result.chosen.name == "3"
    roomy = NodeView(
        NodeId("7"),
        "7",
        "ready",
        reported_at=NOW,
        memory=a_memory(16 * GIB),
        engine=EngineState("mlx", "ready"),
        models={"tiny": a_model(prefill_speed=1e5)},
    )
    view = ClusterView((*view.nodes[:7], roomy, *view.nodes[8:]))
    columns.apply_view(view)
    result = columns.place(view, request, now=NOW, draw=lambda: 0.0)
    assert isinstance(result, Placement)
    assert result.chosen.name == "7"


def test_members_that_come_and_go_are_followed():
    ledger, nodes = ReservationLedger(), equal_nodes()
    columns = VectorIndex(ledger)
    for view in (ClusterView(nodes), ClusterView(nodes[3:]), ClusterView(nodes[::-1]), ClusterView(nodes)):
        columns.apply_view(view)
        first = view.nodes[0]
        for number, node in enumerate(view.nodes[1:]):
            ledger.reserve(node.id, number, number, 9 * GIB)
        result = columns.place(view, ResourceDemand("tiny", 0, 100), now=NOW, draw=lambda: 0.9)
        assert isinstance(result, Placement)
        assert result.chosen.node == first.id
        for number in range(len(view.nodes)):
            ledger.release(number)


def test_equal_nodes_share_the_work():
    ledger, view = ReservationLedger(), ClusterView(equal_nodes())
    columns, random = VectorIndex(ledger), Random(1)
    columns.apply_view(view)
    chosen = set[str]()
    for _ in range(200):
        result = columns.place(view, ResourceDemand("tiny", 0, 100), now=NOW, draw=random.random)
        assert isinstance(result, Placement)
        chosen.add(result.chosen.name)
    assert len(chosen) > COUNT / 4


def test_a_node_that_has_read_the_prompt_leads_until_its_queue_is_longer():
    request = ResourceDemand("tiny", 0, 4000)
    warm = {NodeId("5"): 0.9}
    nodes = list(equal_nodes())
    quick = both(ClusterView(tuple(nodes)), request, ReservationLedger(), warm=warm)[1]
    assert isinstance(quick, Placement)
    assert quick.chosen.name == "5"
    assert quick.chosen.expected_ttft == pytest.approx(0.4)
    nodes[5] = NodeView(
        NodeId("5"),
        "5",
        "ready",
        reported_at=NOW,
        memory=a_memory(),
        engine=EngineState("mlx", "ready", queued_tokens=4000),
        models={"tiny": a_model()},
    )
    quick = both(ClusterView(tuple(nodes)), request, ReservationLedger(), warm=warm)[1]
    assert isinstance(quick, Placement)
    assert quick.chosen.name != "5"


def test_a_node_without_free_rows_never_leads_while_others_have_some():
    *full, free = (replace(node, engine=EngineState("mlx", "ready", rows=2)) for node in equal_nodes())
    free = replace(free, engine=EngineState("mlx", "ready", rows=32))
    ledger, view = ReservationLedger(), ClusterView((*full, free))
    columns = VectorIndex(ledger)
    columns.apply_view(view)
    for number, node in enumerate((*full, *full, free, free, free)):
        ledger.reserve(node.id, number, number, 0)
    quick = None
    for _ in range(3):
        exact, quick = both(view, ResourceDemand("tiny", 0, 10), ledger, columns)
        for result in (exact, quick):
            assert isinstance(result, Placement)
            assert result.chosen.node == free.id, "the node has one more request, and headroom for many"
    assert isinstance(quick, Placement)
    assert [one.node for one in quick.candidates] == [free.id], "it led at once"


def test_what_a_node_refused_since_its_report_is_not_offered_again():
    view, ledger = ClusterView(equal_nodes()), ReservationLedger()
    leader = both(view, ResourceDemand("tiny", 0, 100), ledger)[1]
    assert isinstance(leader, Placement)
    corrections = {leader.chosen.node: HeadroomCorrection(NOW, 0)}
    other = both(view, ResourceDemand("tiny", 0, 100), ledger, corrections=corrections)[1]
    assert isinstance(other, Placement)
    assert other.chosen.node != leader.chosen.node
    assert the(other.candidates, leader.chosen.name).why.startswith("needs")


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_ranks_by_arrays(policy: str):
    assert POLICIES[policy] in RANKS
    big = NodeView(
        NodeId("9"),
        "9",
        "ready",
        reported_at=NOW,
        memory=a_memory(99 * GIB, cap=128 * GIB),
        engine=EngineState("mlx", "ready"),
        models={"tiny": a_model()},
    )
    nodes = equal_nodes()
    exact, quick = both(
        ClusterView((*nodes[:9], big, *nodes[10:])),
        ResourceDemand("tiny", 0, 100),
        ReservationLedger(),
        policy=POLICIES[policy],
    )
    assert isinstance(exact, Placement)
    assert isinstance(quick, Placement)
    assert exact.chosen.name == quick.chosen.name == "9"


class Smallest:
    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        return (candidate.headroom or 0,)


def test_a_policy_without_arrays_is_asked_about_every_node():
    view, ledger = ClusterView(equal_nodes()), ReservationLedger()
    ledger.reserve(NodeId("4"), 1, 1, 4 * GIB)
    quick = both(view, ResourceDemand("tiny", 0, 100), ledger, policy=Smallest())[1]
    assert isinstance(quick, Placement)
    assert quick.chosen.name == "4"
    assert len(quick.candidates) == COUNT


def test_answers_slow_each_other_here_too_until_they_have_ended():
    """This includes answers that the reports already count: their reservations have ended, but they still run."""
    quick, other = a_model(decode_speed=100.0), a_model(decode_speed=70.0)
    nodes = tuple(
        NodeView(
            NodeId(name),
            name,
            "ready",
            reported_at=NOW,
            memory=a_memory(),
            engine=EngineState("mlx", "ready"),
            models={"tiny": model},
        )
        for name, model in (("quick", quick), ("other", other))
    )
    view, ledger, request = ClusterView(nodes), ReservationLedger(), ResourceDemand("tiny", 0, 20)
    columns = VectorIndex(ledger)
    columns.apply_view(view)

    def first() -> str:
        result = columns.place(view, request, now=NOW, draw=lambda: 0.5)
        assert isinstance(result, Placement)
        return result.chosen.name

    assert first() == "quick"
    for number in range(40):
        ledger.reserve(NodeId("quick"), number, number, 0)
        ledger.admitted(number)
        ledger.read(number)
    ledger.acknowledge(NodeId("quick"), 40)
    assert first() == "other"
    for number in range(40):
        ledger.release(number)
    assert first() == "quick"
