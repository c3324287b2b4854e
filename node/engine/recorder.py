"""What the engine was doing when it died: written before every native call into memory that outlives the process.

A crash in native code leaves no time to say anything, so the page is shared with the agent (a deleted file, mapped by
both). It answers one question: which request, or which model's load, was in the forward? That request is never placed
again, and a model that kills twice is kept out for a while.
"""

import mmap
import os
import signal
import struct
import sys
import tempfile
from dataclasses import dataclass

from node.engine.kinds import Doing

SIZE = mmap.PAGESIZE
LONGEST_MODEL = 200
"""Bytes of a model's name (`wire.identity.valid_model`)."""
_LAYOUT = struct.Struct("<BQH")


@dataclass(frozen=True, slots=True)
class Last:
    """The call that was under way. `request` is 0 where it served many (a decode step) or none."""

    doing: Doing
    request: int
    model: str


class Recorder:
    """The writing side. Without a descriptor it writes into memory of its own."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, SIZE)

    def begin(self, doing: Doing, model: str, request: int = 0) -> None:
        """A native call begins. Costs about a microsecond."""
        name = model.encode()[:LONGEST_MODEL]
        self._page[: _LAYOUT.size + len(name)] = _LAYOUT.pack(doing, request, len(name)) + name

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


def read(descriptor: int) -> Last | None:
    """Read a page after its writer's death; None when no call was under way."""
    return parse(os.pread(descriptor, SIZE, 0))


def parse(page: bytes) -> Last | None:
    """Understand a page; whatever was not written by us reads as nothing."""
    doing, request, length = _LAYOUT.unpack_from(page)
    if doing == Doing.NOTHING or doing not in Doing.__members__.values():
        return None
    name = page[_LAYOUT.size : _LAYOUT.size + min(length, LONGEST_MODEL)]
    return Last(Doing(doing), request, name.decode(errors="replace"))
