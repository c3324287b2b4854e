"""Preemption in the scripted engine: the request that loses its memory, how it ends, and when it returns."""

from typing import cast

import pytest

from node.engine.memory.gate import GateSite
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS, compute_return_tokens
from node.engine.scripted.preemption import ScriptedPreemptor
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from tests.unit.node.engine.scripted.test_sequence import PROMPT, make_sequence
from wire.frames import Failed, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused

LIMIT = 2000
NO_ROOM = Refused(RefusalCode.NO_ROOM, "no room")
UNREADABLE = Refused(RefusalCode.UNREADABLE, "unreadable")


class Memory:
    """A gate with a scripted answer, which records its checks."""

    def __init__(self) -> None:
        self.refused: Refused | None = None
        self.peak_expiry: float | None = None
        self.checks: list[tuple[GateSite, float, int]] = []

    def check(self, site: GateSite, now: float, estimate: int = 0) -> Refused | None:
        self.checks.append((site, now, estimate))
        return self.refused

    def observe(self, now: float) -> None:
        pass

    def compute_peak_expiry(self, now: float) -> float | None:
        return self.peak_expiry


class Bench:
    """A preemptor over a table of four rows."""

    def __init__(self) -> None:
        self.table, self.memory = ScriptedTable(4), Memory()
        self.preemptor = ScriptedPreemptor(self.table, self.memory)

    def add(
        self, number: int, *, rows: int = 1, key: str = "home", sent: int = 0, runs: bool = True
    ) -> ScriptedSequence:
        """Add a request that arrived at its number, and has sent `sent` tokens."""
        sequence = make_sequence(rows, limit=LIMIT, ends=LIMIT, number=number, arrived=float(number), key=key)
        self.table.enqueue(sequence)
        if runs:
            sequence.start()
            sequence.prefill(PROMPT)
            self.table.start_decode(sequence)
            for row in sequence.rows:
                row.join(PROMPT)
        if sent:
            sequence.add_tokens(sequence.rows[0], sent, 0.0)
            sequence.rows[0].gather(number)
        return sequence


@pytest.fixture
def bench() -> Bench:
    return Bench()


def committed(sequence: ScriptedSequence) -> int:
    return sequence.ledger.compute_committed_bytes()


@pytest.mark.parametrize(
    ("sent", "others", "peak", "refused", "end"),
    [
        (0, True, None, NO_ROOM, Refusal(1, NO_ROOM, PROMPT)),
        (0, False, 9.0, UNREADABLE, Refusal(1, UNREADABLE, PROMPT)),
        (2, False, None, NO_ROOM, Failed(1, FailureCode.NO_HEADROOM, "no room")),
        (2, True, None, NO_ROOM, None),
        (2, False, 9.0, NO_ROOM, None),
        (2, False, None, UNREADABLE, None),
    ],
)
def test_a_request_without_room_is_refused_preempted_or_fails(
    bench: Bench, sent: int, others: bool, peak: float | None, refused: Refused, end: Frame | None
):
    sequence = bench.add(1, sent=sent)
    if others:
        bench.add(2)
    bench.memory.peak_expiry = peak
    bench.preemptor.release_memory(sequence, refused, 5.0)
    assert bench.preemptor.drain_ends() == ([] if end is None else [end])
    assert bench.preemptor.drain_ends() == [], "an end is returned once"
    assert committed(sequence) == 0
    assert list(bench.table.preempted) == ([sequence] if end is None else [])
    assert (len(bench.table), bench.preemptor.preemptions) == (others + (end is None), end is None)
    assert bench.table.crowded_at == (5.0 if others and end is not None else float("-inf"))
    assert not sequence.yielded


def test_a_row_that_grows_takes_the_memory_of_the_newest_request(bench: Bench):
    oldest, newest = bench.add(1, sent=1), bench.add(2, sent=1)
    bench.preemptor.release_for(oldest, NO_ROOM, 5.0)
    assert (list(bench.table.preempted), list(bench.table.running)) == ([newest], [oldest])
    waiting = bench.add(3, runs=False)
    bench.preemptor.release_for(oldest, NO_ROOM, 5.0)
    assert bench.preemptor.drain_ends() == [Refusal(3, NO_ROOM, PROMPT)], "it has not started"
    assert bench.table.find(waiting.number) is None


def test_a_request_is_dropped_in_any_state_without_a_frame(bench: Bench):
    running, queued, preempted = bench.add(1, sent=1), bench.add(2, runs=False), bench.add(3, sent=1)
    bench.preemptor.preempt(preempted, for_key=True)
    assert preempted.yielded
    for sequence in (running, queued, preempted):
        bench.preemptor.drop(sequence, 5.0)
        assert (committed(sequence), bench.table.find(sequence.number)) == (0, None)
    assert (len(bench.table), bench.table.rows, bench.preemptor.drain_ends()) == (0, 0, [])


def test_rows_are_freed_for_a_key_with_fewer_of_them(bench: Bench):
    home = [bench.add(number, sent=1) for number in range(1, 5)]
    office = bench.add(9, key="office", rows=2, runs=False)
    bench.preemptor.share_rows(office)
    assert list(bench.table.preempted) == [home[3], home[2]]
    assert all(sequence.yielded for sequence in home[2:])
    assert bench.table.count_free_rows() == 2
    bench.preemptor.share_rows(office)
    assert bench.preemptor.preemptions == 2, "enough rows are free"


def test_no_more_rows_are_freed_than_are_missing(bench: Bench):
    first, second = bench.add(1, sent=1), bench.add(2, sent=1)
    started = bench.add(3, runs=False)
    started.start()
    office = bench.add(9, key="office", rows=2, runs=False)
    bench.preemptor.share_rows(office)
    assert list(bench.table.preempted) == [started], "one row was free"
    assert [first.started, second.started] == [True, True]


def test_no_row_is_freed_for_a_key_that_has_its_share(bench: Bench):
    bench.add(1, rows=2, sent=1)
    bench.add(2, key="office", rows=2, sent=1)
    bench.preemptor.share_rows(bench.add(3, key="office", runs=False))
    assert bench.preemptor.preemptions == 0


def needed(sequence: ScriptedSequence) -> int:
    """Return the bytes of a request that returns, whose rows take 1 byte for each token."""
    lengths = [compute_return_tokens(PROMPT + row.produced, PROMPT + LIMIT) for row in sequence.rows if not row.reason]
    return sum(sequence.ledger.compute_cost(length, 1) for length in lengths)


def test_the_oldest_preempted_request_that_precedes_requires_its_bytes(bench: Bench):
    assert bench.preemptor.compute_required_bytes(None) == 0
    first, second = bench.add(1, sent=1), bench.add(2, rows=2, key="office", sent=3)
    bench.preemptor.preempt(second, for_key=False)
    bench.preemptor.preempt(first, for_key=True)
    assert needed(first) != needed(second)
    assert [bench.preemptor.compute_required_bytes(key) for key in (None, "home", "office", "lab")] == [
        needed(first),
        needed(first),
        needed(second),
        needed(second),
    ]
    second.rows[1].reason = "stop"
    assert bench.preemptor.compute_required_bytes("lab") == needed(second), "ended rows need nothing"


def test_a_preempted_request_returns_with_new_commitments_when_there_is_room(bench: Bench):
    sequence = bench.add(1, rows=2, sent=3)
    bench.preemptor.preempt(sequence, for_key=False)
    assert bench.preemptor.preemptions == 1, "requests are counted, not their rows"
    need = needed(sequence)
    bench.memory.refused, bench.memory.peak_expiry = NO_ROOM, 99.0
    bench.preemptor.return_next(10.0)
    assert bench.memory.checks == [(GateSite.PREFLIGHT, 10.0, need)]
    assert bench.preemptor.return_at == 10.0 + GATE_RETRY_SECONDS
    bench.memory.refused = None
    bench.preemptor.return_next(10.0 + GATE_RETRY_SECONDS / 2)
    assert list(bench.table.preempted) == [sequence], "it is checked once in the interval"
    bench.preemptor.return_next(10.0 + GATE_RETRY_SECONDS)
    assert (list(bench.table.preempted), list(bench.table.queue)) == ([], [sequence])
    lengths = [compute_return_tokens(PROMPT + row.produced, PROMPT + LIMIT) for row in sequence.rows]
    assert [row.commitment.committed_tokens for row in sequence.rows] == lengths
    bench.preemptor.return_next(99.0)
    assert len(bench.memory.checks) == 2, "no request is preempted"


@pytest.mark.parametrize(
    ("refused", "others", "ends"), [(NO_ROOM, False, True), (NO_ROOM, True, False), (UNREADABLE, False, False)]
)
def test_a_preempted_request_ends_if_no_memory_may_become_free(
    bench: Bench, refused: Refused, others: bool, ends: bool
):
    sequence = bench.add(1, sent=3)
    bench.preemptor.preempt(sequence, for_key=False)
    if others:
        bench.add(2)
    bench.memory.refused = refused
    bench.preemptor.return_next(10.0)
    failed = Failed(1, FailureCode.NO_HEADROOM, refused.message)
    assert bench.preemptor.drain_ends() == ([failed] if ends else [])
    assert list(bench.table.preempted) == ([] if ends else [sequence])


def test_a_request_that_gave_its_rows_to_another_key_returns_only_to_free_rows(bench: Bench):
    sequence = bench.add(1, rows=2, sent=3)
    bench.preemptor.preempt(sequence, for_key=True)
    bench.add(2, rows=3, runs=False)
    bench.preemptor.return_next(10.0)
    assert bench.memory.checks == []
    bench.preemptor.drop(cast("ScriptedSequence", bench.table.find(2)), 10.0)
    bench.preemptor.return_next(20.0)
    assert list(bench.table.queue) == [sequence]
