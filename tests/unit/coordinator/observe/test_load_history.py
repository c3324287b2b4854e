"""The load of the last hour: rates from totals, gaps without data, and a bounded size."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.observe.load_history import INTERVAL_SECONDS, MAX_NODES, MAX_POINTS, LoadHistory, LoadReading, NodeLoad
from coordinator.observe.load_sampler import build_node_load
from router.dispatch.counters import NodeCounts
from router.placement.cluster_view import NodeView
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.report import Memory

A, B = NodeId("a"), NodeId("b")
GIB = 2**30


def load(tokens: int = 0, *, memory: int | None = GIB, **more: Any) -> NodeLoad:
    return NodeLoad(generated_tokens=tokens, memory=memory, cap=None if memory is None else 4 * GIB, **more)


def rows(history: LoadHistory) -> Any:
    return history.to_row()


def test_totals_become_rates_of_the_time_between_two_readings():
    history = LoadHistory()
    history.add_reading(LoadReading(1000.0, {A: load(100, first_tokens=1, first_token_seconds=9.0)}, requests=5))
    assert rows(history)["number"] == -1
    first = {A: load(300, first_tokens=3, first_token_seconds=10.0, in_flight=2), B: load(50)}
    history.add_reading(LoadReading(1010.0, first, requests=10, queued=3))
    found = rows(history)
    assert found["pool"]["generated_tokens_per_second"] == [25.0]
    assert found["pool"]["ttft_seconds"] == [0.5]
    assert found["pool"]["requests_per_second"] == [0.5]
    assert (found["pool"]["in_flight"], found["pool"]["queued"]) == ([2], [3])
    assert (found["pool"]["memory_bytes"], found["pool"]["cap_bytes"]) == ([2 * GIB], [8 * GIB])
    assert found["nodes"][A]["generated_tokens_per_second"] == [20.0]
    assert found["nodes"][B]["ttft_seconds"] == [None]


@pytest.mark.parametrize("seconds", [INTERVAL_SECONDS, 1.25 * INTERVAL_SECONDS])
def test_every_total_of_the_pool_is_the_sum_of_its_nodes_and_an_unchanged_one_has_the_rate_zero(seconds: float):
    history, values = LoadHistory(), {"prompt_tokens": 80, "generated_tokens": 40}
    totals = {A: load(0, first_tokens=2, first_token_seconds=3.0), B: load(0)}
    for step, requests in ((0, 0), (1, 16), (1, 16)):
        totals = {
            A: replace(totals[A], **{name: step * value for name, value in values.items()}),
            B: replace(totals[B], **{name: 3 * step * value for name, value in values.items()}),
        }
        at = (0.0 if history.to_row()["at"] is None else rows(history)["at"]) + seconds
        history.add_reading(LoadReading(at, totals, requests=requests))
    found = rows(history)
    assert found["pool"]["requests_per_second"] == [pytest.approx(16 / seconds), 0.0]
    for name, value in values.items():
        series = f"{name}_per_second"
        assert found["nodes"][A][series] == [pytest.approx(value / seconds), 0.0]
        assert found["nodes"][B][series] == [pytest.approx(3 * value / seconds), 0.0]
        assert found["pool"][series] == [pytest.approx(4 * value / seconds), 0.0]
    assert found["pool"]["ttft_seconds"] == found["nodes"][A]["ttft_seconds"] == [None, None]


def test_a_mac_that_is_lost_or_paused_is_a_gap_and_no_number_of_the_past():
    history = LoadHistory()
    for number, memory in enumerate((GIB, GIB, None, GIB)):
        history.add_reading(LoadReading(number * INTERVAL_SECONDS, {A: load(100 * number, memory=memory)}))
    found = rows(history)
    assert found["nodes"][A]["memory_bytes"] == [GIB, None, GIB]
    assert found["nodes"][A]["generated_tokens_per_second"] == [10.0, None, 10.0]
    assert found["pool"]["memory_bytes"] == [GIB, None, GIB]
    assert found["pool"]["cap_bytes"] == [4 * GIB, None, 4 * GIB]


def test_the_cap_of_the_pool_is_that_of_the_macs_whose_memory_is_known():
    history = LoadHistory()
    unreadable = NodeLoad(memory=None, cap=16 * GIB)
    for number in range(2):
        history.add_reading(LoadReading(number * INTERVAL_SECONDS, {A: load(), B: unreadable}))
    found = rows(history)
    assert (found["pool"]["memory_bytes"], found["pool"]["cap_bytes"]) == ([GIB], [4 * GIB])


def test_add_reading_fills_missed_intervals_with_gaps():
    history = LoadHistory()
    for at in (0.0, 10.0, 40.0):
        history.add_reading(LoadReading(at, {A: load()}))
    assert rows(history)["pool"]["in_flight"] == [0, None, None, 0]
    history.add_reading(LoadReading(10.0**9, {A: load()}))
    assert rows(history)["pool"]["in_flight"] == [None] * (MAX_POINTS - 1) + [0]
    history.add_reading(LoadReading(5.0, {A: load(70)}))  # the clock was set back
    assert rows(history)["pool"]["in_flight"][-2:] == [0, 0]
    assert rows(history)["pool"]["generated_tokens_per_second"][-1] == 7.0
    history.add_reading(LoadReading(5.1, {A: load(170)}))  # the clock was set back by 9.9 s
    assert rows(history)["pool"]["generated_tokens_per_second"][-2:] == [7.0, 10.0]


def test_add_reading_of_a_reset_counter_gives_no_negative_rate():
    history = LoadHistory()
    history.add_reading(LoadReading(0.0, {A: load(1000)}, requests=1000))
    history.add_reading(LoadReading(10.0, {A: load(20)}, requests=10))
    found = rows(history)
    assert found["pool"]["generated_tokens_per_second"] == [2.0]
    assert found["pool"]["requests_per_second"] == [1.0]


def test_its_size_is_fixed_and_macs_that_left_are_forgotten():
    history = LoadHistory()
    many = {NodeId(f"n{number}"): load() for number in range(MAX_NODES + 10)}
    for number in range(MAX_POINTS + 20):
        history.add_reading(LoadReading(number * INTERVAL_SECONDS, many))
    found = rows(history)
    assert found["number"] == MAX_POINTS + 18
    assert len(found["pool"]["memory_bytes"]) == MAX_POINTS
    assert found["pool"]["memory_bytes"][-1] == (MAX_NODES + 10) * GIB, "the pool counts every Mac"
    assert len(found["nodes"]) == MAX_NODES
    history.add_reading(LoadReading(10.0**6, {A: load()}))
    assert list(rows(history)["nodes"]) == [A]


def test_to_row_returns_the_newest_points_up_to_count():
    history = LoadHistory()
    for number in range(5):
        history.add_reading(LoadReading(number * INTERVAL_SECONDS, {A: load(in_flight=number)}))
    found: Any = history.to_row(2)
    assert found["nodes"][A]["in_flight"] == [3, 4]
    assert found["number"] == 3


@pytest.mark.parametrize("state", NodeState)
def test_load_reading_has_memory_for_current_reports_only(state: NodeState):
    counts = NodeCounts()
    counts.prompt_tokens, counts.generated_tokens, counts.first_tokens, counts.first_token_seconds = 6, 7, 8, 9.5
    assert build_node_load(NodeView(A, "a", state), None, 3).in_flight == 3
    found = build_node_load(NodeView(A, "a", state, memory=Memory(cap=4 * GIB, current=GIB)), counts, 2)
    assert (found.prompt_tokens, found.generated_tokens, found.in_flight) == (6, 7, 2)
    assert (found.first_tokens, found.first_token_seconds) == (8, 9.5)
    measured = state in (NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING)
    assert (found.memory, found.cap) == ((GIB, 4 * GIB) if measured else (None, None))


def test_a_row_has_the_time_of_the_newest_reading_and_the_cap_of_its_nodes():
    history = LoadHistory()
    assert (rows(history)["at"], rows(history)["interval_seconds"]) == (None, INTERVAL_SECONDS)
    for at in (10.0, 20.0):
        history.add_reading(LoadReading(at, {A: load(), B: NodeLoad(memory=GIB)}))
    found = rows(history)
    assert found["at"] == 20.0
    assert [found["nodes"][node]["cap_bytes"] for node in (A, B)] == [[4 * GIB], [None]]
