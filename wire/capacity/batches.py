"""KV memory of decode batches, whose rows (sequences) are padded to the longest.

The functions compute the bytes of a row, of a batch, and of a row that joins a batch.
"""

from collections.abc import Iterable, Sequence

from wire.report import MAX_WASTE_BYTES, BatchGroup, KvParameters

WASTE_SHARE = 0.25
"""Share of a batch that may be padding if the padding takes more than `KvParameters.waste` bytes."""
WASTE_CAP_SHARE = 0.01
"""Share of the cap that the padding of a batch may always take, at most `MAX_WASTE_BYTES`."""


def compute_row_bytes(kv: KvParameters, tokens: int) -> int:
    """Return the maximum KV bytes of a row of `tokens` tokens.

    A cache grows `step` tokens at a time, and can have room for up to step − 1 unused tokens. A sliding-window cache
    holds at most its window. A row with at least one token also takes `fixed` bytes. Without tokens, return 0.
    """
    if tokens <= 0:
        return 0
    rows = tokens + kv.step - 1
    row = kv.fixed + kv.per_token * rows
    return row + kv.window_per_token * min(rows, kv.window) if kv.window_per_token else row


def compute_waste_bytes(cap: int) -> int:
    """Return the bytes of padding that a batch may always have, for a cap in bytes (`KvParameters.waste`)."""
    return min(MAX_WASTE_BYTES, int(cap * WASTE_CAP_SHARE))


def compute_padded_bytes(group: BatchGroup, kv: KvParameters) -> int:
    """Return the KV bytes of a decode batch: rows × longest row, because rows are padded to the longest."""
    return group.rows * compute_row_bytes(kv, group.longest)


def can_join(group: BatchGroup, length: int, kv: KvParameters) -> bool:
    """Return whether a row of `length` tokens may join a batch.

    With the row, padding must be at most 25 % of the tokens of the batch, or take at most `kv.waste` bytes.
    """
    total = max(group.longest, length) * (group.rows + 1)
    waste = total - group.tokens - length
    return waste * kv.per_token <= kv.waste or waste <= WASTE_SHARE * total


def compute_join_bytes(groups: Iterable[BatchGroup], length: int, kv: KvParameters) -> int:
    """Return the KV bytes that a row of `length` tokens adds, with padding, in the batch where they are fewest.

    The row forms a new batch if it may join none of `groups` (`can_join`).
    """
    return choose_batch(tuple(groups), length, kv)[1]


def choose_batch(groups: Sequence[BatchGroup], length: int, kv: KvParameters) -> tuple[BatchGroup | None, int]:
    """Return the batch of `groups` to which a new row of `length` tokens adds the fewest KV bytes, and these bytes.

    Only batches that the row may join (`can_join`) count. Return None as the batch, and the bytes of a new batch, if
    there is none.
    """
    if not groups:
        return None, compute_row_bytes(kv, length)
    best, least = None, 0
    for group in groups:
        if can_join(group, length, kv):
            grown = compute_row_bytes(kv, max(group.longest, length))
            if length > group.longest:  # the other rows are padded to the new one
                grown += group.rows * (grown - compute_row_bytes(kv, group.longest))
            if best is None or grown < least:
                best, least = group, grown
    return (None, compute_row_bytes(kv, length)) if best is None else (best, least)
