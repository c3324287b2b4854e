"""Queue of prefills: choose which prompts are prefilled next, and how large their chunk is."""

from collections.abc import Iterator

from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.chunk_policy import affordable_tokens, next_prefill, shared_budget
from node.engine.scheduling.rules.prefill_order import coalesce_until, in_service_order, startable, started_rows
from wire.capacity.fairness import PrefillFairness


class PrefillQueue:
    """Choices of the next prefills. `batch`: maximum rows that decode at once. `chunk`: maximum tokens of a forward.
    `floor`: tokens of the smallest chunk to which the gate may shrink one."""

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

    def choices(self, now: float) -> list[Prefill]:
        """Return the prefills that may continue at the monotonic time `now`. Prefills that wait for memory are left
        out."""
        found = startable(self._requests.prefills, self.free_rows(), self._batches.rows_by_key)
        return [one for one in found if one.retry_at <= now]

    def free_rows(self) -> int:
        """Return how many more rows may start in addition to decoding and prefilling ones."""
        return self._batch - self._batches.rows() - started_rows(self._requests.prefills)

    def unclaimed_rows(self) -> int:
        """Return how many rows are free after all queued prompts have started; negative if there are too few."""
        return self._batch - self._batches.rows() - sum(one.width for one in self._requests.prefills)

    def next_unstarted(self) -> Prefill | None:
        """Return the next prompt that gets rows; None if all have started."""
        return next(self._unstarted(), None)

    def _unstarted(self) -> Iterator[Prefill]:
        if all(one.started for one in self._requests.prefills):
            return iter(())
        return in_service_order(self._requests.prefills, self._batches.rows_by_key())

    def wait_until(self, choices: list[Prefill]) -> float:
        """Return the time until which `choices` wait for packing; 0.0 without a wait. They wait if no row decodes and
        several requests were live recently."""
        if self._batches or any(one.started or not one.loaded_model.plain for one in choices):
            return 0.0
        if sum(one.width for one in choices) >= self._batch:
            return 0.0
        return coalesce_until([one.arrived for one in choices], self._requests.crowded_at)

    def schedule_next(self, now: float) -> list[Prefill]:
        """Return the prompts to prefill now, in one forward if there are several; an empty list if none may
        continue."""
        choices = self.choices(now)
        if not choices or now < self.wait_until(choices):
            return []
        self._turn += 1
        shown = [(one.left, one.arrived, one.owner) for one in choices]
        first = choices[next_prefill(shown, self._turn, self._fairness)]
        return self._members(first, choices)

    def _members(self, first: Prefill, choices: list[Prefill]) -> list[Prefill]:
        """Return the prompts to pack with `first`, if there is time for all of them at once."""
        if self.affordable(first) < first.left:
            return [first]
        seconds = shared_budget(self._batches.step_seconds(), len(choices), self._batches.rows())
        most = first.loaded_model.stats.pace.tokens(seconds, 0, self._chunk)
        return self._packed.select_batch(first, choices, most)

    def count_prefilled(self, prefill: Prefill, tokens: int) -> None:
        """Count prefilled tokens for the fairness between keys."""
        self._fairness.has_read(prefill.owner, max(0, tokens))

    def chunk_tokens(self, prefill: Prefill) -> int:
        """Return the tokens of the next chunk, sized by time. The last chunk returns logits: it has at most `tail`
        tokens, or is split so that its last token is a chunk of its own."""
        count = min(self.affordable(prefill), prefill.left)
        return count - 1 if count == prefill.left > prefill.loaded_model.tail else count

    def affordable(self, prefill: Prefill) -> int:
        """Return the tokens of a prompt that fit into the time of the next chunk."""
        return affordable_tokens(
            prefill.loaded_model.stats.pace,
            prefill.left,
            prefill.written,
            self._batches.step_seconds(),
            self._chunk,
        )

    def required_bytes(self) -> int:
        """Return the bytes that the prefills which wait for memory need."""
        waiting = [
            one.loaded_model.estimator.chunk(self._floor, len(one.ids))
            for one in self._requests.prefills
            if one.retry_at > 0
        ]
        return max(waiting, default=0)
