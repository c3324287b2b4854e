"""Filter for untrusted text on a terminal: names, messages and logs of other machines may contain escape sequences.

Such sequences can hide or forge lines, move the cursor or set the clipboard. `filter_output` wraps the terminal output
of every command, hence no command can omit it. Control characters (C0 except newline and tab, DEL, C1), bidirectional
overrides, line separators and lone surrogates become `?`. Of all escape sequences, only the colours that commands use
pass the filter. A screen that moves the cursor (`top`) bypasses the filter with `get_raw_stream`, and filters each text
itself.
"""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

COLOURS = "0|1|2|31|32|33|34|35|36|90|1;31|1;33|1;32"
"""SGR codes (select graphic rendition) that commands use: reset, bold, dim, and foreground colours including grey."""
_HARMFUL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_TEXT = re.compile(f"[{_HARMFUL}]")
_OUTPUT = re.compile(rf"(\x1b\[(?:{COLOURS})?m)|[{_HARMFUL}]")


def replace_control_characters(text: str) -> str:
    """Return text from another machine with unsafe characters replaced by `?`.

    Unsafe are control characters except tab and newline, bidirectional marks, U+2028, U+2029 and surrogates.
    """
    return _TEXT.sub("?", text)


class SanitizedStream:
    """Text stream whose `write` filters control characters, except colours. Other attributes are read from `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    encoding = "utf-8"
    """Encoding that click sees. With ASCII, click would bypass this class and write into the stream's buffer."""

    def write(self, text: str) -> int:
        """Write a text to the stream, and return its length.

        Control characters become `?`, as do characters that the stream cannot encode.
        """
        shown = _OUTPUT.sub(lambda match: match[1] or "?", text)
        known = self.stream.encoding or "utf-8"
        self.stream.write(shown.encode(known, "replace").decode(known))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of the texts like `write`, without adding line breaks."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def filter_output() -> Generator[None]:
    """Replace standard output and standard error by a `SanitizedStream` while the context is open."""
    out, err = (
        stream if isinstance(stream, SanitizedStream) else SanitizedStream(stream)
        for stream in (sys.stdout, sys.stderr)
    )
    with redirect_stdout(out), redirect_stderr(err):
        yield


def get_raw_stream(stream: TextIO) -> TextIO:
    """Return the unfiltered stream, for a screen or progress bar whose text is already filtered."""
    return stream.stream if isinstance(stream, SanitizedStream) else stream
