"""What the engine was doing when it died: written before every native call into memory that outlives the process.

A crash in native code leaves no time to say anything, so the page is shared with the agent (a deleted file, mapped by
both). It answers one question: which request, or which model's load, was in the forward? That request is never placed
again, and a model that kills twice is kept out for a while.

The page has a slot for the forward and one for each thread that puts prompts into tokens. After a crash the forward is
the cause, where there was one; after a hang, the call that had been under way for the longest time.
"""

import mmap
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from node.engine.process.interface import Doing

SIZE = mmap.PAGESIZE
LONGEST_MODEL = 200
"""Bytes of a model's name (`wire.identity.valid_model`)."""
SLOT = 256
"""Bytes of a slot; the first is that of the forward."""
SLOTS = 4
_LAYOUT = struct.Struct("<BQdH")


@dataclass(frozen=True, slots=True)
class Last:
    """The call that was under way since `since` (monotonic seconds). `request` is 0 where it served many (a decode
    step) or none."""

    doing: Doing
    request: int
    model: str
    since: float = field(default=0.0, compare=False)


class Recorder:
    """The writing side. Without a descriptor it writes into memory of its own."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, SIZE)
        self._slots: dict[int, int] = {}

    def begin(self, doing: Doing, model: str, request: int = 0) -> None:
        """A native call begins. Costs about a microsecond."""
        self._write(0, doing, model, request)

    def _write(self, at: int, doing: Doing, model: str, request: int) -> None:
        name = model.encode()[:LONGEST_MODEL]
        head = _LAYOUT.pack(doing, request, time.monotonic(), len(name))
        self._page[at : at + _LAYOUT.size + len(name)] = head + name

    @contextmanager
    def reading(self, model: str, request: int = 0) -> Generator[None]:
        """Record that this thread puts a prompt of a model into tokens, until the context ends."""
        slot = self._slots.setdefault(threading.get_ident(), len(self._slots) + 1)
        if slot >= SLOTS:
            yield
            return
        self._write(slot * SLOT, Doing.READ, model, request)
        try:
            yield
        finally:
            self._page[slot * SLOT] = Doing.NOTHING

    def oldest_read(self) -> Last | None:
        """Return the prompt that has been put into tokens for the longest time; None when there is none."""
        return _oldest(self._page[:], 1)

    def end(self) -> None:
        """It came back."""
        self._page[0] = Doing.NOTHING

    def crash(self, model: str, request: int) -> None:
        """End as a Metal out-of-memory would: by SIGABRT in the midst of a forward, without any clean-up."""
        self.begin(Doing.PREFILL, model, request)
        sys.stderr.write("crash: asked for by engine.scripted.crash\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)

    def last(self) -> Last | None:
        """Give the call under way."""
        return parse(self._page[:])


def new_page() -> int:
    """Make a page to share; give its descriptor, which the caller closes."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def read(descriptor: int, *, hung: bool = False) -> Last | None:
    """Read a page after its writer's death; None when no call was under way."""
    page = os.pread(descriptor, SIZE, 0)
    return _oldest(page, 0) if hung else parse(page) or _oldest(page, 1)


def parse(page: bytes, slot: int = 0) -> Last | None:
    """Understand a slot of a page; whatever was not written by us reads as nothing."""
    at = slot * SLOT
    doing, request, since, length = _LAYOUT.unpack_from(page, at)
    if doing == Doing.NOTHING or doing not in Doing.__members__.values():
        return None
    name = page[at + _LAYOUT.size : at + _LAYOUT.size + min(length, LONGEST_MODEL)]
    return Last(Doing(doing), request, name.decode(errors="replace"), since)


def _oldest(page: bytes, first: int) -> Last | None:
    found = [last for slot in range(first, SLOTS) if (last := parse(page, slot)) is not None]
    return min(found, key=lambda last: last.since, default=None)
