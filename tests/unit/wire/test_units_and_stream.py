"""Sizes in the notation of users, and urgent frames before long ones."""

from collections.abc import Callable, Iterator

import pytest

from wire.codec import (
    MAX_JOINED_BYTES,
    MAX_OPEN_MESSAGES,
    MAX_PLAIN_BYTES,
    Splitter,
    WireError,
    decode,
    decode_request_number,
    encode,
)
from wire.frames import Cancel, FetchChunk, Generate, GenerationParams, Message
from wire.link.endpoint import MAX_PIECES_PER_TURN, Outbox
from wire.units import GIB, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("96GiB", 96 * GIB), ("12 GB", 12 * 10**9), ("80%", 800), ("0", 0), ("1.5KiB", 1536), (77, 77), ("5b", 5)],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text, total=1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1e9", "nan", "101%", -5])
def test_parse_size_refuses_invalid_text(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text, total=1000)


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(ValueError, match="needs a known total"):
        parse_size("80%")


def test_show_size_has_a_unit() -> None:
    assert [show_size(s) for s in (None, 0, 2048, 3 * 1024**2, 31 * GIB, -GIB)] == [
        "-",
        "0.0 MiB",
        "2.0 KiB",
        "3.0 MiB",
        "31.0 GiB",
        "-1.0 GiB",
    ]


def sent(written: list[bytes]) -> list[str]:
    return [type(decode(tag, body)).__name__ for tag, body in Splitter().feed(b"".join(written))]


def long_request() -> Generate:
    return Generate(1, 1, "r", "m", (Message("user", "x" * 100_000),), GenerationParams(), 0)


def run_all(deferred: list[Callable[[], None]]) -> None:
    while deferred:
        deferred.pop(0)()


def test_short_frames_are_sent_at_once_and_long_ones_interleaved() -> None:
    written: list[bytes] = []
    deferred: list[Callable[[], None]] = []
    outbox = Outbox(written.append, deferred.append, deferred.append)
    outbox.send(long_request())
    outbox.send_background(FetchChunk(5, b"y" * 10, last=number == 1) for number in range(2))
    outbox.send(Cancel(1))
    run_all(deferred)
    assert sent(written) == ["Cancel", "FetchChunk", "FetchChunk", "Generate"]


def test_pieces_wait_while_the_transport_is_full_and_urgent_frames_do_not() -> None:
    written: list[bytes] = []
    deferred: list[Callable[[], None]] = []
    outbox = Outbox(written.append, deferred.append, deferred.append)
    outbox.pause()
    outbox.send(long_request())
    outbox.send(Cancel(1))
    run_all(deferred)
    assert sent(written) == ["Cancel"]
    outbox.resume()
    run_all(deferred)
    assert sent(written) == ["Cancel", "Generate"]


def prompt(number: int, size: int) -> Generate:
    return Generate(number, number, "r", "m", (Message("user", "x" * size),), GenerationParams(), 0)


def reassemble(*frames: Generate) -> list[int]:
    """Send long frames at once; return the requests in the order in which the other end has reassembled them."""
    written: list[bytes] = []
    deferred: list[Callable[[], None]] = []
    outbox = Outbox(written.append, deferred.append, deferred.append)
    for frame in frames:
        outbox.send(frame)
    splitter, found = Splitter(), list[int]()
    while deferred:
        deferred.pop(0)()
        for piece in written:
            found += [decode_request_number(body) for _, body in splitter.feed(piece)]
        written.clear()
    return found


def test_long_frames_wait_until_the_peer_supports_parts() -> None:
    """Each frame is within the limit, but all of them together are not."""
    size = MAX_JOINED_BYTES * 15 // 32
    assert sorted(reassemble(*(prompt(number, size) for number in range(6)))) == list(range(6))
    assert sorted(reassemble(*(prompt(number, MAX_PLAIN_BYTES) for number in range(MAX_OPEN_MESSAGES + 9)))) == list(
        range(73)
    )


def test_a_frame_of_the_greatest_length_can_be_joined_and_a_longer_one_is_not_sent() -> None:
    empty = len(encode(prompt(1, MAX_PLAIN_BYTES))) - MAX_PLAIN_BYTES
    assert reassemble(prompt(1, MAX_JOINED_BYTES - empty)) == [1]
    with pytest.raises(WireError, match="the limit is"):
        encode(prompt(1, MAX_JOINED_BYTES - empty + 1))


def test_smaller_frames_pass_a_large_one_that_waits_and_not_for_long() -> None:
    small = MAX_JOINED_BYTES // 16
    order = reassemble(prompt(1, 8 * small), prompt(2, 15 * small), *(prompt(number, small) for number in range(3, 63)))
    assert order.index(3) < order.index(2), "it fits beside the first"
    assert order.index(2) < 40, "those that pass it, and those that fit beside it"


def test_frames_of_one_turn_leave_in_one_write_and_in_order() -> None:
    written: list[bytes] = []
    deferred: list[Callable[[], None]] = []
    outbox = Outbox(written.append, deferred.append, deferred.append)
    for number in range(3):
        outbox.send(Cancel(number))
    assert not written
    run_all(deferred)
    assert len(written) == 1
    assert [decode(tag, body) for tag, body in Splitter().feed(written[0])] == [Cancel(0), Cancel(1), Cancel(2)]


def test_background_answer_yields_to_the_loop() -> None:
    written: list[bytes] = []
    deferred: list[Callable[[], None]] = []
    made: list[int] = []

    def answers() -> Iterator[FetchChunk]:
        for number in range(100):
            made.append(number)
            yield FetchChunk(1, b"z" * 1000)

    outbox = Outbox(written.append, deferred.append, deferred.append)
    outbox.send_background(answers())
    deferred.pop(0)()
    assert len(made) == MAX_PIECES_PER_TURN
    outbox.close()
    deferred.pop(0)()
    assert len(made) == MAX_PIECES_PER_TURN
