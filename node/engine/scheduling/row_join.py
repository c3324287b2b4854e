"""Join of prefilled rows with their decode batches, each through the gate, because a join copies a batch."""

import time
from functools import partial

import mlx.core as mx

from node.engine.kv.kv_cache import Layers, view_row
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.process.interface import NativeCallKind
from node.engine.requests.sequence import Row
from node.engine.scheduling.batch_recovery import BatchRecovery
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_batch import DecodeBatch, JoiningRow, NextToken, PendingRows
from node.engine.scheduling.decode_loop import DecodeLoop
from node.engine.scheduling.prefill import Prefill, create_row_sampler, group_by_batch
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.row_state import RowEvent
from wire.refusals import Refused

FIRST_JOIN_SECONDS = 10.0
"""Expected seconds that are published for each join. Most joins take less, but the first join compiles kernels."""


class RowJoin:
    """Join of the rows of prefilled prompts with their decode batches."""

    def __init__(
        self,
        requests: RequestTable,
        batches: BatchTable,
        recovery: BatchRecovery,
        decode_loop: DecodeLoop,
        forwards: GatedForwards,
        prefixes: PrefixCacheManager,
    ) -> None:
        self._requests = requests
        self._batches = batches
        self._recovery = recovery
        self._decode_loop = decode_loop
        self._forwards = forwards
        self._prefixes = prefixes

    def join_prefill(self, prefill: Prefill, logits: mx.array) -> Refused | None:
        """Join the rows of a prompt to their decode batches, and output their first tokens. Return None if all rows
        have joined; otherwise the gate's refusal of the rows without room, whose join must be repeated later.

        Each join passes the gate, because it copies a batch layer by layer. `logits` (1, vocabulary) are the logits
        after the last token of the prompt. If the join raises, the other rows of the batch are rebuilt before the
        exception propagates. Raise `Halted` if the engine was halted.
        """
        tokens = list[NextToken[Row]]()
        refused = self._join_batches(prefill, logits, tokens)
        now = time.monotonic()
        if tokens:
            prefill.sequence.mark_joined(now)
        if refused is None:
            self._requests.dequeue(prefill)
        self._decode_loop.add_tokens(prefill.loaded_model, tokens, now)
        return refused

    def _join_batches(self, prefill: Prefill, logits: mx.array, tokens: list[NextToken[Row]]) -> Refused | None:
        """Join rows batch by batch while there is room, and add their first tokens to `tokens`. Return the refusal of
        the first batch without room; None if all rows have joined. Rows that have joined before a refusal stay
        joined."""
        loaded_model, cache = prefill.loaded_model, prefill.cache
        assert cache is not None  # noqa: S101 logits come from a forward, which has one
        estimator, ledger = loaded_model.estimator, loaded_model.ledger
        parts = group_by_batch(loaded_model, prefill.rows)
        for rows in parts:
            rows[0].commitment.record_prompt(len(prefill.ids))
            grown, layers = ledger.compute_joined_bytes(rows[0].commitment, len(rows)), len(cache)
            width = ledger.count_joined_rows(rows[0].commitment) + len(rows)
            refused = self._forwards.check(GateSite.JOIN, estimator.estimate_charged_join(grown, layers, width))
            if refused is not None:
                return refused
            view = partial(self._batches.view_row, loaded_model.name, rows[0])
            self._prefixes.store_prompt(prefill, grown // max(1, layers), view)
            active_bytes = mx.get_active_memory()
            tokens += self._join_batch(prefill, rows, cache if rows is parts[-1] else cache.copy(), logits)
            above = self._forwards.peak_tracker.measure_peak_above_mark() - max(
                0, mx.get_active_memory() - active_bytes
            )
            estimator.observe_join(width, above - estimator.estimate_join(grown, layers))
            for row in rows:
                row.apply(RowEvent.JOINED)
                row.commitment.record_join(len(prefill.ids))
            prefill.remove_joined()
        return None

    def _join_batch(self, prefill: Prefill, rows: list[Row], cache: Layers, logits: mx.array) -> list[NextToken[Row]]:
        loaded_model, sequence = prefill.loaded_model, prefill.sequence
        ledger = loaded_model.ledger
        number = ledger.get_batch_number(rows[0].commitment)
        batch = self._batches.get(loaded_model, number) or DecodeBatch(loaded_model.model, alone=ledger.alone)
        self._batches.put(loaded_model, number, batch)
        joining = [JoiningRow(row, create_row_sampler(sequence, row)) for row in rows]
        try:
            with self._forwards.run_native(NativeCallKind.JOIN, loaded_model.name, sequence.number, FIRST_JOIN_SECONDS):
                return batch.join(joining, prefill.ids, cache, logits)
        except Exception as error:
            raise_if_device_lost(error)
            self._recovery.rebuild_batch(loaded_model, number, error, failing=rows)
            raise

    def join_packed(self, members: list[Prefill], cache: Layers) -> bool:
        """Join the rows of packed prompts to their decode batch. Return False if the gate refuses. `cache` has the keys
        and values of all tokens of each prompt but the last.

        Exceptions of the join propagate. If the batch broke, its other rows are rebuilt first. Raise `Halted` if the
        engine was halted.
        """
        loaded_model = members[0].loaded_model
        ledger, estimator = loaded_model.ledger, loaded_model.estimator
        longest = max(members, key=lambda prefill: prefill.stored_tokens).rows[0].commitment
        grown, layers = ledger.compute_joined_bytes(longest, len(members)), len(cache)
        copied = estimator.estimate_join(grown, layers)
        rows = ledger.count_joined_rows(longest) + len(members)
        if self._forwards.check(GateSite.JOIN, estimator.estimate_charged_join(grown, layers, rows)) is not None:
            return False
        for place, prefill in enumerate(members):
            view = partial(self._batches.view_row, loaded_model.name, prefill.rows[0])
            self._prefixes.store_packed(prefill, view_row(cache, place, len(prefill.ids) - 1), copied, view)
        number = ledger.get_batch_number(longest)
        batch = self._batches.get(loaded_model, number) or DecodeBatch(loaded_model.model)
        joining = [
            JoiningRow(prefill.rows[0], create_row_sampler(prefill.sequence, prefill.rows[0])) for prefill in members
        ]
        with self._forwards.run_native(NativeCallKind.JOIN, loaded_model.name, 0, FIRST_JOIN_SECONDS):
            newcomers = batch.prepare_rows(joining, [prefill.ids for prefill in members], cache)
            self._add_prepared(loaded_model, number, batch, newcomers)
        self._end_prefills(members, time.monotonic())
        return True

    def _add_prepared(
        self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row], newcomers: PendingRows[Row]
    ) -> None:
        try:
            batch.add_prepared(newcomers)
        except Exception as error:
            raise_if_device_lost(error)
            self._recovery.rebuild_batch(loaded_model, number, error)
            raise
        self._batches.put(loaded_model, number, batch)

    def _end_prefills(self, members: list[Prefill], now: float) -> None:
        for prefill in members:
            self._requests.dequeue(prefill)
            prefill.rows[0].commitment.record_join(prefill.stored_tokens)
            prefill.sequence.mark_joined(now)
            prefill.sequence.mark_sent(now)
        for prefill in members:
            with self._recovery.fail_on_illegal_event(prefill.sequence):
                prefill.rows[0].apply(RowEvent.JOINED)
