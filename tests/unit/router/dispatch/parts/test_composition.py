"""Settings and collaborators of a dispatcher: each part gets its own."""

import dataclasses

import pytest
from msgspec.structs import replace

from router.admission.cache_scope import CacheScopes
from router.admission.rate_limits import RateLimits
from router.dispatch.counters import Counters
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.parts.composition import SWEEP_INTERVAL_SECONDS, Surroundings
from router.dispatch.request import RequestSpec
from router.placement.candidate import Candidate, ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.policies import POLICIES
from router.settings import RouterSettings
from router.upstreams import UpstreamSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full
from wire.frames import Admitted, GenerationParams, Message
from wire.identity import NodeId
from wire.units import GIB


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (RouterSettings(), SWEEP_INTERVAL_SECONDS),
        (RouterSettings(queue_timeout_seconds=0.5), 0.125),
        (RouterSettings(keepalive_seconds=0.25), 0.0625),
        (RouterSettings(slow_client_seconds=0.5), 0.125),
    ],
)
def test_a_limit_is_checked_four_times_before_it_passes(settings: RouterSettings, seconds: float) -> None:
    surroundings = Surroundings(
        send=lambda *_: True,
        numbers=lambda: (1, 1),
        clock=lambda: 0.0,
        draw=lambda: 0.5,
        settings=settings,
        counters=Counters(),
        quotas=RateLimits(),
        scopes=CacheScopes(),
        policy=POLICIES[settings.policy],
        on_failure=lambda *_: None,
    )
    assert surroundings.interval == seconds


SPEC = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(seed=1), 0, True)


@pytest.mark.parametrize(("policy", "chosen"), [("balanced", A), ("most_headroom", B)])
async def test_the_policy_of_the_settings_places_requests(policy: str, chosen: NodeId) -> None:
    cluster = Cluster(A, B, policy=policy)
    cluster.memory[B] = a_memory(16 * GIB)
    cluster.report()
    fast = {A: a_model(prefill_speed=9000.0), B: a_model(prefill_speed=10.0)}
    nodes = (dataclasses.replace(node, models={"tiny": fast[node.id]}) for node in cluster.dispatcher.view.nodes)
    cluster.dispatcher.set_view(ClusterView(tuple(nodes)))
    assert cluster.submit().node == chosen
    cluster.dispatcher.shutdown()


class PreferredNode:
    """Policy that chooses one node wherever the request fits there."""

    def __init__(self, node: NodeId) -> None:
        self._node = node

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        return (float(candidate.node != self._node),)


@pytest.mark.parametrize("node", [A, B])
async def test_a_given_policy_precedes_that_of_the_settings(node: NodeId) -> None:
    cluster = Cluster(A, B)
    dispatcher = Dispatcher(
        lambda *_: True,
        cluster.settings,
        numbers=lambda: (1, 1),
        clock=lambda: cluster.now,
        policy=PreferredNode(node),
    )
    dispatcher.set_view(cluster.dispatcher.view)
    assert dispatcher.submit(SPEC).node == node
    dispatcher.shutdown()


@pytest.mark.parametrize(("draws", "chosen"), [((0.1, 0.9), A), ((0.9, 0.1), B)])
async def test_given_collaborators_are_used_and_chance_decides_between_equal_nodes(
    draws: tuple[float, float], chosen: NodeId
) -> None:
    cluster, counters, quotas = Cluster(A, B), Counters(), RateLimits()
    dispatcher = Dispatcher(
        lambda *_: True,
        RouterSettings(policy="most_headroom"),
        numbers=lambda: (1, 1),
        clock=lambda: cluster.now,
        draw=iter(draws).__next__,
        counters=counters,
        quotas=quotas,
        policy=POLICIES["balanced"],
    )
    assert (dispatcher.counters, dispatcher.quotas) == (counters, quotas)
    dispatcher.set_view(cluster.dispatcher.view)
    assert dispatcher.submit(SPEC).node == chosen
    dispatcher.shutdown()


@pytest.mark.parametrize("allowed", [True, False])
async def test_the_default_for_upstreams_is_that_of_the_settings(allowed: bool) -> None:
    cluster = Cluster(
        A,
        aliases={"coder": ("tiny", "upstream:home")},
        upstreams={"home": UpstreamSettings(url="https://models.example/v1", model="far")},
        upstreams_by_default=allowed,
    )
    full(cluster, A)
    request = cluster.dispatcher.submit(replace(SPEC, demand=ResourceDemand("coder", 100), may_leave_pool=True))
    assert request.answer.upstream == ("home" if allowed else "")
    cluster.dispatcher.shutdown()


async def test_keys_share_the_prefix_of_a_shared_system_prompt_only() -> None:
    shared = "Be brief. " * 500
    cluster = Cluster(A, B, prompts=(shared,))
    demand = ResourceDemand("tiny", len(shared) + 10)
    first = replace(SPEC, demand=demand, messages=(Message("system", shared), Message("user", "hi")))
    one = cluster.dispatcher.submit(first)
    where, _ = cluster.last()
    cluster.say(lambda number: Admitted(number, 1200, 0, b"hash"))
    cluster.finish()
    two = cluster.dispatcher.submit(replace(first, key="other"))
    assert set(two.cached_shares) == {where}
    assert 0.9 < two.cached_shares[where] < 1.0, "the message of the user is not shared"
    for request in (one, two):
        cluster.dispatcher.close(request)
