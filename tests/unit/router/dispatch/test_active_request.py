"""A request in the dispatcher: facts from nodes, received tokens, and the place in the queue."""

import pytest
from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.request import EmbeddingInput, RequestSpec
from router.placement.candidate import ResourceDemand
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, Delta, Deltas, GenerationParams, Message
from wire.models.kind import ModelKind

CHAT = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)


@pytest.mark.parametrize(("sent", "resumable"), [(3, True), (4, False)])
async def test_an_answer_beyond_its_limit_of_tokens_cannot_be_resumed(two: Cluster, sent: int, resumable: bool):
    params = GenerationParams(max_tokens=3)
    request = two.dispatcher.submit(replace(CHAT, demand=replace(CHAT.demand, max_tokens=3), params=params))
    two.say(lambda number: Deltas((Delta(number, 0, tuple(range(sent)), ((0, "x"),)),)))
    two.dispatcher.sweep()
    assert (request.resumable, request.tokens.total) == (resumable, sent)
    two.dispatcher.close(request)


async def test_tokens_of_all_texts_are_not_the_length_of_the_longest(one: Cluster):
    one.models = (a_model(features=("embed",)),)
    one.report()
    demand = ResourceDemand("tiny", 100, kind=ModelKind.EMBED, other_bytes=300)
    request = one.dispatcher.submit(replace(CHAT, demand=demand, stream=False, embed=EmbeddingInput(("one", "two"))))
    one.dispatcher.receive(A, Admitted(request.attempt, 90, 10))
    assert request.prompt_counts == (90, 10)
    assert request.demand.prompt_tokens is None
    one.dispatcher.close(request)


async def test_an_extended_deadline_holds_for_a_later_wait(one: Cluster):
    full(one, A)
    request = one.submit()
    assert request.entry is not None
    later = one.now + 500.0
    request.extend_deadline(later)
    assert (request.deadline, request.entry.deadline) == (later, later)
    request.extend_deadline(later - 1.0)
    assert (request.deadline, request.entry.deadline) == (later, later)
    one.dispatcher.close(request)


@pytest.mark.parametrize(("stream", "resumable"), [(True, False), (False, True)])
async def test_a_choice_that_does_not_exist_ends_the_resumption_of_a_stream_only(
    two: Cluster, stream: bool, resumable: bool
):
    request = two.submit(stream=stream)
    two.speak()
    assert request.resumable
    two.speak(choice=1)
    assert (request.resumable, request.tokens.total) == (resumable, 1 + stream)
    two.dispatcher.close(request)


async def test_the_deadline_of_a_request_on_a_node_is_not_extended(one: Cluster):
    request = one.submit()
    request.extend_deadline(one.now + 500.0)
    assert request.deadline is None
    one.finish()


def test_a_node_that_is_no_longer_a_member_leaves_no_cached_share():
    request = ActiveRequest(CHAT, WeightedKey("k"), 1, 0.0, cached_shares={A: 0.5, B: 0.25})
    request.tried.mark_lost(A)
    request.remove_node(A)
    assert (dict(request.cached_shares), request.tried.lost) == ({B: 0.25}, set())
