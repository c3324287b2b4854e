"""Encode and decode frames: `u32 length of the rest, big endian | u8 tag | msgpack array`.

Each frame type has a decoder for its fields. A peer can therefore send no ext type and nest no deeper than the types
do. A declared length allocates nothing before the bytes have arrived. Every violation raises `WireError`; the
connection closes with the text of the error as the reason.

Frames above MAX_PLAIN_BYTES are sent as `Fragment`s of at most FRAGMENT_BYTES bytes, and urgent frames can be sent
between two fragments. The receiver joins fragments up to one limit for all messages in progress. A sender starts a long
frame only if the frame fits within that limit together with the frames in progress (`wire.link.outbox.Outbox`).
Fragments arrive in order, and therefore need no acknowledgement.
"""

import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from wire.frames import (
    TAGS,
    CountTokens,
    Deltas,
    Embed,
    EngineReport,
    Fragment,
    Frame,
    Generate,
    RequestHead,
    RestoreModels,
)
from wire.units import KIB, MIB

FRAGMENT_BYTES = 32 * KIB
"""Maximum payload bytes of a fragment, which take 2.6 ms at 100 Mbit/s."""
MAX_PLAIN_BYTES = 64 * KIB
"""Bytes above which a frame is sent in fragments."""
MAX_FRAME_BYTES = 256 * KIB
"""Maximum bytes of a frame on the wire."""
MAX_JOINED_BYTES = 16 * MIB
"""Maximum bytes of a frame whose fragments are joined, and of all frames whose fragments are in progress together."""
MAX_REPORT_BYTES = 256 * KIB
"""Maximum bytes of the fields of a `Report`, which can have 512 models, and of each frame without its own maximum."""
MAX_DELTAS_BYTES = MIB + 64 * KIB
"""Maximum bytes of a `Deltas` frame: 0.5 s of 64 rows with all alternatives, or the longest tool call."""
MAX_JOINED_FROM_NODE_BYTES = MAX_DELTAS_BYTES + KIB
"""Maximum bytes of all messages in progress from a node to the coordinator, together."""
MAX_OPEN_MESSAGES = 64
"""Maximum number of messages in progress as fragments."""

_HEADER = struct.Struct(">IB")
TAG_OF: dict[type[Frame], int] = {kind: tag for tag, kind in TAGS.items()}
"""Tags by frame type, the inverse of `TAGS`."""
_FRAGMENT = TAG_OF[Fragment]
_DECODERS: dict[int, msgspec.msgpack.Decoder[Frame]] = {
    tag: msgspec.msgpack.Decoder(kind) for tag, kind in TAGS.items()
}
_MAX_BODY_BYTES: dict[type[Frame], int] = {
    Deltas: MAX_DELTAS_BYTES,
    Generate: MAX_JOINED_BYTES,
    CountTokens: MAX_JOINED_BYTES,
    Embed: MAX_JOINED_BYTES,
    EngineReport: MAX_JOINED_BYTES,
    RestoreModels: MAX_JOINED_BYTES,
}
_MAX_BODY_OF = {tag: _MAX_BODY_BYTES.get(kind, MAX_REPORT_BYTES) for tag, kind in TAGS.items()}
_HEAD = msgspec.msgpack.Decoder(RequestHead)
_encoder = msgspec.msgpack.Encoder()

F = TypeVar("F", bound=Frame)


class WireError(Exception):
    """Raised for a violation of the protocol by the peer, after which the connection must close.

    Also raised for a frame that is too long to send.
    """


def encode(frame: Frame) -> bytes:
    """Encode a frame with its header, in one piece.

    Raise UnicodeEncodeError for a text with a lone surrogate, WireError for a frame above MAX_JOINED_BYTES.
    """
    body, kind = _encoder.encode(frame), type(frame)
    size = len(body)
    if size > MAX_JOINED_BYTES - _HEADER.size:
        raise WireError(f"{kind.__name__} of {_HEADER.size + size} bytes, the limit is {MAX_JOINED_BYTES}")
    return _HEADER.pack(size + 1, TAG_OF[kind]) + body


def split_into_fragments(encoded: bytes, message: int) -> Iterator[bytes]:
    """Yield the encoded fragments of an encoded frame. `message` is a number that no other frame in progress has."""
    for start in range(0, len(encoded), FRAGMENT_BYTES):
        piece = encoded[start : start + FRAGMENT_BYTES]
        yield encode(Fragment(message, piece, start + FRAGMENT_BYTES >= len(encoded)))


def decode(tag: int, body: bytes | memoryview) -> Frame:
    """Decode the body of a frame of type `TAGS[tag]`.

    Raise WireError for an unknown tag and for a body above the maximum of its frame type. Raise it also for invalid
    msgpack and for a value outside its bounds.
    """
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise WireError(f"unknown frame {tag}")
    if len(body) > _MAX_BODY_OF[tag]:
        raise WireError(f"{TAGS[tag].__name__} of {len(body)} bytes, the limit is {_MAX_BODY_OF[tag]}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"bad {TAGS[tag].__name__}: {error}") from None


def decode_request_number(body: bytes | memoryview) -> int:
    """Decode only the request number of a frame whose first field is `request`. Raise WireError for an invalid body."""
    try:
        return _HEAD.decode(body).request
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"bad head: {error}") from None


class Splitter:
    """Parser of the bytes of one connection: yields pairs of tag and body, and joins fragments.

    `longest` is the maximum length of a frame in bytes. `longest_joined` is the maximum length of all fragments in
    progress together, in bytes.
    """

    def __init__(self, longest: int = MAX_FRAME_BYTES, longest_joined: int = MAX_JOINED_BYTES) -> None:
        self._buffer = bytearray()
        self._longest = longest
        self._longest_joined = longest_joined
        self._open: dict[int, bytearray] = {}
        self._open_bytes = 0

    def feed(self, data: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
        """Add received bytes; yield each complete frame as tag and body, fragments joined.

        Iterate to the end before the next call. Raise WireError at the first violation of the protocol.
        """
        buffer = self._buffer
        if buffer:
            buffer += data
            data = buffer
        start, size, head, longest = 0, len(data), _HEADER.size, self._longest
        while size - start >= head:
            length, tag = _HEADER.unpack_from(data, start)
            if length > longest or not length:
                raise WireError(f"frame length {length} is not within 1..{longest}")
            end = start + 4 + length
            if end > size:
                break
            body = bytes(data[start + head : end])
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
        if fragment.message not in self._open and len(self._open) >= MAX_OPEN_MESSAGES:
            raise WireError(f"more than {MAX_OPEN_MESSAGES} messages in progress as fragments")
        message = self._open.setdefault(fragment.message, bytearray())
        message += fragment.payload
        self._open_bytes += len(fragment.payload)
        if self._open_bytes > self._longest_joined:
            raise WireError(f"fragments of more than {self._longest_joined} bytes in progress")
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
