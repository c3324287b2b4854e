"""Splitter of generated text under a grammar: reasoning first, then ordinary text and tool calls.

`FormatCutter` replaces mlx-lm's state machine in the text pipeline of constrained answers, except those in Harmony.
That machine finds markers everywhere, also within JSON strings, where they are ordinary text. Here reasoning can only
precede all other text. In formats with quotes, a call can end only outside of JSON's quotes.

    start (`ReasoningStart.OPEN`) ─► REASONING        start (`MAY`) ──think start──► REASONING, otherwise NORMAL
    REASONING ──think end──► NORMAL                   NORMAL ──call start──► TOOL ──call end──► NORMAL

`MarkerLayout.calls` limits where a call start is a marker.
"""

from dataclasses import dataclass
from enum import StrEnum

from node.engine.text.markers import NORMAL, REASONING, TOOL, MarkerPlace, MarkerSet
from node.engine.text.stop_strings import count_overlap

Segments = list[tuple[MarkerPlace, str]]
"""Parts of a text, each with its place."""


class CallPlaces(StrEnum):
    """Places where an answer may contain calls."""

    NONE = ""
    """Nowhere."""
    FIRST = "first"
    """Only before any text of the answer; reasoning may precede the calls."""
    ANYWHERE = "anywhere"
    """Between other text."""


class ReasoningStart(StrEnum):
    """Reasoning at the start of an answer."""

    OPEN = "open"
    """The prompt has begun the reasoning."""
    MAY = "may"
    """The answer may start with reasoning."""
    NONE = ""
    """The answer has no reasoning."""


@dataclass(frozen=True, slots=True)
class MarkerLayout:
    """Markers of an answer under a grammar, and the places where they may occur."""

    think: tuple[str, str] = ("", "")
    """Markers of the start and the end of the reasoning."""
    reasoning: ReasoningStart = ReasoningStart.NONE
    """Reasoning at the start of the answer."""
    call: tuple[str, str] = ("", "")
    """Markers of the start and the end of a call. If only the end is empty, a call ends with the answer."""
    calls: CallPlaces = CallPlaces.NONE
    """Places in the answer where calls may occur."""
    messages: MarkerSet | None = None
    """Markers of an answer that is a sequence of messages in Harmony; None for any other answer. With `messages`, all
    other fields have their defaults."""
    quoted: bool = True
    """Whether calls contain JSON's quotes, in which no marker ends a call. The grammars of other formats exclude the
    marker from the values."""

    def get_start_place(self) -> MarkerPlace:
        """Return the state of the text at the start of the answer: reasoning if the prompt has started it, otherwise
        normal. With `messages`, return the initial state of that format."""
        if self.messages is not None:
            return self.messages.get_start_place(False)
        return MarkerPlace(REASONING if self.reasoning is ReasoningStart.OPEN else NORMAL)


class FormatCutter:
    """Splitter of one answer under a grammar into reasoning, text and tool calls.

    The module's docstring has the rules. The interface is `detokenizer.MarkerCutter`.
    """

    def __init__(self, outline: MarkerLayout) -> None:
        self._outline = outline
        self._place = outline.get_start_place()
        self._pending: str = ""
        self._fresh = outline.reasoning is ReasoningStart.MAY
        self._calls = outline.calls is not CallPlaces.NONE
        self._quoted = self._escaped = False

    def feed(self, text: str) -> Segments:
        """Add text of the answer, and split it at markers. Return its parts, each with its place, starting with the
        current place. A possible start of a marker at the end is held back."""
        self._pending += text
        segments: Segments = []
        while self._step(segments):
            pass
        return segments

    def flush(self) -> str:
        """Return the text that was held back as a possible start of a marker. It belongs to the current place."""
        pending, self._pending = self._pending, ""
        return pending

    def _step(self, segments: Segments) -> bool:
        """Consume text up to the next marker; return whether there was one."""
        if self._fresh:
            return self._split_start(segments)
        if self._place.state == REASONING:
            return self._split_at_marker(segments, self._outline.think[1], NORMAL)
        if self._place.state == TOOL:
            return self._split_call(segments)
        return self._split_words(segments)

    def _split_start(self, segments: Segments) -> bool:
        start = self._outline.think[0]
        if not self._pending or (start.startswith(self._pending) and self._pending != start):
            return False
        self._fresh = False
        if self._pending.startswith(start):
            self._pass_marker(segments, 0, start, REASONING)
        return True

    def _split_words(self, segments: Segments) -> bool:
        start = self._outline.call[0]
        if self._calls and self._outline.calls is CallPlaces.FIRST:
            words = self._pending.lstrip("\n ")
            if words and not start.startswith(words[: len(start)]):
                self._calls = False
        if self._calls:
            return self._split_at_marker(segments, start, TOOL)
        self._emit(segments, len(self._pending))
        return False

    def _split_call(self, segments: Segments) -> bool:
        end = self._outline.call[1]
        if not end:
            self._emit(segments, len(self._pending))
            return False
        if not self._outline.quoted:
            return self._split_at_marker(segments, end, NORMAL)
        for at, sign in enumerate(self._pending):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = sign == "\\", sign != '"'
            elif self._pending.startswith(end, at):
                self._pass_marker(segments, at, end, NORMAL)
                return True
            elif end.startswith(self._pending[at:]):
                self._emit(segments, at)
                return False
            else:
                self._quoted = sign == '"'
        self._emit(segments, len(self._pending))
        return False

    def _split_at_marker(self, segments: Segments, marker: str, state: str) -> bool:
        at = self._pending.find(marker)
        if at < 0:
            self._emit(segments, len(self._pending) - count_overlap(self._pending, marker))
            return False
        self._pass_marker(segments, at, marker, state)
        return True

    def _emit(self, segments: Segments, count: int) -> None:
        segments.append((self._place, self._pending[:count]))
        self._pending = self._pending[count:]

    def _pass_marker(self, segments: Segments, at: int, marker: str, state: str) -> None:
        self._emit(segments, at)
        self._pending = self._pending[len(marker) :]
        self._place = MarkerPlace(state, marker)
        segments.append((self._place, ""))
