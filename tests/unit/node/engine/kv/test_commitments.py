import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.kv.commitments import Commitment, CommitmentLedger
from wire.report import BatchGroup, KvParameters

KV = 131072


def promised(ledger: CommitmentLedger) -> int:
    return ledger.compute_stored_bytes() + ledger.compute_reserved_bytes()


def test_rows_are_padded_to_the_longest_and_a_wasteful_row_gets_its_own_batch():
    ledger = CommitmentLedger(KvParameters(KV))
    for length in (17, 18, 16):
        ledger.commit(length, 1)
    assert ledger.list_groups() == (BatchGroup(3, 18, 51),)
    ledger.commit(60_000, 1)
    assert ledger.list_groups() == (BatchGroup(3, 18, 51), BatchGroup(1, 60_000, 60_000))


def test_rows_that_decode_alone_are_not_padded():
    ledger = CommitmentLedger(KvParameters(KV, waste=2**30), alone=True)
    assert ledger.compute_cost(100, 3) == 300 * KV
    first, *_ = ledger.commit(100, 3)
    assert [ledger.compute_cost(length, 1) for length in (17, 90, 110)] == [17 * KV, 90 * KV, 110 * KV]
    (row,) = ledger.commit(17, 1)
    assert ledger.list_groups() == (BatchGroup(1, 100, 0),) * 3 + (BatchGroup(1, 17, 0),)
    assert ledger.compute_committed_bytes() == 317 * KV
    assert ledger.compute_extension_bytes(row, 10) == 10 * KV
    ledger.set_waste(2**30)
    assert ledger.kv.waste == 0
    ledger.release(first)
    assert [group.rows for group in ledger.list_groups()] == [1, 1, 1]


def test_writing_moves_bytes_and_never_makes_any():
    ledger = CommitmentLedger(KvParameters(KV))
    row, other = ledger.commit(100, 1)[0], ledger.commit(90, 1)[0]
    row.record_prefill(100, 0)
    other.record_prefill(10, 0)
    assert ledger.compute_stored_bytes() == 110 * KV, "a row in prefill has a cache of its own, without padding"
    row.record_join(100)
    other.record_join(10)
    assert ledger.compute_stored_bytes() == 2 * 100 * KV
    assert ledger.compute_reserved_bytes() == 0
    ledger.release(row)
    assert ledger.compute_stored_bytes() == 10 * KV
    assert ledger.compute_reserved_bytes() == 80 * KV
    ledger.release(other)
    assert ledger.list_groups() == ()


def test_room_that_a_prompt_has_taken_ahead_is_written_and_no_longer_promised():
    kv = KvParameters(KV, step=256, window=64, window_per_token=8)
    ledger = CommitmentLedger(kv)
    (row,) = ledger.commit(1000, 1)
    row.record_prompt(100)
    plain, whole = ledger.compute_stored_bytes(), promised(ledger)
    row.record_prefill(100, 355)
    assert ledger.compute_stored_bytes() == plain, "what a row of 100 tokens may have anyhow"
    row.record_prefill(100, 800)
    assert ledger.compute_stored_bytes() == plain + (800 - 355) * KV, "only growing layers allocate in advance"
    assert promised(ledger) == whole
    row.record_join(100)
    assert ledger.compute_stored_bytes() == plain


def test_a_promise_begins_unwritten_and_one_of_nothing_takes_nothing():
    ledger = CommitmentLedger(KvParameters(KV))
    (row,) = ledger.commit(100, 1)
    assert (row.stored_tokens, row.is_joined) == (0, False)
    assert (ledger.compute_stored_bytes(), ledger.compute_reserved_bytes()) == (0, 100 * KV)
    empty = CommitmentLedger(KvParameters(KV, fixed=1000))
    assert empty.compute_cost(0, 1) == 0
    empty.commit(0, 1)
    assert promised(empty) == 0


def test_a_misspelt_word_of_what_is_written_is_an_error_and_not_a_promise_that_never_shrinks():
    (row,) = CommitmentLedger(KvParameters(KV)).commit(100, 1)
    with pytest.raises(AttributeError):
        row.writen = 100  # type: ignore[attr-defined]


def test_a_batch_keeps_its_number_and_no_other_ever_has_it():
    ledger = CommitmentLedger(KvParameters(KV))
    (long,), (short,) = ledger.commit(60_000, 1), ledger.commit(20, 1)
    first, second = ledger.get_batch_number(long), ledger.get_batch_number(short)
    assert first != second
    assert ledger.get_batch_number(ledger.commit(59_000, 1)[0]) == first
    ledger.release(short)
    assert ledger.get_batch_number(ledger.commit(20, 1)[0]) not in (first, second)


def test_a_join_needs_the_bytes_of_the_whole_padded_batch():
    ledger = CommitmentLedger(KvParameters(KV))
    (decoding,), (still_in_prefill,) = ledger.commit(100, 1), ledger.commit(100, 1)
    decoding.record_join(50)
    still_in_prefill.record_prompt(99)
    rows = ledger.commit(90, 3)
    for row in rows:
        row.record_prompt(80)
    assert ledger.compute_joined_bytes(rows[0], 1) == 2 * 80 * KV, "a row in prefill is in no batch yet"
    assert ledger.compute_joined_bytes(rows[1], 2) == 2 * 80 * KV, "the equals have a batch of their own"
    rows[0].record_prompt(20)
    assert ledger.compute_joined_bytes(rows[0], 1) == 2 * 50 * KV


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 9000), st.integers(1, 4)),
        st.tuples(st.just("write"), st.integers(0, 30), st.integers(1, 9000)),
        st.tuples(st.just("extend"), st.integers(0, 30), st.integers(1, 64)),
        st.tuples(st.just("release"), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_committed_bytes_rise_exactly_by_the_checked_cost(operations: list[tuple[str, int, int]]):
    ledger = CommitmentLedger(KvParameters(KV))
    rows: list[Commitment] = []
    for name, first, second in operations:
        before = promised(ledger)
        row = rows[first % len(rows)] if rows and name != "commit" else None
        if name == "commit":
            cost = ledger.compute_cost(first, second)
            rows += ledger.commit(first, second)
            assert promised(ledger) == before + cost
        elif row is not None and name == "write":
            row.reset()
            row.record_prompt(min(row.committed_tokens, second))
            if second % 2 == 0:
                row.record_join(row.stored_tokens)
            assert promised(ledger) == before
        elif row is not None and name == "extend":
            cost = ledger.compute_extension_bytes(row, second)
            ledger.extend(row, second)
            assert promised(ledger) == before + cost
        elif row is not None:
            rows.remove(row)
            ledger.release(row)
            assert promised(ledger) < before
        assert ledger.compute_reserved_bytes() >= 0
        assert sum(group.rows for group in ledger.list_groups()) == len(rows)


def test_a_ledger_counts_rows_until_release_and_rows_of_a_batch():
    ledger = CommitmentLedger(KvParameters(KV))
    assert len(ledger) == 0
    first, second = ledger.commit(100, 2)
    (third,) = ledger.commit(60_000, 1)
    assert len(ledger) == 3
    assert [ledger.is_committed(row) for row in (first, second, third)] == [True, True, True]
    second.record_join(0)
    assert (ledger.count_joined_rows(first), ledger.count_joined_rows(second), ledger.count_joined_rows(third)) == (
        1,
        1,
        0,
    )
    ledger.release(first)
    assert [ledger.is_committed(row) for row in (first, second, third)] == [False, True, True]
    assert len(ledger) == 2


def test_a_row_counts_its_tokens_and_a_reset_keeps_only_its_committed_tokens():
    row = Commitment(100)
    row.record_prefill(7, 256)
    assert (row.stored_tokens, row.capacity_tokens, row.is_joined) == (7, 256, False)
    row.record_join(8)
    row.record_token()
    assert (row.stored_tokens, row.capacity_tokens, row.is_joined) == (9, 0, True)
    row.extend(16)
    row.reset()
    assert (row.committed_tokens, row.stored_tokens, row.capacity_tokens, row.is_joined) == (116, 0, 0, False)


def test_a_bound_of_waste_replaces_the_one_before():
    ledger = CommitmentLedger(KvParameters(KV, step=256))
    ledger.set_waste(5)
    assert ledger.kv == KvParameters(KV, step=256, waste=5)
