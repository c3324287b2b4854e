"""Padded batch of rows that decode together: the only module that knows mlx-lm's `GenerationBatch` (0.32.2).

`GenerationBatch` has behaviours that its interface does not state.
tests/unit/node/engine/scheduling/test_decode_batch.py checks them.
- Constructor: Runs a forward over each row's last known token, unless there are no rows. A batch is therefore created
  empty, and its rows are set to the state after that forward. The first token of a row comes from the last forward of
  the prefill (`join`), or from the next step (`prepare_rows`).
- Lookahead: `next()` launches step N+1 before it returns the tokens of step N. A row that has ended has one token too
  many in flight. When the last row is removed, the GPU still writes to the results of that step. They must not be freed
  before the step has ended (docs/decisions/0064).
- Laziness: `extend` and `filter` are lazy. Until they are evaluated, they keep the whole old batch in memory. Here each
  layer is evaluated alone, which frees its old arrays before the next layer is copied.
- Exceptions: After an exception the content of the batch is invalid: later steps return wrong tokens without an error.
  The caller must discard the batch and rebuild the rows from their ids.

Stop sequences, limits and the lazily extracted cache at a row's end are not used. `drop_rows` removes rows, and
`extract` copies the cache of one row.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import BatchKVCache, TokenBuffer

from node.engine.grammar.logits_mask import LogitsMask
from node.engine.kv.kv_cache import (
    LayerCache,
    Layers,
    TextModel,
    align_rows,
    copy_single_row,
    evaluate,
    launch_evaluation,
    materialize,
    merge_copies,
    sum_nbytes,
    view_row,
)
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.scheduling.sampling import Processor, Sampler, choose_greedily

NO_STOPS = StopSequences()
NO_LIMIT = 2**62
EVALUATION_INTERVAL_STEPS = 64
"""Steps after which all arrays of the caches are evaluated. Arrays that no forward reads, such as the offsets of layers
without rotary embedding, otherwise keep a buffer for each step. Metal has at most 499,000 buffers, and longer answers
fail or panic the machine (https://github.com/ml-explore/mlx-lm/issues/1662, ml-explore/mlx-lm#1911)."""
K = TypeVar("K")


class RowSampler:
    """Wrapper of a row's sampler and logits processors, which confines their exceptions to the row.

    A decode batch calls the wrappers `self.sampler` and `self.processors`; `choose_greedily` is not wrapped.
    `self.error` is the first exception, None before. After an exception, the row's tokens are chosen greedily and its
    processors do nothing, until the caller ends the row (`DecodeBatch.list_errors`). The `masker` runs after all other
    processors and receives each token before the next step; None: no masker.
    """

    def __init__(self, sampler: Sampler, processors: Sequence[Processor], masker: LogitsMask | None = None) -> None:
        self.error: Exception | None = None
        self.masker = masker
        self.sampler = sampler if sampler is choose_greedily else self._sample
        all_processors = processors if masker is None else (*processors, masker)
        self.processors = tuple(self._guard(processor) for processor in all_processors)
        self._sampler = sampler

    def _sample(self, logprobs: mx.array) -> mx.array:
        if self.error is None:
            try:
                return self._sampler(logprobs)
            except Exception as error:
                raise_if_device_lost(error)
                self.error = error
        return choose_greedily(logprobs)

    def _guard(self, processor: Processor) -> Processor:
        def run_guarded(tokens: mx.array, logits: mx.array) -> mx.array:
            if self.error is None:
                try:
                    return processor(tokens, logits)
                except Exception as error:
                    raise_if_device_lost(error)
                    self.error = error
            return logits

        return run_guarded


@dataclass(frozen=True, slots=True, eq=False)
class JoiningRow(Generic[K]):
    """Row that joins a batch, with its sampler."""

    row: K
    """Row object of the caller."""
    guard: RowSampler
    """Sampler and processors of the row."""


@dataclass(frozen=True, slots=True)
class NextToken(Generic[K]):
    """Token that a row has generated."""

    row: K
    """Row object of the caller."""
    token: int
    """Token id."""
    logprobs: mx.array
    """Log probabilities of all tokens after the processors, before temperature, top-k, top-p and min-p. They are in
    float32, shape (vocabulary,)."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingRows(Generic[K]):
    """Rows that `DecodeBatch.prepare_rows` has prepared for `add_prepared`."""

    batch: GenerationBatch
    """Batch of these rows alone."""
    rows: dict[int, JoiningRow[K]]
    """Rows by their uid in that batch, as `GenerationBatch` numbers them."""


class DecodeBatch(Generic[K]):
    """Rows of one model that decode together, one token per step. `K` is the caller's type of a row.

    A call of `step` launches the next step and returns the tokens of the step that the previous call launched. The
    duration of a step is the duration of the call that launched it, plus the duration of `wait`, if that was called.

    With `alone`, the batch has at most one row, which is not padded and keeps caches of a single row.
    """

    def __init__(self, model: TextModel, *, alone: bool = False) -> None:
        self._alone = alone
        self._called: float | None = None
        self._model = cast("Any", partial(_compute_logits, model))
        self._batch: GenerationBatch | None = None
        self._rows: dict[int, JoiningRow[K]] = {}
        self._next = self._steps = 0
        self._reported: set[int] = set()
        """Uids of rows whose token in flight is known to the caller. That token is the first of an answer, the last of
        a prompt, or was returned by `take_last_tokens`."""
        self._requested: set[int] = set()
        """Uids in `_reported` whose token in flight is the last of the prompt."""

    def __len__(self) -> int:
        return len(self._rows)

    def join(
        self, joining: Sequence[JoiningRow[K]], ids: Sequence[int], cache: Layers, logits: mx.array
    ) -> list[NextToken[K]]:
        """Add rows that have the same tokens so far, and return each row's next token. `step` does not return these
        tokens again.

        `ids` are the token ids so far. `cache` has the keys and values of all of them, and is consumed. `logits`, shape
        (1, vocabulary), are the logits after the last id. Exceptions of MLX and mlx-lm propagate; the whole batch must
        then be discarded. Raise `ValueError` for a second row of a batch with `alone`.
        """
        if self._alone and len(self._rows) + len(joining) > 1:
            raise ValueError("a row that decodes alone takes no other row into its batch")
        past, layers = list(ids), copy_single_row(cache) if self._alone else merge_copies(cache, len(joining))
        logits = logits.astype(mx.float32)
        drawn = [_draw_first(joining_row.guard, mx.array(past), logits) for joining_row in joining]
        tokens = mx.concatenate([token for token, _ in drawn])
        pending = self._build_pending(
            joining, [past for _ in joining], layers, tokens, [logprobs for _, logprobs in drawn]
        )
        self.add_prepared(pending)
        return [
            NextToken(joining_row.row, cast("int", token.item()), logprobs)
            for joining_row, (token, logprobs) in zip(joining, drawn, strict=True)
        ]

    def prepare_rows(
        self, joining: Sequence[JoiningRow[K]], ids: Sequence[Sequence[int]], cache: Layers
    ) -> PendingRows[K]:
        """Prepare rows that were prefilled in one forward, each with its own tokens. Return them for `add_prepared`.

        A row's cache has all of its `ids` except the last, which is the input of the next step. That step returns the
        row's first token. `cache` is consumed. The batch does not change, so that an exception affects only these rows.
        """
        pasts = [list(row_ids[:-1]) for row_ids in ids]
        last = mx.array([row_ids[-1] for row_ids in ids], mx.uint32)
        layers = align_rows(cache, [len(past) for past in pasts])
        pending = self._build_pending(joining, pasts, layers, last, [mx.zeros((1,)) for _ in ids])
        self._requested.update(pending.rows)
        return pending

    def add_prepared(self, newcomers: PendingRows[K]) -> None:
        """Add prepared rows. Exceptions propagate; the whole batch must then be discarded."""
        if self._batch is None:
            self._batch = newcomers.batch
        else:
            self._batch.extend(newcomers.batch)
            newcomers.batch.prompt_cache = []  # only the lazy copies refer to the layers, each until its evaluation
            self._evaluate_layers()
        self._rows.update(newcomers.rows)
        self._reported.update(newcomers.rows)

    def _build_pending(
        self,
        joining: Sequence[JoiningRow[K]],
        pasts: Sequence[list[int]],
        layers: list[LayerCache],
        tokens: mx.array,
        logprobs: list[mx.array],
    ) -> PendingRows[K]:
        """Return a batch in the state after its constructor's forward: the caches contain `pasts`, and `tokens` (rows,)
        come next."""
        count = len(joining)
        uids = list(range(self._next, self._next + count))
        self._next += count
        batch = GenerationBatch(self._model, [], mx.array([], mx.uint32), [], [], [], choose_greedily, [], [], [])
        state = cast("Any", batch)
        state.uids, state.prompt_cache, state.tokens = uids, layers, [past.copy() for past in pasts]
        state.samplers = [joining_row.guard.sampler for joining_row in joining]
        state.logits_processors = [list(joining_row.guard.processors) for joining_row in joining]
        state.stop_sequences, state.max_tokens = [NO_STOPS] * count, [NO_LIMIT] * count
        state._next_tokens, state._next_logprobs = tokens, logprobs
        state._token_context = [TokenBuffer(past) for past in pasts]
        state._num_tokens, state._matchers = [0] * count, [NO_STOPS.matcher() for _ in uids]
        evaluate(tokens, logprobs)
        return PendingRows(batch, dict(zip(uids, joining, strict=True)))

    def wait(self) -> None:
        """Wait for the launched step, so that later work can be timed. Exceptions of the step propagate; the whole
        batch must then be discarded."""
        if self._batch is not None:
            evaluate(cast("Any", self._batch)._next_tokens)

    def record_call(self, seconds: float) -> None:
        """Record `seconds` as the duration of the last call that launched a step, for `take_call`."""
        self._called = seconds

    def take_call(self) -> float | None:
        """Return and clear the duration in seconds that `record_call` recorded. Return None if none was recorded since
        the last `take_call`."""
        called, self._called = self._called, None
        return called

    def step(self) -> list[NextToken[K]]:
        """Return the tokens of the launched step, and launch the following step. Without rows, return an empty list.

        A first token that `join` has returned is left out. The first tokens of rows from `prepare_rows` come from the
        step that this call launches; the call waits for them and returns them. Exceptions propagate; the whole batch
        must then be discarded.
        """
        if self._batch is None:
            return []
        self._update_maskers(self._batch)
        found = self._batch.next()
        self._steps += 1
        if self._steps % EVALUATION_INTERVAL_STEPS == 0:
            launch_evaluation([layer.state for layer in self._batch.prompt_cache])
        reported, self._reported, self._requested = self._reported, self._requested, set()
        tokens = [
            NextToken(self._rows[response.uid].row, response.token, response.logprobs)
            for response in found
            if response.uid not in reported
        ]
        return (
            tokens + [token for uid, token in self._await_launched() if uid in self._reported]
            if self._reported
            else tokens
        )

    def take_last_tokens(self) -> list[NextToken[K]]:
        """Return the tokens of the launched step, and launch no further step. For use when all rows end with these
        tokens.

        If a row joined since the last step, its token in flight is known to the caller or still part of the prompt.
        This method then calls `step`, which launches a further step. Return an empty list without rows. Exceptions
        propagate; the whole batch must then be discarded.
        """
        if self._batch is None or self._reported:
            return self.step()
        self._reported.update(self._batch.uids)
        return [token for _, token in self._await_launched()]

    def _await_launched(self) -> list[tuple[int, NextToken[K]]]:
        """Wait for the launched step; return its tokens with the uids of their rows."""
        assert self._batch is not None  # noqa: S101 the callers have checked it
        state, uids = cast("Any", self._batch), self._batch.uids
        tokens = cast("list[int]", state._next_tokens.tolist())
        return [
            (uid, NextToken(self._rows[uid].row, token, logprobs))
            for uid, token, logprobs in zip(uids, tokens, state._next_logprobs, strict=True)
        ]

    def _update_maskers(self, batch: GenerationBatch) -> None:
        """Wait for the tokens of the launched step and pass them to the maskers, which need them for the next step."""
        maskers = [None if uid in self._requested else self._rows[uid].guard.masker for uid in batch.uids]
        if any(masker is not None for masker in maskers):
            tokens = cast("list[int]", cast("Any", batch)._next_tokens.tolist())
            for masker, token in zip(maskers, tokens, strict=True):
                if masker is not None:
                    masker.add_id(token)

    def list_errors(self) -> list[tuple[K, Exception]]:
        """Return the rows whose sampler or processors have raised, with the exceptions."""
        return [
            (joining_row.row, joining_row.guard.error)
            for joining_row in self._rows.values()
            if joining_row.guard.error is not None
        ]

    def list_rows(self) -> list[K]:
        """Return the rows of the batch."""
        return [joining_row.row for joining_row in self._rows.values()]

    def drop_rows(self, rows: Collection[K]) -> None:
        """Wait for the launched step, then remove rows from the batch and release their memory. Rows that are not in
        the batch are ignored. Exceptions propagate; the whole batch must then be discarded."""
        if self._batch is None:
            return
        uids = {uid for uid, joining_row in self._rows.items() if joining_row.row in rows}
        if not uids:
            return
        for uid in uids:
            del self._rows[uid]
        if not self._rows:
            self.clear()
            return
        self._batch.filter([place for place, uid in enumerate(self._batch.uids) if uid not in uids])
        self._evaluate_layers()

    def get_ids(self, row: K) -> list[int]:
        """Return the token ids in a row's cache: the prompt, and the generated tokens that a step has processed.

        The input of the next step is missing, even if the caller already knows that token. Before its first step, a row
        from `prepare_rows` therefore lacks the last token of its prompt. The row must be in the batch.
        """
        assert self._batch is not None  # noqa: S101  a row is in it
        return list(self._batch.tokens[self._find_place(row)])

    def extract(self, row: K) -> Layers:
        """Return an evaluated copy of a row's cache without padding, for the tokens of `get_ids(row)`. The row must be
        in the batch."""
        assert self._batch is not None  # noqa: S101  a row is in it
        place = self._find_place(row)
        layers: Layers = self._batch.prompt_cache
        return materialize(layers if self._alone else (layer.extract(place) for layer in layers))

    def view(self, row: K) -> Layers | None:
        """Return a view of a row's cache without padding. Return None if the row is not in the batch, or if a layer is
        not a plain cache (`BatchKVCache`). The next step invalidates the view."""
        batch = self._batch
        if batch is None or not any(row is other for other in self.list_rows()):
            return None
        layers: list[Any] = batch.prompt_cache
        if any(type(layer) is not BatchKVCache for layer in layers):
            return None
        place = self._find_place(row)
        padding = cast("list[int]", layers[0].left_padding.tolist())
        return view_row(layers, place, layers[0]._idx, padding[place])

    def _find_place(self, row: K) -> int:
        assert self._batch is not None  # noqa: S101 the callers have checked it
        return next(place for place, uid in enumerate(self._batch.uids) if self._rows[uid].row is row)

    def sum_nbytes(self) -> int:
        """Return the bytes of the caches of all rows, with padding."""
        return 0 if self._batch is None else sum_nbytes(self._batch.prompt_cache)

    def clear(self) -> None:
        """Wait for the launched step, then release the caches of all rows. Their memory is freed even if callers or an
        exception still refer to the batch."""
        if self._batch is not None:
            mx.synchronize()
            self._batch.prompt_cache.clear()
            self._batch = None

    def _evaluate_layers(self) -> None:
        assert self._batch is not None  # noqa: S101 the callers have checked it
        for layer in self._batch.prompt_cache:
            evaluate(layer.state)


def _compute_logits(model: TextModel, tokens: mx.array, cache: Layers) -> mx.array:
    """Run a forward of the model, lazily, as `TextModel` does, but return logits in float32.

    With 16 bits, log probabilities would be rounded to steps of up to 1/8.
    """
    return model(tokens, cache=cache).astype(mx.float32)


def _draw_first(guard: RowSampler, ids: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Sample a row's first token; return it, shape (1,), with its log probabilities, shape (vocabulary,)."""
    for processor in guard.processors:
        logits = processor(ids, logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return guard.sampler(logprobs), logprobs[0]
