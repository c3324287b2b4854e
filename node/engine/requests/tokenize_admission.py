"""Admission of prompts to tokenization, with the memory that their tokenization takes.

A tokenizer keeps records of its own in addition to the tokens. They take up to 301 bytes a token (measured), and no
token is shorter than one byte of text. Loading a tokenizer takes up to 34 times its files, the tables for grammars 14
times. No estimate of a forward covers these bytes.

The gate therefore checks these bytes (`UntokenizedPrompt.need`) on the inference thread, and they are reserved until
the prompt is tokenized. Two prompt threads tokenize such prompts, one of them only texts above `LONG_PROMPT_BYTES`, for
which other prompts therefore do not wait. Each thread takes turns between API keys. The I/O thread prepares only short
prompts (`RequestPreparer.can_prepare_inline`), because it must answer pings, limits and cancels without a wait.

    I/O thread                       inference thread              prompt threads
    not inline: UntokenizedPrompt ──► checked, reserved ──────────► tokenize
                                       └ Refusal                      │
                                      admitted, no longer reserved ◄──┘ TokenizeResult
"""

from collections.abc import Callable
from dataclasses import dataclass

from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from wire.capacity.arithmetic import compute_most_bytes
from wire.frames import CountTokens, Embed, Finished, Generate, Refusal
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import Memory
from wire.units import show_size

LONG_PROMPT_BYTES = 64 * 1024
"""Bytes of text above which a prompt is long: about 0.1 s of tokenizing on a slow machine."""


@dataclass(frozen=True, slots=True)
class UntokenizedPrompt:
    """Prompt that a prompt thread will tokenize, once the engine has reserved the memory for that."""

    frame: Generate | CountTokens | Embed
    """The request, or the order to count its tokens."""
    need: int
    """Transient bytes of its tokenization; 0 if they need no check of the gate."""
    tokenize: Callable[[], "TokenizeResult"]
    """Function that tokenizes the prompt, on any thread. It never raises."""

    @property
    def key(self) -> str:
        """Id of the API key whose turn the prompt takes."""
        return self.frame.weighted_key.name

    @property
    def is_long(self) -> bool:
        """Whether the prompt belongs to the thread for long texts."""
        return count_text_bytes(self.frame) > LONG_PROMPT_BYTES


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """Result of the tokenization of a prompt. When the engine handles it, the reservation of the tokenization ends."""

    request: int
    """Number of the request."""
    work: PreparedRequest | PreparedEmbedding | Finished | Refusal
    """Tokenized or refused request, or the answer to an order to count tokens."""


def count_text_bytes(frame: Generate | CountTokens | Embed) -> int:
    """Return the UTF-8 bytes of all texts of a request, with tools and earlier calls. A given token id counts as one
    byte.

    A query counts once for each document, because it is part of each prompt.
    """
    if isinstance(frame, Embed):
        texts = sum(map(_count_bytes, frame.texts)) + len(frame.texts) * _count_bytes(frame.query)
        return sum(map(len, frame.ids)) + texts
    texts = [frame.tools]
    for message in frame.messages:
        texts += (message.content, message.name, message.reasoning)
        texts += (part for call in message.tool_calls for part in (call.name, call.arguments))
    if isinstance(frame, Generate):
        texts.append(frame.text)
    ids = len(frame.ids) if isinstance(frame, Generate) else 0
    return ids + sum(map(_count_bytes, texts))


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def refuse_too_long(frame: Generate | CountTokens | Embed, need: int, memory: Memory) -> Refused | None:
    """Return the refusal, with all numbers, of a prompt that could not be tokenized even on the idle node.

    Return None if it could be tokenized, or if the guard is off. `need` is the transient bytes of its tokenization.
    """
    holds = max(0, compute_most_bytes(memory))
    if not memory.guard or need <= holds:
        return None
    numbers = MemoryNumbers(
        need + memory.margin,
        memory.cap,
        memory.current,
        memory.reserved,
        need,
        memory.margin,
        memory.cap,
        memory.headroom,
        memory.bound_by,
    )
    return Refused(
        RefusalCode.TOO_LARGE,
        (
            f"{count_text_bytes(frame)} bytes of text need up to {show_size(need)} for tokenization, "
            f"this node can give {show_size(holds)}: shorten the prompt or raise memory.cap"
        ),
        numbers,
    )
