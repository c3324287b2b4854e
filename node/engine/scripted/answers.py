"""Prompt counts and answers of the scripted model: pure functions of prompt, choice, position and time.

A prompt has one token per word (separated by white space, even in the JSON of its tools) and four per message. The
count is therefore exact and easy to verify. The id of an answer's token is its position from 0. In an answer of fixed
words, the index of the choice is added to the id.
"""

import re
from collections.abc import Callable, Sequence

from wire.frames import Generate, Message

MESSAGE_TOKENS = 4
"""Tokens that the scripted model counts for each message in addition to its words."""
_SLICE = 1 << 16
_PIECE = re.compile(r"\s{1,64}\S{0,64}|\S{1,64}")

_LOREM = """
lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna
aliqua ut enim ad minim veniam quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo consequat duis
aute irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat nulla pariatur excepteur sint
occaecat cupidatat non proident sunt in culpa qui officia deserunt mollit anim id est laborum
"""
WORDS = tuple(_LOREM.split())

TokenSource = Callable[[int, float], tuple[int, str]]
"""Function `(position, now) → (id, text)` that returns the token at a position of an answer. `now` is in monotonic
seconds."""


def count_prompt_tokens(request: Generate) -> int:
    """Return the exact number of prompt tokens of a request, whose prompt is ids, text or messages."""
    if request.ids:
        return len(request.ids)
    if request.text:
        return count_words(request.text)
    return count_tokens(request.messages, request.tools)


def get_messages(request: Generate) -> Sequence[Message]:
    """Return the messages of a request; a text prompt counts as one user message."""
    return (Message("user", request.text),) if request.text else request.messages


def count_tokens(messages: Sequence[Message], tools: str = "") -> int:
    """Return the exact number of tokens of messages and of tools (a JSON text)."""
    return count_words(tools) + sum(MESSAGE_TOKENS + count_words(message.content) for message in messages)


def count_words(text: str) -> int:
    """Return the number of words of a text. The words are counted slice by slice, because a list of all words of 8 MiB
    would be 30 times as large as the text."""
    total = 0
    for start in range(0, len(text), _SLICE):
        piece = text[start : start + _SLICE]
        total += len(piece.split())
        if start and not text[start - 1].isspace() and not piece[0].isspace():
            total -= 1
    return total


def contains_word(messages: Sequence[Message], word: str) -> bool:
    """Return whether any message contains `word`."""
    return any(word in message.content for message in messages)


def split_echo(messages: Sequence[Message]) -> list[str]:
    """Return the texts of the tokens of an echo, which concatenated are exactly the last user message. Return one empty
    text if there is no user message."""
    last = next((message.content for message in reversed(messages) if message.role == "user"), "")
    return _PIECE.findall(last) or [""]


def create_word_source(choice: int) -> TokenSource:
    """Return the source of an answer of fixed words, which repeat. Each choice starts at another word."""

    def get_token(position: int, now: float) -> tuple[int, str]:
        place = (position + choice) % len(WORDS)
        return position + choice, WORDS[place] + " "

    return get_token


def create_echo_source(pieces: Sequence[str]) -> TokenSource:
    """Return the source of an answer that consists of `pieces`, one per token. It raises `IndexError` for a position
    beyond the last piece."""

    def get_token(position: int, now: float) -> tuple[int, str]:
        return position, pieces[position]

    return get_token


def make_clock_token(position: int, now: float) -> tuple[int, str]:
    """Return the token at `position`: the position as its id, and the monotonic time `now` (seconds) in ns as its text.

    With this text, a client measures the delay since the engine produced the token.
    """
    return position, f"{round(now * 1e9)} "
