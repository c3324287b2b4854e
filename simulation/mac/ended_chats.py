"""Prefix cache of a simulated node: one entry for each ended chat, which its next turn reuses."""

from collections import OrderedDict, deque
from typing import NamedTuple

from wire.report import CacheState

CACHE_SHARE = 0.15
"""Maximum share of the cap minus the loaded weights that ended chats may use together."""
MAX_EVICTIONS_REPORTED = 64
"""Maximum keys of evicted chats in a report."""
MAX_KEY_BYTES = 32
"""Maximum bytes of the key of a chat in frames and reports."""


class EndedChat(NamedTuple):
    """Cached KV of a chat after its last ended turn."""

    model: str
    tokens: int
    """Tokens of the last prompt and its answer."""
    size: int
    """Bytes of its KV cache."""


def make_chat_key(session: str) -> bytes:
    """Return the key of a chat in frames: the last `MAX_KEY_BYTES` bytes of its session."""
    return session.encode()[-MAX_KEY_BYTES:]


class EndedChats:
    """Cache of ended chats on a simulated node, by session. The least recently used chat is evicted first."""

    def __init__(self) -> None:
        self._chats: OrderedDict[str, EndedChat] = OrderedDict()
        self._evicted: deque[bytes] = deque(maxlen=MAX_EVICTIONS_REPORTED)
        self._evictions = 0
        self.nbytes = 0
        """Bytes of all chats."""

    def __bool__(self) -> bool:
        return bool(self._chats)

    def find(self, session: str, model: str, prompt: int) -> int:
        """Return the number of cached tokens for a prompt of `prompt` tokens, at most `prompt` − 1.

        The result is 0 if the chat is not cached for this model, or `session` is empty.
        """
        chat = self._chats.get(session) if session else None
        return 0 if chat is None or chat.model != model else min(chat.tokens, prompt - 1)

    def use(self, session: str) -> None:
        """Mark a chat as the most recently used one, if it is cached."""
        if session in self._chats:
            self._chats.move_to_end(session)

    def put(self, session: str, chat: EndedChat) -> None:
        """Cache an ended chat as the most recently used one. `session` must not be cached (`discard`)."""
        self._chats[session] = chat
        self.nbytes += chat.size

    def discard(self, session: str) -> None:
        """Remove a chat, if it is cached, before `put` stores its later turn. This is not counted as an eviction."""
        chat = self._chats.pop(session, None)
        if chat is not None:
            self.nbytes -= chat.size

    def evict_oldest(self) -> None:
        """Evict the least recently used chat, and record its key for reports. Raise `KeyError` if no chat is cached."""
        session, chat = self._chats.popitem(last=False)
        self.nbytes -= chat.size
        self._evictions += 1
        self._evicted.append(make_chat_key(session))

    def to_report(self) -> CacheState:
        """Return the state of the cache as a node reports it, with the keys of the newest evicted chats."""
        return CacheState(self.nbytes, len(self._chats), evictions=self._evictions, evicted=tuple(self._evicted))
