"""Crash recorder: write each native call, before the call begins, to a page of memory that outlives the process.

A crash in native code leaves no time for a message. The page is a deleted file that the engine maps. The agent keeps
its descriptor open, and reads the page after the end of the process. The page names the model of the running call, and
its request if the call concerns only one.

The page has a slot for the calls of the inference thread, such as a forward or a piece of a load. Each thread that
tokenizes prompts has another slot, up to three threads. After a crash the call of the inference thread, if any, is the
cause. After a hang, the cause is the call that had been running for the longest time.
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

from node.engine.process.interface import NativeCallKind

SIZE = mmap.PAGESIZE
"""Bytes of the page."""
MAX_MODEL_BYTES = 800
"""Maximum bytes of a model's name: 200 characters of up to 4 bytes (`wire.identity.is_valid_model`)."""
SLOT_BYTES = 1024
"""Bytes of a slot. The first slot belongs to the inference thread."""
SLOTS = 4
"""Number of slots: one for the inference thread, and one for each of the first threads that tokenize prompts."""
_LAYOUT = struct.Struct("<BQdH")


@dataclass(frozen=True, slots=True)
class CrashRecord:
    """Record of a native call, which tells the agent the request and the model of a crash or hang."""

    doing: NativeCallKind
    """Kind of the call."""
    request: int
    """Number of the request; 0 if the call served several (a decode step) or none."""
    model: str
    """Name of the model, cut to `MAX_MODEL_BYTES` bytes."""
    since: float = field(default=0.0, compare=False)
    """Start of the call in monotonic seconds. Comparisons of records ignore it."""


class CrashRecorder:
    """Writer of the page with the running native calls. `descriptor` is the page shared with the agent; None: private
    memory, which no other process reads."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, SIZE)
        self._slots: dict[int, int] = {}

    def begin(self, doing: NativeCallKind, model: str, request: int = 0) -> None:
        """Record the start of a native call of the inference thread. `request` is the number of its request; 0 for
        several or none. This takes about a microsecond."""
        self._write(0, doing, model, request)

    def _write(self, at: int, doing: NativeCallKind, model: str, request: int) -> None:
        name = model.encode()[:MAX_MODEL_BYTES]
        head = _LAYOUT.pack(doing, request, time.monotonic(), len(name))
        self._page[at : at + _LAYOUT.size + len(name)] = head + name

    @contextmanager
    def record_tokenization(self, model: str, request: int = 0) -> Generator[None]:
        """Record, while the context is open, that the calling thread tokenizes a prompt for a model.

        `request` is the number of the request; 0: unknown. Nothing is recorded for a thread without a slot. Only the
        first `SLOTS` − 1 threads that tokenize get a slot.
        """
        slot = self._slots.setdefault(threading.get_ident(), len(self._slots) + 1)
        if slot >= SLOTS:
            yield
            return
        self._write(slot * SLOT_BYTES, NativeCallKind.READ, model, request)
        try:
            yield
        finally:
            self._page[slot * SLOT_BYTES] = NativeCallKind.NOTHING

    def find_oldest_tokenization(self) -> CrashRecord | None:
        """Return the record of the tokenization that has been running for the longest time; None if none is
        running."""
        return _find_oldest(self._page[:], 1)

    def end(self) -> None:
        """Record the end of the native call of the inference thread."""
        self._page[0] = NativeCallKind.NOTHING

    def crash(self, model: str, request: int) -> None:
        """End the process as a Metal out-of-memory error does: by SIGABRT during a forward, without clean-up.

        The forward is recorded with `model` and `request` (its number).
        """
        self.begin(NativeCallKind.PREFILL, model, request)
        sys.stderr.write("crash: asked for by engine.scripted.crash\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)

    def read_running_call(self) -> CrashRecord | None:
        """Return the record of the native call that the inference thread runs; None if none runs. Tokenization does not
        count."""
        return parse_slot(self._page[:])


def create_page() -> int:
    """Create a page to share with an engine process. Return its file descriptor, which the caller must close.

    Raise `OSError` if no temporary file can be created.
    """
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def read_crash_record(descriptor: int, *, hung: bool = False) -> CrashRecord | None:
    """Read the record of the native call that was running when an engine process ended. `descriptor` is its page.

    Prefer the call of the inference thread; if it ran none, return the tokenization that had been running for the
    longest time. With `hung`, return the call of any thread that had been running for the longest time. Return None if
    no call was running.
    """
    page = os.pread(descriptor, SIZE, 0)
    return _find_oldest(page, 0) if hung else parse_slot(page) or _find_oldest(page, 1)


def parse_slot(page: bytes, slot: int = 0) -> CrashRecord | None:
    """Parse one slot of the content `page` of a page. Return None if it records no call or its content is invalid."""
    at = slot * SLOT_BYTES
    doing, request, since, length = _LAYOUT.unpack_from(page, at)
    if doing == NativeCallKind.NOTHING or doing not in NativeCallKind.__members__.values():
        return None
    name = page[at + _LAYOUT.size : at + _LAYOUT.size + min(length, MAX_MODEL_BYTES)]
    return CrashRecord(NativeCallKind(doing), request, name.decode(errors="replace"), since)


def _find_oldest(page: bytes, first: int) -> CrashRecord | None:
    found = [last for slot in range(first, SLOTS) if (last := parse_slot(page, slot)) is not None]
    return min(found, key=lambda last: last.since, default=None)
