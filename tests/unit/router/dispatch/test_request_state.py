"""The state machine of a request: its table, and random orders of events with the invariants after each."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.request import RequestFailure
from router.dispatch.request_events import (
    Action,
    AttemptEnded,
    CancelAttempt,
    DeadlinePassed,
    Delivered,
    Dequeue,
    EndRequest,
    Enqueue,
    Event,
    FirstTokens,
    Moved,
    NodeAdmitted,
    OfAttempt,
    Placed,
    Release,
    StartAttempt,
    Stopped,
    Withdraw,
)
from router.dispatch.request_state import (
    ON_NODE,
    TABLE,
    RequestLife,
    RequestState,
    step,
)
from router.placement.candidate import Candidate
from router.placement.recovery import MAX_CRASHES, MAX_LOSSES
from tests.effort import scale_examples
from tests.sim.requests import event_of, play
from wire.frames import Admitted, Finished
from wire.identity import NodeId
from wire.state_machine import IllegalEventError, InvariantError

VERBS = (
    "place a",
    "place b",
    "move a",
    "move b",
    "move c rebalance",
    "deliver",
    "no-link",
    "no-room",
    "deadline",
    "deny",
    "admit",
    "refuse",
    "refuse 5",
    "tokens",
    "lose node",
    "lose node stranded",
    "lose engine",
    "lose own_call",
    "lose memory",
    "finish",
    "fail",
    "stop",
    "hand-over",
    "upstream-end",
)
STOPPED = Stopped(RequestFailure("cancelled", "x"))


def placed(attempt: int, node: str = "a") -> Placed:
    return Placed(attempt, attempt, Candidate(node=NodeId(node), name=node, state="ready"), 1)


class World:
    """Reservations, queue entries and ends that the actions of a request leave behind."""

    def __init__(self) -> None:
        self.reserved: dict[int, NodeId] = {}
        self.cancelled: list[int] = []
        self.queued = False
        self.ends = 0

    def perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case StartAttempt():
                    assert action.placed.attempt not in self.reserved
                    self.reserved[action.placed.attempt] = action.placed.chosen.node
                case Release():
                    assert self.reserved.pop(action.attempt) == action.node, "released once, on its node"
                case CancelAttempt():
                    assert action.attempt not in self.cancelled
                    self.cancelled.append(action.attempt)
                case Enqueue():
                    assert not self.queued
                    self.queued = True
                case Dequeue() | Withdraw():
                    assert self.queued
                    self.queued = False
                case EndRequest():
                    self.ends += 1
                case _:
                    pass

    def check(self, life: RequestLife) -> None:
        origin = life.origin
        on = {life.attempt: life.node} if life.node else {}
        on |= {origin.attempt: origin.node} if origin is not None and origin.node else {}
        assert self.reserved == on, "a reservation for each attempt, and no other"
        waits = life.state is RequestState.QUEUED or (origin is not None and origin.state is RequestState.QUEUED)
        assert self.queued is waits
        ended = life.state is RequestState.ENDED
        assert self.ends == int(ended)


def read(verb: str, attempt: int, number: int) -> Event:
    word, *rest = verb.split()
    if word == "place":
        return placed(number, rest[0])
    if word == "move":
        chosen = Candidate(node=NodeId(rest[0]), name=rest[0], state="ready")
        return Moved(number, number, chosen, 1, is_loss=len(rest) == 1)
    return event_of(word, attempt, rest)


@settings(max_examples=scale_examples(10_000), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(VERBS), st.booleans()), max_size=24))
def test_step_keeps_the_invariants_in_any_order_of_events(events: list[tuple[str, bool]]):
    life, world, number = RequestLife(0.0), World(), 0
    for at, (verb, is_late) in enumerate(events):
        number += verb.startswith(("place", "move"))
        event = read(verb, max(0, life.attempt - 1) if is_late else life.attempt, number)
        before = life
        try:
            life, actions = step(life, event, float(at))
        except IllegalEventError:
            assert life is before
            continue
        life.check()
        world.perform(actions)
        world.check(life)
        assert life.newest >= before.newest
        assert life.attempts >= before.attempts
        if before.state is RequestState.ENDED:
            assert (life, actions) == (before, ())
        if isinstance(event, OfAttempt) and event.attempt != before.attempt:
            assert (life, actions) == (before, ()), "an earlier attempt is ignored"
    life, actions = step(life, STOPPED, 99.0)
    world.perform(actions)
    world.check(life)
    assert life.state is RequestState.ENDED
    assert not world.reserved


@pytest.mark.parametrize("state", list(RequestState))
def test_every_state_can_be_stopped_and_only_the_end_stays(state: RequestState):
    assert TABLE[Stopped][state] == {RequestState.ENDED}
    others = [kind for kind in TABLE if kind is not Stopped and state in TABLE[kind]]
    assert bool(others) is (state is not RequestState.ENDED)


def reach(state: RequestState) -> RequestLife:
    """Return a life in this state."""
    if state is RequestState.ENDED:
        return step(RequestLife(0.0), STOPPED, 0.0)[0]
    script = {
        RequestState.NEW: [],
        RequestState.QUEUED: ["no-room"],
        RequestState.SENT: ["place a"],
        RequestState.ADMITTED: ["place a", "admit"],
        RequestState.STREAMING: ["place a", "tokens"],
        RequestState.UPSTREAM: ["hand-over"],
    }[state]
    life = RequestLife(0.0)
    for verb in script:
        life, _ = step(life, read(verb, life.attempt, life.newest + 1), 0.0)
    assert life.state is state
    return life


@pytest.mark.parametrize("state", list(RequestState))
@pytest.mark.parametrize("verb", VERBS)
def test_step_takes_an_event_exactly_where_the_table_allows_it(state: RequestState, verb: str):
    life = reach(state)
    event = read(verb, life.attempt, life.newest + 1)
    if state in TABLE[type(event)]:
        after, _ = step(life, event, 1.0)
        assert after.state in TABLE[type(event)][state]
        return
    with pytest.raises(IllegalEventError) as error:
        step(life, event, 1.0)
    assert f"the request is {state}" in str(error.value)
    assert type(event).__name__ in str(error.value)


def test_the_times_of_a_life_are_those_of_its_events():
    life, _ = step(RequestLife(1.0), placed(1), 2.0)
    assert (life.since, life.first_at) == (2.0, None)
    life, _ = step(life, FirstTokens(1), 3.0)
    assert (life.since, life.first_at) == (3.0, 3.0)
    for verb, at in (("lose node", 4.0), ("place b", 5.0), ("tokens", 6.0)):
        life, _ = step(life, read(verb, life.attempt, 2), at)
    assert (life.since, life.first_at) == (6.0, 3.0), "of any attempt"


def test_a_new_attempt_has_a_higher_number_and_a_future_one_is_illegal():
    life, _ = step(RequestLife(0.0), placed(5), 0.0)
    life, _ = step(life, event_of("refuse", 5, []), 0.0)
    with pytest.raises(IllegalEventError, match="attempt 5 is not newer than 5"):
        step(life, placed(5), 0.0)
    with pytest.raises(IllegalEventError, match="AttemptEnded of attempt 6, but the newest is 5"):
        step(life, AttemptEnded(6, Finished(6, ("stop",), 1, 1)), 0.0)
    assert step(life, NodeAdmitted(4, Admitted(4, 1)), 0.0) == (life, ())


def test_a_node_that_answers_has_the_request():
    """A frame of the new node settles a delivery, as `Delivered` does."""
    life, _ = step(RequestLife(0.0), placed(1), 0.0)
    life, _ = step(life, read("move b", 1, 2), 1.0)
    assert life.origin is not None
    by_frame, actions = step(life, event_of("admit", 2, []), 2.0)
    told, first = step(life, Delivered(2), 2.0)
    after, then = step(told, event_of("admit", 2, []), 2.0)
    assert (by_frame, actions) == (after, (*first, *then))


def test_a_delivered_move_releases_and_cancels_the_attempt_on_the_earlier_node():
    life, _ = step(RequestLife(0.0), placed(1), 0.0)
    life, _ = step(life, read("move b", 1, 2), 1.0)
    after, actions = step(life, Delivered(2), 2.0)
    assert (after.node, after.attempt) == (NodeId("b"), 2)
    assert actions == (Release(NodeId("a"), 1), CancelAttempt(NodeId("a"), 1))


def test_crashes_of_engines_end_a_request_at_their_limit_without_a_loss():
    life = RequestLife(0.0)
    for number in range(1, MAX_CRASHES + 1):
        assert life.state is RequestState.NEW
        life, _ = step(life, placed(number), 0.0)
        life, _ = step(life, event_of("lose", number, ["engine"]), 0.0)
    assert (life.state, life.crashes, life.losses) == (RequestState.ENDED, MAX_CRASHES, 0)


def test_losses_end_a_request_above_their_limit():
    life, number = RequestLife(0.0), 0
    while life.state is not RequestState.ENDED:
        number += 1
        life, _ = step(life, placed(number), 0.0)
        life, _ = step(life, event_of("lose", number, ["node"]), 0.0)
    assert (number, life.losses) == (MAX_LOSSES + 1, MAX_LOSSES + 1)


@pytest.mark.parametrize(
    "life",
    [
        RequestLife(0.0, attempt=1, newest=1, attempts=1),
        RequestLife(0.0, RequestState.SENT),
        RequestLife(0.0, RequestState.SENT, 2, NodeId("a"), newest=1, attempts=1),
        RequestLife(0.0, RequestState.ENDED),
        RequestLife(0.0, outcome=STOPPED.outcome),
        RequestLife(0.0, in_a_row=1),
        RequestLife(0.0, newest=3),
        RequestLife(0.0, origin=RequestLife(0.0)),
        RequestLife(0.0, crashes=1),
        RequestLife(0.0, RequestState.STREAMING, 1, NodeId("a"), newest=1, attempts=1),
    ],
)
def test_check_finds_every_contradiction(life: RequestLife):
    with pytest.raises(InvariantError):
        life.check()


def test_states_on_a_node_are_those_with_an_attempt():
    assert {state for state in RequestState if reach(state).node is not None} == ON_NODE


def test_deadline_of_a_request_that_is_not_queued_is_illegal():
    with pytest.raises(IllegalEventError, match="the request is new: DeadlinePassed cannot happen"):
        step(RequestLife(0.0), DeadlinePassed(), 0.0)


def test_scenarios_print_what_a_table_does_not_allow():
    assert "illegal" in play("0 tokens")


def test_attempts_in_a_row_are_counted_from_the_last_wait_or_loss_and_kept_by_an_undelivered_move():
    life = RequestLife(0.0)
    counts: list[int] = []
    for number, verb in enumerate(
        ("place a", "refuse", "place b", "lose engine", "place a", "refuse", "place b", "refuse", "no-room", "place a"),
        1,
    ):
        life, _ = step(life, read(verb, life.attempt, number), float(number))
        counts.append(life.in_a_row)
    assert counts == [1, 1, 2, 0, 1, 1, 2, 2, 0, 1]
    for number, verb in enumerate(("deliver", "refuse", "place b", "move a", "no-link"), 11):
        life, _ = step(life, read(verb, life.attempt, number), float(number))
        counts.append(life.in_a_row)
    assert counts[10:] == [1, 1, 2, 1, 1]
    assert (life.attempt, life.attempts) == (13, 7)
