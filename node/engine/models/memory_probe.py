"""Memory probe: measured forwards of one model, from small to large, each through the gate.

The forwards run over real text, in three series: separate rows, one long row, decode steps. A refusal of the gate ends
a series, not the probe. No forward runs without the gate, because an out-of-memory error of Metal ends the process and
cannot be caught. Each measured forward is a sample of the estimator, as forwards of requests are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from node.engine.kv.kv_cache import Layers, create_cache, measure_extent
from node.engine.memory.footprint import MlxPeakTracker, clear_buffers, release_free_memory
from node.engine.models.loaded_model import LoadedModel, run_forward
from node.engine.models.profile import MemoryProfile, MemoryProfileKey
from node.engine.scheduling.decode_batch import DecodeBatch, JoiningRow, RowSampler
from node.engine.scheduling.sampling import choose_greedily
from node.memory.sensor import Sensor
from wire.capacity.batches import compute_row_bytes

FIRST_FORWARD_TOKENS = (8, 32, 64, 128, 256, 512)
"""Tokens of the first forwards of a probe, each over a separate row. Each is at most the engine's chunk."""
WALK_TOKENS = (512, 64, 256, 32, 128)
"""Tokens of the forwards over the long row of a probe, repeated in this order, each at most the engine's chunk."""
SWEEP_FORWARD_TOKENS = (1024, 2048, 4096, 8192)
"""Tokens of the additional forwards of a sweep, up to the engine's chunk."""
ROWS = (1, 2, 4, 8)
"""Rows of the decode steps of a probe, up to the engine's batch."""
MORE_ROWS = (16, 32, 64, 128, 256)
"""Rows of the additional decode steps of a sweep, up to the engine's batch."""
DECODE_TOKENS = 512
"""Tokens of each row in the second series of decode steps, at most the engine's chunk. The rows of the first series
have 64 tokens, at most the chunk as well. A row with its decoded tokens never exceeds the context of the model."""
STEPS_PER_SIZE = 3
"""Decode steps that are measured for each number of rows."""

CheckGate = Callable[[int], bool]
"""Function that returns whether the gate lets a forward of this many bytes pass."""


@dataclass(slots=True, eq=False)
class ForwardPeak:
    """Meter of the peak memory of a forward, in bytes. The peak is the kernel's high-water mark of the footprint, or
    MLX's peak if the kernel has no such mark."""

    peak_tracker: MlxPeakTracker
    """Peak of MLX's active memory."""
    sensor: Sensor
    """Footprint of this process and its high-water mark."""
    settle: Callable[[], None]
    """Function that waits until freed memory has left the footprint, because it would hide a part of the next peak."""
    _phys: int | None = None

    def mark(self) -> None:
        """Wait until freed memory has left the footprint, then start the measurement of a forward."""
        self.settle()
        self.peak_tracker.mark()
        self._phys = self.sensor.read_footprint().phys if self.sensor.begin_interval() else None

    def measure_charged_bytes(self) -> int:
        """Return the bytes by which the peak since `mark` exceeds the footprint at that time. If the kernel has no
        peak, return the same difference of MLX's active memory."""
        highest = self.sensor.read_high_water_marks().interval
        return (
            self.peak_tracker.measure_peak_above_mark()
            if self._phys is None or highest is None
            else highest - self._phys
        )


@dataclass(slots=True)
class ForwardMeasurement:
    """Measured prefill forward of a probe."""

    tokens: int
    """Tokens of the forward."""
    past: int
    """Cached tokens before the forward."""
    grew: bool
    """Whether the caches grew."""
    kv_bytes: int
    """Bytes of KV that the forward wrote."""
    charged: int
    """Bytes by which the peak of the forward exceeds the memory before it, including the KV that it wrote
    (`ForwardPeak.measure_charged_bytes`)."""


@dataclass(slots=True)
class StepMeasurement:
    """Measured decode step of a probe."""

    rows: int
    """Rows of the step."""
    longest: int
    """Tokens of the longest row."""
    grew: bool
    """Whether the caches grew."""
    charged: int
    """Bytes by which the peak of the step exceeds the memory before it (`ForwardPeak.measure_charged_bytes`), without
    the bytes by which the caches grew."""


@dataclass(slots=True, eq=False)
class MemoryProbe:
    """Measurement of one model's memory, at its load or as a sweep on order (see the module's docstring)."""

    loaded_model: LoadedModel
    """Model to measure."""
    ids: Sequence[int]
    """Token ids of a text, repeated as often as necessary."""
    check: CheckGate
    """`check(need)` returns whether the gate passes a forward that needs `need` bytes."""
    peak_meter: ForwardPeak
    """Meter of peaks."""
    chunk: int
    """Maximum tokens of a chunk in this engine, at most the context of the model."""
    batch: int
    """Maximum rows of a batch in this engine."""
    reach: int
    """Maximum tokens of the long row."""
    seconds: float
    """Maximum seconds of `run`, and again of `repeat_largest`. A forward starts only if it is expected to end within
    them."""
    full: bool = False
    """Whether this is a sweep, with larger forwards and more rows."""
    chunks: list[ForwardMeasurement] = field(default_factory=list[ForwardMeasurement])
    """Measured forwards."""
    steps: list[StepMeasurement] = field(default_factory=list[StepMeasurement])
    """Measured decode steps."""
    join_excesses: list[int] = field(default_factory=list[int])
    """Bytes by which each join exceeded the sum of its KV and its estimate; negative if it took less."""
    rows: int = 0
    """Largest number of rows that decoded together."""
    row_bytes: int = 0
    """Approximate KV bytes of the long row now; 0 without one."""
    refused_bytes: int = 0
    """Bytes of the first forward that the gate refused, including its row; 0 if the gate refused none."""
    _ends: float = 0.0

    def run(self) -> Iterator[None]:
        """Measure until `seconds` have passed or all series have ended, each after its last size or at a refusal of the
        gate. Yield after each forward or batch of decode steps. At the end, even after an exception, fit the estimator
        to all samples and release the memory."""
        self._ends = time.monotonic() + self.seconds
        try:
            yield from self._measure_all()
        finally:
            self.row_bytes = 0
            self.loaded_model.estimator.fit()
            release_free_memory()

    def estimate_step_seconds(self) -> float:
        """Return the maximum expected seconds of one step of `run`, at most `seconds`.

        That is the largest chunk at the end of the long row, or the decode steps of the largest batch.
        """
        stats = self.loaded_model.stats
        chunk = stats.pace.estimate_seconds(self.chunk, self.reach)
        steps = stats.pace.estimate_seconds(DECODE_TOKENS, 0) + STEPS_PER_SIZE * stats.step_seconds * self.batch
        return min(self.seconds, max(chunk, steps))

    def repeat_largest(self) -> bool:
        """Measure a forward of as many tokens as the largest measured forward once more, over an empty cache. Return
        whether it ran: False if nothing was measured, or if room or time (`seconds`) did not suffice."""
        if not self.chunks:
            return False
        largest = max(self.chunks, key=lambda chunk: chunk.tokens).tokens
        self._ends = time.monotonic() + self.seconds
        ran = self._measure_chunk(create_cache(self.loaded_model.model), largest, 0)
        release_free_memory()
        return ran

    def _measure_all(self) -> Iterator[None]:
        larger = SWEEP_FORWARD_TOKENS if self.full else ()
        for tokens in self._bound_sizes((*FIRST_FORWARD_TOKENS, *larger)):
            cache = create_cache(self.loaded_model.model)
            if not self._measure_chunk(cache, tokens, 0):
                break
            yield
            del cache
        yield from self._measure_long_row(
            [tokens for tokens in (*WALK_TOKENS, *larger) if tokens <= max(self.chunk, WALK_TOKENS[0])]
        )
        self.row_bytes = 0
        yield from self._measure_decode()

    def _bound_sizes(self, wanted: Sequence[int]) -> list[int]:
        return sorted({min(tokens, self.chunk) for tokens in wanted})

    def _measure_long_row(self, sizes: Sequence[int]) -> Iterator[None]:
        """Prefill one long row of at most `reach` tokens, in chunks of `sizes`, which repeat."""
        cache, past = create_cache(self.loaded_model.model), 0
        for tokens in cycle(min(tokens, self.chunk) for tokens in sizes):
            if past + tokens > self.reach or not self._measure_chunk(cache, tokens, past):
                return
            past += tokens
            self.row_bytes = compute_row_bytes(self.loaded_model.kv, past)
            yield

    def _measure_chunk(self, cache: Layers, tokens: int, past: int) -> bool:
        """Run one forward if there are time and room for it; return whether it ran."""
        loaded_model, estimator = self.loaded_model, self.loaded_model.estimator
        expected = loaded_model.stats.pace.estimate_seconds(tokens, past)
        if time.monotonic() + expected > self._ends:
            return False
        needed = compute_row_bytes(loaded_model.kv, past + tokens) - compute_row_bytes(loaded_model.kv, past)
        if not self._passes_gate(needed + estimator.estimate_chunk(tokens, past)):
            return False
        before = measure_extent(cache)
        clear_buffers()
        self.peak_meter.mark()
        run_forward(
            loaded_model.model,
            islice(cycle(self.ids), past % len(self.ids), past % len(self.ids) + tokens),
            cache,
            last=False,
        )
        after = measure_extent(cache)
        wrote, grew = after.size - before.size, after.capacity > before.capacity
        estimator.observe_prefill(
            tokens, past, self.peak_meter.peak_tracker.measure_peak_above_mark() - wrote, grew=grew
        )
        self.chunks.append(ForwardMeasurement(tokens, past, grew, wrote, self.peak_meter.measure_charged_bytes()))
        return True

    def _passes_gate(self, size: int) -> bool:
        passes = self.check(size)
        if not passes:
            self.refused_bytes = self.refused_bytes or size + self.row_bytes
        return passes

    def _measure_decode(self) -> Iterator[None]:
        """Decode a few steps in batches of increasing size, or of one row if rows decode alone."""
        most_rows = 1 if self.loaded_model.ledger.alone else self.batch
        longest = max(1, self.loaded_model.descriptor.context - STEPS_PER_SIZE - 1)
        for tokens in self._bound_sizes((min(64, longest), min(DECODE_TOKENS, longest))):
            for rows in [rows for rows in (*ROWS, *(MORE_ROWS if self.full else ())) if rows <= most_rows]:
                if not self._measure_steps(rows, tokens):
                    break
                self.rows = max(self.rows, rows)
                yield

    def _measure_steps(self, rows: int, tokens: int) -> bool:
        loaded_model, estimator = self.loaded_model, self.loaded_model.estimator
        expected = (
            loaded_model.stats.pace.estimate_seconds(tokens, 0)
            + STEPS_PER_SIZE * loaded_model.stats.step_seconds * rows
        )
        needed = (rows + 1) * compute_row_bytes(loaded_model.kv, tokens + STEPS_PER_SIZE + 1)
        most = max(
            estimator.estimate_chunk(tokens, 0, last=True), estimator.estimate_step(rows, tokens + STEPS_PER_SIZE)
        )
        if time.monotonic() + expected > self._ends or not self._passes_gate(needed + most):
            return False
        ids = list(islice(cycle(self.ids), tokens))
        cache = create_cache(loaded_model.model)
        run_forward(loaded_model.model, ids[:-1], cache, last=False)
        logits = run_forward(loaded_model.model, ids[-1:], cache, last=True)
        assert logits is not None  # noqa: S101 the last logits were requested
        batch: DecodeBatch[int] = DecodeBatch(loaded_model.model, alone=loaded_model.ledger.alone)
        layers, extent = len(cache), measure_extent(cache).size
        clear_buffers()
        self.peak_meter.mark()
        batch.join([JoiningRow(row, RowSampler(choose_greedily, ())) for row in range(rows)], ids, cache, logits)
        grown = batch.sum_nbytes()
        self.join_excesses.append(
            self.peak_meter.measure_charged_bytes() - (grown - extent) - estimator.estimate_join(grown, layers)
        )
        for step in range(STEPS_PER_SIZE):
            before = batch.sum_nbytes()
            self.peak_meter.mark()
            batch.step()
            batch.wait()
            grown = batch.sum_nbytes() - before
            estimator.observe_step(
                rows, tokens + step + 1, self.peak_meter.peak_tracker.measure_peak_above_mark() - grown, grew=grown > 0
            )
            self.steps.append(
                StepMeasurement(rows, tokens + step + 1, grown > 0, self.peak_meter.measure_charged_bytes() - grown)
            )
        return True

    def compute_residual(self) -> int:
        """Return the residual: the most bytes by which a chunk, join or decode step exceeded the sum of its KV and its
        estimate. Return 0 if none did."""
        estimator = self.loaded_model.estimator
        chunks = (
            chunk.charged - chunk.kv_bytes - estimator.estimate_prefill(chunk.tokens, chunk.past, grows=chunk.grew)
            for chunk in self.chunks
        )
        steps = (
            step.charged - estimator.estimate_step(step.rows, step.longest, grows=step.grew) for step in self.steps
        )
        return max(*self.join_excesses, *chunks, *steps, 0, 0)

    def build_profile(self, key: MemoryProfileKey) -> MemoryProfile:
        """Return a profile of the measurements, for storage under `key`."""
        loaded_model = self.loaded_model
        return MemoryProfile(
            key,
            loaded_model.estimator.transient,
            loaded_model.kv,
            max(0, self.compute_residual()),
            loaded_model.estimator.highest,
            max((chunk.tokens for chunk in self.chunks), default=0),
            max((chunk.past + chunk.tokens for chunk in self.chunks), default=0),
            self.rows,
            round(self.seconds - max(0.0, self._ends - time.monotonic()), 3),
            refused_bytes=0 if self.full else self.refused_bytes,
        )
