"""Who asks for far more than an equal part."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.asked import HOG, Asked

KEYS = ("ada", "bob", "carol", "dia")
REQUESTS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 50)), max_size=20)


def test_one_of_three_may_ask_for_two_thirds_and_no_more():
    asked = Asked()
    for key, size in (("ada", 100), ("bob", 100), ("carol", 400)):
        asked.add(key, size)
    assert not any(map(asked.much, KEYS))
    asked.add("carol", 1)
    assert [key for key in KEYS if asked.much(key)] == ["carol"]


def test_who_is_alone_asks_for_nothing_beyond_a_part():
    asked = Asked()
    assert not asked.much("ada")
    asked.add("ada", 10**9)
    assert not asked.much("ada")
    asked.add("bob", 1)
    assert not asked.much("ada"), "one of two never does"


@given(REQUESTS, st.data())
def test_it_counts_those_that_are_here(requests: list[tuple[str, int]], data: st.DataObject):
    asked = Asked()
    for key, size in requests:
        asked.add(key, size)
    gone = data.draw(st.permutations(requests))[: data.draw(st.integers(0, len(requests)))]
    left = list(requests)
    for one in gone:
        asked.drop(*one)
        left.remove(one)
    sums = Counter[str]()
    for key, size in left:
        sums[key] += size
    for key in "abcde":
        assert asked.much(key) == (sums[key] * len(sums) > HOG * sums.total())


def test_empty_prompts_come_and_go():
    asked = Asked()
    for _ in range(2):
        asked.add("ada", 0)
    for _ in range(2):
        asked.drop("ada", 0)
    assert not asked.much("ada")
