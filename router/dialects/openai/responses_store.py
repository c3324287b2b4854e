"""Stored answers of `/v1/responses`: in memory, per API key, until newer answers need the space.

The store limits the number and the bytes of answers, for each key and for all keys together. If a key exceeds its own
limits, its oldest answers are removed. If all keys together exceed their limits, the oldest answers of any key are
removed. Nothing survives the process. A client that must not depend on the store sends the complete conversation.

The output items of answers are stored a second time, without the conversations. A client that refers to all items of a
long conversation needs many answers, whose conversations would not fit.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from wire.frames import Message
from wire.units import MIB

MAX_RESPONSES = 4096
"""Maximum stored answers of all keys together."""
MAX_STORED_BYTES = 128 * MIB
"""Maximum sum of `StoredResponse.nbytes` of all keys together."""
MAX_RESPONSES_PER_KEY = 512
"""Maximum stored answers of one key."""
MAX_BYTES_PER_KEY = 32 * MIB
"""Maximum sum of `StoredResponse.nbytes` of one key."""
MAX_ITEM_ANSWERS = 32_768
"""Maximum answers of all keys together whose items are stored."""
MAX_ITEM_BYTES = 32 * MIB
"""Maximum bytes of the items of all keys together."""
MAX_ITEM_ANSWERS_PER_KEY = 4096
"""Maximum answers of one key whose items are stored."""
MAX_ITEM_BYTES_PER_KEY = 8 * MIB
"""Maximum bytes of the items of one key."""
MESSAGE_BYTES = 256
"""Bytes that each message adds to the size of an answer, in addition to its text."""


class StoredResponse(msgspec.Struct, frozen=True, gc=False):
    """Stored answer of `/v1/responses`, or its output items (`OutputItems`)."""

    body: bytes
    """JSON of the answer as sent, or of the list of its items."""
    messages: tuple[Message, ...]
    """Conversation up to and including the answer, without the instructions; empty if only items are stored."""
    nbytes: int
    """Size that counts towards the limits of the store (`build_stored_response`)."""


class KeyResponses(msgspec.Struct):
    """Stored answers of one API key, by id, oldest first. `nbytes` is the sum of their sizes."""

    entries: OrderedDict[str, StoredResponse]
    nbytes: int = 0

    def put(self, name: str, response: StoredResponse) -> None:
        """Store an answer under the id `name`, which must not be in `entries`."""
        self.entries[name] = response
        self.nbytes += response.nbytes

    def pop(self, name: str) -> StoredResponse | None:
        """Remove and return the answer with the id `name`; None if there is none."""
        removed = self.entries.pop(name, None)
        if removed is not None:
            self.nbytes -= removed.nbytes
        return removed


def build_stored_response(body: bytes, messages: tuple[Message, ...]) -> StoredResponse:
    """Return the stored form of an answer or of its items, with its size.

    The arguments are fields of `StoredResponse`. The size is the bytes of `body`, the characters of the messages, and
    `MESSAGE_BYTES` for each message.
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

    `most` is the maximum number of answers of all keys, and `of_key` that of one key. `nbytes` is the maximum size of
    the answers of all keys in bytes, and `key_bytes` that of one key. The size of an answer is `StoredResponse.nbytes`.

    The attribute `nbytes` is the current size of all answers.
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
        """Store the answer `response` of a key under its id `name`, and delete the oldest answers above the limits.

        An earlier answer of the key with that id is deleted first. An answer that is larger than a limit is not stored.
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
        """Delete the answer of a key with the id `name`. Return False if the key has no such answer."""
        responses = self._by_key.get(key)
        removed = None if responses is None else responses.pop(name)
        if responses is None or removed is None:
            return False
        self.nbytes -= removed.nbytes
        del self._order[key, name]
        if not responses.entries:
            del self._by_key[key]
        return True


class _Output(msgspec.Struct):
    output: msgspec.Raw


class OutputItems:
    """Output items of the answers of all API keys, in memory, to which later requests refer by their ids."""

    def __init__(self) -> None:
        self._answers = ResponseStore(
            MAX_ITEM_ANSWERS, MAX_ITEM_BYTES, MAX_ITEM_ANSWERS_PER_KEY, MAX_ITEM_BYTES_PER_KEY
        )

    def put(self, key: str, name: str, body: bytes) -> None:
        """Store the items of an answer of a key. `name` is the id of the answer, and `body` its JSON.

        The items of the oldest answers above the limits are deleted. Items that are larger than a limit are not stored.
        """
        output = msgspec.json.decode(body, type=_Output).output
        self._answers.put(key, name, build_stored_response(bytes(output), ()))

    def find(self, key: str, items: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items of a key with the ids `items`, by id. An unknown id has no entry.

        The result may have further items of the same answers.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in {f"resp_{item.partition('_')[2].rpartition('_')[0]}" for item in items}:
            answer = self._answers.get(key, name)
            if answer is not None:
                found |= {item["id"]: item for item in msgspec.json.decode(answer.body, type=list[dict[str, Any]])}
        return found

    def drop(self, key: str, name: str) -> None:
        """Delete the items of the answer of a key with the id `name`. Do nothing if they are not stored."""
        self._answers.drop(key, name)
