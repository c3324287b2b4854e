"""Answers that resume on another node: for any failures of nodes, a client reads each token once and in order."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.request import RequestFailure, RequestSpec
from router.placement.candidate import ResourceDemand
from router.placement.recovery import (
    MAX_LOSSES,
    MAX_SILENCE_SECONDS,
    MIN_SILENCE_SECONDS,
    LossKind,
    can_recover,
    classify_loss,
    compute_silence_limit_seconds,
    is_fault,
)
from tests.effort import scale_examples
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, C, Cluster, full, roomy, taken, turn
from wire.capacity.arithmetic import KV_GROWTH_TOKENS
from wire.frames import Admitted, Cancel, Delta, Deltas, Failed, Finished, Generate, GenerationParams, Refusal
from wire.identity import NodeId
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import Model
from wire.state_machine import IllegalEventCounts


@pytest.fixture
async def two():
    cluster = Cluster(A, B)
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


def say(cluster: Cluster, *tokens: int, choice: int = 0) -> None:
    """Send tokens of the newest attempt; their texts are their numbers."""
    for token in tokens:
        cluster.say(lambda number, token=token: Deltas((Delta(number, choice, (token,), ((0, f"{token} "),)),)))


def other(cluster: Cluster) -> NodeId:
    return B if cluster.last()[0] == A else A


def lose(cluster: Cluster) -> None:
    cluster.dispatcher.handle_lost_node(cluster.last()[0], "connection ended")


def engine_lost(cluster: Cluster) -> None:
    cluster.say(lambda number: Failed(number, "engine_lost", "it ended by SIGKILL"))


def short_of_memory(cluster: Cluster) -> None:
    cluster.say(lambda number: Failed(number, "no_headroom", "needs 2 GiB, headroom is 1 GiB"))


def generate(cluster: Cluster) -> Generate:
    return cluster.generates()[-1][1]


def resumes(cluster: Cluster) -> list[tuple[tuple[int, ...], ...]]:
    return [frame.resume for _, frame in cluster.generates()]


# the rules


def test_the_rules():
    assert classify_loss("engine_crashed") is LossKind.OWN_CALL
    assert classify_loss("engine_lost") is LossKind.ENGINE
    assert classify_loss("node_stopping") is LossKind.NODE
    assert classify_loss("no_headroom") is classify_loss("memory_pressure") is LossKind.MEMORY
    assert classify_loss("engine_error") is None
    assert [can_recover(LossKind.MEMORY, losses, 1) for losses in (MAX_LOSSES, MAX_LOSSES + 1)] == [True, False]
    assert not can_recover(LossKind.OWN_CALL, 0, 1)
    assert [can_recover(LossKind.ENGINE, 0, crashes) for crashes in (1, 2)] == [True, False]
    assert [can_recover(LossKind.NODE, losses, 1) for losses in (MAX_LOSSES, MAX_LOSSES + 1)] == [True, False]
    assert [is_fault(code) for code in ("engine_lost", "engine_error", "no_headroom", "node_stopping")] == [
        True,
        True,
        False,
        False,
    ]
    assert not is_fault("grammar_failed"), "the client sent it"
    assert [compute_silence_limit_seconds(expected) for expected in (0.0, 5.0, 99.0)] == [
        MIN_SILENCE_SECONDS,
        5.0,
        MAX_SILENCE_SECONDS,
    ]


# Requests that resume


@pytest.mark.parametrize("fall", [lose, engine_lost, short_of_memory])
@pytest.mark.parametrize("read", [True, False])
async def test_stream_resumes_after_the_received_tokens(two: Cluster, fall: Callable[[Cluster], None], read: bool):
    ticket = two.submit()
    two.say(lambda number: Admitted(number, 25))
    first = two.last()
    say(two, 1, 2)
    got = taken(ticket) if read else []
    fall(two)
    assert two.last()[0] != first[0]
    assert generate(two).resume == ((1, 2),)
    assert generate(two).params == two.generates()[0][1].params
    two.say(lambda number: Deltas((Delta(number, 0, (9,), ((0, "late "),)),)), *first)
    two.say(lambda number: Finished(number, ("stop",), 25, 9), *first)
    say(two, 3)
    two.say(lambda number: Finished(number, ("stop",), 25, 3))
    assert got + taken(ticket) == ["1 ", "2 ", "3 "]
    assert ticket.outcome == Finished(two.last()[1], ("stop",), 25, 3)
    assert two.dispatcher.counters.resumes == 1


async def test_whole_answer_resumes_on_another_node(two: Cluster):
    ticket = two.submit(stream=False)
    say(two, 1, 2)
    lose(two)
    assert generate(two).resume == ((1, 2),)
    say(two, 3)
    two.finish()
    assert isinstance(ticket.answer, CollectedAnswer)
    assert ticket.answer.build_answer().texts == {(0, 0): "1 2 3 "}


async def test_each_choice_resumes_from_its_own_token(two: Cluster):
    job = two.submit().spec
    job = type(job)(job.demand, "k", "r", job.messages, type(job.params)(n=3, seed=7), 0, stream=True)
    two.dispatcher.submit(job)
    say(two, 1, 2)
    say(two, 5, choice=2)
    lose(two)
    assert ((1, 2), (), (5,)) in resumes(two)
    assert two.generates()[-1][1].params.seed in (7, 2**52)


async def test_resumed_answer_counts_known_tokens_in_its_need(two: Cluster):
    ticket = two.submit()
    two.say(lambda number: Admitted(number, 25))
    say(two, *range(200))
    lose(two)
    assert generate(two).expected == 200 + KV_GROWTH_TOKENS
    assert ticket.demand.known_tokens == 200


async def test_resume_tries_the_next_node_after_a_refusal():
    cluster = Cluster(A, B, C)
    ticket = cluster.submit()
    say(cluster, 1)
    taken(ticket)
    lose(cluster)
    cluster.refuse()
    assert resumes(cluster) == [(), ((1,),), ((1,),)]
    assert len({node for node, _ in cluster.generates()}) == 3
    cluster.finish()
    assert isinstance(ticket.outcome, Finished)
    cluster.settled()


# Nodes on which they resume


def models(cluster: Cluster, **by_node: Model) -> None:
    """Set the models of nodes."""
    plain = cluster.seen

    def view(node: NodeId):
        cluster.models = (by_node.get(node, a_model()),)
        return plain(node)

    cluster.seen = view
    cluster.report()


async def test_resume_needs_the_same_model_version():
    cluster = Cluster(A, B, C)
    models(cluster, b=a_model(fingerprint="another"), c=a_model(prefill_speed=1.0))
    ticket = cluster.submit()
    assert cluster.last()[0] == A
    say(cluster, 1)
    taken(ticket)
    lose(cluster)
    assert cluster.last()[0] == C, "however slow it is"
    assert [frame.fingerprint for _, frame in cluster.generates()] == ["", "tiny-1"]
    lose(cluster)
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "node_lost"
    assert len(cluster.generates()) == 2
    cluster.settled()


async def test_an_unread_answer_may_start_again_with_another_model(two: Cluster):
    models(two, b=a_model(fingerprint="another", prefill_speed=1.0))
    ticket = two.submit(stream=False)
    say(two, 1)
    lose(two)
    assert resumes(two) == [(), ()]
    say(two, 7)
    two.finish()
    assert isinstance(ticket.answer, CollectedAnswer)
    assert ticket.answer.build_answer().texts == {(0, 0): "7 "}


async def test_resume_refuses_a_model_without_a_fingerprint(two: Cluster):
    two.models = (a_model(fingerprint=""),)
    two.report()
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    lose(two)
    assert isinstance(ticket.outcome, RequestFailure)
    assert len(two.generates()) == 1


async def test_a_node_that_sends_unrequested_frames_is_rejected(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    say(two, 2, choice=5)
    taken(ticket)
    lose(two)
    assert isinstance(ticket.outcome, RequestFailure)


async def test_token_record_is_bounded_by_max_tokens(two: Cluster):
    params = GenerationParams(max_tokens=4)
    ticket = two.dispatcher.submit(RequestSpec(ResourceDemand("tiny", 100), "k", "r", (), params, 0, stream=True))
    say(two, *range(6))
    ticket.tokens.discard_excess()
    assert ticket.tokens.ids == []
    assert not ticket.resumable


# the limits


async def test_crash_ends_the_request_in_the_forward(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    two.say(lambda number: Failed(number, "engine_crashed", "it ended by SIGABRT"))
    assert ticket.outcome == RequestFailure("engine_crashed", "it ended by SIGABRT")
    assert len(two.generates()) == 1


async def test_failed_request_is_not_retried(two: Cluster):
    ticket = two.submit()
    two.say(lambda number: Failed(number, "engine_error", "its sampling failed"))
    assert ticket.outcome == RequestFailure("engine_error", "its sampling failed")
    assert len(two.generates()) == 1


async def test_a_begun_request_survives_one_crash_only(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    engine_lost(two)
    say(two, 2)
    engine_lost(two)
    assert ticket.outcome == RequestFailure("engine_crashed", "it ended by SIGKILL")
    assert len(two.generates()) == 2


async def test_a_begun_request_survives_three_lost_nodes_and_no_more():
    cluster = Cluster(*(NodeId(f"n{number}") for number in range(6)))
    ticket = cluster.submit()
    for token in range(4):
        assert ticket.outcome is None
        say(cluster, token)
        taken(ticket)
        lose(cluster)
    assert isinstance(ticket.outcome, RequestFailure)
    assert [len(one[0]) if one else 0 for one in resumes(cluster)] == [0, 1, 2, 3]
    cluster.settled()


# without room


async def test_lost_answer_is_queued_first_and_resumes_with_room(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    full(two, other(two))
    lose(two)
    assert ticket.entry is not None
    where = other(two)
    assert two.dispatcher.ledger.find_hold_node(ticket.number) == where
    assert len(two.generates()) == 1
    roomy(two, where)
    await turn()
    assert resumes(two) == [(), ((1,),)]


async def test_answer_resumes_on_its_node_when_memory_is_free_again(two: Cluster):
    """The only Mac with this model: its other requests end, and the begun one is not lost."""
    begun = two.submit()
    where = begun.node
    say(two, 1)
    taken(begun)
    full(two, A, B)
    two.say(lambda number: Failed(number, "memory_pressure", "it stood over its cap"))
    assert begun.entry is not None
    assert begun.outcome is None
    assert where is not None
    roomy(two, where)
    await turn()
    assert generate(two).resume == ((1,),)
    assert two.last()[0] == where
    two.finish()


async def test_an_answer_that_never_has_room_ends_with_the_node_s_own_reason(two: Cluster):
    ticket = two.submit()
    for token in range(MAX_LOSSES + 1):
        say(two, token)
        taken(ticket)
        two.report()
        two.say(lambda number: Failed(number, "no_headroom", "needs 2 GiB, headroom is 1 GiB"))
    assert ticket.outcome == RequestFailure("no_headroom", "needs 2 GiB, headroom is 1 GiB")
    assert two.dispatcher.breakers.list_barred_nodes(two.now) == []


async def test_full_queue_accepts_begun_answers():
    cluster = Cluster(A, B, queue_limit=1)
    begun = [cluster.submit() for _ in range(4)]
    for number, (node, frame) in enumerate(cluster.generates()):
        delta = Delta(frame.request, 0, (number,), ((0, "x"),))
        cluster.dispatcher.receive(node, Deltas((delta,)))
        taken(begun[number])
    full(cluster, A, B)
    cluster.dispatcher.handle_lost_node(A, "gone")
    assert all(ticket.outcome is None for ticket in begun)
    assert len(cluster.dispatcher.queue) == sum(ticket.node is None for ticket in begun) >= 2
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_the_deadline_ends_it_honestly():
    cluster = Cluster(A, B, queue_timeout_seconds=0.05)
    ticket = cluster.submit()
    say(cluster, 1)
    taken(ticket)
    full(cluster, A, B)
    lose(cluster)
    cluster.now += 1
    cluster.report()
    async with asyncio.timeout(30):
        while ticket.outcome is None:
            await ticket.answer.wait()
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "node_lost"
    assert "was lost (" in ticket.outcome.message
    assert "no other node can resume the answer: needs" in ticket.outcome.message
    cluster.settled()


async def test_an_unread_request_is_refused_at_the_deadline_so_that_it_may_be_sent_again():
    cluster = Cluster(A, B, queue_timeout_seconds=0.05)
    ticket = cluster.submit(stream=False)
    say(cluster, 1)
    full(cluster, A, B)
    lose(cluster)
    cluster.now += 1
    cluster.report()
    assert isinstance(ticket.answer, CollectedAnswer)
    outcome = await ticket.answer.wait_for_outcome()
    assert isinstance(outcome, Refused)
    assert outcome.code is RefusalCode.NO_ROOM
    cluster.settled()


# migration


async def test_a_node_that_drains_is_emptied_and_no_client_notices(two: Cluster):
    ticket = two.submit()
    first = two.last()
    say(two, 1)
    two.state[first[0]] = "draining"
    two.report(first[0])
    await turn()
    assert two.last()[0] == other_than(first[0])
    assert two.sent[-1] == (first[0], Cancel(first[1])), "only then it is cancelled"
    two.say(lambda number: Deltas((Delta(number, 0, (2,), ((0, "late "),)),)), *first)
    say(two, 2)
    two.finish()
    assert taken(ticket) == ["1 ", "2 "]
    assert (two.dispatcher.counters.moves, two.dispatcher.counters.resumes) == (1, 1)


def other_than(node: NodeId) -> NodeId:
    return B if node == A else A


async def test_drain_migrates_a_request_later_if_no_node_has_room(two: Cluster):
    tickets = [two.submit(), two.submit(stream=False)]
    for ticket in tickets:
        if ticket.node != A:
            two.dispatcher.migrate_node(B)
    assert {ticket.node for ticket in tickets} == {A}
    full(two, B)
    before = list(two.sent)
    assert two.dispatcher.migrate_node(A) == 2
    assert two.sent == before
    roomy(two, B)
    two.cut = {B}
    assert two.dispatcher.migrate_node(A) == 2, "the link is gone"
    assert {ticket.node for ticket in tickets} == {A}
    two.dispatcher.ledger.check()
    two.cut = set()
    two.report()
    assert two.dispatcher.migrate_node(A) == 0
    assert {ticket.node for ticket in tickets} == {B}
    assert two.dispatcher.count_in_flight(A) == 0


async def test_moves_count_as_losses(two: Cluster):
    ticket = two.submit()
    for _ in range(MAX_LOSSES):
        two.dispatcher.migrate_node(two.last()[0])
    assert ticket.attempts == 1 + MAX_LOSSES
    assert two.dispatcher.migrate_node(two.last()[0]) == 1
    assert ticket.outcome is None


async def silence(cluster: Cluster, node: NodeId, seconds: float) -> None:
    """Make a node suspect for `seconds`, in two sweeps."""
    cluster.state[node] = "suspect"
    reported_at = cluster.now
    view = cluster.dispatcher.view
    cluster.report(node)
    cluster.dispatcher.set_view(
        type(view)(
            tuple(
                type(one)(
                    one.id,
                    one.name,
                    one.state,
                    reported_at=reported_at,
                    memory=one.memory,
                    engine=one.engine,
                    models=one.models,
                )
                if one.id == node
                else one
                for one in cluster.dispatcher.view.nodes
            )
        )
    )
    cluster.now = reported_at + seconds
    cluster.report(other_than(node))
    cluster.dispatcher.sweep()
    cluster.now += 0.01
    cluster.dispatcher.sweep()


async def test_each_silence_counts_from_its_second_sweep(two: Cluster):
    ticket = two.submit()
    node, _ = two.last()
    say(two, 1)
    for state in ("suspect", "ready", "suspect"):
        two.state[node] = state
        two.report(node)
        two.now += 3.3 if two.dispatcher.count_in_flight(node) else 0.0
        two.report(other_than(node))
        two.dispatcher.sweep()
        assert ticket.node == node, "one sweep may be late"
    two.now += 0.01
    two.dispatcher.sweep()
    assert ticket.node == other_than(node)
    two.finish()


async def test_streams_of_a_silent_node_resume_before_it_is_lost(two: Cluster):
    ticket = two.submit()
    first = two.last()
    say(two, 1)
    await silence(two, first[0], 3.3)
    assert two.last()[0] == other_than(first[0])
    assert generate(two).resume == ((1,),)
    two.say(lambda number: Deltas((Delta(number, 0, (2,), ((0, "late "),)),)), *first)
    assert taken(ticket) == ["1 "]


async def test_long_answer_waits_longer_for_a_silent_node(two: Cluster):
    ticket = two.submit()
    first = two.last()
    say(two, 1)
    two.models = (a_model(prefill_speed=5.0),)
    two.report()
    await silence(two, first[0], 3.3)
    assert len(two.generates()) == 1, "it would take five seconds to write it again"
    await silence(two, first[0], 8.0)
    assert len(two.generates()) == 2
    assert ticket.node == other_than(first[0])


async def test_returning_node_can_resume_its_lost_requests(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    first = two.last()[0]
    full(two, other(two))
    two.state[first] = "lost"
    two.report(first)
    lose(two)
    assert ticket.entry is not None
    two.state[first] = "joining"
    two.report(first)
    two.state[first] = "ready"
    two.report(first)
    await turn()
    assert two.last()[0] == first
    assert generate(two).resume == ((1,),)


async def test_an_older_link_s_end_loses_nothing():
    cluster = Cluster(A)
    ticket = cluster.submit()
    say(cluster, 1)
    taken(ticket)
    cluster.say(lambda number: Failed(number, "link_lost", "the older of two links to the node was lost"))
    assert resumes(cluster) == [(), ((1,),)]
    cluster.finish()
    cluster.settled()


async def test_goodbye_of_a_stopping_node_resumes_its_requests(two: Cluster):
    ticket = two.submit()
    say(two, 1)
    taken(ticket)
    two.say(lambda number: Failed(number, "node_stopping", "it stops"))
    assert generate(two).resume == ((1,),)


# the breaker


async def test_failing_node_gets_no_requests_until_a_probe_succeeds(two: Cluster):
    full(two, B)
    for _ in range(3):
        two.submit()
        assert two.last()[0] == A
        two.say(lambda number: Failed(number, "engine_error", "the prefill of its prompt failed"))
        two.now += 1.5
        two.report()
    waiting = two.submit()
    assert waiting.entry is not None
    assert "node-a is failing" in two.dispatcher.find_outage_reason() or two.dispatcher.find_outage_reason()
    two.now += 5
    two.report()
    await turn()
    assert waiting.node == A
    second = two.submit()
    assert second.entry is not None, "one probe at a time"
    two.finish()
    await turn()
    assert second.node == A


async def test_refusals_never_open_a_breaker(two: Cluster):
    for _ in range(20):
        two.submit()
        two.refuse()
        two.refuse()
        two.now += 2
        two.report()
    assert two.dispatcher.breakers.opened == 0


# Random failures

WORDS = 12
ACTIONS = ("say", "say", "say", "take", "late", "lose", "return", "engine", "refuse", "move", "drain", "fill", "room")


class Story:
    """Three nodes that generate the same answer, and all events that may happen to them."""

    def __init__(self) -> None:
        self.cluster = Cluster(A, B, C)
        self.ids = [A, B, C]
        self.tickets: list[ActiveRequest] = []
        self.read: dict[int, list[str]] = {}
        self.old: list[tuple[NodeId, int]] = []
        self.said: dict[int, int] = {}

    def submit(self, stream: bool) -> None:
        ticket = self.cluster.submit(stream=stream)
        self.tickets.append(ticket)
        self.read[ticket.number] = []

    async def act(self, action: str, which: int) -> None:
        cluster, node = self.cluster, self.ids[which % 3]
        live = [ticket for ticket in self.tickets if ticket.node is not None and ticket.outcome is None]
        ticket = live[which % len(live)] if live else None
        if ticket is not None and ticket.node is not None:
            self.old.append((ticket.node, ticket.attempt))
        dispatcher = cluster.dispatcher
        if action == "lose":
            cluster.state[node] = "lost"
            cluster.report(node)
            dispatcher.handle_lost_node(node, "gone")
        elif action in ("return", "drain"):
            cluster.state[node] = "ready" if action == "return" else "draining"
            cluster.report(node)
        elif action == "fill":
            full(cluster, node)
        elif action == "room":
            roomy(cluster, node)
        elif action == "move":
            dispatcher.migrate_node(node)
        elif action == "late" and self.old:
            where, number = self.old[which % len(self.old)]
            if all(one.node is None or one.attempt != number for one in dispatcher.list_open_requests()):
                dispatcher.receive(where, Deltas((Delta(number, 0, (99,), ((0, "late "),)),)))
                dispatcher.receive(where, Failed(number, "engine_crashed", "late"))
        elif action == "take":
            self.take()
        elif ticket is not None and ticket.node is not None:
            self.node_says(action, ticket, ticket.node)
        await turn()
        dispatcher.ledger.check()
        for request in self.tickets:
            request.check()
        assert dispatcher.counters.illegal_events == IllegalEventCounts()
        self.check()

    def node_says(self, action: str, ticket: ActiveRequest, node: NodeId) -> None:
        dispatcher, number = self.cluster.dispatcher, ticket.attempt
        if action == "say":
            frame = next(frame for _, frame in self.cluster.generates() if frame.request == number)
            said = self.said.setdefault(number, len(frame.resume[0]) if frame.resume else 0)
            dispatcher.receive(node, Deltas((Delta(number, 0, (said,), ((0, f"{said} "),)),)))
            self.said[number] = said + 1
            if said + 1 == WORDS:
                dispatcher.receive(node, Finished(number, ("stop",), 25, WORDS))
        elif action == "engine":
            dispatcher.receive(node, Failed(number, "engine_lost", "it died"))
        elif action == "refuse" and number not in self.said:
            refused = Refused(RefusalCode.NO_ROOM, "no", MemoryNumbers(headroom=0))
            dispatcher.receive(node, Refusal(number, refused, 25))

    def take(self) -> None:
        for ticket in self.tickets:
            if isinstance(ticket.answer, StreamedAnswer):
                self.read[ticket.number] += taken(ticket)

    def check(self) -> None:
        whole = [f"{number} " for number in range(WORDS)]
        for ticket in self.tickets:
            got = self.got(ticket)
            assert got == "".join(whole)[: len(got)], "in order, none twice, none lost"
            if isinstance(ticket.outcome, Finished):
                assert got + self.pending(ticket) == "".join(whole)

    def got(self, ticket: ActiveRequest) -> str:
        if isinstance(ticket.answer, CollectedAnswer):
            return ticket.answer.build_answer().texts.get((0, 0), "")
        return "".join(self.read[ticket.number])

    def pending(self, ticket: ActiveRequest) -> str:
        if isinstance(ticket.answer, StreamedAnswer):
            return "".join(text for delta in ticket.answer.pending for _, text in delta.pieces)
        return ""


@settings(deadline=None, max_examples=scale_examples(1000))
@given(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=60),
)
def test_any_sequence_of_failures_delivers_each_token_once_in_order(
    streams: list[bool], actions: list[tuple[str, int]]
):
    async def story() -> None:
        told = Story()
        for stream in streams:
            told.submit(stream)
        for action, which in actions:
            await told.act(action, which)
        for node in told.ids:
            told.cluster.state[node] = "ready"
        told.cluster.now += 100
        roomy(told.cluster, *told.ids)
        await turn()
        while any(ticket.node is not None for ticket in told.tickets):
            await told.act("say", 0)
        told.take()
        told.check()
        for ticket in told.tickets:
            assert ticket.attempts <= 40
            assert ticket.life.losses <= MAX_LOSSES + 1
            assert ticket.life.crashes <= 2
            told.cluster.dispatcher.close(ticket)
        told.cluster.dispatcher.shutdown()
        told.cluster.settled()

    asyncio.run(story())
