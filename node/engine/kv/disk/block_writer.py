"""Writer of the disk cache: a thread that writes files, and the queue of the parts to write.

A part is the arrays of one file (`block_file`). The thread makes no MLX calls. It writes each file under a temporary
name and then renames the file, so that no reader sees an incomplete file. If a new file would exceed the quota, the
thread first deletes the least recently used files. A part is dropped if the quota or the daily write budget
(`disk_budget`) has no room for it.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, encode_block
from node.engine.kv.disk.block_index import TEMPORARY, BlockIndex
from node.engine.kv.disk.disk_budget import WriteBudget
from wire.units import MIB

MAX_QUEUED_BYTES = 64 * MIB
"""Bytes of parts, queued or being written, from which `BlockWriter.can_accept` returns False. A single part may be
larger."""
DISCARD_SECONDS = 1.0
"""Maximum seconds to wait for the file that is being written before the folders of models are deleted. The engine
generates no token during this wait. The writer deletes a file that takes longer."""
PAUSE_AFTER_ERROR_SECONDS = 30.0
"""Seconds after a failed write for which `BlockWriter.can_accept` returns False: the disk may be full, read-only or
gone."""

log = structlog.get_logger("engine.disk_cache")


class QueuedPart(NamedTuple):
    """Part in the queue of the writer."""

    name: BlockName
    arrays: Sequence[BlockArray]
    nbytes: int
    """Total bytes of the arrays."""


class BlockWriter:
    """Writer of the files of one folder (see the module's docstring).

    `quota()` returns the maximum bytes of all files. `budget` limits the bytes written per day. The thread runs until
    the process ends. `saves` counts the queued parts, `persisted` the written parts, and `drops` the parts that were
    dropped before their write. `errors` counts failed writes, `evictions` the files that were deleted to make room. A
    failed write drops all queued parts.
    """

    def __init__(self, folder: Path, index: BlockIndex, quota: Callable[[], int], budget: WriteBudget) -> None:
        self._folder = folder
        self._index = index
        self._quota = quota
        self._budget = budget
        self._queue: deque[QueuedPart] = deque()
        self._changed = threading.Condition()
        self._nbytes = self._unfinished = 0
        self.writing = ""
        """File of the part that is being written; empty if there is none."""
        self._discard = False
        """Whether the file that is being written is deleted once it is complete."""
        self._resume_at = 0.0
        self.quota = quota()
        """Maximum bytes of all files, as computed at the start and before each write."""
        self.saves = self.persisted = self.drops = self.errors = self.evictions = 0
        threading.Thread(target=self._run, name="disk-cache-writer", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that are queued or being written."""
        return self._nbytes

    def __len__(self) -> int:
        return self._unfinished

    @property
    def waiting(self) -> set[str]:
        """Files of the parts that are queued or being written."""
        with self._changed:
            return {part.name.file for part in self._queue} | ({self.writing} if self.writing else set())

    @property
    def budget_bytes(self) -> int:
        """Bytes that the daily budget allows to be written now."""
        return int(self._budget.compute_left(time.monotonic()))

    def can_accept(self) -> bool:
        """Return whether another part may be queued: less than `MAX_QUEUED_BYTES` are queued or being written, and no
        write failed within the last `PAUSE_AFTER_ERROR_SECONDS`."""
        return self._nbytes < MAX_QUEUED_BYTES and time.monotonic() >= self._resume_at

    def put(self, name: BlockName, arrays: Sequence[BlockArray]) -> None:
        """Queue the file `name` with these arrays. They stay in memory until the file is written or dropped."""
        size = sum(array.nbytes for array in arrays)
        with self._changed:
            self._queue.append(QueuedPart(name, arrays, size))
            self._nbytes += size
            self._unfinished += 1
            self.saves += 1
            self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Block until all parts are written or dropped. Return False if that takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, seconds)

    def clear(self) -> int:
        """Drop all queued parts, except the part that is being written. Return the bytes of the dropped parts."""
        with self._changed:
            dropped = sum(part.nbytes for part in self._queue)
            self.drops += len(self._queue)
            self._nbytes -= dropped
            self._unfinished -= len(self._queue)
            self._queue.clear()
        return dropped

    def remove(self, files: Collection[str]) -> None:
        """Drop the queued parts of these files. If one of the files is being written, delete it once it is complete."""
        with self._changed:
            self._discard |= self.writing in files
            dropped = [part for part in self._queue if part.name.file in files]
            self.drops += len(dropped)
            self._nbytes -= sum(part.nbytes for part in dropped)
            self._unfinished -= len(dropped)
            self._queue = deque(part for part in self._queue if part.name.file not in files)

    def discard(self) -> None:
        """Drop all queued parts, and delete the file that is being written once it is complete."""
        with self._changed:
            self._discard = True
        self.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                part, self._discard = self._queue.popleft(), False
                self.writing = part.name.file
            try:
                self._write(part)
            except Exception as error:  # also an error of this program: the thread must not end with parts in its queue
                self.errors += 1
                self._resume_at = time.monotonic() + PAUSE_AFTER_ERROR_SECONDS
                log.exception("not written", file=part.name.file, error=str(error))
                self.clear()
            nbytes = part.nbytes
            del part
            with self._changed:
                self.writing = ""
                self._nbytes -= nbytes
                self._unfinished -= 1
                self._changed.notify_all()

    def _write(self, part: QueuedPart) -> None:
        pieces = encode_block(part.name.chain, part.name.part, part.name.tokens, part.arrays)
        size = sum(map(len, pieces))
        quota = self.quota = self._quota()
        if size > quota or size > self.budget_bytes:  # no file is evicted for a part that cannot be written
            self.drops += 1
            return
        for file in self._index.choose_evictions(size, quota):
            self._index.remove(file)
            self.evictions += 1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / file)
        if self._index.nbytes + size > quota or not self._budget.take(size, time.monotonic()):
            self.drops += 1
            return
        target = self._folder / part.name.file
        target.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = target.with_name(target.name + TEMPORARY)
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in pieces:
                    file.write(piece)
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)
            if self._discard:  # its folder was deleted as well
                return
            raise
        with self._changed:
            if self._discard:
                target.unlink(missing_ok=True)
                return
            self._index.add(part.name, size)
        self.persisted += 1
