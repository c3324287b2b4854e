"""The dispatcher alone: frames in, frames out, on a loop but without sockets."""

import asyncio
import gc
import itertools
import random
from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from router.admission.rate_limits import KeyLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.circuit_breaker import MAX_FAULTS, SAME_FAULT_SECONDS
from router.dispatch.decision_log import DecisionLog
from router.dispatch.dispatcher import STOPPING, Dispatcher
from router.dispatch.parts.composition import SWEEP_INTERVAL_SECONDS
from router.dispatch.request import CANCELLED, SLOW, RequestFailure, RequestSpec
from router.placement.candidate import NoPlacement, Placement, ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.sanitize_report import build_node_view
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, C, Cluster, full, roomy, taken, turn
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    Admitted,
    Cancel,
    Channel,
    Delta,
    Deltas,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    Logprob,
    Message,
    Ping,
    Refusal,
    Report,
    UnloadModel,
)
from wire.identity import NodeId
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import CacheState, EngineState
from wire.state_machine import IllegalEventCounts
from wire.units import GIB, MIB


async def test_a_request_is_placed_reserved_answered_and_freed(one: Cluster):
    ticket = one.submit(max_tokens=5)
    node, frame = one.generates()[0]
    assert (node, frame.seq, frame.expected) == (A, 1, 5)
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) > 0
    assert one.dispatcher.count_in_flight(A) == 1
    one.say(lambda number: Admitted(number, 25))
    one.acked = 1
    one.report()
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) == 0
    one.speak("he")
    one.speak("llo")
    one.finish()
    assert taken(ticket) == ["he", "llo"]
    assert ticket.outcome == Finished(1001, ("stop",), 25, 3)
    assert one.dispatcher.count_in_flight(A) == 0
    assert one.dispatcher.counters.requests == {"ok": 1}
    assert (ticket.node_name, ticket.attempts) == ("node-a", 1)


async def test_a_whole_answer_is_collected(one: Cluster):
    ticket = one.submit(stream=False)
    assert isinstance(ticket.answer, CollectedAnswer)
    waiting = asyncio.create_task(ticket.answer.wait_for_outcome())
    one.speak("he")
    one.speak("llo")
    one.speak("nobody asked for a second choice", choice=1)
    await turn()
    assert not waiting.done()
    one.finish()
    assert isinstance(await waiting, Finished)
    assert ticket.answer.build_answer().texts == {(0, 0): "hello"}


async def test_tools_and_template_are_sent_to_the_engine(one: Cluster):
    job = RequestSpec(
        ResourceDemand("tiny", 100),
        "k",
        "r",
        (),
        GenerationParams(top_k=4),
        7,
        True,
        '[{"type":"function"}]',
        '{"a":1}',
        True,
    )
    one.dispatcher.submit(job)
    _, frame = one.generates()[-1]
    assert (frame.tools, frame.template, frame.created) == (job.tools, job.template, 7)
    assert frame.params.seed is not None, "the router gives one, so that the answer can be resumed"
    assert frame.params == GenerationParams(top_k=4, seed=frame.params.seed)
    one.finish()


@pytest.mark.parametrize(
    ("piece", "logprobs"),
    [
        ((Channel.TOOL_CALL, "x" * 1000), ()),
        ((Channel.CONTENT, ""), (Logprob(b"x" * 500, -1.0, ((b"y" * 500, -2.0),)),)),
    ],
)
async def test_everything_of_an_answer_counts_towards_its_bound(piece: tuple[int, str], logprobs: tuple[Logprob, ...]):
    delta = Delta(1, 0, (1,), (piece,), logprobs)
    whole, stream = CollectedAnswer(1, logprobs=True), StreamedAnswer()
    whole.add(delta)
    stream.add(delta)
    assert 1000 < whole.buffered <= 2000
    assert 1000 < stream.buffered <= 2000
    whole.discard()
    assert (whole.buffered, whole.build_answer().calls, whole.build_answer().logprobs) == (0, {}, {})


async def test_an_unrequested_answer_is_not_kept(one: Cluster):
    ticket = one.submit(stream=False)
    assert isinstance(ticket.answer, CollectedAnswer)
    ticket.add_delta(Delta(1, 0, (1,), tuple((channel, "") for channel in range(3, 99)), (Logprob(b"x", -1.0),)))
    assert (ticket.answer.build_answer().texts, ticket.answer.build_answer().logprobs, ticket.answer.buffered) == (
        {},
        {},
        0,
    )
    one.finish()


async def test_answer_with_too_long_tool_calls_is_ended(one: Cluster):
    ticket = one.submit(stream=False)
    mebibyte = Delta(one.last()[1], 0, (), ((Channel.TOOL_CALL, "x" * MIB),))
    for _ in range(40):
        one.say(lambda _: Deltas((mebibyte,)))
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "answer_too_long"


async def test_refused_request_is_retried_on_the_next_node(two: Cluster):
    ticket = two.submit()
    first, _ = two.last()
    two.refuse(room=5 * MIB)
    second, _ = two.last()
    assert {first, second} == {A, B}
    assert (ticket.attempts, ticket.demand.prompt_tokens) == (2, 25)
    assert two.dispatcher.counters.refusals == {"no_headroom": 1}
    two.finish()
    assert isinstance(ticket.outcome, Finished)


async def test_refusal_corrects_headroom_until_the_next_report(two: Cluster):
    two.submit()
    first, _ = two.last()
    two.refuse(room=5 * MIB)
    two.submit()
    assert two.last()[0] != first
    two.report()
    preview = two.dispatcher.placer.preview(ResourceDemand("tiny", 100))
    assert all(candidate.feasible for candidate in preview.candidates)


async def test_when_all_refuse_it_waits_and_is_placed_after_a_report(two: Cluster):
    ticket = two.submit()
    two.refuse()
    two.refuse()
    assert len(two.dispatcher.queue) == 1
    assert len(two.generates()) == 2
    two.report()
    await turn()
    assert len(two.generates()) == 3
    assert len(two.dispatcher.queue) == 0
    two.finish()
    assert isinstance(ticket.outcome, Finished)
    assert two.dispatcher.counters.requests == {"ok": 1}


async def test_request_tries_at_most_four_nodes_in_a_row():
    cluster = Cluster(*(NodeId(f"n{number}") for number in range(6)))
    cluster.submit()
    for _ in range(4):
        cluster.refuse()
    assert len(cluster.generates()) == 4
    assert len(cluster.dispatcher.queue) == 1
    cluster.dispatcher.shutdown()
    cluster.settled()


@pytest.mark.parametrize("code", [RefusalCode.UNSUPPORTED, RefusalCode.INVALID, RefusalCode.TEMPLATE])
async def test_a_refusal_of_the_request_itself_is_not_tried_elsewhere(two: Cluster, code: RefusalCode):
    ticket = two.submit()
    two.refuse(code)
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.code is code
    assert len(two.generates()) == 1


async def test_request_too_large_for_one_node_tries_the_rest_then_fails(two: Cluster):
    ticket = two.submit()
    two.refuse(RefusalCode.TOO_LARGE, tokens=4000)
    assert ticket.outcome is None
    two.refuse(RefusalCode.TOO_LARGE, tokens=4000)
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.status == 400


async def test_an_unknown_model_never_waits(one: Cluster):
    job = RequestSpec(ResourceDemand("tinny", 10), "k", "r", (), GenerationParams(), 0, stream=False)
    ticket = one.dispatcher.submit(job)
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.code is RefusalCode.NO_MODEL


async def test_the_deadline_answers_with_fresh_numbers():
    cluster = Cluster(A, queue_timeout_seconds=0.05)
    full(cluster, A)
    ticket = cluster.submit(stream=False)
    assert isinstance(ticket.answer, CollectedAnswer)
    assert len(cluster.dispatcher.queue) == 1
    cluster.now += 1
    cluster.memory[A] = a_memory(2 * MIB)
    cluster.report()
    outcome = await ticket.answer.wait_for_outcome()
    assert isinstance(outcome, Refused)
    assert outcome.code is RefusalCode.NO_ROOM
    assert outcome.numbers is not None
    assert outcome.numbers.headroom == 2 * MIB
    assert "waited 1 s in the queue" in outcome.message
    cluster.settled()


async def test_queued_requests_of_a_key_with_a_higher_priority_go_first(one: Cluster):
    one.limits |= {"low": KeyLimits(priority="low"), "high": KeyLimits(priority="high")}
    full(one, A)
    for key in ("low", "high"):
        assert one.submit(prompt_tokens=3000, key=key).entry is not None
    roomy(one, A)
    await turn()
    assert [frame.weighted_key.name for _, frame in one.generates()] == ["high", "low"]


async def test_full_queue_and_full_key_share_are_refused():
    cluster = Cluster(A, queue_limit=20)
    full(cluster, A)
    tickets = [cluster.submit(key="greedy") for _ in range(17)]
    assert isinstance(tickets[-1].outcome, Refused)
    assert tickets[-1].outcome.code is RefusalCode.OVER_SHARE
    assert tickets[-1].outcome.numbers is not None
    others = [cluster.submit(key=f"k{number}") for number in range(5)]
    assert isinstance(others[-1].outcome, Refused)
    assert others[-1].outcome.code is RefusalCode.QUEUE_FULL
    assert "the queue is full with" in cluster.dispatcher.find_outage_reason()
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_large_request_is_not_overtaken_indefinitely(one: Cluster):
    one.memory[A] = a_memory(200 * MIB)
    one.report()
    large = one.submit(prompt_tokens=3000)
    assert large.entry is not None
    one.now += 6
    one.report()
    await turn()
    assert one.dispatcher.ledger.find_hold_node(large.number) == A
    small = one.submit()
    assert small.entry is not None, "the headroom is held, so no new request takes it"
    roomy(one, A)
    await turn()
    assert large.node == small.node == A


async def test_held_headroom_is_used_by_the_request_that_holds_it(one: Cluster):
    one.memory[A] = a_memory(200 * MIB)
    one.report()
    keys = ("ada", "ada", "bob")
    waiting = [one.submit(prompt_tokens=3000, key=key) for key in keys]
    one.now += 6
    one.report()
    await turn()
    assert [one.dispatcher.ledger.find_hold_node(ticket.number) for ticket in waiting] == [A, None, None]
    need = one.dispatcher.placer.preview(waiting[0].demand).candidates[0].need
    one.memory[A] = a_memory(need + need // 2)
    one.report()
    await turn()
    assert [ticket.node for ticket in waiting] == [A, None, None], "one request fits, and the first one is placed"


async def test_key_without_requests_starts_on_a_full_node(one: Cluster):
    ahead = [one.submit(prompt_tokens=3900, key="greedy") for _ in range(6)]  # at 1,000 tokens a second
    late = one.submit(prompt_tokens=3950, key="greedy")
    other = one.submit(prompt_tokens=100, key="ada")
    assert {ticket.node for ticket in (*ahead, late, other)} == {A}, "the node is fair to both"


async def test_crowding_key_is_queued_where_other_keys_start(one: Cluster):
    others = [one.submit(prompt_tokens=100, key=key) for key in ("ada", "bob")]
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(10)]
    assert [ticket.node for ticket in greedy] == 4 * [A] + 6 * [None], "four of six are one's of three, 6 s in front"
    others += [one.submit(prompt_tokens=3000, key=key) for key in ("ada", "bob")]
    assert all(ticket.node == A for ticket in others), "with 8 and 11 seconds in front of them"
    one.report()
    await turn()
    assert [ticket.node for ticket in greedy] == 4 * [A] + 6 * [None], "a report changes no share"
    for ticket in greedy[:4]:
        one.dispatcher.close(ticket)
    await turn()
    assert all(ticket.node == A for ticket in greedy[4:]), "six of ten are not much"


async def test_crowding_key_is_refused_at_its_deadline(one: Cluster):
    others = [one.submit(prompt_tokens=100, key=key) for key in ("ada", "bob")]
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(7)]
    *_, early, late = greedy
    assert [early.entry is None, late.entry is None] == [False, False]
    one.now += 31
    one.report()
    one.dispatcher.sweep()
    assert isinstance(early.outcome, Refused)
    assert early.outcome.code is RefusalCode.DEADLINE
    assert "other API keys use" in early.outcome.message
    for ticket in (*others, *greedy[:5]):
        one.dispatcher.close(ticket)
    assert one.submit(prompt_tokens=1500, key="greedy").node == A, "no other key has requests"


async def test_crowding_key_starts_at_its_deadline_with_half_of_the_memory_free(one: Cluster):
    one.memory[A] = a_memory(20 * GIB)
    one.report()
    others = [one.submit(prompt_tokens=100, key=key) for key in ("ada", "bob")]
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(7)]
    assert greedy[-1].entry is not None
    one.now += 31
    one.report()
    one.dispatcher.sweep()
    assert {ticket.node for ticket in (*others, *greedy)} == {A}


async def test_memory_of_loaded_models_is_not_missing_at_the_deadline_of_a_crowding_key(one: Cluster):
    one.models = (a_model(weights=8 * GIB),)
    one.memory[A] = a_memory(9 * GIB)  # above half of the memory without the models, below half of all
    one.report()
    others = [one.submit(prompt_tokens=100, key=key) for key in ("ada", "bob")]
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(7)]
    assert greedy[-1].entry is not None
    one.now += 31
    one.report()
    one.dispatcher.sweep()
    assert {ticket.node for ticket in (*others, *greedy)} == {A}


async def test_refusal_at_the_deadline_names_a_lost_link(one: Cluster):
    one.memory[A] = a_memory(20 * GIB)
    one.report()
    others = [one.submit(prompt_tokens=100, key=key) for key in ("ada", "bob")]
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(7)]
    one.now += 31
    one.report()
    one.cut = {A}
    one.dispatcher.sweep()
    assert all(ticket.outcome is None for ticket in others)
    outcome = greedy[-1].outcome
    assert isinstance(outcome, Refused)
    assert outcome.code is RefusalCode.DEADLINE
    assert outcome.message == "the link to node-a ended: retry (waited 31 s in the queue)"


async def test_a_request_at_its_deadline_is_sent_to_a_node_with_a_link(two: Cluster):
    for node in (A, B):
        two.memory[node] = a_memory(20 * GIB)
    two.report()
    for key in ("ada", "bob"):
        two.submit(prompt_tokens=100, key=key)
    greedy = [two.submit(prompt_tokens=1500, key="greedy") for _ in range(16)]
    waiting = [ticket for ticket in greedy if ticket.entry is not None]
    assert len(waiting) > 1
    two.now += 31
    two.report()
    two.cut = {A}
    two.dispatcher.sweep()
    assert {(ticket.node, ticket.outcome) for ticket in waiting} == {(B, None)}
    assert any(step[1:] == ("no link", "node-a") for ticket in waiting for step in ticket.steps)


async def test_crowding_key_is_refused_when_its_queue_share_is_full(one: Cluster):
    for key in ("ada", "bob"):
        one.submit(prompt_tokens=100, key=key)
    greedy = [one.submit(prompt_tokens=1500, key="greedy") for _ in range(40)]
    waiting = [ticket for ticket in greedy if ticket.entry is not None]
    over = [ticket.outcome for ticket in greedy if ticket.outcome is not None]
    assert waiting
    assert over
    for outcome in over:
        assert isinstance(outcome, Refused)
        assert outcome.code is RefusalCode.OVER_SHARE
        assert outcome.retry_after
    assert one.submit(prompt_tokens=4000, key="ada").node == A, "other keys have headroom"


async def test_requests_are_sent_with_key_and_weight(one: Cluster):
    one.submit(key="ada")
    ((_, frame),) = one.generates()
    assert frame.weighted_key == WeightedKey("ada", 4)
    assert (frame.cache_scope, frame.shared) == ("", False), "its cached prefixes are its key's own"


async def test_node_full_of_one_key_is_offered_a_request_of_another(one: Cluster):
    """The engine can preempt a request of the first key, but not its single one. A further request of that key
    waits for room."""
    held = [one.submit(key="greedy") for _ in range(2)]
    full(one, A)
    waiting = one.submit(key="greedy")
    assert waiting.entry is not None
    other = one.submit(key="other")
    assert other.node == A
    one.refuse()
    assert (other.node, other.entry is not None) == (None, True), "the engine knows better"
    assert len(one.generates()) == 3
    one.dispatcher.close(other)
    one.dispatcher.close(held.pop())
    full(one, A)
    await turn()
    last = one.submit(key="other")
    assert last.entry is not None, "of a single request nothing is taken"


async def test_each_answer_of_a_request_takes_a_row(one: Cluster):
    ticket = one.submit(choices=3)
    assert one.dispatcher.ledger.get_account(A).rows == 3
    one.dispatcher.close(ticket)
    assert one.dispatcher.ledger.get_account(A).rows == 0


async def test_headroom_is_held_for_one_request_of_each_key(two: Cluster):
    two.memory[A] = two.memory[B] = a_memory(200 * MIB)
    two.report()
    waiting = [two.submit(prompt_tokens=3000, key=key) for key in ("ada", "ada", "bob")]
    two.now += 6
    two.report()
    await turn()
    held = [two.dispatcher.ledger.find_hold_node(ticket.number) for ticket in waiting]
    assert held[1] is None
    assert {held[0], held[2]} == {A, B}


async def test_arrivals_that_fit_pass_those_that_wait_but_are_counted(one: Cluster):
    one.memory[A] = a_memory(200 * MIB)
    one.report()
    large = one.submit(prompt_tokens=3000)
    small = one.submit()
    assert small.node == A
    assert large.entry is not None
    assert large.entry.overtaken == 1


async def test_lost_node_returns_requests_that_have_not_begun(two: Cluster):
    ticket = two.submit(stream=False)
    first, _ = two.last()
    two.dispatcher.handle_lost_node(first, "connection ended")
    second, _ = two.last()
    assert second != first
    two.speak("hello")
    two.finish()
    assert isinstance(ticket.answer, CollectedAnswer)
    assert ticket.answer.build_answer().texts == {(0, 0): "hello"}
    assert (ticket.attempts, two.dispatcher.counters.nodes_lost) == (2, 1)


async def test_the_last_node_lost_is_a_failure_and_not_a_long_wait(one: Cluster):
    ticket = one.submit()
    one.dispatcher.handle_lost_node(A, "connection ended")
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "node_lost"


async def test_a_request_survives_three_lost_nodes_and_no_more():
    cluster = Cluster(*(NodeId(f"n{number}") for number in range(6)))
    ticket = cluster.submit()
    for _ in range(4):
        assert ticket.outcome is None
        cluster.dispatcher.handle_lost_node(cluster.last()[0], "gone")
    assert isinstance(ticket.outcome, RequestFailure)
    assert len(cluster.generates()) == 4
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_a_crashed_engine_is_not_given_the_request_again(two: Cluster):
    ticket = two.submit()
    two.say(lambda number: Failed(number, "engine_crashed", "signal 6"))
    assert ticket.outcome == RequestFailure("engine_crashed", "signal 6")
    assert len(two.generates()) == 1


def engine_lost(cluster: Cluster) -> None:
    cluster.say(lambda number: Failed(number, "engine_lost", "it ended by SIGKILL"))


async def test_engine_faults_in_a_row_open_the_breaker_of_their_node_and_no_other(one: Cluster):
    for fault in range(1, MAX_FAULTS + 1):
        assert one.dispatcher.breakers.list_barred_nodes(one.now) == []
        ticket = one.submit()
        one.say(lambda number: Failed(number, "engine_error", "the forward raised"))
        assert isinstance(ticket.outcome, RequestFailure), fault
        one.now += 2 * SAME_FAULT_SECONDS
        one.report()
    assert one.dispatcher.breakers.list_barred_nodes(one.now) == [A]
    state = one.dispatcher.breakers.get_state(A, one.now)
    assert state is not None
    assert (state.state, state.why, one.dispatcher.breakers.opened) == ("open", "the forward raised", 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_crash_retries_unrelated_requests_once(two: Cluster, stream: bool):
    ticket = two.submit(stream=stream)
    engine_lost(two)
    assert ticket.outcome is None
    assert len(two.generates()) == 2
    assert two.generates()[0][1].request != two.generates()[1][1].request
    two.speak("hello")
    two.finish()
    assert isinstance(ticket.outcome, Finished)
    if isinstance(ticket.answer, CollectedAnswer):
        assert ticket.answer.build_answer().texts == {(0, 0): "hello"}


async def test_no_request_survives_a_second_crash(two: Cluster):
    ticket = two.submit()
    engine_lost(two)
    engine_lost(two)
    assert ticket.outcome == RequestFailure("engine_crashed", "it ended by SIGKILL")
    assert len(two.generates()) == 2


async def test_a_crash_after_a_lost_node_counts_as_the_first(two: Cluster):
    ticket = two.submit()
    gone = two.last()[0]
    two.dispatcher.handle_lost_node(gone, "gone")
    engine_lost(two)
    assert ticket.outcome is None
    assert len(two.generates()) == 2, "the last report still calls that engine ready: not before the next one"
    two.report(B if gone == A else A)
    await turn()
    assert len(two.generates()) == 3


async def test_a_request_leaves_the_node_whose_engine_died(two: Cluster):
    two.submit()
    first = two.last()[0]
    engine_lost(two)
    assert two.last()[0] != first


async def test_model_load_failure_tries_other_nodes_then_refuses(two: Cluster):
    ticket = two.submit()
    two.refuse(RefusalCode.LOAD_FAILED)
    assert ticket.outcome is None
    assert {node for node, _ in two.generates()} == {A, B}
    two.refuse(RefusalCode.LOAD_FAILED)
    assert isinstance(ticket.outcome, Refused)
    assert (ticket.outcome.code, ticket.outcome.status) == (RefusalCode.LOAD_FAILED, 500)
    assert ticket.outcome.message == "no node can load tiny: node-a: no; node-b: no"


async def test_a_model_that_no_node_can_load_never_waits(two: Cluster):
    two.models = (a_model(loaded=False, cause="a truncated file"),)
    two.report()
    ticket = two.submit()
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.code is RefusalCode.LOAD_FAILED
    assert "a truncated file" in ticket.outcome.message
    assert two.generates() == []


async def test_queued_request_is_refused_when_its_model_cannot_load(two: Cluster):
    full(two, A, B)
    ticket = two.submit()
    assert ticket.entry is not None
    two.models = (a_model(loaded=False, cause="a truncated file"),)
    two.report(A)
    await turn()
    assert ticket.outcome is None, "the other node may still load it"
    two.report(B)
    await turn()
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.code is RefusalCode.LOAD_FAILED
    assert len(two.dispatcher.queue) == 0


async def test_the_weights_of_a_load_are_reserved_until_the_report_has_them(one: Cluster):
    one.models = (a_model(loaded=False, weights=4 * GIB),)
    one.report()
    ticket = one.submit()
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) > 4 * GIB
    one.models = (a_model(loaded=False, loading=True, weights=4 * GIB),)
    one.report()
    left = one.dispatcher.ledger.get_unacknowledged_bytes(A)
    assert 0 < left < GIB
    one.report()
    assert one.dispatcher.ledger.get_unacknowledged_bytes(A) == left, "they are taken off once"
    one.dispatcher.ledger.check()
    one.finish()
    assert isinstance(ticket.outcome, Finished)


async def test_swap_is_ordered_when_its_node_is_idle(one: Cluster):
    one.models = (a_model(loaded=False, weights=9 * GIB), a_model("other"))
    one.memory[A] = a_memory(2 * GIB)
    one.report()
    busy = one.dispatcher.submit(
        RequestSpec(ResourceDemand("other", 100), "k", "r", (), GenerationParams(), 0, stream=True)
    )
    ticket = one.submit()
    assert ticket.entry is not None, "another model is in use there"
    one.finish()
    assert isinstance(busy.outcome, Finished)
    await turn()
    assert ticket.node == A
    assert one.generates()[-1][1].model == "tiny"
    one.refuse()
    assert ticket.entry is not None, "it is asked once"
    one.report()
    await turn()
    assert ticket.entry is not None
    assert len(one.generates()) == 2


async def test_commands_and_requests_share_a_link(one: Cluster):
    ticket = one.submit()
    asking = asyncio.create_task(one.dispatcher.commands.send(LoadModel, A, "node-a", "tiny"))
    await turn()
    assert one.sent[-1] == (A, LoadModel(1002, "tiny"))
    one.dispatcher.receive(A, Finished(1002, (), 0, 0))
    assert isinstance(await asking, Finished)
    lost = asyncio.create_task(one.dispatcher.commands.send(UnloadModel, A, "node-a", "tiny"))
    await turn()
    one.dispatcher.handle_lost_node(A, "gone")
    assert isinstance(await lost, RequestFailure)
    assert isinstance(ticket.outcome, RequestFailure)


async def test_closed_link_is_skipped_before_the_view_changes(two: Cluster):
    two.cut = {A}
    tickets = [two.submit() for _ in range(4)]
    assert {ticket.node for ticket in tickets} == {B}


async def test_disconnected_client_cancels_on_the_node(one: Cluster):
    ticket = one.submit()
    _, request = one.last()
    one.dispatcher.close(ticket)
    assert one.sent[-1] == (A, Cancel(request))
    assert ticket.outcome is CANCELLED
    one.speak()
    one.finish()
    assert ticket.outcome is CANCELLED
    assert one.dispatcher.counters.requests == {"cancelled": 1}


async def test_disconnected_client_leaves_the_queue(one: Cluster):
    full(one, A)
    ticket = one.submit()
    one.dispatcher.close(ticket)
    one.dispatcher.close(ticket)
    assert len(one.dispatcher.queue) == 0
    assert one.generates() == []


async def test_frame_of_an_unknown_request_is_ignored(two: Cluster):
    ticket = two.submit()
    owner, request = two.last()
    stranger = B if owner == A else A
    two.say(lambda number: Deltas((Delta(number, 0, (), ((0, "forged"),)),)), node=stranger)
    two.say(lambda number: Finished(number, ("stop",), 1, 1), node=stranger)
    two.say(lambda number: Failed(number, "x", "y"), request=99)
    two.dispatcher.receive(owner, Ping(1))
    assert ticket.outcome is None
    assert taken(ticket) == []
    two.refuse()
    two.say(lambda number: Finished(number, ("stop",), 1, 1), node=owner, request=request)
    assert ticket.outcome is None, "a frame of an earlier node does not change this attempt"


async def test_text_for_a_reader_that_is_stuck_is_bounded():
    cluster = Cluster(A, slow_client_bytes=10_000)
    slow, quick = cluster.submit(), cluster.submit()
    first, second = (frame.request for _, frame in cluster.generates())
    for _ in range(100):
        cluster.dispatcher.receive(A, Deltas(tuple(Delta(one, 0, (1,), ((0, "x" * 50),)) for one in (first, second))))
        taken(quick)
    assert slow.outcome is SLOW
    assert quick.outcome is None
    assert (A, Cancel(first)) in cluster.sent
    assert isinstance(slow.answer, StreamedAnswer)
    assert slow.answer.pending == []
    assert cluster.dispatcher.counters.slow_clients == 1
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_client_without_progress_is_cancelled():
    cluster = Cluster(A, slow_client_seconds=0.05)
    ticket = cluster.submit()
    assert isinstance(ticket.answer, StreamedAnswer)
    ticket.answer.mark_opened()
    cluster.speak()
    async with asyncio.timeout(30):
        while ticket.outcome is None:
            await ticket.answer.wait()
    assert ticket.outcome is SLOW
    cluster.settled()


async def test_silent_stream_gets_a_keepalive_only_after_the_queue():
    cluster = Cluster(A, keepalive_seconds=0.05, queue_timeout_seconds=0.3)
    ticket = cluster.submit()
    assert isinstance(ticket.answer, StreamedAnswer)
    async with asyncio.timeout(30):
        await ticket.answer.wait()
    assert ticket.answer.keepalive_due
    assert ticket.answer.ready
    ticket.answer.take_deltas()
    assert not ticket.answer.keepalive_due
    full(cluster, A)
    waiting = cluster.submit()
    cluster.now += 1
    async with asyncio.timeout(30):
        await waiting.answer.wait()
    assert isinstance(waiting.outcome, Refused)
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_one_frame_wakes_a_reader_once(one: Cluster):
    ticket = one.submit()
    woken: list[int] = []
    answer = ticket.answer
    assert isinstance(answer, StreamedAnswer)
    answer.attach(lambda: woken.append(len(answer.pending)))
    _, request = one.last()
    one.dispatcher.receive(A, Deltas(tuple(Delta(request, choice, (1,), ((0, "x"),)) for choice in range(3))))
    assert woken == [3]


async def test_a_shutdown_ends_the_commands_to_nodes(one: Cluster):
    loading = asyncio.create_task(one.dispatcher.commands.send(LoadModel, A, "node-a", "tiny"))
    await turn()
    one.dispatcher.shutdown("it stops")
    async with asyncio.timeout(10):
        assert await loading == RequestFailure(FailureCode.SHUTTING_DOWN, "it stops")


async def test_a_request_without_room_unloads_the_model_with_the_least_demand():
    cluster = Cluster(A, B)
    cluster.memory = dict.fromkeys((A, B), a_memory(GIB))
    cluster.report()
    views = {
        node.id: replace(
            node,
            models={
                name: a_model(name, loaded=name == own, weights=8 * GIB, load_seconds=10.0)
                for name in ("tiny", "hot", "cold")
            },
        )
        for node, own in zip(cluster.dispatcher.view.nodes, ("hot", "cold"), strict=True)
    }
    cluster.dispatcher.set_view(ClusterView(tuple(views.values())))

    def submit(model: str) -> ActiveRequest:
        spec = RequestSpec(ResourceDemand(model, 10), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)
        return cluster.dispatcher.submit(spec)

    for model, where in (("hot", A), ("hot", A), ("cold", B)):
        request = submit(model)
        assert request.node == where
        cluster.finish()
        cluster.dispatcher.close(request)
    assert submit("tiny").node == B
    cluster.finish()
    cluster.dispatcher.shutdown()


async def test_shutdown_notifies_every_client(two: Cluster):
    running = two.submit()
    full(two, A, B)
    waiting = two.submit()
    two.dispatcher.shutdown()
    for ticket in (running, waiting):
        assert isinstance(ticket.outcome, RequestFailure)
        assert ticket.outcome.code == "shutting_down"
    assert [frame for _, frame in two.sent if isinstance(frame, Cancel)] == [Cancel(1001)]


async def test_decisions_are_kept_and_can_be_explained(two: Cluster):
    two.submit()
    two.refuse()
    decisions = two.dispatcher.history.find_decisions("r0")
    assert len(decisions) == 2
    assert [row["chosen"] for row in decisions[0].to_rows()].count(True) == 1
    assert "refused this request" in str(decisions[1].to_rows())


async def test_find_outage_reason_names_the_cause(one: Cluster):
    assert one.dispatcher.find_outage_reason() == ""
    full(one, A)
    assert "best node node-a has" in one.dispatcher.find_outage_reason()
    one.state[A] = "asleep"
    one.report()
    assert "node-a is asleep" in one.dispatcher.find_outage_reason()
    assert Cluster().dispatcher.find_outage_reason() == "no node has reported a model"


@pytest.mark.parametrize("kind", ["embed", "rerank"])
async def test_a_pool_without_chat_models_has_no_outage(one: Cluster, kind: str):
    one.models = (msgspec.structs.replace(one.models[0], features=(kind,)),)
    one.report()
    assert one.dispatcher.find_outage_reason() == ""


async def test_preview_decides_without_acting(one: Cluster):
    assert isinstance(one.dispatcher.placer.preview(ResourceDemand("tiny", 100)), Placement)
    assert isinstance(one.dispatcher.placer.preview(ResourceDemand("tiny", 0, 10**6)), NoPlacement)
    assert one.sent == []
    one.settled()


async def test_an_estimate_that_fits_nowhere_is_counted_by_a_node_and_answered_at_once(one: Cluster):
    one.memory[A] = a_memory(MIB, cap=4 * GIB)
    one.report()
    ticket = one.submit(choices=16, max_tokens=64)
    assert ticket.outcome is None
    one.dispatcher.close(ticket)
    job = RequestSpec(
        ResourceDemand("tiny", 4 * 4096, None, None, 16), "k", "r", (), GenerationParams(n=16), 0, stream=True
    )
    counted = one.dispatcher.submit(job)
    node, frame = one.sent[-1]
    assert isinstance(frame, Generate)
    assert one.dispatcher.ledger.get_unacknowledged_bytes(node) == 0
    too_large = Refused(RefusalCode.TOO_LARGE, "needs 8.0 GiB, this node can give 2.0 GiB")
    one.dispatcher.receive(node, Refusal(frame.request, too_large, 4000))
    assert isinstance(counted.outcome, Refused)
    assert (counted.outcome.code, counted.outcome.status) == (RefusalCode.TOO_LARGE, 400)
    assert "on an idle node, the largest node can give" in counted.outcome.message


async def test_a_send_that_breaks_leaves_nothing_behind():
    cluster = Cluster(A)
    cluster.broken = True
    with pytest.raises(OSError, match="broken"):
        cluster.submit()
    cluster.settled()
    assert cluster.dispatcher.quotas.count_open("k") == 0, "the key is not charged for it any more"
    assert cluster.dispatcher.counters.requests == {"router_error": 1}


# illegal events


async def test_an_illegal_event_ends_one_request_and_is_counted(two: Cluster):
    wrong, right = two.submit(), two.submit()
    node, number = two.generates()[0]
    two.dispatcher.receive(node, Admitted(number.request, 25))
    assert two.dispatcher.counters.illegal_events == IllegalEventCounts()
    two.dispatcher.receive(node, Admitted(number.request, 25))
    assert isinstance(wrong.outcome, RequestFailure)
    assert wrong.outcome.code == "router_error"
    assert "the request is admitted: NodeAdmitted cannot happen" in wrong.outcome.message
    assert two.sent[-1] == (node, Cancel(number.request)), "its node gets a cancel"
    assert two.dispatcher.counters.illegal_events == IllegalEventCounts() | {"request": 1}
    assert two.dispatcher.counters.requests == {"router_error": 1}
    assert right.outcome is None
    two.finish()
    assert isinstance(right.outcome, Finished)


async def test_a_refusal_of_a_stream_is_illegal(two: Cluster):
    ticket = two.submit()
    two.speak()
    two.refuse()
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "router_error"
    assert len(two.generates()) == 1, "a node that breaks the order gets no second chance with this request"


# chance


def frames(seed: int) -> list[tuple[NodeId, Frame]]:
    """Return all frames of a few requests whose choices and seeds come from this seed alone."""
    draw, numbers = Random(seed).random, itertools.count(1)
    sent: list[tuple[NodeId, Frame]] = []
    dispatcher = Dispatcher(
        lambda node, frame: sent.append((node, frame)) is None,
        RouterSettings(),
        numbers=lambda: (number := next(numbers), number),
        clock=lambda: 100.0,
        draw=draw,
    )
    views = [
        build_node_view(
            Report(0, a_memory(), EngineState("x", "ready"), (a_model(),)),
            node=node,
            name=node,
            state="ready",
            reported_at=100.0,
        )
        for node in (A, B, C)
    ]
    dispatcher.set_view(ClusterView(tuple(views)))
    for number in range(12):
        demand = ResourceDemand("tiny", 100)
        dispatcher.submit(RequestSpec(demand, "k", f"r{number}", (Message("user", "hi"),), GenerationParams(), 0, True))
    dispatcher.shutdown()
    return sent


async def test_all_chance_comes_from_the_injected_source():
    random.seed(1)
    first = frames(7)
    random.seed(2)
    assert frames(7) == first
    seeds = [frame.params.seed for _, frame in first if isinstance(frame, Generate)]
    assert len(set(seeds)) == 12
    assert frames(8) != first


# cached prompts


async def test_short_prompt_has_no_affinity(two: Cluster):
    ticket = two.submit()
    assert ticket.chain is None
    two.finish()
    assert len(two.dispatcher.affinity) == 0


def served_by(cluster: Cluster, *texts: str, session: str = "") -> NodeId:
    messages = tuple(Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts))
    job = RequestSpec(ResourceDemand("tiny", 100_000), "k", "r", messages, GenerationParams(), 0, True, session=session)
    cluster.dispatcher.submit(job)
    cluster.say(lambda number: Admitted(number, 25_000, 0, b"hash"))
    cluster.finish()
    cluster.report()
    return cluster.last()[0]


async def test_all_requests_of_a_conversation_go_to_one_node():
    cluster = Cluster(A, B, C)
    first = served_by(cluster, "x" * 100)
    for other in (A, B, C):
        cluster.memory[other] = a_memory(9 * GIB if other != first else 8 * GIB)
    cluster.report()
    assert served_by(cluster, "another conversation") != first
    assert served_by(cluster, "x" * 100, "y" * 100, "z" * 100) == first
    assert served_by(cluster, "quite another text", session="s") == served_by(cluster, "summary of it", session="s")


async def test_after_its_engine_died_a_node_is_like_any_other():
    cluster = Cluster(A, B)
    first = served_by(cluster, "x" * 100)
    cluster.memory[B if first == A else A] = a_memory(9 * GIB)
    cluster.report()
    assert served_by(cluster, "x" * 100) == first
    cluster.engine = EngineState("x", "ready", restarts=1)
    cluster.report()
    assert served_by(cluster, "x" * 100) != first


@pytest.mark.parametrize(("store", "stays"), [("disk-1", True), ("disk-2", False)])
async def test_a_new_engine_with_the_same_disk_cache_keeps_its_prefixes(store: str, stays: bool):
    cluster = Cluster(A, B)
    cluster.engine = EngineState("x", "ready", cache=CacheState(store="disk-1"))
    cluster.report()
    first = served_by(cluster, "x" * 100)
    cluster.memory[B if first == A else A] = a_memory(9 * GIB)
    cluster.engine = EngineState("x", "ready", restarts=1, cache=CacheState(store=store))
    cluster.report()
    assert (served_by(cluster, "x" * 100) == first) is stays


# Limits of a key


async def test_every_end_of_a_request_releases_the_limits_of_its_key(two: Cluster):
    two.limits["k"] = KeyLimits(concurrency=1, waiting=0)
    first = two.submit()
    second = two.submit()
    assert isinstance(second.outcome, Refused)
    assert second.outcome.code is RefusalCode.RATE_LIMITED
    two.dispatcher.close(first)
    assert two.dispatcher.quotas.count_open("k") == 0
    third = two.submit()
    two.finish()
    assert isinstance(third.outcome, Finished)
    assert two.dispatcher.quotas.count_open("k") == 0
    two.memory = dict.fromkeys((A, B), a_memory(0))
    two.report()
    full = two.submit()
    assert isinstance(full.outcome, Refused)
    assert full.outcome.code is RefusalCode.OVER_SHARE, "it may not wait"
    assert two.dispatcher.quotas.count_open("k") == 0
    used = two.dispatcher.usage.drain()["k", "tiny"]
    assert (used.requests, used.failed, used.prompt_tokens, used.completion_tokens) == (3, 2, 25, 3)
    two.settled()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("end", ["left", "slow", "lost", "engine", "stopped"])
async def test_cancelled_request_is_charged_prompt_and_generated_tokens(one: Cluster, end: str, stream: bool):
    one.limits |= {"k": KeyLimits(tokens_per_minute=250)}
    ticket = one.submit(stream=stream, max_tokens=500)
    one.say(lambda number: Admitted(number, 200, 50))
    for _ in range(30):
        one.speak()
    if end == "left":
        one.dispatcher.close(ticket)
    elif end == "slow" and isinstance(ticket.answer, StreamedAnswer):
        ticket.answer.mark_opened()
        ticket.answer.set_blocked(True)
        for _ in range(int(one.settings.slow_client_seconds / SWEEP_INTERVAL_SECONDS) + 2):
            one.dispatcher.sweep()
    elif end == "lost":
        one.dispatcher.handle_lost_node(A, "the link ended")
    elif end == "engine":
        one.say(lambda number: Failed(number, "bad_row", "it broke"))
    else:
        one.dispatcher.shutdown()
    assert ticket.outcome is not None
    used = one.dispatcher.usage.drain()["k", "tiny"]
    assert (used.requests, used.failed, used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (
        1,
        1,
        200,
        50,
        30,
    )
    story = one.dispatcher.history.records[-1]
    assert (story.prompt_tokens, story.cached_tokens, story.completion_tokens) == (200, 50, 30)
    over = one.submit(max_tokens=1000)
    assert isinstance(over.outcome, Refused)
    assert over.outcome.retry_after == pytest.approx(60 * 230 / 250)
    assert one.dispatcher.quotas.count_open("k") == 0


async def test_ids_that_are_not_remembered_are_counted(one: Cluster):
    job = RequestSpec(
        ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(max_tokens=4), 0, True
    )
    ticket = one.dispatcher.submit(job)
    one.say(lambda number: Admitted(number, 20))
    for _ in range(6):
        one.speak()
    ticket.tokens.discard_excess()
    one.speak()
    one.speak(choice=7)
    one.dispatcher.close(ticket)
    assert one.dispatcher.usage.drain()["k", "tiny"].completion_tokens == 8


async def test_request_cancelled_before_prefill_is_not_charged(one: Cluster):
    one.limits |= {"k": KeyLimits(tokens_per_minute=1000)}
    one.dispatcher.close(one.submit(max_tokens=900))
    assert one.dispatcher.usage.drain()["k", "tiny"].prompt_tokens == 0
    assert one.submit(max_tokens=1000).outcome is None


async def test_a_key_that_is_bound_to_labels_meets_only_nodes_that_have_them(two: Cluster):
    two.limits |= {"k": KeyLimits(labels=("lab",))}
    ticket = two.submit()
    assert isinstance(ticket.outcome, Refused)
    assert ticket.outcome.code is RefusalCode.NOT_ALLOWED
    assert "labels that this API key is bound to (lab)" in ticket.outcome.message
    two.labels = {B: frozenset({"lab", "home"})}
    two.report()
    for _ in range(4):
        two.submit()
    assert {node for node, _ in two.generates()} == {B}


# loss of a node


async def test_drain_migrates_requests_and_reports_an_empty_node(two: Cluster):
    ticket = two.submit()
    where, _ = two.last()
    two.speak("hello")
    emptied = asyncio.create_task(two.dispatcher.wait_drained(where, 5.0))
    await turn()
    other, _ = two.last()
    assert other != where
    assert await emptied == 0
    assert two.dispatcher.count_in_flight(where) == 0
    assert ticket.outcome is None
    two.finish()
    assert isinstance(ticket.outcome, Finished)
    two.settled()


async def test_drain_migrates_remaining_requests_when_there_is_room(two: Cluster):
    two.submit()
    where, _ = two.last()
    two.speak("hello")
    other = B if where == A else A
    two.memory[other] = a_memory(0)
    two.report()
    assert await two.dispatcher.wait_drained(where, 0.01) == 1, "it runs on where it is"
    first, second = (asyncio.create_task(two.dispatcher.wait_drained(where, 5.0)) for _ in range(2))
    await turn()
    two.memory[other] = a_memory()
    two.report()
    assert await first == await second == 0
    assert two.last()[0] == other


@pytest.mark.parametrize("change", [{"draining": True}, {"state": "draining"}])
async def test_requests_leave_a_node_whose_report_or_state_says_that_it_drains(two: Cluster, change: dict[str, Any]):
    request = two.submit()
    where, _ = two.last()
    nodes = (replace(node, **change) if node.id == where else node for node in two.dispatcher.view.nodes)
    two.dispatcher.set_view(ClusterView(tuple(nodes)))
    await turn()
    assert request.node == (B if where == A else A)
    two.finish()


async def test_a_node_that_gave_a_request_up_takes_it_only_after_its_return(two: Cluster):
    request = two.submit()
    where, _ = two.last()
    full(two, B if where == A else A)
    two.say(lambda number: Failed(number, FailureCode.NODE_STOPPING, "it stops"))
    two.report()
    await turn()
    assert (request.node, request.tried.lost) == (None, {where}), "it stops, although its report says ready"
    for state in ("lost", "ready"):
        two.state[where] = state
        two.report()
        await turn()
    assert request.node == where
    two.finish()


async def test_requests_after_the_end_of_a_drain_stay_where_they_are(two: Cluster):
    two.submit()
    where, _ = two.last()
    other = B if where == A else A
    two.memory[other] = a_memory(0)
    two.report()
    assert await two.dispatcher.wait_drained(where, 0.0) == 1
    two.memory[other] = a_memory()
    two.report()
    await turn()
    assert (two.last()[0], len(two.generates())) == (where, 1)
    two.finish()
    two.settled()


async def test_an_uncordon_ends_the_waits_of_a_drain_and_the_node_keeps_its_requests(two: Cluster):
    """The client of a long drain may be gone: its wait must not take new requests from the node."""
    two.submit()
    where, _ = two.last()
    other = B if where == A else A
    full(two, other)

    def cordon(*, on: bool) -> None:
        nodes = (replace(node, cordoned=on and node.id == where) for node in two.dispatcher.view.nodes)
        two.dispatcher.set_view(ClusterView(tuple(nodes)))

    cordon(on=True)
    drains = [asyncio.create_task(two.dispatcher.wait_drained(where, 3600.0)) for _ in range(2)]
    await turn()
    cordon(on=True)
    await turn()
    assert not any(drain.done() for drain in drains)
    cordon(on=False)
    async with asyncio.timeout(10):
        assert await asyncio.gather(*drains) == [1, 1]
    roomy(two, other)
    await turn()
    assert (two.last()[0], len(two.generates())) == (where, 1)
    two.finish()
    two.settled()


async def test_a_wait_that_is_over_leaves_the_other_waits_for_the_node(one: Cluster):
    one.submit()
    longer = asyncio.create_task(one.dispatcher.wait_drained(A, 3600.0))
    await turn()
    assert await one.dispatcher.wait_drained(A, 0.0) == 1
    one.finish()
    async with asyncio.timeout(10):
        assert await longer == 0


async def test_drain_completes_when_requests_finish(one: Cluster):
    one.submit()
    waits = asyncio.create_task(one.dispatcher.wait_drained(A, 5.0))
    await turn()
    one.finish()
    assert await waits == 0
    assert await one.dispatcher.wait_drained(A, 5.0) == 0


# counters


async def test_every_request_on_a_lost_node_is_counted_as_lost(two: Cluster):
    full(two, B)
    for _ in range(3):
        two.submit()
    roomy(two, B)
    two.dispatcher.handle_lost_node(A, "connection ended")
    counters = two.dispatcher.counters
    assert (counters.nodes_lost, counters.attempts, counters.retries) == (3, 6, 3)
    assert counters.placements == {A: 3, B: 3}


async def test_time_to_first_token_counts_from_arrival_and_the_queue_from_the_queue(one: Cluster):
    one.submit()
    one.now += 3.0
    one.refuse()
    one.now += 2.0
    one.report()
    await turn()
    one.say(lambda number: Admitted(number, 25, 5))
    one.now += 1.0
    one.speak()
    one.finish()
    counters = one.dispatcher.counters
    ttft = counters.models["tiny"].ttft
    assert (sum(ttft.counts), round(ttft.total, 6)) == (1, 6.01)
    assert (sum(counters.queue_wait.counts), round(counters.queue_wait.total, 6)) == (1, 2.01)
    assert (counters.queue_entries, round(counters.queue_seconds, 6)) == (1, 2.01)
    assert round(counters.duration_seconds, 6) == 6.01
    assert counters.nodes[A].prompt_tokens == 25


async def test_a_step_of_two_streams_is_two_gaps_however_many_tokens_it_has(one: Cluster):
    tickets = [one.submit(), one.submit()]
    for _ in range(3):
        one.now += 0.5
        one.say(lambda _: Deltas(tuple(Delta(ticket.attempt, 0, (1, 2, 3), ((0, "x"),)) for ticket in tickets)))
        assert [taken(ticket) for ticket in tickets] == [["x"], ["x"]]
    itl = one.dispatcher.counters.models["tiny"].itl
    assert (sum(itl.counts), itl.total) == (4, 2.0)
    assert one.dispatcher.counters.nodes[A].generated_tokens == 18


async def test_count_leaks_counts_reservations_and_holds_without_a_request():
    cluster = Cluster(A)
    cluster.submit()
    assert cluster.dispatcher.count_leaks() == 0
    cluster.dispatcher.ledger.reserve(A, 77, 77, MIB, 1, 0, 0.0, 1)
    assert cluster.dispatcher.count_leaks() == 1
    cluster.dispatcher.ledger.hold_memory(88, A, MIB)
    assert cluster.dispatcher.count_leaks() == 2
    cluster.dispatcher.ledger.release(77)
    cluster.dispatcher.ledger.drop_hold(88)
    assert cluster.dispatcher.count_leaks() == 0
    cluster.dispatcher.shutdown()
    cluster.settled()


def list_parts(root: object) -> list[object]:
    """Return all collections and parts of the router that belong to an object, without the history of requests."""
    seen, left = {id(root): root}, [root]
    while left:
        for part in gc.get_referents(left.pop()):
            known = type(part).__module__.startswith("router.") and not isinstance(part, DecisionLog | type)
            if (known or isinstance(part, dict | list | tuple | set | deque)) and id(part) not in seen:
                seen[id(part)] = part
                left.append(part)
    return list(seen.values())


async def test_a_node_that_is_forgotten_is_in_no_part_of_the_dispatcher(two: Cluster):
    gone = NodeId("the-node-that-goes")
    two.nodes = (A, gone)
    two.memory = {A: a_memory(MIB), gone: a_memory()}
    two.report()
    request = two.submit()
    assert request.node == gone
    two.speak()
    two.submit()
    two.refuse(room=1)
    two.say(lambda number: Failed(number, FailureCode.ENGINE_ERROR, "broken"), request=request.attempt)
    two.dispatcher.handle_lost_node(gone, "gone")
    two.nodes = (A,)
    two.report()
    two.dispatcher.remove_node(gone)
    await turn()

    def find_node() -> list[object]:
        maps = [part for part in list_parts(two.dispatcher) if isinstance(part, dict | set)]
        return [part for part in maps if gone in part or any(isinstance(key, tuple) and gone in key for key in part)]

    assert find_node() == []


async def test_ended_requests_leave_nothing_in_the_dispatcher(two: Cluster):
    kept = two.submit()
    sizes: list[int] = []
    for _ in range(3):
        for number in range(20):
            request = two.submit(key=f"k{number}")
            two.speak()
            two.dispatcher.sweep()
            two.finish()
            two.dispatcher.close(request)
        two.dispatcher.sweep()
        two.dispatcher.usage.drain()
        sizes.append(len(list_parts(two.dispatcher)))
    assert sizes[1] == sizes[2]
    two.dispatcher.close(kept)


async def test_a_node_that_is_forgotten_leaves_no_counts(two: Cluster):
    two.submit()
    two.speak()
    first, _ = two.last()
    two.finish()
    counters = two.dispatcher.counters
    assert (set(counters.placements), set(counters.nodes)) == ({first}, {first})
    two.dispatcher.remove_node(first)
    assert (counters.placements, counters.nodes) == ({}, {})


async def test_the_time_of_a_decision_is_measured():
    ticks = iter(range(1000, 10_000))
    dispatcher = Dispatcher(lambda *_: True, RouterSettings(), numbers=lambda: (1, 1), clock=lambda: float(next(ticks)))
    before = dispatcher.counters.placement.tally()
    ticket = dispatcher.submit(
        RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)
    )
    after = dispatcher.counters.placement.tally()
    taken = sum(after.counts) - sum(before.counts)
    assert taken == 1
    assert 1.0 <= after.total - before.total < 10.0, "readings of the clock within one decision"
    dispatcher.close(ticket)
    dispatcher.shutdown()


async def test_an_ended_request_is_open_for_a_drain_until_its_reader_closes_it(one: Cluster):
    assert one.dispatcher.idle
    ended, running = one.submit(), one.submit()
    one.say(lambda number: Finished(number, ("stop",), 25, 3), request=ended.attempt)
    assert one.dispatcher.list_open_requests() == [running]
    one.dispatcher.close(running)
    assert one.dispatcher.list_open_requests() == []
    assert not one.dispatcher.idle
    one.dispatcher.close(ended)
    assert one.dispatcher.idle


async def test_queued_requests_are_counted(one: Cluster):
    full(one, A)
    one.submit()
    assert one.dispatcher.count_queued() == 1
    roomy(one, A)
    await turn()
    assert one.dispatcher.count_queued() == 0
    one.finish()


async def test_a_stopping_dispatcher_is_an_outage_and_takes_no_request(one: Cluster):
    running = one.submit()
    stopping = asyncio.create_task(one.dispatcher.drain(60.0))
    await turn()
    assert one.dispatcher.find_outage_reason() == STOPPING
    one.limits["late"] = KeyLimits(requests_per_minute=1)
    refused = one.submit(key="late")
    assert refused.outcome == RequestFailure(FailureCode.SHUTTING_DOWN, STOPPING)
    assert [rate.remaining for rate in one.dispatcher.quotas.list_rates("late", one.now)] == [1]
    assert one.dispatcher.quotas.count_open("late") == 0
    one.dispatcher.close(refused)
    one.finish()
    one.dispatcher.close(running)
    async with asyncio.timeout(10):
        await stopping
    assert isinstance(running.outcome, Finished)


async def test_a_drain_that_takes_too_long_ends_the_requests_on_their_nodes(one: Cluster):
    request = one.submit()
    one.speak()
    await one.dispatcher.drain(0.001)
    assert isinstance(request.outcome, RequestFailure)
    assert request.outcome.code == FailureCode.SHUTTING_DOWN
    assert one.sent[-1] == (A, Cancel(one.last()[1]))
    one.dispatcher.close(request)


async def test_a_queued_request_stays_queued_while_its_node_has_no_link(one: Cluster):
    full(one, A)
    request = one.submit()
    one.cut = {A}
    roomy(one, A)
    await turn()
    assert (request.node, one.dispatcher.count_queued()) == (None, 1)
    one.cut.clear()
    one.report()
    await turn()
    assert (request.node, one.dispatcher.count_queued()) == (A, 0)
    one.finish()


async def test_a_drain_waits_for_the_last_request_of_the_node(one: Cluster):
    requests = [one.submit(), one.submit()]
    draining = asyncio.create_task(one.dispatcher.wait_drained(A, 30.0))
    for request in requests:
        await turn()
        assert not draining.done()
        one.say(lambda number: Finished(number, ("stop",), 25, 3), request=request.attempt)
    assert await draining == 0


@pytest.mark.parametrize("closed", [False, True])
async def test_sweeps_end_with_the_last_request(closed: bool):
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 100.0

    settings = RouterSettings(slow_client_seconds=0.004)
    dispatcher = Dispatcher(lambda *_: True, settings, numbers=lambda: (1, 1), clock=clock)
    dispatcher.set_view(ClusterView((Cluster(A).seen(A),)))
    request = dispatcher.submit(
        RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)
    )
    before = reads
    async with asyncio.timeout(5):
        while reads == before:  # noqa: ASYNC110  a sweep has no event
            await asyncio.sleep(0.001)
    if closed:
        dispatcher.close(request)
    else:
        dispatcher.shutdown()
    await asyncio.sleep(0.003)
    before = reads
    await asyncio.sleep(0.01)
    assert reads == before
    dispatcher.close(request)
    dispatcher.shutdown()
