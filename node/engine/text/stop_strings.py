"""Stop strings over a stream: no part of a completed stop string is sent, wherever the pieces are cut.

Text that may start a stop string is held back until later text or the end of the answer decides. The stop string that
is complete first counts; if several end at the same character, the longest. The cut therefore never depends on the
pieces.
"""

from collections.abc import Iterable


class StopStrings:
    """Search for the stop strings of one row in its text. `found` is the completed stop string; empty before that."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending: str = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that may be sent now, and whether a stop string was completed. The stop string and
        the text after it are dropped."""
        if not self._stops:
            return text, False
        text = self._pending + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._pending = ""
            _, at, self.found = min(found)
            return text[:at], True
        keep = max(count_overlap(text, stop) for stop in self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return the text that was held back as a possible start of a stop string, because the row ends."""
        pending = self._pending
        self._pending = ""
        return pending


def count_overlap(text: str, stop: str) -> int:
    """Return the length in characters of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
