import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership import (
    TABLE,
    Connected,
    Cordoned,
    Disconnected,
    Enrolled,
    Event,
    IllegalEventError,
    InvariantError,
    Member,
    Pool,
    Removed,
    Reported,
    SaidGoodbye,
    State,
    Tick,
    Uncordoned,
    advance,
    next_deadline,
    restored,
    step,
    tick,
)  # fmt: skip
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")
EVENTS = st.one_of(
    st.just(Enrolled()), st.just(Cordoned()), st.just(Uncordoned()), st.just(Removed()), st.just(Tick()),
    st.builds(Connected, st.integers(1, 40), st.sampled_from(["i", "j"]), st.booleans()),
    st.builds(Reported, st.integers(1, 40), st.booleans()),
    st.builds(Disconnected, st.integers(1, 40)),
    st.builds(SaidGoodbye, st.integers(1, 40), st.sampled_from(["asleep", "leave", "stopping", "new word"])),
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from([A, B]), EVENTS, st.floats(0, 20)), max_size=60))
def test_no_order_of_events_breaks_an_invariant(story: list[tuple[NodeId, Event, float]]) -> None:
    pool, now = restored([A], 0.0), 0.0
    for node, event, pause in story:
        now += pause
        try:
            pool, _ = advance(pool, node, event, now)
        except IllegalEventError:
            continue
        pool.check()
        for _ in range(8):
            deadline = next_deadline(pool, now)
            if deadline is None or deadline > now:
                break
            pool, _ = tick(pool, now)
            pool.check()
        else:
            pytest.fail("ticking at the deadline must get somewhere")


def test_the_table_knows_every_event() -> None:
    assert set(TABLE) == set(Event.__args__)


def test_what_cannot_happen_is_a_typed_error() -> None:
    with pytest.raises(IllegalEventError, match="unknown"):
        advance(Pool(), A, Reported(1), 0.0)
    pool, _ = advance(Pool(), A, Connected(3, "i"), 0.0)
    for event in (Reported(4), Connected(3, "i"), Connected(2, "i")):
        with pytest.raises(IllegalEventError):
            advance(pool, A, event, 0.0)
    with pytest.raises(IllegalEventError, match="left"):
        step(Member(A, State.LEFT, 0.0, enrolled=False), Removed(), 0.0)


def test_a_contradiction_is_found() -> None:
    with pytest.raises(InvariantError, match="without a link"):
        Member(A, State.READY, 0.0, heard=0.0).check()
    with pytest.raises(InvariantError, match="kept as"):
        Pool({B: Member(A, State.LOST, 0.0)}).check()


def test_only_a_ready_node_that_is_not_cordoned_gets_work() -> None:
    ready = Member(A, State.READY, 0.0, heard=0.0, link=1, newest=1)
    assert ready.placeable
    assert not step(ready, Cordoned(), 0.0)[0].placeable
    assert not step(ready, Reported(1, draining=True), 0.0)[0].placeable
    assert not step(ready, Tick(), 3.0)[0].placeable


def test_time_alone_does_nothing_to_a_quiet_pool() -> None:
    assert next_deadline(Pool(), 0.0) is None
    assert next_deadline(restored([A, B], 0.0), 0.0) is None
