"""Text that a grammar rules, cut at its markers: a thought before it, then words, or calls.

The cutter of `pipeline` for constrained answers, in place of mlx-lm's machine, which finds markers everywhere: also
within a JSON string, where they are words like any others. Here a thought can only stand before everything else, and a
call's end only outside of JSON's quotes, in formats that have them. What a thought contains is thought,
whatever it looks like.

    open ──think end──► words            beginning ──think start──► open, or words
    words ──call start──► call ──call end──► words
"""

from dataclasses import dataclass
from enum import StrEnum

from node.engine.text.markers import NORMAL, REASONING, TOOL, Place
from node.engine.text.stop_strings import overlap

Segments = list[tuple[Place, str]]


class Calls(StrEnum):
    """Where calls may stand: nowhere, at the beginning (then nothing else does), or anywhere."""

    NONE = ""
    FIRST = "first"
    ANYWHERE = "anywhere"


class Thought(StrEnum):
    """How an answer begins: the prompt left a thought `open`, it `may` begin with one, or there is `none`."""

    OPEN = "open"
    MAY = "may"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Outline:
    """The markers of an answer and where they may stand. `quoted`: calls have JSON's quotes, in which no marker ends
    them; the grammars of all others keep the marker out of everything that they say."""

    think: tuple[str, str] = ("", "")
    thought: Thought = Thought.NONE
    call: tuple[str, str] = ("", "")
    calls: Calls = Calls.NONE
    quoted: bool = True

    def beginning(self) -> Place:
        """Give the place where the answer begins."""
        return Place(REASONING if self.thought is Thought.OPEN else NORMAL)


class FormatCutter:
    """See the module's text, and `pipeline.Cutter`."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._place = outline.beginning()
        self._held: str = ""
        self._fresh = outline.thought is Thought.MAY
        self._calls = outline.calls is not Calls.NONE
        self._quoted = self._escaped = False

    def feed(self, text: str) -> Segments:
        """Take text; give each place passed with the text in it, from the current place on."""
        self._held += text
        found: Segments = []
        while self._step(found):
            pass
        return found

    def flush(self) -> str:
        """Give what was held back: text of the current place."""
        held, self._held = self._held, ""
        return held

    def _step(self, found: Segments) -> bool:
        """Take text up to the next marker; whether there was one."""
        if self._fresh:
            return self._begin(found)
        if self._place.state == REASONING:
            return self._until(found, self._outline.think[1], NORMAL)
        if self._place.state == TOOL:
            return self._in_call(found)
        return self._in_words(found)

    def _begin(self, found: Segments) -> bool:
        start = self._outline.think[0]
        if not self._held or (start.startswith(self._held) and self._held != start):
            return False
        self._fresh = False
        if self._held.startswith(start):
            self._pass(found, 0, start, REASONING)
        return True

    def _in_words(self, found: Segments) -> bool:
        start = self._outline.call[0]
        if self._calls and self._outline.calls is Calls.FIRST:
            words = self._held.lstrip("\n ")
            if words and not start.startswith(words[: len(start)]):
                self._calls = False
        if self._calls:
            return self._until(found, start, TOOL)
        self._give(found, len(self._held))
        return False

    def _in_call(self, found: Segments) -> bool:
        end = self._outline.call[1]
        if not end:
            self._give(found, len(self._held))
            return False
        if not self._outline.quoted:
            return self._until(found, end, NORMAL)
        for at, sign in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = sign == "\\", sign != '"'
            elif self._held.startswith(end, at):
                self._pass(found, at, end, NORMAL)
                return True
            elif end.startswith(self._held[at:]):
                self._give(found, at)
                return False
            else:
                self._quoted = sign == '"'
        self._give(found, len(self._held))
        return False

    def _until(self, found: Segments, marker: str, state: str) -> bool:
        at = self._held.find(marker)
        if at < 0:
            self._give(found, len(self._held) - overlap(self._held, marker))
            return False
        self._pass(found, at, marker, state)
        return True

    def _give(self, found: Segments, count: int) -> None:
        found.append((self._place, self._held[:count]))
        self._held = self._held[count:]

    def _pass(self, found: Segments, at: int, marker: str, state: str) -> None:
        self._give(found, at)
        self._held = self._held[len(marker) :]
        self._place = Place(state, marker)
        found.append((self._place, ""))
