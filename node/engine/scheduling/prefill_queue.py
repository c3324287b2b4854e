"""Queue of prefills: choose which prompts are prefilled next, and how large their chunk is."""

from collections.abc import Iterator

from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.chunk_policy import compute_affordable_tokens, compute_shared_budget, next_prefill
from node.engine.scheduling.rules.prefill_order import (
    compute_packing_time,
    count_started_rows,
    iterate_in_service_order,
    select_startable,
)
from wire.capacity.fairness import PrefillFairness


class PrefillQueue:
    """Choices of the next prefills. `batch`: maximum rows that decode at once. `chunk`: maximum tokens of a forward.
    `floor`: minimum tokens to which the gate may shrink a chunk."""

    def __init__(
        self,
        requests: RequestTable,
        batches: BatchTable,
        packed: PackedPrefill,
        batch: int,
        chunk: int,
        floor: int,
    ) -> None:
        self._requests = requests
        self._batches = batches
        self._packed = packed
        self._batch = batch
        self._chunk = chunk
        self._floor = floor
        self._turn = 0
        self._fairness = PrefillFairness()

    def list_choices(self, now: float) -> list[Prefill]:
        """Return the prefills that may start or continue at the monotonic time `now` (`select_startable`). Prefills
        that the gate refused are left out until their `retry_at`."""
        found = select_startable(self._requests.prefills, self.count_free_rows(), self._batches.count_rows_by_key)
        return [prefill for prefill in found if prefill.retry_at <= now]

    def count_free_rows(self) -> int:
        """Return the number of free rows: the maximum, minus the rows that decode or whose prefill has started."""
        return self._batch - self._batches.count_rows() - count_started_rows(self._requests.prefills)

    def count_unclaimed_rows(self) -> int:
        """Return the number of rows that would be free if all queued prompts had started; negative if there are too
        few rows."""
        return self._batch - self._batches.count_rows() - sum(prefill.width for prefill in self._requests.prefills)

    def find_next_unstarted(self) -> Prefill | None:
        """Return the queued prompt that gets rows next; None if all have started."""
        return next(self._iterate_unstarted(), None)

    def _iterate_unstarted(self) -> Iterator[Prefill]:
        if all(prefill.started for prefill in self._requests.prefills):
            return iter(())
        return iterate_in_service_order(self._requests.prefills, self._batches.count_rows_by_key())

    def compute_wait_end(self, choices: list[Prefill]) -> float:
        """Return the monotonic time until which `choices` wait for packing; 0.0 if they do not wait. They wait only if
        several requests were live recently and no row decodes. They do not wait if they fill a batch, or if one of them
        has started or cannot be packed."""
        if self._batches or any(prefill.started or not prefill.loaded_model.plain for prefill in choices):
            return 0.0
        if sum(prefill.width for prefill in choices) >= self._batch:
            return 0.0
        return compute_packing_time([prefill.arrived for prefill in choices], self._requests.crowded_at)

    def schedule_next(self, now: float) -> list[Prefill]:
        """Choose the prompts to prefill at `now` (monotonic seconds), in one forward if there are several. Return an
        empty list if none may start or continue, or if all wait for packing.

        Turns alternate between the shortest prompt and the next prompt by age and fairness (`next_prefill`). A call
        that returns prompts counts as a turn, and the caller must prefill them.
        """
        choices = self.list_choices(now)
        if not choices or now < self.compute_wait_end(choices):
            return []
        self._turn += 1
        waiting = [(prefill.left, prefill.arrived, prefill.weighted_key) for prefill in choices]
        first = choices[next_prefill(waiting, self._turn, self._fairness)]
        return self._select_members(first, choices)

    def _select_members(self, first: Prefill, choices: list[Prefill]) -> list[Prefill]:
        """Return the prompts to pack with `first`, if there is time for all of them at once."""
        if self.compute_affordable_tokens(first) < first.left:
            return [first]
        seconds = compute_shared_budget(self._batches.sum_step_seconds(), len(choices), self._batches.count_rows())
        most = first.loaded_model.stats.pace.fit_tokens(seconds, 0, self._chunk)
        return self._packed.select_batch(first, choices, most)

    def count_prefilled(self, prefill: Prefill, tokens: int) -> None:
        """Count `tokens` tokens that a forward has computed for a prompt, for the fairness between keys."""
        self._fairness.count_prefilled(prefill.weighted_key, tokens)

    def compute_chunk_tokens(self, prefill: Prefill) -> int:
        """Return the number of tokens in the next chunk (`compute_affordable_tokens`). The last chunk of a prompt
        computes logits. If that chunk would have more tokens than `LoadedModel.tail`, leave its last token to a further
        chunk."""
        count = min(self.compute_affordable_tokens(prefill), prefill.left)
        return count - 1 if count == prefill.left > prefill.loaded_model.tail else count

    def compute_affordable_tokens(self, prefill: Prefill) -> int:
        """Return the number of tokens of a prompt that fit into the time of its next chunk.

        The minimum is `MIN_CHUNK_TOKENS`, the maximum the chunk size of this engine.
        """
        return compute_affordable_tokens(
            prefill.loaded_model.stats.pace,
            prefill.left,
            prefill.stored_tokens,
            self._batches.sum_step_seconds(),
            self._chunk,
        )

    def compute_required_bytes(self) -> int:
        """Return the bytes, without KV, of the next chunk of a prefill that waits for memory, if it has `floor` tokens.
        The result is the maximum over all such prefills; 0 without any."""
        waiting = [
            prefill.loaded_model.estimator.estimate_chunk(self._floor, len(prefill.ids))
            for prefill in self._requests.prefills
            if prefill.retry_at > 0
        ]
        return max(waiting, default=0)
