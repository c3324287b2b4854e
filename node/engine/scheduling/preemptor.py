"""Preemption in the scheduler: release memory and rows of chosen requests, and let them continue when there is room.

`rules.preemption` chooses the requests. When a request returns, its tokens that are not in the prefix cache are
prefilled again. A request that cannot be preempted ends.
"""

import structlog

from node.engine.kv.commitments import Commitment
from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.batch_recovery import BatchRecovery
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS, compute_return_tokens
from node.engine.scheduling.rules.preemption import (
    choose_for_key,
    choose_victim,
    find_first_preempted,
    find_newest_holder,
    next_to_return,
    should_preempt,
)
from node.engine.scheduling.rules.row_state import RowEvent
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import WeightedKey
from wire.refusals import FailureCode, RefusalCode, Refused

log = structlog.get_logger("engine.generation")


class Preemptor:
    """Preemption of requests for lack of memory or rows, and their return. `floor`: tokens of the smallest chunk."""

    def __init__(
        self,
        requests: RequestTable,
        recovery: BatchRecovery,
        forwards: GatedForwards,
        floor: int,
    ) -> None:
        self._requests = requests
        self._recovery = recovery
        self._forwards = forwards
        self._floor = floor
        self.return_at = 0.0
        """Monotonic time from which the next preempted request may return."""

    # lack of memory

    def end_newest(self, refused: Refused) -> bool:
        """End the newest request that has tokens in a cache, and count it (`GatedForwards.count_shed`). Return False if
        there is no such request.

        Refuse the request with `refused` if none of its tokens was delivered; otherwise fail it with
        `FailureCode.MEMORY_PRESSURE`.
        """
        newest = find_newest_holder(self._requests.live.values())
        if newest is None:
            return False
        self._forwards.count_shed()
        self._recovery.end_for_memory(newest, refused, FailureCode.MEMORY_PRESSURE)
        return True

    def release_over_cap(self) -> None:
        """Check the memory after a forward or a step. If the engine is over its cap minus leases, preempt or end the
        newest request that has tokens in a cache.

        A model load in progress is aborted first, which may be enough. `release_memory` describes when the request ends
        and when it is preempted.
        """
        over = self._forwards.check_cap()
        newest = None if over is None else find_newest_holder(self._requests.live.values())
        if over is not None and newest is not None:
            self.release_memory(newest, over, over_cap=True)

    def release_for(self, row: Row, refused: Refused) -> None:
        """Preempt or end one request for a row that must grow: the request of `choose_victim`, else the row's own.

        `choose_victim` may also choose the row's own request. `release_memory` describes when the request ends and when
        it is preempted.
        """
        self.release_memory(choose_victim(self._requests.list_running()) or row.sequence, refused)

    def release_memory(self, sequence: Sequence, refused: Refused, *, over_cap: bool = False) -> None:
        """Preempt a request, or end it, because its memory does not suffice. `over_cap`: the engine is over its cap; an
        end is then counted (`GatedForwards.count_shed`).

        A request without delivered tokens is refused with `refused`, and the router places the request again. A request
        with delivered tokens is preempted if memory may become free, or if the memory cannot be read. Otherwise the
        request fails with `FailureCode.NO_HEADROOM`.
        """
        unreadable = refused.code is RefusalCode.UNREADABLE
        if should_preempt(sequence, unreadable=unreadable, others=self._may_free_memory(1)):
            self.preempt(sequence)
            release_free_memory()
        else:
            if over_cap:
                self._forwards.count_shed()
            self._recovery.end_for_memory(sequence, refused, FailureCode.NO_HEADROOM)

    def _may_free_memory(self, waiting: int) -> bool:
        """Return whether memory may become free: more than `waiting` requests are live, or the recent peak will
        fall."""
        return len(self._requests.live) > waiting or self._forwards.find_peak_expiry() is not None

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a request: release its memory. Its tokens are prefilled again when memory is available."""
        rows = list(sequence.iterate_active_rows())
        self._requests.clear_prefills(sequence)
        self._recovery.drop_rows(self._recovery.get_model(sequence), rows)
        for row in rows:
            row.commit(Commitment(0))
        self._requests.add_preempted(sequence)
        self._forwards.count_preemption()
        with self._recovery.fail_on_illegal_event(sequence):
            for row in rows:
                row.apply(RowEvent.PREEMPTED)
        log.warning(
            "preempted",
            request=sequence.number,
            request_id=sequence.request.request_id,
            left=len(self._requests.live),
        )

    # sharing between keys

    def share_rows(self, first: Prefill, free_rows: int) -> None:
        """Preempt requests for the next prompt `first`, if it needs more than the `free_rows` free rows.

        Only requests of keys that hold more rows for their weight than the key of `first` are preempted. None is
        preempted if fair shares do not allow enough preemptions. If the first choice of a preempted request decodes,
        its cache is stored in the prefix cache.
        """
        holding = [(sequence, self._count_held_rows(sequence)) for sequence in self._requests.list_running()]
        for sequence in choose_for_key(first.weighted_key, first.width, first.width - free_rows, holding):
            self._preempt_chosen(sequence, keep=True)

    def _count_held_rows(self, sequence: Sequence) -> int:
        """Return the number of rows that a request occupies: decoding rows, and rows of its started prefills."""
        started = sum(
            prefill.width for prefill in self._requests.prefills if prefill.started and prefill.sequence is sequence
        )
        return started + sum(row.commitment.is_joined for row in sequence.iterate_active_rows())

    def preempt_for_key(self, key: WeightedKey, need: int, missing_bytes: int) -> bool:
        """Preempt requests of the keys that hold the most memory, for a request of `key`. Return whether any
        was preempted.

        `need` is the memory of that request in bytes, and `missing_bytes` the part for which there is no room. No
        request is preempted if fair shares do not allow enough preemptions.
        """
        holding = [(sequence, self._compute_committed_bytes(sequence)) for sequence in self._requests.list_running()]
        chosen = choose_for_key(key, need, missing_bytes, holding)
        for sequence in chosen:
            self._preempt_chosen(sequence, keep=False)
        return bool(chosen)

    def _compute_committed_bytes(self, sequence: Sequence) -> int:
        kv = self._recovery.get_model(sequence).kv
        return sum(compute_row_bytes(kv, row.commitment.committed_tokens) for row in sequence.iterate_active_rows())

    def _preempt_chosen(self, sequence: Sequence, *, keep: bool) -> None:
        """Preempt a request for another key. With `keep`, only its rows are needed, not its memory. The cache of its
        first choice is then stored if it decodes, and free buffers are not returned, which would take 70 ms."""
        if keep:
            joined = [row for row in sequence.iterate_active_rows() if row.commitment.is_joined]
            self._recovery.store_rows(self._recovery.get_model(sequence), joined)
        if sequence in self._requests:  # a batch that broke may have ended it
            sequence.mark_yielded()
            self.preempt(sequence)
            if not keep:
                release_free_memory()

    # return

    def compute_required_bytes(self, key: str | None) -> int:
        """Return the bytes that the oldest preempted request that precedes a new request of the API key `key` needs to
        continue. Return 0 if there is no such request.

        A request that was preempted for another key precedes only requests of its own key. With `key` None, all
        preempted requests count.
        """
        oldest = find_first_preempted(self._requests.preempted, key)
        return 0 if oldest is None else self._compute_needed_bytes(oldest)

    def return_next(self, now: float, free_rows: int) -> None:
        """Queue the prefill of the oldest preempted request if the gate passes it. `now` is the monotonic time.

        At most one request is checked every `GATE_RETRY_SECONDS`. A request that was preempted for another key returns
        only if `free_rows` suffice. A request without room ends if no memory may become free, but never because the
        memory is unreadable.
        """
        if not self._requests.preempted or now < self.return_at:
            return
        self.return_at = now + GATE_RETRY_SECONDS
        sequence = next_to_return(self._requests.preempted, free_rows)
        if sequence is not None:
            self._return_request(sequence)

    def _return_request(self, sequence: Sequence) -> None:
        """Queue the prefill of a preempted request if there is room. End the request if the memory can be read, but no
        memory may become free."""
        loaded_model = self._recovery.get_model(sequence)
        refused = self._forwards.check(GateSite.PREFLIGHT, self._compute_needed_bytes(sequence))
        if refused is None:
            rows = list(sequence.iterate_active_rows())
            with self._recovery.fail_on_illegal_event(sequence):
                for row in rows:
                    row.apply(RowEvent.RETURNED)
                self._requests.end_preemption(sequence)
                for row in rows:
                    (commitment,) = loaded_model.ledger.commit(_compute_length(row), 1)
                    row.commit(commitment)
                    self._recovery.queue_prefill(loaded_model, sequence, [row], row.list_token_ids())
        elif refused.code is not RefusalCode.UNREADABLE and not self._may_free_memory(len(self._requests.preempted)):
            self._recovery.end_for_memory(sequence, refused, FailureCode.NO_HEADROOM)

    def _compute_needed_bytes(self, sequence: Sequence) -> int:
        """Return the bytes that a preempted request needs to return: the cost of each row, and one forward."""
        loaded_model = self._recovery.get_model(sequence)
        lengths = [_compute_length(row) for row in sequence.iterate_active_rows()]
        forward = max(loaded_model.estimator.estimate_chunk(self._floor, length) for length in lengths)
        return sum(loaded_model.ledger.compute_cost(length, 1) for length in lengths) + forward


def _compute_length(row: Row) -> int:
    """Return the tokens to commit for a row that returns: its known tokens, and one growth."""
    shape = row.sequence.shape
    return compute_return_tokens(len(row.list_token_ids()), shape.prompt + shape.limit)
