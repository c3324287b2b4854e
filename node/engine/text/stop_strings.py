"""Stop strings over a stream: nothing of a stop string is ever shown, wherever the pieces are cut.

Text that may be the beginning of a stop string is held back until it is one, or is not. The stop string that is
complete first counts, and of several that end together the longest; so the cut never depends on the pieces.
"""

from collections.abc import Iterable


class Stops:
    """The stop strings of one row and the text held back for them. `found` is the one that was completed."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held: str = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece; give what may be shown now, and whether a stop string was completed."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at, self.found = min(found)
            return text[:at], True
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Give what was held back: the row ends and no stop string came of it."""
        held = self._held
        self._held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """Count the characters at the end of the text that begin the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
