"""Requests that name an alias: the first candidate that can start now, and the state of each candidate."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.admission.rate_limits import KeyLimits
from router.dispatch.aliases.candidates import MUST_WAIT, CandidateState, get_reason
from router.dispatch.aliases.tried_nodes import TriedNodes
from router.dispatch.answer import StreamedAnswer
from router.dispatch.request import RequestFailure, RequestSpec
from router.dispatch.request_state import RequestState
from router.placement.candidate import Placement, ResourceDemand
from router.placement.place import place
from router.placement.reservations import ReservationLedger
from router.profiles import ProfileSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.cluster.manual_pool import A, B, Cluster
from wire.frames import Admitted, Finished, GenerationParams, Message
from wire.refusals import RefusalCode, Refused
from wire.report import Model
from wire.units import GIB

BIG = a_model("big", weights=40 * GIB, kv_per_token=4 * 2**20, fingerprint="big-1", loaded=False)
HUGE = a_model("big", weights=40 * GIB, kv_per_token=128 * 2**20, fingerprint="big-1")
"""The big model, loaded, with requests that need 11 GiB."""
SMALL = a_model("small", fingerprint="small-1", features=("sampling",))
SHORT = a_model("small", fingerprint="small-1", context=2048)
ALIASES = {"coder": ("big", "small"), "far": ("nowhere", "coder"), "lonely": ("nowhere", "nothing")}
PROFILES = {"short": ProfileSettings(temperature=0.5, max_tokens=20, context_limit=40, top_k=5)}


class AliasCluster(Cluster):
    """The cluster of the dispatcher's tests with aliases and two models."""

    def __init__(self, *nodes: object, **settings: object) -> None:
        self.ready = False
        super().__init__(*nodes, aliases=ALIASES, profiles=PROFILES, **settings)  # pyright: ignore
        self.models = (BIG, SMALL)
        self.report()

    def ask(
        self,
        model: str = "coder",
        *,
        stream: bool = True,
        key: str = "k",
        size: int = 100,
        tokens: int | None = None,
        **params: object,
    ):
        generation = GenerationParams(**params)  # pyright: ignore
        demand = ResourceDemand(model, size, tokens, max_tokens=generation.max_tokens)
        return self.dispatcher.submit(RequestSpec(demand, key, "r", (Message("user", "hi"),), generation, 0, stream))

    def sent_models(self) -> list[str]:
        return [frame.model for _, frame in self.generates()]


@pytest.fixture
async def cluster() -> AsyncIterator[AliasCluster]:
    made = AliasCluster(A, B)
    yield made
    made.dispatcher.shutdown()
    made.settled()


def make_room(cluster: AliasCluster, headroom: int = 80 * GIB) -> None:
    cluster.memory = {A: a_memory(headroom, 96 * GIB)}
    cluster.report()


async def test_the_first_candidate_with_room_gets_the_request(cluster: AliasCluster):
    make_room(cluster)
    request = cluster.ask()
    assert cluster.sent_models() == ["big"]
    assert request.spec.demand.model == request.demand.model == "big"
    assert request.steps[0][1] == "sent"


async def test_without_room_the_next_candidate_starts_at_once(cluster: AliasCluster):
    request = cluster.ask("far")
    assert cluster.sent_models() == ["small"]
    cluster.finish()
    (record,) = cluster.dispatcher.history.records
    assert (record.model, record.alias) == ("small", "far")
    assert [one.model for one in record.passed_over] == ["nowhere", "big"]
    assert record.passed_over[0].reason == "no node serves nowhere"
    assert "GiB by estimate, best node node-" in record.passed_over[1].reason
    assert [what.partition(":")[0] for _, what, _ in record.steps[:2]] == ["passed over nowhere", "passed over big"]
    assert isinstance(request.outcome, Finished)
    assert [one.demand.model for one in cluster.dispatcher.history.decisions] == ["nowhere", "big", "small"]


async def test_usage_counts_the_model_that_answered(cluster: AliasCluster):
    cluster.ask()
    cluster.finish()
    assert [key for key in cluster.dispatcher.usage.drain()] == [("k", "small")]  # noqa: C416


async def test_a_model_that_cannot_be_loaded_is_passed_over(cluster: AliasCluster):
    cluster.models = (a_model("big", loaded=False, cause="a truncated file"), SMALL)
    cluster.report()
    cluster.ask()
    assert cluster.sent_models() == ["small"]


async def test_without_any_candidate_the_refusal_names_each(cluster: AliasCluster):
    request = cluster.ask("lonely")
    assert isinstance(request.outcome, Refused)
    assert request.outcome.status == 404
    assert request.outcome.message == (
        "no candidate of lonely can start now: nowhere: no node serves nowhere; nothing: no node serves nothing"
    )


@pytest.mark.parametrize(
    ("alias", "models", "code"),
    [
        ("far", (HUGE, SHORT), RefusalCode.TOO_LARGE),
        ("coder", (HUGE, SHORT), RefusalCode.TOO_LARGE),
        ("far", (SHORT,), RefusalCode.CONTEXT),
        ("lonely", (SHORT,), RefusalCode.NO_MODEL),
    ],
)
async def test_if_none_can_ever_start_the_refusal_is_that_of_the_first_candidate_that_a_node_serves(
    cluster: AliasCluster, alias: str, models: tuple[Model, ...], code: RefusalCode
):
    cluster.models = models
    cluster.report()
    outcome = cluster.ask(alias, tokens=4000).outcome
    assert isinstance(outcome, Refused)
    assert outcome.code is code
    assert outcome.message.startswith(f"no candidate of {alias} can start now: ")
    assert (outcome.numbers is not None) == (code is RefusalCode.TOO_LARGE)


def fill(cluster: AliasCluster) -> None:
    """Leave no room for either model, both of which are loaded."""
    cluster.models = (HUGE, SMALL)
    cluster.memory = dict.fromkeys((A, B), a_memory(0, 96 * GIB))
    cluster.report()


async def give_room(cluster: AliasCluster, headroom: int) -> None:
    cluster.memory[B] = a_memory(headroom, 96 * GIB)
    cluster.report(B)
    await asyncio.sleep(0)


async def test_a_queued_request_waits_for_the_first_candidate_that_could_ever_take_it(cluster: AliasCluster):
    fill(cluster)
    request = cluster.ask("far")
    assert (request.state, request.demand.model) == (RequestState.QUEUED, "big")


@pytest.mark.parametrize(("headroom", "model"), [(4 * GIB, "small"), (40 * GIB, "big")])
async def test_a_queued_request_tries_all_candidates_in_order(cluster: AliasCluster, headroom: int, model: str):
    fill(cluster)
    request = cluster.ask("far")
    await give_room(cluster, headroom)
    assert cluster.sent_models() == [model]
    assert request.demand.model == request.spec.demand.model == model
    cluster.finish()
    assert isinstance(request.outcome, Finished)
    (record,) = cluster.dispatcher.history.records
    before = ["nowhere", "big", "small"]
    assert [one.model for one in record.passed_over] == before[: before.index(model)]


async def test_a_queued_request_that_nothing_fits_keeps_its_candidate(cluster: AliasCluster):
    fill(cluster)
    request = cluster.ask()
    await give_room(cluster, GIB // 64)
    assert (request.state, request.demand.model) == (RequestState.QUEUED, "big")


async def test_at_its_deadline_the_refusal_names_all_candidates(cluster: AliasCluster):
    fill(cluster)
    request = cluster.ask()
    cluster.now += 31
    cluster.report()
    cluster.dispatcher.sweep()
    assert isinstance(request.outcome, Refused)
    assert request.outcome.code is RefusalCode.NO_ROOM
    assert "no candidate of coder can start now: big: needs" in request.outcome.message
    assert "; small: needs" in request.outcome.message
    assert "(waited 31 s in the queue)" in request.outcome.message


async def test_a_refusal_of_a_node_is_about_one_model(cluster: AliasCluster):
    cluster.nodes = (A,)
    make_room(cluster)
    request = cluster.ask()
    cluster.refuse(RefusalCode.TOO_LARGE)
    assert cluster.sent_models() == ["big", "small"]
    assert request.demand.prompt_tokens is None, "the other model has another tokenizer"
    cluster.say(lambda number: Admitted(number, 30))
    assert request.demand.prompt_tokens == 30


async def test_a_lost_node_is_lost_for_all_candidates(cluster: AliasCluster):
    cluster.memory = {A: a_memory(80 * GIB, 96 * GIB), B: a_memory(4 * GIB)}
    cluster.report()
    cluster.ask()
    assert cluster.last()[0] == A
    cluster.dispatcher.handle_lost_node(A, "gone")
    assert [(node, frame.model) for node, frame in cluster.generates()] == [(A, "big"), (B, "small")]


async def test_an_answer_that_began_stays_with_its_model(cluster: AliasCluster):
    cluster.memory = {A: a_memory(80 * GIB, 96 * GIB), B: a_memory(4 * GIB)}
    cluster.report()
    request = cluster.ask()
    cluster.speak()
    request.answer.flush()
    cluster.dispatcher.handle_lost_node(A, "gone")
    assert cluster.sent_models() == ["big"]
    assert request.demand.model == "big"


async def test_a_stream_with_its_head_sent_stays_with_its_model(cluster: AliasCluster):
    fill(cluster)
    request = cluster.ask()
    answer = request.answer
    assert isinstance(answer, StreamedAnswer)
    answer.mark_opened()
    await give_room(cluster, 4 * GIB)
    assert cluster.sent_models() == []
    assert request.demand.model == "big"
    cluster.now += cluster.settings.queue_timeout_seconds + 1
    cluster.report()
    cluster.dispatcher.sweep()
    assert cluster.sent_models() == []
    assert isinstance(request.outcome, Refused)
    assert request.demand.model == "big"


async def test_a_removed_node_is_removed_from_all_candidates(cluster: AliasCluster):
    cluster.nodes = (A,)
    make_room(cluster)
    request = cluster.ask()
    cluster.refuse(RefusalCode.TOO_LARGE)
    assert request.alias is not None
    assert [set(state.tried.never) for state in request.alias.list_states()] == [{A}]
    request.remove_node(A)
    assert [set(state.tried.never) for state in request.alias.list_states()] == [set()]
    assert [set(state.tried.refused) for state in request.alias.list_states()] == [set()]


async def test_the_prefix_cache_of_a_node_is_that_of_the_model_that_answered(cluster: AliasCluster):
    cluster.ask("coder", size=2000)
    node, _ = cluster.last()
    cluster.say(lambda number: Admitted(number, 500, prompt_hash=b"h"))
    cluster.finish()
    assert cluster.sent_models() == ["small"]
    assert set(cluster.ask("small", size=2000).cached_shares) == {node}


async def test_a_key_may_use_the_candidates_through_the_alias_only(cluster: AliasCluster):
    cluster.limits["k"] = KeyLimits(models=("coder",))
    cluster.ask()
    assert cluster.sent_models() == ["small"]
    refused = cluster.ask("small").outcome
    assert isinstance(refused, Refused)
    assert refused.status == 403
    cluster.limits["k"] = KeyLimits(models=("big",))
    fill(cluster)
    limited = cluster.ask()
    assert limited.alias is not None
    assert limited.alias.models == ("big",)


async def test_labels_of_a_key_hold_for_every_candidate(cluster: AliasCluster):
    cluster.limits["k"] = KeyLimits(labels=("lab",))
    cluster.labels = {B: frozenset({"lab"})}
    cluster.report()
    cluster.ask()
    assert [(node, frame.model) for node, frame in cluster.generates()] == [(B, "small")]


async def test_profile_applies_to_every_candidate(cluster: AliasCluster):
    request = cluster.ask("coder:short")
    ((_, frame),) = cluster.generates()
    assert (frame.model, frame.context_limit) == ("small", 40)
    assert (frame.params.temperature, frame.params.max_tokens, frame.params.top_k) == (0.5, 20, 5)
    assert request.demand.max_tokens == 20
    assert "sampling" in request.demand.features
    assert cluster.dispatcher.history.find_requests("r") == []
    cluster.finish()
    assert cluster.dispatcher.history.find_requests("r")[0].profile == "short"


async def test_a_prompt_beyond_the_context_limit_is_refused_with_the_numbers(cluster: AliasCluster):
    request = cluster.ask("small:short")
    cluster.say(lambda number: Admitted(number, 40))
    assert isinstance(request.outcome, Refused)
    assert (request.outcome.status, request.outcome.message) == (
        400,
        "the prompt has 40 tokens; the context limit of the profile short is 40 with the answer: shorten the prompt",
    )
    within = cluster.ask("small:short", max_tokens=20)
    cluster.say(lambda number: Admitted(number, 39))
    assert within.outcome is None, "the node ends the answer at the limit"


async def test_a_node_without_room_that_counts_too_many_tokens_ends_the_request(cluster: AliasCluster):
    request = cluster.ask("small:short")
    cluster.refuse(tokens=40)
    assert isinstance(request.outcome, Refused)
    assert request.outcome.code is RefusalCode.CONTEXT


async def test_an_unknown_profile_is_refused_before_the_quota(cluster: AliasCluster):
    cluster.limits["k"] = KeyLimits(requests_per_minute=1)
    refused = cluster.ask("small:none").outcome
    assert isinstance(refused, Refused)
    assert refused.message == "there is no profile 'none' for small; the profiles are short"
    assert cluster.ask("small").outcome is None


def test_a_candidate_with_room_was_passed_over_because_of_its_queue(cluster: AliasCluster):
    make_room(cluster)
    result = place(
        cluster.dispatcher.view, ResourceDemand("small", 100), ReservationLedger(), now=0.0, draw=lambda: 0.5
    )
    assert isinstance(result, Placement)
    assert get_reason(result, "small") == MUST_WAIT


async def test_a_crowding_key_waits_with_the_candidate_that_has_room(cluster: AliasCluster):
    cluster.nodes, cluster.models = (A,), (SMALL,)
    cluster.report()
    for key in ("bob", "eve"):
        cluster.ask("small", key=key)
    crowding = [cluster.ask("coder", key="greedy", size=8000) for _ in range(12)]
    waiting = [request for request in crowding if request.node is None]
    assert 0 < len(waiting) < 12
    request = waiting[0]
    assert (request.state, request.demand.model) == (RequestState.QUEUED, "small")
    assert request.alias is not None
    assert request.alias.reasons["small"] == MUST_WAIT
    assert cluster.ask("coder", key="alice", size=6000).node == A, "another key starts at once"


@pytest.mark.parametrize(
    ("opened", "taken", "models"),
    [
        (False, False, ["big", "small"]),
        (True, False, ["big"]),
        (False, True, ["big"]),
    ],
)
async def test_an_unseen_answer_of_a_lost_node_begins_again_with_another_model(
    cluster: AliasCluster, opened: bool, taken: bool, models: list[str]
):
    make_room(cluster)
    request = cluster.ask()
    cluster.models = (SMALL,)
    cluster.report(B)
    answer = request.answer
    assert isinstance(answer, StreamedAnswer)
    if opened:
        answer.mark_opened()
    cluster.speak("lost")
    if taken:
        answer.take_deltas()
    cluster.dispatcher.handle_lost_node(A, "gone")
    assert cluster.sent_models() == models
    if len(models) == 1:
        assert isinstance(request.outcome, RequestFailure)
        return
    assert cluster.generates()[-1][1].resume == ()
    cluster.speak("new")
    assert [text for delta in answer.take_deltas() for _, text in delta.pieces] == ["new"]


def test_a_removed_node_has_no_share_of_the_prompt():
    spec = RequestSpec(ResourceDemand("small"), "k", "r", (), GenerationParams(), 0, True)
    state = CandidateState(spec, spec.demand, TriedNodes(), None, {A: 0.5, B: 0.25})
    state.remove_node(A)
    assert state.cached_shares == {B: 0.25}
