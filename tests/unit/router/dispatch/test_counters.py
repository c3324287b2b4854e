"""The counters of the router: histograms as Prometheus reads them, gaps of the same stream only, a bounded number of
rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.active_request import ActiveRequest
from router.dispatch.counters import ITL_BOUNDS, MAX_KEY_MODELS, MAX_MODELS, MAX_PACES, OTHER, Counters
from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import Cluster, taken
from wire.frames import Delta, Deltas, GenerationParams, Message
from wire.histogram import Histogram
from wire.identity import NodeId
from wire.refusals import FailureCode, RefusalCode

A, B = NodeId("a"), NodeId("b")


@given(st.lists(st.floats(0, 10), max_size=50))
def test_each_value_falls_into_the_first_bucket_that_holds_it(values: list[float]):
    buckets = Histogram((0.5, 1.0, 5.0))
    for value in values:
        buckets.observe(value)
    for bound, upto in ((0.5, 1), (1.0, 2), (5.0, 3)):
        assert sum(buckets.tally().counts[:upto]) == sum(value <= bound for value in values)
    assert sum(buckets.counts) == len(values)


def gaps(counters: Counters, model: str = "m") -> tuple[int, float]:
    tally = counters.get_model(model).itl.tally()
    return sum(tally.counts), round(tally.total, 6)


def test_a_step_is_one_gap_for_all_streams_in_it():
    counters = Counters()
    counters.record_decode_step(A, "m", 7, 1, 1.0)
    counters.record_decode_step(A, "m", 7, 3, 1.02)
    assert gaps(counters) == (3, 0.06)


def test_no_request_waited_between_two_requests():
    counters = Counters()
    counters.record_decode_step(A, "m", 7, 1, 1.0)
    counters.record_decode_step(A, "m", 8, 1, 100.0)
    assert gaps(counters) == (0, 0.0)


def test_nodes_and_models_have_paces_of_their_own():
    counters = Counters()
    for at in (1.0, 1.1):
        counters.record_decode_step(A, "m", 1, 1, at)
        counters.record_decode_step(B, "m", 2, 1, at + 0.05)
        counters.record_decode_step(A, "n", 3, 1, at + 0.02)
    assert gaps(counters) == (2, 0.2)
    assert gaps(counters, "n") == (1, 0.1)


async def test_the_rows_of_one_frame_are_steps_of_their_models(one: Cluster):
    one.models = (a_model("m"), a_model("n"))
    one.report()
    requests: dict[int, ActiveRequest] = {}
    for model in ("m", "n", "n"):
        spec = RequestSpec(ResourceDemand(model, 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)
        request = one.dispatcher.submit(spec)
        requests[one.last()[1]] = request
    for _ in range(2):
        one.now += 0.5
        one.dispatcher.receive(A, Deltas(tuple(Delta(number, 0, (1,), ((0, "hi"),)) for number in requests)))
        assert [taken(request) for request in requests.values()] == [["hi"]] * 3
    assert gaps(one.dispatcher.counters, "m") == (1, 0.5)
    assert gaps(one.dispatcher.counters, "n") == (2, 1.0)


def test_a_node_that_is_forgotten_leaves_nothing():
    counters = Counters()
    counters.count_attempt(A, first=True, resumed=False)
    counters.record_decode_step(A, "m", 1, 1, 1.0)
    counters.remove_node(A)
    counters.record_decode_step(A, "m", 1, 1, 9.0)
    assert gaps(counters) == (0, 0.0)
    assert counters.placements == {}


def test_names_beyond_the_bound_are_one_row():
    counters = Counters()
    for number in range(MAX_MODELS + 100):
        counters.count_first_token(NodeId("a"), f"m{number}", 1, 0.1)
    assert len(counters.models) <= MAX_MODELS + 1
    assert sum(counters.models[OTHER].ttft.counts) == 100
    assert sum(sum(one.ttft.counts) for one in counters.models.values()) == MAX_MODELS + 100


def test_model_returns_one_row_for_names_that_no_node_has():
    counters = Counters()
    other, tiny = counters.get_model(""), counters.get_model("tiny")
    assert counters.models == {OTHER: other, "tiny": tiny}
    assert counters.get_model("") is counters.get_model(OTHER) is other
    assert counters.get_model("tiny") is tiny
    for number in range(MAX_MODELS):
        counters.get_model(f"m{number}")
    assert counters.get_model("tiny") is tiny
    assert counters.get_model("one more") is other


def test_used_by_adds_to_known_pairs_when_the_table_is_full():
    counters = Counters()
    counters.get_model("tiny")
    for number in range(MAX_KEY_MODELS):
        counters.add_key_tokens(f"k{number}", "tiny", 1)
    counters.add_key_tokens("k0", "tiny", 5)
    counters.add_key_tokens("k0", "made up", 5)
    assert len(counters.keys) == MAX_KEY_MODELS
    assert counters.keys["k0", "tiny"] == 6


def test_bounds_rise():
    assert list(ITL_BOUNDS) == sorted(ITL_BOUNDS)


def test_a_nodes_tokens_are_counted_and_end_with_its_membership():
    counters, node = Counters(), NodeId("a")
    counters.count_first_token(node, "tiny", 30, 0.5)
    counters.get_node(node).generated_tokens += 4
    found = counters.nodes[node]
    assert (found.prompt_tokens, found.generated_tokens) == (30, 4)
    assert (found.first_tokens, found.first_token_seconds) == (1, 0.5)
    counters.remove_node(node)
    assert counters.nodes == {}


@pytest.mark.parametrize("code", sorted({*RefusalCode, *FailureCode} - {FailureCode.COMMAND_TIMEOUT}))
def test_every_code_that_a_request_can_end_with_is_an_outcome(code: str):
    counters = Counters()
    counters.count_end(code, "m", 1.0)
    assert counters.requests == counters.models["m"].outcomes == {code: 1}


def test_an_end_is_counted_for_its_model_and_for_all_with_its_time():
    counters = Counters()
    counters.count_end("ok", "m", 3.0)
    counters.count_end("ok", "m", 5.0)
    counters.count_end("no_headroom", "n", 0.5)
    counters.count_end("made up", "m", 1.0)
    assert counters.requests == {"ok": 2, "no_headroom": 1, "failed": 1}
    assert (counters.durations, counters.duration_seconds) == (4, 9.5)
    assert counters.models["m"].outcomes == {"ok": 2, "failed": 1}
    assert counters.models["n"].outcomes == {"no_headroom": 1}
    assert (sum(counters.models["m"].e2e.counts), counters.models["m"].e2e.total) == (3, 9.0)


def test_usage_is_added_up_and_a_negative_count_of_a_node_takes_nothing_off():
    model = Counters().get_model("m")
    for prompt, cached, written in ((10, 4, 3), (20, 0, 5), (1, 1, 1), (-50, -50, -50)):
        model.add_tokens(prompt, cached, written)
    assert (model.prompt_tokens, model.cached_tokens, model.completion_tokens) == (31, 5, 9)
    counters = Counters()
    counters.get_model("m")
    for tokens in (5, 7, -100):
        counters.add_key_tokens("k", "m", tokens)
    counters.add_key_tokens("k", "unknown", 2)
    assert counters.keys == {("k", "m"): 12, ("k", OTHER): 2}


def test_first_tokens_waits_refusals_answers_and_swaps_are_counted_one_by_one():
    counters = Counters()
    for seconds in (0.25, 0.5):
        counters.count_first_token(A, "m", 30, seconds)
        counters.count_queue_exit(seconds)
        counters.count_attempt(A, first=True, resumed=False)
        counters.count_refusal("no_headroom")
        counters.count_answer(200)
        counters.count_swap(done=True)
    counters.count_answer(503)
    counters.count_swap(done=False)
    node = counters.nodes[A]
    assert (node.prompt_tokens, node.first_tokens, node.first_token_seconds) == (60, 2, 0.75)
    assert (counters.first_tokens, counters.first_token_seconds) == (2, 0.75)
    ttft = counters.models["m"].ttft
    assert (sum(ttft.counts), ttft.total) == (2, 0.75)
    assert (counters.queue_seconds, sum(counters.queue_wait.counts), counters.queue_wait.total) == (0.75, 2, 0.75)
    assert (counters.placements, counters.refusals) == ({A: 2}, {"no_headroom": 2})
    assert (counters.answers, counters.swaps) == ({200: 2, 503: 1}, {"done": 2, "dropped": 1})


def test_removed_node_keeps_the_counts_of_other_nodes():
    counters = Counters()
    for node in (A, B):
        counters.count_attempt(node, first=True, resumed=False)
        counters.count_first_token(node, "m", 3, 0.1)
        for at in (1.0, 1.5):
            counters.record_decode_step(node, "m", 1, 1, at)
    counters.remove_node(A)
    counters.record_decode_step(B, "m", 1, 1, 2.0)
    assert (counters.placements, set(counters.nodes)) == ({B: 1}, {B})
    assert gaps(counters) == (3, 1.5)


def test_totals_of_keys_in_force_are_kept_when_another_is_revoked():
    counters = Counters()
    counters.get_model("m")
    counters.add_key_tokens("a", "m", 1)
    counters.add_key_tokens("b", "m", 2)
    counters.retain_keys({"b"})
    assert counters.keys == {("b", "m"): 2}


def test_ends_at_upstreams_are_added_up():
    counters = Counters()
    for outcome in ("ok", "ok", "failed"):
        counters.count_upstream("home", outcome, 5, 2)
    counters.count_upstream("other", "limited", 0, 0)
    home = counters.upstreams["home"]
    assert (home.outcomes, home.prompt_tokens, home.completion_tokens) == ({"ok": 2, "failed": 1}, 15, 6)
    assert counters.upstreams["other"].outcomes == {"limited": 1}


def test_steps_of_more_pairs_than_the_maximum_are_forgotten():
    counters = Counters()
    for number in range(MAX_PACES):
        counters.record_decode_step(A, f"m{number}", 1, 1, 1.0)
    counters.record_decode_step(A, "m0", 1, 1, 1.5)
    assert gaps(counters, "m0") == (1, 0.5)
    counters.record_decode_step(A, "one more", 1, 1, 2.0)
    counters.record_decode_step(A, "m0", 1, 1, 2.5)
    assert gaps(counters, "m0") == (1, 0.5)
