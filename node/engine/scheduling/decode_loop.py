"""Decode loop: one token for every row of every batch, growth of commitments, and the end of rows."""

import time

import structlog
from msgspec.structs import replace

from node.engine.grammar.matcher import GrammarFailed
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS, NativeCallKind
from node.engine.requests.sequence import Row
from node.engine.scheduling.batch_recovery import BatchRecovery, format_error
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_batch import DecodeBatch, NextToken
from node.engine.scheduling.preemptor import Preemptor
from node.engine.scheduling.rules.commitment_length import compute_growth_tokens
from node.engine.scheduling.step_output import StepOutput
from node.engine.text.logprobs import compute_logprob
from wire.refusals import FailureCode, RefusalCode

OUTLIER_FACTOR = 4
"""Factor of the estimate above which the memory of a single step is ignored, because memory of ended rows is freed
late. A real increase also shows in the next step, which is recorded."""

log = structlog.get_logger("engine.generation")


class DecodeLoop:
    """Decoder of the rows of all batches."""

    def __init__(
        self,
        batches: BatchTable,
        recovery: BatchRecovery,
        preemptor: Preemptor,
        output: StepOutput,
        forwards: GatedForwards,
    ) -> None:
        self._batches = batches
        self._recovery = recovery
        self._preemptor = preemptor
        self._output = output
        self._forwards = forwards
        self._outlier = False
        """Whether the last measured step was far above its estimate."""

    def step(self) -> None:
        """Decode one token for every row of every batch, output its text, and end rows. Raise `Halted` if the engine
        was halted.

        First, commitments that are used up are extended, which may preempt or end a request. A batch whose step raises
        is rebuilt. After each batch, a request is preempted or ended if the engine is over its cap.
        """
        for loaded_model, number, batch in self._batches:
            self._step_batch(loaded_model, number, batch)

    def _step_batch(self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row]) -> None:
        self._grow_commitments(loaded_model, batch)
        if self._batches.get(loaded_model, number) is not batch:
            return
        batch_bytes, stats = batch.sum_nbytes(), loaded_model.stats
        try:
            with self._forwards.run_native(NativeCallKind.DECODE, loaded_model.name, 0, stats.step_seconds) as call:
                tokens = batch.take_last_tokens() if all(_ends_next(row) for row in batch.list_rows()) else batch.step()
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("decode", rows=len(batch))
            self._recovery.rebuild_batch(loaded_model, number, error)
            return
        now = time.monotonic()
        called = batch.take_call()
        if called is not None:
            stats.record_step(called, len(batch))
        batch.record_call(now - call.since)
        self._batches.mark_step(self._forwards.peak_tracker.marks, grew=batch.sum_nbytes() > batch_bytes)
        self.add_tokens(loaded_model, tokens, now)
        self._preemptor.release_over_cap()

    def wait(self) -> None:
        """Wait for the launched steps of all batches, and rebuild a batch whose step raises. Record the duration of
        each step. If there is only one batch, also record the memory of its step, if that can be measured
        (`BatchTable.is_measurable`).

        The wait costs no time, because MLX runs calls one after the other. It separates the times of step and chunk.
        """
        alone = len(self._batches) == 1
        for loaded_model, number, batch in self._batches:
            begun = time.monotonic()
            try:
                with self._forwards.publish_wait(
                    NativeCallKind.DECODE, loaded_model.name, loaded_model.stats.step_seconds
                ):
                    batch.wait()
            except Exception as error:
                raise_if_device_lost(error)
                log.exception("decode", rows=len(batch))
                self._recovery.rebuild_batch(loaded_model, number, error)
                continue
            called = batch.take_call()
            if called is not None:  # None: an earlier call has already waited for the step
                loaded_model.stats.record_step(called + time.monotonic() - begun, len(batch))
                if alone and self._batches.is_measurable(self._forwards.peak_tracker.marks):
                    self._measure_step(loaded_model, batch)

    def _measure_step(self, loaded_model: LoadedModel, batch: DecodeBatch[Row]) -> None:
        """Record the memory of a step that has just ended and did not overlap with a step of another batch."""
        longest = max((row.commitment.stored_tokens for row in batch.list_rows()), default=0)
        taken = self._forwards.peak_tracker.measure_peak_drop()
        outlier = taken > OUTLIER_FACTOR * loaded_model.estimator.estimate_step(len(batch), longest, grows=False)
        if not outlier or self._outlier:
            loaded_model.estimator.observe_step(len(batch), longest, taken)
        self._outlier = outlier

    # tokens

    def add_tokens(self, loaded_model: LoadedModel, tokens: list[NextToken[Row]], now: float) -> None:
        """Add tokens, known since the monotonic time `now`, to the texts of their rows. Output deltas, and end rows.

        Fail the request of a row whose sampling, grammar or text raised.
        """
        for batch in list(self._batches.get_batches(loaded_model).values()):
            for row, error in batch.list_errors():
                self._recovery.fail_request(row.sequence, *_describe_failure(error))
        for token in tokens:
            if not token.row.reason:
                self._add_token(token, now)
        self._recovery.end_rows(loaded_model, [token.row for token in tokens], now)

    def _add_token(self, token: NextToken[Row], now: float) -> None:
        """Add one token to its row's text, and fail the request if that raises.

        Output the row's deltas if the request streams, the row ends, or `FLUSH_INTERVAL_SECONDS` have passed.
        """
        row, sequence = token.row, token.row.sequence
        row.add_id(token.token)
        try:
            self._add_text(row, token)
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("text", request=sequence.number, request_id=sequence.request.request_id)
            self._recovery.fail_request(
                sequence, FailureCode.ENGINE_ERROR, f"its tokens could not be decoded to text: {type(error).__name__}"
            )
            return
        if sequence.request.stream or row.reason or now - sequence.last_token_at >= FLUSH_INTERVAL_SECONDS:
            self._output.add_deltas(row.drain_deltas())
            sequence.mark_sent(now)

    def _add_text(self, row: Row, token: NextToken[Row]) -> None:
        prepared, params = row.sequence.prepared, row.sequence.request.params
        if params.logprobs and token.token not in prepared.eos:
            row.logprobs.append(compute_logprob(token.logprobs, token.token, params.top_logprobs, prepared.token_bytes))
        row.add_token_text(token.token)

    # growth

    def _grow_commitments(self, loaded_model: LoadedModel, batch: DecodeBatch[Row]) -> None:
        """Extend the commitment by at most `KV_GROWTH_TOKENS` tokens for each row that has used all of it."""
        for row in batch.list_rows():
            commitment, shape = row.commitment, row.sequence.shape
            if commitment.stored_tokens >= commitment.committed_tokens:
                more = compute_growth_tokens(commitment.committed_tokens, shape.prompt + shape.limit)
                self._extend_commitment(loaded_model, row, more)

    def _extend_commitment(self, loaded_model: LoadedModel, row: Row, more: int) -> None:
        """Extend a row's commitment by `more` tokens. Until they fit, preempt or end other requests, or the row's own
        request."""
        ledger, estimator = loaded_model.ledger, loaded_model.estimator
        while row.commitment.is_joined and not row.reason:
            step = estimator.estimate_charged_step(self._batches.count_rows(), row.commitment.committed_tokens + more)
            refused = self._forwards.check(GateSite.GROW, ledger.compute_extension_bytes(row.commitment, more) + step)
            if refused is None or refused.code is RefusalCode.UNREADABLE:
                # No new work starts while the memory is unreadable. Running rows continue; `release_over_cap` checks
                # them.
                ledger.extend(row.commitment, more)
                return
            message = f"an answer became longer than expected: {refused.message}"
            self._preemptor.release_for(row, replace(refused, message=message))


def _ends_next(row: Row) -> bool:
    """Return whether the next token of a row is certainly its last token."""
    return len(row.ids) + 1 >= row.sequence.shape.limit


def _describe_failure(error: Exception) -> tuple[str, str]:
    """Return the code and the message for a row's exception: its grammar, which the client sent, or its sampling."""
    if isinstance(error, GrammarFailed):
        return (
            FailureCode.GRAMMAR_FAILED,
            f"the grammar of the request failed: {error}; simplify it or its patterns",
        )
    return FailureCode.ENGINE_ERROR, f"its sampling failed: {format_error(error)}"
