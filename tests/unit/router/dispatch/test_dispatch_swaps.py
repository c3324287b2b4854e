"""A node swaps models for a request: the frames that the dispatcher sends or holds back, and its messages meanwhile."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.model_swaps import MIN_SLICE_SECONDS
from router.dispatch.parts.composition import SWEEP_INTERVAL_SECONDS
from router.dispatch.request import SWAP, RequestSpec
from router.placement.candidate import ResourceDemand
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster
from wire.frames import Delta, Deltas, Finished, GenerationParams, Message, Refusal
from wire.refusals import RefusalCode, Refused
from wire.units import GIB

LONGEST = 100.0
SLOWEST = 1000.0


def ask(cluster: Cluster, model: str, key: str = "k", *, stream: bool = True) -> ActiveRequest:
    demand = ResourceDemand(model, 100)
    return cluster.dispatcher.submit(
        RequestSpec(demand, key, f"r{cluster.count}", (Message("user", "hi"),), GenerationParams(), 0, stream)
    )


def has(cluster: Cluster, *names: str, loading: str = "") -> None:
    """Report these models of 12 GiB as loaded on all nodes, which may use 22 GiB."""
    cluster.models = tuple(
        a_model(name, weights=12 * GIB, loaded=name in names, loading=name == loading) for name in ("one", "two")
    )
    loaded = len(names) + bool(loading)
    cluster.memory = {node: a_memory((22 - 12 * loaded) * GIB) for node in cluster.nodes}
    cluster.report()


def passes(cluster: Cluster, seconds: float) -> None:
    """Advance the time, with reports and sweeps."""
    for _ in range(int(seconds / SWEEP_INTERVAL_SECONDS)):
        cluster.now += SWEEP_INTERVAL_SECONDS
        cluster.report()
        cluster.dispatcher.sweep()


def pair(*nodes: str, **settings: object) -> Cluster:
    cluster = Cluster(*nodes, swap_timeout_seconds=LONGEST, slow_client_seconds=SLOWEST, **settings)  # pyright: ignore
    has(cluster, "one")
    return cluster


@pytest.fixture
async def mac() -> AsyncIterator[Cluster]:
    """Yield one node with model one, which answers a request."""
    cluster = pair(A)
    ask(cluster, "one")
    yield cluster
    cluster.dispatcher.shutdown()
    await asyncio.sleep(0)
    cluster.settled()


def finish(cluster: Cluster, ticket: ActiveRequest) -> None:
    assert ticket.node is not None
    cluster.dispatcher.receive(ticket.node, Finished(ticket.attempt, ("stop",), 25, 3))


def running(cluster: Cluster) -> ActiveRequest:
    return cluster.dispatcher.list_open_requests()[0]


async def test_requests_wait_during_a_swap_and_the_other_model_is_next(mac: Cluster):
    other = ask(mac, "two", "bob")
    passes(mac, MIN_SLICE_SECONDS + 1)
    assert other.swap == "waiting for a model swap on node-a (one -> two)"
    later = ask(mac, "one")
    assert later.node is None
    assert len(mac.generates()) == 1, "nothing new is sent, nothing that runs is cut"
    finish(mac, running(mac))
    await asyncio.sleep(0)
    assert mac.last() == (A, other.attempt)
    assert not other.swap
    has(mac, loading="two")
    await asyncio.sleep(0)
    assert mac.dispatcher.counters.swaps == {"done": 1, "dropped": 0}
    assert not mac.dispatcher.ledger.turns
    assert later.node is None
    has(mac, "two")
    passes(mac, MIN_SLICE_SECONDS + 1)
    assert later.swap == "waiting for a model swap on node-a (two -> one)"
    finish(mac, other)
    await asyncio.sleep(0)
    assert mac.last() == (A, later.attempt)
    assert [what for _, what, _ in other.steps] == [
        "queued",
        "waiting for a model swap: no node can unload a model for it yet",
        "waiting for a model swap: one -> two",
        "sent",
    ]


async def test_a_wait_for_a_swap_is_no_503_after_the_queue_time_and_one_after_the_longest(mac: Cluster):
    other, whole = ask(mac, "two", "bob"), ask(mac, "two", "eve", stream=False)
    passes(mac, 3 * mac.settings.queue_timeout_seconds)
    assert other.outcome is None
    assert whole.outcome is None
    passes(mac, LONGEST)
    for ticket in (other, whole):
        assert isinstance(ticket.outcome, Refused)
        assert ticket.outcome.code is RefusalCode.NO_ROOM
    passes(mac, 1)
    assert not mac.dispatcher.ledger.turns, "no request waits for the model"
    assert mac.dispatcher.counters.swaps == {"done": 0, "dropped": 1}
    assert ask(mac, "one").node == A


async def test_a_short_time_for_swaps_takes_nothing_from_the_queue_time():
    cluster = Cluster(A, swap_timeout_seconds=1.0, queue_timeout_seconds=5.0)
    has(cluster, "one")
    ask(cluster, "one")
    other = ask(cluster, "two", "bob")
    passes(cluster, 4)
    assert other.outcome is None
    passes(cluster, 2)
    assert isinstance(other.outcome, Refused)
    cluster.dispatcher.shutdown()


async def test_the_model_in_use_keeps_its_room_until_its_slice_ends(mac: Cluster):
    """Room is held for a request that has waited five seconds, but not where a model would have to be unloaded for
    it."""
    slow = mac.settings.swap_timeout_seconds
    other = ask(mac, "two", "bob")
    mac.models = tuple(replace(model, load_seconds=slow) for model in mac.models)
    for _ in range(int(2 * MIN_SLICE_SECONDS)):
        passes(mac, 1)
        await asyncio.sleep(0)
    assert mac.dispatcher.ledger.find_hold_node(other.number) is None
    assert ask(mac, "one").node == A


async def test_wait_for_rows_ends_after_the_queue_time(mac: Cluster):
    mac.memory = {A: a_memory(0)}
    mac.report()
    ticket = ask(mac, "one", "bob")
    passes(mac, mac.settings.queue_timeout_seconds + 1)
    assert isinstance(ticket.outcome, Refused)
    assert not ticket.swap


async def test_a_stream_that_waits_for_a_swap_shows_a_sign_of_life(mac: Cluster):
    other = ask(mac, "two", "bob")
    assert isinstance(other.answer, StreamedAnswer)
    passes(mac, mac.settings.keepalive_seconds - 1)
    assert not other.answer.ready
    passes(mac, 2)
    assert other.answer.ready, "a keep-alive is due, although the request is queued"
    assert other.answer.waits_for == SWAP
    has(mac, "two")
    mac.memory = {A: a_memory(0)}
    mac.report()
    passes(mac, 1)
    assert (other.node, other.answer.waits_for) == (None, ""), "the request waits for memory alone"


async def test_swap_ends_when_its_client_disconnects(mac: Cluster):
    other = ask(mac, "two", "bob")
    passes(mac, MIN_SLICE_SECONDS + 1)
    later = ask(mac, "one")
    await asyncio.sleep(0)
    assert (mac.dispatcher.ledger.turns.keys(), later.node) == ({A}, None)
    mac.dispatcher.close(other)
    await asyncio.sleep(0)
    assert not mac.dispatcher.ledger.turns
    assert later.node == A


async def test_begun_answer_continues_during_a_swap():
    cluster = pair(A, B)
    first, second = ask(cluster, "one"), ask(cluster, "one")
    assert (first.node, second.node) == (A, B)
    for ticket in (first, first, second):  # the first is closer to its end
        cluster.say(lambda number: Deltas((Delta(number, 0, (1,), ((0, "hi"),)),)), ticket.node, ticket.attempt)
    ask(cluster, "two", "bob")
    passes(cluster, MIN_SLICE_SECONDS + 1)
    assert list(cluster.dispatcher.ledger.turns) == [A]
    cluster.state[B] = "lost"
    cluster.report()
    cluster.dispatcher.handle_lost_node(B, "gone")
    assert second.node == A, "what the client has read of it stays as it is"
    assert ask(cluster, "one").node is None
    cluster.dispatcher.shutdown()


async def test_refused_swap_is_retried_after_the_next_report(mac: Cluster):
    other = ask(mac, "two", "bob")
    passes(mac, MIN_SLICE_SECONDS + 1)
    finish(mac, running(mac))
    await asyncio.sleep(0)
    mac.dispatcher.receive(A, Refusal(other.attempt, Refused(RefusalCode.NO_ROOM, "its rows are not gone yet"), 25))
    await asyncio.sleep(0)
    assert other.node is None
    assert ask(mac, "one").node is None, "the model swap continues"
    passes(mac, 1)
    assert mac.last() == (A, other.attempt)


async def test_a_request_starts_at_the_end_of_a_swap_before_the_next_report(mac: Cluster):
    other = ask(mac, "two", "bob")
    passes(mac, MIN_SLICE_SECONDS + 1)
    waiting = ask(mac, "one")
    passes(mac, LONGEST - 10)
    await asyncio.sleep(0)
    assert waiting.node is None, "the model swap continues"
    for seconds in (0.5, SWEEP_INTERVAL_SECONDS):
        mac.now += seconds
        mac.dispatcher.sweep()
    await asyncio.sleep(0)
    assert other.outcome is not None
    assert waiting.node == A


async def test_third_model_does_not_use_the_headroom_of_a_swap(mac: Cluster):
    third = a_model("three", weights=12 * GIB, loaded=False)
    mac.models += (third,)
    mac.report()
    ask(mac, "two", "bob")
    passes(mac, MIN_SLICE_SECONDS + 1)
    finish(mac, running(mac))
    assert ask(mac, "three", "eve").node is None
    await asyncio.sleep(0)
    assert mac.generates()[-1][1].model == "two"


async def test_a_wait_for_a_swap_ends_one_queue_time_after_the_swap_is_no_longer_needed(mac: Cluster):
    other = ask(mac, "two", "bob")
    passes(mac, 20)
    assert other.deadline == mac.now + mac.settings.queue_timeout_seconds
    has(mac, "two")
    mac.memory = {A: a_memory(0)}
    mac.report()
    passes(mac, mac.settings.queue_timeout_seconds - 3)
    assert other.outcome is None
    passes(mac, 4)
    assert isinstance(other.outcome, Refused)


async def test_the_oldest_request_gets_the_swap_although_another_key_waited_before(mac: Cluster):
    models = (*mac.models, a_model("three", weights=12 * GIB, loaded=False))
    mac.models = tuple(replace(model, load_seconds=2.0) for model in models)
    mac.report()
    first = ask(mac, "two", "bob")
    oldest = ask(mac, "three", "eve")
    mac.now += 0.1
    later = ask(mac, "two", "bob")
    mac.dispatcher.close(first)
    for _ in range(6 * int(MIN_SLICE_SECONDS)):
        passes(mac, 1)
    (turn,) = mac.dispatcher.ledger.turns.values()
    assert (turn.request, turn.model) == (oldest.number, "three")
    mac.dispatcher.close(later)


async def test_no_row_is_taken_from_a_key_for_a_model_that_must_be_loaded_or_during_a_swap(mac: Cluster):
    ask(mac, "one")
    other = ask(mac, "two", "bob")
    assert other.node is None, "two requests of another key run, but with another model"
    passes(mac, MIN_SLICE_SECONDS + 1)
    assert mac.dispatcher.ledger.turns.keys() == {A}
    assert ask(mac, "one", "eve").node is None


async def test_a_slice_lasts_at_most_a_quarter_of_the_timeout_of_the_settings(mac: Cluster):
    mac.models = tuple(replace(model, load_seconds=1000.0) for model in mac.models)
    ask(mac, "two", "bob")
    for seconds, turns in ((LONGEST / 4 - 2, set[str]()), (4, {A})):
        passes(mac, seconds)
        assert mac.dispatcher.ledger.turns.keys() == turns
