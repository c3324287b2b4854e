"""KV caches of one model on a simulated node, in padded batches, with the sums of `wire.capacity.batches`."""

from dataclasses import dataclass, field

from wire.capacity.batches import join_bytes, joinable, padded, row_bytes
from wire.report import BatchGroup, KvParameters


@dataclass(slots=True, eq=False)
class SimulatedRow:
    """KV cache of one answer."""

    promised: int
    """Reserved tokens."""
    prompt: int = 0
    """Cached tokens, without those that were decoded since `start`."""
    start: float = 0.0
    """Number of decode steps of the node from which decoded tokens count."""
    joined: bool = False
    """Whether the prefill is complete and the row is part of a batch."""

    def written(self, steps: float) -> int:
        """Return the cached tokens after `steps` decode steps of the node, at most `promised`."""
        return min(self.promised, int(self.prompt + (steps - self.start if self.joined else 0)))


@dataclass(slots=True, eq=False)
class _SimulatedBatch:
    rows: list[SimulatedRow] = field(default_factory=list[SimulatedRow])

    def promised(self) -> BatchGroup:
        lengths = [row.promised for row in self.rows]
        return BatchGroup(len(lengths), max(lengths), sum(lengths))

    def written(self, kv: KvParameters, steps: float) -> int:
        own = sum(row_bytes(kv, row.written(steps)) for row in self.rows if not row.joined)
        joined = [row.written(steps) for row in self.rows if row.joined]
        return own + (len(joined) * row_bytes(kv, max(joined)) if joined else 0)


class SimulatedRows:
    """All KV caches of one model on a simulated node."""

    def __init__(self, kv: KvParameters) -> None:
        self.kv = kv
        self._batches: list[_SimulatedBatch] = []
        self._groups: tuple[BatchGroup, ...] | None = ()
        self._promised = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def groups(self) -> tuple[BatchGroup, ...]:
        """Return the batches with their reserved tokens, as a node reports them."""
        if self._groups is None:
            self._groups = tuple(batch.promised() for batch in self._batches)
            self._promised = sum(padded(group, self.kv) for group in self._groups)
        return self._groups

    def promised(self) -> int:
        """Return the bytes of all rows at their full reservation."""
        self.groups()
        return self._promised

    def written(self, steps: float) -> int:
        """Return the bytes of the cached tokens of all rows, after `steps` decode steps of the node."""
        return sum(batch.written(self.kv, steps) for batch in self._batches)

    def add(self, row: SimulatedRow) -> None:
        """Reserve a row in the batch where it adds the fewest bytes, or in a new batch."""
        open_ = [batch for batch in self._batches if joinable(batch.promised(), row.promised, self.kv)]
        best = min(open_, key=lambda one: join_bytes((one.promised(),), row.promised, self.kv), default=None)
        if best is None:
            best = _SimulatedBatch()
            self._batches.append(best)
        best.rows.append(row)
        self._count += 1
        self._groups = None

    def remove(self, row: SimulatedRow) -> None:
        """Remove a row and release its reservation."""
        batch = next(batch for batch in self._batches if row in batch.rows)
        batch.rows.remove(row)
        if not batch.rows:
            self._batches.remove(batch)
        self._count -= 1
        self._groups = None

    def extend(self, row: SimulatedRow, more: int) -> None:
        """Reserve `more` additional tokens for a row."""
        row.promised += more
        self._groups = None

    def extension(self, row: SimulatedRow, more: int) -> int:
        """Return the bytes that `extend` of a row by `more` tokens would add."""
        group = next(batch for batch in self._batches if row in batch.rows).promised()
        longest = max(group.longest, row.promised + more)
        return padded(BatchGroup(group.rows, longest), self.kv) - padded(group, self.kv)
