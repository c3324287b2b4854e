"""Watches the conditions from inside: pictures in, conditions out. What begins and what ends is told to listeners.

It needs neither Prometheus nor Grafana. Nodes are seen by their newest reports alone: none is asked anything.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from coordinator.alerts.promql import History, Labels, Plain, Sample
from coordinator.alerts.rules import WATCHED, Rule, told, windows
from coordinator.metrics.families import Collected, Family, Histogram, collect
from coordinator.metrics.node import NODE, NodePicture
from coordinator.metrics.pool import POOL, PoolPicture

EVERY = 5.0
"""Seconds between two looks: as often as Prometheus looks."""
_NAMES = frozenset(name for rule in WATCHED for name in rule.metrics())
_POOL = tuple(family for family in POOL if family.full_name in _NAMES)
_NODE = tuple(family for family in NODE if family.full_name in _NAMES)

log = structlog.get_logger("coordinator.alerts")


@dataclass(frozen=True, slots=True)
class Condition:
    """One that holds, `since` in Unix seconds; `node` is empty where it is of none."""

    rule: Rule
    labels: Labels
    since: float

    @property
    def summary(self) -> str:
        """What it is, with names."""
        return told(self.rule.summary, self.labels)

    @property
    def node(self) -> str:
        """The node that it is about."""
        return dict(self.labels).get("node", "")

    def row(self) -> dict[str, object]:
        """Give it as the API does."""
        return {
            "name": self.rule.name, "severity": self.rule.severity.value, "node": self.node or None,
            "since": round(self.since, 3), "summary": self.summary, "remedy": self.rule.remedy,
            "runbook": self.rule.runbook,
        }  # fmt: skip


Listener = Callable[[Condition, bool], None]
"""Told of a condition, and whether it began (or ended)."""
_Key = tuple[str, Labels]


class Conditions:
    """Which rules hold: since when, and for long enough. Pure but for its listeners."""

    def __init__(self, rules: Iterable[Rule] = WATCHED) -> None:
        self._rules = tuple(rules)
        self._history = History(windows())
        self._since: dict[_Key, float] = {}
        self._active: dict[_Key, Condition] = {}
        self.listeners: list[Listener] = []

    def active(self) -> list[Condition]:
        """Give those that hold, critical ones first, then the oldest."""
        return sorted(self._active.values(), key=lambda one: (one.rule.severity, one.since, one.rule.name))

    def flags(self) -> Mapping[str, bool]:
        """Say of every rule whether it holds anywhere."""
        holding = {name for name, _ in self._active}
        return {rule.name: rule.name in holding for rule in self._rules}

    def look(self, sample: Sample, now: float) -> None:
        """Take a picture, and find what began and what ended. `now` in Unix seconds."""
        self._history.take(sample, now)
        holding: dict[_Key, Rule] = {}
        for rule in self._rules:
            found = rule.holds.value(self._history)
            holding |= {(rule.name, labels): rule for labels in (() if isinstance(found, Plain) else found)}
        self._since = {key: self._since.get(key, now) for key in holding}
        for key in self._active.keys() - holding.keys():
            self._tell(self._active.pop(key), began=False)
        for key, rule in holding.items():
            if key not in self._active and now - self._since[key] >= rule.seconds:
                self._active[key] = Condition(rule, key[1], self._since[key])
                self._tell(self._active[key], began=True)

    def _tell(self, condition: Condition, *, began: bool) -> None:
        for listener in self.listeners:
            listener(condition, began)


def log_conditions(condition: Condition, began: bool) -> None:
    """Put what begins and ends into the log, where `cluster events` finds it."""
    tell = log.warning if began else log.info
    tell("condition began" if began else "condition ended", condition=condition.rule.name,
         severity=condition.rule.severity.value, node=condition.node, summary=condition.summary)  # fmt: skip


def sample_of(pool: PoolPicture, nodes: Iterable[NodePicture]) -> Sample:
    """Give what the rules look at, as Prometheus would have it: series of nodes with the name of their node."""
    sample: dict[str, dict[Labels, float]] = {}
    for collected in collect(_POOL, pool):
        _add(sample, collected, ())
    for node in nodes:
        for collected in collect(_NODE, node):
            _add(sample, collected, (("node", node.view.name),))
    return sample


def _add(
    sample: dict[str, dict[Labels, float]], collected: "Collected[PoolPicture] | Collected[NodePicture]",
    more: tuple[tuple[str, str], ...],
) -> None:  # fmt: skip
    family: Family[PoolPicture] | Family[NodePicture] = collected.family
    series = sample.setdefault(family.full_name, {})
    for values, value in collected.rows:
        if not isinstance(value, Histogram):
            series[frozenset((*zip(family.label_names, values, strict=True), *more))] = float(value)


class Watch:
    """Looks again and again. `sample` takes a picture, `clock` gives Unix seconds."""

    def __init__(self, conditions: Conditions, sample: Callable[[], Sample], clock: Callable[[], float]) -> None:
        self._conditions = conditions
        self._sample = sample
        self._clock = clock

    async def run(self) -> None:
        """Look for ever. A look that fails is told once in the log, and the next is taken all the same."""
        failed = False
        while True:
            try:
                self._conditions.look(self._sample(), self._clock())
                failed = False
            except Exception:
                if not failed:
                    log.exception("conditions")
                failed = True
            await asyncio.sleep(EVERY)
