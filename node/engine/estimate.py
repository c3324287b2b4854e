"""What a forward will take for a moment: fitted to what forwards have taken, from the config alone before the first.

The form is `wire.report.Transient`, the arithmetic over it `wire.verdict`'s; here its coefficients are found.

- Before there are samples it is the attention formula (`node.library.forecast`), which alone reaches 0.1 to 0.8 of what
  is measured.
- With a few it is that formula, scaled up to the highest of them.
- With samples of several shapes, some far into a prompt, it is a fit: non-negative least squares of relative errors
  (relative, because a small chunk must be as well foreseen as a large one), scaled up until no sample lies above it.

A sample above the estimate counts at once. The samples are bounded: of each shape the highest, of many shapes those
that are farthest apart.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise

from msgspec.structs import replace

from wire.report import Transient
from wire.verdict import prefill_transient, step_transient

MOST_SAMPLES = 48
"""Shapes that are remembered of each kind of forward."""
ROOM = 1.04
"""The same forward takes up to this much more another time (measured: the order of frees varies)."""
REFIT = 8
"""New shapes that may come before the fit is made anew, where none of them lies above it."""
RICH = 4
"""Shapes that a fit takes: fewer do not tell its terms apart."""

Shape = tuple[int, int]
Sample = tuple[Shape, float]
Point = tuple[tuple[float, ...], float]


class Samples:
    """Of each shape `(tokens, past)` or `(rows, longest)` the highest transient seen, in bytes."""

    def __init__(self) -> None:
        self.highest: dict[Shape, float] = {}
        self.unfitted = 0

    def add(self, shape: Shape, taken: float) -> None:
        """Keep a sample."""
        if shape not in self.highest:
            self.unfitted += 1
            if len(self.highest) >= MOST_SAMPLES:
                del self.highest[self._closest()]
        self.highest[shape] = max(taken, self.highest.get(shape, 0.0))

    def _closest(self) -> Shape:
        """Choose whom to forget: the shape whose neighbour, in the order of sizes, is nearest and takes as much."""
        order = sorted(self.highest)
        near = min(pairwise(order), key=lambda pair: _apart(pair[0], pair[1]))
        return min(near, key=lambda shape: self.highest[shape])


def _apart(one: Shape, other: Shape) -> float:
    return sum(abs(a - b) / (1 + max(a, b)) for a, b in zip(one, other, strict=True))


class Estimator:
    """The transients of one model. `prior` is what its config lets one foresee."""

    def __init__(self, prior: Transient) -> None:
        self.transient = prior
        self.highest = 0
        """The highest transient ever observed, in bytes."""
        self._prior = prior
        self._chunks = Samples()
        self._steps = Samples()

    def chunk(self, tokens: int, past: int, *, last: bool = False) -> int:
        """Give what a prefill of `tokens` behind `past` written ones will take for a moment, in bytes."""
        return prefill_transient(self.transient, tokens, past, last=last)

    def step(self, rows: int, longest: int) -> int:
        """Give what a decode step of a padded batch will take for a moment, in bytes."""
        return step_transient(self.transient, rows, longest)

    def join(self, grown: int, layers: int) -> int:
        """Give what a join takes for a moment: it copies a batch, which then has `grown` bytes, layer by layer."""
        return grown // max(1, layers)

    def observe(self, tokens: int, past: int, taken: int, *, last: bool = False) -> None:
        """Learn from a prefill that took `taken` bytes beside what it wrote."""
        self.highest = max(self.highest, taken)
        if last and taken > self.chunk(tokens, past):
            if taken > self.chunk(tokens, past, last=True):
                self._raise_logits(tokens, taken)
            return
        self._chunks.add((tokens, past), taken)
        if taken > self.chunk(tokens, past) or self._chunks.unfitted >= REFIT:
            self._fit_chunks()

    def observe_step(self, rows: int, longest: int, taken: int) -> None:
        """Learn from a decode step that took `taken` bytes beside what it wrote."""
        self.highest = max(self.highest, taken)
        self._steps.add((rows, longest), taken)
        if taken > self.step(rows, longest) or self._steps.unfitted >= REFIT:
            self._fit_steps()

    def settle(self) -> None:
        """Fit to all that was observed so far."""
        if self._chunks.highest:
            self._fit_chunks()
        if self._steps.highest:
            self._fit_steps()

    def _raise_logits(self, tokens: int, taken: float) -> None:
        logits = (taken * ROOM - self.transient.fixed) / tokens
        self.transient = replace(self.transient, logits=max(self.transient.logits, logits))

    def _fit_chunks(self) -> None:
        self._chunks.unfitted = 0
        samples = list(self._chunks.highest.items())
        window = self._prior.window
        fitted = _fit_rich(samples, window) if _tells_apart(samples) else self._prior
        kept = replace(
            self.transient, fixed=fitted.fixed, token=fitted.token, pair=fitted.pair, seen=fitted.seen,
            least=fitted.least,
        )  # fmt: skip
        up = _highest_ratio(samples, lambda shape: prefill_transient(kept, *shape))
        self.transient = replace(
            kept, fixed=up * kept.fixed, token=up * kept.token, pair=up * kept.pair, seen=up * kept.seen,
            least=up * kept.least,
        )  # fmt: skip

    def _fit_steps(self) -> None:
        self._steps.unfitted = 0
        samples, prior = list(self._steps.highest.items()), self._prior
        terms = prior.step_fixed, prior.step_row, prior.step_seen
        if _tells_apart(samples):
            terms = _least_squares([((1.0, rows, rows * longest), taken) for (rows, longest), taken in samples])
        kept = replace(self.transient, step_fixed=terms[0], step_row=terms[1], step_seen=terms[2])
        up = _highest_ratio(samples, lambda shape: step_transient(kept, *shape))
        self.transient = replace(kept, step_fixed=up * terms[0], step_row=up * terms[1], step_seen=up * terms[2])


def _tells_apart(samples: Sequence[Sample]) -> bool:
    """Say whether samples are enough for a fit: several sizes, at several places, some behind more than they are."""
    shapes = [shape for shape, _ in samples]
    sizes, places = {shape[0] for shape in shapes}, {shape[1] for shape in shapes}
    return len(shapes) >= RICH and len(sizes) > 1 and len(places) > 1 and any(past > size for size, past in shapes)


def _highest_ratio(samples: Iterable[Sample], estimate: Callable[[Shape], int]) -> float:
    return ROOM * max(taken / max(1, estimate(shape)) for shape, taken in samples)


def _fit_rich(samples: Sequence[Sample], window: int) -> Transient:
    """Fit a prefill's terms. Where layers without attention are the higher ones, as in hybrids where a prompt begins,
    the samples lie on another line, `least` for each token: of the lines that the samples offer the best is taken."""
    lines = {0.0, *(taken / shape[0] for shape, taken in samples if shape[1] <= shape[0])}
    return min((_above(samples, line, window) for line in lines), key=lambda found: _error(samples, found))


def _above(samples: Sequence[Sample], least: float, window: int) -> Transient:
    points: list[Point] = []
    for (tokens, past), taken in samples:
        if taken > 1.02 * least * tokens:
            seen = tokens + (min(past, window) if window else past)
            points.append(((1.0, tokens, tokens * seen, seen), taken))
    fixed, token, pair, held = _least_squares(points) if points else (0.0, 0.0, 0.0, 0.0)
    return Transient(fixed, token, pair, held, least, window=window)


def _error(samples: Sequence[Sample], found: Transient) -> float:
    """Give how far apart the ratios of estimate and sample are: scaling mends what they have in common."""
    ratios = [prefill_transient(found, *shape) / taken for shape, taken in samples if taken > 0]
    return sum(ratios) / len(ratios) / max(min(ratios), 1e-9) if ratios else 0.0


def _least_squares(points: Sequence[Point]) -> tuple[float, ...]:
    """Fit non-negative terms to `(features, value)`, by relative error: of all subsets of the features the best whose
    terms come out positive."""
    width = len(points[0][0])
    scaled = [([one / value for one in features], value) for features, value in points if value > 0]
    best, least = (0.0,) * width, float("inf")
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            terms = _solve([[row[place] for place in chosen] for row, _ in scaled])
            if terms is None or min(terms) < 0:
                continue
            error = sum((1 - sum(t * row[place] for t, place in zip(terms, chosen, strict=True))) ** 2
                        for row, _ in scaled)  # fmt: skip
            if error < least - 1e-12:
                whole = dict(zip(chosen, terms, strict=True))
                best, least = tuple(whole.get(place, 0.0) for place in range(width)), error
    return best


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve least squares for `row · terms = 1` by the normal equations; None when the columns are not independent."""
    width = len(rows[0]) if rows else 0
    sizes = [max((abs(row[place]) for row in rows), default=0.0) or 1.0 for place in range(width)]
    matrix = [
        [sum(row[i] / sizes[i] * row[j] / sizes[j] for row in rows) for j in range(width)]
        + [sum(row[i] / sizes[i] for row in rows)]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda place: abs(matrix[place][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(width):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / sizes[i] for i in range(width)] if width else None
