"""Preemption in the scripted engine: release the memory of chosen requests, and let them continue when there is room.

The rules of the text engine (`node.engine.scheduling.rules.preemption`) choose the requests.
"""

from typing import Protocol

from node.engine.memory.gate import GateSite
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS, compute_return_tokens
from node.engine.scheduling.rules.preemption import (
    choose_for_key,
    choose_victim,
    find_first_preempted,
    next_to_return,
    should_preempt,
)
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from wire.frames import Failed, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused


class BatchMemory(Protocol):
    """Interface of the memory of a scripted engine, with its gate. `now` is in monotonic seconds in all methods."""

    def check(self, site: GateSite, now: float, estimate: int = 0) -> Refused | None:
        """Check the gate for `estimate` bytes in addition to the commitments. Return the refusal; None if they fit."""
        ...

    def observe(self, now: float) -> None:
        """Update the recent peak at the monotonic time `now`, because memory was allocated or freed."""
        ...

    def compute_peak_expiry(self, now: float) -> float | None:
        """Return the monotonic time at which the recent peak falls; None if only another reading can change it."""
        ...


class ScriptedPreemptor:
    """Preemptor of the scripted engine: preempts or ends requests for lack of memory or rows, and queues preempted
    requests again.

    `preemptions` counts preemptions of requests. `now` is in monotonic seconds in all methods.
    """

    def __init__(self, table: ScriptedTable, memory: BatchMemory) -> None:
        self._table = table
        self._memory = memory
        self._ends: list[Frame] = []
        self.return_at = 0.0
        """Monotonic time from which the next preempted request may return."""
        self.preemptions = 0

    def drain_ends(self) -> list[Frame]:
        """Return the final frames of the requests that `end` has ended since the last call."""
        ends, self._ends = self._ends, []
        return ends

    # lack of memory

    def release_for(self, sequence: ScriptedSequence, refused: Refused, now: float) -> None:
        """Preempt or end one request for a row of `sequence` that must grow: the choice of `choose_victim`, or
        `sequence` itself if there is no choice.

        `release_memory` describes when the request ends and when it is preempted.
        """
        self.release_memory(choose_victim(self._table.list_active()) or sequence, refused, now)

    def release_memory(self, sequence: ScriptedSequence, refused: Refused, now: float) -> None:
        """Preempt a request, or end it, because its memory does not suffice.

        A request without delivered tokens is refused with `refused`, and the router places the request again. A request
        with delivered tokens is preempted if memory may become free, or if the memory cannot be read. Otherwise the
        request fails with `FailureCode.NO_HEADROOM`.
        """
        unreadable = refused.code is RefusalCode.UNREADABLE
        if should_preempt(sequence, unreadable=unreadable, others=self._may_free_memory(1, now)):
            self.preempt(sequence, for_key=False)
        else:
            self.end(sequence, refused, FailureCode.NO_HEADROOM, now)

    def _may_free_memory(self, waiting: int, now: float) -> bool:
        """Return whether memory may become free: more than `waiting` requests are live, or the recent peak will
        fall."""
        return len(self._table) > waiting or self._memory.compute_peak_expiry(now) is not None

    def preempt(self, sequence: ScriptedSequence, *, for_key: bool) -> None:
        """Preempt a request: release its memory. Its tokens are prefilled again when memory is available.

        `for_key`: the memory is for another API key. The request then loses its precedence over requests without
        generated tokens (`ScriptedSequence.answered`).
        """
        self._release(sequence)
        self._table.preempt(sequence)
        sequence.preempt(for_key=for_key)
        self.preemptions += 1

    def end(self, sequence: ScriptedSequence, refused: Refused, code: str, now: float) -> None:
        """End a request for lack of memory. It is refused with `refused` if none of its tokens was delivered, otherwise
        it fails with `code`, a `FailureCode`. `drain_ends` returns its final frame."""
        self.drop(sequence, now)
        if sequence.delivered:
            self._ends.append(Failed(sequence.number, code, refused.message))
        else:
            self._ends.append(Refusal(sequence.number, refused, sequence.shape.prompt))

    def drop(self, sequence: ScriptedSequence, now: float) -> None:
        """Remove a request in any state and release its memory, without a frame for its end."""
        self._release(sequence)
        self._table.remove(sequence, now)

    def _release(self, sequence: ScriptedSequence) -> None:
        if sequence not in self._table.preempted:
            for row in sequence.list_active_rows():
                sequence.ledger.release(row.commitment)

    # sharing between keys

    def share_rows(self, first: ScriptedSequence) -> None:
        """Preempt requests of other keys until enough rows are free for `first`, the next prompt.

        The newest request of the key with the most rows for its weight is preempted first. No request is preempted if
        enough rows are free, or if fair shares do not allow enough preemptions.
        """
        holding = [(request, self._count_held_rows(request)) for request in self._table.list_active()]
        missing = first.width - self._table.count_free_rows()
        for sequence in choose_for_key(first.weighted_key, first.width, missing, holding):
            self.preempt(sequence, for_key=True)

    def _count_held_rows(self, sequence: ScriptedSequence) -> int:
        held = sequence.started or any(row.commitment.is_joined for row in sequence.list_active_rows())
        return sequence.width if held else 0

    # return

    def compute_required_bytes(self, key: str | None) -> int:
        """Return the bytes that the oldest preempted request that precedes a new request of the API key `key` needs to
        continue. Return 0 if there is no such request.

        A request that was preempted for another key precedes only requests of its own key. With `key` None, all
        preempted requests count.
        """
        oldest = find_first_preempted(self._table.preempted, key)
        return 0 if oldest is None else _compute_needed_bytes(oldest)

    def return_next(self, now: float) -> None:
        """Queue the oldest preempted request again if the gate passes it. `now` is the monotonic time.

        At most one request is checked every `GATE_RETRY_SECONDS`. A request that was preempted for another key returns
        only while enough rows are free. A request without room ends if no memory may become free, but never because the
        memory is unreadable.
        """
        if not self._table.preempted or now < self.return_at:
            return
        self.return_at = now + GATE_RETRY_SECONDS
        sequence = next_to_return(self._table.preempted, self._table.count_unclaimed_rows())
        if sequence is not None:
            self._return(sequence, now)

    def _return(self, sequence: ScriptedSequence, now: float) -> None:
        """Queue a preempted request again if there is room. End the request if the memory can be read, but no memory
        may become free."""
        refused = self._memory.check(GateSite.PREFLIGHT, now, _compute_needed_bytes(sequence))
        if refused is None:
            for row in sequence.list_active_rows():
                (commitment,) = sequence.ledger.commit(_compute_length(sequence, row), 1)
                row.commit(commitment)
            self._table.enqueue(sequence)
        elif refused.code is not RefusalCode.UNREADABLE and not self._may_free_memory(len(self._table.preempted), now):
            self.end(sequence, refused, FailureCode.NO_HEADROOM, now)


def _compute_needed_bytes(sequence: ScriptedSequence) -> int:
    return sum(sequence.ledger.compute_cost(_compute_length(sequence, row), 1) for row in sequence.list_active_rows())


def _compute_length(sequence: ScriptedSequence, row: ScriptedRow) -> int:
    shape = sequence.shape
    return compute_return_tokens(shape.prompt + row.produced, shape.prompt + shape.limit)
