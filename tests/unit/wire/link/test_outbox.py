"""Send queue of a link: short frames before long ones, long frames within the peer's limits, answers in order."""

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
from wire.frames import Cancel, FetchChunk, Frame, Generate, GenerationParams, Message
from wire.link.outbox import MAX_PIECES_PER_TURN, Outbox


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


class Peer:
    """An outbox, and the frames that its peer has joined."""

    def __init__(self, longest: int = MAX_JOINED_BYTES) -> None:
        self.deferred: list[Callable[[], None]] = []
        self.joined: list[int] = []
        self._splitter = Splitter(longest_joined=longest)
        self.outbox = Outbox(self._take, self.deferred.append, self.deferred.append, longest)

    def _take(self, data: bytes) -> None:
        self.joined += [decode_request_number(body) for _, body in self._splitter.feed(data)]

    def send(self, *frames: Frame) -> list[int]:
        """Send frames; return the requests in the order in which the peer has joined them."""
        for frame in frames:
            self.outbox.send(frame)
        run_all(self.deferred)
        return self.joined


def sized(number: int, size: int) -> Generate:
    """Make a frame of exactly `size` bytes with its header."""
    overhead = len(encode(prompt(number, size - 200))) - (size - 200)
    frame = prompt(number, size - overhead)
    assert len(encode(frame)) == size
    return frame


@pytest.mark.parametrize(("more", "order"), [(0, [2, 1]), (1, [1, 2])])
def test_long_frames_are_sent_together_as_far_as_the_peer_joins_both(more: int, order: list[int]) -> None:
    peer = Peer(longest=10 * MAX_PLAIN_BYTES)
    long, short = sized(1, 7 * MAX_PLAIN_BYTES), sized(2, 3 * MAX_PLAIN_BYTES + more)
    assert peer.send(long, short) == order
    assert peer.send(long, short) == [*order, *order], "the first ones no longer count"


def test_a_frame_that_the_peer_never_joins_is_sent_alone_and_stops_nothing() -> None:
    peer = Peer(longest=2 * MAX_PLAIN_BYTES)
    peer.outbox.send(prompt(1, 3 * MAX_PLAIN_BYTES))
    with pytest.raises(WireError, match="fragments of more than"):
        run_all(peer.deferred)


@pytest.mark.parametrize(("more", "order"), [(0, [1, 2]), (1, [2, 1])])
def test_a_frame_is_long_above_the_limit(more: int, order: list[int]) -> None:
    assert Peer().send(sized(1, MAX_PLAIN_BYTES + more), Cancel(2)) == order


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1, 0), (1, 1, 0), (0, 1)])
def test_a_call_after_answers_follows_the_last_of_them_once(sizes: tuple[int, ...]) -> None:
    peer, calls = Peer(), list[list[int]]()
    for number, more in enumerate(sizes):
        peer.outbox.send_in_order(encode(sized(number, MAX_PLAIN_BYTES + more)))
    peer.outbox.call_after_answers(lambda: (peer.outbox.flush(), calls.append(list(peer.joined))))
    assert bool(calls) == (1 not in sizes)
    run_all(peer.deferred)
    peer.outbox.send_in_order(encode(sized(9, MAX_PLAIN_BYTES + 1)))
    run_all(peer.deferred)
    assert calls == [list(range(len(sizes)))]
    assert peer.joined == [*range(len(sizes)), 9]


@pytest.mark.parametrize(("other", "answer", "order"), [(9, 1, [4, 2, 3, 1]), (1, 9, [4, 1, 2, 3])])
def test_an_answer_waits_for_long_frames_of_answers_only(other: int, answer: int, order: list[int]) -> None:
    peer = Peer()
    peer.outbox.send(sized(1, other * MAX_PLAIN_BYTES + 1))
    peer.outbox.send_in_order(encode(sized(2, answer * MAX_PLAIN_BYTES + 1)))
    peer.outbox.send_in_order(encode(Cancel(3)))
    assert peer.send(Cancel(4)) == order
