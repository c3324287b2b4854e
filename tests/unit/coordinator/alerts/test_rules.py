"""Every rule holds and stops holding as its scenario says, for Prometheus and for the coordinator."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.alerts.evaluator import Condition, ConditionEvaluator, build_sample
from coordinator.alerts.promql import Increase, Labels, Metric, Sample, SampleHistory, walk_expression
from coordinator.alerts.rules import (
    DEFAULT_PAGE_URL,
    EXTERNAL_RULES,
    RULES,
    WATCHED,
    AlertRule,
    build_runbook_url,
    format_summary,
    render_rules_file,
)
from coordinator.metrics.families import MetricKind
from coordinator.metrics.node_families import NODE
from coordinator.metrics.pool_families import POOL
from tests.support.pictures import WALL, node_picture, pool_picture, view
from tests.support.prometheus import needs
from tests.support.scenarios import STEP, STORIES, Series, steady

ROOT = Path(__file__).parents[4]
FAMILIES = {family.full_name: family for family in (*POOL, *NODE)}
NAMED = {rule.name: rule for rule in RULES}
STUDIO: Labels = frozenset({("node", "studio")})


# the table


def test_alert_rules_have_scenarios_and_unique_names():
    assert len(NAMED) == len(RULES)
    assert set(STORIES) == set(NAMED), "each rule needs a story in tests/support/scenarios.py, and each story a rule"


def test_rules_look_at_metrics_and_labels_that_exist():
    for rule in WATCHED:
        for part in walk_expression(rule.expression):
            if isinstance(part, Metric | Increase):
                family = FAMILIES[part.name]
                labels = {name for name, _ in part.only} if isinstance(part, Metric) else set(part.without)
                assert labels <= set(family.label_names), rule.name
                assert (family.kind is MetricKind.COUNTER) == isinstance(part, Increase), rule.name


def test_alert_rules_have_a_remedy_and_a_runbook_entry():
    page = (ROOT / "docs" / "alerts.md").read_text()
    for rule in RULES:
        assert len(rule.remedy) > 20
        assert re.search(rf"^### {rule.name}$", page, re.MULTILINE), f"docs/alerts.md has no entry {rule.name}"
        assert f"docs/alerts.md#{rule.name.lower()}" == rule.runbook


def test_the_committed_rules_are_those_of_the_table():
    file = ROOT / "deploy" / "prometheus" / "rules.yml"
    assert file.read_text() == render_rules_file(), "deploy/prometheus/rules.yml is old: run `make docs`"


# Prometheus


def series(story: Series, seconds: int) -> list[dict[str, str]]:
    steps = range(0, seconds + STEP, STEP)
    return [
        {"series": name, "values": " ".join(f"{values(at):.17g}" for at in steps)} for name, values in story.items()
    ]


def alerts(rule: AlertRule, labels: dict[str, str]) -> list[dict[str, Any]]:
    annotations = {
        "summary": format_summary(rule.summary, frozenset(labels.items())),
        "description": rule.remedy,
        "runbook_url": build_runbook_url(DEFAULT_PAGE_URL, rule.name),
    }
    return [{"exp_labels": {**labels, "severity": rule.severity.value}, "exp_annotations": annotations}]


def select_rule(name: str) -> str:
    """Return the rules file with one rule. promtool evaluates every rule of a file at every step of a story."""
    head, *rules = re.split(r"(?=^ {6}- alert: )", render_rules_file(), flags=re.MULTILINE)
    (rule,) = (one for one in rules if one.startswith(f"      - alert: {name}\n"))
    return head + rule


def promtool(folder: Path, tests: list[dict[str, Any]], rules: str) -> subprocess.CompletedProcess[str]:
    needs("promtool")
    (folder / "rules.yml").write_text(rules)
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP}s", "tests": tests}
    (folder / "test.yml").write_text(json.dumps(whole))
    return subprocess.run(["promtool", "test", "rules", "test.yml"], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("name", STORIES)
def test_the_alert_fires_and_rests(name: str, tmp_path: Path, record_property: Callable[[str, object], None]):
    story, rule = STORIES[name], NAMED[name]
    fires = {
        "interval": f"{STEP}s",
        "input_series": series(story.holds, story.seconds),
        "alert_rule_test": [
            {"eval_time": f"{story.seconds}s", "alertname": name, "exp_alerts": alerts(rule, dict(story.labels))}
        ],
    }
    rests = [
        {
            "interval": f"{STEP}s",
            "input_series": series(one, story.seconds),
            "alert_rule_test": [
                {"eval_time": f"{at}s", "alertname": name, "exp_alerts": []} for at in range(0, story.seconds + 1, 10)
            ],
        }
        for one in story.rests
    ]
    done = promtool(tmp_path, [fires, *rests], select_rule(name))
    assert done.returncode == 0, done.stdout + done.stderr
    record_property("seen", f"alert {name}: fires after {story.seconds} s, rests in {len(rests)} other stories")


def test_the_test_would_notice(tmp_path: Path):
    story = STORIES["GuardOff"]
    expected = alerts(NAMED["GuardOff"], dict(story.labels))
    right, wrong = (
        {
            "interval": f"{STEP}s",
            "input_series": series(story.holds, 10),
            "alert_rule_test": [{"eval_time": "10s", "alertname": "GuardOff", "exp_alerts": fires}],
        }
        for fires in (expected, [])
    )
    assert promtool(tmp_path, [right], render_rules_file()).returncode == 0, "with all rules"
    assert promtool(tmp_path, [wrong], render_rules_file()).returncode != 0


# the coordinator


def sample(story: Series, now: float) -> Sample:
    found: dict[str, dict[Labels, float]] = {}
    for name, values in story.items():
        metric, _, labels = name.rstrip("}").partition("{")
        pairs = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(metric, {})[pairs] = float(f"{values(now):.17g}")
    return found


def played(story: Series, seconds: int) -> list[set[tuple[str, Labels]]]:
    """Play a scenario, and return for each sample the rules that held, with their labels."""
    conditions = ConditionEvaluator()
    held: list[set[tuple[str, Labels]]] = []
    for now in range(0, seconds + STEP, STEP):
        conditions.evaluate(sample(story, now), now, now)
        held.append({(one.rule.name, one.labels) for one in conditions.list_active()})
    return held


@pytest.mark.parametrize("name", [name for name in STORIES if name not in EXTERNAL_RULES])
def test_the_condition_begins_and_rests(name: str):
    story = STORIES[name]
    assert (name, frozenset(story.labels.items())) in played(story.holds, story.seconds)[-1]
    for one in story.rests:
        assert all(name not in {rule for rule, _ in held} for held in played(one, story.seconds))


def test_alert_of_an_unarmed_gate_fires_within_30_seconds():
    story = STORIES["GateInert"]
    first = next(at for at, held in enumerate(played(story.holds, 60)) if held)
    assert first * STEP <= 20


def test_alert_of_an_unarmed_gate_ends_when_its_counters_stop():
    frozen = {
        name: lambda now, values=values: values(min(now, 60)) for name, values in STORIES["GateInert"].holds.items()
    }
    held = played(frozen, 120)
    assert held[60 // STEP]
    assert not any(held[(60 + 30 + STEP) // STEP :])


def test_evaluator_notifies_begin_and_end_once():
    conditions, told_of = ConditionEvaluator(), list[tuple[str, str, bool]]()
    conditions.listeners.append(lambda one, began: told_of.append((one.rule.name, one.node, began)))
    for now in range(0, 60, STEP):
        guard = 1.0 if 20 <= now < 40 else 0.0
        conditions.evaluate({"macpool_gate_guard": {STUDIO: guard}}, now, now)
    assert told_of == [("GuardOff", "studio", True), ("GuardOff", "studio", False), ("GuardOff", "studio", True)]
    assert conditions.get_flags()["GuardOff"]
    assert not conditions.get_flags()["GateInert"]


def test_critical_conditions_come_first():
    conditions = ConditionEvaluator()
    for now in (0, 10, 20):
        conditions.evaluate(
            {
                "macpool_node_memory_margin_bytes": {STUDIO: 0},
                "macpool_node_memory_cap_bytes": {STUDIO: 5},
                "macpool_gate_guard": {STUDIO: 0},
            },
            now,
            now,
        )
    assert [one.rule.name for one in conditions.list_active()] == ["GuardOff", "MarginZero"]


def test_a_counter_that_was_seen_once_has_not_risen():
    history = SampleHistory({"c": frozenset({30.0})})
    history.add_sample({"c": {STUDIO: 100}}, 0, 0)
    assert list(history.iterate_increases("c", 30)) == []
    history.add_sample({"c": {STUDIO: 103}}, 5, 5)
    assert list(history.iterate_increases("c", 30)) == [(STUDIO, 3)]
    history.add_sample({"c": {STUDIO: 2}}, 10, 10)
    assert list(history.iterate_increases("c", 30)) == [(STUDIO, 5)]
    history.add_sample({"c": {STUDIO: 2}}, 37, 37)
    assert list(history.iterate_increases("c", 30)) == [(STUDIO, 2)]
    history.add_sample({}, 40, 40)
    history.add_sample({"c": {STUDIO: 50}}, 45, 45)
    assert list(history.iterate_increases("c", 30)) == []


def test_a_healthy_pool_has_no_conditions():
    conditions = ConditionEvaluator()
    nodes = [node_picture(view(f"n{number}"), None) for number in range(3)]
    for _ in range(3):
        conditions.evaluate(build_sample(pool_picture(3, 2, conditions={}), nodes), WALL, WALL)
    assert conditions.list_active() == []


def test_a_sample_names_nodes_as_service_discovery_does():
    found = build_sample(pool_picture(2, 1), [node_picture(view("n0"), None), node_picture(view("n1"), None)])
    assert set(found["macpool_gate_armed"]) == {frozenset({("node", "n0")}), frozenset({("node", "n1")})}
    assert found["macpool_router_queue_depth"] == {frozenset(): 1.0}
    assert {rule_metric for rule in WATCHED for rule_metric in rule.list_metrics()} == set(found)


def test_a_row_is_for_people_and_programs():
    row = Condition(NAMED["GuardOff"], STUDIO, 5.0).to_row()
    assert row["node"] == "studio"
    assert "studio" in str(row["summary"])
    assert json.loads(json.dumps(row)) == row
    assert steady(1)(0) == 1
