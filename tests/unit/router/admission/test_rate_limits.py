"""The limits of a key."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.rate_limits import (
    BYTES_PER_TOKEN,
    DEFAULT_ANSWER_TOKENS,
    NO_LIMITS,
    KeyLimits,
    RateLimits,
    estimate_probable_tokens,
)
from router.placement.candidate import ResourceDemand
from router.settings import RouterSettings
from wire.refusals import RefusalCode, Refused

ASK = ResourceDemand("qwen3-8b", prompt_tokens=100, max_tokens=50)


def quotas(**limits: object) -> RateLimits:
    made = KeyLimits(**limits)  # pyright: ignore[reportArgumentType]
    return RateLimits({"k": made}.get)


def taken(one: RateLimits, now: float = 0.0, ask: ResourceDemand = ASK) -> int:
    charged = one.admit("k", ask, now)
    assert isinstance(charged, int), charged
    return charged


def refused(one: RateLimits, now: float = 0.0, ask: ResourceDemand = ASK) -> Refused:
    answer = one.admit("k", ask, now)
    assert isinstance(answer, Refused)
    return answer


def test_a_key_without_limits_is_never_refused():
    one = RateLimits()
    assert all(one.admit("any", ASK, 0.0) == 0 for _ in range(1000))


def test_only_the_models_that_match():
    one = quotas(models=("qwen*", "tiny"))
    taken(one)
    answer = refused(one, ask=ResourceDemand("llama"))
    assert (answer.code, answer.status) == (RefusalCode.NOT_ALLOWED, 403)
    assert "'llama'" in answer.message
    assert "qwen*, tiny" in answer.message


def test_requests_a_minute():
    one = quotas(requests_per_minute=3)
    for _ in range(3):
        taken(one, 10.0)
    answer = refused(one, 10.0)
    assert (answer.code, answer.status, answer.retry_after) == (RefusalCode.RATE_LIMITED, 429, pytest.approx(20.0))
    assert "3 requests per minute" in answer.message
    refused(one, 29.0)
    taken(one, 30.0)
    refused(one, 30.0)


def test_tokens_per_minute_are_charged_by_estimate_and_settled_by_usage():
    one = quotas(tokens_per_minute=300)
    charged = taken(one)
    assert charged == estimate_probable_tokens(ASK) == 150
    taken(one)
    assert refused(one).retry_after == pytest.approx(30.0)
    one.record_end("k", ASK, charged, 110, 0.0)
    assert refused(one).retry_after == pytest.approx(22.0)
    one.record_end("k", ASK, charged, 0, 0.0)
    assert taken(one) == 150


def test_a_high_limit_of_the_answer_is_charged_at_the_end_as_far_as_it_was_used():
    agent = ResourceDemand("m", prompt_tokens=1000, max_tokens=32_000)
    one = quotas(tokens_per_minute=6000)
    charges = [taken(one, ask=agent) for _ in range(4)]
    assert charges == [1000 + DEFAULT_ANSWER_TOKENS] * 4
    assert refused(one, ask=agent).retry_after == pytest.approx(2.8)
    for charged in charges[:3]:
        one.record_end("k", agent, charged, 1000 + 100, 0.0)
    one.record_end("k", agent, charges[3], 1000 + 32_000, 0.0)
    debt = 3 * 1100 + 33_000 - 6000
    assert refused(one, ask=agent).retry_after == pytest.approx((debt + 1256) / 100), "the debt is paid first"
    taken(one, 315.6, ask=agent)


def test_more_than_a_minute_can_hold_waits_for_a_full_bucket_and_leaves_a_debt():
    one = quotas(tokens_per_minute=60)
    assert taken(one) == 150
    assert refused(one, 60.0).retry_after == pytest.approx(90.0)
    taken(one, 151.0)


def test_requests_at_once():
    one = quotas(concurrency=2)
    charges = [taken(one), taken(one)]
    answer = refused(one)
    assert (answer.code, answer.retry_after) == (RefusalCode.RATE_LIMITED, 1.0)
    one.record_end("k", ASK, charges[0], 0, 1.0)
    taken(one, 1.0)


def test_a_refused_request_takes_nothing():
    one = quotas(concurrency=1, requests_per_minute=2, tokens_per_minute=1000)
    charged = taken(one)
    for _ in range(10):
        refused(one)
    one.record_end("k", ASK, charged, 0, 0.0)
    taken(one)


def test_clock_set_back_adds_no_tokens():
    one = quotas(requests_per_minute=1)
    taken(one, 100.0)
    assert refused(one, 50.0).retry_after == pytest.approx(60.0)


def test_new_limits_count_at_once():
    limits = {"k": KeyLimits(requests_per_minute=1)}
    one = RateLimits(limits.get)
    taken(one)
    refused(one)
    limits["k"] = KeyLimits(requests_per_minute=5)
    taken(one)
    limits["k"] = NO_LIMITS
    for _ in range(9):
        taken(one)


def test_request_before_the_limits_is_not_charged_later():
    limits: dict[str, KeyLimits] = {}
    one = RateLimits(limits.get)
    early = taken(one)
    limits["k"] = KeyLimits(concurrency=2)
    taken(one)
    refused(one)
    one.record_end("k", ASK, early, 0, 0.0)
    taken(one)
    refused(one)
    assert one.count_open("k") == 2


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400), st.booleans()), max_size=60))
def test_no_key_outruns_its_rate(steps: list[tuple[float, int, bool]]):
    one, now, used, running = quotas(tokens_per_minute=600), 0.0, 0, list[int]()
    for gap, tokens, ends in steps:
        now += gap
        charged = one.admit("k", ASK, now)
        if isinstance(charged, int):
            running.append(charged)
        if ends and running:
            spent = min(tokens, running[-1])
            one.record_end("k", ASK, running.pop(), spent, now)
            used += spent
    used += sum(running)
    assert used <= 600 + 600 * now / 60 + 1
    assert one.count_open("k") == len(running)


@pytest.mark.parametrize(
    "wrong", [{"requests_per_minute": 0}, {"models": "qwen"}, {"priority": "urgent"}, {"waiting": -1}, {"rpm": 3}]
)
def test_wrong_limits_are_named(wrong: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, KeyLimits)


def bounded(**settings: Any) -> RateLimits:
    return RateLimits(settings=RouterSettings(**settings))


@pytest.mark.parametrize(
    ("settings", "demand", "words"),
    [
        ({"max_requests_per_key": 2}, ResourceDemand("m"), "the limit of this API key is 2 open requests"),
        ({"max_prompt_tokens_per_key": 250}, ResourceDemand("m", prompt_tokens=100), "250 prompt tokens"),
        (
            {"max_body_bytes_per_key": 250},
            ResourceDemand("m", prompt_bytes=100),
            "of open prompts; with this one it would have",
        ),
    ],
)
def test_a_key_without_limits_is_bounded_in_what_it_has_under_way(
    settings: dict[str, int], demand: ResourceDemand, words: str
):
    one = bounded(**settings)
    assert [one.admit("k", demand, 0.0) for _ in range(2)] == [0, 0]
    answer = one.admit("k", demand, 0.0)
    assert isinstance(answer, Refused)
    assert (answer.code, words in answer.message) == (RefusalCode.RATE_LIMITED, True), answer.message
    assert one.admit("other", demand, 0.0) == 0, "of its own"
    one.record_end("k", demand, 0, 0, 0.0)
    assert one.admit("k", demand, 0.0) == 0


def test_a_request_alone_is_as_large_as_it_likes():
    one = bounded(max_prompt_tokens_per_key=10, max_body_bytes_per_key=10)
    large = ResourceDemand("m", prompt_bytes=1000)
    assert one.admit("k", large, 0.0) == 0
    assert isinstance(one.admit("k", ResourceDemand("m", prompt_bytes=1), 0.0), Refused)


def test_a_key_may_have_exactly_its_prompt_bytes_under_way():
    one = bounded(max_body_bytes_per_key=250)
    assert [one.admit("k", ResourceDemand("m", prompt_bytes=size), 0.0) for size in (100, 150)] == [0, 0]
    assert isinstance(one.admit("k", ResourceDemand("m", prompt_bytes=1), 0.0), Refused)


def test_videos_of_a_key_are_bound_by_its_models_and_by_nothing_that_it_has_no_limit_for():
    one = quotas(models=("wan",))
    assert [one.admit_video("k", "wan", 100, 100, 0.0) for _ in range(100)] == [None] * 100
    answer = one.admit_video("k", "ltx", 0, 0, 0.0)
    assert isinstance(answer, Refused)
    assert answer.code is RefusalCode.NOT_ALLOWED
    assert RateLimits().admit_video("any", "wan", 100, 100, 0.0) is None


def test_videos_are_counted_apart_and_one_may_always_wait():
    one = quotas(concurrency=2, waiting=0, requests_per_minute=3)
    assert one.admit_video("k", "wan", 0, 0, 0.0) is None
    for has, queued in ((2, 0), (1, 1)):
        answer = one.admit_video("k", "wan", has, queued, 0.0)
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.RATE_LIMITED
    assert [one.admit_video("k", "wan", 1, 0, 0.0) for _ in range(2)] == [None, None]
    answer = one.admit_video("k", "wan", 1, 0, 0.0)
    assert isinstance(answer, Refused)
    assert "3 requests per minute" in answer.message
    assert one.count_open("k") == 0


def standings(one: RateLimits, now: float) -> list[tuple[str, int, int, float]]:
    return [(rate.unit, rate.limit, rate.remaining, round(rate.reset, 6)) for rate in one.list_rates("k", now)]


def test_a_bucket_fills_at_its_rate_and_never_above_it():
    one = quotas(requests_per_minute=6)
    for _ in range(6):
        taken(one)
    assert standings(one, 0.0) == [("requests", 6, 0, 60.0)]
    assert standings(one, 9.9) == [("requests", 6, 0, 50.1)]
    assert standings(one, 10.0) == [("requests", 6, 1, 50.0)]
    assert standings(one, 10_000.0) == [("requests", 6, 6, 0.0)]
    for _ in range(6):
        taken(one, 10_000.0)
    assert refused(one, 10_000.0).retry_after == pytest.approx(10.0)


def test_rates_name_both_buckets_and_none_without_limits():
    one = quotas(requests_per_minute=10, tokens_per_minute=600)
    charged = taken(one)
    requests, tokens = one.list_rates("k", 0.0)
    assert (requests.unit, requests.limit, requests.remaining, requests.reset) == ("requests", 10, 9, 6.0)
    assert (tokens.unit, tokens.limit, tokens.remaining, tokens.reset) == ("tokens", 600, 450, 15.0)
    one.record_end("k", ASK, charged, 30, 0.0)
    assert one.list_rates("k", 0.0)[1].remaining == 570
    assert one.list_rates("other", 0.0) == ()
    assert quotas(concurrency=3).list_rates("k", 0.0) == ()
    assert [rate.unit for rate in quotas(tokens_per_minute=5).list_rates("k", 0.0)] == ["tokens"]


def test_a_debt_shows_nothing_left_and_the_time_until_all_is_back():
    one = quotas(tokens_per_minute=60)
    taken(one)
    (rate,) = one.list_rates("k", 0.0)
    assert (rate.remaining, rate.reset) == (0, pytest.approx(150.0))


def test_settling_refunds_up_to_a_full_bucket_and_charges_excess():
    one = quotas(tokens_per_minute=300)
    charged = taken(one)
    one.record_end("k", ASK, charged, 200, 0.0)
    assert one.list_rates("k", 0.0)[0].remaining == 100, "200 used of 150 charged"
    second = taken(one, 20.0)
    one.record_end("k", ASK, second, 0, 60.0)
    assert one.list_rates("k", 60.0)[0].remaining == 300, "never more than a minute's worth"


def test_settling_refills_a_bucket_before_charging_excess():
    one = quotas(tokens_per_minute=300)
    charged = taken(one)
    one.record_end("k", ASK, charged, 250, 60.0)
    assert standings(one, 60.0) == [("tokens", 300, 200, 20.0)]


def test_refused_request_is_charged_in_neither_bucket():
    one = quotas(requests_per_minute=10, tokens_per_minute=200)
    taken(one)
    for _ in range(5):
        refused(one)
    requests, tokens = one.list_rates("k", 0.0)
    assert (requests.remaining, tokens.remaining, one.count_open("k")) == (9, 50, 1)


def test_two_keys_and_their_buckets_are_apart():
    limits = {"a": KeyLimits(requests_per_minute=1), "b": KeyLimits(requests_per_minute=2)}
    one = RateLimits(limits.get)
    assert isinstance(one.admit("a", ASK, 0.0), int)
    assert isinstance(one.admit("a", ASK, 0.0), Refused)
    assert [isinstance(one.admit("b", ASK, 0.0), int) for _ in range(3)] == [True, True, False]
    assert (one.count_open("a"), one.count_open("b"), one.count_open("c")) == (1, 2, 0)


def test_the_estimate_is_the_prompt_and_an_answer_of_bounded_length_for_each_choice():
    assert estimate_probable_tokens(ResourceDemand("m", prompt_tokens=100, max_tokens=50)) == 150
    assert estimate_probable_tokens(ResourceDemand("m", prompt_bytes=400, max_tokens=50)) == 400 // BYTES_PER_TOKEN + 50
    assert (
        estimate_probable_tokens(ResourceDemand("m", prompt_tokens=100, max_tokens=10 * DEFAULT_ANSWER_TOKENS))
        == 100 + DEFAULT_ANSWER_TOKENS
    )
    assert estimate_probable_tokens(ResourceDemand("m", prompt_tokens=7)) == 7 + DEFAULT_ANSWER_TOKENS
    assert estimate_probable_tokens(ResourceDemand("m", prompt_tokens=100, max_tokens=50, choices=2)) == 200


def test_record_end_releases_tokens_and_bytes_of_the_request():
    one = bounded(max_prompt_tokens_per_key=100, max_body_bytes_per_key=1000)
    first, second = ResourceDemand("m", prompt_tokens=60), ResourceDemand("m", prompt_tokens=40, prompt_bytes=900)
    assert one.admit("k", first, 0.0) == one.admit("k", second, 0.0) == 0
    assert isinstance(one.admit("k", ResourceDemand("m", prompt_tokens=1), 0.0), Refused)
    one.record_end("k", first, 0, 0, 0.0)
    assert one.admit("k", ResourceDemand("m", prompt_tokens=60), 0.0) == 0
    assert isinstance(one.admit("k", ResourceDemand("m", prompt_tokens=0, prompt_bytes=101), 0.0), Refused)
    one.record_end("k", second, 0, 0, 0.0)
    assert one.admit("k", ResourceDemand("m", prompt_tokens=0, prompt_bytes=101), 0.0) == 0


def test_a_key_has_its_limits_and_the_weight_of_its_priority():
    high = KeyLimits(priority="high")
    one = RateLimits({"k": high}.get)
    assert (one.get_limits("k"), one.get_limits("other")) == (high, NO_LIMITS)
    weights = [KeyLimits(priority=name).weight for name in ("low", "normal", "high")]
    assert (weights, NO_LIMITS.weight) == ([1, 4, 16], 4)


def test_models_match_by_pattern_and_case():
    limits = KeyLimits(models=("qwen*", "tiny"))
    assert [limits.allows(name) for name in ("qwen3", "tiny", "tiny2", "Qwen3", "a-qwen3")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert KeyLimits().allows("anything")


def test_the_end_of_a_request_releases_the_bytes_of_all_its_texts():
    one = bounded(max_body_bytes_per_key=1000)
    assert one.admit("k", ResourceDemand("m", prompt_bytes=50), 0.0) == 0, "stays open"
    texts = ResourceDemand("m", prompt_bytes=200, other_bytes=700)
    for _ in range(2):
        assert one.admit("k", texts, 0.0) == 0
        assert isinstance(one.admit("k", ResourceDemand("m", prompt_bytes=51), 0.0), Refused)
        one.record_end("k", texts, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("limits", "most", "unit"),
    [
        ({"concurrency": 3}, 3, "open"),
        ({"requests_per_minute": 3, "tokens_per_minute": 1}, 3, "per minute"),
        ({"concurrency": 3, "requests_per_minute": 2}, 3, "open"),
        ({}, 4, "open"),
    ],
)
def test_a_body_with_more_prompts_than_its_key_can_ever_have_is_refused(limits: dict[str, Any], most: int, unit: str):
    one = RateLimits({"k": KeyLimits(**limits)}.get, RouterSettings(max_requests_per_key=4))
    assert one.refuse_prompts("k", min(limits.values(), default=most) if unit == "open" else most) is None
    answer = one.refuse_prompts("k", most + 1)
    assert isinstance(answer, Refused)
    assert answer.code is RefusalCode.INVALID
    assert answer.message == (
        f"{most + 1} prompts are {most + 1} requests, and the limit of this API key is {most} {unit}: send at most "
        f"{most} prompts in one body"
    )


@pytest.mark.parametrize(
    ("limits", "uses"),
    [
        (KeyLimits(), (True, False)),
        (KeyLimits(models=("tiny",)), (False, False)),
        (KeyLimits(labels=("lab",)), (False, False)),
        (KeyLimits(models=("tiny",), upstreams=True), (True, True)),
        (KeyLimits(upstreams=False), (False, False)),
    ],
    ids=str,
)
def test_a_key_with_limits_of_models_or_nodes_uses_no_upstream_by_default(limits: KeyLimits, uses: tuple[bool, bool]):
    assert tuple(limits.may_use_upstreams(default) for default in (True, False)) == uses
