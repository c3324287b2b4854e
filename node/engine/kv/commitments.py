"""Commitments: KV memory of admitted rows, which their caches store already or which is reserved for them.

The rows of one decode batch are a group, including rows still in prefill. A batch is padded: its KV is rows × longest
row. From its admission, a row counts with its *committed* tokens: its prompt and its expected answer. The sum over all
groups is

    stored + reserved = Σ rows × bytes of the longest committed row

`commit` and `extend` raise that sum, after the gate has judged their costs. Apart from these, only a new cap changes
the sum (`set_waste`). A forward moves bytes from reserved to stored and never exceeds the sum. Unfinished prompts
therefore cannot deadlock. A row in prefill has a cache of its own without padding; from its join its stored tokens
count as padded.

Other modules change these numbers only by the methods of `Commitment` and `CommitmentLedger`.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from wire.capacity.batches import can_join, compute_join_bytes, compute_padded_bytes, compute_row_bytes
from wire.report import BatchGroup, KvParameters


@dataclass(slots=True, eq=False)
class Commitment:
    """KV tokens that are committed to one row, and how many of them the row's cache already stores."""

    committed_tokens: int
    """Tokens for which memory is committed, including stored tokens."""
    stored_tokens: int = 0
    """Tokens that the row's own cache, or its row of the decode batch, stores. If rows share a prefill, only the first
    of them counts the shared cache. Each further row has 0 until its join."""
    is_joined: bool = False
    """Whether the row is in the decode batch."""
    capacity_tokens: int = 0
    """Tokens for which the growing layers of the row's own cache have room during prefill, including stored tokens; 0
    after the join."""

    def record_prefill(self, stored_tokens: int, capacity_tokens: int) -> None:
        """Set the number of tokens that the row's own cache stores, and the number for which its growing layers have
        room."""
        self.stored_tokens, self.capacity_tokens = stored_tokens, capacity_tokens

    def record_prompt(self, stored_tokens: int) -> None:
        """Set the number of tokens that the row's cache stores after the end of its prefill, before its join passes the
        gate. The capacity does not change."""
        self.stored_tokens = stored_tokens

    def record_join(self, stored_tokens: int) -> None:
        """Record that the row is in the decode batch with `stored_tokens` tokens, and that its own cache is
        released."""
        self.stored_tokens, self.is_joined, self.capacity_tokens = stored_tokens, True, 0

    def record_token(self, tokens: int = 1) -> None:
        """Add `tokens` to the tokens that the row's cache stores."""
        self.stored_tokens += tokens

    def reset(self) -> None:
        """Record that the row stores no tokens, because they are prefilled again. Its committed tokens do not
        change."""
        self.stored_tokens, self.is_joined, self.capacity_tokens = 0, False, 0

    def extend(self, tokens: int) -> None:
        """Add `tokens` to the committed tokens."""
        self.committed_tokens += tokens


@dataclass(slots=True, eq=False)
class _PaddedGroup:
    number: int
    rows: list[Commitment] = field(default_factory=list["Commitment"])

    def to_batch_group(self) -> BatchGroup:
        return _build_group([row.committed_tokens for row in self.rows])

    def compute_stored_bytes(self, kv: KvParameters) -> int:
        """Return the stored bytes of all rows, in one pass because this runs before every forward."""
        own = joined = longest = 0
        for row in self.rows:
            if not row.is_joined:
                own += compute_row_bytes(kv, row.stored_tokens) + kv.per_token * max(
                    0, row.capacity_tokens - row.stored_tokens - kv.step + 1
                )
                continue
            joined += 1
            if row.stored_tokens > longest:
                longest = row.stored_tokens
        return own + joined * compute_row_bytes(kv, longest)

    def compute_committed_bytes(self, kv: KvParameters) -> int:
        """Return the committed bytes of all rows, in a plain loop because this runs before every forward."""
        longest = 0
        for row in self.rows:
            if row.committed_tokens > longest:
                longest = row.committed_tokens
        return len(self.rows) * compute_row_bytes(kv, longest)


def _build_group(lengths: list[int]) -> BatchGroup:
    return BatchGroup(len(lengths), max(lengths), sum(lengths))


class CommitmentLedger:
    """Ledger of the commitments of all rows of one model, in padded groups.

    `kv` has the parameters of the KV memory of a row. With `alone`, each row is a group of its own.

    Except for `is_committed` and `extend`, methods that take a `row` require a commitment that is in force, and
    otherwise raise `StopIteration`.
    """

    def __init__(self, kv: KvParameters, *, alone: bool = False) -> None:
        self.kv = replace(kv, waste=0) if alone else kv
        self.alone = alone
        self._batches: list[_PaddedGroup] = []
        self._last_number = 0

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def is_committed(self, row: Commitment) -> bool:
        """Return whether a commitment is in force: created by this ledger and not released."""
        return any(row in batch.rows for batch in self._batches)

    def list_groups(self) -> tuple[BatchGroup, ...]:
        """Return the number of rows, the longest committed row and the committed tokens of every group, for the report.
        A group of a row that decodes alone has 0 tokens, so that no other row may join it (`can_join`)."""
        groups = tuple(batch.to_batch_group() for batch in self._batches)
        return tuple(replace(group, tokens=0) for group in groups) if self.alone else groups

    def compute_stored_bytes(self) -> int:
        """Return the bytes that the caches of all rows take, with padding and with the unused room of growing
        caches."""
        return sum(batch.compute_stored_bytes(self.kv) for batch in self._batches)

    def compute_reserved_bytes(self) -> int:
        """Return the bytes that are committed for all rows and not stored yet, padding included."""
        return sum(
            batch.compute_committed_bytes(self.kv) - batch.compute_stored_bytes(self.kv) for batch in self._batches
        )

    def compute_committed_bytes(self) -> int:
        """Return the committed bytes of all rows, stored or not, padding included."""
        return sum(batch.compute_committed_bytes(self.kv) for batch in self._batches)

    def compute_cost(self, length: int, rows: int) -> int:
        """Return the bytes that `commit` would add for `rows` (at least 1) equal rows of `length` tokens, with padding.

        Nothing is committed.
        """
        return compute_join_bytes(self.list_groups(), length, self.kv) + (rows - 1) * compute_row_bytes(self.kv, length)

    def commit(self, length: int, rows: int) -> list[Commitment]:
        """Create commitments of `length` tokens for `rows` equal rows, and return them.

        The first row joins the batch where it adds the fewest bytes. The other rows, and the first if no batch suits,
        form a batch without padding. Rows that decode alone form a batch each.
        """
        made = [Commitment(length) for _ in range(rows)]
        if self.alone:
            for row in made:
                self._add_batch([row])
            return made
        best = self._find_best_batch(length)
        if best is not None:
            best.rows.append(made[0])
        alone = made if best is None else made[1:]
        if alone:
            self._add_batch(alone.copy())
        return made

    def _add_batch(self, rows: list[Commitment]) -> None:
        self._last_number += 1
        self._batches.append(_PaddedGroup(self._last_number, rows))

    def get_batch_number(self, row: Commitment) -> int:
        """Return the number of the decode batch to which a row is assigned. Numbers are never reused."""
        return self._find_batch(row).number

    def compute_joined_bytes(self, row: Commitment, rows: int) -> int:
        """Return the KV bytes of the decode batch of `row` after `rows` more rows have joined, padding included. Each
        of these rows has as many stored tokens as `row`."""
        joined = [other.stored_tokens for other in self._find_batch(row).rows if other.is_joined]
        return compute_padded_bytes(_build_group([*joined, *[row.stored_tokens] * rows]), self.kv)

    def count_joined_rows(self, row: Commitment) -> int:
        """Return the number of rows that have joined the decode batch to which `row` is assigned; 0 before the first
        join."""
        return sum(other.is_joined for other in self._find_batch(row).rows)

    def compute_extension_bytes(self, row: Commitment, more: int) -> int:
        """Return the bytes that `extend` with `more` tokens would add to a row's group."""
        batch = self._find_batch(row)
        group = batch.to_batch_group()
        longest = max(group.longest, row.committed_tokens + more)
        return compute_padded_bytes(BatchGroup(group.rows, longest), self.kv) - compute_padded_bytes(group, self.kv)

    def extend(self, row: Commitment, more: int) -> None:
        """Commit `more` tokens for a row. The caller must first check the bytes of `compute_extension_bytes`."""
        row.extend(more)

    def set_waste(self, waste: int) -> None:
        """Set the bytes of padding that a decode batch may always have (`KvParameters.waste`); 0 for rows that decode
        alone."""
        self.kv = replace(self.kv, waste=0 if self.alone else waste)

    def release(self, row: Commitment) -> None:
        """Remove the commitment of a row. Its committed and stored bytes are no longer counted."""
        batch = self._find_batch(row)
        batch.rows.remove(row)
        if not batch.rows:
            self._batches.remove(batch)

    def _find_best_batch(self, length: int) -> _PaddedGroup | None:
        open_ = [batch for batch in self._batches if can_join(batch.to_batch_group(), length, self.kv)]
        return min(
            open_, key=lambda batch: compute_join_bytes((batch.to_batch_group(),), length, self.kv), default=None
        )

    def _find_batch(self, row: Commitment) -> _PaddedGroup:
        return next(batch for batch in self._batches if row in batch.rows)
