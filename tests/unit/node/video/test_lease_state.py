"""State machine of the lease of a node: each transition, illegal events, and random event orders."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.video.lease_rules import LeaseRecord
from node.video.lease_state import (
    TABLE,
    ActorFailed,
    BeginGrant,
    CheckLease,
    EndBegun,
    Event,
    GrantCompleted,
    GrantRefused,
    LeaseAbandoned,
    LeaseLife,
    LeaseStage,
    LeaseWanted,
    MemoryReturned,
    NodeStopping,
    OwnerReclaimed,
    PauseChanged,
    RefuseLease,
    ReleaseOrdered,
    WorkerStarted,
    step,
)
from node.video.worker.watchdog_policy import EndWorker
from tests.effort import scale_examples
from wire.frames import LeaseRefused, LeaseRequest
from wire.state_machine import IllegalEventError, InvariantError
from wire.units import GIB
from wire.video import LeaseEndCode

IDLE = LeaseLife()
REQUEST = LeaseRequest("l1", 3, "job", "wan", 20 * GIB, b"{}")
OTHER = LeaseRequest("l2", 1, "other", "wan", GIB, b"{}")


def after(*events: Event, life: LeaseLife = IDLE) -> LeaseLife:
    for event in events:
        life, _ = step(life, event)
    return life


GRANTING = after(LeaseWanted(REQUEST))
HELD = after(GrantCompleted(), life=GRANTING)
ENDING = after(EndBegun(), life=HELD)


def refused(life: LeaseLife, event: Event) -> LeaseRefused:
    new, (action,) = step(life, event)
    assert new == life
    assert isinstance(action, RefuseLease)
    return action.refused


def test_a_lease_is_granted_held_and_ended():
    life, actions = step(IDLE, LeaseWanted(REQUEST))
    assert (life, actions) == (LeaseLife(LeaseStage.GRANTING, "l1", 3), (BeginGrant(REQUEST),))
    assert [one.stage for one in (GRANTING, HELD, ENDING)] == [
        LeaseStage.GRANTING,
        LeaseStage.HELD,
        LeaseStage.ENDING,
    ]
    assert after(MemoryReturned(), life=ENDING) == IDLE
    assert after(GrantRefused(), life=GRANTING) == IDLE
    assert [HELD.is_current(*name) for name in (("l1", 3), ("l1", 2), ("l2", 3))] == [True, False, False]
    assert not IDLE.is_current("", 0)


@pytest.mark.parametrize("life", [GRANTING, HELD, ENDING])
def test_one_lease_at_a_time(life: LeaseLife):
    answer = refused(life, LeaseWanted(OTHER))
    text = "this node has granted memory already: one lease at a time"
    assert (answer.lease, answer.code, answer.message, answer.retry_after) == ("l2", "lease_held", text, 2.0)
    record = LeaseRecord(lease="l1", generation=3, job="job", model="wan", size=20 * GIB)
    answer = refused(life, LeaseWanted(OTHER, record))
    text = "this node has granted memory to job: one lease at a time"
    assert (answer.code, answer.message, answer.retry_after) == ("lease_held", text, 30.0)


def test_a_paused_or_stopping_node_refuses_every_lease():
    paused = after(PauseChanged("lunch"))
    answer = refused(paused, LeaseWanted(REQUEST))
    text = "this node accepts no leases: lunch"
    assert (answer.code, answer.message, answer.retry_after) == (LeaseEndCode.NODE_PAUSED, text, 60.0)
    stopping = after(NodeStopping(), life=paused)
    answer = refused(stopping, LeaseWanted(REQUEST))
    assert (answer.code, answer.message, answer.retry_after) == (
        LeaseEndCode.NODE_STOPPING,
        "this node is stopping",
        60.0,
    )
    assert after(PauseChanged(""), life=paused) == IDLE


@pytest.mark.parametrize("life", [GRANTING, HELD, ENDING])
def test_orders_end_the_lease_with_their_cause(life: LeaseLife):
    ordered, actions = step(life, ReleaseOrdered("cancelled"))
    assert actions == (CheckLease(),)
    assert ordered.end == EndWorker("cancelled", "the coordinator ended the lease")
    stopped, actions = step(life, NodeStopping())
    assert actions == (CheckLease(),)
    assert stopped.end == EndWorker(LeaseEndCode.NODE_STOPPING, "this node is stopping")
    assert after(NodeStopping(), life=ordered).end == EndWorker("cancelled", "this node is stopping")
    assert life.end is None


def test_the_owner_takes_the_memory_of_a_lease_whose_ceiling_is_lowered():
    life, actions = step(HELD, OwnerReclaimed("lunch", holding=True))
    assert actions == (CheckLease(),)
    assert life.end == EndWorker(LeaseEndCode.NODE_PAUSED, "its node stopped sharing: lunch")
    assert step(GRANTING, OwnerReclaimed("lunch", holding=False)) == (GRANTING, ())
    assert step(IDLE, OwnerReclaimed("lunch", holding=True)) == (IDLE, ())
    ordered = after(ReleaseOrdered("cancelled"), life=HELD)
    assert step(ordered, OwnerReclaimed("lunch", holding=True)) == (ordered, ()), "its end is ordered already"


def test_a_lease_ends_if_its_actor_fails_before_the_worker_starts():
    life, actions = step(HELD, ActorFailed("l1", "no room"))
    assert actions == (CheckLease(),)
    assert life.end == EndWorker("start_failed", "no room")
    assert after(WorkerStarted(), life=life).end is None, "the worker started in the meantime"
    working = after(WorkerStarted(), life=HELD)
    for other, event in (
        (HELD, ActorFailed("l2", "x")),
        (working, ActorFailed("l1", "x")),
        (GRANTING, ActorFailed("l1", "x")),
        (IDLE, ActorFailed("", "x")),
    ):
        assert step(other, event) == (other, ())


@pytest.mark.parametrize("life", [IDLE, GRANTING, HELD, ENDING])
def test_pause_and_stop_outlast_the_lease(life: LeaseLife):
    marked = after(ReleaseOrdered("cancelled"), life=life) if life.lease else life
    marked = after(PauseChanged("lunch"), NodeStopping(), life=marked)
    assert after(LeaseAbandoned(), life=marked) == LeaseLife(paused="lunch", stopping=True)


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (IDLE, GrantCompleted()),
        (IDLE, GrantRefused()),
        (IDLE, ReleaseOrdered("x")),
        (GRANTING, WorkerStarted()),
        (GRANTING, EndBegun()),
        (HELD, GrantRefused()),
        (HELD, MemoryReturned()),
        (ENDING, WorkerStarted()),
    ],
)
def test_an_illegal_event_is_named_with_the_stage(life: LeaseLife, event: Event):
    with pytest.raises(IllegalEventError, match=rf"the lease is {life.stage}: {type(event).__name__}\("):
        step(life, event)


def test_the_table_has_every_event_and_contradictions_are_detected():
    assert set(TABLE) == set(get_args(Event))
    for wrong in (
        replace(IDLE, lease="l1"),
        replace(IDLE, order="x"),
        replace(IDLE, actor_failure="x"),
        replace(IDLE, has_worker=True),
        replace(GRANTING, has_worker=True),
    ):
        with pytest.raises(InvariantError):
            wrong.check()
    with pytest.raises(InvariantError, match="a worker before the grant"):
        step(replace(GRANTING, has_worker=True), PauseChanged("x"))


events = st.one_of(
    st.sampled_from(
        [
            LeaseWanted(REQUEST),
            LeaseWanted(OTHER),
            GrantCompleted(),
            GrantRefused(),
            WorkerStarted(),
            EndBegun(),
            MemoryReturned(),
            LeaseAbandoned(),
            NodeStopping(),
        ]
    ),
    st.builds(ActorFailed, st.sampled_from(["l1", "l2"]), st.just("a")),
    st.builds(ReleaseOrdered, st.sampled_from(["released", "cancelled"])),
    st.builds(PauseChanged, st.sampled_from(["", "lunch"])),
    st.builds(OwnerReclaimed, st.just("lunch"), st.booleans()),
)


@settings(max_examples=scale_examples(2000))
@given(st.lists(events, max_size=40))
def test_in_every_order_of_events_one_lease_is_granted_at_a_time_and_an_order_is_kept_to_its_end(
    sequence: list[Event],
):
    life, granted = IDLE, 0
    for event in sequence:
        try:
            new, actions = step(life, event)
        except IllegalEventError:
            continue
        new.check()
        begun = any(isinstance(action, BeginGrant) for action in actions)
        assert not begun or (life.stage is LeaseStage.IDLE and not life.paused and not life.stopping)
        granted += begun
        if life.order and new.stage is not LeaseStage.IDLE:
            assert new.order
        assert new.stopping or not life.stopping
        life = new
