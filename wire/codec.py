"""Bytes to frames and back: `u32 length (big endian, of what follows) | u8 tag | msgpack array`.

A frame type has one decoder that knows its fields, so a peer can neither send an ext type nor nest deeper than the
types do, and a declared length can never make us allocate before the bytes are here. Any breach is one exception,
`WireError`; the connection ends with its text as the reason.

Long frames travel as `Fragment`s of at most PIECE bytes. The receiver joins them up to its own limit, so a sender can
put urgent frames between the pieces. All messages that are open at once share that limit: a sender begins a long frame
only when it fits beside those that it has begun (`stream.Outbox`). Fragments arrive in order, so the receiver never
holds more than the sender has begun and not ended, and needs to acknowledge nothing.
"""

import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from wire.frames import TAGS, Count, Deltas, EngineReport, Fragment, Frame, Generate, Head, Restore
from wire.units import KIB, MIB

PIECE = 32 * KIB
"""Payload of one fragment: 2.6 ms of a 100 Mbit/s line."""
LONGEST_PLAIN = 64 * KIB
"""A longer frame is sent in fragments."""
LONGEST_WIRE = 256 * KIB
"""No single frame on the wire may be longer."""
LONGEST_JOINED = 16 * MIB
"""No joined message may be longer, nor all that are under way in fragments together. A request body of 8 MiB becomes at
most 11.5 MiB (a bias for each of 700,000 tokens)."""
MAX_REPORT_BYTES = 256 * KIB
"""A report, and every frame that has no bound of its own: 512 models of usual length."""
MAX_DELTAS_BYTES = MIB + 64 * KIB
"""Half a second of 64 rows with all alternatives, or one tool call of the longest kind."""
MAX_JOINED_FROM_NODE_BYTES = MAX_DELTAS_BYTES + KIB
"""No message that a node sends to the coordinator may be longer."""
MOST_OPEN = 64
"""Messages that may be under way in fragments at once."""

_HEADER = struct.Struct(">IB")
TAG_OF: dict[type[Frame], int] = {kind: tag for tag, kind in TAGS.items()}
_FRAGMENT = TAG_OF[Fragment]
_DECODERS: dict[int, msgspec.msgpack.Decoder[Frame]] = {
    tag: msgspec.msgpack.Decoder(kind) for tag, kind in TAGS.items()
}
_MAX_BODY_BYTES: dict[type[Frame], int] = {
    Deltas: MAX_DELTAS_BYTES,
    Generate: LONGEST_JOINED,
    Count: LONGEST_JOINED,
    EngineReport: LONGEST_JOINED,
    Restore: LONGEST_JOINED,
}
_MAX_BODY_OF = {tag: _MAX_BODY_BYTES.get(kind, MAX_REPORT_BYTES) for tag, kind in TAGS.items()}
_HEAD = msgspec.msgpack.Decoder(Head)
_encoder = msgspec.msgpack.Encoder()

Raw = tuple[int, memoryview]
F = TypeVar("F", bound=Frame)


class WireError(Exception):
    """The peer broke the rules of the wire; the connection cannot go on."""


def encode(frame: Frame) -> bytes:
    """Give the bytes of one frame. UnicodeEncodeError if a text holds a lone surrogate; WireError if it is too long."""
    body = _encoder.encode(frame)
    if _HEADER.size + len(body) > LONGEST_JOINED:
        raise WireError(f"{type(frame).__name__} of {len(body)} bytes is longer than {LONGEST_JOINED}")
    return _HEADER.pack(len(body) + 1, TAG_OF[type(frame)]) + body


def fragments(encoded: bytes, message: int) -> Iterator[bytes]:
    """Cut one encoded frame into encoded fragments."""
    for start in range(0, len(encoded), PIECE):
        piece = encoded[start : start + PIECE]
        yield encode(Fragment(message, piece, start + PIECE >= len(encoded)))


def decode(tag: int, body: bytes | memoryview) -> Frame:
    """Decode one frame's body. WireError when the tag is unknown, the body is too long for its kind, or a value is
    outside of its bounds (`wire.bounds`)."""
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise WireError(f"unknown frame {tag}")
    if len(body) > _MAX_BODY_OF[tag]:
        raise WireError(f"{TAGS[tag].__name__} of {len(body)} bytes, the most is {_MAX_BODY_OF[tag]}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"bad {TAGS[tag].__name__}: {error}") from None


def head_of(body: bytes | memoryview) -> int:
    """Read only the request number of a frame that is about one request."""
    try:
        return _HEAD.decode(body).request
    except (msgspec.DecodeError, OverflowError) as error:
        raise WireError(f"bad head: {error}") from None


class Splitter:
    """Cuts a byte stream into `(tag, body)` pairs, joining fragments. Bounded by its limits."""

    def __init__(self, longest: int = LONGEST_WIRE, longest_joined: int = LONGEST_JOINED) -> None:
        self._buffer = bytearray()
        self._longest = longest
        self._longest_joined = longest_joined
        self._open: dict[int, bytearray] = {}
        self._open_bytes = 0

    def feed(self, data: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
        """Take bytes, yield every whole frame as tag and body. WireError at the first breach."""
        buffer = self._buffer
        if buffer:
            buffer += data
            data = buffer
        start, whole = 0, len(data)
        while whole - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(data, start)
            if not 1 <= length <= self._longest:
                raise WireError(f"frame length {length} is not within 1..{self._longest}")
            end = start + 4 + length
            if end > whole:
                break
            body = bytes(data[start + _HEADER.size : end])
            start = end
            if tag == _FRAGMENT:
                joined = self._join(body)
                if joined is not None:
                    yield joined
            else:
                yield tag, body
        if data is buffer:
            del buffer[:start]
        else:
            buffer += data[start:]

    def _join(self, body: bytes) -> tuple[int, bytes] | None:
        fragment = decode(_FRAGMENT, body)
        assert isinstance(fragment, Fragment)  # noqa: S101  the tag decides the type
        if fragment.message not in self._open and len(self._open) >= MOST_OPEN:
            raise WireError(f"more than {MOST_OPEN} messages under way in fragments")
        message = self._open.setdefault(fragment.message, bytearray())
        message += fragment.payload
        self._open_bytes += len(fragment.payload)
        if self._open_bytes > self._longest_joined:
            raise WireError(f"fragments of more than {self._longest_joined} bytes under way")
        if not fragment.last:
            return None
        del self._open[fragment.message]
        self._open_bytes -= len(message)
        if len(message) < _HEADER.size:
            raise WireError("a joined message is shorter than a header")
        length, tag = _HEADER.unpack_from(message)
        if length != len(message) - 4 or tag == _FRAGMENT:
            raise WireError("a joined message does not match its header")
        return tag, bytes(memoryview(message)[_HEADER.size :])
