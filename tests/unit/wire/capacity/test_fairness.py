"""The choice of the next key where several wait."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from wire.capacity.fairness import (
    CROWDED_PROMPTS,
    PrefillFairness,
    RunningRequest,
    WaitingRequest,
    WeightedKey,
    choose_preemptions,
    compute_service_order,
)

ADA, BOB = WeightedKey("ada"), WeightedKey("bob")
WAITING = st.lists(
    st.builds(
        WaitingRequest,
        st.builds(WeightedKey, st.sampled_from("abcd"), st.integers(-1, 16)),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=24,
)


def order(*waiting: WaitingRequest, **taken: int) -> list[int]:
    return list(compute_service_order(waiting, taken))


def test_service_order_serves_first_requests_of_all_keys_first():
    assert order(*[WaitingRequest(ADA)] * 3, WaitingRequest(BOB)) == [0, 3, 1, 2]


def test_service_order_prefers_the_key_with_fewest_rows():
    assert order(WaitingRequest(ADA), WaitingRequest(BOB), ada=1, bob=2) == [0, 1]
    assert order(WaitingRequest(ADA), WaitingRequest(BOB), ada=2, bob=1) == [1, 0]
    assert order(WaitingRequest(ADA, rows=3), WaitingRequest(ADA), WaitingRequest(BOB), WaitingRequest(BOB)) == [
        0,
        2,
        3,
        1,
    ]
    assert order(WaitingRequest(ADA), WaitingRequest(BOB), WaitingRequest(BOB), WaitingRequest(ADA)) == [0, 1, 2, 3], (
        "of equals the older request"
    )


def test_of_weight_four_one_has_four_times_as_many():
    heavy = WeightedKey("heavy", 4)
    waiting = [WaitingRequest(ADA)] * 10 + [WaitingRequest(heavy)] * 10
    assert sum(place >= 10 for place in order(*waiting)[:5]) == 4


def test_answers_that_were_begun_come_first():
    assert order(WaitingRequest(ADA), WaitingRequest(BOB, begun=True), WaitingRequest(ADA, begun=True)) == [1, 2, 0]


@given(WAITING)
def test_every_key_is_served_and_its_requests_stay_in_order(waiting: list[WaitingRequest]):
    places = order(*waiting)
    assert sorted(places) == list(range(len(waiting)))
    for name in "abcd":
        his = [place for place in places if waiting[place].weighted_key.name == name and not waiting[place].begun]
        assert his == sorted(his)


@given(st.lists(st.sampled_from([ADA, BOB]), max_size=24))
def test_no_key_is_more_than_a_row_ahead_while_both_wait(keys: list[WeightedKey]):
    had, left = Counter[str](), Counter(key.name for key in keys)
    for place in order(*map(WaitingRequest, keys)):
        name = keys[place].name
        had[name] += 1
        left[name] -= 1
        if all(left[key.name] for key in (ADA, BOB)):
            assert abs(had["ada"] - had["bob"]) <= 1


def read(reading: PrefillFairness, waiting: list[WeightedKey], turns: int, tokens: int = 100) -> Counter[str]:
    """Run `turns` turns of endless prompts, and return the number of turns of each key."""
    had = Counter[str]()
    for _ in range(turns):
        key = waiting[reading.choose_next(waiting)]
        reading.count_prefilled(key, tokens)
        had[key.name] += 1
    return had


def test_without_a_key_with_many_requests_the_oldest_prompt_is_prefilled():
    assert read(PrefillFairness(), [ADA] * CROWDED_PROMPTS + [BOB], 8) == {"ada": 8}


def test_beside_many_requests_each_key_has_as_much_prefilled():
    assert read(PrefillFairness(), [ADA] * (CROWDED_PROMPTS + 1) + [BOB], 8) == {"ada": 4, "bob": 4}


def test_prefill_share_counts_tokens_of_other_passes():
    reading, waiting = PrefillFairness(), [ADA] * (CROWDED_PROMPTS + 1) + [BOB]
    reading.choose_next(waiting)
    reading.count_prefilled(ADA, 400)
    assert read(reading, waiting, 4) == {"bob": 4}


def test_prefill_share_is_proportional_to_the_weight():
    assert read(PrefillFairness(), [ADA] * (CROWDED_PROMPTS + 1) + [WeightedKey("heavy", 4)], 10) == {
        "ada": 2,
        "heavy": 8,
    }


def test_idle_key_earns_no_credit():
    reading, crowd = PrefillFairness(), [ADA] * (CROWDED_PROMPTS + 1)
    read(reading, [*crowd, BOB], 4)
    read(reading, crowd, 50)
    assert read(reading, [*crowd, BOB], 8) == {"ada": 4, "bob": 4}


@given(st.lists(st.sampled_from([ADA, BOB, WeightedKey("heavy", 4)]), min_size=1, max_size=24), st.data())
def test_choose_next_starves_no_key(keys: list[WeightedKey], data: st.DataObject):
    reading, had = PrefillFairness(), Counter[str]()
    for _ in range(60):
        key = keys[reading.choose_next(keys)]
        reading.count_prefilled(key, data.draw(st.integers(1, 100)))
        had[key.name] += 1
    if max(Counter(one.name for one in keys).values()) > CROWDED_PROMPTS:
        assert set(had) == {one.name for one in keys}
    else:
        assert set(had) == {keys[0].name}


def test_preemption_takes_the_youngest_request_of_the_largest_key():
    a, b = WeightedKey("a", 4), WeightedKey("b", 4)
    assert choose_preemptions(b, 1, 1, [RunningRequest(a, 1)] * 4) == [3]
    assert choose_preemptions(b, 1, 1, [RunningRequest(a, 1)] * 3 + [RunningRequest(b, 1)]) == [2]
    assert choose_preemptions(b, 1, 1, [RunningRequest(a, 1)] * 2 + [RunningRequest(b, 1)] * 2) == []
    assert choose_preemptions(a, 1, 1, [RunningRequest(a, 1)] * 4) == [], "nothing of its own"
    assert choose_preemptions(b, 1, 1, [RunningRequest(a, 1)]) == [], "a lone request is not preempted"
    assert choose_preemptions(b, 2, 2, [RunningRequest(a, 1)] * 4) == [3, 2]
    assert choose_preemptions(b, 3, 3, [RunningRequest(a, 1)] * 4) == [], "in part it would be of no use"
    assert choose_preemptions(WeightedKey("b", 16), 3, 3, [RunningRequest(a, 1)] * 4) == [3, 2, 1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=12), st.integers(1, 5))
def test_preemption_is_never_reversed(holding: list[tuple[str, int]], need: int):
    held = [RunningRequest(WeightedKey(name, 4), size) for name, size in holding]
    places = choose_preemptions(WeightedKey("x", 4), need, need, held)
    left = [one for place, one in enumerate(held) if place not in places] + [RunningRequest(WeightedKey("x", 4), need)]
    for place in places:
        back = choose_preemptions(held[place].weighted_key, held[place].size, held[place].size, left)
        assert not any(left[one].weighted_key.name == "x" for one in back)


def test_service_order_puts_keys_without_rows_first():
    assert order(WaitingRequest(ADA), WaitingRequest(BOB), ada=1) == [1, 0]


def test_the_key_that_holds_most_is_preempted():
    eve = WeightedKey("eve")
    holding = [RunningRequest(BOB, 5), RunningRequest(eve, 2), RunningRequest(BOB, 5), RunningRequest(eve, 2)]
    assert choose_preemptions(ADA, 1, 5, holding) == [2]
    assert choose_preemptions(ADA, 1, 6, holding) == []


def test_no_request_is_preempted_where_all_of_them_are_too_few():
    assert choose_preemptions(ADA, 0, 6, [RunningRequest(BOB, 5)]) == []
    assert choose_preemptions(ADA, 0, 5, [RunningRequest(BOB, 5)]) == [0]


def test_new_key_begins_at_the_lowest_prefill_count():
    eve, reading = WeightedKey("eve"), PrefillFairness()
    reading.count_prefilled(ADA, 1000)
    waiting = [*[ADA] * (CROWDED_PROMPTS + 1), BOB]
    assert reading.choose_next(waiting) == 0
    reading.count_prefilled(ADA, 100)
    assert reading.choose_next(waiting) == CROWDED_PROMPTS + 1
    reading.count_prefilled(BOB, 10)
    assert reading.choose_next([*waiting, eve]) == CROWDED_PROMPTS + 1
    reading.count_prefilled(BOB, 5)
    assert reading.choose_next([*waiting, eve]) == CROWDED_PROMPTS + 2
    zoe = WeightedKey("zoe")
    reading.count_prefilled(zoe, 1000)  # without a waiting prompt
    assert reading.choose_next([*waiting, zoe]) == CROWDED_PROMPTS + 1
    reading.count_prefilled(BOB, 1)
    assert reading.choose_next([*waiting, zoe]) == CROWDED_PROMPTS + 2
