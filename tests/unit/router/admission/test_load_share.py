"""Keys that ask for far more than an equal share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.admission.load_share import HOG, Asked
from wire.capacity.fairness import Owner

KEYS = ("ada", "bob", "carol", "dia")
WEIGHTS = dict(zip("abcde", (1, 4, 4, 4, 16), strict=True))
REQUESTS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 50)), max_size=20)


def test_one_of_three_may_ask_for_two_thirds_and_no_more():
    asked = Asked()
    for key, size in (("ada", 100), ("bob", 100), ("carol", 400)):
        asked.add(Owner(key, 4), size)
    assert not any(map(asked.much, KEYS))
    asked.add(Owner("carol", 4), 1)
    assert [key for key in KEYS if asked.much(key)] == ["carol"]


def test_who_is_alone_asks_for_nothing_beyond_a_part():
    asked = Asked()
    assert not asked.much("ada")
    asked.add(Owner("ada", 4), 10**9)
    assert not asked.much("ada")
    asked.add(Owner("bob", 4), 1)
    assert not asked.much("ada"), "one of two never does"


def test_a_part_is_by_priority():
    asked = Asked()
    asked.add(Owner("night", 1), 40)
    asked.add(Owner("chat", 4), 60)
    assert not asked.much("night"), "two fifths are twice its fifth"
    asked.add(Owner("night", 1), 1)
    assert asked.much("night")
    asked.add(Owner("night", 4), 1)
    assert not asked.much("night"), "its priority was raised"


@given(REQUESTS, st.data())
def test_it_counts_those_that_are_here(requests: list[tuple[str, int]], data: st.DataObject):
    asked = Asked()
    for key, size in requests:
        asked.add(Owner(key, WEIGHTS[key]), size)
    gone = data.draw(st.permutations(requests))[: data.draw(st.integers(0, len(requests)))]
    left = list(requests)
    for one in gone:
        asked.drop(Owner(one[0]), one[1])
        left.remove(one)
    sums = Counter[str]()
    for key, size in left:
        sums[key] += size
    parts = sum(WEIGHTS[key] for key in sums)
    for key in "abcde":
        assert asked.much(key) == (sums[key] * parts > HOG * sums.total() * WEIGHTS[key])
