"""Stop strings over a stream: no part of a stop string is ever sent, wherever the pieces are cut.

Text that may start a stop string is held back until this is decided. The first completed stop string counts; of several
that end together, the longest. The cut therefore never depends on the pieces.
"""

from collections.abc import Iterable


class StopStrings:
    """Stop strings of one row with the text held back for them. `found` is the completed one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held: str = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add the next piece; return the text that may be sent now, and whether a stop string was completed."""
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
        """Return the held text at the end of the row, because no stop string followed."""
        held = self._held
        self._held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of the text that start the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
