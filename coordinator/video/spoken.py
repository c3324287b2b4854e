"""What coordinator and broker say to each other over their socket: a length and a msgpack object, nothing else."""

from typing import Any

import msgspec

LONGEST = 64 * 1024


class Spoken(msgspec.Struct, frozen=True, tag=True):
    """Base of all that is said."""


class Connect(Spoken, frozen=True, tag=True):
    """coordinator → broker, first: drive the Ray cluster whose head is here."""

    address: str
    host: str


class Create(Spoken, frozen=True, tag=True):
    """coordinator → broker: start the actor of a lease on this node of Ray's, within `seconds`."""

    lease: str
    generation: int
    ray: str
    folder: str
    gib: float
    seconds: float


class Kill(Spoken, frozen=True, tag=True):
    """coordinator → broker: end the actor of a lease, if there is one."""

    lease: str


class Up(Spoken, frozen=True, tag=True):
    """broker → coordinator: connected."""


class Created(Spoken, frozen=True, tag=True):
    """broker → coordinator: the actor answers."""

    lease: str


class NotCreated(Spoken, frozen=True, tag=True):
    """broker → coordinator: there is no actor, and why."""

    lease: str
    message: str


ToBroker = Connect | Create | Kill
FromBroker = Up | Created | NotCreated


class SpeechError(ValueError):
    """What came is no speech of ours."""


def said(one: Spoken) -> bytes:
    """Write one."""
    body = msgspec.msgpack.encode(one)
    return len(body).to_bytes(4, "big") + body


class Ear:
    """Cuts bytes into what was said. SpeechError for what is too long or none of `kinds`."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take bytes; give what is whole."""
        self._buffer += data
        found: list[Any] = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > LONGEST:
                raise SpeechError(f"{length} bytes in one word")
            if len(self._buffer) < 4 + length:
                break
            try:
                found.append(self._decoder.decode(self._buffer[4 : 4 + length]))
            except msgspec.MsgspecError as error:
                raise SpeechError(str(error)) from None
            del self._buffer[: 4 + length]
        return found
