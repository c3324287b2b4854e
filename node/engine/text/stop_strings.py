"""Stop strings over a stream: no part of a completed stop string is sent, wherever the pieces are cut.

Text that may start a stop string is held back until this is decided, at the latest by the end of the answer. The first
completed stop string counts; of several that end together, the longest. The cut therefore never depends on the pieces.
"""

from collections.abc import Iterable


class StopStrings:
    """Search for the stop strings of one row in its text. `found` is the completed stop string; empty if there is
    none."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending: str = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that may be sent now, and whether a stop string was completed. The text from the
        stop string on is dropped."""
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
        """Return the text held back as a possible start of a stop string, at the end of the row."""
        pending = self._pending
        self._pending = ""
        return pending


def count_overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper start of `stop`, in characters."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
