"""Errors of tokenizers as one line for the client."""

import pytest

from node.engine.text.tokenizer_errors import (
    MAX_ERROR_CHARS,
    TemplateFailed,
    TokenizerPanic,
    convert_panics,
    format_error,
)


class PanicException(BaseException):
    """Panic of a native library, as pyo3 raises it."""


def test_an_error_is_one_line_of_bounded_length():
    assert format_error(ValueError(" two\n\t lines ")) == "ValueError: two lines"
    assert format_error(KeyError()) == "KeyError"
    whole = "x" * (MAX_ERROR_CHARS - len("ValueError: "))
    assert format_error(ValueError(whole)) == f"ValueError: {whole}"
    cut = format_error(ValueError(whole + "yz"))
    assert (len(cut), cut[-2:]) == (MAX_ERROR_CHARS, "x…")


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request():
    with (
        pytest.raises(TokenizerPanic, match="the tokenizer failed: PanicException: too many steps") as raised,
        convert_panics(),
    ):
        raise PanicException("too many\nsteps")
    assert isinstance(raised.value, TemplateFailed)
    assert isinstance(raised.value.__cause__, PanicException)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no panic")])
def test_other_exceptions_pass(error: BaseException):
    with pytest.raises(type(error)) as raised, convert_panics():
        raise error
    assert raised.value is error
