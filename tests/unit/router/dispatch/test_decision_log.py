"""The history of requests, and replayed decisions."""

from random import Random

import pytest

from router.dispatch.active_request import MAX_STEPS, ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.decision_log import (
    MAX_CANDIDATES_KEPT,
    MAX_DECISIONS_KEPT,
    MAX_INVALID_KEPT,
    MAX_LINE_BYTES,
    MAX_REQUESTS_KEPT,
    DecisionLog,
    PlacementDecision,
    RequestRecord,
    parse_line,
    remove_quoted_text,
    replay,
)
from router.dispatch.request import RequestFailure
from router.errors import build_invalid
from router.placement.candidate import NoPlacement, Placement, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import place
from router.placement.policies import POLICIES
from router.placement.reservations import ReservationLedger
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster
from wire.frames import Admitted
from wire.identity import NodeId
from wire.refusals import RefusalCode
from wire.report import EngineState, Memory
from wire.units import GIB

ASK = ResourceDemand("tiny", 0, 1000)


def a_node(name: str, memory: Memory, speed: float = 1000.0) -> NodeView:
    return NodeView(
        NodeId(name),
        name,
        "ready",
        reported_at=0.0,
        memory=memory,
        engine=EngineState("mlx", "ready"),
        models={"tiny": a_model(prefill_speed=speed)},
    )


def decided(*nodes: NodeView, policy: str = "balanced", ask: ResourceDemand = ASK) -> Placement | NoPlacement:
    return place(ClusterView(nodes), ask, ReservationLedger(), now=0.0, draw=lambda: 0.5, policy=POLICIES[policy])


def kept(*results: Placement | NoPlacement) -> list[PlacementDecision]:
    history = DecisionLog()
    for number, result in enumerate(results):
        history.record_decision(float(number), f"r{number}", "k", ASK, result, len(result.candidates))
    return list(history.decisions)


def test_an_invalid_request_is_recorded_without_a_duration_and_quotes():
    history = DecisionLog()
    history.record_invalid(7.0, "r", "k", build_invalid("logit_bias.so long is 'not this'", "logit_bias.so long"))
    assert list(history.refusals) == [
        RequestRecord("r", "k", "", False, 7.0, 0.0, "invalid_request", "logit_bias.… is '…'", ())
    ]


SLOW_AND_BIG, FAST_AND_SMALL = a_node("big", a_memory(64 * GIB, cap=96 * GIB), 100.0), a_node("fast", a_memory(2 * GIB))


def test_decision_is_parsed_back_from_its_line():
    placed, full = decided(SLOW_AND_BIG, FAST_AND_SMALL), decided(a_node("full", a_memory(0)))
    history = DecisionLog()
    for result in (placed, full):
        history.record_decision(1.0, "r", "k", ASK, result, 2)
    read = [parse_line(line) for line in history.encode_lines()]
    assert read == list(history.decisions)
    assert read[0].candidates == placed.candidates, "a small cluster is recorded in the order of the decision"
    assert read[0].chosen == "fast"
    assert read[1].refused is not None
    assert read[1].refused.code is RefusalCode.NO_ROOM


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"at": 1}', b"\xff", b"x" * (5 * 2**20)])
def test_invalid_decision_line_is_an_error(line: bytes):
    with pytest.raises(ValueError, match=r"\w"):
        parse_line(line)


def test_a_line_has_a_maximum_length():
    history = DecisionLog()
    history.record_decision(1.0, "r", "k", ASK, decided(FAST_AND_SMALL), 1)
    (line,) = history.encode_lines()
    longest = line.rstrip().ljust(MAX_LINE_BYTES)
    assert parse_line(longest) == history.decisions[0]
    with pytest.raises(ValueError, match=f"the line has {MAX_LINE_BYTES + 1} bytes, at most {MAX_LINE_BYTES}"):
        parse_line(longest + b" ")


@pytest.mark.parametrize(
    ("message", "param", "stored"),
    [
        ("top_k is 'many'", "top_k", "top_k is 'many'"),
        ("the model 'tiny' has no \"tools\"", "", "the model 'tiny' has no \"tools\""),
        ("top_p is 'x!', then '!x'", "top_p", "top_p is '…', then '…'"),
        ("temperature is '!x' and \"a b\"", "temperature", "temperature is '…' and '…'"),
        ("stop is 'it\\'s secret'", "stop", "stop is '…'"),
        ("messages[0].my secret is no field", "messages[0].my secret", "messages[0].… is no field"),
    ],
)
def test_only_quoted_names_of_an_invalid_request_are_stored(message: str, param: str, stored: str):
    assert remove_quoted_text(message, param) == stored


def test_the_newest_requests_include_invalid_ones_in_the_order_of_their_ends():
    history = DecisionLog()
    for name, arrived, seconds in (("short", 2.0, 1.0), ("long", 1.0, 9.0), ("last", 12.0, 1.0)):
        history.records.append(RequestRecord(name, "k", "m", True, arrived, seconds, "ok", "", ()))
    history.record_invalid(5.0, "invalid", "k", build_invalid("no", "n"))
    assert [record.request_id for record in history.list_newest(9)] == ["short", "invalid", "long", "last"]
    assert [record.request_id for record in history.list_newest(2)] == ["long", "last"]
    assert [record.request_id for record in history.list_newest(1)] == ["last"]


def test_a_request_is_found_by_its_id_with_invalid_requests_first():
    history = DecisionLog()
    for name in ("twice", "other"):
        history.records.append(RequestRecord(name, "k", "m", True, 1.0, 1.0, "ok", "", ()))
    for name in ("twice", "wrong"):
        history.record_invalid(5.0, name, "k", build_invalid("no", "n"))
    assert [record.outcome for record in history.find_requests("twice")] == ["invalid_request", "ok"]
    assert history.find_requests("unknown") == []


def test_replay_without_a_placement_has_no_waits():
    result = replay(kept(decided(a_node("full", a_memory(0)))), POLICIES["balanced"], Random(1).random)
    assert (result.decisions, result.same, result.refused, result.waits) == (1, 0, 1, (0.0, 0.0))


def test_replay_repeats_decisions_and_compares_policies():
    decisions = kept(decided(SLOW_AND_BIG, FAST_AND_SMALL), decided(a_node("full", a_memory(0))))
    same = replay(decisions, POLICIES["balanced"], Random(1).random)
    assert (same.decisions, same.same, same.refused, same.instead) == (2, 1, 1, ())
    assert same.waits[0] == same.waits[1]
    other = replay(decisions, POLICIES["most_headroom"], Random(1).random)
    assert other.instead == (("r0", "fast", "big"),)
    assert other.waits[1] == pytest.approx(10.0)
    assert other.waits[0] == pytest.approx(1.0)


@pytest.mark.parametrize("place_of_chosen", [0, MAX_CANDIDATES_KEPT - 1, MAX_CANDIDATES_KEPT, 30])
def test_decision_of_a_large_cluster_keeps_the_chosen_node_within_the_limit(place_of_chosen: int):
    nodes = [a_node(str(number), a_memory(2 * GIB), 100.0) for number in range(40)]
    nodes[place_of_chosen] = FAST_AND_SMALL
    (decision,) = kept(decided(*nodes))
    assert len(decision.candidates) == MAX_CANDIDATES_KEPT
    assert decision.nodes == 40
    assert [row["name"] for row in decision.to_rows() if row["chosen"]] == ["fast"]


def test_a_refusal_has_the_number_of_all_nodes():
    (decision,) = kept(decided(*(a_node(str(number), a_memory(0)) for number in range(MAX_CANDIDATES_KEPT + 4))))
    assert (len(decision.candidates), decision.nodes) == (MAX_CANDIDATES_KEPT, MAX_CANDIDATES_KEPT + 4)


def test_lines_are_those_of_the_time_of_the_call():
    history, result = DecisionLog(), decided(FAST_AND_SMALL)
    for name in ("first", "second"):
        history.record_decision(0.0, name, "k", ASK, result, 1)
    lines = history.encode_lines()
    names = [parse_line(next(lines)).request_id]
    history.record_decision(0.0, "later", "k", ASK, result, 1)
    assert names + [parse_line(line).request_id for line in lines] == ["first", "second"]


def test_replay_has_the_mean_wait_and_ignores_nodes_without_room():
    slow = a_node("slow", a_memory(), 100.0)
    decisions = kept(decided(slow), decided(slow, a_node("full", a_memory(0))), decided(FAST_AND_SMALL))
    result = replay(decisions, POLICIES["balanced"], Random(1).random)
    assert (result.same, result.instead) == (3, ())
    assert result.waits == (pytest.approx(7.0), pytest.approx(7.0)), "two waits of 10 s and one of 1 s"


def test_replay_counts_an_equal_node_as_the_same_choice():
    twins = decided(a_node("a", a_memory()), a_node("b", a_memory()))
    (decision,) = kept(twins)
    for draws in ((0.1, 0.9), (0.9, 0.1)):
        result = replay([decision], POLICIES["balanced"], iter(draws).__next__)
        assert (result.same, result.instead) == (1, ())


def test_the_rings_are_bounded():
    history, result = DecisionLog(), decided(FAST_AND_SMALL)
    for number in range(MAX_DECISIONS_KEPT + 10):
        history.record_decision(0.0, f"r{number}", "k", ASK, result, 1)
    assert len(history.decisions) == MAX_DECISIONS_KEPT
    assert history.find_decisions("r0") == []
    assert (history.records.maxlen, history.refusals.maxlen) == (MAX_REQUESTS_KEPT, MAX_INVALID_KEPT)


# Steps of a request


def way(ticket: ActiveRequest) -> list[tuple[str, str]]:
    return [(what, node) for _, what, node in ticket.steps]


async def test_record_has_the_steps_of_a_request():
    two = Cluster(A, B)
    ticket = two.submit(key="ada")
    first, _ = two.last()
    two.refuse()
    second, _ = two.last()
    two.now += 1.0
    two.say(lambda number: Admitted(number, 25))
    two.speak()
    two.now += 2.0
    two.finish()
    assert way(ticket) == [
        ("sent", f"node-{first}"),
        ("refused: no_headroom", f"node-{first}"),
        ("sent", f"node-{second}"),
        ("first token", f"node-{second}"),
    ]
    (story,) = two.dispatcher.history.find_requests("r0")
    assert (story.key, story.model, story.outcome, story.prompt_tokens) == ("ada", "tiny", "ok", 25)
    assert story.seconds == pytest.approx(3.0)
    assert story.steps[-1][0] == pytest.approx(1.0)


async def test_refused_and_waiting_requests_have_records():
    one = Cluster(A)
    one.memory[A] = a_memory(0)
    one.report()
    ticket = one.submit()
    one.dispatcher.shutdown("bye")
    (story,) = one.dispatcher.history.find_requests("r0")
    assert (story.outcome, story.message) == ("shutting_down", "bye")
    assert way(ticket) == [("queued", "")]
    assert isinstance(ticket.outcome, RequestFailure)


async def test_record_of_a_resumed_request_has_both_nodes():
    two = Cluster(A, B)
    ticket = two.submit()
    assert isinstance(ticket.answer, StreamedAnswer)
    lost, _ = two.last()
    two.speak()
    two.dispatcher.handle_lost_node(lost, "its power went")
    other, _ = two.last()
    assert way(ticket)[2][0].startswith("lost: ")
    assert "its power went" in way(ticket)[2][0]
    assert way(ticket)[3] == ("resumed", f"node-{other}")


async def test_a_record_is_bounded():
    one = Cluster(A)
    ticket = one.submit()
    for number in range(200):
        ticket.add_step(one.now, f"step {number}")
    assert len(ticket.steps) == MAX_STEPS
    assert (ticket.steps[0][1], ticket.steps[-1][1]) == ("sent", "step 199")
