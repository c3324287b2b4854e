"""The state of one prefill without an engine: its tokens and chunks, its rows, and its lookup in the prefix cache."""

from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from node.engine.kv.commitments import CommitmentLedger
from node.engine.kv.disk.block_reader import DiskRestore, ReadPlan
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import CachedPrefix, PrefixHit
from node.engine.kv.window_history import WindowHistory
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Sequence
from node.engine.scheduling.prefill import NO_PREFIX, Prefill, PrefixState, group_by_batch, group_by_past
from node.engine.scheduling.rules.row_state import RowState
from tests.unit.node.engine.requests.test_sequence import make_sequence
from wire.capacity.batches import KvParameters
from wire.state_machine import IllegalEventError


class Restore:
    """A restoration that only counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def make_prefill(sequence: Sequence | None = None, tokens: int = 10, **fields: Any) -> Prefill:
    """Return a prefill of all rows of a request, whose commitments store nothing yet."""
    made = sequence or make_sequence()
    for row in made.rows:
        row.commitment.reset()
    return Prefill(cast("LoadedModel", None), made, list(made.rows), list(range(tokens)), **fields)


def make_past() -> PrefixState:
    return PrefixState(b"key", b"hash", frozenset({4}))


def begin_restore(past: PrefixState) -> Restore:
    restore = Restore()
    past.set_restoring(cast("DiskRestore", restore))
    return restore


# chunks


def test_a_chunk_is_added_to_the_stored_tokens_and_the_last_one_ends_the_prefill():
    prefill = make_prefill(make_sequence(rows=2))
    first, second = prefill.rows
    assert (prefill.left, prefill.width, prefill.started) == (10, 2, False)
    prefill.start(Layers())
    prefill.begin_chunk()
    assert [row.state for row in prefill.rows] == [RowState.PREFILL] * 2
    prefill.end_chunk(4, 256, None)
    assert (prefill.left, prefill.stored_tokens, prefill.logits, prefill.started) == (6, 4, None, True)
    assert (first.commitment.stored_tokens, first.commitment.capacity_tokens) == (4, 256)
    assert second.commitment.stored_tokens == 0, "the cache counts once"
    prefill.begin_chunk()
    logits = mx.zeros((1, 5))
    prefill.end_chunk(6, 512, logits)
    assert (prefill.left, prefill.logits) == (0, logits)
    assert (first.commitment.stored_tokens, first.commitment.capacity_tokens) == (10, 512)
    assert [row.state for row in prefill.rows] == [RowState.JOIN] * 2


@pytest.mark.parametrize(
    ("stored", "stops", "count", "chunk"),
    [
        (0, [], 8, 8),
        (0, [5], 8, 5),
        (0, [8], 8, 8),
        (0, [9], 8, 8),
        (5, [5], 3, 3),
        (5, [5, 7], 3, 2),
        (4, [2, 7, 5], 6, 1),
    ],
)
def test_a_chunk_ends_at_the_next_planned_snapshot(stored: int, stops: list[int], count: int, chunk: int):
    prefill = make_prefill(stored_tokens=stored)
    assert prefill.bound_chunk(count) == count, "the prefix cache is not used"
    prefill.use_prefix_cache(past := make_past())
    past.record_lookup(NO_PREFIX, stops)
    assert prefill.bound_chunk(count) == chunk


def test_a_packed_prefill_stores_all_tokens_and_uses_no_cached_ones():
    prefill = make_prefill(stored_tokens=6)
    prefill.use_prefix_cache(past := make_past())
    past.record_lookup(PrefixHit(length=6), [])
    restore = begin_restore(past)
    prefill.sequence.set_cached(6)
    prefill.end_packed(128)
    assert (prefill.left, prefill.sequence.cached, past.hit, restore.closed) == (0, 0, NO_PREFIX, 1)
    (row,) = prefill.rows
    assert (row.commitment.stored_tokens, row.commitment.capacity_tokens, row.state) == (10, 128, RowState.JOIN)
    assert make_prefill().past is None


def test_a_packed_prefill_that_could_not_be_used_starts_again_alone():
    prefill = make_prefill(make_sequence(rows=2))
    prefill.start(Layers())
    prefill.end_packed(128)
    assert not prefill.alone
    prefill.reset_alone()
    assert (prefill.cache, prefill.stored_tokens, prefill.alone, prefill.left) == (None, 0, True, 10)
    assert [(row.state, row.commitment.stored_tokens, row.commitment.capacity_tokens) for row in prefill.rows] == [
        (RowState.WAITING, 0, 0)
    ] * 2


def test_a_chunk_of_a_row_that_has_ended_is_illegal():
    prefill = make_prefill()
    prefill.rows[0].release()
    with pytest.raises(IllegalEventError):
        prefill.begin_chunk()


def test_joined_rows_leave_the_prefill():
    prefill = make_prefill(make_sequence(rows=3))
    first, second, third = prefill.rows
    second.commitment.record_join(10)
    prefill.remove_joined()
    assert (prefill.rows, prefill.width) == ([first, third], 2)


def test_a_delay_lasts_until_the_gate_passes():
    prefill = make_prefill()
    assert prefill.retry_at == 0.0
    prefill.delay(7.5)
    assert prefill.retry_at == 7.5
    prefill.end_delay()
    assert prefill.retry_at == 0.0


@pytest.mark.parametrize(
    ("resume", "joined", "yielded", "answered"),
    [
        ((), False, False, False),
        ((), True, False, True),
        (((1,),), False, False, True),
        ((), True, True, False),
        (((1,),), False, True, False),
    ],
)
def test_an_answer_that_was_started_precedes_unless_it_gave_way_to_another_key(
    resume: tuple[tuple[int, ...], ...], joined: bool, yielded: bool, answered: bool
):
    sequence = make_sequence(arrived=3.5, resume=resume)
    if joined:
        sequence.mark_joined(4.0)
    if yielded:
        sequence.mark_yielded()
    prefill = make_prefill(sequence)
    assert (prefill.answered, prefill.arrived, prefill.weighted_key) == (answered, 3.5, sequence.weighted_key)


def test_cached_tokens_are_not_prefilled():
    prefill = make_prefill()
    prefill.set_cached_tokens(4)
    assert (prefill.stored_tokens, prefill.left) == (4, 6)


# the prefix cache


def test_a_discarded_lookup_leaves_no_hit_plan_or_restoration():
    past = make_past()
    past.record_lookup(hit := PrefixHit(length=6), [2, 4])
    past.set_plan(plan := cast("ReadPlan", object()))
    assert (past.hit, past.stops, past.plan) == (hit, [2, 4], plan)
    first = begin_restore(past)
    second = begin_restore(past)
    assert (first.closed, second.closed) == (1, 0)
    past.discard_lookup()
    assert (past.hit, past.plan, past.restoring, second.closed) == (NO_PREFIX, None, None, 1)
    assert past.stops == [2, 4], "the prefill takes its snapshots"
    past.discard_lookup()
    assert second.closed == 1


def test_only_the_newest_snapshots_stay_with_the_prefill():
    past = make_past()
    past.record_snapshot(3)
    assert (past.snapshot_at, past.snapshots) == (3, [])
    entries = [CachedPrefix("m", bytes([number]), Layers(), 1) for number in range(4)]
    for number, entry in enumerate(entries):
        past.record_snapshot(10 + number, entry)
    assert (past.snapshot_at, past.snapshots) == (13, entries)
    assert past.take_snapshots(5) == past.take_snapshots(4) == []
    assert past.take_snapshots(3) == entries[:1]
    assert past.snapshots == entries[1:]
    assert past.take_snapshots(0) == entries[1:]
    assert (past.snapshots, past.take_snapshots(2)) == ([], [])


def test_numbers_of_the_prefix_cache_are_recorded():
    past = make_past()
    past.record_removal(7)
    past.record_restored(parts := cast("Any", (object(),)))
    assert (past.removed_tokens, past.restored) == (7, parts)


def test_a_cleared_prefill_keeps_no_memory():
    prefill = make_prefill(logits=mx.zeros((1, 5)))
    prefill.start(Layers())
    prefill.use_prefix_cache(past := make_past())
    past.set_history(history := cast("WindowHistory", object()))
    assert past.history is history
    restore = begin_restore(past)
    prefill.clear()
    assert (prefill.cache, prefill.logits, past.history, past.restoring, restore.closed) == (None, None, None, None, 1)
    alone = make_prefill(logits=mx.zeros((1, 5)))
    alone.clear()
    assert alone.logits is None


# groups


def test_rows_are_grouped_by_the_ids_of_their_answers():
    first, second, third, fourth = make_sequence(rows=4).rows
    first.ids, third.ids, fourth.ids = [1, 2], [1, 2], [2, 1]
    assert group_by_past([first, second, third, fourth]) == {(1, 2): [first, third], (): [second], (2, 1): [fourth]}


def test_rows_are_grouped_by_their_batch():
    ledger = CommitmentLedger(KvParameters(1, 0, 0, 0))
    joining, alone = ledger.commit(10, 1), ledger.commit(10, 2)
    sequence = make_sequence(rows=3)
    for row, commitment in zip(sequence.rows, [joining[0], alone[1], alone[0]], strict=True):
        row.commit(commitment)
    assert [ledger.get_batch_number(row.commitment) for row in sequence.rows] == [1, 2, 1]
    loaded = cast("LoadedModel", SimpleNamespace(ledger=ledger))
    assert group_by_batch(loaded, sequence.rows) == [[sequence.rows[0], sequence.rows[2]], [sequence.rows[1]]]
