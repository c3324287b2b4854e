"""One end of a link, driven without a socket."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from wire.codec import MAX_PLAIN_BYTES, Splitter, decode, encode, split_into_fragments
from wire.frames import Cancel, Channel, Delta, Deltas, Generate, GenerationParams, Message, Ping
from wire.link import endpoint
from wire.link.endpoint import COALESCE_SECONDS, IMMEDIATE_WRITES, LinkEndpoint
from wire.link.outbox import ACCOMPANY_SECONDS


class Line:
    """A transport and a loop that only a test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.written: list[bytes] = []
        self.closing = False
        self.socket: socket.socket | None = None

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self.due.append((self.now, callback))

    def call_at(self, when: float, callback: Callable[[], None], /) -> None:
        self.due.append((when, callback))

    def run(self, seconds: float = 0.0) -> None:
        self.now += seconds
        while ready := [entry for entry in self.due if entry[0] <= self.now]:
            self.due.remove(ready[0])
            ready[0][1]()

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written.append(data)

    def close(self) -> None:
        assert not self.closing, "asyncio's TLS transport cannot be aborted after a second close"
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        raise AssertionError("an endpoint reads on")

    resume_reading = pause_reading

    def is_closing(self) -> bool:
        return self.closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == endpoint.MAX_BUFFERED_BYTES

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self.socket if name == "socket" and self.socket is not None else default


def long_answer() -> Deltas:
    return Deltas((Delta(1, 0, (), ((Channel.TOOL_CALL, "x" * 2 * MAX_PLAIN_BYTES),)),))


class End(LinkEndpoint):
    def __init__(self, line: Line, **limits: int) -> None:
        super().__init__(line, **limits)
        self.frames: list[object] = []
        self.reasons: list[str] = []
        self.connection_made(line)

    def on_frame(self, tag: int, body: bytes) -> None:
        self.frames.append(decode(tag, body))

    def on_lost(self, reason: str) -> None:
        self.reasons.append(reason)


def test_frames_come_out_as_they_went_in() -> None:
    end = End(Line())
    end.data_received(encode(Ping(1)) + encode(Cancel(2))[:3])
    end.data_received(encode(Cancel(2))[3:])
    assert end.frames == [Ping(1), Cancel(2)]


def test_a_tcp_connection_sends_at_once_and_keeps_few_unsent_bytes_in_the_kernel() -> None:
    line, tcp = Line(), socket.socket()
    other, unix = socket.socketpair()
    with tcp, other, unix:
        for line.socket in (tcp, unix):
            End(line)
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        unsent = tcp.getsockopt(socket.IPPROTO_TCP, endpoint.TCP_NOTSENT_LOWAT)
        assert unsent == endpoint.MAX_BUFFERED_BYTES


def test_each_end_joins_and_sends_fragments_up_to_its_own_limit() -> None:
    line, limit = Line(), 3 * MAX_PLAIN_BYTES
    end = End(line, longest_joined=limit, longest_sent=limit)
    pieces = b"".join(split_into_fragments(encode(long_answer()), 1))
    end.data_received(pieces)
    for _ in range(2):
        end.send(long_answer())
    line.run(1.0)
    assert end.frames == [long_answer()]
    joined = Splitter(longest_joined=limit)
    sent = [decode(*pair) for each in line.written for pair in joined.feed(each)]
    assert sent == [long_answer()] * 2, "the second one waits for the first one"
    narrow = End(Line(), longest_joined=limit // 2)
    narrow.data_received(pieces)
    narrow.connection_lost(None)
    assert (narrow.frames, narrow.reasons) == (
        [],
        [f"the peer sent a fragments of more than {limit // 2} bytes in progress"],
    )


def test_a_breach_ends_the_connection_with_its_reason() -> None:
    line = Line()
    end = End(line)
    end.data_received(b"\xff\xff\xff\xff\xff")
    assert line.closing
    end.connection_lost(None)
    assert "4294967295" in end.reasons[0]
    assert not end.send(Ping(1))


def test_few_frames_are_written_at_once_and_many_are_coalesced() -> None:
    line = Line()
    end = End(line)
    for number in range(IMMEDIATE_WRITES - 1):
        end.send(Ping(number))
        line.run()
        assert len(line.written) == number + 1, "with few frames no write is delayed"
    for number in range(50):
        end.send(Ping(number))
        line.run(COALESCE_SECONDS / 10)
    assert IMMEDIATE_WRITES - 1 + 5 <= len(line.written) <= IMMEDIATE_WRITES + 5, "ten frames are one write"
    line.run(COALESCE_SECONDS)
    sent = [frame for each in line.written for frame in (decode(*pair) for pair in Splitter().feed(each))]
    assert sent == [Ping(number) for number in (*range(IMMEDIATE_WRITES - 1), *range(50))]
    line.run(COALESCE_SECONDS * (IMMEDIATE_WRITES + 1))
    before = len(line.written)
    end.send(Ping(9))
    line.run()
    assert len(line.written) == before + 1, "the rush is over"


def test_a_deferred_frame_is_sent_in_order_with_the_next_frame() -> None:
    line = Line()
    end = End(line)
    end.send_with_next(encode(Ping(1)))
    line.run(ACCOMPANY_SECONDS / 2)
    assert not line.written
    end.send_with_next(encode(Ping(2)))
    end.send(Ping(3))
    line.run()
    assert line.written == [encode(Ping(1)) + encode(Ping(2)) + encode(Ping(3))]
    line.run(ACCOMPANY_SECONDS)
    assert len(line.written) == 1, "it left once"


def test_a_deferred_frame_is_sent_in_a_moment_when_nothing_follows() -> None:
    line = Line()
    end = End(line)
    end.send_with_next(encode(Ping(1)))
    end.send_with_next(encode(Ping(2)))
    line.run(ACCOMPANY_SECONDS)
    assert line.written == [encode(Ping(1)) + encode(Ping(2))]
    end.send(Ping(3))
    end.close("done")
    assert line.written[1:] == [encode(Ping(3))]
    end.send_with_next(encode(Ping(4)))
    assert len(line.written) == 2, "the connection is closing"


def test_long_frame_does_not_overtake_gathered_frames() -> None:
    line = Line()
    end = End(line)
    end.send_with_next(encode(Ping(1)))
    end.send(Generate(1, 1, "r", "m", (Message("user", "x" * 100_000),), GenerationParams(), 0))
    line.run()
    assert line.written[0] == encode(Ping(1))
    assert len(line.written) > 1


def test_closing_sends_what_was_gathered() -> None:
    line = Line()
    end = End(line)
    end.send(Ping(1))
    end.close("done")
    assert line.written == [encode(Ping(1))]
    end.close()
    end.connection_lost(None)
    assert end.reasons == ["done"]


def test_peer_that_does_not_read_is_disconnected_at_max_unsent_bytes() -> None:
    line = Line()
    end = End(line)
    end.pause_writing()
    frame = Generate(1, 1, "r", "m", (Message("user", "x" * 60_000),), GenerationParams(), 0)
    sent = 0
    while not line.closing:
        assert end.send(frame)
        line.run(COALESCE_SECONDS)
        sent += len(encode(frame))
        assert sent < 2 * endpoint.MAX_UNSENT_BYTES
    assert sent >= endpoint.MAX_UNSENT_BYTES
    end.connection_lost(None)
    assert "does not read" in end.reasons[0]


def test_a_peer_that_does_not_read_may_have_the_bound_unsent_and_no_byte_more(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Ping(1))
    monkeypatch.setattr(endpoint, "MAX_UNSENT_BYTES", 2 * len(frame))
    line = Line()
    end = End(line)
    for _ in range(3):  # frames to a peer that reads do not count
        assert end.send(Ping(1))
        line.run(COALESCE_SECONDS)
    end.pause_writing()
    for _ in range(2):
        assert end.send(Ping(1))
        line.run(COALESCE_SECONDS)
    assert (len(line.written), line.closing) == (5, False)
    end.send(Ping(1))
    line.run(COALESCE_SECONDS)
    assert (len(line.written), line.closing) == (5, True)


def test_frames_behind_a_long_answer_count_as_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_UNSENT_BYTES", 3 * len(encode(Ping(1))))
    line = Line()
    end = End(line)
    for _ in range(2):  # the bytes of the first round are sent, and no longer count
        end.send_in_order(encode(long_answer()))
        for number in range(3):
            end.send_in_order(encode(Ping(number)))
        assert not line.closing
        line.run(1.0)
    assert len(line.written) > 2 * 3
    end.pause_writing()
    end.send_in_order(encode(long_answer()))
    for number in range(4):
        assert not line.closing
        end.send_in_order(encode(Ping(number)))
    assert line.closing
    end.send_in_order(encode(Ping(9)))
    end.connection_lost(None)
    assert end.reasons == [f"the peer does not read: {4 * len(encode(Ping(1)))} bytes are unsent"]


def test_gathered_frames_of_a_closed_connection_are_discarded() -> None:
    for closed in (True, False):
        line = Line()
        end = End(line)
        end.send(Ping(1))
        if closed:
            line.closing = True
        else:
            end.connection_lost(None)
        line.run()
        assert line.written == []


def test_a_peer_that_reads_again_has_a_new_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_UNSENT_BYTES", sum(len(encode(Ping(number))) for number in range(1000)))
    line = Line()
    end = End(line)
    for _ in range(3):
        end.pause_writing()
        for number in range(1000):
            end.send(Ping(number))
        line.run(COALESCE_SECONDS)
        end.resume_writing()
    assert not line.closing
