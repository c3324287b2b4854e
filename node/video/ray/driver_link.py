"""Messages between the agent and the driver of its Ray, over a socket pair.

A message is its length (4 bytes, big endian), followed by a msgpack object.
"""

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 64 * 1024
"""Maximum bytes of one message, without its length.

A longer message makes `MessageReader.feed` raise `DriverLinkError`.
"""


class DriverMessage(msgspec.Struct, frozen=True, tag=True):
    """Base class of all messages between agent and driver."""


class ConnectDriver(DriverMessage, frozen=True, tag=True):
    """Agent → driver, as the first message: connect to the Ray at this address (`host:port`)."""

    address: str


class CreateActor(DriverMessage, frozen=True, tag=True):
    """Agent → driver: start the actor of a lease of `gib` GiB within `seconds`; `folder` is the folder of the lease."""

    lease: str
    generation: int
    folder: str
    gib: float
    seconds: float


class KillActor(DriverMessage, frozen=True, tag=True):
    """Agent → driver: end the actor of a lease, if there is one."""

    lease: str


class DriverConnected(DriverMessage, frozen=True, tag=True):
    """Driver → agent: the driver is connected to Ray."""


class ActorCreated(DriverMessage, frozen=True, tag=True):
    """Driver → agent: the actor of the lease has started and answers calls."""

    lease: str


class ActorNotCreated(DriverMessage, frozen=True, tag=True):
    """Driver → agent: the actor of the lease could not be started; `message` is the reason."""

    lease: str
    message: str


ToDriver = ConnectDriver | CreateActor | KillActor
FromDriver = DriverConnected | ActorCreated | ActorNotCreated


class DriverLinkError(ValueError):
    """Raised for received bytes that are not a valid message."""


def encode_message(message: DriverMessage) -> bytes:
    """Encode a message, preceded by its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


class MessageReader:
    """Parser of a byte stream into messages. `kinds` is the union of the message types that may arrive."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add received bytes, and return the messages that are complete now.

        Raise `DriverLinkError` for a message that is too long or invalid.
        """
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_MESSAGE_BYTES:
                raise DriverLinkError(f"a message of {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
            if len(self._buffer) < 4 + length:
                break
            try:
                messages.append(self._decoder.decode(self._buffer[4 : 4 + length]))
            except msgspec.MsgspecError as error:
                raise DriverLinkError(str(error)) from None
            del self._buffer[: 4 + length]
        return messages
