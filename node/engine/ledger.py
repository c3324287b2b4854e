"""Commitment: KV promised to admitted rows, and how much of it is written.

A decode batch is padded, so a group of rows takes rows × longest row. Groups are kept by *promised* length: a row
counts with all that it may come to from the moment it is admitted, so

    written + reserved = Σ rows × longest promised row × KV per token

and that sum rises only by `commit` and `extend`, whose costs the gate judges first. Writing moves bytes from reserved
to written and never over the sum: half-done prompts cannot wedge on each other.
"""

from dataclasses import dataclass, field

from wire.report import Group
from wire.verdict import join_bytes, joinable, padded


@dataclass(slots=True, eq=False)
class Commitment:
    """One row's promise: tokens promised, and tokens written so far."""

    promised: int
    written: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    rows: list[Commitment] = field(default_factory=list["Commitment"])

    def promised(self) -> Group:
        return _group([row.promised for row in self.rows])

    def written(self) -> Group:
        return _group([row.written for row in self.rows if row.written])


def _group(lengths: list[int]) -> Group:
    return Group(len(lengths), max(lengths, default=0), sum(lengths))


class Ledger:
    """All rows of one model, in padded groups."""

    def __init__(self, kv_per_token: int) -> None:
        self._kv = kv_per_token
        self._batches: list[_Batch] = []

    def groups(self) -> tuple[Group, ...]:
        """Give rows and longest promised row of every group, for the report."""
        return tuple(batch.promised() for batch in self._batches)

    def written(self) -> int:
        """Give the padded bytes of all rows that are begun."""
        return sum(padded(batch.written(), self._kv) for batch in self._batches)

    def reserved(self) -> int:
        """Give the bytes promised and not yet written."""
        return sum(padded(group, self._kv) for group in self.groups()) - self.written()

    def cost(self, length: int, rows: int) -> int:
        """Give what `rows` equal rows of `length` tokens would add: exactly what `commit` then promises."""
        return join_bytes(self.groups(), length, self._kv) + (rows - 1) * length * self._kv

    def commit(self, length: int, rows: int) -> list[Commitment]:
        """Promise: the first row joins the batch where it adds least, its equals form one without padding."""
        made = [Commitment(length) for _ in range(rows)]
        best = self._best(length)
        if best is not None:
            best.rows.append(made[0])
        alone = made if best is None else made[1:]
        if alone:
            self._batches.append(_Batch(alone.copy()))
        return made

    def extension(self, row: Commitment, more: int) -> int:
        """Give what `more` tokens for a row would add to its group."""
        batch = self._batch_of(row)
        group = batch.promised()
        longest = max(group.longest, row.promised + more)
        return padded(Group(group.rows, longest), self._kv) - padded(group, self._kv)

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
        open_ = [batch for batch in self._batches if joinable(batch.promised(), length, self._kv)]
        return min(open_, key=lambda batch: join_bytes((batch.promised(),), length, self._kv), default=None)

    def _batch_of(self, row: Commitment) -> _Batch:
        return next(batch for batch in self._batches if row in batch.rows)
