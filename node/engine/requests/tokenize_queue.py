"""Prompts that wait for a thread that reads them, in turns between API keys."""

import threading
from collections import deque

from node.engine.requests.tokenize_admission import Unread


class UnreadQueue:
    """Prompts that one thread reads, in turns between API keys: a key with many texts or grammars delays another key
    by one of them. Any thread may call `put`."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Unread]] = {}
        self._changed = threading.Condition()

    def put(self, unread: Unread) -> None:
        """Add a prompt behind those of its key."""
        with self._changed:
            self._lanes.setdefault(unread.key, deque()).append(unread)
            self._changed.notify()

    def get(self) -> Unread:
        """Wait for a prompt; take the first of the key whose turn it is."""
        with self._changed:
            while not self._lanes:
                self._changed.wait()
            key = next(iter(self._lanes))
            lane = self._lanes.pop(key)
            unread = lane.popleft()
            if lane:
                self._lanes[key] = lane  # behind all other keys
            return unread
