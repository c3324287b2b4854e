"""Start, duration, end and text of a condition, by node."""

import asyncio
import itertools
import tracemalloc
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from coordinator.alerts import evaluator
from coordinator.alerts.evaluator import AlertLoop, Condition, ConditionEvaluator, build_sample, log_condition
from coordinator.alerts.promql import (
    BinaryOp,
    Comparison,
    CurrentTime,
    Increase,
    Intersection,
    Labels,
    MaxOver,
    Metric,
    Sample,
    SampleHistory,
    Scalar,
    walk_expression,
)
from coordinator.alerts.rules import RULES, WATCHED, AlertRule, Severity
from tests.support.pictures import DISTINCT, WALL, node_picture, pool_picture, view

A: Labels = frozenset({("node", "a")})
B: Labels = frozenset({("node", "b")})
NAMED = {rule.name: rule for rule in RULES}
LATE = AlertRule(
    "Late", Severity.WARNING, Comparison(Metric("m"), ">", 0), 30, "{node} is late", "wait for it, then restart it"
)
AT_ONCE = AlertRule(
    "AtOnce", Severity.CRITICAL, Comparison(Metric("m"), ">", 5), 0, "{node} is wrong", "mend it at once, please"
)


def m(**values: float) -> Sample:
    return {"m": {frozenset({("node", node)}): value for node, value in values.items()}}


def names(conditions: ConditionEvaluator) -> list[tuple[str, str]]:
    return [(one.rule.name, one.node) for one in conditions.list_active()]


def test_a_condition_begins_when_its_rule_has_held_for_its_seconds_and_not_before():
    conditions = ConditionEvaluator([LATE])
    for now in (100.0, 110.0, 129.9):
        conditions.evaluate(m(a=1), now, now)
        assert conditions.list_active() == []
        assert conditions.get_flags() == {"Late": False}
    conditions.evaluate(m(a=1), 130.0, 130.0)
    assert [one.since for one in conditions.list_active()] == [100.0], (
        "since the condition began, not since its first log line"
    )
    assert conditions.get_flags() == {"Late": True}
    conditions.evaluate(m(a=1), 500.0, 500.0)
    assert [one.since for one in conditions.list_active()] == [100.0]


def test_a_condition_begins_in_time_although_the_clock_is_set():
    conditions = ConditionEvaluator([LATE])
    for now, wall in ((0.0, 90_000.0), (1.0, 100.0), (29.9, 190_000.0)):
        conditions.evaluate(m(a=1), now, wall)
        assert conditions.list_active() == []
    conditions.evaluate(m(a=1), 30.0, 130.0)
    assert [(one.node, one.since) for one in conditions.list_active()] == [("a", 100.0)]


def test_a_condition_that_rests_once_begins_again_from_zero():
    conditions = ConditionEvaluator([LATE])
    for now, value in ((0.0, 1), (25.0, 0), (30.0, 1), (55.0, 1)):
        conditions.evaluate(m(a=value), now, now)
        assert conditions.list_active() == []
    conditions.evaluate(m(a=1), 60.0, 60.0)
    assert [one.since for one in conditions.list_active()] == [30.0]


def test_a_condition_ends_at_once_for_the_node_that_is_well_and_stays_for_the_other():
    conditions = ConditionEvaluator([AT_ONCE])
    told: list[tuple[str, bool]] = []
    conditions.listeners.append(lambda one, began: told.append((one.node, began)))
    conditions.evaluate(m(a=9, b=9), 1.0, 1.0)
    assert sorted(told) == [("a", True), ("b", True)]
    conditions.evaluate(m(a=9, b=5), 2.0, 2.0)
    assert names(conditions) == [("AtOnce", "a")]
    assert told[2:] == [("b", False)]
    assert conditions.get_flags() == {"AtOnce": True}
    conditions.evaluate({}, 3.0, 3.0)
    assert (names(conditions), told[3:]) == ([], [("a", False)]), "a removed node has no condition"
    assert conditions.get_flags() == {"AtOnce": False}


def test_evaluator_notifies_each_listener_once():
    conditions = ConditionEvaluator([AT_ONCE])
    told: list[tuple[int, bool]] = []
    for number in (1, 2):
        conditions.listeners.append(lambda _, began, number=number: told.append((number, began)))
    for now, value in enumerate((9, 9, 9, 0, 0)):
        conditions.evaluate(m(a=value), float(now), float(now))
    assert told == [(1, True), (2, True), (1, False), (2, False)]


def test_critical_conditions_come_first_and_then_the_oldest():
    conditions = ConditionEvaluator([LATE, AT_ONCE])
    conditions.evaluate(m(b=1), 0.0, 0.0)
    conditions.evaluate(m(a=1, b=1), 10.0, 10.0)
    conditions.evaluate(m(a=1, b=1, c=9), 100.0, 100.0)
    assert names(conditions) == [("AtOnce", "c"), ("Late", "b"), ("Late", "a")]


def test_a_row_has_every_field_of_its_condition():
    assert Condition(LATE, A, 5.12345).to_row() == {
        "name": "Late",
        "severity": "warning",
        "node": "a",
        "since": 5.123,
        "summary": "a is late",
        "remedy": "wait for it, then restart it",
        "runbook": "docs/alerts.md#late",
    }
    assert Condition(NAMED["CutOff"], frozenset(), 0.0).to_row()["node"] is None
    conflict = Condition(NAMED["ModelConflict"], frozenset({("model", "tiny")}), 0.0)
    assert "with the name tiny:" in conflict.summary


def test_the_log_warns_of_the_begin_and_informs_of_the_end():
    with capture_logs() as logs:
        log_condition(Condition(AT_ONCE, A, 5.0), True)
        log_condition(Condition(AT_ONCE, A, 5.0), False)
    fields = {"condition": "AtOnce", "severity": "critical", "node": "a", "summary": "a is wrong"}
    assert logs == [
        {"event": "condition began", "log_level": "warning", **fields},
        {"event": "condition ended", "log_level": "info", **fields},
    ]


# samples


def test_a_sample_has_the_values_that_the_metrics_have():
    seen = replace(view("id of a", report=DISTINCT), name="a")
    found = build_sample(pool_picture(1, 1), [node_picture(seen, None)])
    expected = {
        "engine_forwards_total": 2007,
        "node_memory_margin_bytes": 1003,
        "node_memory_cap_bytes": 1001,
        "node_memory_lease_bytes": 1010,
        "video_worker_phys_bytes": 4002,
        "node_memory_engine_phys_bytes": 5001,
        "node_memory_kills_total": 5006,
        "engine_restarts_total": 2001,
        "engine_leaked_wired_bytes": 2025,
        "node_memory_reading_timestamp_seconds": WALL - 1.75,
        "gate_armed": 1,
        "gate_guard": 1,
    }
    assert {name: found[f"macpool_{name}"][A] for name in expected} == expected
    checks = frozenset({("node", "a"), ("site", "all")})
    assert found["macpool_gate_checks_total"] == {checks: 2005}
    assert found["macpool_gate_refusals_total"] == {frozenset({("node", "a"), ("reason", "all")}): 2006}


def test_evaluator_raises_conditions_from_reported_faults():
    conditions = ConditionEvaluator()
    for now in (WALL, WALL + 30, WALL + 60, WALL + 120):
        picture = pool_picture(1, 1, leaks=1, conditions={}, wall=now)
        node = node_picture(view("a", report=DISTINCT), None)
        conditions.evaluate(build_sample(picture, [node]), now, now)
    held = {name for name, _ in names(conditions)}
    assert held == {"WiredLeak", "ReservationLeak", "OverCap", "StaleSensor", "QueueStuck"}
    assert {rule.name for rule in WATCHED} >= held


# the loop


@pytest.mark.parametrize(("failing", "logged"), [((1, 2, 3), 1), ((1, 3), 2), ((), 0)])
async def test_failed_evaluation_is_logged_once_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], logged: int
):
    monkeypatch.setattr(evaluator, "EVALUATION_INTERVAL_SECONDS", 0.0)
    conditions, looks, seen = ConditionEvaluator([AT_ONCE]), itertools.count(1), asyncio.Event()

    def sample() -> Sample:
        look = next(looks)
        if look in failing:
            raise RuntimeError("no picture")
        if look > 3:
            seen.set()
        return m(a=9)

    with capture_logs() as logs:
        running = asyncio.create_task(AlertLoop(conditions, sample, lambda: 3.0, lambda: 7.0).run())
        await asyncio.wait_for(seen.wait(), 30)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [one["event"] for one in logs] == ["conditions"] * logged
    assert [(one.node, one.since) for one in conditions.list_active()] == [("a", 7.0)]


# expressions


@pytest.mark.parametrize(
    ("sign", "holds"), [(">", {3.0}), (">=", {2.0, 3.0}), ("==", {2.0}), ("<", {1.0}), ("<=", {1.0, 2.0})]
)
def test_a_comparison_keeps_the_series_for_which_it_holds(sign: str, holds: set[float]):
    history = SampleHistory({})
    history.add_sample({"m": {frozenset({("node", str(value))}): value for value in (1.0, 2.0, 3.0)}}, 0.0, 0.0)
    found = Comparison(Metric("m"), sign, 2.0).evaluate(history)
    assert isinstance(found, dict)
    assert set(found.values()) == holds


def test_series_meet_by_all_their_labels_and_nothing_is_divided_by_zero():
    history = SampleHistory({})
    history.add_sample({"m": {A: 6.0, B: 1.0}, "n": {A: 3.0, B: 0.0, frozenset(): 5.0}}, 0.0, 0.0)
    assert BinaryOp(Metric("m"), "-", Metric("n")).evaluate(history) == {A: 3.0, B: 1.0}
    assert BinaryOp(Metric("m"), "/", Metric("n")).evaluate(history) == {A: 2.0}
    assert MaxOver(Metric("m")).evaluate(history) == {frozenset(): 6.0}
    assert MaxOver(Metric("none")).evaluate(history) == {}


def test_a_number_without_labels_has_no_series_and_is_its_own_highest():
    history = SampleHistory({})
    assert CurrentTime().evaluate(history) == Scalar(0.0)
    history.add_sample({"m": {A: 6.0}}, 3.0, 7.0)
    assert MaxOver(CurrentTime()).evaluate(history) == CurrentTime().evaluate(history) == Scalar(7.0)
    assert BinaryOp(CurrentTime(), "-", CurrentTime()).evaluate(history) == {}
    assert BinaryOp(CurrentTime(), "-", Metric("m")).evaluate(history) == {A: 1.0}
    conditions = ConditionEvaluator([replace(AT_ONCE, expression=CurrentTime())])
    conditions.evaluate({"m": {A: 6.0}}, 7.0, 7.0)
    assert conditions.list_active() == []


def test_an_expression_is_walked_through_with_all_that_it_is_made_of():
    a, b, c = Metric("a"), Metric("b"), Increase("c", 30)
    both = Intersection(Comparison(a, ">", MaxOver(b)), Comparison(c, ">", 0))
    assert list(walk_expression(both)) == [both, both.left, a, MaxOver(b), b, both.right, c]


def test_a_rise_is_of_its_own_window_and_older_ones_are_forgotten():
    history = SampleHistory({"c": frozenset({30.0, 300.0})})
    for now in range(0, 400, 10):
        history.add_sample({"c": {A: now}}, float(now), -float(now))
    assert [dict(history.iterate_increases("c", seconds)) for seconds in (30.0, 300.0)] == [{A: 30.0}, {A: 300.0}]
    tracemalloc.start()
    try:
        for now in range(400, 40_400, 10):
            history.add_sample({"c": {A: now}}, float(now), -float(now))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50_000
