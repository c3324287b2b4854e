import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.text.stop_strings import StopStrings, count_overlap

LETTERS = st.text("ab", max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_a_stop_string_across_pieces_is_never_shown():
    assert run(["one tw", "o", " three"], ["two"]) == ("one ", True)


def test_the_beginning_of_a_stop_string_that_came_to_nothing_is_shown():
    assert run(["one tw", "in"], ["two"]) == ("one twin", False)
    assert run(["one tw"], ["two"]) == ("one tw", False)


def test_text_is_held_back_only_as_long_as_it_may_be_a_stop_string():
    matcher = StopStrings(["<end>"])
    assert matcher.feed("a <") == ("a ", False)
    assert matcher.feed("b") == ("<b", False)


def test_empty_stop_strings_stop_nothing():
    assert run(["a", "b"], ["", ""]) == ("ab", False)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut a text at the stop string that is complete first; of several at the longest. Return the text, and whether it
    was cut."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(st.lists(LETTERS, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cut_is_where_searching_the_whole_text_would_cut(pieces: list[str], stops: list[str]):
    assert run(pieces, stops) == expected("".join(pieces), stops)


def test_the_cut_does_not_depend_on_the_pieces():
    assert run(["abc"], ["abc", "b"]) == run(["a", "b", "c"], ["abc", "b"]) == ("a", True)


@pytest.mark.parametrize(
    ("pieces", "stops", "found"),
    [
        (["a b"], ["b", "a b"], "a b"),
        (["xb", "c"], ["bc", "zz"], "bc"),
        (["ab"], ["abc"], ""),
        (["abc"], ["c", "b"], "b"),
    ],
)
def test_the_stop_string_that_ended_the_row_is_named(pieces: list[str], stops: list[str], found: str):
    matcher = StopStrings(stops)
    for piece in pieces:
        matcher.feed(piece)
    assert matcher.found == found
    assert not matcher.flush() or not found


def test_held_back_text_is_flushed_once():
    matcher = StopStrings(["<end>"])
    assert matcher.feed("a <en") == ("a ", False)
    assert (matcher.flush(), matcher.flush()) == ("<en", "")
    assert matcher.feed("d>") == ("d>", False)


@pytest.mark.parametrize(
    ("text", "stop", "length"), [("xab", "abc", 2), ("abc", "abc", 0), ("aa", "aaa", 2), ("", "a", 0), ("ab", "b", 0)]
)
def test_the_longest_start_of_a_stop_string_counts(text: str, stop: str, length: int):
    assert count_overlap(text, stop) == length
