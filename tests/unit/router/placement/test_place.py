import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.candidate import (
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
    explain,
)
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, ClusterView, NodeView
from router.placement.cost_model import estimate_prefill_wait
from router.placement.place import place
from router.placement.policies import POLICIES, Policy
from router.placement.refusals import estimate_retry_seconds
from router.placement.reservations import NodeReservations, Reservation, ReservationLedger, SwapTurn
from router.placement.weights import UNKNOWN_RETRY_SECONDS
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.capacity.arithmetic import (
    KV_GROWTH_TOKENS,
    UNREADABLE,
    Fits,
    estimate_alone_bytes,
    estimate_request_need,
    estimate_tokenize_bytes,
    judge,
)
from wire.identity import NodeId
from wire.models.kind import ModelKind
from wire.models.version import ModelVersion
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import BatchGroup, EngineState, Memory, Model, Sharing
from wire.units import GIB, MIB
from wire.video import VideoPackage, VideoState

NOW = 1000.0
READY = EngineState("scripted", "ready")


def node(name: str, memory: Memory | None = None, *models: Model, **changes: Any) -> NodeView:
    facts: dict[str, Any] = {
        "state": "ready",
        "reported_at": NOW,
        "memory": memory or a_memory(),
        "engine": READY,
        "models": {model.name: model for model in models or (a_model(),)},
    } | changes
    return NodeView(NodeId(name), name, **facts)


def decide(
    *nodes: NodeView,
    ask: ResourceDemand | None = None,
    ledger: ReservationLedger | None = None,
    policy: str = "balanced",
    seed: int = 0,
    **more: Any,
) -> Placement | NoPlacement:
    draw: Callable[[], float] = random.Random(seed).random
    return place(
        ClusterView(nodes),
        ask or ResourceDemand("tiny", 400),
        ledger or ReservationLedger(),
        now=NOW,
        draw=draw,
        policy=POLICIES[policy],
        **more,
    )


def chosen(result: Placement | NoPlacement) -> str:
    assert isinstance(result, Placement), result
    return result.chosen.name


def refused(result: Placement | NoPlacement) -> Refused:
    assert isinstance(result, NoPlacement), result
    return result.refused


def get_candidates_and_node(result: Placement | NoPlacement) -> tuple[tuple[Candidate, ...], NodeId | None]:
    return result.candidates, result.chosen.node if isinstance(result, Placement) else None


def why(result: Placement | NoPlacement, name: str) -> str:
    return next(candidate.why for candidate in result.candidates if candidate.name == name)


def test_a_change_of_a_model_takes_effect_at_the_next_decision():
    """A view computes values of its models once. A copy with other models, as a new report makes it, has its own."""
    loaded, batch = a_model(), BatchGroup(rows=2, longest=3000, tokens=6000)
    view = node("a", None, loaded)
    (first,), _ = get_candidates_and_node(decide(view))
    for model in (
        msgspec.structs.replace(loaded, loaded=False, load_seconds=9.0),
        msgspec.structs.replace(loaded, groups=(batch,)),
        msgspec.structs.replace(loaded, features=("embed",)),
    ):
        (changed,), _ = get_candidates_and_node(decide(replace(view, models={"tiny": model})))
        (fresh,), _ = get_candidates_and_node(decide(node("a", None, model)))
        assert changed == fresh != first
        assert changed.need == estimate_request_need(model, changed.prompt_tokens, changed.output_tokens)
    assert get_candidates_and_node(decide(view))[0] == (first,)


# Cached prompts

LONG = ResourceDemand("tiny", 0, 4_000)


def test_place_prefers_the_node_with_the_cached_prompt():
    result = decide(node("a"), node("b"), node("c"), ask=LONG, cached_shares={NodeId("b"): 0.9})
    assert chosen(result) == "b"
    times = {one.name: one.expected_ttft for one in result.candidates}
    assert times["b"] == pytest.approx(times["a"] * 0.1)


def test_a_queue_that_costs_more_than_the_cache_saves_sends_it_elsewhere():
    def busy(tokens: int) -> NodeView:
        return node("b", engine=EngineState("mlx", "ready", queued_tokens=tokens))

    assert chosen(decide(node("a"), busy(3_000), ask=LONG, cached_shares={NodeId("b"): 0.9})) == "b"
    assert chosen(decide(node("a"), busy(4_000), ask=LONG, cached_shares={NodeId("b"): 0.9})) == "a"


def test_expected_answer_is_the_usual_length_within_limit_and_context():
    model = a_model(expected_output=64, context=4096)
    assert ResourceDemand("tiny").estimate_output_tokens(model, 100) == 64
    assert ResourceDemand("tiny", max_tokens=10).estimate_output_tokens(model, 100) == 10
    assert ResourceDemand("tiny", max_tokens=1000).estimate_output_tokens(model, 100) == 64
    assert [
        ResourceDemand("tiny").estimate_output_tokens(model, tokens) for tokens in (4032, 4033, 4090, 4096, 9000)
    ] == [
        64,
        63,
        6,
        1,
        1,
    ]
    assert ResourceDemand("tiny").estimate_output_tokens(a_model(expected_output=64, context=0), 9000) == 64
    assert ResourceDemand("tiny").estimate_output_tokens(a_model(expected_output=1), 100) == 1
    assert ResourceDemand("tiny", 400).estimate_prompt_tokens(a_model(context=0)) == 100


def test_the_numbers_of_a_candidate_count_what_was_reserved_since_its_report():
    ledger, memory = ReservationLedger(), a_memory(reserved=1 * GIB)
    ledger.reserve(NodeId("a"), 1, 1, 3 * GIB)
    (found,), _ = get_candidates_and_node(decide(node("a", memory), ledger=ledger))
    numbers = found.build_memory_numbers()
    assert (numbers.reserved, numbers.estimate, numbers.margin) == (4 * GIB, found.need, memory.margin)
    assert numbers.predicted == (memory.current or 0) + 4 * GIB + found.need + memory.margin
    assert (numbers.headroom, numbers.ceiling, numbers.cap) == (4 * GIB, memory.ceiling, memory.cap)


def test_tokens_generated_elsewhere_are_prefilled_again():
    asked = ResourceDemand("tiny", 400, prompt_tokens=1000, known_tokens=500)
    (alone,), _ = get_candidates_and_node(decide(node("a"), ask=asked))
    assert (alone.prefill_tokens, alone.output_tokens) == (1500, 500 + KV_GROWTH_TOKENS)
    assert alone.expected_ttft == pytest.approx(1.5), "at 1,000 tokens per second"
    (warm,), _ = get_candidates_and_node(decide(node("a"), ask=asked, cached_shares={NodeId("a"): 0.75}))
    assert (warm.prefill_tokens, warm.expected_ttft, warm.cached_share) == (250 + 500, pytest.approx(0.75), 0.75)
    usual = node("a", None, a_model(expected_output=256))
    (short,), _ = get_candidates_and_node(
        decide(usual, ask=ResourceDemand("tiny", 400, prompt_tokens=1000, known_tokens=3))
    )
    assert short.output_tokens == 256, "no less than is usual"


def test_short_prompts_of_a_conversation_stay_together():
    names = {chosen(decide(node("a"), node("b"), seed=seed, cached_shares={NodeId("b"): 0.7})) for seed in range(20)}
    assert names == {"b"}


def test_unloaded_model_is_not_warm():
    cold = node("b", None, a_model(loaded=False, load_seconds=5.0))
    result = decide(node("a"), cold, ask=LONG, cached_shares={NodeId("b"): 1.0})
    assert chosen(result) == "a"


@given(st.integers(0, 64), st.floats(0, 1), st.sampled_from(list(POLICIES)))
def test_cached_tokens_do_not_reduce_the_need(mib: int, share: float, policy: str):
    nodes = (node("a", a_memory(mib * MIB)), node("b", a_memory(mib * MIB)))
    cold, warm = decide(*nodes, policy=policy), decide(*nodes, policy=policy, cached_shares={NodeId("a"): share})
    assert type(cold) is type(warm)
    assert [one.need for one in cold.candidates] == [one.need for one in warm.candidates]
    assert [one.why for one in cold.candidates] == [one.why for one in warm.candidates]


# the filter

REASONS = [
    ({"state": "suspect"}, "is suspect"),
    ({"state": "asleep"}, "is asleep"),
    ({"state": "paused", "sharing": Sharing(paused=True, why="somebody plays")}, "is paused: somebody plays"),
    ({"cordoned": True}, "is cordoned"),
    ({"draining": True}, "is draining"),
    ({"reported_at": NOW - MAX_REPORT_AGE_SECONDS - 0.1}, "sent its last report 3.1 s ago"),
    ({"engine": EngineState("mlx", "restarting", "signal 6")}, "has an engine that is restarting: signal 6"),
    ({"engine": EngineState("mlx", "hung")}, "has an engine that is hung"),
    (
        {"memory": a_memory(1 * MIB)},
        "needs 74.2 MiB, headroom is 1.0 MiB (of 24.0 GiB, 22.0 GiB are in use, 0.0 MiB reserved, "
        "2.0 GiB kept as margin)",
    ),
    (
        {"memory": a_memory(phys=None, current=None, headroom=None)},
        "the footprint of the engine cannot be read; the node starts no requests until then",
    ),
    ({"models": {"other": a_model("other")}}, "does not serve tiny"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS)
@pytest.mark.parametrize("policy", list(POLICIES))
def test_excluded_candidate_has_a_reason(change: dict[str, Any], reason: str, policy: str):
    bad = node("bad", **change)
    result = decide(bad, node("good"), policy=policy)
    assert chosen(result) == "good"
    assert why(result, "bad") == reason
    assert isinstance(decide(bad, policy=policy), NoPlacement)


@pytest.mark.parametrize(
    "memory",
    [a_memory(phys=None, current=None, headroom=None), a_memory(ceiling=1, headroom=1 - 24 * GIB, bound_by=UNREADABLE)],
    ids=["the engine", "its machine"],
)
def test_place_reports_unreadable_memory(memory: Memory):
    result = decide(node("blind", memory), node("too", memory))
    assert isinstance(result, NoPlacement)
    assert result.refused.code is RefusalCode.UNREADABLE
    assert result.refused.message.startswith("the memory of blind cannot be read")
    assert result.refused.retry_after == 2.0
    full = decide(node("blind", memory), node("full", a_memory(1 * MIB)))
    assert isinstance(full, NoPlacement)
    assert full.refused.code is RefusalCode.NO_ROOM
    assert "best node full" in full.refused.message


def test_place_excludes_a_context_shorter_than_the_prompt():
    small, large = node("small", None, a_model(context=100)), node("large", None, a_model(context=1000))
    result = decide(small, large, ask=ResourceDemand("tiny", 0, 500))
    assert chosen(result) == "large"
    assert why(result, "small") == "has a context of 100 tokens, the prompt has 500"
    assert isinstance(decide(small, ask=ResourceDemand("tiny", 0, 100)), NoPlacement), "no token is left for an answer"
    assert chosen(decide(small, ask=ResourceDemand("tiny", 0, 99))) == "small"
    assert chosen(decide(node("unknown", None, a_model(context=0)), ask=ResourceDemand("tiny", 0, 500))) == "unknown"


def test_an_estimated_prompt_is_never_longer_than_the_context():
    assert chosen(decide(node("a"), ask=ResourceDemand("tiny", 10**7))) == "a"


def test_a_report_that_is_just_fresh_counts():
    assert chosen(decide(node("a", reported_at=NOW - MAX_REPORT_AGE_SECONDS))) == "a"


MAKES_ROOM = SwapTurn(NodeId("a"), "a", "large", frozenset({"tiny"}), 1, NOW)


@pytest.mark.parametrize(
    ("ask", "change", "reason", "code"),
    [
        (
            ResourceDemand("tiny"),
            {},
            "makes room for large: it takes no new requests for tiny until large is loaded",
            RefusalCode.NO_ROOM,
        ),
        (ResourceDemand("large"), {}, "", None),
        (ResourceDemand("tiny", known_tokens=1), {}, "", None),
        (ResourceDemand("tiny"), {"state": "asleep"}, "is asleep", RefusalCode.NOT_READY),
    ],
)
def test_swapping_node_takes_no_request_for_the_leaving_model(
    ask: ResourceDemand, change: dict[str, object], reason: str, code: RefusalCode | None
):
    ledger = ReservationLedger()
    ledger.turns[NodeId("a")] = MAKES_ROOM
    nodes = node("a", None, a_model(), a_model("large"), **change), node("b", None, a_model(), a_model("large"))
    found, other = decide(*nodes, ask=ask, ledger=ledger).candidates
    assert (found.why, found.code, other.why) == (reason, code, "")


TRIED = [
    (AttemptHistory(version=ModelVersion("tiny-1")), "", None),
    (
        AttemptHistory(version=ModelVersion("another one")),
        "has another model tiny: fingerprint tiny-1, not fingerprint another ",
        RefusalCode.NOT_READY,
    ),
    (AttemptHistory(lost=[NodeId("a")]), "was lost with this request", RefusalCode.NOT_READY),
    (
        AttemptHistory(never={NodeId("a"): Refused(RefusalCode.TOO_LARGE, "needs 9 GiB")}),
        "refused this request permanently: needs 9 GiB",
        RefusalCode.TOO_LARGE,
    ),
    (
        AttemptHistory(refused={NodeId("a"): NOW}),
        "refused this request and has not reported since",
        RefusalCode.NO_ROOM,
    ),
    (AttemptHistory(refused={NodeId("a"): NOW - 1}), "", None),
]


@pytest.mark.parametrize(("trials", "reason", "code"), TRIED)
def test_attempt_history_excludes_nodes(trials: AttemptHistory, reason: str, code: RefusalCode | None):
    (found,) = decide(node("a"), trials=trials).candidates
    assert (found.why, found.code) == (reason, code)


def test_a_model_without_a_fingerprint_is_not_the_one_that_began_an_answer():
    unknown = node("a", None, a_model(fingerprint=""))
    found = decide(unknown, trials=AttemptHistory(version=ModelVersion("tiny-1")))
    assert why(found, "a") == "has another model tiny: fingerprint unknown, not fingerprint tiny-1"


@pytest.mark.parametrize(
    ("labels", "wanted", "reason"),
    [
        ((), (), ""),
        (("lab",), (), ""),
        (("lab",), ("lab",), ""),
        (("lab", "fast"), ("lab",), ""),
        (("lab",), ("lab", "fast", "big"), "has no label big, fast"),
    ],
)
def test_a_node_needs_all_labels_of_the_key(labels: tuple[str, ...], wanted: tuple[str, ...], reason: str):
    result = decide(node("a", labels=frozenset(labels)), ask=ResourceDemand("tiny", labels=frozenset(wanted)))
    assert why(result, "a") == reason
    if reason:
        assert refused(result) == Refused(
            RefusalCode.NOT_ALLOWED,
            "no node with the labels that this API key is bound to (big, fast, lab) serves tiny",
        )


def test_a_request_can_name_its_only_node():
    result = decide(node("a"), node("b"), ask=ResourceDemand("tiny", node="b"))
    assert isinstance(result, Placement)
    assert result.chosen.node == "b"
    assert [one.why for one in result.candidates if not one.feasible] == ["is not the node that the request names"]


@pytest.mark.parametrize("prompt", [None, 10**9], ids=["estimated", "counted"])
def test_a_named_node_without_the_model_is_refused_by_name(prompt: int | None):
    nodes = node("a", None, a_model("tiny")), node("b", None, a_model("other"))
    answer = refused(decide(*nodes, ask=ResourceDemand("tiny", prompt_tokens=prompt, node="b")))
    assert answer.code is RefusalCode.NO_MODEL
    assert "b does not serve 'tiny'" in answer.message
    assert "`cluster models`" in answer.message


def test_a_key_with_labels_gets_a_404_for_a_model_that_is_nowhere():
    bound = ResourceDemand("other", labels=frozenset({"lab"}))
    assert refused(decide(node("a"), ask=bound)).code is RefusalCode.NO_MODEL
    elsewhere = node("b", None, a_model("other"), labels=frozenset({"lab"}), state="asleep")
    answer = refused(decide(node("a", None, a_model("other")), elsewhere, ask=bound))
    assert answer == Refused(RefusalCode.NOT_READY, "no node can serve other now: b is asleep", None, 2.0)


def test_place_counts_reservations_since_the_report():
    ledger = ReservationLedger()
    ledger.reserve(NodeId("a"), 1, 1, 8 * GIB - 10 * MIB)
    result = decide(node("a"), node("b", a_memory(2 * GIB)), ledger=ledger)
    assert chosen(result) == "b"
    assert why(result, "a").startswith("needs 74.2 MiB, headroom is 10.0 MiB (of 24.0 GiB, ")


def test_a_refusal_corrects_the_headroom_until_the_next_report():
    corrections = {NodeId("a"): HeadroomCorrection(NOW, 20 * MIB)}
    assert isinstance(decide(node("a"), corrections=corrections), NoPlacement)
    assert chosen(decide(node("a", reported_at=NOW + 0.1), corrections=corrections)) == "a"


@pytest.mark.parametrize(
    ("memory", "correction", "withheld", "headroom"),
    [
        (a_memory(reserved=1 * GIB), HeadroomCorrection(NOW, 1 * GIB), 6 * GIB, 1 * GIB),
        (a_memory(reserved=1 * GIB), HeadroomCorrection(NOW, 7 * GIB), 2 * GIB, 5 * GIB),
        (a_memory(reserved=1 * GIB), HeadroomCorrection(NOW - 1, 1 * GIB), 2 * GIB, 5 * GIB),
        (a_memory(phys=None, current=None, headroom=None), HeadroomCorrection(NOW, 1 * GIB), 2 * GIB, None),
    ],
)
def test_a_correction_withholds_what_the_view_overstates(
    memory: Memory, correction: HeadroomCorrection, withheld: int, headroom: int | None
):
    ledger = ReservationLedger()
    ledger.reserve(NodeId("a"), 1, 1, 2 * GIB)
    (found,) = decide(node("a", memory), ledger=ledger, corrections={NodeId("a"): correction}).candidates
    assert (found.withheld, found.headroom) == (withheld, headroom)


def test_place_retries_a_refusing_node_after_its_next_report():
    trials = AttemptHistory(refused={NodeId("a"): NOW})
    assert why(decide(node("a"), trials=trials), "a") == "refused this request and has not reported since"
    assert chosen(decide(node("a", reported_at=NOW + 0.1), trials=trials)) == "a"


def test_hold_excludes_all_requests_but_its_own():
    ledger = ReservationLedger()
    ledger.hold_memory(5, NodeId("a"), 8 * GIB - 10 * MIB)
    assert isinstance(decide(node("a"), ledger=ledger), NoPlacement)
    assert chosen(decide(node("a"), ledger=ledger, trials=AttemptHistory(waiting=5))) == "a"


def test_a_feature_that_the_model_lacks_rules_the_node_out():
    able = node("able", None, a_model(features=("tools",)))
    ask = ResourceDemand("tiny", 400, features=frozenset({"tools"}))
    assert chosen(decide(node("plain"), able, ask=ask)) == "able"
    refusal = refused(decide(node("plain"), ask=ask))
    assert (refusal.code, refusal.message) == (RefusalCode.UNSUPPORTED, "no node supports tools with tiny")


def test_a_request_is_accepted_by_models_of_its_kind_only():
    vectors = node("vectors", None, a_model(features=("embed",)))
    scores = node("scores", None, a_model(features=("rerank",)))
    chat, embed, rerank = (ResourceDemand("tiny", 400, kind=kind) for kind in ModelKind)
    assert chosen(decide(node("plain"), vectors, ask=chat)) == "plain"
    assert chosen(decide(node("plain"), vectors, ask=embed)) == "vectors"
    assert chosen(decide(node("plain"), vectors, scores, ask=rerank)) == "scores"
    assert "for embed requests" in why(decide(node("plain"), vectors, ask=chat), "vectors")
    for serving, ask, route in (
        (vectors, chat, "/v1/embeddings"),
        (vectors, rerank, "/v1/embeddings"),
        (scores, embed, "/v1/rerank"),
        (node("plain"), embed, "/v1/chat/completions"),
    ):
        refusal = refused(decide(serving, ask=ask))
        assert refusal.code is RefusalCode.UNSUPPORTED
        assert route in refusal.message


def test_the_texts_of_a_request_take_time_but_no_memory_together():
    vectors = node("vectors", None, a_model(features=("embed",), bytes_per_token=4.0))
    one, many = (
        decide(vectors, ask=ResourceDemand("tiny", 400, max_tokens=1, kind=ModelKind.EMBED, other_bytes=more))
        for more in (0, 40_000)
    )
    assert isinstance(one, Placement)
    assert isinstance(many, Placement)
    assert many.chosen.need == one.chosen.need
    assert many.chosen.prefill_tokens == one.chosen.prefill_tokens + 10_000 == 10_100


def test_place_refuses_an_unknown_model_in_any_node_state():
    ask = ResourceDemand("tiny", 400, features=frozenset({"tools", "sampling"}))
    lost = node("lost", None, a_model(features=("tools",)), state="lost")
    refusal = refused(decide(lost, node("plain"), ask=ask))
    assert refusal.message == "no node supports top_k, min_p, penalties or logit_bias with tiny"
    other = node("other", None, a_model(features=("sampling",)))
    assert refused(decide(lost, other, ask=ask)).code is RefusalCode.UNSUPPORTED, "neither offers both"


def test_a_feature_of_a_node_that_is_away_is_worth_waiting_for():
    ask = ResourceDemand("tiny", 400, features=frozenset({"tools"}))
    away = node("away", None, a_model(features=("tools",)), state="lost")
    assert refused(decide(away, node("plain"), ask=ask)).code is RefusalCode.NOT_READY


# models that are not loaded


def test_place_excludes_a_model_with_weights_above_the_cap():
    small = node("small", None, a_model(loaded=False, weights=23 * GIB))
    result = decide(small, ask=ResourceDemand("tiny", 0, 1, 1))
    assert (refused(result).code, refused(result).status) == (RefusalCode.TOO_LARGE, 400)
    assert "the largest node can give 22.0 GiB" in refused(result).message
    large = node("large", a_memory(90 * GIB, cap=96 * GIB), a_model(loaded=False, weights=23 * GIB))
    assert chosen(decide(small, large, ask=ResourceDemand("tiny", 0, 1, 1))) == "large"


def test_weights_count_where_a_model_is_not_loaded():
    room = estimate_request_need(a_model(), 100, 64)
    cold = node("cold", a_memory(room + GIB - 1), a_model(loaded=False, weights=1 * GIB))
    assert why(decide(cold), "cold").startswith("needs 1.1 GiB, headroom is 1.1 GiB")
    assert chosen(decide(node("cold", a_memory(room + GIB), a_model(loaded=False, weights=1 * GIB)))) == "cold"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_weights_of_a_loading_model_count_once(policy: str):
    room = estimate_request_need(a_model(), 100, 64)
    reading = a_model(loaded=False, loading=True, weights=4 * GIB)
    assert chosen(decide(node("a", a_memory(room), reading), policy=policy)) == "a"
    queued = node("a", a_memory(room), reading, a_model("other", loaded=False, loading=True))
    assert isinstance(decide(queued, policy=policy), NoPlacement), "of two loads the started one is not known"


def test_a_node_that_has_it_wins_over_one_that_must_load_it():
    cold = node("cold", None, a_model(loaded=False, weights=1, load_seconds=20.0, prefill_speed=5000.0))
    assert chosen(decide(cold, node("warm", None, a_model(prefill_speed=100.0)))) == "warm"
    halfway = node("halfway", None, a_model(loaded=False, loading=True, weights=1, load_seconds=20.0))
    assert chosen(decide(cold, halfway)) == "halfway"
    nearly = node("nearly", None, a_model(loaded=False, loading=True, progress=0.9, weights=1, load_seconds=20.0))
    assert chosen(decide(cold, halfway, nearly)) == "nearly"


def test_the_kernels_and_the_profile_of_a_load_are_left_when_its_weights_are_read():
    read = node("read", None, a_model(loaded=False, loading=True, progress=1.0, weights=1, load_seconds=20.0))
    assert chosen(decide(read, node("warm", None, a_model(prefill_speed=500.0)))) == "warm"


@settings(deadline=None)
@given(
    prefill=st.floats(20, 5000),
    decode=st.floats(5, 200),
    load=st.floats(0.5, 300),
    tokens=st.integers(1, 2000),
    spare=st.integers(0, 4096),
    seed=st.integers(0, 10**6),
    extra=st.integers(0, 40),
)
def test_a_sequential_chat_stays_on_the_node_that_has_the_model_loaded(
    prefill: float, decode: float, load: float, tokens: int, spare: int, seed: int, extra: int
):
    """Nodes of one kind, one request after the other. The warm one has just enough memory, the cold ones have much
    more."""
    ask = ResourceDemand("tiny", 0, tokens)
    model = a_model(prefill_speed=prefill, decode_speed=decode)
    need = estimate_request_need(model, tokens, ask.estimate_output_tokens(model, tokens))
    warm = node("warm", a_memory(need + spare * MIB, cap=96 * GIB), model)
    unloaded = msgspec.structs.replace(model, loaded=False, load_seconds=load)
    colds = [node(f"cold-{one}", a_memory(40 * GIB, cap=96 * GIB), unloaded) for one in range(1 + extra)]
    assert chosen(decide(*colds, warm, ask=ask, seed=seed)) == "warm"


def test_a_busy_node_with_the_model_loses_to_one_that_loads_it_sooner():
    busy = node("busy", None, a_model(prefill_speed=100.0), engine=EngineState("x", "ready", queued_tokens=9000))
    cold = node("cold", None, a_model(prefill_speed=100.0, loaded=False, load_seconds=5.0))
    assert chosen(decide(busy, cold)) == "cold"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_place_excludes_an_unloadable_model_with_the_reason(policy: str):
    broken = node("broken", a_memory(60 * GIB, cap=96 * GIB), a_model(loaded=False, cause="a truncated file"))
    result = decide(broken, node("sound"), policy=policy)
    assert chosen(result) == "sound"
    assert why(result, "broken") == "cannot load tiny: a truncated file"


def test_when_no_node_can_load_it_the_causes_are_the_answer():
    broken = a_model(loaded=False, cause="a truncated file")
    answer = refused(decide(node("a", None, broken), node("b", None, broken, state="lost"), node("c", models={})))
    assert (answer.code, answer.status, answer.final) == (RefusalCode.LOAD_FAILED, 500, True)
    assert answer == Refused(RefusalCode.LOAD_FAILED, "no node can load tiny: a: a truncated file; b: a truncated file")
    alone = refused(decide(node("a", None, broken)))
    assert alone == Refused(RefusalCode.LOAD_FAILED, "no node can load tiny: a: a truncated file", None, None, "a")
    many = [node(name, None, a_model(loaded=False, cause=f"no {name}")) for name in "abcdef"]
    text = "no node can load tiny: a: no a; b: no b; c: no c; d: no d"
    assert refused(decide(*many[:4])).message == text
    assert refused(decide(*many[:5])).message == f"{text}; and 1 more"
    assert refused(decide(*many)).message == f"{text}; and 2 more"
    assert answer.retry_after is None


def test_unloadable_model_is_no_reason_to_wait():
    broken = node("broken", None, a_model(loaded=False, cause="a truncated file"))
    assert refused(decide(broken, node("away", state="asleep"))).code is RefusalCode.NOT_READY
    assert refused(decide(broken, node("small"), ask=ResourceDemand("tiny", 0, 5000))).code is RefusalCode.CONTEXT
    model = a_model(kv_per_token=10 * GIB // 1000, context=100_000)
    roomy = node("roomy", a_memory(500 * GIB, cap=512 * GIB), a_model(loaded=False, cause="x", context=100_000))
    answer = refused(decide(roomy, node("small", None, model), ask=ResourceDemand("tiny", 0, 4000)))
    assert (answer.code, answer.node) == (RefusalCode.TOO_LARGE, "small")


def test_a_node_that_answered_that_it_cannot_load_it_counts_as_one():
    told = Refused(RefusalCode.LOAD_FAILED, "tiny cannot be loaded: a truncated file")
    trials = AttemptHistory(never={NodeId("a"): told})
    assert chosen(decide(node("a"), node("b"), trials=trials)) == "b"
    answer = refused(decide(node("a"), trials=trials))
    assert (answer.code, answer.message) == (RefusalCode.LOAD_FAILED, "no node can load tiny: a: a truncated file")


def test_a_final_refusal_of_one_node_is_not_that_of_the_cluster():
    model = a_model(kv_per_token=10 * GIB // 1000, context=100_000)
    nodes = node("a", None, model), node("b", a_memory(9 * GIB, cap=25 * GIB), model)
    ask, no = ResourceDemand("tiny", 0, 4000), Refused(RefusalCode.UNSUPPORTED, "no grammar")
    answer = refused(decide(*nodes, ask=ask, trials=AttemptHistory(never={NodeId("a"): no})))
    assert (answer.code, answer.node) == (RefusalCode.TOO_LARGE, "b")
    never = {NodeId(name): no for name in "ab"}
    assert refused(decide(*nodes, ask=ask, trials=AttemptHistory(never=never))) == no


def idle(name: str, room: int, *models: Model, **changes: Any) -> NodeView:
    return node(
        name, a_memory(room), a_model("other"), *(models or (a_model(loaded=False, weights=9 * GIB),)), **changes
    )


def asked(*nodes: NodeView, **more: Any) -> str | None:
    result = decide(*nodes, **more)
    assert isinstance(result, NoPlacement)
    return None if result.candidate is None else result.candidate.name


def test_place_swaps_models_of_an_idle_node():
    assert asked(idle("a", 1 * GIB), idle("b", 2 * GIB)) == "b"
    assert asked(idle("busy", 1 * GIB, engine=EngineState("x", "ready", running=1))) is None
    assert asked(idle("small", 1 * GIB, a_model(loaded=False, weights=23 * GIB), a_model("other"))) == "small", (
        "the node counts the tokens and refuses for good"
    )
    empty = node("empty", a_memory(1 * GIB), a_model(loaded=False, weights=9 * GIB))
    assert asked(empty) is None, "the node has nothing to evict"
    for running, waits in ((1, 0), (0, 1), (1, 1)):
        assert asked(idle("busy", 1 * GIB, engine=EngineState("x", "ready", running=running, waiting=waits))) is None
    near, far = a_model(loaded=False, weights=2 * GIB), a_model(loaded=False, weights=9 * GIB)
    assert asked(idle("far", 2 * GIB, far), idle("near", 1 * GIB, near)) == "near", "it lacks the least"


def test_place_swaps_models_only_if_the_request_then_fits():
    ask = ResourceDemand("tiny", 400, max_tokens=64)
    need = estimate_request_need(a_model(), 100, 64)
    for over, name in ((0, "a"), (1, None)):
        weights = 22 * GIB - need + over
        exact = idle("a", 1 * GIB, a_model(loaded=False, weights=weights))
        beside = node("beside", a_memory(1 * GIB, cap=96 * GIB), a_model(loaded=False, weights=weights))
        assert asked(exact, beside, ask=ask) == name


def test_place_does_not_swap_while_another_node_has_the_model():
    assert asked(idle("a", 1 * GIB), node("has", a_memory(0))) is None
    assert asked(idle("a", 1 * GIB), node("has", a_memory(0), state="lost")) == "a"
    loading = a_model(loaded=False, loading=True, weights=9 * GIB)
    assert asked(idle("a", 1 * GIB), node("loads", a_memory(0), loading)) is None
    trials = AttemptHistory(refused={NodeId("a"): NOW - 9})
    assert asked(idle("a", 1 * GIB), trials=trials) is None
    ledger = ReservationLedger()
    ledger.reserve(NodeId("a"), 1, 1, 0)
    assert asked(idle("a", 1 * GIB), ledger=ledger) is None


# the arithmetic of one node

NAME = NodeId("a")
ASK = ResourceDemand("tiny", 400)
NEED = estimate_request_need(a_model(), 100, 64)


def test_a_candidate_at_rest_carries_the_whole_arithmetic():
    memory, model = a_memory(reserved=1 * GIB), a_model(load_seconds=20.0)
    (found,) = decide(node("a", memory, model)).candidates
    assert found == Candidate(
        NAME,
        "a",
        "ready",
        need=NEED,
        headroom=7 * GIB,
        memory=memory,
        prompt_tokens=100,
        output_tokens=64,
        expected_ttft=0.1,
        model=model,
        prefill_tokens=100,
        expected_answer=64 / 50,
    )


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({}, 20.0),
        ({"loading": True}, 10.0),
        ({"loading": True, "progress": 0.25}, 15.0),
        ({"loading": True, "progress": 0.75}, 5.0),
        ({"loading": True, "progress": 0.95}, 2.0),
        ({"loading": True, "progress": 1.0}, 2.0),
    ],
)
def test_a_load_costs_its_weights_once_and_the_time_that_is_left(change: dict[str, Any], seconds: float):
    model = a_model(loaded=False, weights=3 * GIB, load_seconds=20.0, **change)
    (found,) = decide(node("a", None, model), cached_shares={NAME: 0.9}).candidates
    weights = 0 if change else 3 * GIB
    assert (found.need, found.weights, found.cached_share, found.prefill_tokens) == (NEED + weights, weights, 0.0, 100)
    assert found.expected_ttft == pytest.approx(0.1 + seconds)


@pytest.mark.parametrize(
    ("engine", "taken", "ttft", "answer", "delay"),
    [
        (EngineState("x", "ready", running=3), 0, 0.16, 1.28, 0.03),
        (EngineState("x", "ready", running=3), 3, 0.16, 1.28 * 1.3, 0.03),
        (EngineState("x", "ready", rows=4), 3, 0.1, 1.28 * 1.3, 0.0),
        (EngineState("x", "ready", rows=4), 4, 0.1 + 1.28 * 1.4 / 4, 1.28 * 1.4, 0.0),
        (EngineState("x", "ready", rows=1), 2, 0.1 + 2 * 1.28 * 1.2, 1.28 * 1.2, 0.0),
        (EngineState("x", "ready", rows=0), 9, 0.1, 1.28 * 1.9, 0.0),
        (EngineState("x", "ready", queued_tokens=50), 0, 0.15, 1.28, 0.0),
    ],
)
def test_expected_times_count_decoding_and_reserved_rows(
    engine: EngineState, taken: int, ttft: float, answer: float, delay: float
):
    ledger = ReservationLedger()
    for number in range(taken):
        ledger.reserve(NAME, number, number, 0)
    (found,) = decide(node("a", engine=engine), ledger=ledger).candidates
    expected = (ttft, answer, delay)
    assert (found.expected_ttft, found.expected_answer, found.delay) == pytest.approx(expected)
    assert found.in_flight == taken


def test_a_text_that_takes_more_to_tokenize_than_to_decode_needs_that():
    text = 4 * 100_000
    small = a_model(kv_per_token=1, transient=0, context=100_000)
    (found,) = decide(node("a", None, small), ask=ResourceDemand("tiny", text)).candidates
    assert found.need == estimate_tokenize_bytes(text, context=100_000) > estimate_request_need(small, 100_000, 1)


@pytest.mark.parametrize(("state", "counted"), [({"loading": True}, 16 * GIB), ({}, 0)])
def test_a_text_is_tokenized_in_the_memory_of_weights_that_are_not_loaded_yet(state: dict[str, Any], counted: int):
    small = a_model(kv_per_token=1, transient=0, context=100_000, weights=16 * GIB, loaded=False, **state)
    (found,) = decide(node("a", None, small), ask=ResourceDemand("tiny", 400_000)).candidates
    assert found.need == estimate_request_need(small, 100_000, 1) - counted


def test_all_texts_of_a_request_are_tokenized_together():
    small = a_model(kv_per_token=1, transient=0, context=100_000, features=("embed",))
    ask = ResourceDemand("tiny", 100, max_tokens=1, kind=ModelKind.EMBED, other_bytes=399_900)
    (found,) = decide(node("a", None, small), ask=ask).candidates
    assert found.need == estimate_tokenize_bytes(400_000, context=100_000)


def test_a_node_without_guard_fits_every_request():
    (found,) = decide(node("a", a_memory(guard=False))).candidates
    (blind,) = decide(node("a", a_memory(guard=False, phys=None, current=None, headroom=None))).candidates
    assert (found.headroom, found.why, blind.headroom, blind.why) == (NEED, "", NEED, "")


@pytest.mark.parametrize(
    ("change", "idle"),
    [
        ({}, True),
        ({"model": None}, False),
        ({"model": a_model(loaded=False)}, False),
        ({"in_flight": 1}, False),
        ({"tokens_ahead": 1}, False),
    ],
)
def test_a_candidate_is_idle_with_the_model_loaded_and_nothing_to_do(change: dict[str, object], idle: bool):
    facts: dict[str, object] = {"model": a_model()} | change
    assert Candidate(NAME, "a", "ready", **facts).idle is idle  # pyright: ignore[reportArgumentType]


SCORED = Candidate(
    NAME,
    "a",
    "ready",
    need=100,
    headroom=150,
    memory=Memory(ceiling=1100, margin=100),
    expected_ttft=1.02,
    expected_answer=2.0,
    delay=0.5,
    in_flight=4,
    model=a_model(decode_speed=3.0),
    cached_share=0.25,
)


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({}, (-1, 42, 2, -0.25, -0.15)),
        ({"headroom": 199}, (-1, 42, 2, -0.25, -0.199)),
        ({"headroom": 200}, (-2, 42, 2, -0.25, -0.2)),
        ({"headroom": 900}, (-2, 42, 2, -0.25, -0.9)),
        ({"headroom": None}, (0, 42, 2, -0.25, 0)),
        ({"cached_share": 0.5}, (-2, 42, 2, -0.5, -0.15)),
        ({"in_flight": 0}, (-2, 42, -7, -0.25, -0.15)),
        ({"in_flight": 0, "tokens_ahead": 1}, (-1, 42, -7, -0.25, -0.15)),
        ({"in_flight": 0, "model": None}, (-1, 42, 0, -0.25, -0.15)),
        ({"model": None}, (-1, 42, 9, -0.25, -0.15)),
        ({"memory": Memory(ceiling=100, margin=100)}, (-1, 42, 2, -0.25, -150)),
        ({"expected_ttft": 0.0, "delay": 0.0, "expected_answer": 0.0}, (-1, 0, 2, -0.25, -0.15)),
    ],
)
def test_the_balanced_rank_is_marks_time_load_known_share_and_headroom(
    change: dict[str, object], rank: tuple[float, ...]
):
    candidate = msgspec.structs.replace(SCORED, **change)
    assert POLICIES["balanced"].score(candidate, ASK) == pytest.approx(rank)


def test_the_plain_rank_is_headroom_then_requests_in_flight():
    rank = POLICIES["most_headroom"].score
    assert rank(SCORED, ASK) == (-150, 4)
    assert rank(msgspec.structs.replace(SCORED, headroom=None), ASK) == (0, 4)


# the order


def test_room_for_two_beats_speed_and_room_for_more_than_two_does_not():
    need = estimate_request_need(a_model(), 100, 64)
    works = EngineState("scripted", "ready", queued_tokens=1)
    tight = node("tight", a_memory(need + MIB), a_model(prefill_speed=10_000.0), engine=works)
    roomy = node("roomy", a_memory(2 * need), a_model(prefill_speed=100.0))
    huge = node("huge", a_memory(60 * GIB, cap=96 * GIB), a_model(prefill_speed=50.0))
    assert chosen(decide(tight, roomy)) == "roomy"
    assert chosen(decide(tight, roomy, huge)) == "roomy"
    assert chosen(decide(tight, roomy, huge, policy="most_headroom")) == "huge"


def test_the_shortest_expected_time_counts_queue_load_and_speed():
    busy = node("busy", None, a_model(prefill_speed=2000.0), engine=EngineState("x", "ready", queued_tokens=9000))
    cold = node("cold", None, a_model(prefill_speed=2000.0, loaded=False, load_seconds=5.0))
    slow = node("slow", None, a_model(prefill_speed=100.0))
    assert chosen(decide(busy, cold, slow)) == "slow"
    ledger = ReservationLedger()
    ledger.reserve(NodeId("slow"), 1, 1, 1, tokens=5000, seconds=50.0)
    assert chosen(decide(busy, cold, slow, ledger=ledger)) == "slow", "prompts take turns, and this one is the shortest"
    ledger.reserve(NodeId("slow"), 2, 2, 1, tokens=90, seconds=0.9)
    ledger.reserve(NodeId("slow"), 3, 3, 1, tokens=90, seconds=0.9)
    assert chosen(decide(busy, cold, slow, ledger=ledger)) == "busy"


LENGTHS = st.lists(st.integers(1, 20_000), max_size=12)


def prompt(tokens: int, seconds: float) -> Reservation:
    return Reservation(NodeId("a"), 0, 0, tokens, seconds)


def waiting(*prompts: Reservation) -> NodeReservations:
    """Return the account of a node that has still to prefill these prompts."""
    return NodeReservations(
        pending_prefills=dict(enumerate(prompts)), pending_tokens=sum(prompt.tokens for prompt in prompts)
    )


@given(lengths=LENGTHS, mine=st.integers(1, 20_000), share=st.floats(0, 2))
def test_the_prefill_wait_is_between_the_own_prompt_and_all_prompts(lengths: list[int], mine: int, share: float):
    unread = waiting(*(prompt(tokens, tokens / 1000) for tokens in lengths))
    ahead = round(share * sum(lengths))
    wait, delay = estimate_prefill_wait(unread, ahead, mine, 1000.0)
    assert mine / 1000 <= wait <= (mine + ahead) / 1000 + 1e-6
    assert 0 <= delay <= len(lengths) * mine / 1000 + 1e-6
    longer, _ = estimate_prefill_wait(unread, ahead, mine + 1000, 1000.0)
    assert longer > wait, "a longer prompt is never sooner"


def test_a_short_prompt_waits_for_the_shorter_ones_and_shares_with_the_oldest():
    unread = waiting(prompt(10_000, 10.0), prompt(500, 0.5), prompt(2000, 2.0))
    assert estimate_prefill_wait(unread, 12_500, 1000, 1000.0) == (3.0, 2.0), (
        "0.5 and its own 1, as much of the oldest; two are behind"
    )
    assert estimate_prefill_wait(unread, 6_250, 1000, 1000.0) == (4.5, 1.0), (
        "half of all is read: one that is as long is before it now"
    )
    assert estimate_prefill_wait(NodeReservations(), 4000, 1000, 1000.0) == (5.0, 0.0), (
        "of others' prompts only the sum is known"
    )
    assert estimate_prefill_wait(unread, 0, 1000, 1000.0) == (1.0, 0.0), "all is read"
    assert estimate_prefill_wait(waiting(prompt(50, 0.05)), 1000, 2000, 1000.0) == (3.0, 0.0), (
        "others' are taken as long ones"
    )
    assert estimate_prefill_wait(waiting(prompt(200, 0.2)), 25, 10, 1000.0) == (0.02, 0.01), (
        "it takes turns with the long one"
    )
    assert estimate_prefill_wait(waiting(prompt(200, 0.2)), 24, 10, 1000.0) == (0.034, 0.0), (
        "the order of less decides nothing"
    )


def test_expected_wait_includes_answers_and_stalled_requests():
    quick = node("quick", None, a_model(decode_speed=80.0))
    slow = node("slow", None, a_model(decode_speed=8.0))
    assert {chosen(decide(quick, slow, seed=seed)) for seed in range(9)} == {"quick"}
    writing = EngineState("x", "ready", running=8)
    busy, idle = node("busy", engine=writing), node("idle")
    long = ResourceDemand("tiny", 8000)
    assert {chosen(decide(busy, idle, ask=long, seed=seed)) for seed in range(9)} == {"idle"}
    of = {one.name: one for one in decide(busy, idle, ask=long).candidates}
    assert of["busy"].expected_ttft == pytest.approx(1.6 * of["idle"].expected_ttft)
    assert of["busy"].delay > of["idle"].delay == 0


def test_many_at_once_are_shared_though_one_node_was_measured_as_faster():
    quick, other = node("quick", None, a_model(decode_speed=100.0)), node("other", None, a_model(decode_speed=70.0))
    ledger, taken = ReservationLedger(), Counter[str]()
    for number in range(32):
        name = chosen(decide(quick, other, ledger=ledger, seed=number))
        ledger.reserve(NodeId(name), number, number, 1)
        taken[name] += 1
    assert 4 <= taken["other"] < taken["quick"]


def test_expected_time_of_a_full_batch_includes_the_wait_for_a_row():
    full, free = (node(name, engine=EngineState("x", "ready", rows=rows)) for name, rows in (("full", 4), ("free", 16)))
    ledger = ReservationLedger()
    for number in range(10):
        ledger.reserve(NodeId("full" if number < 5 else "free"), number, number, 1)
    of = {one.name: one for one in decide(full, free, ledger=ledger).candidates}
    assert of["full"].expected_answer == of["free"].expected_answer > 0
    waits = 2 * of["full"].expected_answer / 4  # the fifth has to begin and another to end
    assert of["full"].expected_ttft == pytest.approx(of["free"].expected_ttft + waits)
    assert {chosen(decide(full, free, ledger=ledger, seed=seed)) for seed in range(9)} == {"free"}
    ledger.release(0)
    ledger.release(1)
    of = {one.name: one for one in decide(full, free, ledger=ledger).candidates}
    assert of["full"].expected_ttft == of["free"].expected_ttft, "the fourth row is free"


def test_each_answer_of_a_request_takes_a_row():
    full, free = (node(name, engine=EngineState("x", "ready", rows=8)) for name in ("full", "free"))
    ledger = ReservationLedger()
    ledger.reserve(NodeId("full"), 1, 1, 1, rows=6)
    ledger.reserve(NodeId("free"), 2, 2, 1)
    of = {
        one.name: one
        for one in decide(full, free, ask=ResourceDemand("tiny", 0, 100, choices=4), ledger=ledger).candidates
    }
    waits = 2 * of["full"].expected_answer / 8
    assert of["full"].expected_ttft == pytest.approx(of["free"].expected_ttft + waits), "two of the four have no row"
    assert of["full"].in_flight == of["free"].in_flight == 1


def test_burst_with_a_common_prefix_is_spread_over_nodes():
    ledger, taken = ReservationLedger(), Counter[str]()
    both = [node(name, None, a_model(prefill_speed=10_000.0)) for name in ("a", "b")]
    for number in range(20):
        name = chosen(decide(*both, ledger=ledger, cached_shares={NodeId("a"): 0.9}))
        ledger.reserve(NodeId(name), number, number, 0)
        taken[name] += 1
    assert taken == {"a": 10, "b": 10}


def test_equal_nodes_share_by_requests_in_flight_then_by_chance():
    ledger = ReservationLedger()
    ledger.reserve(NodeId("a"), 1, 1, 0)
    assert chosen(decide(node("a"), node("b"), ledger=ledger)) == "b"
    picks = {chosen(decide(node("a"), node("b"), seed=seed)) for seed in range(20)}
    assert picks == {"a", "b"}


# reasons of a refusal


def test_an_unknown_model_is_a_404_that_names_near_ones():
    answer = refused(decide(node("a", None, a_model("qwen3-4b"), a_model("llama-8b")), ask=ResourceDemand("qwen3-4")))
    assert answer == Refused(RefusalCode.NO_MODEL, "no node serves the model 'qwen3-4'; the nearest names are qwen3-4b")
    assert answer.status == 404


@pytest.mark.parametrize(("count", "names"), [(1, "m0"), (4, "m0, m1, m2, m3"), (6, "m0, m1, m2, m3 and 2 more")])
def test_an_unknown_model_may_be_on_a_node_whose_first_report_is_awaited(count: int, names: str):
    awaited = [replace(node(f"m{number}"), models={}, awaited=True) for number in range(count)]
    answer = refused(decide(node("a", None, a_model("llama-8b")), *awaited, ask=ResourceDemand("qwen3")))
    text = f"no node has reported the model 'qwen3' yet; awaited are the reports of {names}"
    assert answer == Refused(RefusalCode.NOT_READY, text, None, UNKNOWN_RETRY_SECONDS)
    assert (answer.status, answer.final) == (503, False)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-1", "llama-14, llama-13, llama-12"),
        ("zzz", "llama-11, llama-12, llama-13"),
        ("mixtral", "mixtral-b"),
    ],
)
def test_the_names_that_are_offered_are_three_at_most_and_near_where_any_is(name: str, near: str):
    models = [a_model(one) for one in ("mixtral-b", "llama-14", "llama-13", "llama-12", "llama-11")]
    listed = refused(decide(node("a", None, *models), ask=ResourceDemand(name))).message.partition(
        "nearest names are "
    )[2]
    assert listed == near


def test_a_chat_for_a_video_model_names_the_route_for_videos():
    films = VideoState(packages=(VideoPackage("other"), VideoPackage("wan")))
    answer = refused(decide(node("a"), node("b", video=films), ask=ResourceDemand("wan")))
    assert answer == Refused(RefusalCode.INVALID, "the model 'wan' generates videos, not text: use POST /v1/videos")
    assert refused(decide(node("b", video=films), ask=ResourceDemand("tin"))).code is RefusalCode.NO_MODEL


def test_a_cluster_without_a_model_is_not_ready_rather_than_wrong():
    for nodes in ((), (node("a", None, models={}),)):
        answer = refused(decide(*nodes))
        assert (answer.code, answer.retry_after) == (RefusalCode.NOT_READY, 2.0)


def test_no_room_names_the_best_node_numbers_and_next_step():
    answer = refused(decide(node("mini", a_memory(10 * MIB)), node("studio-a", a_memory(50 * MIB))))
    assert (answer.code, answer.status, answer.node) == (RefusalCode.NO_ROOM, 503, "studio-a")
    assert answer.message.startswith("needs 74.2 MiB by estimate, best node studio-a has 50.0 MiB: retry, shorten")
    assert answer.numbers is not None
    assert (answer.numbers.headroom, answer.numbers.margin, answer.numbers.bound_by) == (50 * MIB, 2 * GIB, "static")
    assert answer.numbers.predicted == 24 * GIB - 50 * MIB + answer.numbers.estimate
    assert answer.retry_after is not None
    assert 1 <= answer.retry_after <= 60
    exact = refused(decide(node("mini", a_memory(10 * MIB)), ask=ResourceDemand("tiny", 0, 100)))
    assert exact.message.startswith("needs 74.2 MiB, best node mini has 10.0 MiB: retry")


def test_the_best_node_of_a_refusal_is_the_one_that_lacks_the_least():
    far = node("far", a_memory(1 * GIB), a_model(loaded=False, weights=9 * GIB))
    near = node("near", a_memory(50 * MIB))
    assert refused(decide(far, near)).node == "near"


def test_a_candidate_without_a_model_is_tried_again_soon():
    assert estimate_retry_seconds(Candidate(NAME, "a", "ready", in_flight=4)) == 2.0


@pytest.mark.parametrize(
    ("in_flight", "answer", "speed", "seconds"),
    [(0, 256, 50.0, 2.0), (1, 256, 64.0, 4.0), (4, 256, 16.0, 4.0), (4, 256, 6400.0, 1.0), (1, 256, 0.5, 60.0)],
)
def test_retry_after_is_when_the_next_answer_should_end(in_flight: int, answer: int, speed: float, seconds: float):
    ledger = ReservationLedger()
    for number in range(in_flight):
        ledger.reserve(NodeId("a"), number, number, GIB, 10)
    model = a_model(expected_output=answer, decode_speed=speed)
    result = refused(decide(node("a", a_memory(MIB), model), ledger=ledger))
    assert result.code is RefusalCode.NO_ROOM
    assert result.retry_after == seconds


def test_too_large_needs_an_exact_token_count():
    model = a_model(kv_per_token=10 * GIB // 1000, context=100_000)
    guess = decide(node("a", None, model), ask=ResourceDemand("tiny", 4 * 40_000))
    assert isinstance(guess, NoPlacement)
    assert guess.refused.code is RefusalCode.NO_ROOM
    assert guess.candidate is not None, "the request is not queued, and a node counts its tokens"
    assert guess.candidate.node == "a"
    small = node("small", a_memory(cap=16 * GIB), model)
    for nodes in ((node("a", None, model), small), (small, node("a", None, model))):
        answer = refused(decide(*nodes, ask=ResourceDemand("tiny", 0, 40_000)))
        assert (answer.code, answer.status, answer.node) == (RefusalCode.TOO_LARGE, 400, "a")
        alone = estimate_alone_bytes(model, 40_000, 64) / GIB
        assert answer.message.startswith(
            f"needs {alone:.1f} GiB on an idle node, the largest node can give 22.0 GiB (a): shorten the prompt"
        )
        assert answer.numbers is not None


def test_a_prompt_that_fits_nowhere_by_the_estimate_is_counted_by_the_roomiest_node():
    model = a_model(kv_per_token=10 * GIB // 1000, context=100_000)
    ask = ResourceDemand("tiny", 4 * 40_000)
    large = node("large", a_memory(8 * GIB, cap=32 * GIB), model)
    small = node("small", None, model)
    assert asked(small, large, ask=ask) == "large"
    assert asked(large, small, ask=ask) == "large"
    assert asked(small, replace(large, state="asleep"), ask=ask) == "small", "it is not here"
    trials = AttemptHistory(refused={NodeId("large"): NOW - 1})
    assert asked(small, large, ask=ask, trials=trials) == "small", "it has refused before"
    huge = node("huge", a_memory(8 * GIB, cap=999 * GIB), model)
    assert asked(small, huge, ask=ask) is None, "it fits on one of them once that is empty"
    final = AttemptHistory(never={NodeId("small"): Refused(RefusalCode.TOO_LARGE, "needs 400 GiB")})
    assert refused(decide(small, large, ask=ask, trials=final)).code is RefusalCode.NO_ROOM


@pytest.mark.parametrize("absent", ["asleep", "lost", "draining", "suspect"])
def test_a_member_that_is_absent_but_large_enough_makes_it_a_503(absent: str):
    model = a_model(kv_per_token=10 * GIB // 1000, context=100_000)
    large = node("large", a_memory(80 * GIB, cap=512 * GIB), model, state=absent)
    result = decide(node("small", None, model), large, ask=ResourceDemand("tiny", 0, 4000))
    assert refused(result).code is RefusalCode.NO_ROOM
    assert refused(result).status == 503


def test_a_prompt_longer_than_every_context_is_a_400():
    answer = refused(decide(node("a"), ask=ResourceDemand("tiny", 0, 5000)))
    assert (answer.code, answer.status) == (RefusalCode.CONTEXT, 400)
    assert answer == Refused(
        RefusalCode.CONTEXT,
        "the prompt has 5000 tokens, the longest context of tiny in this cluster is 4096: shorten the prompt",
    )
    short = node("short", None, a_model(context=100))
    for nodes in ((node("a"), short), (short, node("a"))):
        answer = refused(decide(*nodes, ask=ResourceDemand("tiny", 0, 4096)))
        assert answer.message.startswith(
            "the prompt has 4096 tokens, the longest context of tiny in this cluster is 4096"
        )
    unknown = node("a", None, a_model(context=0, kv_per_token=1 * GIB))
    assert refused(decide(unknown, ask=ResourceDemand("tiny", 0, 4096))).code is RefusalCode.TOO_LARGE


def test_a_final_refusal_of_every_serving_node_is_final():
    trials = AttemptHistory(never={NodeId("a"): Refused(RefusalCode.CONTEXT, "too long")})
    assert refused(decide(node("a"), trials=trials)).code is RefusalCode.CONTEXT
    assert chosen(decide(node("a"), node("b"), trials=trials)) == "b"


def test_a_node_that_can_never_hold_what_the_router_would_place_there_is_quoted():
    numbers = MemoryNumbers(headroom=9)
    quoted = Refused(RefusalCode.TOO_LARGE, "8000000 bytes of text need up to 30.0 GiB for tokenization", numbers)
    other = Refused(RefusalCode.TOO_LARGE, "needs 30.0 GiB for its weights")
    trials = AttemptHistory(never={NodeId("a"): quoted, NodeId("b"): other})
    answer = refused(decide(node("a"), node("b", a_memory(0, 12 * GIB)), trials=trials))
    assert answer == Refused(
        RefusalCode.TOO_LARGE,
        "a: 8000000 bytes of text need up to 30.0 GiB for tokenization",
        numbers,
        None,
        "a",
    )
    assert answer.status == 400


def test_a_node_that_the_router_would_not_place_it_on_either_gets_the_router_s_numbers():
    trials = AttemptHistory(never={NodeId("a"): Refused(RefusalCode.TOO_LARGE, "the node's own words")})
    answer = refused(decide(node("a", None, a_model(kv_per_token=1 * GIB)), trials=trials))
    assert "GiB on an idle node, the largest node can give 22.0 GiB (a): shorten the prompt" in answer.message


def test_nodes_that_are_all_away_are_named():
    names: dict[str, dict[str, Any]] = {
        "a": {"state": "asleep"},
        "b": {"cordoned": True},
        "c": {"draining": True},
        "d": {"state": "lost"},
    }
    away = [node(name, **change) for name, change in names.items()]
    text = "no node can serve tiny now: a is asleep; b is cordoned; c is draining; d is lost"
    for nodes in (away, [*away, node("e", state="lost")]):
        assert refused(decide(*nodes)) == Refused(RefusalCode.NOT_READY, text, None, 2.0), "four of them are named"
    answer = refused(decide(node("a", draining=True)))
    assert answer == Refused(RefusalCode.DRAINING, "no node can serve tiny now: a is draining", None, 2.0)


def test_a_row_of_a_decision_is_the_whole_arithmetic():
    candidate = Candidate(
        NAME,
        "mac",
        "ready",
        "is full",
        RefusalCode.NO_ROOM,
        100,
        90,
        8,
        Memory(1000, 950, 20, 600, reserved=7, bound_by="static"),
        40,
        60,
        1.23456,
        3,
        a_model(),
        50,
        0.65432,
        5,
        25,
        2.34567,
        0.12345,
    )
    row = {
        "node": "a",
        "name": "mac",
        "state": "ready",
        "feasible": False,
        "why_not": "is full",
        "code": "no_headroom",
        "need": 100,
        "unacknowledged": 8,
        "predicted": 735,
        "ceiling": 950,
        "current": 600,
        "reserved": 15,
        "margin": 20,
        "cap": 1000,
        "headroom": 90,
        "bound_by": "static",
        "prompt_tokens": 40,
        "expected_output": 60,
        "expected_ttft_seconds": 1.235,
        "expected_answer_seconds": 2.346,
        "delay_seconds": 0.123,
        "known_share": 0.654,
        "in_flight": 3,
    }
    assert explain([candidate], NAME) == [row | {"chosen": True}]
    assert explain([candidate], None) == [row | {"chosen": False}]


def test_explain_shows_every_node_with_its_arithmetic():
    rows = explain(*get_candidates_and_node(decide(node("a"), node("b", a_memory(MIB)))))
    assert [(row["name"], row["chosen"], row["feasible"]) for row in rows] == [("a", True, True), ("b", False, False)]
    assert rows[1]["headroom"] == MIB
    assert rows[1]["code"] == "no_headroom"
    assert {"need", "ceiling", "margin", "current", "reserved", "cap", "why_not", "expected_ttft_seconds"} <= set(
        rows[0]
    )


# for every policy, over all clusters

sizes = st.integers(0, 64 * GIB)
some_groups = st.builds(BatchGroup, st.integers(1, 8), st.integers(0, 9000), st.integers(0, 9000))
some_models = st.builds(
    Model,
    name=st.just("tiny"),
    loaded=st.booleans(),
    weights=sizes,
    kv_per_token=st.integers(0, 4 * MIB),
    transient=st.integers(0, GIB),
    context=st.integers(0, 10_000),
    load_seconds=st.floats(0, 100),
    prefill_speed=st.floats(1, 5000),
    decode_speed=st.floats(1, 100),
    bytes_per_token=st.floats(0.5, 8),
    groups=st.lists(some_groups, max_size=2).map(tuple),
    expected_output=st.integers(1, 2000),
)
some_memories = st.builds(
    Memory,
    cap=sizes,
    ceiling=sizes,
    margin=sizes,
    phys=st.none() | sizes,
    active=sizes,
    recent=sizes,
    reserved=sizes,
    guard=st.sampled_from([True, True, True, False]),
)
some_nodes = st.builds(
    NodeView,
    id=st.uuids().map(lambda one: NodeId(str(one))),
    name=st.just("n"),
    state=st.sampled_from(["ready", "ready", "ready", "suspect", "asleep", "lost"]),
    cordoned=st.booleans(),
    reported_at=st.sampled_from([NOW, NOW - 2, NOW - 10]),
    memory=some_memories,
    engine=st.sampled_from([READY, EngineState("x", "ready", queued_tokens=900), EngineState("x", "failed")]),
    models=some_models.map(lambda model: {"tiny": model}) | st.just({}),
    draining=st.booleans(),
)
demands = st.builds(
    ResourceDemand,
    model=st.just("tiny"),
    prompt_bytes=st.integers(0, 40_000),
    prompt_tokens=st.none() | st.integers(0, 12_000),
    max_tokens=st.none() | st.integers(1, 10_000),
    choices=st.integers(1, 4),
)


@given(
    st.lists(some_nodes, max_size=6), demands, st.sampled_from(list(POLICIES)), st.integers(0, 4 * GIB), st.integers()
)
def test_no_policy_picks_a_node_that_its_own_gate_would_refuse(
    nodes: list[NodeView], ask: ResourceDemand, policy: str, promised: int, seed: int
):
    ledger = ReservationLedger()
    for number, one in enumerate(nodes):
        ledger.reserve(one.id, number, number, promised)
    result = decide(*nodes, ask=ask, ledger=ledger, policy=policy, seed=seed)
    assert result == decide(*nodes, ask=ask, ledger=ledger, policy=policy, seed=seed), "same seed, same decision"
    fits = {one.id for one in nodes if gate(one, ask, promised)}
    assert {candidate.node for candidate in result.candidates if candidate.feasible} == fits
    if isinstance(result, Placement):
        assert result.chosen.node in fits
        assert [row["chosen"] for row in explain(*get_candidates_and_node(result))].count(True) == 1
    else:
        assert not fits
        assert all(candidate.why for candidate in result.candidates)
        assert result.refused.message
        if result.refused.status == 503 and result.refused.retry_after is not None:
            assert 1 <= result.refused.retry_after <= 60


def gate(one: NodeView, ask: ResourceDemand, promised: int) -> bool:
    """Return the node's decision: the same arithmetic on its own reading, with requests on the way already
    committed."""
    model = one.models.get("tiny")
    usable = one.state == "ready" and not one.cordoned and not one.draining and one.engine.state == "ready"
    if model is None or not usable or NOW - one.reported_at > MAX_REPORT_AGE_SECONDS:
        return False
    if ask.prompt_tokens is not None and model.context and ask.prompt_tokens >= model.context:
        return False
    tokens = ask.estimate_prompt_tokens(model)
    need = estimate_request_need(model, tokens, ask.estimate_output_tokens(model, tokens), ask.choices)
    reading = msgspec.structs.replace(one.memory, reserved=one.memory.reserved + promised)
    return isinstance(judge(reading, need), Fits)


class Worst:
    """A policy that prefers the node with the least room."""

    def score(self, candidate, request):
        return (candidate.headroom or 0,)


@given(st.lists(some_nodes, max_size=6), demands)
def test_a_foreign_policy_cannot_override_the_filter(nodes: list[NodeView], ask: ResourceDemand):
    worst: Policy = Worst()
    result = place(ClusterView(tuple(nodes)), ask, ReservationLedger(), now=NOW, draw=lambda: 0.5, policy=worst)
    if isinstance(result, Placement):
        assert gate(next(one for one in nodes if one.id == result.chosen.node), ask, 0)
