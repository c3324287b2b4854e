"""Memory needs of requests for one model of a report, as `arithmetic.estimate_request_need` computes them.

Placement computes the needs of many requests between two reports of a node. `ModelNeeds` computes the values of a
report once: the bytes of its decode batches, and the transient of their steps. A property test compares both modules.
"""

from msgspec import Struct

from wire.capacity.arithmetic import (
    compute_last_chunk_tokens,
    estimate_prefill_transient,
    estimate_step_transient,
)
from wire.capacity.batches import WASTE_SHARE, can_join, compute_row_bytes
from wire.report import BatchGroup, KvParameters, Model, TransientModel


class _BatchCosts(Struct, frozen=True, gc=False):
    """Costs of a decode batch for a new row that is not longer than the longest row of the batch."""

    group: BatchGroup
    shortest: int
    """Fewest tokens of a row that may join: the padding of a shorter one is too large (`can_join`)."""
    longest: int
    """Tokens of the longest row."""
    row_bytes: int
    """KV bytes that the row adds."""
    step_bytes: int
    """Transient bytes of a decode step with the row."""

    def compute_longer_row_bytes(self, length: int, kv: KvParameters) -> int | None:
        """Return the KV bytes that a row of more than `longest` tokens adds; None if it may not join."""
        if not can_join(self.group, length, kv):
            return None
        grown = compute_row_bytes(kv, length)
        return grown + self.group.rows * (grown - self.row_bytes)  # the other rows are padded to the new one


class ModelNeeds:
    """Memory needs in bytes of requests for one model, without the weights of the model.

    The coefficients in `Model.forward` must not be negative, so that a further row never lowers the memory of a decode
    step. `router.placement.sanitize_report` removes models with negative coefficients.
    """

    __slots__ = ("_batches", "_forward", "_highest", "_is_measured", "_kv", "_model")

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kv = model.kv
        self._forward = forward = model.forward
        self._batches = tuple([_measure_batch(group, model.kv, forward) for group in model.groups])
        self._highest = max(
            [model.transient, *[estimate_step_transient(forward, group.rows, group.longest) for group in model.groups]]
        )
        self._is_measured = bool(forward.floor or model.uncovered)

    def estimate(self, prompt_tokens: int, output_tokens: int, choices: int) -> int:
        """Return the bytes that a request needs in addition to the weights: KV of all choices, and transient bytes."""
        length, best, row_bytes = prompt_tokens + output_tokens, None, 0
        for batch in self._batches:
            if length > batch.longest:
                grown = batch.compute_longer_row_bytes(length, self._kv)
            else:
                grown = batch.row_bytes if length >= batch.shortest else None
            if grown is not None and (best is None or grown < row_bytes):
                best, row_bytes = batch, grown
        highest, new_rows = self._highest, choices
        if best is not None:  # the first row joins this batch, the other rows form a new batch
            new_rows -= 1
            step = best.step_bytes if length <= best.longest else self._estimate_step(best.group.rows + 1, length)
            if step > highest:
                highest = step
        if new_rows:
            row_bytes += new_rows * compute_row_bytes(self._kv, length)
            highest = max(highest, self._estimate_step(new_rows, length))
        if self._is_measured:
            widest = new_rows if best is None else max(new_rows, best.group.rows + 1)
            highest = self._add_measured(highest, prompt_tokens, widest)
        return row_bytes + highest

    def _add_measured(self, highest: int, prompt: int, width: int) -> int:
        """Return the highest transient bytes with a prefill, plus `Model.uncovered` if `width` is not covered."""
        if self._forward.floor and prompt:
            highest = max(highest, self._estimate_prefill(prompt))
        return highest + self._model.uncovered if width > self._model.covered_rows else highest

    def _estimate_step(self, rows: int, longest: int) -> int:
        return estimate_step_transient(self._forward, rows, longest)

    def _estimate_prefill(self, prompt: int) -> int:
        """Return the transient bytes of the smallest prefill chunk at the start and at the end of a prompt."""
        forward = self._forward
        chunk = min(prompt, forward.floor)
        end = min(chunk, compute_last_chunk_tokens(forward))
        return max(
            estimate_prefill_transient(forward, chunk, prompt - chunk),
            estimate_prefill_transient(forward, end, prompt - end, last=True),
        )


def _measure_batch(group: BatchGroup, kv: KvParameters, forward: TransientModel) -> _BatchCosts:
    rows, longest = group.rows + 1, group.longest
    total = rows * longest
    padding = int(WASTE_SHARE * total)
    # without bytes per token, padding takes no memory
    shortest = total - group.tokens - max(padding, kv.waste // kv.per_token) if kv.per_token else 0
    return _BatchCosts(
        group, shortest, longest, compute_row_bytes(kv, longest), estimate_step_transient(forward, rows, longest)
    )
