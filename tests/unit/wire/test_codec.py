"""Frames survive encoding, frames of older and newer peers are read, and any other bytes only end a connection."""

import json
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wire import field_order
from tests.unit.wire.strategies import structs
from wire import codec
from wire.codec import Splitter, WireError, decode, decode_request_number, encode, split_into_fragments
from wire.frames import (
    TAGS,
    Cancel,
    CountTokens,
    Delta,
    Deltas,
    Embed,
    EngineReport,
    Fragment,
    Frame,
    Generate,
    GenerationParams,
    Message,
    Report,
    RestoreModels,
)
from wire.report import EngineState, Memory, Model

FRAMES = st.one_of([structs(kind) for kind in TAGS.values()])
PLAIN = st.one_of([structs(kind) for kind in TAGS.values() if kind is not Fragment])
GOLDEN = Path(__file__).parent / "protocol_1.json"


def split(data: bytes, splitter: Splitter | None = None) -> list[Frame]:
    return [decode(tag, body) for tag, body in (splitter or Splitter()).feed(data)]


@given(PLAIN)
def test_round_trip(frame: Frame) -> None:
    assert split(encode(frame)) == [frame]


@pytest.mark.parametrize(
    "frame",
    [
        Generate(1, 1, "r", "m", (Message("user", "x" * codec.MAX_REPORT_BYTES),), GenerationParams(), 0),
        CountTokens(1, "m", (Message("user", "x" * codec.MAX_REPORT_BYTES),), 0),
        Embed(1, 1, "r", "m", ("x" * codec.MAX_REPORT_BYTES,)),
        EngineReport(Memory(), tuple(Model(f"{at:01000}") for at in range(codec.MAX_REPORT_BYTES // 1000)), 0, 0),
        RestoreModels(("x" * 1000,) * (codec.MAX_REPORT_BYTES // 1000)),
        Deltas((Delta(1, 0, (), ((0, "x" * codec.MAX_REPORT_BYTES),)),)),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_with_texts_of_clients_or_many_models_may_be_long(frame: Frame) -> None:
    tag, body = codec.TAG_OF[type(frame)], encode(frame)[5:]
    assert len(body) > codec.MAX_REPORT_BYTES
    assert decode(tag, body) == frame


@given(st.lists(PLAIN, max_size=6), st.integers(1, 97))
def test_any_slicing_of_the_stream_gives_the_same_frames(frames: list[Frame], step: int) -> None:
    data = b"".join(encode(frame) for frame in frames)
    splitter = Splitter()
    got = [frame for start in range(0, len(data), step) for frame in split(data[start : start + step], splitter)]
    assert got == frames


@given(FRAMES)
def test_extra_trailing_fields_are_ignored(frame: Frame) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    body = msgspec.msgpack.encode([*fields, {"new": [1, 2]}, "later"])
    assert decode(codec.TAG_OF[type(frame)], body) == frame


@given(FRAMES)
def test_missing_trailing_fields_take_defaults(frame: Frame) -> None:
    kind = type(frame)
    fields = msgspec.structs.fields(kind)
    required = sum(field.required for field in fields)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    got = decode(codec.TAG_OF[kind], msgspec.msgpack.encode(packed[:required]))
    for index, field in enumerate(fields):
        expected = getattr(frame, field.name) if index < required else field.default
        assert getattr(got, field.name) == expected


def test_required_fields_come_first() -> None:
    for kind in TAGS.values():
        order = [field.required for field in msgspec.structs.fields(kind)]
        assert order == sorted(order, reverse=True), kind


@given(st.binary(max_size=400))
def test_garbage_never_does_more_than_raise_wire_error(data: bytes) -> None:
    try:
        split(data)
    except WireError:
        return


@given(st.sampled_from(sorted(TAGS)), st.binary(max_size=200))
def test_garbage_behind_a_good_header_never_does_more_than_raise_wire_error(tag: int, body: bytes) -> None:
    try:
        split(struct.pack(">IB", len(body) + 1, tag) + body)
    except WireError:
        return


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        b"\xc7\x04\x01abcd",
        b"\xd6\xff\0\0\0\0",
    ],
    ids=["array bomb", "map bomb", "deep nesting", "ext type", "timestamp"],
)
@pytest.mark.parametrize("tag", sorted(TAGS))
def test_msgpack_bombs_are_refused(tag: int, body: bytes) -> None:
    try:
        frame = decode(tag, body)
    except WireError:
        return
    assert not msgspec.structs.fields(frame), "deep nesting of an unknown field, within the limit of this interpreter"


@pytest.mark.parametrize("length", [0, codec.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_impossible_lengths_are_refused_before_any_byte_of_the_body(length: int) -> None:
    with pytest.raises(WireError, match=str(length)):
        split(struct.pack(">IB", length, 13))


@pytest.mark.parametrize("length", [1, 2, 100])
def test_lengths_from_one_byte_to_the_longest_are_read(length: int) -> None:
    data = struct.pack(">IB", length, 13) + bytes(length - 1)
    assert list(Splitter(longest=100).feed(data)) == [(13, bytes(length - 1))]
    joined = b"".join(split_into_fragments(data, 1))
    assert list(Splitter().feed(joined)) == [(13, bytes(length - 1))]


def test_an_unknown_frame_is_refused() -> None:
    with pytest.raises(WireError, match="unknown frame 99"):
        decode(99, b"\x91\x01")


def test_a_body_may_be_exactly_as_long_as_its_kind_allows() -> None:
    tag = codec.TAG_OF[Cancel]
    filled = codec.MAX_REPORT_BYTES - len(msgspec.msgpack.encode([1, b"x" * 70_000])) + 70_000
    body = msgspec.msgpack.encode([1, b"x" * filled])
    assert (len(body), decode(tag, body)) == (codec.MAX_REPORT_BYTES, Cancel(1))
    with pytest.raises(WireError, match="the limit is"):
        decode(tag, msgspec.msgpack.encode([1, b"x" * (filled + 1)]))


@given(st.binary(min_size=0, max_size=300_000), st.integers(1, 70_000))
def test_long_frames_travel_in_fragments(content: bytes, step: int) -> None:
    frame = Generate(1, 2, "r", "m", (Message("user", content.hex()),), GenerationParams(), 0)
    pieces = list(split_into_fragments(encode(frame), 7))
    assert all(len(piece) <= codec.FRAGMENT_BYTES + 64 for piece in pieces)
    data = b"".join(pieces)
    splitter = Splitter()
    assert [f for i in range(0, len(data), step) for f in split(data[i : i + step], splitter)] == [frame]


def test_urgent_frames_pass_between_fragments() -> None:
    first, *rest = split_into_fragments(
        encode(Generate(1, 2, "r", "m", (Message("user", "x" * 200_000),), GenerationParams(), 0)), 1
    )
    got = split(first + encode(Cancel(9)) + b"".join(rest))
    assert [type(frame) for frame in got] == [Cancel, Generate]


def test_joined_messages_are_bounded_in_bytes_and_in_number() -> None:
    splitter = Splitter(longest_joined=10_000)
    with pytest.raises(WireError, match="10000"):
        split(b"".join(encode(Fragment(number, b"x" * 3_000)) for number in range(4)), splitter)
    with pytest.raises(WireError, match="messages"):
        split(b"".join(encode(Fragment(number, b"x")) for number in range(codec.MAX_OPEN_MESSAGES + 1)))


def test_a_joined_message_leaves_its_number_and_its_bytes_to_the_next() -> None:
    plain = struct.pack(">IB", 9_996, 13) + bytes(9_995)
    splitter = Splitter(longest_joined=10_000)
    for number in (1, 1, 2):
        first, last = Fragment(number, plain[:5_000]), Fragment(number, plain[5_000:], True)
        assert list(splitter.feed(encode(first) + encode(last))) == [(13, plain[5:])]
    crowd = [encode(Fragment(number, plain[:4])) for number in range(codec.MAX_OPEN_MESSAGES)]
    list(splitter.feed(b"".join(crowd)))
    assert list(splitter.feed(encode(Fragment(1, plain[4:9_700])))) == [], "an open frame continues"


def test_a_frame_of_whole_pieces_ends_with_its_last_piece() -> None:
    data = struct.pack(">IB", 2 * codec.FRAGMENT_BYTES - 4, 13) + bytes(2 * codec.FRAGMENT_BYTES - 5)
    pieces = list(split_into_fragments(data, 1))
    assert len(pieces) == 2
    assert list(Splitter().feed(b"".join(pieces))) == [(13, data[5:])]


@pytest.mark.parametrize("inner", [b"", b"abc", struct.pack(">IB", 99, 13) + b"x", encode(Fragment(1, b"x", True))])
def test_a_joined_message_must_be_one_plain_frame(inner: bytes) -> None:
    with pytest.raises(WireError, match="joined"):
        split(encode(Fragment(1, inner, True)))


def test_a_frame_longer_than_the_receiver_joins_is_refused_by_the_sender() -> None:
    def frame(length: int) -> Frame:
        return Generate(1, 2, "r", "m", (Message("user", "x" * length),), GenerationParams(), 0)

    most = codec.MAX_JOINED_BYTES - len(encode(frame(70_000))) + 70_000
    assert len(encode(frame(most))) == codec.MAX_JOINED_BYTES
    with pytest.raises(WireError, match="the limit is"):
        encode(frame(most + 1))


def test_a_lone_surrogate_cannot_be_sent() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode(Generate(1, 2, "r", "m", (Message("user", "\ud800"),), GenerationParams(), 0))


def test_heads_are_read_without_the_rest() -> None:
    body = msgspec.msgpack.encode([2**62, {"anything": [1]}, "more"])
    assert decode_request_number(body) == 2**62
    with pytest.raises(WireError):
        decode_request_number(b"\xc0")
    with pytest.raises(WireError, match="bad head"):
        decode_request_number(b"\x92\x01" + b"\x91" * 100_000 + b"\xc0")


def begins(now: object, then: object) -> bool:
    """Return whether today's array begins, at every depth, like the one of protocol 1."""
    if isinstance(then, list):
        return isinstance(now, list) and len(now) >= len(then) and all(map(begins, now, then))
    return now == then


def test_the_bytes_of_protocol_1_are_frozen() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {int(tag) for tag in golden} <= set(TAGS)
    for tag, entry in golden.items():
        decoded = decode(int(tag), bytes.fromhex(entry["body"]))
        assert type(decoded).__name__ == entry["frame"]
        now, then = msgspec.msgpack.encode(decoded), bytes.fromhex(entry["body"])
        assert begins(msgspec.msgpack.decode(now), msgspec.msgpack.decode(then)), "a field changed or moved"


def test_fields_are_only_appended_and_listed() -> None:
    """Bytes do not show that two fields of one type were exchanged; their names do."""
    known, now = json.loads(field_order.FILE.read_text()), field_order.list_fields()
    changed = [name for name, fields in known.items() if now.get(name, [])[: len(fields)] != fields]
    assert changed == [], "a field was changed, moved or removed, but peers of other versions read fields by position"
    assert now == known, "list new structures and fields: run `python -m tests.unit.wire.field_order`"


def test_one_deltas_frame_carries_a_whole_step() -> None:
    frame = Deltas(tuple(Delta(number, 0, (5,), ((0, "word "),)) for number in range(64)))
    assert len(encode(frame)) < 64 * 40


def test_an_unreadable_footprint_travels_as_none() -> None:
    report = Report(1, Memory(phys=None), EngineState())
    (got,) = split(encode(report))
    assert isinstance(got, Report)
    assert got.memory.phys is None
