"""Queue of prompts for a tokenizer thread, in turns between API keys."""

import threading
from collections import deque

from node.engine.requests.tokenize_admission import UntokenizedPrompt


class TokenizeQueue:
    """Prompts for one thread, in turns between API keys. A key with many texts or grammars delays another key by one of
    them. Any thread may call `put`."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[UntokenizedPrompt]] = {}
        self._changed = threading.Condition()

    def put(self, unread: UntokenizedPrompt) -> None:
        """Enqueue a prompt after those of its key."""
        with self._changed:
            self._lanes.setdefault(unread.key, deque()).append(unread)
            self._changed.notify()

    def get(self) -> UntokenizedPrompt:
        """Wait for a prompt; return the first of the key whose turn it is."""
        with self._changed:
            while not self._lanes:
                self._changed.wait()
            key = next(iter(self._lanes))
            lane = self._lanes.pop(key)
            unread = lane.popleft()
            if lane:
                self._lanes[key] = lane  # after all other keys
            return unread
