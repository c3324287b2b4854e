"""The enforcer with a script of readings: its orders, and when it ends an engine."""

from dataclasses import FrozenInstanceError, dataclass, field, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from node.memory.enforcer import (
    BUSY_POLL_SECONDS,
    Action,
    EndEngine,
    EnforcerInput,
    EnforcerState,
    SendOrder,
    compute_pause_seconds,
    step,
)
from node.memory.reading import POLL_PERIOD_SECONDS
from wire.capacity.arithmetic import UNREADABLE, compute_headroom
from wire.frames import ReduceMemory
from wire.report import Memory, MemoryLevel
from wire.units import GIB

CAP = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=15 * GIB, phys=50 * GIB)


@dataclass
class Run:
    """Consecutive engines, polled every quarter of a second."""

    engine: int | None = 1
    memory: Memory = CAP
    answers: bool = True
    enforced: int = 0
    call_until: float = 0.0
    now: float = 100.0
    state: EnforcerState = field(default_factory=EnforcerState)

    def poll(self, gib: float | None = None) -> tuple[Action, ...]:
        """Poll with `gib` GiB in use. The engine answers each order before the next poll if `answers` is set."""
        if gib is not None:
            self.memory = replace(self.memory, phys=int(gib * GIB))
        self.now += BUSY_POLL_SECONDS
        seen = EnforcerInput(self.engine, self.memory, self.enforced, self.call_until)
        self.state, actions = step(self.state, seen, self.now)
        for action in actions:
            if isinstance(action, SendOrder) and self.answers:
                self.enforced = action.order.poll
        return actions

    def levels(self, *readings: float) -> list[list[MemoryLevel | str]]:
        """Poll with each reading; return the orders of each poll."""
        return [
            [one.order.level if isinstance(one, SendOrder) else "end" for one in self.poll(gib)] for gib in readings
        ]


SOFT, HARD = MemoryLevel.OVER_SOFT, MemoryLevel.OVER_HARD


@pytest.mark.parametrize(("gib", "level", "orders"), [(80, MemoryLevel.OK, []), (86, SOFT, [SOFT]), (96, SOFT, [SOFT])])
def test_one_reading_makes_a_level_and_its_orders(gib: float, level: MemoryLevel, orders: list[MemoryLevel]):
    run = Run()
    assert run.levels(gib) == [orders]
    assert run.state.level is level
    assert run.state.over_caps == 0


def test_over_soft_is_ordered_at_each_poll_until_it_is_over():
    run = Run()
    assert run.levels(86, 86, 80, 86) == [[SOFT], [SOFT], [], [SOFT]]
    assert run.enforced == 4


def test_one_reading_over_the_cap_ends_nothing_and_two_end_the_newest_and_then_one_more_at_each_poll():
    run = Run()
    assert run.levels(101, 90, 101, 80) == [[SOFT], [SOFT], [SOFT], []]
    assert run.levels(101, 103, 102, 99) == [[SOFT], [HARD], [HARD], [SOFT]]
    assert run.state.over_caps == 3
    assert run.state.kills == 0


def test_an_order_has_its_excess():
    run = Run(memory=replace(CAP, leases=20 * GIB, ceiling=80 * GIB))
    run.poll(83)
    (action,) = run.poll(84)
    assert isinstance(action, SendOrder)
    assert action.order.excess == 4 * GIB
    assert action.order.poll == run.state.polls == 2


def test_an_engine_over_the_cap_that_does_not_answer_within_a_period_is_ended_with_the_numbers():
    run = Run(memory=replace(CAP, cap=8 * GIB, ceiling=8 * GIB), answers=False)
    assert run.levels(9.1, 9.1) == [[SOFT], [HARD]]
    asked = run.now
    actions: tuple[Action, ...] = ()
    while not actions:
        actions = run.poll()
    assert run.now - asked == POLL_PERIOD_SECONDS
    assert actions == (EndEngine("over its cap: 9.1 GiB of 8.0 GiB in two readings, without an answer of the engine"),)
    assert run.state.kills == 1
    assert run.levels(9.1, 9.1) == [[], []], "it is ended once"
    assert run.state.kills == 1


def test_the_cause_of_an_ended_engine_names_its_cap_less_the_leases():
    run = Run(memory=replace(CAP, cap=8 * GIB, leases=2 * GIB, ceiling=6 * GIB), answers=False)
    ends = [action for _ in range(8) for action in run.poll(7) if isinstance(action, EndEngine)]
    assert ends == [EndEngine("over its cap: 7.0 GiB of 6.0 GiB in two readings, without an answer of the engine")]


def test_an_engine_gets_an_order_before_it_is_ended():
    seen = EnforcerInput(1, replace(CAP, phys=101 * GIB))
    state, (action,) = step(EnforcerState(engine=1, over=1, looked_at=999.9), seen, 1000.0)
    assert action == SendOrder(ReduceMemory(1, HARD, GIB))
    assert (state.order_number, state.ordered_at) == (1, 1000.0)
    state, actions = step(state, seen, 1000.0 + POLL_PERIOD_SECONDS / 2)
    assert actions == ()
    assert isinstance(step(state, seen, 1000.0 + POLL_PERIOD_SECONDS)[1][0], EndEngine)


@pytest.mark.parametrize(
    "value", [EnforcerState(), EnforcerInput(1, CAP), SendOrder(ReduceMemory(1, SOFT)), EndEngine("")]
)
def test_what_was_seen_and_decided_is_never_changed_afterwards(value: EnforcerState | EnforcerInput | Action):
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, 0)


def test_an_engine_that_answers_is_never_ended():
    run = Run()
    orders = run.levels(*[110] * 50)
    assert ["end"] not in orders
    assert orders[1:] == [[HARD]] * 49
    assert run.state.over_caps == 1


def test_a_native_call_under_way_may_last_until_it_would_count_as_hung():
    run = Run(answers=False)
    run.levels(110, 110)
    run.call_until = run.now + 30.0
    assert run.levels(*[110] * 119) == [[]] * 119
    assert run.levels(110) == [["end"]], "bounded"


def test_a_call_that_ends_within_the_period_shortens_no_other_period():
    run = Run(answers=False)
    run.levels(110, 110)
    run.call_until = run.now + BUSY_POLL_SECONDS
    assert run.levels(110, 110, 110) == [[], [], []]
    assert run.levels(110) == [["end"]]


def test_a_look_that_comes_late_ends_nothing_because_the_answer_may_lie_unread():
    run = Run(answers=False)
    run.levels(110, 110)
    run.now += 40.0
    assert run.levels(110) == [[]], "the agent stood still, not the engine"
    assert run.levels(110) == [["end"]]


def test_a_clock_that_does_not_advance_is_no_silence():
    run = Run(answers=False)
    run.levels(110, 110)
    for _ in range(50):
        run.now -= BUSY_POLL_SECONDS
        assert run.poll(110) == ()


def test_a_late_answer_saves_it():
    run = Run(answers=False)
    run.levels(110, 110, 110)
    run.enforced = 2
    assert run.levels(110) == [[HARD]]


def test_a_return_under_the_cap_is_an_answer_too():
    run = Run(answers=False)
    assert run.levels(110, 110, 99, 110, 110) == [[SOFT], [HARD], [SOFT], [SOFT], [HARD]]


def test_a_new_engine_is_judged_for_itself():
    run = Run(answers=False)
    run.levels(110, 110)
    run.engine = 2
    assert run.levels(110, 110) == [[SOFT], [HARD]]
    assert run.state.kills == 0


def test_an_engine_with_the_process_number_of_one_that_was_ended_is_judged_for_itself():
    run = Run(answers=False)
    while not run.state.kills:
        run.poll(110)
    run.engine = None
    assert run.poll() == ()
    run.engine = 1
    assert run.levels(110, 110) == [[SOFT], [HARD]]
    while run.state.kills < 2:
        run.poll(110)


def test_an_unreadable_footprint_neither_counts_nor_resets():
    run = Run(answers=False)
    run.levels(110, 110)
    run.memory = replace(run.memory, phys=None)
    for _ in range(20):
        assert run.poll() == ()
    assert run.state.level is MemoryLevel.UNKNOWN
    assert run.levels(110) == [["end"]]


def test_an_unreadable_ceiling_orders_and_ends_nothing():
    blind = replace(CAP, ceiling=1, bound_by=UNREADABLE)
    run = Run(memory=blind, answers=False)
    assert run.levels(*[99] * 50) == [[]] * 50
    assert run.state.level is MemoryLevel.UNKNOWN
    assert run.levels(101, 99, 101, 99) == [[SOFT], [], [SOFT], []], "below the cap is below the cap"
    assert run.state.kills == 0


def test_without_an_engine_there_is_nothing_to_do():
    run = Run(engine=None)
    assert run.levels(110, 110, 110) == [[], [], []]
    assert run.state.level is MemoryLevel.UNKNOWN


def test_with_the_guard_off_by_name_it_only_counts():
    run = Run(memory=replace(CAP, guard=False), answers=False)
    assert run.levels(86, *[110] * 20) == [[]] * 21
    assert run.state.level is HARD
    assert run.state.over_caps == 1


def test_polls_are_quick_where_it_matters():
    assert compute_pause_seconds(EnforcerState(), busy=False, loaded=False) == 5.0
    assert compute_pause_seconds(EnforcerState(), busy=False, loaded=True) == 1.0
    assert compute_pause_seconds(EnforcerState(), busy=True, loaded=False) == 0.25
    assert compute_pause_seconds(EnforcerState(over=1), busy=False, loaded=False) == 0.25


SIZES = st.integers(0, 2**40)


@given(
    st.lists(
        st.tuples(
            st.builds(
                Memory,
                cap=SIZES,
                ceiling=SIZES,
                margin=SIZES,
                phys=st.none() | SIZES,
                active=SIZES,
                recent=SIZES,
                reserved=SIZES,
                leases=SIZES,
            ),
            st.booleans(),
            st.floats(0, 3),
        ),
        max_size=30,
    )
)
def test_ok_means_headroom_and_only_silence_over_the_cap_ends(polls: list[tuple[Memory, bool, float]]):
    state, now, enforced, over, unanswered = EnforcerState(), 0.0, 0, 0, None
    for memory, answers, passed in polls:
        now += passed
        state, actions = step(state, EnforcerInput(1, memory, enforced), now)
        known = memory.phys is not None
        room = compute_headroom(memory.ceiling, memory.margin, max(memory.active, memory.phys or 0, memory.recent), 0)
        assert room is not None
        assert (state.level is MemoryLevel.OK) == (known and room >= memory.reserved)
        over = over if not known else over + 1 if state.level is MemoryLevel.OVER_HARD else 0
        for action in actions:
            if isinstance(action, EndEngine):
                assert over >= 2
                assert unanswered is not None
                assert now - unanswered >= POLL_PERIOD_SECONDS
            else:
                assert (action.order.level is MemoryLevel.OVER_HARD) == (over >= 2)
                if answers:
                    enforced = action.order.poll
                    unanswered = None
                elif action.order.level is MemoryLevel.OVER_HARD:
                    unanswered = now
