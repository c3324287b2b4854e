"""Evaluate the alert rules inside the coordinator, and notify listeners when a condition begins or ends.

The evaluation needs neither Prometheus nor Grafana. It uses the newest reports, without requests to nodes.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from coordinator.alerts.promql import Labels, Sample, SampleHistory, Scalar
from coordinator.alerts.rules import WATCHED, AlertRule, collect_windows, format_summary
from coordinator.metrics.families import CollectedFamily, HistogramValue, MetricFamily, collect_families
from coordinator.metrics.node_families import NODE
from coordinator.metrics.node_snapshot import NodeSnapshot
from coordinator.metrics.pool_families import POOL
from coordinator.metrics.pool_snapshot import PoolSnapshot

EVALUATION_INTERVAL_SECONDS = 5.0
"""Seconds between two evaluations; equal to the evaluation interval of Prometheus."""
_NAMES = frozenset(name for rule in WATCHED for name in rule.list_metrics())
_POOL = tuple(family for family in POOL if family.full_name in _NAMES)
_NODE = tuple(family for family in NODE if family.full_name in _NAMES)

log = structlog.get_logger("coordinator.alerts")


@dataclass(frozen=True, slots=True)
class Condition:
    """Alert rule that has held for its required time for one set of labels, such as one node."""

    rule: AlertRule
    labels: Labels
    """Labels of the series for which the rule holds; empty for a rule about the pool as a whole."""
    since: float
    """Unix time, in seconds, since which the rule holds."""

    @property
    def summary(self) -> str:
        """Summary of the rule, in which the values of `labels` replace the label names."""
        return format_summary(self.rule.summary, self.labels)

    @property
    def node(self) -> str:
        """Name of the node to which the condition applies; empty for a condition of the pool."""
        return dict(self.labels).get("node", "")

    def to_row(self) -> dict[str, object]:
        """Return the condition as a row of the API. `node` is None for a condition of the pool."""
        return {
            "name": self.rule.name,
            "severity": self.rule.severity.value,
            "node": self.node or None,
            "since": round(self.since, 3),
            "summary": self.summary,
            "remedy": self.rule.remedy,
            "runbook": self.rule.runbook,
        }


Listener = Callable[[Condition, bool], None]
"""Function that is called with a condition, and with True at its start or False at its end."""
_Key = tuple[str, Labels]


class ConditionEvaluator:
    """Evaluator of alert rules, with the state that it needs between two samples. Only its listeners do I/O.

    A condition is active once its rule has held for `AlertRule.seconds`. It ends with the first sample for which the
    rule does not hold. Increases of counters are available only over the windows of `WATCHED`.
    """

    def __init__(self, rules: Iterable[AlertRule] = WATCHED) -> None:
        self._rules = tuple(rules)
        self._history = SampleHistory(collect_windows())
        self._since: dict[_Key, float] = {}
        self._active: dict[_Key, Condition] = {}
        self.listeners: list[Listener] = []
        """Functions that `evaluate` calls for each start and end, in this order; `evaluate` raises their errors."""

    def list_active(self) -> list[Condition]:
        """Return the active conditions: critical ones first, then the oldest first."""
        return sorted(
            self._active.values(), key=lambda condition: (condition.rule.severity, condition.since, condition.rule.name)
        )

    def get_flags(self) -> Mapping[str, bool]:
        """Return whether each rule has an active condition, by the name of the rule."""
        holding = {name for name, _ in self._active}
        return {rule.name: rule.name in holding for rule in self._rules}

    def evaluate(self, sample: Sample, now: float, wall: float) -> None:
        """Evaluate the rules on the next sample and notify the listeners of conditions that begin or end.

        `now` is in monotonic seconds; the time for which a rule has held is computed from it. `wall` is the same time
        in Unix seconds. Errors of listeners are raised.
        """
        self._history.add_sample(sample, now, wall)
        holding: dict[_Key, AlertRule] = {}
        for rule in self._rules:
            value = rule.expression.evaluate(self._history)
            holding |= {(rule.name, labels): rule for labels in (() if isinstance(value, Scalar) else value)}
        self._since = {key: self._since.get(key, now) for key in holding}
        for key in self._active.keys() - holding.keys():
            self._notify_listeners(self._active.pop(key), began=False)
        for key, rule in holding.items():
            held = now - self._since[key]
            if key not in self._active and held >= rule.seconds:
                self._active[key] = Condition(rule, key[1], wall - held)
                self._notify_listeners(self._active[key], began=True)

    def _notify_listeners(self, condition: Condition, *, began: bool) -> None:
        for listener in self.listeners:
            listener(condition, began)


def log_condition(condition: Condition, began: bool) -> None:
    """Log the start (`began`) of a condition as a warning, or its end as information, for `cluster events`."""
    write = log.warning if began else log.info
    write(
        "condition began" if began else "condition ended",
        condition=condition.rule.name,
        severity=condition.rule.severity.value,
        node=condition.node,
        summary=condition.summary,
    )


def build_sample(pool: PoolSnapshot, nodes: Iterable[NodeSnapshot]) -> Sample:
    """Return the metrics that rules use, with the names and labels under which Prometheus stores them.

    Series of nodes have the label `node`. Histograms are omitted.
    """
    sample: dict[str, dict[Labels, float]] = {}
    for collected in collect_families(_POOL, pool):
        _add_series(sample, collected, ())
    for node in nodes:
        for collected in collect_families(_NODE, node):
            _add_series(sample, collected, (("node", node.view.name),))
    return sample


def _add_series(
    sample: dict[str, dict[Labels, float]],
    collected: "CollectedFamily[PoolSnapshot] | CollectedFamily[NodeSnapshot]",
    extra_labels: tuple[tuple[str, str], ...],
) -> None:
    family: MetricFamily[PoolSnapshot] | MetricFamily[NodeSnapshot] = collected.family
    series = sample.setdefault(family.full_name, {})
    for values, value in collected.rows:
        if not isinstance(value, HistogramValue):
            series[frozenset((*zip(family.label_names, values, strict=True), *extra_labels))] = float(value)


class AlertLoop:
    """Loop that evaluates `conditions` periodically.

    `sample` returns the current metrics, `clock` monotonic seconds, `wall` Unix seconds.
    """

    def __init__(
        self,
        conditions: ConditionEvaluator,
        sample: Callable[[], Sample],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._conditions = conditions
        self._sample = sample
        self._clock = clock
        self._wall = wall

    async def run(self) -> None:
        """Evaluate every `EVALUATION_INTERVAL_SECONDS` until cancelled.

        Errors of an evaluation do not end the loop. Only the first of consecutive errors is logged.
        """
        failed = False
        while True:
            try:
                self._conditions.evaluate(self._sample(), self._clock(), self._wall())
                failed = False
            except Exception:
                if not failed:
                    log.exception("conditions")
                failed = True
            await asyncio.sleep(EVALUATION_INTERVAL_SECONDS)
