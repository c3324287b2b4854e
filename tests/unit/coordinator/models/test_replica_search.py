"""The models that are unloaded for a replica."""

import pytest

from coordinator.models.replica_search import choose_victims
from router.placement.candidate import Candidate
from wire.identity import NodeId
from wire.report import Memory, Model

A = NodeId("a")


def choose(
    need: int, headroom: int | None, *sizes: int, why: str = "too little memory", cap: int = 100
) -> list[int] | None:
    """Return the sizes of the models that leave, of models in the order of their departure."""
    models = [Model(f"m{number}", weights=size) for number, size in enumerate(sizes)]
    candidate = Candidate(A, "a", "ready", why=why, need=need, headroom=headroom, memory=Memory(cap=cap))
    chosen = choose_victims(candidate, models)
    return None if chosen is None else [model.weights for model in chosen]


@pytest.mark.parametrize(
    ("need", "headroom", "sizes", "chosen"),
    [
        (6, 0, (6, 1), [6]),
        (6, 0, (5,), None),
        (6, None, (6,), [6]),
        (6, None, (5,), None),
        (6, 5, (1,), [1]),
        (6, 5, (), None),
        (6, 6, (1,), []),
        (6, 0, (5, 1), [5, 1]),
        (6, 0, (2, 3, 6), [6]),
        (8, 0, (4, 3, 6), [4, 6]),
        (6, 0, (2, 3, 5), [2, 5]),
    ],
)
def test_choose_victims_unloads_the_first_models_that_make_room_and_no_more(
    need: int, headroom: int | None, sizes: tuple[int, ...], chosen: list[int] | None
):
    assert choose(need, headroom, *sizes) == chosen


def test_choose_victims_unloads_nothing_where_the_replica_fits():
    assert choose(6, 0, 6, why="") == []


@pytest.mark.parametrize(("need", "chosen"), [(100, [100]), (101, None)])
def test_choose_victims_unloads_nothing_for_what_the_cap_never_holds(need: int, chosen: list[int] | None):
    assert choose(need, 0, need) == chosen
