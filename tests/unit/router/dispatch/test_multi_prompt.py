"""Several requests that are read as one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.admission.rate_limits import RateState
from router.dispatch import multi_prompt
from router.dispatch.request import BufferedRequest, RequestFailure, RequestSpec, StreamingRequest
from router.placement.candidate import ResourceDemand
from wire.capacity.fairness import WeightedKey
from wire.frames import Delta, Finished, GenerationParams, Logprob

BROKEN = RequestFailure("node_lost", "gone")


def a_job(stream: bool, n: int = 2) -> RequestSpec:
    return RequestSpec(ResourceDemand("m"), "k", "r", (), GenerationParams(n=n, logprobs=True), 0, stream=stream)


def streams(count: int) -> list[StreamingRequest]:
    return [StreamingRequest(a_job(True), WeightedKey(), number, 0.0) for number in range(count)]


def say(ticket: StreamingRequest | BufferedRequest, choice: int, text: str) -> None:
    if ticket.add(Delta(1, choice, (), ((0, text),), (Logprob(text.encode(), -1.0),))):
        ticket.flush()


def end(number: int, *reasons: str, stops: tuple[str, ...] = ()) -> Finished:
    return Finished(number, reasons, 10, 2, 1, stops=stops, reasoning_tokens=1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2), st.text("abc", min_size=1, max_size=3)), max_size=20))
def test_choices_are_counted_through_and_nothing_is_lost_or_mixed(said: list[tuple[int, int, str]]):
    tickets = streams(3)
    joined = multi_prompt.MergedStream(tickets)
    wholes = [BufferedRequest(a_job(False), WeightedKey(), number, 0.0) for number in range(3)]
    whole = multi_prompt.MergedResponse(wholes)
    expected: dict[int, str] = {}
    found: dict[int, str] = {}
    for at, choice, text in said:
        say(tickets[at], choice, text)
        say(wholes[at], choice, text)
        if 0 <= choice < 2:
            expected[at * 2 + choice] = expected.get(at * 2 + choice, "") + text
    assert joined.pending is bool(said)
    for delta in joined.take():
        found[delta.choice] = found.get(delta.choice, "") + delta.pieces[0][1]
    assert found == expected
    answer = whole.answer()
    assert {choice: text for (choice, _), text in answer.texts.items()} == expected
    assert {
        choice: b"".join(one.token for one in logprobs).decode() for choice, logprobs in answer.logprobs.items()
    } == (expected)
    assert joined.job.params.n == whole.job.params.n == 6
    assert not joined.pending


def test_it_ends_when_all_have_with_everything_added_up():
    tickets = streams(2)
    joined = multi_prompt.MergedStream(tickets)
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
    joined = multi_prompt.MergedStream(tickets)
    tickets[2].end(BROKEN)
    assert joined.outcome is BROKEN
    assert joined.ready


async def test_who_waits_is_woken_by_any_of_them():
    tickets = streams(2)
    joined = multi_prompt.MergedStream(tickets)
    waiting = joined.wait()
    say(tickets[1], 0, "x")
    await asyncio.wait_for(waiting, 30)
    assert joined.ready
    called: list[int] = []
    joined.sink = lambda: called.append(1)
    joined.take()
    say(tickets[0], 0, "y")
    assert called == [1]


def test_being_read_or_blocked_or_open_is_said_to_all():
    tickets = streams(2)
    joined = multi_prompt.MergedStream(tickets)
    joined.blocked = False
    joined.opened = True
    tickets[1].keepalive_due = True
    assert joined.keepalive_due
    assert joined.ready
    assert not joined.waits_for
    tickets[1].swap = "waiting for a model swap on studio (one -> two)"
    assert joined.waits_for == "waiting for a model swap"
    joined.take()
    assert [(one.blocked, one.opened, one.keepalive_due, one.takes) for one in tickets] == [(False, True, False, 1)] * 2
    assert (joined.blocked, joined.opened) == (False, True)


async def test_a_whole_answer_is_waited_for():
    tickets = [BufferedRequest(a_job(False), WeightedKey(), number, 0.0) for number in range(2)]
    joined = multi_prompt.MergedResponse(tickets)
    waiting = asyncio.create_task(joined.outcome_of())
    await asyncio.sleep(0)
    for number, ticket in enumerate(tickets):
        ticket.node_name = "studio" if number else "mini"
        ticket.attempts = 1
        ticket.end(end(number, "stop", "stop"))
    assert isinstance(await waiting, Finished)
    assert (joined.node_name, joined.attempts) == ("mini,studio", 2)


def test_the_headers_are_of_all_of_them_and_the_rates_of_the_last():
    tickets = streams(3)
    joined = multi_prompt.MergedStream(tickets)
    for number, (ticket, node) in enumerate(zip(tickets, ("studio", "mini", "studio"), strict=True)):
        ticket.node_name, ticket.attempts, ticket.fingerprint = node, number + 1, f"tiny-{number}"
        ticket.rates = (RateState("tokens", 1000, 900 - 100 * number, 6.0),)
    assert (joined.node_name, joined.attempts, joined.fingerprint) == ("studio,mini", 6, "tiny-0")
    assert joined.rates == (RateState("tokens", 1000, 700, 6.0),)
    assert joined.demand is tickets[0].demand
