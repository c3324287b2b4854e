"""Keys that ask for far more than an equal share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.admission.key_load import FAIR_SHARE_FACTOR, KeyLoad
from wire.capacity.fairness import WeightedKey

KEYS = ("ada", "bob", "carol", "dia")
WEIGHTS = dict(zip("abcde", (1, 4, 4, 4, 16), strict=True))
REQUESTS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 50)), max_size=20)


def test_exceeds_share_of_one_of_three_keys_above_two_thirds():
    asked = KeyLoad()
    for key, size in (("ada", 100), ("bob", 100), ("carol", 400)):
        asked.add(WeightedKey(key, 4), size)
    assert not any(map(asked.exceeds_share, KEYS))
    asked.add(WeightedKey("carol", 4), 1)
    assert [key for key in KEYS if asked.exceeds_share(key)] == ["carol"]


def test_lone_key_never_exceeds_its_share():
    asked = KeyLoad()
    assert not asked.exceeds_share("ada")
    asked.add(WeightedKey("ada", 4), 10**9)
    assert not asked.exceeds_share("ada")
    asked.add(WeightedKey("bob", 4), 1)
    assert not asked.exceeds_share("ada"), "one of two never does"


def test_a_part_is_by_priority():
    asked = KeyLoad()
    asked.add(WeightedKey("night", 1), 40)
    asked.add(WeightedKey("chat", 4), 60)
    assert not asked.exceeds_share("night"), "two fifths are twice its fifth"
    asked.add(WeightedKey("night", 1), 1)
    assert asked.exceeds_share("night")
    asked.add(WeightedKey("night", 4), 1)
    assert not asked.exceeds_share("night"), "its priority was raised"


@given(REQUESTS, st.data())
def test_it_counts_those_that_are_here(requests: list[tuple[str, int]], data: st.DataObject):
    asked = KeyLoad()
    for key, size in requests:
        asked.add(WeightedKey(key, WEIGHTS[key]), size)
    gone = data.draw(st.permutations(requests))[: data.draw(st.integers(0, len(requests)))]
    left = list(requests)
    for one in gone:
        asked.drop(WeightedKey(one[0]), one[1])
        left.remove(one)
    sums = Counter[str]()
    for key, size in left:
        sums[key] += size
    parts = sum(WEIGHTS[key] for key in sums)
    for key in "abcde":
        assert asked.exceeds_share(key) == (sums[key] * parts > FAIR_SHARE_FACTOR * sums.total() * WEIGHTS[key])
