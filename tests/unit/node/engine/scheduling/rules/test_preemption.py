from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from node.engine.scheduling.rules.preemption import (
    choose_for_key,
    choose_victim,
    find_first_preempted,
    find_newest_holder,
    next_to_return,
    should_preempt,
)
from wire.capacity.fairness import WeightedKey


@dataclass(frozen=True)
class Live:
    number: int
    key: str = "a"
    width: int = 1
    holds_memory: bool = True
    delivered: bool = True
    yielded: bool = False

    @property
    def weighted_key(self) -> WeightedKey:
        return WeightedKey(self.key)

    @property
    def age(self) -> tuple[float, int]:
        return float(self.number), self.number


LIVE = st.lists(
    st.builds(
        Live,
        number=st.integers(0, 999),
        key=st.sampled_from("abc"),
        width=st.integers(1, 4),
        holds_memory=st.booleans(),
        delivered=st.booleans(),
        yielded=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.number,
)


def test_the_newest_request_that_holds_memory_is_evicted():
    live = [Live(1), Live(2), Live(3, holds_memory=False)]
    assert find_newest_holder(live) is live[1]
    assert find_newest_holder([live[2]]) is None


def test_a_waiting_request_loses_its_memory_before_one_that_holds_some():
    live = [Live(1), Live(2, holds_memory=False, delivered=False), Live(3)]
    assert choose_victim(live) is live[1]


def test_a_waiting_request_with_a_delivered_answer_is_no_cheap_victim():
    live = [Live(1), Live(2, holds_memory=False, delivered=True)]
    assert choose_victim(live) is live[0]


def test_the_key_with_most_rows_loses_first_and_of_its_requests_the_newest():
    live = [Live(1, "a"), Live(2, "a"), Live(3, "b")]
    assert choose_victim(live) is live[1]
    assert choose_victim([*live, Live(4, "b", width=2)]) == Live(4, "b", width=2)


@given(LIVE)
def test_a_victim_is_live_and_holds_memory_if_no_request_waits_in_vain(live: list[Live]):
    victim = choose_victim(live)
    waiting = [one for one in live if not one.holds_memory and not one.delivered]
    if waiting:
        assert victim in waiting
    else:
        assert (victim is None) == (not any(one.holds_memory for one in live))
        assert victim is None or victim.holds_memory


def test_a_request_of_which_nothing_was_delivered_ends_and_is_placed_elsewhere():
    assert not should_preempt(Live(1, delivered=False), unreadable=True, others=True)


def test_a_delivered_request_is_preempted_while_waiting_helps():
    assert should_preempt(Live(1), unreadable=False, others=True)
    assert should_preempt(Live(1), unreadable=True, others=False)
    assert not should_preempt(Live(1), unreadable=False, others=False)


def test_preempted_requests_return_oldest_first():
    assert next_to_return([Live(3), Live(2), Live(5)], 0) == Live(2)


def test_a_request_preempted_for_another_key_returns_only_while_rows_are_free():
    older, newer = Live(1, yielded=True, width=2), Live(2)
    assert next_to_return([older, newer], 1) is newer
    assert next_to_return([older, newer], 2) is older
    assert next_to_return([older], 1) is None


def test_a_request_preempted_for_another_key_precedes_only_its_own_key():
    one = Live(1, "a", yielded=True)
    assert find_first_preempted([one], "a") is one
    assert find_first_preempted([one], "b") is None
    assert find_first_preempted([one], None) is one
    assert find_first_preempted([one, Live(2, "c")], "b") == Live(2, "c")
    assert find_first_preempted([Live(3), Live(2), Live(5)], None) == Live(2), "the oldest"


def test_rows_of_the_key_that_holds_most_are_shared_and_requests_without_rows_are_left_alone():
    holding = [(Live(1, "a"), 1), (Live(2, "a"), 0), (Live(3, "a"), 1), (Live(4, "a"), 1)]
    assert choose_for_key(WeightedKey("b"), 1, 1, holding) == [Live(4, "a")]
    assert choose_for_key(WeightedKey("b"), 1, 0, holding) == []


@given(LIVE, st.integers(1, 4), st.integers(0, 4))
def test_no_key_loses_so_much_that_it_holds_less_than_the_key_that_gains(live: list[Live], need: int, missing: int):
    holding = [(one, one.width) for one in sorted(live, key=lambda one: one.age)]
    gains = WeightedKey("a")
    lost = choose_for_key(gains, need, missing, holding)
    assert all(one.key != "a" for one in lost)
    held = {key: sum(size for one, size in holding if one.key == key and one not in lost) for key in "abc"}
    before = sum(size for one, size in holding if one.key == "a")
    for one in lost:
        assert held[one.key] >= before + need
