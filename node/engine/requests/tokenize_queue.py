"""Queue of prompts for a tokenizer thread, in turns between API keys."""

import threading
from collections import deque

from node.engine.requests.tokenize_admission import UntokenizedPrompt


class TokenizeQueue:
    """Queue of prompts for one tokenizer thread, in turns between API keys. Any thread may call `put`.

    A key with many prompts therefore delays the prompt of another key by only one prompt.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[UntokenizedPrompt]] = {}
        self._changed = threading.Condition()

    def put(self, prompt: UntokenizedPrompt) -> None:
        """Enqueue a prompt after the earlier prompts of its key."""
        with self._changed:
            self._queues.setdefault(prompt.key, deque()).append(prompt)
            self._changed.notify()

    def get(self) -> UntokenizedPrompt:
        """Block until there is a prompt, without a time limit. Remove and return the oldest prompt of the key whose
        turn it is."""
        with self._changed:
            while not self._queues:
                self._changed.wait()
            key = next(iter(self._queues))
            lane = self._queues.pop(key)
            prompt = lane.popleft()
            if lane:
                self._queues[key] = lane  # after all other keys
            return prompt
