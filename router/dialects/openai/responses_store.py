"""Answers of `/v1/responses` that are kept: in memory, for the key that asked, until newer ones need the place.

Bounded by count and by bytes, for each key and in all; the oldest go first, a key's own before those of others. Nothing
survives the process: an id is a convenience, and a client that must be sure sends the whole conversation.
"""

from collections import OrderedDict

import msgspec

from wire.frames import Message
from wire.units import MIB

MOST_KEPT = 4096
MOST_BYTES = 128 * MIB
MOST_OF_KEY = 512
BYTES_OF_KEY = 32 * MIB
MESSAGE_BYTES = 256
"""What a message costs besides its text."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One answer as it was told, and the conversation up to it, without the instructions."""

    body: bytes
    messages: tuple[Message, ...]
    nbytes: int


class Shelf(msgspec.Struct):
    """What is kept for one key."""

    entries: OrderedDict[str, Entry]
    nbytes: int = 0


def entry(body: bytes, messages: tuple[Message, ...]) -> Entry:
    """Make an entry, counting its bytes."""
    size = sum(
        MESSAGE_BYTES + len(one.content) + len(one.reasoning) + sum(len(call.arguments) for call in one.tool_calls)
        for one in messages
    )
    return Entry(body, messages, len(body) + size)


class Kept:
    """See the module. The limits are arguments for tests' sake."""

    def __init__(
        self, most: int = MOST_KEPT, nbytes: int = MOST_BYTES, of_key: int = MOST_OF_KEY, key_bytes: int = BYTES_OF_KEY
    ) -> None:
        self._most, self._most_bytes = most, nbytes
        self._of_key, self._key_bytes = of_key, key_bytes
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def put(self, key: str, name: str, kept: Entry) -> None:
        """Keep an answer; one that is larger than all that a key may keep is not."""
        self.drop(key, name)
        if kept.nbytes > min(self._key_bytes, self._most_bytes):
            return
        shelf = self._shelves.setdefault(key, Shelf(OrderedDict()))
        shelf.entries[name] = kept
        shelf.nbytes += kept.nbytes
        self.nbytes += kept.nbytes
        self._order[key, name] = None
        while len(shelf.entries) > self._of_key or shelf.nbytes > self._key_bytes:
            self.drop(key, next(iter(shelf.entries)))
        while len(self._order) > self._most or self.nbytes > self._most_bytes:
            self.drop(*next(iter(self._order)))

    def get(self, key: str, name: str) -> Entry | None:
        """Give what was kept for this key."""
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.entries.get(name)

    def drop(self, key: str, name: str) -> bool:
        """Forget an answer; False when there was none for this key."""
        shelf = self._shelves.get(key)
        gone = None if shelf is None else shelf.entries.pop(name, None)
        if shelf is None or gone is None:
            return False
        shelf.nbytes -= gone.nbytes
        self.nbytes -= gone.nbytes
        del self._order[key, name]
        if not shelf.entries:
            del self._shelves[key]
        return True
