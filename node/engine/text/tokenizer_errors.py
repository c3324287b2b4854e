"""Errors of tokenizers and chat templates, each with one line for the client."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

MAX_ERROR_CHARS: Final = 300
"""Maximum characters of an error's text in a message: templates can raise with a whole conversation in it."""


class TokenizerError(ValueError):
    """Error of a model folder without a usable tokenizer. The text states the reason and contains no path but the
    folder's name."""


class TemplateFailed(ValueError):
    """Error of a request from which no prompt can be made; the text is one line for the client."""


class TokenizerPanic(TemplateFailed):
    """Panic of the native tokenizer, such as a regular expression that exceeds its limit of steps for a text."""


class TooLong(ValueError):
    """Error of a prompt with more tokens than allowed; the text is one line for the client."""


@contextmanager
def convert_panics() -> Generator[None]:
    """Raise `TokenizerPanic` for a panic of the native tokenizer in the block.

    A panic is a `BaseException`: unconverted, it would pass `except Exception` and end the calling thread.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's type cannot be imported
            raise
        raise TokenizerPanic(f"the tokenizer failed: {format_error(error)}") from error


def format_error(error: BaseException) -> str:
    """Render an exception as one line: its name and the beginning of its text."""
    words = " ".join(str(error).split())
    message = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return message if len(message) <= MAX_ERROR_CHARS else message[: MAX_ERROR_CHARS - 1] + "…"
