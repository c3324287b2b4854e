"""Admission of prompts to tokenization, with the memory that their tokenization takes.

In addition to the tokens, a tokenizer allocates up to 301 bytes per token (measured), and a token has at least one byte
of text. Loading a tokenizer takes up to 34 times the bytes of its files, and the tables for grammars take 14 times. No
estimate of a forward covers these bytes.

The gate therefore checks these bytes (`UntokenizedPrompt.need`) on the inference thread, and they are reserved until
the prompt is tokenized. Two prompt threads tokenize such prompts. One of them handles only texts above
`LONG_PROMPT_BYTES`, so that other prompts do not wait for such texts. Each thread takes turns between API keys. The I/O
thread prepares only short prompts (`RequestPreparer.can_prepare_inline`), because it must answer pings, limits and
cancels without a wait.

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
    """Prompt that a prompt thread tokenizes after the engine has reserved memory for the tokenization."""

    frame: Generate | CountTokens | Embed
    """The request, or the order to count its tokens."""
    need: int
    """Transient bytes of the tokenization; 0 if the gate need not check them."""
    tokenize: Callable[[], "TokenizeResult"]
    """Function that tokenizes the prompt. Any thread may call it, and it never raises."""

    @property
    def key(self) -> str:
        """Name of the API key of the request, for the turns between keys."""
        return self.frame.weighted_key.name

    @property
    def is_long(self) -> bool:
        """Whether the thread for long texts must tokenize the prompt (`LONG_PROMPT_BYTES`)."""
        return count_text_bytes(self.frame) > LONG_PROMPT_BYTES


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """Result of the tokenization of a prompt. When the engine handles it, the reservation of the tokenization ends."""

    request: int
    """Number of the request."""
    work: PreparedRequest | PreparedEmbedding | Finished | Refusal
    """Tokenized or refused request, or the answer to an order to count tokens."""


def count_text_bytes(frame: Generate | CountTokens | Embed) -> int:
    """Return the UTF-8 bytes of all texts of a request, including tools and earlier calls. A token id in the request
    counts as one byte.

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
    """Return the refusal, with all numbers, of a prompt that could not be tokenized even on this node when idle.

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
