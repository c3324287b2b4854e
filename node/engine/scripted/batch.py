"""Batch of the scripted engine: queued and running requests, their prefill and decode steps, each through the gate.

The choices are those of the text engine (`node.engine.scheduling.rules.prefill_order` and `preemption`).
"""

from collections import Counter
from collections.abc import Callable

from node.engine.memory.gate import GateSite
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS
from node.engine.scheduling.rules.preemption import newest_holder
from node.engine.scheduling.rules.prefill_order import startable
from node.engine.scripted.memory import ScriptedMemory
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from wire.capacity.arithmetic import KV_GROWTH_TOKENS
from wire.frames import Delta, Failed, Frame, Refusal, delta_frames
from wire.refusals import FailureCode, RefusalCode, Refused


class ScriptedBatch:
    """Requests of the scripted engine. `most`: maximum rows that decode at once. `crash(number)` ends the process in
    the first decode step of a request that must crash."""

    def __init__(self, memory: ScriptedMemory, most: int, crash: Callable[[int], None]) -> None:
        self._memory = memory
        self._most = most
        self._crash = crash
        self._waiting: list[ScriptedSequence] = []
        self._running: list[ScriptedSequence] = []
        self._rows = self._wanted = 0
        self.forwards = self.steps = 0

    @property
    def waiting(self) -> list[ScriptedSequence]:
        """Admitted requests that have no rows yet. The caller does not change the list."""
        return self._waiting

    @property
    def running(self) -> list[ScriptedSequence]:
        """Requests that decode. The caller does not change the list."""
        return self._running

    def find(self, number: int) -> ScriptedSequence | None:
        """Return the queued or running request with a number; None if there is none."""
        return next((one for one in (*self._waiting, *self._running) if one.number == number), None)

    def add(self, sequence: ScriptedSequence) -> None:
        """Queue an admitted request."""
        self._waiting.append(sequence)
        self._wanted += sequence.width

    def drop(self, sequence: ScriptedSequence) -> None:
        """Remove a request and release its commitments."""
        for row in sequence.active_rows():
            self._memory.ledger.release(row.commitment)
        if sequence in self._running:
            self._running.remove(sequence)
            self._rows -= sum(1 for _ in sequence.active_rows())
        elif sequence in self._waiting:
            self._unqueue(sequence)

    def newest(self) -> ScriptedSequence | None:
        """Return the newest running request; None if none runs."""
        return newest_holder(self._running)

    def next(self) -> ScriptedSequence | None:
        """Return the next request in turn, if the batch has room for it."""
        if not self._waiting or self._rows >= self._most:
            return None
        if self._rows + self._wanted <= self._most:  # there is room for all
            return self._waiting[0]
        return next(iter(startable(self._waiting, self._most - self._rows, self._rows_by_key)), None)

    def _rows_by_key(self) -> Counter[str]:
        return Counter(one.owner.name for one in self._running for _ in one.active_rows())

    def _unqueue(self, sequence: ScriptedSequence) -> None:
        self._waiting.remove(sequence)
        self._wanted -= sequence.width

    def prefill(self, sequence: ScriptedSequence, now: float) -> list[Frame]:
        """Prefill a queued prompt and join its rows to the decode batch, both through the gate. After a refusal,
        release its memory and return the refusal."""
        self._unqueue(sequence)
        refused = self._memory.check(GateSite.PREFILL, now)
        if refused is None:
            self.forwards += 1
            for row in sequence.active_rows():
                row.join(sequence.shape.prompt)
            refused = self._memory.check(GateSite.JOIN, now)
        if refused is not None:
            self.drop(sequence)
            return [Refusal(sequence.number, refused, sequence.shape.prompt)]
        self.forwards += 1
        sequence.begin(now)
        self._running.append(sequence)
        self._rows += sum(1 for _ in sequence.active_rows())
        return []

    def decode(self, now: float) -> list[Frame]:
        """Decode one token for every row at the monotonic time `now`. Return the deltas of all rows, then the ends."""
        deltas: list[Delta] = []
        ends: list[Frame] = []
        self.steps += 1
        for sequence in self._running.copy():
            if sequence.crashes:
                self._crash(sequence.number)
            end = self._decode_sequence(sequence, deltas, now)
            if end is not None:
                ends.append(end)
        return [*delta_frames(deltas), *ends]

    def _decode_sequence(self, sequence: ScriptedSequence, deltas: list[Delta], now: float) -> Frame | None:
        for row in list(sequence.active_rows()):
            refused = self._grow(sequence, row, now)
            if refused is not None:
                self.drop(sequence)
                return Failed(
                    sequence.number,
                    FailureCode.NO_HEADROOM,
                    f"the answer became longer than expected: {refused.message}",
                )
            row.gathered.append(sequence.add_token(row, now))
            if sequence.request.stream or row.reason or now - sequence.last_token_at >= FLUSH_INTERVAL_SECONDS:
                deltas.append(row.gather())
                sequence.mark_sent(now)
            if row.reason:
                self._memory.ledger.release(row.commitment)
                self._rows -= 1
        if any(sequence.active_rows()):
            return None
        self._running.remove(sequence)
        return sequence.finished(now)

    def _grow(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> Refused | None:
        """Commit the next `KV_GROWTH_TOKENS` tokens for a row that has used its commitment; return the refusal if there
        is no room. While the memory is unreadable rows continue to grow, because only new work is refused for that."""
        commitment, ledger = row.commitment, self._memory.ledger
        if commitment.stored_tokens < commitment.committed_tokens:
            return None
        more = min(KV_GROWTH_TOKENS, sequence.shape.limit - row.produced)
        refused = self._memory.check(GateSite.GROW, now, ledger.compute_extension_bytes(commitment, more))
        if refused is not None and refused.code is not RefusalCode.UNREADABLE:
            return refused
        ledger.extend(commitment, more)
        return None
