"""A request and its rows without an engine: ids, text, deltas and times."""

import json

import pytest

from node.engine.kv.commitments import Commitment
from node.engine.requests.preflight import RequestShape
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.rules.row_state import RowEvent, RowState
from node.engine.scheduling.sampling import SamplingParameters
from tests.unit.node.engine.text.test_detokenizer import LOOK, pipeline
from wire.bounds import LONG_CHARACTERS, MAX_DELTAS
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, Generate, GenerationParams, Logprob, Message
from wire.state_machine import IllegalEventError

EOS = 4
PIECES = ["a", "b", "<think>", "</think>", "", LOOK, "XY", "<thi"]
"""Texts of the token ids; `EOS` has none."""


def make_sequence(
    *, limit: int = 8, rows: int = 1, number: int = 9, arrived: float = 10.0, **fields: object
) -> Sequence:
    """Return a request with a prompt of 3 tokens, whose rows have committed 5 tokens and store those of the prompt."""
    request = Generate(number, 1, "r", "m", (Message("user", "a"),), GenerationParams(), 0, **fields)  # type: ignore[arg-type]
    prepared = PreparedRequest(request, (11, 12, 13), frozenset({EOS}))
    made = Sequence(request, prepared, RequestShape(3, limit, 2, rows), SamplingParameters(), 7, arrived)
    for choice in range(rows):
        made.rows.append(Row(made, choice, Commitment(5, 3), pipeline(PIECES, stops=["XY"])))
    return made


def make_row(**fields: object) -> Row:
    """Return the first row of a request, in a decode batch."""
    (row,) = make_sequence(**fields).rows  # type: ignore[arg-type]
    for event in (RowEvent.CHUNK, RowEvent.PREFILLED, RowEvent.JOINED):
        row.apply(event)
    return row


def generate(row: Row, *ids: int) -> None:
    """Add generated tokens, each with its text."""
    for token in ids:
        row.add_id(token)
        row.add_token_text(token)


# rows


def test_a_generated_token_is_stored_and_unsent_and_has_a_text():
    row = make_row()
    generate(row, 0, 2, 1)
    assert (row.ids, row.new, row.commitment.stored_tokens, row.reason) == ([0, 2, 1], [0, 2, 1], 6, "")
    assert row.list_token_ids() == [11, 12, 13, 0, 2, 1]
    assert row.drain_deltas() == [Delta(9, 0, (0, 2, 1), ((Channel.CONTENT, "a"), (Channel.REASONING, "b")), ())]
    generate(row, 0)
    assert row.drain_deltas() == [Delta(9, 0, (0,), ((Channel.REASONING, "a"),), ())]
    assert row.drain_deltas() == [Delta(9, 0, (), (), ())]


@pytest.mark.parametrize(
    ("ids", "limit", "reason", "text"),
    [
        ([0, EOS], 8, "stop", "a"),
        ([0, 1], 8, "", "ab"),
        ([0, 1], 3, "", "ab"),
        ([0, 1], 2, "length", "ab"),
        ([0, EOS], 2, "stop", "a"),
        ([0, 6], 8, "stop", "a"),
        ([0, 6], 2, "stop", "a"),
        ([0, 7], 8, "", "a"),
        ([0, 7, EOS], 8, "stop", "a<thi"),
        ([0, 7], 2, "length", "a<thi"),
        ([EOS], 1, "stop", ""),
    ],
)
def test_a_row_ends_at_an_end_token_a_stop_string_or_its_limit(ids: list[int], limit: int, reason: str, text: str):
    row = make_row(limit=limit)
    generate(row, *ids)
    (delta,) = row.drain_deltas()
    assert (row.reason, "".join(text for _, text in delta.pieces), delta.ids) == (reason, text, tuple(ids))
    assert row.state is (RowState.ENDED if reason else RowState.DECODE)


def test_the_text_decides_the_reason_of_an_answer_with_a_call():
    row = make_row()
    generate(row, 5, EOS)
    assert row.reason == "tool_calls"
    ((channel, text),) = row.pieces
    assert (channel, json.loads(text)["name"]) == (Channel.TOOL_CALL, "look")


def test_a_replayed_answer_is_not_sent_again_and_continues():
    (row,) = make_sequence().rows
    row.replay(iter([2, 0, 3]))
    assert (row.ids, row.new, row.pieces, row.resumed_tokens, row.reason) == ([2, 0, 3], [], [], 3, "")
    assert (row.state, row.commitment.stored_tokens) == (RowState.WAITING, 3)
    assert not row.sequence.delivered
    generate(row, 1)
    assert row.drain_deltas() == [Delta(9, 0, (1,), ((Channel.CONTENT, "b"),), ())]
    assert row.sequence.delivered


@pytest.mark.parametrize(("limit", "ids", "reason"), [(8, [0, EOS], "stop"), (2, [0, 1], "length")])
def test_a_replay_ends_with_the_answer(limit: int, ids: list[int], reason: str):
    (row,) = make_sequence(limit=limit).rows
    row.replay([*ids, 0, 0])
    assert (row.ids, row.reason, row.resumed_tokens, row.state) == (ids, reason, 2, RowState.ENDED)


def test_a_released_row_has_ended_and_an_illegal_event_changes_nothing():
    row = make_row()
    with pytest.raises(IllegalEventError):
        row.apply(RowEvent.PREFILLED)
    assert (row.state, row.reason) == (RowState.DECODE, "")
    row.release()
    assert (row.state, row.reason) == (RowState.ENDED, "released")
    assert [row.count_rebuild() for _ in range(2)] == [1, 2]
    row.commit(commitment := Commitment(0))
    assert row.commitment is commitment


def test_log_probabilities_are_sent_once_with_their_choice():
    row = make_sequence(rows=2).rows[1]
    row.logprobs.append(logprob := Logprob(b"t", -1.0))
    row.new.append(3)
    assert row.drain_deltas() == [Delta(9, 1, (3,), (), (logprob,))]
    assert row.drain_deltas() == [Delta(9, 1, (), (), ())]


def test_pieces_of_a_channel_are_joined_except_calls():
    row = make_row()
    row.pieces = [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (0, "e"), (2, "f"), (2, "g"), (0, "h")]
    (delta,) = row.drain_deltas()
    assert delta.pieces == ((0, "ab"), (1, "cd"), (0, "e"), (2, "f"), (2, "g"), (0, "h"))


def test_a_text_of_the_maximum_length_is_one_delta_and_a_longer_one_is_cut():
    row = make_row()
    row.new, row.pieces = [1], [(0, "a" * LONG_CHARACTERS)]
    assert [(delta.ids, len(delta.pieces)) for delta in row.drain_deltas()] == [((1,), 1)]
    row.new, row.pieces = [1], [(1, "b" * LONG_CHARACTERS), (0, "a"), (2, "c" * LONG_CHARACTERS)]
    deltas = row.drain_deltas()
    assert [delta.ids for delta in deltas] == [(1,), (), ()]
    assert [[(channel, len(text)) for channel, text in delta.pieces] for delta in deltas] == [
        [(1, LONG_CHARACTERS)],
        [(0, 1)],
        [(2, LONG_CHARACTERS)],
    ]
    row.pieces = [(0, "a" * (2 * LONG_CHARACTERS + 1))]
    assert [len(delta.pieces[0][1]) for delta in row.drain_deltas()] == [LONG_CHARACTERS, LONG_CHARACTERS, 1]
    row.pieces = [(2, str(number)) for number in range(MAX_DELTAS)]
    assert [len(delta.pieces) for delta in row.drain_deltas()] == [MAX_DELTAS]


# requests


def test_a_request_has_the_fields_of_its_frame():
    sequence = make_sequence(number=5, arrived=2.5, weighted_key=WeightedKey("home", 2))
    assert (sequence.number, sequence.age, sequence.prompt) == (5, (2.5, 5), (11, 12, 13))
    assert sequence.weighted_key == WeightedKey("home", 2)
    assert sequence.cache_scope == "home"
    assert make_sequence(weighted_key=WeightedKey("home", 2), cache_scope="all").cache_scope == "all"


def test_the_oldest_request_is_the_first_that_arrived():
    sequences = [make_sequence(number=number, arrived=at) for number, at in ((2, 5.0), (1, 6.0), (3, 4.0), (1, 5.0))]
    assert [one.age for one in sorted(sequences, key=lambda one: one.age)] == [(4.0, 3), (5.0, 1), (5.0, 2), (6.0, 1)]


def test_times_of_the_first_prefill_and_join_stay_and_that_of_output_moves():
    sequence = make_sequence()
    assert (sequence.begun, sequence.joined, sequence.last_token_at) == (0.0, 0.0, 0.0)
    for now in (11.0, 12.0):
        sequence.mark_begun(now)
    assert (sequence.begun, sequence.joined) == (11.0, 0.0)
    sequence.mark_joined(13.0)
    assert (sequence.begun, sequence.joined, sequence.last_token_at) == (11.0, 13.0, 13.0)
    sequence.mark_sent(14.0)
    sequence.mark_joined(15.0)
    assert (sequence.joined, sequence.last_token_at) == (13.0, 14.0)


def test_cached_tokens_are_those_before_the_first_join_and_of_the_prompt():
    sequence = make_sequence()
    sequence.set_cached(2)
    assert (sequence.cached, sequence.prompt_cached) == (2, 2)
    sequence.set_cached(9)
    assert (sequence.cached, sequence.prompt_cached) == (9, 3), "the answer of a resumed request is cached as well"
    sequence.mark_joined(1.0)
    sequence.set_cached(0)
    assert sequence.cached == 9
    sequence.set_prompt_hash(b"hash")
    sequence.mark_yielded()
    assert (sequence.prompt_hash, sequence.yielded) == (b"hash", True)


def test_only_rows_that_have_not_ended_count():
    sequence = make_sequence(rows=3)
    first, second, third = sequence.rows
    assert (sequence.width, list(sequence.iterate_active_rows())) == (3, [first, second, third])
    second.release()
    assert (sequence.width, list(sequence.iterate_active_rows())) == (2, [first, third])
    first.commit(Commitment(5))
    assert sequence.holds_memory, "the third row has tokens"
    third.commit(Commitment(5))
    assert not sequence.holds_memory, "tokens of an ended row do not count"


def test_a_request_is_delivered_once_a_token_of_any_row_is_sent():
    sequence = make_sequence(rows=2)
    assert not sequence.delivered
    second = sequence.rows[1]
    second.add_id(0)
    second.add_id(1)
    assert not sequence.delivered, "no token is sent yet"
    second.drain_deltas()
    assert sequence.delivered
    second.add_id(1)
    assert sequence.delivered
