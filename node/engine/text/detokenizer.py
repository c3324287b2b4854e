"""Text pipeline: from token ids to content, reasoning and tool calls for the client. A pure function of the ids.

    id ─► text (whole characters) ─► cut at markers ─┬─► reasoning   without newlines at its ends
                                                     ├─► tool block ─► calls, or content as it was generated
                                                     └─► content ─► stop strings

To resume a stream, the same ids are fed to a new pipeline and its output is discarded. Output may therefore depend on
the ids alone: no clock, no randomness, no state shared between pipelines. Each stage holds back only text whose meaning
depends on later text. Examples are an incomplete character, a possible marker, newlines that may end the reasoning, and
the start of a stop string. `finish` returns all held text.

Rules
- Stop strings: No part of a completed stop string is sent, and no text after it. Only content is searched for stop
  strings, not reasoning or calls.
- Newlines: Newlines next to a marker belong to the marker. Reasoning has no newlines at its ends, and content has none
  after a marker. After earlier content, newlines after a marker are kept if more content follows.
- Blocks: A block that is not a call, is unfinished, or has a call of more than `MAX_CALL_BYTES` becomes content with
  its markers. Only the start of a call that the token limit cuts is left out, because no client can use it. Complete
  calls before it in the same block are sent.
- Errors: A pipeline never raises, not even for invalid ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from node.engine.text.markers import INNER, NAKED, NORMAL, REASONING, TOOL, MarkerPlace
from node.engine.text.stop_strings import StopStrings
from node.engine.text.tool_call_parser import ToolCallParser
from wire.bounds import MAX_CALL_BYTES
from wire.frames import Channel

_CALLS = frozenset({TOOL, INNER, NAKED})
"""States within a call."""
_CALL_START = re.compile(r"\s*(?:[\w.:/-]+\s*)?(?:$|[\[{<(\"])")
"""Start of a block that is a call, or a part of such a start. Words after a marker are not a call."""
Pieces = tuple[tuple[Channel, str], ...]
"""Pairs of channel and text. The text of a tool call is its JSON (`wire.frames.Delta`)."""


class Decoder(Protocol):
    """Decoder from token ids to text, which returns only whole characters."""

    def feed(self, token: int) -> str:
        """Add a token id, and return the text that became final."""
        ...

    def flush(self) -> str:
        """Return the text that is held back at the end of an answer, with incomplete characters replaced."""
        ...


class MarkerCutter(Protocol):
    """Splitter of the text of one answer at markers; the markers are removed."""

    def feed(self, text: str) -> Sequence[tuple[MarkerPlace, str]]:
        """Add text, and split it at markers. Return its parts, each with its place, starting with the current place. A
        possible start of a marker at the end is held back."""
        ...

    def flush(self) -> str:
        """Return the text that was held back as a possible start of a marker. It belongs to the current place."""
        ...


class AnswerFormat(Protocol):
    """Format of an answer under a grammar. The implementation is `compiler.CompiledGrammar`."""

    @property
    def tools(self) -> str:
        """Tools as JSON, with the types that the parser of calls needs; empty if the parser uses the tools of the
        request."""
        ...

    def get_start_place(self) -> MarkerPlace:
        """Return the state of the text at the start of an answer: within reasoning, or not."""
        ...

    def create_cutter(self) -> MarkerCutter:
        """Return a new splitter for the text of one answer."""
        ...


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Output of a text pipeline for one token."""

    pieces: Pieces = ()
    """Text that became final, by channel, in the order of the answer."""
    stopped: bool = False
    """Whether a stop string or, with `one_call`, a call has ended the answer; no output follows."""


class TextPipeline:
    """Conversion of the tokens of one choice into content, reasoning and tool calls (see the module's docstring).

    `place` is the state of the text at the start of the answer. With `one_call` the answer ends with its first call.
    `reasoning_tokens` counts the tokens after which the text is within reasoning.
    """

    def __init__(
        self,
        decoder: Decoder,
        cutter: MarkerCutter,
        place: MarkerPlace,
        stops: StopStrings,
        calls: ToolCallParser,
        *,
        one_call: bool = False,
    ) -> None:
        self._decoder = decoder
        self._cutter = cutter
        self._place = place
        self._stops = stops
        self._calls = calls
        self._one_call = one_call
        self.reasoning_tokens = 0
        self._reasoning = _ReasoningText()
        self._block: list[str] = []
        self._gap: str | None = None
        self._has_content = False
        self._stopped = False
        self._pieces: list[tuple[Channel, str]] = []

    def feed(self, token: int) -> TokenOutput:
        """Add one token of the answer, and return the output that became final. After a stop string or call has ended
        the answer, tokens have no output."""
        if not self._stopped:
            self._split_text(self._decoder.feed(token))
            self.reasoning_tokens += self._place.state == REASONING
        return TokenOutput(self._take_pieces(), self._stopped)

    @property
    def stop(self) -> str:
        """Stop string that ended the answer; empty if no stop string did."""
        return self._stops.found

    def finish(self, reason: str) -> tuple[Pieces, str]:
        """End the answer. Return the text that was held back, and the finish reason for the client: `stop`, `length` or
        `tool_calls`.

        `reason` is `stop` or `length`. If a stop string or a call has ended the answer, `stop` replaces `length`. If
        the answer has a call, `tool_calls` replaces `stop`.
        """
        if not self._stopped:
            self._split_text(self._decoder.flush())
            self._add_text(self._cutter.flush())
            self._end_block(cut=reason == "length")
        if not self._stopped:
            self._emit(Channel.CONTENT, self._stops.flush())
        elif reason == "length":
            reason = "stop"
        return self._take_pieces(), "tool_calls" if reason == "stop" and self._calls.count else reason

    def _take_pieces(self) -> Pieces:
        pieces, self._pieces = self._pieces, []
        return tuple(pieces)

    def _split_text(self, text: str) -> None:
        for place, part in self._cutter.feed(text) if text else ():
            if self._stopped:
                return
            if place != self._place:
                self._enter_place(place)
            self._add_text(part)

    def _enter_place(self, place: MarkerPlace) -> None:
        left, self._place = self._place, place
        if left.state in _CALLS:
            self._close_block(left, place)
        elif left.state == REASONING:
            self._gap = ""
        if place.state == REASONING:
            self._reasoning.open()
        elif place.state in _CALLS:
            self._block = []

    def _add_text(self, text: str) -> None:
        """Add text of the current place. In states other than content, reasoning and calls, only text before the first
        marker is kept."""
        if not text or self._stopped:
            return
        if self._place.state == NORMAL:
            self._add_content(text)
        elif self._place.state == REASONING:
            self._emit(Channel.REASONING, self._reasoning.feed(text))
        elif self._place.state in _CALLS or not self._place.marker:
            self._block.append(text)

    # tool blocks

    def _close_block(self, left: MarkerPlace, place: MarkerPlace) -> None:
        body = "".join(self._block)
        if left.state == INNER and place.marker != self._calls.end:
            self._emit(Channel.REASONING, self._reasoning.feed(left.marker + body))
            self._gap = ""
        else:
            self._parse_block(body, left.marker, place.marker, whole=left.state == NAKED)

    def _end_block(self, *, cut: bool) -> None:
        """Handle the block that the end of the answer cut off. It is complete only for parsers without an end marker.

        `cut`: the answer has ended by its token limit. The complete calls of the block are sent, and the start of a
        call is left out. An answer without a marker of its response format is content.
        """
        if self._stopped or self._place.state in (NORMAL, REASONING):
            return
        body = "".join(self._block)
        if self._place.state not in _CALLS:
            if not self._place.marker:
                self._add_content(body)
            return
        is_start = cut and (self._place.state == NAKED or _CALL_START.match(body) is not None)
        if is_start:
            for part in self._calls.list_complete_parts(body, self._place.marker):
                if self._parse_block(part, self._place.marker, "", as_content=False):
                    return
        elif self._calls.end:
            self._add_content(self._place.marker + body)
        else:
            self._parse_block(body, self._place.marker, "")

    def _parse_block(self, body: str, start: str, end: str, *, whole: bool = False, as_content: bool = True) -> bool:
        """Send the calls of a block between two markers, or the block as content. Return whether calls were sent.

        `whole`: the markers are part of the call. Without `as_content`, leave out a block that is not a call.
        """
        calls = self._calls.parse_block(start + body + end if whole else body)
        shown = calls[:1] if self._one_call else calls
        if calls and all(len(call.encode()) <= MAX_CALL_BYTES for call in shown):
            if self._one_call:
                self._emit(Channel.CONTENT, self._stops.flush())
            self._pieces += ((Channel.TOOL_CALL, call) for call in shown)
            self._gap = ""
            self._stopped = self._one_call
            return True
        if as_content:
            self._add_content(start + body + end)
        return False

    # output

    def _add_content(self, text: str) -> None:
        if self._gap is not None:
            words = text.lstrip("\n")
            self._gap += text[: len(text) - len(words)]
            if not words:
                return
            text = (self._gap if self._has_content else "") + words
            self._gap = None
        self._has_content = True
        shown, self._stopped = self._stops.feed(text)
        self._emit(Channel.CONTENT, shown)

    def _emit(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is channel:
            text = self._pieces.pop()[1] + text
        self._pieces.append((channel, text))


class _ReasoningText:
    """Reasoning without newlines at either end, in one block or several; a newline separates two blocks."""

    def __init__(self) -> None:
        self._fresh = True
        self._has_text = False
        self._pending: str = ""

    def open(self) -> None:
        """Start a block: the held newlines of the last one were its end."""
        self._fresh = True
        self._pending = "\n" if self._has_text else ""

    def feed(self, text: str) -> str:
        """Add text of the block; return the part that cannot be its end."""
        if self._fresh:
            text = text.lstrip("\n")
        if not text:
            return ""
        self._fresh = False
        text = self._pending + text
        shown = text.rstrip("\n")
        self._pending = text[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        return shown
