"""Text that was held back for long is sent in frames that a coordinator accepts."""

from types import SimpleNamespace
from typing import Any, cast

from node.engine.requests.sequence import Row
from wire.bounds import LONG_CHARACTERS, MAX_DELTAS
from wire.codec import MAX_DELTAS_BYTES, encode
from wire.frames import Delta, Deltas, Frame, Logprob, split_deltas


def row(request: int, *pieces: tuple[int, str]) -> Row:
    sequence = SimpleNamespace(number=request)
    return Row(cast("Any", sequence), 0, cast("Any", None), cast("Any", None), pieces=list(pieces), new=[1, 2, 3])


def sent(frames: list[Frame]) -> list[Delta]:
    return [delta for frame in frames if isinstance(frame, Deltas) for delta in frame.deltas]


def test_no_text_makes_a_frame_that_ends_the_link() -> None:
    """A block that opens a call and never ends it is sent completely when the answer ends: megabytes in one step."""
    endless = "\U0001f600" * 2_000_000
    call = '{"arguments":"' + "a" * LONG_CHARACTERS + '"}'
    rows = [row(1, (0, "so "), (0, endless), (2, call)), row(2, (1, endless)), row(3, (0, "short"))]
    frames = split_deltas([delta for one in rows for delta in one.drain_deltas()])
    assert all(len(encode(frame)) <= MAX_DELTAS_BYTES for frame in frames)
    deltas = sent(frames)
    texts = {1: ["", "", ""], 2: ["", "", ""], 3: ["", "", ""]}
    for delta in deltas:
        for channel, text in delta.pieces:
            texts[delta.request][channel] += text
    assert texts == {1: ["so " + endless, "", call], 2: ["", endless, ""], 3: ["short", "", ""]}
    assert [id for delta in deltas if delta.request == 1 for id in delta.ids] == [1, 2, 3]


def test_usual_steps_are_one_frame() -> None:
    rows = [row(number, (0, "a "), (0, "word")) for number in range(64)]
    (frame,) = split_deltas([delta for one in rows for delta in one.drain_deltas()])
    assert [delta.pieces for delta in sent([frame])] == [((0, "a word"),)] * 64


def test_deltas_of_a_row_are_bounded_and_sent_once() -> None:
    logprobs = [Logprob(b"t", -float(number)) for number in range(2 * MAX_DELTAS + 1)]
    calls = [(2, f"{number}") for number in range(MAX_DELTAS + 1)]
    one = row(7, (0, "a"), (1, "b"), (0, "c"), (0, "d"), *calls)
    one.logprobs = list(logprobs)
    deltas = one.drain_deltas()
    assert [(delta.request, delta.choice, delta.ids) for delta in deltas] == [(7, 0, (1, 2, 3)), (7, 0, ()), (7, 0, ())]
    pieces = ((0, "a"), (1, "b"), (0, "cd"), *calls)
    assert [delta.pieces for delta in deltas] == [pieces[:MAX_DELTAS], pieces[MAX_DELTAS:], ()]
    assert [len(delta.logprobs) for delta in deltas] == [MAX_DELTAS, MAX_DELTAS, 1]
    assert [one for delta in deltas for one in delta.logprobs] == logprobs
    assert one.drain_deltas() == [Delta(7, 0, (), ())]


def test_a_text_is_cut_only_above_the_limit() -> None:
    (whole,) = row(1, (0, "a" * (LONG_CHARACTERS - 1)), (1, "b")).drain_deltas()
    assert [len(text) for _, text in whole.pieces] == [LONG_CHARACTERS - 1, 1]
    (call,) = row(1, (2, "a" * (LONG_CHARACTERS + 1))).drain_deltas()
    assert len(call.pieces[0][1]) == LONG_CHARACTERS + 1, "a tool call is never cut"
    cut = row(1, (0, "a" * LONG_CHARACTERS), (1, "b")).drain_deltas()
    assert [[(channel, len(text)) for channel, text in delta.pieces] for delta in cut] == [
        [(0, LONG_CHARACTERS)],
        [(1, 1)],
    ]
