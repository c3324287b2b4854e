"""Estimates of the transient bytes of a forward: from the config at first, then fitted to measured forwards.

`wire.report.TransientModel` has the coefficients, and `wire.capacity.arithmetic` the arithmetic. This module fits the
coefficients.

- No samples: Without samples the estimate is the attention formula
  (`node.models.memory_prediction.predict_transient`). The formula alone yields 0.1 to 0.8 of the measured bytes.
- Few samples: With a few samples the formula is scaled up to the highest of them.
- Many samples: With samples of several shapes, some far into a prompt, the estimate is a fit by non-negative least
  squares. Errors are relative, because small chunks must be estimated as well as large ones. The fit is then raised
  until no sample lies above it.

The coefficients are fitted again when a sample exceeds its estimate, or is the first of its kind and far below it. The
number of samples is bounded: one for each kind of shape, and kinds that are far apart are preferred.

A measured profile narrows the gate's margin. It covers only forwards up to the measured size: chunks by tokens, joins
and decode steps by rows. A larger forward is charged with the bytes by which the margin was narrowed, until a few such
forwards have run (`ProfiledRange`). A covered forward that exceeds its estimate raises the residual, from which the
margin follows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from node.engine.memory.least_squares import FitPoint, fit_from_above
from wire.capacity.arithmetic import estimate_prefill_transient, estimate_step_transient
from wire.report import TransientModel

MAX_SAMPLES = 32
"""Maximum number of samples of prefills, and of decode steps: one for each rounded shape."""
REPEAT_FACTOR = 1.08
"""Factor by which the bytes of two runs of the same forward may differ, because the order of frees varies (measured:
6 %)."""
NOISE_SHARE = 0.006
"""Share of the largest sample that is added to every estimate, because small chunks vary by more than REPEAT_FACTOR."""
LARGE_SAMPLE_SHARE = 0.2
"""Samples of at least this share of the largest, 0 to 1, scale the whole fit. Smaller samples raise its first term."""
REFIT_FACTOR = 1.2
"""Factor by which the estimate must exceed the first sample of a kind for a new fit."""
MIN_LOGITS_CHUNK_TOKENS = 64
"""Minimum tokens of a prompt's last chunk that shows the cost of logits. In a smaller chunk, other costs dominate."""
MIN_FIT_SAMPLES = 4
"""Minimum number of samples for a fit, because fewer samples cannot separate its terms."""
PRIOR_WEIGHT = 0.3
"""Weight of the attention formula in a fit; a sample has the weight 1. The formula fills gaps between samples."""
MAX_TERMS = 4
"""Maximum number of values above 0 that a fit of prefills tries as `TransientModel.least`, the minimum per token."""
MIN_FORWARDS_COVERED = 3
"""Number of forwards larger than a profile covers after which the profile covers the smallest of them."""

CHUNKS, JOINS, STEPS = "chunks", "joins", "steps"
"""Kinds of forwards that a profile covers, each up to a size: tokens of a chunk, rows of a join or of a decode step."""
Shape = tuple[int, int, bool]
"""`(tokens, past, grew)` of a prefill, or `(rows, longest, grew)` of a decode step, as `ForwardSamples` explains."""
Sample = tuple[Shape, float]
"""Shape of a forward (`ForwardSamples`), and its measured transient bytes."""


class ForwardSamples:
    """Measured prefills, or measured decode steps, of a model: at most `MAX_SAMPLES`. Shapes that round to the same
    thirds of powers of two are of one kind. Of each kind, the forward with the highest bytes per estimate is kept.

    A shape is `(tokens, past, grew)` of a prefill or `(rows, longest, grew)` of a decode step. `past` and `longest` are
    in tokens. `grew` states whether the caches grew. `unfitted` states whether a new fit is needed.
    """

    def __init__(self) -> None:
        self._samples: dict[Shape, Sample] = {}
        self.unfitted = False

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, shape: Shape, taken: float, estimate: Callable[[Shape], int]) -> None:
        """Add a forward that took `taken` transient bytes. `estimate(shape)` returns the transient bytes that the
        current fit expects.

        Set `unfitted` if the forward took more than expected, or is the first of its kind and took far less.
        """
        kind, expected = _round_shape(shape), estimate(shape)
        sample = self._samples.get(kind)
        if sample is None or taken * estimate(sample[0]) >= sample[1] * expected:
            self._samples[kind] = (shape, taken)
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[self._find_superfluous()]
        self.unfitted |= taken > expected or (sample is None and expected > REFIT_FACTOR * taken)

    def mark_fitted(self) -> None:
        """Record that the fit contains all samples."""
        self.unfitted = False

    def _find_superfluous(self) -> Shape:
        """Return the kind to remove: of the two nearest neighbours in sorted order, the kind with fewer bytes."""
        near = min(pairwise(sorted(self._samples)), key=lambda pair: math.dist(*pair))
        return min(near, key=lambda kind: self._samples[kind][1])


def _round_shape(shape: Shape) -> Shape:
    """Round a shape to thirds of powers of two: the sizes of one kind differ by at most 26 %. Before that, 64 tokens
    are added to `past` or `longest`."""
    return round(3 * math.log2(shape[0])), round(3 * math.log2(shape[1] + 64)), shape[2]


@dataclass(slots=True)
class ProfiledRange:
    """Largest size of the forwards that a profile covers, in tokens of a chunk or in rows. After `MIN_FORWARDS_COVERED`
    larger forwards the range is extended to the smallest of them."""

    max_size: int
    _larger: list[int] = field(default_factory=list[int])

    def record_forward(self, size: int) -> bool:
        """Record a forward of `size` tokens or rows. Return whether the range covered it before. The range may grow."""
        if size <= self.max_size:
            return True
        self._larger = sorted((*self._larger, size))
        if len(self._larger) == MIN_FORWARDS_COVERED:
            self.max_size, self._larger = self._larger[0], self._larger[1:]
        return False


class TransientEstimator:
    """Estimates of the transient bytes of one model's forwards, without the KV that they write, corrected by measured
    forwards. `prior` has the coefficients from the model's config."""

    def __init__(self, prior: TransientModel) -> None:
        self.transient = prior
        """Coefficients in force."""
        self.highest = 0
        """Highest measured transient bytes of a prefill or decode step, also in earlier runs (`set_coefficients`)."""
        self.residual = 0
        """Largest number of bytes by which a covered forward has exceeded its estimate under the profile in force; 0 if
        none has."""
        self._covered: dict[str, ProfiledRange] = {}
        """Coverage by kind of forward; empty without a profile, and then the margin is the wide one."""
        self._narrowed: Callable[[], int] = lambda: 0
        self._prior = prior
        self._chunks = ForwardSamples()
        self._steps = ForwardSamples()

    def estimate_chunk(self, tokens: int, past: int, *, last: bool = False, grows: bool = True) -> int:
        """Return the bytes that a prefill of `tokens` after `past` cached tokens needs besides its KV: its transient
        and the charge of `compute_uncovered_bytes`.

        `last`: the forward computes the logits of its tokens. `grows`: the caches have no room and are copied.
        """
        return self.estimate_prefill(tokens, past, last=last, grows=grows) + self.compute_uncovered_bytes(
            CHUNKS, tokens
        )

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples by kind of forward (`CHUNKS`, `STEPS`)."""
        return {CHUNKS: len(self._chunks), STEPS: len(self._steps)}

    def compute_uncovered_bytes(self, kind: str, size: int) -> int:
        """Return the bytes that a forward is charged with because it is larger than the profile covers.

        The charge is the bytes by which profiles narrow the margin; 0 for a covered forward or without a profile.
        `size` is in tokens for `CHUNKS`, else in rows.
        """
        covered = self._covered.get(kind)
        return self._narrowed() if covered is not None and size > covered.max_size else 0

    @property
    def rows(self) -> int:
        """Largest number of rows for which the profile covers joins and decode steps; 0 without a profile."""
        return min((self._covered[kind].max_size for kind in (JOINS, STEPS)), default=0) if self._covered else 0

    def estimate_prefill(self, tokens: int, past: int, *, last: bool = False, grows: bool = True) -> int:
        """Return the estimated transient bytes of a prefill of `tokens` after `past` cached tokens, without the KV that
        it writes.

        `last`: the forward computes the logits of its tokens. `grows`: the caches have no room and are copied.
        """
        return estimate_prefill_transient(self.transient, tokens, past, last=last, grows=grows)

    def estimate_packed(self, rows: int, tokens: int, past: int = 0) -> int:
        """Return the bytes that one forward over `rows` prompts needs besides its KV, with the charge of
        `compute_uncovered_bytes`. Each prompt is padded to `tokens` tokens after `past` cached tokens.

        The transient is estimated as the sum of single prefills. That is more than the actual cost, because the fixed
        part of a forward occurs only once.
        """
        return rows * self.estimate_prefill(tokens, past) + self.compute_uncovered_bytes(CHUNKS, rows * tokens)

    def set_profiled_range(self, tokens: int, rows: int, narrowed: Callable[[], int]) -> None:
        """Set the sizes that a new profile covers: tokens of a chunk, and rows of a join and of a decode step.

        `narrowed()` returns the bytes by which profiles narrow the margin. The residual starts from 0.
        """
        self._covered = {CHUNKS: ProfiledRange(tokens), JOINS: ProfiledRange(rows), STEPS: ProfiledRange(rows)}
        self._narrowed, self.residual = narrowed, 0

    def estimate_step(self, rows: int, longest: int, *, grows: bool = True) -> int:
        """Return the estimated transient bytes of a decode step of `rows` rows padded to `longest` tokens; 0 without
        rows. `grows`: the caches have no room and are copied."""
        return estimate_step_transient(self.transient, rows, longest, grows=grows)

    def estimate_charged_step(self, rows: int, longest: int) -> int:
        """Return the bytes that a decode step of `rows` rows padded to `longest` tokens needs besides its KV: its
        transient and the charge of `compute_uncovered_bytes`."""
        return self.estimate_step(rows, longest) + self.compute_uncovered_bytes(STEPS, rows)

    def estimate_join(self, grown: int, layers: int) -> int:
        """Return the transient bytes of a join, which copies a batch of `layers` layers one layer after the other.
        `grown` is the size of the batch after the join, in bytes."""
        return grown // max(1, layers)

    def estimate_charged_join(self, grown: int, layers: int, rows: int) -> int:
        """Return the bytes that a join needs: its transient, and the charge of `compute_uncovered_bytes`.

        `grown` is the size of the batch after the join, in bytes. `layers` is the number of its layers, `rows` the
        number of its rows after the join.
        """
        return self.estimate_join(grown, layers) + self.compute_uncovered_bytes(JOINS, rows)

    def observe_prefill(self, tokens: int, past: int, taken: int, *, last: bool = False, grew: bool = True) -> None:
        """Record a prefill of `tokens` after `past` cached tokens that took `taken` bytes in addition to its KV.

        `last`: the forward computed the logits of its tokens. `grew`: the caches had no room and were copied.

        Fit the coefficients again if the prefill took more than the estimate, or if it is the first of its kind and
        took far less. A last chunk of at least `MIN_LOGITS_CHUNK_TOKENS` tokens is not a sample. Instead, it raises the
        coefficient `logits` if it took more than the estimate.
        """
        taken = max(1, taken)
        self.highest = max(self.highest, taken)
        self._record_excess(CHUNKS, tokens, taken - self.estimate_prefill(tokens, past, last=last, grows=grew))
        if not last or tokens < MIN_LOGITS_CHUNK_TOKENS:
            self._chunks.add((tokens, past, grew), taken, self._estimate_prefill_shape)
        elif taken > self.estimate_prefill(tokens, past, last=True, grows=grew):
            logits = (taken * REPEAT_FACTOR - self.transient.fixed) / tokens
            self.transient = replace(self.transient, logits=max(self.transient.logits, logits))
        if self._chunks.unfitted:
            self._fit_chunks()

    def observe_packed(self, rows: int, tokens: int, taken: int, past: int = 0) -> None:
        """Record one forward over `rows` prompts, each padded to `tokens` tokens after `past` cached tokens, that took
        `taken` bytes in addition to its KV.

        The forward becomes a sample, and the coefficients are fitted again, only if it exceeded its estimate. Below the
        estimate the share of a single row is unknown.
        """
        self.highest, foreseen = max(self.highest, taken), rows * self.estimate_prefill(tokens, past)
        self._record_excess(CHUNKS, rows * tokens, taken - foreseen)
        if taken > foreseen:
            self._chunks.add((tokens, past, True), taken / rows, self._estimate_prefill_shape)
            self._fit_chunks()

    def _record_excess(self, kind: str, size: int, above: int) -> None:
        """Record the bytes by which a forward exceeded its estimate. A covered forward raises the residual."""
        covered = self._covered.get(kind)
        if covered is not None and covered.record_forward(size):
            self.residual = max(self.residual, above)

    def observe_join(self, rows: int, above: int) -> None:
        """Record a join after which the batch has `rows` rows. `above` is the bytes by which the join exceeded its
        estimate; negative if it took less."""
        self._record_excess(JOINS, rows, above)

    def observe_step(self, rows: int, longest: int, taken: int, *, grew: bool = False) -> None:
        """Record a decode step of `rows` rows padded to `longest` tokens that took `taken` bytes in addition to its KV.

        `grew`: the caches were full and were copied in this step. Fit the coefficients again if the step took more than
        the estimate, or if it is the first of its kind and took far less.
        """
        taken = max(1, taken)
        self.highest = max(self.highest, taken)
        self._record_excess(STEPS, rows, taken - self.estimate_step(rows, longest, grows=grew))
        self._steps.add((rows, longest, grew), taken, self._estimate_step_shape)
        if self._steps.unfitted:
            self._fit_steps()

    def _estimate_prefill_shape(self, shape: Shape) -> int:
        return self.estimate_prefill(shape[0], shape[1], grows=shape[2])

    def _estimate_step_shape(self, shape: Shape) -> int:
        return estimate_step_transient(self.transient, shape[0], shape[1], grows=shape[2])

    def set_coefficients(self, transient: TransientModel, highest: int) -> None:
        """Replace the coefficients and the prior by the coefficients of an earlier fit. They are used until there are
        enough samples for another fit.

        `logits` stays at least the value in the previous prior. `highest` is the highest transient of the earlier
        forwards in bytes; a higher value of this process is kept.
        """
        self.transient = self._prior = replace(transient, logits=max(transient.logits, self._prior.logits))
        self.highest = max(self.highest, highest)

    def fit(self) -> None:
        """Fit the coefficients to all samples so far. Coefficients of a kind of forward without samples do not
        change."""
        if len(self._chunks):
            self._fit_chunks()
        if len(self._steps):
            self._fit_steps()

    def _fit_chunks(self) -> None:
        samples = list(self._chunks)
        rich = _are_distinct(samples)
        fitted = _fit_prefill(samples, self._prior) if rich else self._prior
        self.transient = replace(self.transient, **{name: getattr(fitted, name) for name in _CHUNK})
        self._raise_above_samples(_CHUNK, samples, self._estimate_prefill_shape, 0.0 if rich else 1.0)
        self._chunks.mark_fitted()

    def _fit_steps(self) -> None:
        samples, prior = list(self._steps), self._prior
        terms = prior.step_fixed, prior.step_row, prior.step_seen
        rich = _are_distinct(samples)
        if rich:
            copied = self.transient.seen
            terms = fit_from_above(
                [
                    FitPoint((1.0, rows, rows * longest), max(1.0, taken - grew * copied * rows * longest), 1.0)
                    for (rows, longest, grew), taken in samples
                ]
            )
        self.transient = replace(self.transient, **dict(zip(_STEP, terms, strict=True)))
        self._raise_above_samples(_STEP, samples, self._estimate_step_shape, 0.0 if rich else 1.0)
        self._steps.mark_fitted()

    def _raise_above_samples(
        self, names: Sequence[str], samples: Sequence[Sample], estimate: Callable[[Shape], int], least: float
    ) -> None:
        """Raise an estimate above all samples. Large samples scale it by a factor of at least `least`. The few bytes
        still missing for small samples are added to the first term. Both are then raised by `REPEAT_FACTOR`, the
        variation between runs."""
        most = max(taken for _, taken in samples)
        large = [taken / max(1, estimate(shape)) for shape, taken in samples if taken >= LARGE_SAMPLE_SHARE * most]
        self.transient = _scale(self.transient, names, max(least, *large))
        missing = max(0.0, *(taken - estimate(shape) for shape, taken in samples)) + NOISE_SHARE * most
        fixed = getattr(self.transient, names[0])
        self.transient = replace(self.transient, **{names[0]: fixed + missing})
        self.transient = _scale(self.transient, names, REPEAT_FACTOR)


_CHUNK = ("fixed", "token", "pair", "seen", "least")
_STEP = ("step_fixed", "step_row", "step_seen")


def _scale(transient: TransientModel, names: Iterable[str], by: float) -> TransientModel:
    return replace(transient, **{name: by * getattr(transient, name) for name in names})


def _are_distinct(samples: Sequence[Sample]) -> bool:
    """Return whether samples suffice for a fit: at least `MIN_FIT_SAMPLES`, with several sizes and several pasts, at
    least one past longer than its forward."""
    shapes = [shape for shape, _ in samples]
    sizes, places = {shape[0] for shape in shapes}, {shape[1] for shape in shapes}
    return (
        len(shapes) >= MIN_FIT_SAMPLES
        and len(sizes) > 1
        and len(places) > 1
        and any(past > size for size, past, _ in shapes)
    )


def _fit_prefill(samples: Sequence[Sample], prior: TransientModel) -> TransientModel:
    """Fit the terms of a prefill.

    In hybrids, layers without attention dominate where a prompt begins. Those samples lie on another line, `least`
    bytes per token. Of the candidate lines from the samples, the one with the smallest error is used.
    """
    lines = sorted({taken / shape[0] for shape, taken in samples if shape[1] <= shape[0]})[:MAX_TERMS]
    return min(
        (_fit_above_line(samples, line, prior) for line in (0.0, *lines)),
        key=lambda found: _compute_spread(samples, found),
    )


def _fit_above_line(samples: Sequence[Sample], least: float, prior: TransientModel) -> TransientModel:
    window = prior.window
    points: list[FitPoint] = []
    for (tokens, past, grew), taken in samples:
        if taken > REPEAT_FACTOR * least * tokens:
            seen = tokens + (min(past, window) if window else past)
            points.append(FitPoint((1.0, tokens, tokens * seen, grew * seen), taken, 1.0))
    if points and prior.pair:
        points.append(FitPoint((0.0, 0.0, 1.0, 0.0), prior.pair, PRIOR_WEIGHT))
    fixed, token, pair, cached = fit_from_above(points) if points else (0.0, 0.0, 0.0, 0.0)
    return TransientModel(fixed, token, pair, cached, least, window=window)


def _compute_spread(samples: Sequence[Sample], transient: TransientModel) -> float:
    """Return the spread of the ratios of estimate and sample. A common factor does not count, because scaling removes
    it."""
    ratios = [
        estimate_prefill_transient(transient, tokens, past, grows=grew) / taken
        for (tokens, past, grew), taken in samples
        if taken > 0
    ]
    return sum(ratios) / len(ratios) / max(min(ratios), 1e-9) if ratios else 0.0
