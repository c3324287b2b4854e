"""Text of clients and nodes on a terminal: names, messages and logs that come from other machines may hold escape
sequences that hide or forge lines, move the cursor or set the clipboard.

`harmless_output` stands between every command and its terminal, so no command can forget it: control characters (C0
but for newline and tab, DEL, C1), bidirectional overrides, line separators and lone surrogates become `?`. Of escape
sequences only the colours that the commands use themselves pass. A screen that moves the cursor (`top`) writes around
it (`raw_output`), and its text is made harmless one by one.
"""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO

COLOURS = "0|1|2|31|32|33|34|35|36|1;31|1;33|1;32"
"""Select graphic rendition codes that commands use: reset, bold, dim, and foreground colours."""
_HARMFUL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_TEXT = re.compile(f"[{_HARMFUL}]")
_OUTPUT = re.compile(rf"(\x1b\[(?:{COLOURS})?m)|[{_HARMFUL}]")


def harmless(text: str) -> str:
    """Return a text from another machine without what a terminal would obey."""
    return _TEXT.sub("?", text)


class Harmless:
    """A text stream whose `write` lets nothing harmful pass; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    encoding = "utf-8"
    """click would write past this class into the buffer of a stream that it takes for misconfigured."""

    def write(self, text: str) -> int:
        """Write a text without what a terminal would obey, and without letters that the stream cannot encode."""
        shown = _OUTPUT.sub(lambda found: found[1] or "?", text)
        known = self.stream.encoding or "utf-8"
        self.stream.write(shown.encode(known, "replace").decode(known))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def harmless_output() -> Generator[None]:
    """Write everything that is printed in this block through `Harmless`."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (one if isinstance(one, Harmless) else Harmless(one) for one in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def raw_output(stream: TextIO) -> TextIO:
    """Return a stream as it is, for a screen or a bar whose text is harmless already."""
    return stream.stream if isinstance(stream, Harmless) else stream
