"""Table of the scripted engine's live requests: queued for prefill, decoding, and preempted."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from node.engine.scheduling.rules.prefill_order import count_started_rows
from node.engine.scripted.costs import DecodeLoad
from node.engine.scripted.sequence import ScriptedSequence


class ScriptedTable:
    """Table of the requests that have not ended. `most`: maximum rows that decode at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._queue: list[ScriptedSequence] = []
        self._running: list[ScriptedSequence] = []
        self._preempted: list[ScriptedSequence] = []
        self._rows = self._wanted = 0
        self.crowded_at = float("-inf")
        """Monotonic time at which a request last ended while another request was live; minus infinity before that."""

    @property
    def queue(self) -> Sequence[ScriptedSequence]:
        """Requests whose prefill has not ended, in the order of the queue."""
        return self._queue

    @property
    def running(self) -> Sequence[ScriptedSequence]:
        """Requests that decode."""
        return self._running

    @property
    def preempted(self) -> Sequence[ScriptedSequence]:
        """Preempted requests, which hold no memory. They return to the queue when there is room."""
        return self._preempted

    @property
    def rows(self) -> int:
        """Number of decoding rows."""
        return self._rows

    def __len__(self) -> int:
        return len(self._queue) + len(self._running) + len(self._preempted)

    def find(self, number: int) -> ScriptedSequence | None:
        """Return the live request with this number; None if there is none."""
        every = chain(self._queue, self._running, self._preempted)
        return next((request for request in every if request.number == number), None)

    def list_active(self) -> list[ScriptedSequence]:
        """Return the requests that are not preempted, oldest first."""
        return sorted((*self._queue, *self._running), key=lambda request: request.age)

    def count_rows_by_key(self) -> Counter[str]:
        """Return the number of decoding rows of each API key."""
        rows = Counter[str]()
        for request in self._running:
            rows[request.weighted_key.name] += request.width
        return rows

    def compute_loads(self) -> dict[str, DecodeLoad]:
        """Return the decoding rows by model, with their committed tokens."""
        loads: dict[str, DecodeLoad] = {}
        for request in self._running:
            for row in request.list_active_rows():
                rows, tokens = loads.get(request.model, (0, 0))
                loads[request.model] = DecodeLoad(rows + 1, tokens + row.commitment.committed_tokens)
        return loads

    def count_free_rows(self) -> int:
        """Return the number of free rows: the maximum, minus the rows that decode or whose prefill has started."""
        return self.most - self._rows - count_started_rows(self._queue)

    def count_unclaimed_rows(self) -> int:
        """Return the number of rows that would be free if all queued prompts had started; negative if there are too
        few rows."""
        return self.most - self._rows - self._wanted

    # changes

    def enqueue(self, sequence: ScriptedSequence) -> None:
        """Add a new or a preempted request at the end of the queue."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        self._queue.append(sequence)
        self._wanted += sequence.width

    def start_decode(self, sequence: ScriptedSequence) -> None:
        """Move a request from the queue to the decoding requests."""
        self._unqueue(sequence)
        self._running.append(sequence)
        self._rows += sequence.width

    def end_row(self) -> None:
        """Decrement the number of decoding rows, because a row has ended."""
        self._rows -= 1

    def preempt(self, sequence: ScriptedSequence) -> None:
        """Move a queued or decoding request to the preempted requests."""
        self._take_out(sequence)
        self._preempted.append(sequence)

    def remove(self, sequence: ScriptedSequence, now: float) -> None:
        """Remove a request that ends at `now` (monotonic seconds). Set `crowded_at` to `now` if another is still
        live."""
        self._take_out(sequence)
        if len(self):
            self.crowded_at = now

    def _take_out(self, sequence: ScriptedSequence) -> None:
        if sequence in self._queue:
            self._unqueue(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
            self._rows -= sequence.width
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def _unqueue(self, sequence: ScriptedSequence) -> None:
        self._queue.remove(sequence)
        self._wanted -= sequence.width
