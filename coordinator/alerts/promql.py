"""Expression trees of the alert rules, rendered as PromQL and evaluated on the coordinator's own samples.

Each rule is written once, as an expression tree, because Prometheus and the coordinator must agree on its meaning. A
value is a vector (series by their labels) or one plain number. As in PromQL, a comparison keeps the series for which it
holds. Two vectors match where all their labels are equal.

Differences from PromQL: `Increase` adds observed increases without extrapolation. A series that is absent from the
newest sample has no value, nor has a division by 0. The differences do not affect the rules, because they compare with
0 or with coarse ratios. A test evaluates each rule with Prometheus and with this module.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import NamedTuple

Labels = frozenset[tuple[str, str]]
"""Labels of a series, as (label, value) pairs."""
Vector = Mapping[Labels, float]
"""Values of the series of a metric, by their labels."""
Sample = Mapping[str, Vector]
"""Values of one moment: the series of each metric, by the full name of the metric."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {">": gt, "<": lt, "==": eq, ">=": ge, "<=": le}


class Scalar(NamedTuple):
    """A number without labels, which matches every series."""

    value: float


Value = Vector | Scalar
"""Value of an expression: the values of series by their labels, or one plain number."""


class SampleHistory:
    """Newest sample, and recent increases of counters.

    `windows` maps the name of each counter to the windows, in seconds, over which rules use its increase. A counter
    whose value falls has restarted: its new value counts as the increase.
    """

    def __init__(self, windows: Mapping[str, frozenset[float]]) -> None:
        self._windows = windows
        self._last: dict[tuple[str, Labels], float] = {}
        self._rises: dict[tuple[str, Labels], deque[tuple[float, float]]] = {}
        self.sample: Sample = {}
        """Newest sample; empty before the first."""
        self.now = 0.0
        """Time of the newest sample in monotonic seconds; 0 before the first."""
        self.wall = 0.0
        """Time of the newest sample in Unix seconds; 0 before the first."""

    def add_sample(self, sample: Sample, now: float, wall: float) -> None:
        """Replace the newest sample by one taken at `now` (monotonic seconds), and record the increases of counters.

        `wall` is the same time in Unix seconds. Counters that are absent from the new sample are removed, as are
        increases older than the longest window.
        """
        self.sample, self.now, self.wall = sample, now, wall
        present = {(name, labels) for name in self._windows for labels in sample.get(name, {})}
        for removed in self._last.keys() - present:
            del self._last[removed]
            self._rises.pop(removed, None)
        for key in present:
            self._record_increase(key, sample[key[0]][key[1]], now - max(self._windows[key[0]]))

    def _record_increase(self, key: tuple[str, Labels], value: float, horizon: float) -> None:
        last = self._last.get(key)
        self._last[key] = value
        if last is None:
            return
        rises = self._rises.setdefault(key, deque())
        if value != last:
            rises.append((self.now, value if value < last else value - last))
        while rises and rises[0][0] <= horizon:
            rises.popleft()

    def iterate_increases(self, name: str, seconds: float) -> Iterator[tuple[Labels, float]]:
        """Yield the labels and the increase of each series of a counter over the `seconds` before the newest sample.

        `seconds` is at most the longest window of the counter. A series that was seen only once is omitted. A counter
        without windows yields nothing.
        """
        for labels in self.sample.get(name, {}):
            rises = self._rises.get((name, labels))
            if rises is not None:
                yield labels, sum(rise for at, rise in rises if at > self.now - seconds)


class Expression(ABC):
    """Base class of the nodes of an expression tree."""

    @abstractmethod
    def to_promql(self) -> str:
        """Render this expression as PromQL."""

    @abstractmethod
    def evaluate(self, history: SampleHistory) -> Value:
        """Return the value of this expression on the newest sample of `history`: series by labels, or a Scalar."""

    def get_operands(self) -> "tuple[Expression, ...]":
        """Return the operands that are expressions; empty for a leaf."""
        return ()


@dataclass(frozen=True, slots=True)
class Metric(Expression):
    """Newest value of each series of the metric with this full name. `only` lists required (label, value) pairs."""

    name: str
    only: tuple[tuple[str, str], ...] = ()

    def to_promql(self) -> str:
        """Render the metric and its required labels as PromQL."""
        return self.name + (
            "{" + ", ".join(f'{label}="{value}"' for label, value in self.only) + "}" if self.only else ""
        )

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the series of the newest sample that have the required labels; empty if there are none."""
        series = history.sample.get(self.name, {})
        return {labels: value for labels, value in series.items() if labels.issuperset(self.only)}


@dataclass(frozen=True, slots=True)
class Increase(Expression):
    """Increase of each series of a counter over the last `seconds`, summed over the labels in `without`.

    `name` is the full name of the counter. If `without` is empty, nothing is summed.
    """

    name: str
    seconds: int
    without: tuple[str, ...] = ()

    def to_promql(self) -> str:
        """Render the increase, with its sum, as PromQL."""
        rise = f"increase({self.name}[{self.seconds}s])"
        return f"sum without ({', '.join(self.without)}) ({rise})" if self.without else rise

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the increases up to the newest sample, by their labels without those in `without`.

        A series that was seen only once has no increase.
        """
        sums: dict[Labels, float] = {}
        for labels, rise in history.iterate_increases(self.name, self.seconds):
            group = frozenset((label, value) for label, value in labels if label not in self.without)
            sums[group] = sums.get(group, 0.0) + rise
        return sums


@dataclass(frozen=True, slots=True)
class CurrentTime(Expression):
    """Current time in Unix seconds."""

    def to_promql(self) -> str:
        """Return `time()`, the current time in PromQL."""
        return "time()"

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the time of the newest sample in Unix seconds, as a plain number."""
        return Scalar(history.wall)


@dataclass(frozen=True, slots=True)
class MaxOver(Expression):
    """Maximum over all series of an expression, as one series without labels."""

    operand: Expression

    def to_promql(self) -> str:
        """Render the maximum as PromQL."""
        return f"max({self.operand.to_promql()})"

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the maximum on the newest sample, as one series without labels.

        The result is empty if the operand has no series. A plain number is returned unchanged.
        """
        value = self.operand.evaluate(history)
        return value if isinstance(value, Scalar) else ({frozenset(): max(value.values())} if value else {})

    def get_operands(self) -> tuple[Expression, ...]:
        """Return `operand`, as the only element."""
        return (self.operand,)


@dataclass(frozen=True, slots=True)
class BinaryOp(Expression):
    """Difference or quotient of two expressions: `sign` is - or /. A division by 0 has no value."""

    left: Expression
    sign: str
    right: Expression

    def to_promql(self) -> str:
        """Render the difference or quotient, in parentheses, as PromQL."""
        return f"({self.left.to_promql()} {self.sign} {self.right.to_promql()})"

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the difference or quotient of each pair of series with equal labels, on the newest sample.

        A plain number is paired with each series. Two plain numbers have no result.
        """
        return _combine_matching(self.left.evaluate(history), self.right.evaluate(history), self._apply)

    def _apply(self, left: float, right: float) -> float | None:
        if self.sign == "-":
            return left - right
        return left / right if right else None

    def get_operands(self) -> tuple[Expression, ...]:
        """Return `left` and `right`."""
        return (self.left, self.right)


@dataclass(frozen=True, slots=True)
class Comparison(Expression):
    """Series of `left` for which the comparison with `right` holds. `sign` is one of >, <, ==, >= and <=."""

    left: Expression
    sign: str
    right: Expression | float

    def to_promql(self) -> str:
        """Render the comparison as PromQL."""
        right = self.right.to_promql() if isinstance(self.right, Expression) else f"{self.right:g}"
        return f"{self.left.to_promql()} {self.sign} {right}"

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the series of `left` on the newest sample for which the comparison holds."""
        right = self.right.evaluate(history) if isinstance(self.right, Expression) else Scalar(self.right)
        holds = _COMPARE[self.sign]
        return _combine_matching(
            self.left.evaluate(history), right, lambda value, other: value if holds(value, other) else None
        )

    def get_operands(self) -> tuple[Expression, ...]:
        """Return `left`, and `right` unless it is a number."""
        return (self.left, self.right) if isinstance(self.right, Expression) else (self.left,)


@dataclass(frozen=True, slots=True)
class Intersection(Expression):
    """Series of `left` whose labels also occur in `right`."""

    left: Expression
    right: Expression

    def to_promql(self) -> str:
        """Render the operands, joined by `and`, as PromQL."""
        return f"{self.left.to_promql()} and {self.right.to_promql()}"

    def evaluate(self, history: SampleHistory) -> Value:
        """Return the series of `left` on the newest sample whose labels also occur in `right`."""
        return _combine_matching(self.left.evaluate(history), self.right.evaluate(history), lambda value, _: value)

    def get_operands(self) -> tuple[Expression, ...]:
        """Return `left` and `right`."""
        return (self.left, self.right)


def _combine_matching(
    left: Value, right: Value, combine: Callable[[float, float], float | None]
) -> dict[Labels, float]:
    """Apply `combine` to pairs of values with equal labels, or to each value and a plain number. Omit None."""
    combined: dict[Labels, float | None] = {}
    if isinstance(left, Scalar):
        if not isinstance(right, Scalar):
            combined = {labels: combine(left.value, value) for labels, value in right.items()}
    elif isinstance(right, Scalar):
        combined = {labels: combine(value, right.value) for labels, value in left.items()}
    else:
        combined = {labels: combine(value, right[labels]) for labels, value in left.items() if labels in right}
    return {labels: value for labels, value in combined.items() if value is not None}


def walk_expression(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all of its descendants, each parent before its operands."""
    yield expression
    for part in expression.get_operands():
        yield from walk_expression(part)
