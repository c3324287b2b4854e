"""Stored answers of `/v1/responses`: in memory, per API key, until newer answers need the space.

The store is bounded by count and by bytes, for each key and for all keys together. A key over its own limits loses its
oldest answers; over the limits of all, the oldest answers of any key are removed. Nothing survives the process. A
client that must not depend on the store sends the whole conversation.
"""

from collections import OrderedDict

import msgspec

from wire.frames import Message
from wire.units import MIB

MAX_RESPONSES = 4096
"""Maximum answers of all keys together."""
MAX_STORED_BYTES = 128 * MIB
"""Maximum bytes of the answers of all keys together."""
MAX_RESPONSES_PER_KEY = 512
"""Maximum answers of one key."""
MAX_BYTES_PER_KEY = 32 * MIB
"""Maximum bytes of the answers of one key."""
MESSAGE_BYTES = 256
"""Bytes charged for a message in addition to its text."""


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """Stored answer of `/v1/responses`."""

    body: bytes
    """JSON of the answer as sent."""
    messages: tuple[Message, ...]
    """Conversation up to and including the answer, without the instructions."""
    nbytes: int
    """Size that counts towards the limits of the store (`build_stored_response`)."""


class KeyResponses(msgspec.Struct):
    """Stored answers of one API key, by id, oldest first. `nbytes` is the sum of their sizes."""

    entries: OrderedDict[str, StoredResponse]
    nbytes: int = 0

    def put(self, name: str, response: StoredResponse) -> None:
        """Store an answer under a new id."""
        self.entries[name] = response
        self.nbytes += response.nbytes

    def pop(self, name: str) -> StoredResponse | None:
        """Remove and return an answer; None if there is none of this id."""
        removed = self.entries.pop(name, None)
        if removed is not None:
            self.nbytes -= removed.nbytes
        return removed


def build_stored_response(body: bytes, messages: tuple[Message, ...]) -> StoredResponse:
    """Build the stored form of an answer, with the size that counts towards the limits of the store.

    `body` is the answer's JSON as sent. `messages` is the conversation up to and including the answer. The size is the
    bytes of `body`, plus the characters of the messages, plus `MESSAGE_BYTES` for each message.
    """
    size = sum(
        MESSAGE_BYTES
        + len(message.content)
        + len(message.reasoning)
        + sum(len(call.arguments) for call in message.tool_calls)
        for message in messages
    )
    return StoredResponse(body, messages, len(body) + size)


class ResponseStore:
    """Store of the answers of all API keys, in memory.

    `most` is the maximum number of answers of all keys, `of_key` the maximum of one key. `nbytes` is the maximum size
    of the answers of all keys in bytes, `key_bytes` the maximum of one key. The attribute `nbytes` is the current size
    of all answers. The size of an answer is `StoredResponse.nbytes`.
    """

    def __init__(
        self,
        most: int = MAX_RESPONSES,
        nbytes: int = MAX_STORED_BYTES,
        of_key: int = MAX_RESPONSES_PER_KEY,
        key_bytes: int = MAX_BYTES_PER_KEY,
    ) -> None:
        self._most, self._most_bytes = most, nbytes
        self._of_key, self._key_bytes = of_key, key_bytes
        self._by_key: OrderedDict[str, KeyResponses] = OrderedDict()
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def put(self, key: str, name: str, response: StoredResponse) -> None:
        """Store an answer (`response`) of a key under its id (`name`), and delete the oldest answers above the limits.

        An earlier answer with that id is deleted first. An answer that is larger than a limit is not stored.
        """
        self.drop(key, name)
        if response.nbytes > min(self._key_bytes, self._most_bytes):
            return
        responses = self._by_key.setdefault(key, KeyResponses(OrderedDict()))
        responses.put(name, response)
        self.nbytes += response.nbytes
        self._order[key, name] = None
        while len(responses.entries) > self._of_key or responses.nbytes > self._key_bytes:
            self.drop(key, next(iter(responses.entries)))
        while len(self._order) > self._most or self.nbytes > self._most_bytes:
            self.drop(*next(iter(self._order)))

    def get(self, key: str, name: str) -> StoredResponse | None:
        """Return a stored answer of a key by its id; None if it is unknown."""
        responses = self._by_key.get(key)
        return None if responses is None else responses.entries.get(name)

    def drop(self, key: str, name: str) -> bool:
        """Delete an answer of a key. Return False if the key has none of that id."""
        responses = self._by_key.get(key)
        removed = None if responses is None else responses.pop(name)
        if responses is None or removed is None:
            return False
        self.nbytes -= removed.nbytes
        del self._order[key, name]
        if not responses.entries:
            del self._by_key[key]
        return True
