"""Batch of the scripted engine: prefill, join, decode and growth of its requests, each through the gate.

The rules of the text engine (`node.engine.scheduling.rules`) make all choices. `turns` determines the times.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from node.engine.memory.gate import GateSite
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS, compute_growth_tokens
from node.engine.scheduling.rules.preemption import find_newest_holder
from node.engine.scripted.preemption import BatchMemory, ScriptedPreemptor
from node.engine.scripted.prefills import PrefillChunk, ScriptedPrefills
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from wire.frames import Delta, Frame, split_deltas
from wire.refusals import RefusalCode, Refused


class ScriptedBatch:
    """Prefills, joins, decode steps and growth of the scripted engine's requests in `table`.

    `crash(number)` is called in the first decode step of a request that must crash, and ends the process. With
    `silent_joins`, a prefill returns no token. `forwards` counts prefills and joins, `steps` decode steps over all
    rows, and `prefill_tokens` prefilled tokens. `now` is in monotonic seconds in all methods.
    """

    def __init__(
        self,
        table: ScriptedTable,
        memory: BatchMemory,
        preemptor: ScriptedPreemptor,
        prefills: ScriptedPrefills,
        *,
        silent_joins: bool,
        crash: Callable[[int], None],
    ) -> None:
        self._table = table
        self._memory = memory
        self._preemptor = preemptor
        self._prefills = prefills
        self._silent_joins = silent_joins
        self._crash = crash
        self.forwards = self.steps = self.prefill_tokens = 0

    def find_newest(self) -> ScriptedSequence | None:
        """Return the newest request that has tokens in a cache; None if there is none."""
        return find_newest_holder(self._table.list_active())

    # prefill

    def has_room(self, chunk: PrefillChunk, now: float) -> bool:
        """Check the gate for a prefill, and count its forward. Return False if the gate refuses it.

        The first prompt of the chunk then waits. The newest waiting request is preempted or ended if the memory cannot
        be read. This also happens if no request can continue and the recent peak will not fall.
        """
        refused = self._memory.check(GateSite.PREFILL, now)
        if refused is not None:
            self._delay(chunk.members[0], refused, now)
            return False
        self.forwards += 1
        return True

    def _delay(self, sequence: ScriptedSequence, refused: Refused, now: float) -> None:
        """Delay a prefill that does not fit now. If all requests wait for each other, release the newest instead."""
        sequence.delay(now + GATE_RETRY_SECONDS)
        if refused.code is RefusalCode.NO_ROOM and (
            self._table.rows or self._prefills.list_choices(now) or self._memory.compute_peak_expiry(now) is not None
        ):
            return
        waiting = (request for request in self._table.queue if request.retry_at > now)
        self._preemptor.release_memory(max(waiting, key=lambda request: request.age), refused, now)

    def end_prefill(self, chunk: PrefillChunk, turns: int, now: float) -> list[Frame]:
        """Record that `chunk` was prefilled in each of `turns` equal turns of the engine (`ScriptedTurns`).

        Prompts that are complete join the decode batch through the gate. Return the frames to send: deltas, then the
        ends of requests.
        """
        deltas: list[Delta] = []
        ends: list[Frame] = []
        for member in chunk.members:
            if member not in self._table.queue:  # cancelled or preempted since the start of the turn
                continue
            member.start()
            tokens = member.left if chunk.packed else min(member.left, chunk.tokens * turns)
            member.prefill(tokens)
            self._prefills.count_prefilled(member, tokens)
            self.prefill_tokens += tokens
            if not member.left:
                self._join(member, deltas, ends, now, silent=chunk.packed or self._silent_joins)
        return [*split_deltas(deltas), *ends, *self._preemptor.drain_ends()]

    def _join(
        self, sequence: ScriptedSequence, deltas: list[Delta], ends: list[Frame], now: float, *, silent: bool
    ) -> None:
        for row in sequence.list_active_rows():
            row.join(sequence.shape.prompt)
        refused = self._memory.check(GateSite.JOIN, now)
        if refused is not None:
            self._delay(sequence, refused, now)
            return
        self.forwards += 1
        sequence.begin(now)
        self._table.start_decode(sequence)
        if not silent:
            self._decode_sequence(sequence, 1, deltas, ends, now)

    # decode

    def grow(self, now: float) -> list[Frame]:
        """Extend the commitment of each row that has used all of it. Return the final frames of requests that ended for
        lack of memory."""
        for sequence in list(self._table.running):
            for row in sequence.list_active_rows():
                if row.commitment.is_joined and row.commitment.stored_tokens >= row.commitment.committed_tokens:
                    self._extend(sequence, row, now)
        return self._preemptor.drain_ends()

    def _extend(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> None:
        """Extend a row's commitment. Until the tokens fit, preempt or end other requests, or the row's own request.
        While the memory is unreadable, rows continue to grow, because only new work is refused for that."""
        commitment, ledger = row.commitment, sequence.ledger
        more = compute_growth_tokens(commitment.committed_tokens, sequence.shape.prompt + sequence.shape.limit)
        while sequence in self._table.running:
            refused = self._memory.check(GateSite.GROW, now, ledger.compute_extension_bytes(commitment, more))
            if refused is None or refused.code is RefusalCode.UNREADABLE:
                ledger.extend(commitment, more)
                return
            message = f"an answer became longer than expected: {refused.message}"
            self._preemptor.release_for(sequence, replace(refused, message=message), now)

    def count_steady_steps(self) -> int:
        """Return the number of decode steps that may be computed at once. No row may end, send tokens or use up its
        commitment before the last of them. At least one row must decode."""
        return min(
            min(row.count_steps_left(request.last), row.commitment.committed_tokens - row.commitment.stored_tokens)
            for request in self._table.running
            for row in request.list_active_rows()
        )

    def decode(self, steps: int, now: float) -> list[Frame]:
        """Decode `steps` tokens for every row, or fewer for a row whose answer ends.

        Return the frames to send: deltas of the rows whose tokens are due, then the ends of requests. Tokens that are
        not due are sent after a later `decode` or `flush`.
        """
        deltas: list[Delta] = []
        ends: list[Frame] = []
        self.steps += steps
        for sequence in list(self._table.running):
            if sequence.crashes:
                self._crash(sequence.number)
            self._decode_sequence(sequence, steps, deltas, ends, now)
        return [*split_deltas(deltas), *ends]

    def _decode_sequence(
        self, sequence: ScriptedSequence, steps: int, deltas: list[Delta], ends: list[Frame], now: float
    ) -> None:
        for row in sequence.list_active_rows():
            sequence.add_tokens(row, steps, now)
            if row.is_due(now - sequence.last_token_at, stream=sequence.request.stream):
                deltas.append(row.gather(sequence.number))
                sequence.mark_sent(now)
            if row.reason:
                sequence.ledger.release(row.commitment)
                self._table.end_row()
        if not sequence.width:
            self._table.remove(sequence, now)
            ends.append(sequence.build_finished(now))

    def flush(self) -> Sequence[Frame]:
        """Return the unsent tokens of all decoding requests as frames of deltas, and mark them as sent."""
        unsent = [
            row.gather(request.number)
            for request in self._table.running
            for row in request.list_active_rows()
            if row.produced > row.sent
        ]
        return split_deltas(unsent)
