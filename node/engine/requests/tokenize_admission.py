"""Prompts that are not in tokens yet, and what it takes to put them there.

A tokenizer writes records of its own beside the tokens: measured up to 301 bytes a token, and no token is shorter than
a byte of text. Loading one takes up to 34 times its files, the tables for grammars 14 times. No estimate of a forward
sees these bytes. So a prompt for which `verdict.reading_bytes` counts any is judged on the inference thread before it
is read, as a forward would be, and they are reserved until it is in tokens. Two threads read prompts meanwhile, one of
them only long texts, so that a prompt of usual length never waits for a text of megabytes. Each takes turns between
API keys. The I/O thread prepares
short prompts itself (`Door.inline`): it answers pings, limits and cancels, and waits for nothing.

    I/O thread            inference thread              threads of prompts
    not inline: Unread ──► judged, reserved ───────────► read
                            └ Refusal                      │
                           admitted, no longer reserved ◄──┘ Read
"""

from collections.abc import Callable
from dataclasses import dataclass

from node.engine.requests.prepared import Prepared
from wire.capacity.arithmetic import most_bytes
from wire.frames import Count, Finished, Generate, Refusal
from wire.refusals import Code, Numbers, Refused
from wire.report import Memory
from wire.units import show_size

LONG = 64 * 1024
"""Bytes of text from which a prompt is long: about 0.1 s of tokenizing on a slow machine."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A prompt as it came. `need`: bytes that reading it takes for a moment; `read` puts it into tokens, on any thread,
    and never raises. `long`: it is read on the thread of long texts."""

    frame: Generate | Count
    need: int
    read: Callable[[], "Read"]

    @property
    def key(self) -> str:
        """Return the API key whose turn it takes."""
        return self.frame.owner.name

    @property
    def long(self) -> bool:
        """Return whether this text may take longer than the prompts of usual length wait for each other."""
        return text_bytes(self.frame) > LONG


@dataclass(frozen=True, slots=True)
class Read:
    """What became of an unread prompt; the promise for it ends here."""

    request: int
    work: Prepared | Finished | Refusal


def text_bytes(frame: Generate | Count) -> int:
    """Give the bytes of a request's text, a given token id counted as one."""
    texts = [frame.tools]
    for message in frame.messages:
        texts += (message.content, message.name, message.reasoning)
        texts += (part for call in message.tool_calls for part in (call.name, call.arguments))
    if isinstance(frame, Generate):
        texts.append(frame.text)
    ids = len(frame.ids) if isinstance(frame, Generate) else 0
    return ids + sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)


def too_long(frame: Generate | Count, need: int, memory: Memory) -> Refused | None:
    """Say with all numbers that this prompt could not be read here even if nothing else ran; None when it could."""
    holds = max(0, most_bytes(memory))
    if not memory.guard or need <= holds:
        return None
    numbers = Numbers(
        need + memory.margin, memory.cap, memory.current, memory.reserved, need, memory.margin, memory.cap,
        memory.headroom, memory.bound_by,
    )  # fmt: skip
    return Refused(Code.TOO_LARGE, (
        f"{text_bytes(frame)} bytes of text need up to {show_size(need)} to become tokens, this node can hold "
        f"{show_size(holds)}: shorten the prompt"
    ), numbers)  # fmt: skip
