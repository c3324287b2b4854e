"""State machine of the connection to the coordinator: each transition, illegal events, and random event orders."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.agent.link_state import (
    DIAL_DELAYS_SECONDS,
    TABLE,
    DelayOver,
    DialFailed,
    Event,
    LinkAccepted,
    LinkClosed,
    LinkDenied,
    LinkLife,
    LinkOpened,
    LinkState,
    LinkStop,
    SleepAnnounced,
    WokeUp,
    step,
)
from tests.effort import scale_examples
from wire.state_machine import IllegalEventError, InvariantError

NEW = LinkLife()


def after(*events: Event, life: LinkLife = NEW) -> LinkLife:
    for event in events:
        life = step(life, event)
    return life


CONNECTED = after(LinkOpened())
LINKED = after(LinkAccepted(), life=CONNECTED)
WAITING = after(DialFailed())
ASLEEP = after(SleepAnnounced())
EXPELLED = after(LinkDenied(final=True), life=CONNECTED)
STOPPED = after(LinkStop())


def test_a_node_is_linked_when_the_coordinator_accepts_its_connection():
    connected = after(LinkOpened())
    assert [life.state for life in (NEW, connected, after(LinkAccepted(), life=connected))] == [
        LinkState.DIALING,
        LinkState.CONNECTED,
        LinkState.LINKED,
    ]
    assert after(LinkAccepted(), life=LINKED) == LINKED, "a second link replaced the first"


def test_the_delay_between_rounds_doubles_to_the_longest_and_begins_anew_after_an_acceptance():
    life, waits = NEW, list[float]()
    for _ in range(8):
        life = after(DialFailed(), life=life)
        waits.append(life.wait)
        life = after(DelayOver(), life=life)
        assert (life.state, life.wait) == (LinkState.DIALING, 0.0)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    closed = after(LinkOpened(), LinkClosed(), life=life)
    assert (closed.wait, closed.next_delay) == (30.0, 30.0), "a coordinator that accepts no link is not dialed faster"
    lost = after(LinkOpened(), LinkAccepted(), LinkClosed(1.5), life=life)
    assert (lost.state, lost.wait, lost.next_delay) == (LinkState.WAITING, 0.75, 1.0)
    assert after(DialFailed(0.5)).wait == 0.25


def test_a_denial_sets_the_minimum_of_the_next_wait_or_ends_the_node():
    denied = after(LinkDenied(retry_after=20.0), life=CONNECTED)
    assert denied == replace(CONNECTED, retry_after=20.0)
    waiting = after(LinkClosed(), life=denied)
    assert (waiting.wait, waiting.retry_after) == (20.0, 0.0)
    assert after(LinkDenied(retry_after=0.1), LinkClosed(), life=CONNECTED).wait == 0.5
    assert LinkLife(LinkState.EXPELLED) == EXPELLED


@pytest.mark.parametrize("life", [NEW, CONNECTED, LINKED, WAITING, ASLEEP])
def test_sleep_denial_and_stop_end_every_other_state(life: LinkLife):
    assert after(SleepAnnounced(), life=life) == ASLEEP
    assert after(LinkDenied(final=True), life=life) == EXPELLED
    assert after(LinkStop(), life=life) == STOPPED


def test_a_machine_that_wakes_dials_at_once():
    assert after(WokeUp(), life=after(DialFailed(), DelayOver(), DialFailed(), SleepAnnounced())) == NEW
    for life in (NEW, CONNECTED, LINKED, WAITING, EXPELLED, STOPPED):
        assert after(WokeUp(), life=life) == life


@pytest.mark.parametrize("life", [ASLEEP, EXPELLED, STOPPED])
@pytest.mark.parametrize("event", [LinkOpened(), DialFailed(), LinkAccepted(), LinkClosed(), DelayOver()])
def test_the_end_of_a_task_that_sleep_denial_or_stop_overtook_changes_nothing(life: LinkLife, event: Event):
    assert step(life, event) == life


@pytest.mark.parametrize("event", [LinkStop(), SleepAnnounced(), LinkDenied(final=True), LinkDenied(retry_after=3.0)])
def test_a_stopped_or_expelled_node_stays_so(event: Event):
    assert step(STOPPED, event) == STOPPED
    assert step(EXPELLED, event).state is LinkState.EXPELLED


@pytest.mark.parametrize(
    ("life", "event"),
    [(NEW, LinkClosed()), (NEW, DelayOver()), (WAITING, LinkClosed()), (LINKED, DelayOver()), (LINKED, DialFailed())],
)
def test_an_illegal_event_is_named_with_the_state(life: LinkLife, event: Event):
    with pytest.raises(IllegalEventError, match=rf"the link is {life.state}: {type(event).__name__}\("):
        step(life, event)


def test_the_table_has_every_event_and_contradictions_are_detected():
    assert set(TABLE) == set(get_args(Event))
    for wrong in (
        replace(NEW, wait=1.0),
        replace(WAITING, wait=0.0),
        replace(NEW, next_delay=0.4),
        replace(NEW, next_delay=30.1),
    ):
        with pytest.raises(InvariantError):
            wrong.check()
    with pytest.raises(InvariantError, match="a wait belongs"):
        step(replace(LINKED, wait=1.0), LinkAccepted())


jitters = st.floats(0.5, 1.5)
events = st.one_of(
    st.sampled_from([LinkOpened(), LinkAccepted(), DelayOver(), SleepAnnounced(), WokeUp(), LinkStop()]),
    st.builds(DialFailed, jitters),
    st.builds(LinkClosed, jitters),
    st.builds(LinkDenied, st.booleans(), st.floats(0, 100)),
)


@settings(max_examples=scale_examples(2000))
@given(st.lists(events, max_size=40))
def test_in_every_order_of_events_the_invariants_hold_and_a_wait_has_its_bounds(sequence: list[Event]):
    life, retry_after = NEW, 0.0
    for event in sequence:
        try:
            new = step(life, event)
        except IllegalEventError:
            continue
        new.check()
        if isinstance(event, LinkDenied):
            retry_after = max(retry_after, event.retry_after)
        if new.state is LinkState.WAITING and life.state is not LinkState.WAITING:
            assert 0.25 <= new.wait <= max(retry_after, 1.5 * DIAL_DELAYS_SECONDS[1])
        if life.state is LinkState.STOPPED:
            assert new.state is LinkState.STOPPED
        life = new
