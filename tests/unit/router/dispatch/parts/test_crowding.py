"""API keys that request far more than their share."""

import pytest
from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts.crowding import CrowdRules
from router.dispatch.request import RequestSpec
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.weights import QUEUE_BACKLOG_SECONDS, SPARE_MEMORY_SHARE
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, Cluster
from tests.support.requests import send
from wire.capacity.fairness import WeightedKey
from wire.frames import GenerationParams
from wire.units import GIB

SPEED = 1000.0
BACKLOG = int(QUEUE_BACKLOG_SECONDS * SPEED)
CHOSEN = Candidate(
    node=A, name="a", state="ready", memory=a_memory(), headroom=0, model=a_model(), tokens_ahead=BACKLOG + 1
)


def submit(key: str, tokens: int) -> ActiveRequest:
    demand = ResourceDemand("tiny", prompt_tokens=tokens, max_tokens=1)
    spec = RequestSpec(demand, key, "r", (), GenerationParams(), 0, stream=True)
    return ActiveRequest(spec, WeightedKey(key), 1, 0.0)


def crowd(cluster: Cluster) -> tuple[CrowdRules, ActiveRequest]:
    """Return rules for three keys, and the request of the key with most of the tokens."""
    crowds, greedy = CrowdRules(cluster.dispatcher.placer), submit("greedy", 1000)
    for request in (greedy, submit("ada", 10), submit("bob", 10)):
        crowds.add(request)
    return crowds, greedy


@pytest.mark.parametrize(
    ("chosen", "waits"),
    [
        (CHOSEN, True),
        (replace(CHOSEN, tokens_ahead=BACKLOG), False),
        (replace(CHOSEN, model=None), False),
        (replace(CHOSEN, model=a_model(loaded=False)), False),
        (replace(CHOSEN, model=a_model(prefill_speed=2 * SPEED)), False),
    ],
)
async def test_a_request_waits_behind_more_than_the_backlog_of_a_loaded_model(
    one: Cluster, chosen: Candidate, waits: bool
) -> None:
    crowds, greedy = crowd(one)
    assert crowds.must_wait(greedy, chosen) is waits
    assert not crowds.must_wait(submit("ada", 10), chosen)


async def test_a_request_with_a_lost_attempt_and_one_of_a_lone_key_need_not_wait(one: Cluster) -> None:
    crowds, greedy = crowd(one)
    lost = submit("greedy", 1000)
    send(lost, "a", 1)
    send(lost, "b", 2)
    assert not crowds.must_wait(lost, CHOSEN)
    crowds.remove(submit("ada", 10))
    crowds.remove(submit("bob", 10))
    assert not crowds.must_wait(greedy, CHOSEN)


@pytest.mark.parametrize("need", [1, 3 * GIB])
async def test_a_request_ends_if_it_would_use_the_memory_that_is_kept_for_other_keys(one: Cluster, need: int) -> None:
    one.models = (a_model(weights=2 * GIB), a_model("unloaded", weights=8 * GIB, loaded=False))
    one.report()
    crowds, greedy = crowd(one)
    spare = int(SPARE_MEMORY_SHARE * (CHOSEN.most_bytes - 2 * GIB))
    assert crowds.must_end(greedy, replace(CHOSEN, need=need, headroom=spare + need - 1))
    assert not crowds.must_end(greedy, replace(CHOSEN, need=need, headroom=spare + need))
    assert not crowds.must_end(greedy, replace(CHOSEN, need=need, headroom=0, tokens_ahead=0))
