"""Rows and requests of the scripted engine: counted tokens, text, replays, and the numbers of the prefill."""

import pytest

from node.engine.kv.commitments import Commitment, CommitmentLedger
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS
from node.engine.requests.preflight import RequestShape
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence, TextRow
from node.engine.text.stop_strings import StopStrings
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, Finished, Generate, GenerationParams, Message, Timings
from wire.report import KvParameters

PROMPT, LIMIT = 10, 8


def make_sequence(
    rows: int = 1,
    *,
    prompt: int = PROMPT,
    ends: int = 6,
    limit: int = LIMIT,
    number: int = 5,
    arrived: float = 2.0,
    key: str = "home",
    model: str = "m",
) -> ScriptedSequence:
    """Return a request without memory, whose rows have no text."""
    request = Generate(
        number, 0, "r", model, (Message("user", "a"),), GenerationParams(n=rows), 0, weighted_key=WeightedKey(key)
    )
    ledger = CommitmentLedger(KvParameters(per_token=1))
    shape = RequestShape(prompt, limit, 4, rows)
    made = ScriptedSequence(request=request, shape=shape, ledger=ledger, ends=ends, arrived=arrived)
    made.rows += [
        ScriptedRow(choice=choice, commitment=one) for choice, one in enumerate(ledger.commit(prompt + 4, rows))
    ]
    return made


def make_row() -> ScriptedRow:
    return ScriptedRow(choice=1, commitment=Commitment(20, 10))


def make_text_row(*stops: str) -> TextRow:
    """Return a row whose token `n` is 100 + n, with one letter of the alphabet."""
    source = lambda position, now: (100 + position, "abcdefgh"[position])  # noqa: E731
    return TextRow(choice=1, commitment=Commitment(20, 10), stops=StopStrings(stops), token_source=source)


# rows without text


@pytest.mark.parametrize(
    ("ends", "limit", "steps", "reasons"),
    [(3, 8, [1, 1, 1], ["", "", "stop"]), (8, 2, [1, 1], ["", "length"]), (3, 3, [2, 1], ["", "stop"])],
)
def test_a_row_ends_with_its_answer_or_at_its_limit(ends: int, limit: int, steps: list[int], reasons: list[str]):
    row = make_row()
    for count, reason in zip(steps, reasons, strict=True):
        row.add_tokens(7, count, 0.0, ends=ends, limit=limit)
        assert row.reason == reason
    assert (row.produced, row.commitment.stored_tokens, row.stop) == (sum(steps), 10 + sum(steps), "")


def test_a_row_without_text_sends_its_first_token_and_its_end():
    row = make_row()
    assert (row.count_steps_left(6), row.is_due(0.0, stream=True)) == (1, True)
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert row.gather(7) == Delta(7, 1, (0,), ((Channel.CONTENT, "x"),))
    assert (row.count_steps_left(6), row.is_due(99.0, stream=True)) == (5, False)
    row.add_tokens(7, 5, 0.0, ends=6, limit=8)
    assert row.is_due(0.0, stream=False)
    assert row.gather(7) == Delta(7, 1, (0, 1, 2, 3, 4), ((Channel.CONTENT, "xxxxx"),))


def test_tokens_of_another_node_are_neither_sent_nor_in_a_cache():
    row = make_row()
    row.end_replay(4)
    assert (row.produced, row.resumed_tokens, row.sent, row.commitment.stored_tokens) == (4, 4, 4, 0)
    assert (row.count_steps_left(6), row.is_due(0.0, stream=False)) == (1, True)
    row.prefill(13)
    assert (row.commitment.stored_tokens, row.commitment.capacity_tokens) == (13, 13)
    row.join(PROMPT)
    assert (row.commitment.stored_tokens, row.commitment.is_joined) == (14, True)
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert row.gather(7).ids == (0,)
    assert row.count_steps_left(6) == 1


# rows with text


def test_a_text_row_gathers_its_tokens_with_their_text():
    row = make_text_row()
    row.add_tokens(7, 3, 0.0, ends=6, limit=8)
    assert (row.produced, row.commitment.stored_tokens, row.count_steps_left(6)) == (3, 13, 1)
    assert row.gather(7) == Delta(7, 1, (100, 101, 102), ((Channel.CONTENT, "abc"),))
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert row.gather(7) == Delta(7, 1, (103,), ((Channel.CONTENT, "d"),))


@pytest.mark.parametrize(
    ("stops", "ends", "limit", "count", "text", "reason", "stop"),
    [
        ((), 6, 8, 6, "abcdef", "stop", ""),
        ((), 6, 2, 2, "ab", "length", ""),
        (("cd",), 6, 8, 4, "ab", "stop", "cd"),
        (("dx",), 4, 8, 4, "abcd", "stop", ""),
        (("dx",), 8, 4, 4, "abcd", "length", ""),
        (("bc",), 6, 3, 3, "a", "stop", "bc"),
    ],
)
def test_a_text_row_ends_with_its_answer_its_limit_or_a_stop_string(
    stops: tuple[str, ...], ends: int, limit: int, count: int, text: str, reason: str, stop: str
):
    row = make_text_row(*stops)
    row.add_tokens(7, count - 1, 0.0, ends=ends, limit=limit)
    assert row.reason == ""
    row.add_tokens(7, 1, 0.0, ends=ends, limit=limit)
    delta = row.gather(7)
    assert (delta.ids, delta.pieces) == (tuple(range(100, 100 + count)), ((Channel.CONTENT, text),))
    assert (row.reason, row.stop) == (reason, stop)


def test_a_token_without_a_text_has_no_piece():
    row = make_text_row("ab")
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert row.gather(7) == Delta(7, 1, (100,), ())


@pytest.mark.parametrize(
    ("seconds", "stream", "due"),
    [(0.0, True, True), (0.0, False, False), (FLUSH_INTERVAL_SECONDS, False, True)],
)
def test_a_streamed_answer_is_sent_at_once_and_a_whole_one_in_an_interval(seconds: float, stream: bool, due: bool):
    row = make_text_row()
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert row.is_due(seconds, stream=stream) is due
    row.add_tokens(7, 5, 0.0, ends=6, limit=8)
    assert row.is_due(0.0, stream=False), "the answer has ended"


def test_a_replayed_text_is_not_sent_again_and_continues():
    row = make_text_row("cd")
    row.replay(7, [100, 101, 102], 0.0, ends=6, limit=8)
    assert (row.produced, row.sent, row.resumed_tokens, row.reason) == (3, 3, 3, "")
    assert row.commitment.stored_tokens == 0
    row.add_tokens(7, 1, 0.0, ends=6, limit=8)
    assert (row.gather(7).ids, row.stop) == ((103,), "cd"), "the stop string began in the replayed text"
    row = make_text_row()
    row.replay(7, [0] * 5, 0.0, ends=3, limit=8)
    assert (row.produced, row.reason) == (3, "stop"), "tokens after the end are ignored"


# requests


def test_a_request_has_the_fields_of_its_frame():
    sequence = make_sequence(number=9, arrived=3.5, key="office", model="n")
    assert (sequence.number, sequence.model, sequence.age) == (9, "n", (3.5, 9))
    assert sequence.weighted_key.name == "office"
    assert [make_sequence(ends=ends).last for ends in (6, LIMIT, 100)] == [6, LIMIT, LIMIT]


def test_only_rows_that_have_not_ended_count():
    sequence = make_sequence(3)
    sequence.rows[1].reason = "stop"
    assert (sequence.width, sequence.list_active_rows()) == (2, [sequence.rows[0], sequence.rows[2]])
    alone = make_sequence()
    assert alone.width == 1
    alone.rows[0].reason = "stop"
    assert (alone.width, alone.list_active_rows()) == (0, [])


def test_the_prefill_has_the_prompt_and_the_longest_running_answer():
    sequence = make_sequence(3)
    for row, produced in zip(sequence.rows, (2, 5, 3), strict=True):
        row.produced = produced
    assert sequence.length == PROMPT + 5
    sequence.rows[1].reason = "stop"
    assert sequence.length == PROMPT + 3
    alone = make_sequence()
    alone.rows[0].produced = 4
    assert (alone.length, alone.left) == (PROMPT + 4, PROMPT + 4)


def test_a_prefill_starts_with_its_cached_tokens():
    sequence = make_sequence(2)
    sequence.warm = 4
    assert sequence.left == PROMPT - 4
    sequence.start()
    assert (sequence.started, sequence.prefilled, sequence.left) == (True, 4, PROMPT - 4)
    sequence.prefill(3)
    sequence.start()
    assert (sequence.prefilled, sequence.left) == (7, PROMPT - 7)
    assert [row.commitment.stored_tokens for row in sequence.rows] == [7, 7]
    assert sequence.holds_memory


@pytest.mark.parametrize("for_key", [False, True])
def test_a_preempted_request_prefills_again_and_loses_its_precedence_to_another_key(for_key: bool):
    sequence = make_sequence(2)
    sequence.warm = 4
    sequence.start()
    sequence.prefill(6)
    sequence.delay(9.0)
    sequence.rows[0].produced, sequence.rows[1].reason = 1, "stop"
    ended = sequence.rows[1].commitment
    assert (sequence.retry_at, sequence.answered) == (9.0, True)
    sequence.preempt(for_key=for_key)
    assert (sequence.started, sequence.prefilled, sequence.warm, sequence.retry_at) == (False, 0, 0, 0.0)
    assert (sequence.yielded, sequence.answered, sequence.holds_memory) == (for_key, not for_key, False)
    assert sequence.rows[0].commitment.committed_tokens == 0
    assert sequence.rows[1].commitment is ended
    sequence.preempt(for_key=False)
    assert sequence.yielded is for_key, "a later preemption for memory does not restore the precedence"


def test_a_request_is_answered_with_tokens_of_any_node_and_delivered_with_those_of_this_one():
    sequence = make_sequence(2)
    assert (sequence.answered, sequence.delivered) == (False, False)
    sequence.rows[1].end_replay(3)
    assert (sequence.answered, sequence.delivered) == (True, False)
    sequence.add_tokens(sequence.rows[1], 1, 0.0)
    assert not sequence.delivered
    sequence.rows[1].gather(5)
    assert sequence.delivered


def test_the_end_of_a_request_has_its_times_and_counts():
    sequence = make_sequence(2, ends=6, arrived=2.0)
    sequence.delay(9.0)
    sequence.begin(10.0)
    sequence.mark_sent(11.0)
    assert (sequence.begun, sequence.last_token_at, sequence.retry_at) == (10.0, 11.0, 0.0)
    sequence.begin(12.0)
    assert (sequence.begun, sequence.last_token_at) == (10.0, 12.0)
    sequence.cached = 4
    sequence.add_tokens(sequence.rows[0], 6, 0.0)
    sequence.add_tokens(sequence.rows[1], 2, 0.0)
    assert sequence.build_finished(15.0) == Finished(
        5, ("stop", ""), PROMPT, 8, 4, timings=Timings(8.0, 0.0, 5.0), stops=()
    )
    row = make_text_row("ab")
    row.add_tokens(5, 2, 0.0, ends=6, limit=8)
    sequence.rows[1] = row
    assert sequence.build_finished(15.0).stops == ("", "ab")
