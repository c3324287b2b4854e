from hypothesis import given
from hypothesis import strategies as st

from node.engine.scripted import answers
from wire.frames import Message


def test_a_prompt_has_a_token_per_word_and_four_per_message():
    assert answers.count_tokens([Message("system", "Be brief."), Message("user", " one  two\nthree ")]) == 5 + 8
    assert answers.count_tokens([Message("user", "")]) == 4
    assert answers.count_tokens([]) == 0


@given(st.lists(st.sampled_from(["a", " ", "bb ", "\n", "x" * 65_535, " " * 65_536]), max_size=12))
def test_long_texts_are_counted_as_exactly_as_short_ones(pieces: list[str]):
    text = "".join(pieces)
    assert answers.count_tokens([Message("user", text)]) == 4 + len(text.split())


@given(st.text())
def test_an_echo_joins_to_exactly_the_last_user_message(text: str):
    messages = [Message("user", "first"), Message("user", text), Message("assistant", "no")]
    assert "".join(answers.split_echo(messages)) == text
    assert all(len(piece) <= 128 for piece in answers.split_echo(messages))


def test_voices_are_functions_of_position_and_time():
    say = answers.create_word_source(0)
    assert [say(place, 0.0) for place in range(3)] == [(0, "lorem "), (1, "ipsum "), (2, "dolor ")]
    assert answers.create_word_source(1)(0, 9.0) == (1, "ipsum ")
    assert say(len(answers.WORDS), 0.0) == (len(answers.WORDS), "lorem ")
    assert answers.make_clock_token(3, 12.000000345) == (3, "12000000345 ")
