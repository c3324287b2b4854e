"""Whose turn it is where several wait."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from wire.fairness import Owner, Waiting, in_turn

ADA, BOB = Owner("ada"), Owner("bob")
WAITING = st.lists(
    st.builds(
        Waiting,
        st.builds(Owner, st.sampled_from("abcd"), st.integers(-1, 16)),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=24,
)


def order(*waiting: Waiting, **taken: int) -> list[int]:
    return list(in_turn(waiting, taken))


def test_everybodys_first_comes_before_anybodys_second():
    assert order(*[Waiting(ADA)] * 3, Waiting(BOB)) == [0, 3, 1, 2]


def test_a_row_goes_to_who_has_fewest():
    assert order(Waiting(ADA), Waiting(BOB), ada=1, bob=2) == [0, 1]
    assert order(Waiting(ADA), Waiting(BOB), ada=2, bob=1) == [1, 0]
    assert order(Waiting(ADA, rows=3), Waiting(ADA), Waiting(BOB), Waiting(BOB)) == [0, 2, 3, 1]


def test_of_weight_four_one_has_four_times_as_many():
    heavy = Owner("heavy", 4)
    waiting = [Waiting(ADA)] * 10 + [Waiting(heavy)] * 10
    assert sum(place >= 10 for place in order(*waiting)[:5]) == 4


def test_answers_that_were_begun_come_first():
    assert order(Waiting(ADA), Waiting(BOB, begun=True), Waiting(ADA, begun=True)) == [1, 2, 0]


@given(WAITING)
def test_everybody_gets_a_turn_and_the_first_of_an_owner_first(waiting: list[Waiting]):
    places = order(*waiting)
    assert sorted(places) == list(range(len(waiting)))
    for name in "abcd":
        his = [place for place in places if waiting[place].owner.name == name and not waiting[place].begun]
        assert his == sorted(his)


@given(st.lists(st.sampled_from([ADA, BOB]), max_size=24))
def test_nobody_is_more_than_a_row_ahead_while_both_wait(owners: list[Owner]):
    had, left = Counter[str](), Counter(owner.name for owner in owners)
    for place in order(*map(Waiting, owners)):
        name = owners[place].name
        had[name] += 1
        left[name] -= 1
        if all(left[owner.name] for owner in (ADA, BOB)):
            assert abs(had["ada"] - had["bob"]) <= 1
