"""Commitment: KV promised to admitted rows, and how much of it is written.

A decode batch is padded, so a group of rows takes rows × longest row. Groups are kept by *promised* length: a row
counts with all that it may come to from the moment it is admitted, so

    written + reserved = Σ rows × bytes of the longest promised row

That sum rises only by `commit` and `extend`, whose costs the gate judges first. Writing moves bytes from reserved to
written and never over the sum: half-done prompts cannot wedge on each other. A row that is still in prefill has a cache
of its own, without padding; it counts as padded from its join.
"""

from dataclasses import dataclass, field

from wire.capacity.arithmetic import join_bytes, joinable, padded, row_bytes
from wire.report import Group, Kv


@dataclass(slots=True, eq=False)
class Commitment:
    """One row's promise: tokens promised, tokens written so far, and whether it is in the decode batch. While a prompt
    is written, its growing layers have `room` for so many."""

    promised: int
    written: int = 0
    joined: bool = False
    room: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    rows: list[Commitment] = field(default_factory=list["Commitment"])

    def promised(self) -> Group:
        return _group([row.promised for row in self.rows])

    def written(self, kv: Kv) -> int:
        """Before every forward: one pass."""
        own = joined = longest = 0
        for row in self.rows:
            if not row.joined:
                own += row_bytes(kv, row.written) + kv.per_token * max(0, row.room - row.written - kv.step + 1)
                continue
            joined += 1
            if row.written > longest:
                longest = row.written
        return own + joined * row_bytes(kv, longest)

    def promised_bytes(self, kv: Kv) -> int:
        """Before every forward, too."""
        longest = 0
        for row in self.rows:
            if row.promised > longest:
                longest = row.promised
        return len(self.rows) * row_bytes(kv, longest)


def _group(lengths: list[int]) -> Group:
    return Group(len(lengths), max(lengths), sum(lengths))


class Ledger:
    """All rows of one model, in padded groups."""

    def __init__(self, kv: Kv) -> None:
        self.kv = kv
        self._batches: list[_Batch] = []
        self._made = 0

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def holds(self, row: Commitment) -> bool:
        """Return whether a commitment is in force: made here and not released."""
        return any(row in batch.rows for batch in self._batches)

    def groups(self) -> tuple[Group, ...]:
        """Give rows and longest promised row of every group, for the report."""
        return tuple(batch.promised() for batch in self._batches)

    def written(self) -> int:
        """Give the bytes of all rows that are begun, padding included."""
        return sum(batch.written(self.kv) for batch in self._batches)

    def reserved(self) -> int:
        """Give the bytes promised and not yet written."""
        return sum(batch.promised_bytes(self.kv) - batch.written(self.kv) for batch in self._batches)

    def cost(self, length: int, rows: int) -> int:
        """Give what `rows` equal rows of `length` tokens would add: exactly what `commit` then promises."""
        return join_bytes(self.groups(), length, self.kv) + (rows - 1) * row_bytes(self.kv, length)

    def commit(self, length: int, rows: int) -> list[Commitment]:
        """Promise: the first row joins the batch where it adds least, its equals form one without padding."""
        made = [Commitment(length) for _ in range(rows)]
        best = self._best(length)
        if best is not None:
            best.rows.append(made[0])
        alone = made if best is None else made[1:]
        if alone:
            self._made += 1
            self._batches.append(_Batch(self._made, alone.copy()))
        return made

    def batch_of(self, row: Commitment) -> int:
        """Give the number of the batch that a row decodes in; no other batch ever has it."""
        return self._batch_of(row).number

    def joining(self, row: Commitment, rows: int) -> int:
        """Give the bytes of a row's batch once it and its equals (`rows` in all) have joined with what they hold."""
        joined = [other.written for other in self._batch_of(row).rows if other.joined]
        return padded(_group([*joined, *[row.written] * rows]), self.kv)

    def joined_rows(self, row: Commitment) -> int:
        """Return how many rows decode in this row's batch."""
        return sum(other.joined for other in self._batch_of(row).rows)

    def extension(self, row: Commitment, more: int) -> int:
        """Give what `more` tokens for a row would add to its group."""
        batch = self._batch_of(row)
        group = batch.promised()
        longest = max(group.longest, row.promised + more)
        return padded(Group(group.rows, longest), self.kv) - padded(group, self.kv)

    def extend(self, row: Commitment, more: int) -> None:
        """Promise `more` tokens to a row."""
        row.promised += more

    def release(self, row: Commitment) -> None:
        """Take back a promise and what was written under it."""
        batch = self._batch_of(row)
        batch.rows.remove(row)
        if not batch.rows:
            self._batches.remove(batch)

    def _best(self, length: int) -> _Batch | None:
        open_ = [batch for batch in self._batches if joinable(batch.promised(), length, self.kv)]
        return min(open_, key=lambda batch: join_bytes((batch.promised(),), length, self.kv), default=None)

    def _batch_of(self, row: Commitment) -> _Batch:
        return next(batch for batch in self._batches if row in batch.rows)
