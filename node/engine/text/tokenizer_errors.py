"""Errors of tokenizers and chat templates, each with one line for the client."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

MAX_ERROR_CHARS: Final = 300
"""Maximum characters of an error's text in a message, because templates can raise with a whole conversation in it."""


class TokenizerError(ValueError):
    """Error: a model folder has no usable tokenizer. The text has the reason and the folder's name, but no path."""


class TemplateFailed(ValueError):
    """Error: no prompt can be made from a request. The text is one line for the client."""


class TokenizerPanic(TemplateFailed):
    """Error: the native tokenizer panicked, for example because its regular expression exceeded a limit of steps."""


class TooLong(ValueError):
    """Error: a prompt has more tokens than allowed. The text is one line for the client."""


@contextmanager
def convert_panics() -> Generator[None]:
    """Convert a panic of the native tokenizer in the context to `TokenizerPanic`.

    A panic is a `BaseException`. Without the conversion, it would pass `except Exception` and end the calling thread.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's type cannot be imported
            raise
        raise TokenizerPanic(f"the tokenizer failed: {format_error(error)}") from error


def format_error(error: BaseException) -> str:
    """Render an exception as one line of at most `MAX_ERROR_CHARS` characters: its type and its text."""
    words = " ".join(str(error).split())
    message = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return message if len(message) <= MAX_ERROR_CHARS else message[: MAX_ERROR_CHARS - 1] + "…"
