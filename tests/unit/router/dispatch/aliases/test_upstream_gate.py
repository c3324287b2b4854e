"""Requests that an upstream takes: their model, their end, and pauses after failures."""

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from router.dispatch.active_request import ActiveRequest
from router.dispatch.circuit_breaker import MAX_FAULTS, SAME_FAULT_SECONDS
from router.dispatch.counters import OTHER
from router.dispatch.request import CANCELLED, RequestFailure, RequestSpec
from router.dispatch.request_state import RequestState
from router.placement.candidate import ResourceDemand
from router.upstreams import UpstreamSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import Finished, GenerationParams, Message
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.units import GIB

LABEL = "upstream:home/far"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Yield a node with a loaded model that has no room for a request."""
    made = Cluster(
        A,
        aliases={"coder": ("big", "upstream:home"), "lonely": ("nowhere", "upstream:home"), "local": ("nowhere",)},
        upstreams={"home": UpstreamSettings(url="https://models.example/v1", model="far")},
    )
    made.models = (a_model("big"),)
    made.memory = {A: a_memory(0)}
    made.report()
    yield made
    made.dispatcher.shutdown()
    made.settled()


def ask(cluster: Cluster, model: str = "coder", key: str = "k", *, may_leave: bool = True) -> ActiveRequest:
    spec = RequestSpec(
        ResourceDemand(model, 100),
        key,
        f"r-{key}",
        (Message("user", "hi"),),
        GenerationParams(),
        0,
        True,
        may_leave_pool=may_leave,
    )
    return cluster.dispatcher.submit(spec)


def fail(cluster: Cluster, fault: str = "no answer") -> None:
    """Submit a request that the upstream takes, and end it with a fault."""
    request = ask(cluster)
    assert request.answer.upstream == "home"
    cluster.dispatcher.upstreams.record_end("home", request.number, "failed", fault=fault)
    cluster.dispatcher.upstreams.end_request(request, RequestFailure(FailureCode.UPSTREAM_FAILED, fault))
    cluster.dispatcher.close(request)


async def test_a_request_of_an_upstream_counts_for_its_model(cluster: Cluster) -> None:
    request, end = ask(cluster), Finished(0, ("stop",), 7, 3)
    assert request.alias is not None
    assert (request.answer.upstream, request.demand.model, request.alias.uses_upstream) == ("home", LABEL, True)
    cluster.dispatcher.upstreams.record_end("home", request.number, "ok", prompt=7, completion=3)
    cluster.dispatcher.upstreams.end_request(request, end)
    cluster.dispatcher.upstreams.end_request(request, RequestFailure(FailureCode.UPSTREAM_FAILED, "late"))
    assert request.outcome == end
    counts = cluster.dispatcher.counters
    assert (set(counts.models), counts.requests, counts.attempts) == ({LABEL}, {"ok": 1}, 0)
    totals = counts.upstreams["home"]
    assert (totals.outcomes, totals.prompt_tokens, totals.completion_tokens) == ({"ok": 1}, 7, 3)
    assert cluster.dispatcher.usage.drain() == {("k", LABEL): UsageTotals(1, 0, 7, 0, 3)}
    (record,) = cluster.dispatcher.history.records
    assert (record.model, record.alias, [one.model for one in record.passed_over]) == (LABEL, "coder", ["big"])
    assert record.steps[-1][1] == f"passed on to {LABEL}"


async def test_a_node_with_room_precedes_the_upstream(cluster: Cluster) -> None:
    cluster.memory = {A: a_memory(8 * GIB)}
    cluster.report()
    request = ask(cluster)
    assert request.alias is not None
    assert (request.node, request.answer.upstream, request.alias.uses_upstream) == (A, "", False)


@pytest.mark.parametrize(
    ("limits", "may_leave", "why"),
    [
        (KeyLimits(upstreams=False), True, "this API key may not send prompts to upstreams"),
        (KeyLimits(), False, "it takes only chat completions, and completions of one prompt, in OpenAI's dialect"),
    ],
)
async def test_a_forbidden_upstream_takes_no_request(
    cluster: Cluster, limits: KeyLimits, may_leave: bool, why: str
) -> None:
    cluster.limits["k"] = limits
    for _ in range(MAX_FAULTS):
        cluster.dispatcher.upstreams.record_end("home", 1, "failed", fault="broken")
        cluster.now += SAME_FAULT_SECONDS + 1
    cluster.report()
    waiting = ask(cluster, may_leave=may_leave)
    assert (waiting.state, waiting.answer.upstream) == (RequestState.QUEUED, "")
    refused = ask(cluster, "lonely", may_leave=may_leave)
    assert isinstance(refused.outcome, Refused)
    assert refused.outcome.code is RefusalCode.NO_MODEL
    assert refused.outcome.message.endswith(f"upstream:home: {why}")
    assert set(cluster.dispatcher.counters.models) == {OTHER}, "no member has the model"


async def test_the_refusal_of_an_alias_without_an_upstream_names_none(cluster: Cluster) -> None:
    cluster.limits["k"] = KeyLimits(upstreams=False)
    refused = ask(cluster, "local").outcome
    assert isinstance(refused, Refused)
    assert refused.message == "no candidate of local can start now: nowhere: no node serves nowhere"


async def test_an_upstream_is_paused_after_faults_and_asked_again_with_one_request(cluster: Cluster) -> None:
    for _ in range(MAX_FAULTS):
        cluster.now += SAME_FAULT_SECONDS + 1
        cluster.report()
        fail(cluster, "the connection was refused")
    waiting = ask(cluster)
    assert (waiting.state, waiting.answer.upstream) == (RequestState.QUEUED, "")
    assert cluster.dispatcher.upstreams.find_obstacle("home") == (
        "not asked after failures in a row, the last one: the connection was refused"
    )
    cluster.dispatcher.close(waiting)
    cluster.now += 3600
    cluster.report()
    probe = ask(cluster)
    assert probe.answer.upstream == "home"
    assert ask(cluster, key="other").state is RequestState.QUEUED
    cluster.dispatcher.upstreams.record_end("home", probe.number, "cancelled")
    assert ask(cluster, key="third").answer.upstream == "home", "a probe without a result is made again"


async def test_a_cancelled_request_clears_no_faults_of_the_upstream(cluster: Cluster) -> None:
    for fault in range(MAX_FAULTS):
        cluster.now += SAME_FAULT_SECONDS + 1
        cluster.report()
        fail(cluster)
        request = ask(cluster)
        assert (request.answer.upstream == "home") is (fault + 1 < MAX_FAULTS)
        cluster.dispatcher.upstreams.record_end("home", request.number, "cancelled")
        cluster.dispatcher.close(request)
    assert cluster.dispatcher.upstreams.find_obstacle("home").endswith("the last one: no answer")


async def test_the_end_of_a_request_that_its_client_cancelled_is_ignored(cluster: Cluster) -> None:
    request = ask(cluster)
    cluster.dispatcher.close(request)
    cluster.dispatcher.upstreams.end_request(request, Finished(0, ("stop",), 7, 3))
    assert request.outcome is CANCELLED
    assert not any(cluster.dispatcher.counters.illegal_events.values())
    assert cluster.dispatcher.counters.requests == {"cancelled": 1}


async def test_a_request_of_a_greedy_key_goes_to_the_upstream_instead_of_waiting(cluster: Cluster) -> None:
    cluster.memory = {A: a_memory(16 * GIB)}
    cluster.report()
    big = RequestSpec(ResourceDemand("big", 100), "ada", "r", (), GenerationParams(), 0, stream=True)
    for key in ("ada", "bob"):
        cluster.dispatcher.submit(replace(big, key=key))
    demand = ResourceDemand("coder", 8000, 1500)
    greedy = replace(big, demand=demand, key="greedy", may_leave_pool=True)
    requests = [cluster.dispatcher.submit(greedy) for _ in range(8)]
    assert {request.node for request in requests} == {A, None}
    assert [request.answer.upstream for request in requests if request.node is None] == ["home"] * sum(
        request.node is None for request in requests
    )
    assert cluster.dispatcher.count_queued() == 0
