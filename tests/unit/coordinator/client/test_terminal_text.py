"""Filter of the terminal: characters that hide or forge text become `?`, and the colours of commands pass."""

import io
import sys
import unicodedata

import pytest

from coordinator.client.terminal_text import (
    SanitizedStream,
    filter_output,
    get_raw_stream,
    replace_control_characters,
)

HARMFUL = [
    *map(chr, range(9)),
    *map(chr, range(11, 32)),
    *map(chr, range(127, 160)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff",
]
KEPT = "plain, Jürgen, 机器, 👩‍💻, tab\tand\nline"


def write(text: str, encoding: str = "utf-8") -> str:
    """Return the text that a stream of this encoding receives."""
    raw = io.BytesIO()
    stream = SanitizedStream(io.TextIOWrapper(raw, encoding=encoding, newline=""))
    assert stream.write(text) == len(text)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_characters_that_hide_or_forge_text_become_question_marks():
    assert replace_control_characters(KEPT) == write(KEPT) == KEPT
    for character in HARMFUL:
        shown = f"a{character}b"
        assert replace_control_characters(shown) == write(shown) == "a?b", f"{ord(character):#x}"
    bidirectional = {chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in EMBEDDINGS}
    assert bidirectional <= set(HARMFUL)


EMBEDDINGS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m \x1b[1;33mbold\x1b[m", "\x1b[31mred\x1b[0m \x1b[1;33mbold\x1b[m"),
        ("\x1b[41mred", "?[41mred"),
        ("\x1b[8mhidden", "?[8mhidden"),
        ("\x1b[2J\x1b[H", "?[2J?[H"),
        ("\x1b]0;title\x07", "?]0;title?"),
    ],
)
def test_only_the_colours_of_commands_pass(text: str, shown: str):
    assert write(text) == shown
    assert "\x1b" not in replace_control_characters(text)


def test_characters_that_the_stream_cannot_encode_become_question_marks():
    assert write("Jürgen → 机器", "ascii") == "J?rgen ? ??"
    assert write("Jürgen → 机器", "latin-1") == "Jürgen ? ??"


def test_the_output_of_a_command_is_filtered_once(capsys: pytest.CaptureFixture[str]):
    out = sys.stdout
    with filter_output():
        outer = sys.stdout
        with filter_output():
            assert sys.stdout is outer
            sys.stdout.writelines(["a\x07", "b\x1b[2J"])
            print("c\x07", file=sys.stderr)
            assert get_raw_stream(sys.stdout) is out
    assert (sys.stdout, get_raw_stream(out)) == (out, out)
    assert capsys.readouterr() == ("a?b?[2J", "c?\n")
