"""Records of every end of a request: counts, usage of its key, its history. Exact values show that nothing counts
twice."""

import asyncio
import struct
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from router.admission.rate_limits import BYTES_PER_TOKEN, DEFAULT_ANSWER_TOKENS, KeyLimits
from router.admission.usage import UsageTotals
from router.dispatch.accounting import INPUT_TOKENS, MESSAGE_TOKENS, QUOTING, TEMPLATE_TOKENS, UNSENT_TOKENS
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.request import SLOW, EmbeddingInput, RequestFailure, RequestSpec
from router.placement.candidate import ResourceDemand
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full, roomy, turn
from wire.frames import (
    Admitted,
    Cancel,
    Delta,
    Deltas,
    Embed,
    Failed,
    Finished,
    GenerationParams,
    Message,
    Refusal,
    Timings,
    Vectors,
)
from wire.identity import NodeId
from wire.models.kind import ModelKind
from wire.refusals import RefusalCode, Refused
from wire.units import MIB

TIMINGS = Timings(0.5, 1.0, 2.0)


def ask(cluster: Cluster, *, key: str = "k", stream: bool = True, **params: object) -> ActiveRequest:
    asked = GenerationParams(**params)  # pyright: ignore[reportArgumentType]
    demand = ResourceDemand("tiny", 100, max_tokens=asked.max_tokens, choices=asked.n)
    return cluster.dispatcher.submit(RequestSpec(demand, key, "r1", (Message("user", "hi"),), asked, 0, stream))


def finish(cluster: Cluster, **changes: object) -> None:
    end = replace(Finished(0, ("stop",), 25, 3, 10, TIMINGS, reasoning_tokens=2), **changes)
    cluster.say(lambda number: replace(end, request=number))


async def test_a_finished_request_is_counted_once_everywhere(one: Cluster):
    ticket = ask(one)
    assert isinstance(ticket.answer, StreamedAnswer)
    one.now += 2.0
    one.say(lambda number: Admitted(number, 25, 10))
    one.speak()
    ticket.answer.take_deltas()
    one.now += 3.0
    one.speak()
    finish(one)
    counters = one.dispatcher.counters
    assert counters.requests == {"ok": 1}
    assert (counters.attempts, counters.retries, counters.resumes, counters.moves) == (1, 0, 0, 0)
    assert (counters.prompt_tokens, counters.cached_tokens, counters.completion_tokens) == (25, 10, 3)
    assert (counters.first_tokens, counters.first_token_seconds) == (1, pytest.approx(2.0))
    assert (counters.durations, counters.duration_seconds) == (1, pytest.approx(5.0))
    assert counters.placements == {A: 1}
    assert (counters.queue_entries, counters.queue_seconds, counters.refusals) == (0, 0.0, {})
    node = counters.nodes[A]
    assert (node.prompt_tokens, node.generated_tokens, node.first_tokens) == (25, 2, 1)
    assert node.first_token_seconds == pytest.approx(2.0)
    model = counters.models["tiny"]
    assert (model.prompt_tokens, model.cached_tokens, model.completion_tokens) == (25, 10, 3)
    assert (model.outcomes, sum(model.ttft.counts), sum(model.e2e.counts), sum(model.itl.counts)) == (
        {"ok": 1},
        1,
        1,
        1,
    )
    assert (model.itl.total, model.e2e.total) == (pytest.approx(3.0), pytest.approx(5.0))
    assert counters.keys == {("k", "tiny"): 28}
    assert one.dispatcher.usage.drain() == {("k", "tiny"): UsageTotals(1, 0, 25, 10, 3)}
    assert one.dispatcher.usage.drain() == {}, "what was written to the database is not written again"
    story = one.dispatcher.history.records[-1]
    assert (story.request_id, story.key, story.model, story.stream, story.outcome, story.message) == (
        "r1",
        "k",
        "tiny",
        True,
        "ok",
        "",
    )
    assert (story.prompt_tokens, story.cached_tokens, story.completion_tokens, story.timings) == (25, 10, 3, TIMINGS)
    assert story.seconds == pytest.approx(5.0)
    assert [(round(at, 3), what, where) for at, what, where in story.steps] == [
        (0.0, "sent", "node-a"),
        (2.0, "first token", "node-a"),
    ]


async def test_the_history_of_a_failed_request_has_its_prompt_and_its_ignored_fields(one: Cluster):
    spec = RequestSpec(ResourceDemand("tiny", 100), "k", "r1", (), GenerationParams(), 0, True, ignored=("user",))
    for tokens in (None, 25):
        request = one.dispatcher.submit(spec)
        if tokens is not None:
            one.say(lambda number: Admitted(number, 25, 10))
        one.dispatcher.close(request)
        record = one.dispatcher.history.records[-1]
        assert (record.prompt_tokens, record.ignored) == (tokens, ("user",))


async def test_the_end_of_a_request_returns_the_tokens_and_bytes_with_which_it_was_admitted():
    cluster = Cluster(A)
    quotas = cluster.dispatcher.quotas
    first = ask(cluster)
    left = RouterSettings().max_prompt_tokens_per_key - 100 // BYTES_PER_TOKEN
    for _ in range(20):
        request = ask(cluster)
        cluster.say(lambda number: Admitted(number, 3000, 10))
        cluster.dispatcher.close(request)
    assert isinstance(quotas.admit("k", ResourceDemand("tiny", prompt_tokens=left), 0.0), int)
    assert isinstance(quotas.admit("k", ResourceDemand("tiny", prompt_tokens=1), 0.0), Refused)
    cluster.dispatcher.close(first)


async def test_a_prompt_may_have_the_tokens_of_the_template_for_each_message(one: Cluster):
    messages = (Message("user", "hi"),) * 3
    request = one.dispatcher.submit(
        RequestSpec(ResourceDemand("tiny", 100), "k", "r1", messages, GenerationParams(), 0, stream=True)
    )
    one.say(lambda number: Admitted(number, 10**6, 0))
    assert request.prompt_counts == (100 + TEMPLATE_TOKENS + 3 * MESSAGE_TOKENS, 0)
    one.dispatcher.close(request)


async def test_of_several_tokens_in_one_step_each_is_counted_for_its_node(one: Cluster):
    ask(one, n=2)
    one.say(lambda number: Deltas((Delta(number, 0, (1, 2, 3), ((0, "a"),)), Delta(number, 1, (4,), ((0, "b"),)))))
    assert one.dispatcher.counters.nodes[A].generated_tokens == 4


@pytest.mark.parametrize(
    ("end", "outcome", "failed"),
    [
        (lambda cluster, ticket: cluster.dispatcher.close(ticket), "cancelled", 1),
        (
            lambda cluster, ticket: cluster.say(lambda number: Failed(number, "engine_crashed", "x")),
            "engine_crashed",
            1,
        ),
        (lambda cluster, ticket: cluster.say(lambda number: Failed(number, "made_up", "x")), "failed", 1),
        (lambda cluster, ticket: cluster.dispatcher.handle_lost_node(A, "cable"), "node_lost", 1),
        (lambda cluster, ticket: cluster.dispatcher.shutdown(), "shutting_down", 1),
        (lambda cluster, ticket: cluster.refuse(RefusalCode.INVALID), "invalid_request", 1),
        (lambda cluster, ticket: finish(cluster), "ok", 0),
    ],
)
async def test_each_end_is_one_outcome(
    one: Cluster, end: Callable[[Cluster, ActiveRequest], None], outcome: str, failed: int
):
    ticket = ask(one)
    one.say(lambda number: Admitted(number, 25, 10))
    end(one, ticket)
    one.dispatcher.close(ticket)
    one.dispatcher.close(ticket)
    assert one.dispatcher.counters.requests == {outcome: 1}
    assert one.dispatcher.counters.models["tiny"].outcomes == {outcome: 1}
    used = one.dispatcher.usage.drain()["k", "tiny"]
    assert (used.requests, used.failed) == (1, failed)
    assert len(one.dispatcher.history.records) == 1


async def test_a_refusal_by_a_node_is_a_retry_and_no_failure(two: Cluster):
    ask(two)
    first, _ = two.last()
    two.refuse()
    second, _ = two.last()
    finish(two)
    counters = two.dispatcher.counters
    assert {first, second} == {A, B}
    assert (counters.attempts, counters.retries, counters.refusals) == (2, 1, {"no_headroom": 1})
    assert (counters.requests, counters.placements) == ({"ok": 1}, {A: 1, B: 1})
    assert two.dispatcher.breakers.opened == 0


async def test_a_lost_node_and_the_resumed_answer_are_counted_once(two: Cluster):
    ask(two)
    two.say(lambda number: Admitted(number, 25))
    two.speak()
    gone, _ = two.last()
    two.dispatcher.handle_lost_node(gone, "cable")
    counters = two.dispatcher.counters
    assert (counters.nodes_lost, counters.resumes, counters.attempts, counters.retries) == (1, 1, 2, 1)
    two.speak()
    finish(two)
    assert (counters.requests, counters.first_tokens) == ({"ok": 1}, 1)
    assert two.dispatcher.usage.drain()["k", "tiny"] == UsageTotals(1, 0, 25, 10, 3)
    assert [what for _, what, _ in two.dispatcher.history.records[-1].steps][-1] == "resumed"


async def test_a_move_off_a_node_that_drains_is_counted_once(two: Cluster):
    ask(two)
    two.speak()
    node, request = two.last()
    two.state[node] = "draining"
    two.report()
    await turn()
    assert two.last()[0] != node
    assert (two.dispatcher.counters.moves, two.dispatcher.counters.nodes_lost) == (1, 0)
    assert (node, Cancel(request)) in two.sent
    assert two.dispatcher.count_in_flight(node) == 0
    finish(two)


async def test_the_wait_in_the_queue_is_counted_from_its_own_beginning(one: Cluster):
    full(one, A)
    ask(one)
    counters = one.dispatcher.counters
    assert (counters.queue_entries, len(one.dispatcher.queue)) == (1, 1)
    one.now += 4.0
    roomy(one, A)
    await turn()
    assert len(one.dispatcher.queue) == 0
    assert (counters.queue_seconds, sum(counters.queue_wait.counts)) == (pytest.approx(4.0, abs=0.1), 1)
    one.now += 6.0
    one.speak()
    full(one, A)
    one.dispatcher.receive(*_failed(one))
    one.now += 3.0
    roomy(one, A)
    await turn()
    assert (counters.queue_entries, sum(counters.queue_wait.counts)) == (2, 2)
    assert counters.queue_seconds == pytest.approx(4.0 + 3.0, abs=0.2), "not from the arrival of the request"
    finish(one)


def _failed(cluster: Cluster) -> tuple[NodeId, Failed]:
    node, request = cluster.last()
    return node, Failed(request, "no_headroom", "no room to go on")


async def test_slow_client_is_counted_and_cancelled_on_its_node():
    cluster = Cluster(A, slow_client_bytes=1 * MIB)
    ticket = ask(cluster)
    for _ in range(3):
        cluster.speak("x" * (MIB // 2))
    assert ticket.outcome == SLOW
    assert (cluster.dispatcher.counters.slow_clients, cluster.dispatcher.counters.requests) == (1, {"slow_client": 1})
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_usage_of_a_node_is_bounded_by_the_request(one: Cluster):
    ask(one, max_tokens=5, n=2)
    one.say(lambda number: Admitted(number, 10**9, 10**9))
    finish(one, prompt_tokens=10**9, cached_tokens=10**9, completion_tokens=10**9, reasoning_tokens=10**9)
    used = one.dispatcher.usage.drain()["k", "tiny"]
    most = 100 + 4096 + 32
    assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (most, most, 10)
    early = ask(one)
    one.say(lambda number: Admitted(number, 30, 10**9))
    one.dispatcher.close(early)
    used = one.dispatcher.usage.drain()["k", "tiny"]
    assert (used.prompt_tokens, used.cached_tokens) == (30, 30), "no more is cached than was read"
    ask(one)
    one.speak()
    finish(one, completion_tokens=10**9)
    assert one.dispatcher.usage.drain()["k", "tiny"].completion_tokens == max(256, 1 + UNSENT_TOKENS)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (25, 10, 3, 2)),
        ({"prompt_tokens": 4229}, (4228, 10, 3, 2)),
        ({"cached_tokens": 26}, (25, 25, 3, 2)),
        ({"completion_tokens": 6}, (25, 10, 5, 2)),
        ({"reasoning_tokens": 4}, (25, 10, 3, 3)),
    ],
    ids=str,
)
async def test_each_count_of_a_node_is_bounded_on_its_own(
    one: Cluster, changes: dict[str, int], counts: tuple[int, ...]
):
    """The client gets the same counts. Cached tokens are a part of the prompt, and reasoning of the answer."""
    ticket = ask(one, max_tokens=5)
    one.say(lambda number: Admitted(number, 25, 10))
    finish(one, **changes)
    end = ticket.outcome
    assert isinstance(end, Finished)
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.reasoning_tokens) == counts


@pytest.mark.parametrize(("reported", "counted"), [(900 + 2 * UNSENT_TOKENS, 0), (900 + 2 * UNSENT_TOKENS + 1, -1)])
async def test_an_answer_without_a_limit_has_few_tokens_that_were_not_sent(one: Cluster, reported: int, counted: int):
    ask(one, n=2)
    one.say(lambda number: Deltas((Delta(number, 0, tuple(range(900)), ()),)))
    finish(one, completion_tokens=reported)
    assert one.dispatcher.usage.drain()["k", "tiny"].completion_tokens == reported + counted


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (RequestSpec(ResourceDemand("tiny", 0, 3500), "k", "r", (), GenerationParams(), 0, True), 3500),
        (RequestSpec(ResourceDemand("tiny"), "k", "r", (), GenerationParams(), 0, True, ids=(7,) * 3000), 3000),
        (RequestSpec(ResourceDemand("tiny", 700), "k", "r", (), GenerationParams(), 0, True, text="x"), 700),
    ],
)
async def test_a_prompt_has_at_most_its_counted_tokens_its_ids_or_its_bytes(one: Cluster, spec: RequestSpec, most: int):
    request = one.dispatcher.submit(replace(spec, demand=replace(spec.demand, max_tokens=1)))
    one.say(lambda number: Admitted(number, 10**9, 0))
    assert request.prompt_counts == (most + TEMPLATE_TOKENS, 0)
    one.dispatcher.close(request)


async def test_reported_tokens_of_choices_without_a_limit_are_bounded_for_all_choices(one: Cluster):
    ask(one, n=3)
    finish(one, completion_tokens=10**9)
    assert one.dispatcher.usage.drain()["k", "tiny"].completion_tokens == 3 * DEFAULT_ANSWER_TOKENS


async def test_reported_tokens_of_embeddings_are_bounded_by_their_texts(one: Cluster):
    one.models = (a_model(features=("embed",)),)
    one.report()
    embed = EmbeddingInput(("a" * 100, "b" * 60, "c" * 40))
    demand = ResourceDemand("tiny", 100, other_bytes=100, kind=ModelKind.EMBED)
    one.dispatcher.submit(RequestSpec(demand, "k", "r1", (), GenerationParams(), 0, False, embed=embed))
    (number,) = (frame.request for _, frame in one.sent if isinstance(frame, Embed))
    one.dispatcher.receive(A, Vectors(number, (0, 1, 2), struct.pack("<3f", 1, 2, 3)))
    one.dispatcher.receive(A, Finished(number, (), 10**9, 0))
    assert one.dispatcher.usage.drain()["k", "tiny"].prompt_tokens == 200 + 3 * INPUT_TOKENS


async def test_unused_charge_is_returned_to_the_key(one: Cluster):
    one.limits |= {"k": KeyLimits(tokens_per_minute=1000)}
    ask(one, max_tokens=900)
    finish(one)
    (rate,) = one.dispatcher.quotas.list_rates("k", one.now)
    assert (rate.unit, rate.limit, rate.remaining) == ("tokens", 1000, 1000 - 28)


async def test_key_is_charged_for_sent_tokens_above_the_usage_of_the_node(one: Cluster):
    one.limits |= {"k": KeyLimits(tokens_per_minute=1000)}
    ticket = ask(one, max_tokens=900)
    one.speak()
    one.speak()
    assert ticket.tokens.total == 2
    finish(one, prompt_tokens=0, cached_tokens=0, completion_tokens=1, reasoning_tokens=0)
    (rate,) = one.dispatcher.quotas.list_rates("k", one.now)
    assert rate.remaining == 1000 - 2


async def test_keys_and_models_are_counted_apart(one: Cluster):
    for key in ("k", "k", "other"):
        ask(one, key=key)
        finish(one)
    assert one.dispatcher.counters.keys == {("k", "tiny"): 56, ("other", "tiny"): 28}
    assert one.dispatcher.usage.drain() == {
        ("k", "tiny"): UsageTotals(2, 0, 50, 20, 6),
        ("other", "tiny"): UsageTotals(1, 0, 25, 10, 3),
    }


async def test_a_model_that_no_node_has_makes_no_row(one: Cluster):
    job = RequestSpec(ResourceDemand("made-up", 100), "k", "r1", (), GenerationParams(), 0, False)
    ticket = one.dispatcher.submit(job)
    assert isinstance(ticket.outcome, Refused)
    assert set(one.dispatcher.usage.drain()) == {("k", "")}
    assert "made-up" not in one.dispatcher.counters.models


async def test_stored_refusal_omits_text_of_the_request(one: Cluster):
    for code in (RefusalCode.INVALID, RefusalCode.UNSUPPORTED, RefusalCode.TEMPLATE):
        ask(one)
        one.say(lambda number, code=code: Refusal(number, Refused(code, "secret words"), None))
        story = one.dispatcher.history.records[-1]
        assert (story.outcome, story.message) == (code.value, QUOTING[code])
    ask(one)
    one.say(lambda number: Refusal(number, Refused(RefusalCode.NO_MODEL, "not here"), None))
    assert one.dispatcher.history.records[-1].message == "not here"


async def test_shutdown_refuses_new_requests_and_waits_for_running_ones():
    cluster = Cluster(A)
    running = ask(cluster)
    draining = asyncio.create_task(cluster.dispatcher.drain(30.0))
    await turn()
    late = ask(cluster)
    assert isinstance(late.outcome, RequestFailure)
    assert late.outcome.code == "shutting_down"
    assert running.outcome is None
    assert cluster.dispatcher.find_outage_reason() != ""
    finish(cluster)
    for ticket in (running, late):
        cluster.dispatcher.close(ticket)
    await asyncio.wait_for(draining, 30)
    assert isinstance(running.outcome, Finished)
    cluster.settled()


async def test_a_memory_correction_lasts_until_the_node_reports_again(two: Cluster):
    ask(two)
    first, _ = two.last()
    two.refuse(room=0)
    finish(two)
    assert two.dispatcher.placer.preview(ResourceDemand("tiny", 100)).candidates
    seen = {one.node: one.headroom for one in two.dispatcher.placer.preview(ResourceDemand("tiny", 100)).candidates}
    assert (seen[first], seen[A if first == B else B]) == (0, a_memory().headroom)
    two.report(A if first == B else B)
    seen = {one.node: one.headroom for one in two.dispatcher.placer.preview(ResourceDemand("tiny", 100)).candidates}
    assert seen[first] == 0, "another node has reported"
    two.report()
    seen = {one.node: one.headroom for one in two.dispatcher.placer.preview(ResourceDemand("tiny", 100)).candidates}
    assert set(seen.values()) == {a_memory().headroom}


async def test_stopping_node_is_skipped_and_reported(one: Cluster):
    ticket = ask(one)
    one.say(lambda number: Failed(number, "node_stopping", "its Mac is shut down"))
    assert isinstance(ticket.outcome, RequestFailure)
    assert (ticket.outcome.code, len(one.generates())) == ("node_lost", 1)
    ask(one)
    one.dispatcher.handle_lost_node(A, "cable")
    assert one.failures == [("r1", "node_stopping"), ("r1", "node_lost")]


async def test_a_prompt_counts_as_unread_in_tokens_and_seconds_until_its_first_token(one: Cluster):
    demand = ResourceDemand("tiny", 100, prompt_tokens=500)
    one.dispatcher.submit(RequestSpec(demand, "k", "r1", (Message("user", "hi"),), GenerationParams(), 0, True))
    _, request = one.last()
    account = one.dispatcher.ledger.get_account(A)
    prompts = {number: (prompt.tokens, prompt.seconds) for number, prompt in account.pending_prefills.items()}
    assert prompts == {request: (500, 0.5)}, "at 1,000 tokens per second"
    assert (account.pending_tokens, account.rows) == (500, 1)
    one.say(lambda number: Admitted(number, 500))
    assert account.pending_tokens == 500, "a prompt that was admitted is not read yet"
    one.speak()
    assert (account.pending_prefills, account.pending_tokens, account.rows) == ({}, 0, 1)
    finish(one)


async def test_the_prompt_of_a_restarted_answer_counts_until_its_first_token(two: Cluster):
    demand = ResourceDemand("tiny", 100, prompt_tokens=500)
    two.dispatcher.submit(RequestSpec(demand, "k", "r1", (Message("user", "hi"),), GenerationParams(), 0, stream=False))
    node, _ = two.last()
    two.say(lambda number: Deltas((Delta(number, 0, (), ((0, "hi"),)),)))
    two.dispatcher.handle_lost_node(node, "cable")
    other, attempt = two.last()
    account = two.dispatcher.ledger.get_account(other)
    assert (other != node, list(account.pending_prefills)) == (True, [attempt])
    two.speak()
    assert account.pending_prefills == {}
    finish(two)


async def test_a_request_that_was_admitted_once_has_its_whole_time_in_the_queue_again():
    cluster = Cluster(A, queue_timeout_seconds=30.0)
    full(cluster, A)
    ticket = ask(cluster)
    first = ticket.deadline
    assert first == pytest.approx(cluster.now + 30.0)
    cluster.now += 20.0
    roomy(cluster, A)
    await turn()
    cluster.refuse()
    assert (len(cluster.dispatcher.queue), ticket.deadline) == (1, first), "a refusal begins no new wait"
    roomy(cluster, A)
    await turn()
    cluster.say(lambda number: Admitted(number, 25))
    full(cluster, A)
    cluster.dispatcher.receive(*_failed(cluster))
    assert ticket.deadline == pytest.approx(cluster.now + 30.0)
    assert len(cluster.dispatcher.queue) == 1
    cluster.dispatcher.shutdown()
    cluster.settled()
