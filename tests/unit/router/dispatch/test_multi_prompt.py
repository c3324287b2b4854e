"""Several requests that are read as one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.admission.rate_limits import RateState
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.candidates import AliasCandidates
from router.dispatch.answer import CollectedAnswer, StreamedAnswer
from router.dispatch.multi_prompt import MergedRequest, MergedResponse, MergedStream
from router.dispatch.request import RequestFailure, RequestSpec
from router.placement.candidate import ResourceDemand
from tests.support.requests import send
from wire.capacity.fairness import WeightedKey
from wire.frames import Delta, Finished, GenerationParams, Logprob, Timings
from wire.models.version import ModelVersion

BROKEN = RequestFailure("node_lost", "gone")


def a_job(stream: bool, n: int = 2) -> RequestSpec:
    return RequestSpec(ResourceDemand("m"), "k", "r", (), GenerationParams(n=n, logprobs=True), 0, stream=stream)


def streams(count: int) -> list[StreamedAnswer]:
    return [StreamedAnswer() for _ in range(count)]


def requests(count: int, *, stream: bool) -> list[ActiveRequest]:
    return [ActiveRequest(a_job(stream), WeightedKey(), number, 0.0) for number in range(count)]


def say(ticket: StreamedAnswer | CollectedAnswer, choice: int, text: str) -> None:
    if ticket.add(Delta(1, choice, (), ((0, text),), (Logprob(text.encode(), -1.0),))):
        ticket.flush()


def end(number: int, *reasons: str, stops: tuple[str, ...] = ()) -> Finished:
    return Finished(number, reasons, 10, 2, 1, stops=stops, reasoning_tokens=1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2), st.text("abc", min_size=1, max_size=3)), max_size=20))
def test_choices_are_counted_through_and_nothing_is_lost_or_mixed(said: list[tuple[int, int, str]]):
    tickets = streams(3)
    joined = MergedStream(tickets, 2)
    wholes = [CollectedAnswer(2, logprobs=True) for _ in range(3)]
    whole = MergedResponse(wholes, 2)
    expected: dict[int, str] = {}
    found: dict[int, str] = {}
    for at, choice, text in said:
        say(tickets[at], choice, text)
        say(wholes[at], choice, text)
        if 0 <= choice < 2:
            expected[at * 2 + choice] = expected.get(at * 2 + choice, "") + text
    assert joined.pending is bool(said)
    for delta in joined.take_deltas():
        found[delta.choice] = found.get(delta.choice, "") + delta.pieces[0][1]
    assert found == expected
    answer = whole.build_answer("tiny-1")
    assert answer.fingerprint == "tiny-1"
    assert {choice: text for (choice, _), text in answer.texts.items()} == expected
    assert {
        choice: b"".join(one.token for one in logprobs).decode() for choice, logprobs in answer.logprobs.items()
    } == (expected)
    assert not joined.pending


def test_it_ends_when_all_have_with_everything_added_up():
    tickets = streams(2)
    joined = MergedStream(tickets, 2)
    tickets[1].end(end(2, "length", stops=("", "x")))
    assert joined.outcome is None
    assert not joined.ready
    tickets[0].end(end(1, "stop", "stop"))
    assert joined.ready
    whole = joined.outcome
    assert isinstance(whole, Finished)
    assert whole.reasons == ("stop", "stop", "length", "stop")
    assert whole.stops == ("", "", "", "x")
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens, whole.reasoning_tokens) == (20, 4, 2, 2)


def test_the_first_that_fails_ends_it():
    tickets = streams(3)
    joined = MergedStream(tickets, 2)
    tickets[2].end(BROKEN)
    assert joined.outcome is BROKEN
    assert joined.ready


async def test_merged_request_is_woken_by_any_part():
    tickets = streams(2)
    joined = MergedStream(tickets, 2)
    waiting = joined.wait()
    say(tickets[1], 0, "x")
    await asyncio.wait_for(waiting, 30)
    assert joined.ready
    called: list[int] = []
    joined.attach(lambda: called.append(1))
    joined.take_deltas()
    say(tickets[0], 0, "y")
    assert called == [1]
    waiting = joined.wait()
    joined.detach()
    joined.take_deltas()
    say(tickets[1], 0, "z")
    assert (called, waiting.done()) == ([1], True)


def test_merged_request_forwards_reader_state_to_all_parts():
    tickets = streams(2)
    joined = MergedStream(tickets, 2)
    joined.set_blocked(False)
    joined.mark_opened()
    tickets[1].request_keepalive()
    assert joined.keepalive_due
    assert joined.ready
    assert not joined.waits_for
    tickets[1].announce_wait("waiting for a model swap")
    assert joined.waits_for == "waiting for a model swap"
    joined.take_deltas()
    assert [(one.blocked, one.opened, one.keepalive_due, one.takes) for one in tickets] == [(False, True, False, 1)] * 2


async def test_a_whole_answer_is_waited_for():
    tickets = requests(2, stream=False)
    joined = MergedRequest(tickets)
    assert isinstance(joined.answer, MergedResponse)
    waiting = asyncio.create_task(joined.answer.wait_for_outcome())
    await asyncio.sleep(0)
    for number, ticket in enumerate(tickets):
        send(ticket, "studio" if number else "mini")
        ticket.answer.end(end(number, "stop", "stop"))
    assert isinstance(await waiting, Finished)
    assert (joined.node_name, joined.attempts, joined.spec.params.n) == ("mini,studio", 2, 4)


def test_the_headers_are_of_all_of_them_and_the_rates_of_the_last():
    tickets = [
        ActiveRequest(
            a_job(True), WeightedKey(), number, 0.0, rates=(RateState("tokens", 1000, 900 - 100 * number, 6.0),)
        )
        for number in range(3)
    ]
    joined = MergedRequest(tickets)
    assert isinstance(joined.answer, MergedStream)
    for number, (ticket, node) in enumerate(zip(tickets, ("studio", "mini", "studio"), strict=True)):
        for attempt in range(number + 1):
            send(ticket, node, attempt + 1)
        ticket.set_version(ModelVersion(f"tiny-{number}"))
    waiting = MergedRequest([*tickets, ActiveRequest(a_job(True), WeightedKey(), 3, 0.0)])
    assert (waiting.node_name, waiting.attempts) == ("studio,mini", 6), "a queued request has no node"
    assert (joined.node_name, joined.attempts, joined.fingerprint) == ("studio,mini", 6, "tiny-0")
    assert joined.rates == (RateState("tokens", 1000, 700, 6.0),)
    assert joined.demand is tickets[0].demand
    assert joined.spec.params.n == 6


def test_the_models_of_an_alias_are_named_once_each():
    alias = AliasCandidates("coder", ("big", "small"))
    models = ("small", "big", "small")
    tickets = [
        ActiveRequest(
            a_job(True), WeightedKey(), number, 0.0, demand=ResourceDemand(model), alias=alias if number == 0 else None
        )
        for number, model in enumerate(models)
    ]
    joined = MergedRequest(tickets)
    assert (joined.alias, joined.model_names) == (alias, "small,big")


def test_a_combined_end_has_the_timings_and_the_number_of_the_first():
    tickets, timings = streams(2), Timings(0.5, 1.0, 2.0)
    joined = MergedStream(tickets, 1)
    tickets[0].end(replace(end(7, "stop"), timings=timings))
    tickets[1].end(replace(end(8, "stop"), timings=Timings(9.0, 9.0, 9.0)))
    whole = joined.outcome
    assert isinstance(whole, Finished)
    assert (whole.request, whole.timings) == (7, timings)
