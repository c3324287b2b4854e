from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from node.engine.scheduling.rules.prefill_order import (
    AFTER_BURST_SECONDS,
    COALESCE_SECONDS,
    MAX_COALESCE_SECONDS,
    compute_packing_time,
    count_started_rows,
    iterate_in_service_order,
    select_startable,
)
from wire.capacity.fairness import WeightedKey


@dataclass(frozen=True)
class Prompt:
    number: int
    key: str = "a"
    width: int = 1
    started: bool = False
    answered: bool = False

    @property
    def weighted_key(self) -> WeightedKey:
        return WeightedKey(self.key)


PROMPTS = st.lists(
    st.builds(
        Prompt,
        number=st.integers(0, 999),
        key=st.sampled_from("abc"),
        width=st.integers(1, 4),
        started=st.booleans(),
        answered=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.number,
)


def numbers(found: list[Prompt]) -> list[int]:
    return [one.number for one in found]


def test_started_prompts_continue_whatever_rows_are_free():
    queue = [Prompt(1, started=True, width=3), Prompt(2)]
    assert count_started_rows(queue) == 3
    assert numbers(select_startable(queue, 0, dict)) == [1]
    assert numbers(select_startable(queue, 1, dict)) == [1, 2]


def test_the_key_with_fewest_rows_is_next():
    queue = [Prompt(1), Prompt(2), Prompt(3, "b")]
    assert numbers(list(iterate_in_service_order(queue, {"a": 2}))) == [3, 1, 2]
    assert numbers(list(iterate_in_service_order([Prompt(0, "b", started=True, width=3), *queue], {"a": 2}))) == [
        1,
        2,
        3,
    ]


def test_iterate_in_service_order_adds_the_rows_of_all_started_prompts_to_those_that_decode():
    started = [Prompt(0, "b", started=True), Prompt(4, "b", started=True)]
    waiting = [Prompt(1), Prompt(3, "b")]
    assert numbers(list(iterate_in_service_order([started[0], *waiting], {"a": 2}))) == [3, 1]
    assert numbers(list(iterate_in_service_order([*started, *waiting], {"a": 2, "b": 1}))) == [1, 3]


def test_an_answer_that_has_begun_precedes_new_requests():
    assert numbers(list(iterate_in_service_order([Prompt(1), Prompt(2, answered=True)], {}))) == [2, 1]


def test_a_prompt_that_needs_many_rows_is_not_overtaken():
    assert numbers(select_startable([Prompt(1, width=4), Prompt(2)], 3, dict)) == []


@given(PROMPTS, st.integers(0, 8))
def test_no_more_rows_start_than_are_free_and_every_prompt_is_in_the_order_once(queue: list[Prompt], free_rows: int):
    found = select_startable(queue, free_rows, dict)
    assert [one for one in found if one.started] == [one for one in queue if one.started]
    assert sum(one.width for one in found if not one.started) <= free_rows
    order = list(iterate_in_service_order(queue, {}))
    assert sorted(numbers(order)) == sorted(one.number for one in queue if not one.started)
    fresh = [one for one in found if not one.started]
    assert fresh == order[: len(fresh)]


def test_prompts_wait_for_company_only_after_a_burst():
    assert compute_packing_time([5.0, 5.02], 0.0) == min(5.0 + MAX_COALESCE_SECONDS, 5.02 + COALESCE_SECONDS)
    assert compute_packing_time([5.0, 5.025], 0.0) == 5.0 + MAX_COALESCE_SECONDS
    assert compute_packing_time([5.0], 0.0) == 5.0 + COALESCE_SECONDS
    assert compute_packing_time([AFTER_BURST_SECONDS - 0.01, AFTER_BURST_SECONDS], 0.0) > 0.0
    assert compute_packing_time([AFTER_BURST_SECONDS], 0.0) == 0.0
    assert compute_packing_time([5.0], float("-inf")) == 0.0
