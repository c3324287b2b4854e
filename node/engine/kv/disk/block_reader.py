"""Reader of the disk cache: a thread reads the files of one prompt ahead, and the engine builds a cache from them.

The thread makes no MLX calls, and reads at most three parts (files) ahead. A file that is missing, invalid or not read
within `STALLED_SECONDS` ends the restoration. The engine then removes this file from the index and looks the prompt up
again.
"""

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import BlockArray, InvalidBlockError, decode_block
from node.engine.kv.disk.layer_parts import LayerBuilder
from node.engine.kv.kv_cache import Layers

PARTS_AHEAD = 2
"""Maximum number of parts that wait for `BlockReader.take`. The thread may have read one more part."""
STALLED_SECONDS = 5.0
"""Seconds without a further part after which the disk counts as stalled."""

log = structlog.get_logger("engine.disk_cache")


class PlannedPart(NamedTuple):
    """File of a plan, which has one part of the stored prefix."""

    name: BlockName
    start: int
    """Position of the file's first token in the prompt."""


class ReadPlan(NamedTuple):
    """Plan to restore the first `length` tokens of a prompt: the files to read, in order."""

    length: int
    parts: tuple[PlannedPart, ...]
    nbytes: int
    """Total bytes of the files."""


class ReadPart(NamedTuple):
    """Result of reading one part."""

    planned: PlannedPart
    arrays: Sequence[BlockArray] | None
    """Arrays of the file; None if it is missing or invalid."""
    nbytes: int
    """Size of the file; 0 if it could not be read."""
    seconds: float
    """Duration of the read."""


class BlockReader:
    """Thread that reads the files of a plan ahead of their use. `folder` is the folder of the disk cache.

    The thread starts at once, and ends after the last file, the first invalid file, or `close`.
    """

    def __init__(self, folder: Path, plan: ReadPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._parts: queue.Queue[ReadPart] = queue.Queue(PARTS_AHEAD)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="disk-cache-reader", daemon=True).start()

    def take(self, timeout: float) -> ReadPart | None:
        """Wait for the next part and return it; None if it is not read within `timeout` seconds."""
        try:
            return self._parts.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Signal the thread to end, and release the parts that it has read. Do not wait for the thread."""
        self._closed.set()
        while self.take(0.0) is not None:
            pass

    def _run(self) -> None:
        for planned in self._plan.parts:
            part = self._read(planned)
            while not self._closed.is_set():
                try:
                    self._parts.put(part, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._closed.is_set():
                self.close()  # the part was queued after the caller's `close`
            if part.arrays is None or self._closed.is_set():
                return

    def _read(self, planned: PlannedPart) -> ReadPart:
        began = time.monotonic()
        name, arrays, content = planned.name, None, b""
        try:
            content = (self._folder / name.file).read_bytes()
            arrays = decode_block(content, name.chain, name.part, name.tokens)
        except (OSError, InvalidBlockError) as error:
            log.warning("not restored", file=name.file, error=str(error))
        return ReadPart(planned, arrays, len(content), time.monotonic() - began)


class DiskRestore:
    """Restoration of the KV cache of one prompt from the disk, part by part.

    `folder` is the folder of the disk cache. `cache` is an empty cache of the model, which `step` fills. A thread
    starts to read the files at once.
    """

    def __init__(self, folder: Path, plan: ReadPlan, cache: Layers) -> None:
        self.plan = plan
        self.layers: Layers | None = None
        """Complete cache of the first `plan.length` tokens, as the prefix store keeps caches; None before the last
        part."""
        self.invalid: PlannedPart | None = None
        """Invalid or stalled part that ended the restoration; None without one."""
        self.seconds = 0.0
        """Total seconds of the reads so far, including the read of an invalid file."""
        self._builder = LayerBuilder(cache, plan.length)
        self._reader = BlockReader(folder, plan)
        self._left = len(plan.parts)
        self._stalls_at = time.monotonic() + STALLED_SECONDS

    def step(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the next part, and add it to the cache. Return whether the restoration has
        ended, in which case `layers` or `invalid` is set."""
        part = self._reader.take(timeout)
        now = time.monotonic()
        if part is None:
            if now > self._stalls_at:
                self.invalid = self.plan.parts[-self._left]
                self._reader.close()
            return self.invalid is not None
        planned, arrays = part.planned, part.arrays
        self._stalls_at, self.seconds = now + STALLED_SECONDS, self.seconds + part.seconds
        try:
            if arrays is None:
                self.invalid = planned
                return True
            self._builder.add_part(planned.name.part, planned.start, planned.name.tokens, arrays)
        except InvalidBlockError as error:
            log.warning("not restored", file=planned.name.file, error=str(error))
            self.invalid = planned
            self._reader.close()
            return True
        self._left -= 1
        if not self._left:
            self.layers = self._builder.build()
        return self.layers is not None

    def close(self) -> None:
        """Stop the reading, and release the parts that were read ahead, because the restoration has ended or is not
        needed."""
        self._reader.close()
