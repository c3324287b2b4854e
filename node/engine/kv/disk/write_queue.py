"""Queue of the entries that wait to be written to the disk cache, and the names of their parts.

The newest entry is written first, because the newest request is preempted first.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import version
from typing import NamedTuple

from node.engine.kv.disk.block_chain import BlockName, compute_chain, compute_root, name_state
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import BlockIndex
from node.engine.kv.disk.block_writer import BlockWriter
from node.engine.kv.disk.disk_budget import URGENT_BURST_SECONDS, compute_pause_seconds
from node.engine.kv.disk.layer_parts import LaunchedCut, begin_cut
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS, CachedPrefix
from node.engine.kv.radix_trie import ID_BYTES

VERSIONS = f"mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
"""Versions of mlx and mlx-lm. They are part of each chain of block hashes (`block_chain`): caches of other versions are
not found."""
FLUSH_SECONDS = 0.1
"""Maximum seconds that an eviction waits for the writer to write the queued parts, which frees their memory."""
RETRY_SECONDS = 0.05
"""Seconds until the next try while the writer is behind or memory is short."""
MAX_PENDING = 256
"""Maximum number of queued entries. The oldest entry is dropped first."""


RowView = Callable[[], Layers | None]
"""Function that returns the cache of a decoding row, without a copy; None once the row has ended."""


class CacheShape(NamedTuple):
    """Kinds of parts into which the caches of a model are cut for the disk."""

    fingerprint: str
    """Fingerprint of the model."""
    parts: frozenset[BlockPart]
    """Kinds of parts in each cache (`list_parts`); empty if the disk cache cannot store the caches of this model."""
    window: int
    """Tokens of the longest sliding window; 0 without one."""


class PendingEntry(NamedTuple):
    """Queued entry, of which some parts are not copied yet. Parts that are already on the disk are skipped."""

    entry: CachedPrefix[Layers]
    parts: Iterator[tuple[BlockName, int, int]]
    """Remaining parts: name, position of the first token, and position after the last token (`list_entry_parts`)."""
    key_file: str
    """File without which the entry is of no use: the state, or the first block."""
    absent: set[str]
    """Files of the parts that could not be copied, because the cache did not have them."""
    shape: CacheShape
    """Kinds of parts of the caches of its model."""
    part_bytes: int
    """Approximate bytes of its largest part."""
    view: RowView | None = None
    """Function that returns the cache of a decoding row with the same tokens. It is used while the entry is not in
    memory. None without a decoding row."""

    def get_layers(self) -> Layers | None:
        """Return the cache from which parts are copied: the cache of the entry, or else of its decoding row. Return
        None if the entry is not in memory and the row has ended."""
        if self.entry.value is None and self.view is not None:
            return self.view()
        return self.entry.value

    def list_files(self) -> list[str]:
        """Return the files of all parts in the order of the blocks, including absent parts."""
        return [name.file for name, _, _ in list_entry_parts(self.entry, self.shape)]


def list_entry_parts(entry: CachedPrefix[Layers], shape: CacheShape) -> Iterator[tuple[BlockName, int, int]]:
    """Yield all parts of an entry, in the order of the blocks: name, position of the first token, and position after
    the last token."""
    chain = compute_chain(compute_root(shape.fingerprint, VERSIONS, entry.scope), entry.key)
    for block, link in enumerate(chain[1:]):
        for part in (BlockPart.TOKENS, BlockPart.WINDOW):
            if part in shape.parts:
                yield BlockName(shape.fingerprint, part, link), block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
    if BlockPart.STATE in shape.parts:
        start = (len(chain) - 1) * BLOCK_TOKENS
        yield name_state(shape.fingerprint, chain[-1], entry.key[start * ID_BYTES :]), start, entry.length


class WriteQueue:
    """Queue of the entries that wait to be written (see the module's docstring).

    Files in `index` are not written again. `on_written(pending)` is called when the copies of all parts of an entry
    have been launched; the writer may still drop them.
    """

    def __init__(self, index: BlockIndex, on_written: Callable[[PendingEntry], None]) -> None:
        self.unwritten = 0
        """Number of entries of which parts were not copied for the writer: entries evicted from memory whose row has
        ended, and entries above `MAX_PENDING`."""
        self._index = index
        self._on_written = on_written
        self._pending: deque[PendingEntry] = deque()
        self._cuts: list[tuple[BlockName, LaunchedCut]] = []
        """Parts whose copies were launched, for the writer."""
        self._next_at = 0.0
        self._stalled_at = ""
        """File that was being written when the last wait of `flush` timed out."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def launched(self) -> set[str]:
        """Files of the parts whose copies were launched and have not been passed to the writer."""
        return {name.file for name, _ in self._cuts}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that were launched and have not been passed to the writer."""
        return sum(cut.nbytes for _, cut in self._cuts)

    def add(self, entry: CachedPrefix[Layers], shape: CacheShape, view: RowView | None = None) -> None:
        """Queue an entry; ignore an entry without parts. Above `MAX_PENDING` entries, drop the oldest entry and count
        it in `unwritten`. `view` is described at `PendingEntry`."""
        parts = list(list_entry_parts(entry, shape))
        if not parts:
            return
        has_state = BlockPart.STATE in shape.parts
        key_part = parts[-1] if has_state else parts[0]
        part_bytes = entry.nbytes if has_state else entry.nbytes * BLOCK_TOKENS // entry.length
        self._pending.append(PendingEntry(entry, iter(parts), key_part[0].file, set(), shape, part_bytes, view))
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self.unwritten += 1

    def remove(self, entry: CachedPrefix[Layers], files: Collection[str]) -> None:
        """Drop an entry, and the launched copies for these `files`. The entry does not count in `unwritten`."""
        self._pending = deque(pending for pending in self._pending if pending.entry is not entry)
        for name, cut in self._cuts:
            if name.file in files:
                cut.wait()
        self._cuts = [(name, cut) for name, cut in self._cuts if name.file not in files]

    def clear(self) -> None:
        """Drop all entries and all launched copies. The entries do not count in `unwritten`."""
        self._pending.clear()
        for _, cut in self._cuts:
            cut.wait()
        self._cuts.clear()

    def get_next_bytes(self) -> int:
        """Return the approximate maximum bytes of the part that `write_next` copies next; 0 with an empty queue."""
        return self._pending[-1].part_bytes if self._pending else 0

    def get_entry_bytes(self) -> int:
        """Return the bytes of the newest entry, whose parts `write_next` copies next; 0 with an empty queue."""
        return self._pending[-1].entry.nbytes if self._pending else 0

    def get_next_write(self) -> float | None:
        """Return the monotonic time at which `write_next` is due; 0.0 (at once) if launched copies wait for the writer.
        Return None if the queue is empty."""
        return 0.0 if self._cuts else self._next_at if self._pending else None

    def write_next(self, writer: BlockWriter, now: float, *, busy: bool, room: int, urgent: bool = False) -> None:
        """Pass the copies that the last call launched to the writer. If a write is due at the monotonic time `now`,
        launch the copy of the next missing part of the newest entry.

        No decode step waits for copies of an entry in memory. Copies of a decoding row are awaited at once, because a
        step would first copy the arrays of a batch that are still in use. `busy`: requests run, and writes are spaced
        out (`compute_pause_seconds`). `room`: maximum number of parts for which memory suffices. `urgent`: the entry
        may soon be evicted from memory; several small parts are then launched in one call.
        """
        self._pass_copies(writer)
        if not self._pending or now < self._next_at:
            return
        if not room or not writer.can_accept():
            self._next_at = now + RETRY_SECONDS
            return
        pending = self._pending[-1]
        pause = compute_pause_seconds(pending.part_bytes, urgent=urgent) if busy else 0.0
        self._next_at = max(self._next_at, now - URGENT_BURST_SECONDS) if urgent else now
        layers, count = pending.get_layers(), 0
        if layers is None:
            self.unwritten += 1
        else:
            for name, start, end in pending.parts:
                if name in self._index:
                    continue
                cut = begin_cut(layers, name.part, start, end)
                if cut is None:
                    pending.absent.add(name.file)
                    continue
                self._cuts.append((name, cut))
                if not pending.entry.is_stored:
                    self._pass_copies(writer)
                count, self._next_at = count + 1, self._next_at + pause
                if count == room or self._next_at > now or not urgent:
                    return
            self._on_written(pending)
        self._pending.pop()

    def flush(self, writer: BlockWriter) -> None:
        """Pass the launched copies to `writer`, and block until all its parts are written, because their memory is
        needed.

        Drop parts that are not written within `FLUSH_SECONDS`. Their entries, if still queued here, start again at
        their first part that is not on the disk. If the writer still writes the same file as at the last wait that
        timed out, drop all other parts at once.
        """
        self._pass_copies(writer)
        if (writer.writing and writer.writing == self._stalled_at) or not writer.wait(FLUSH_SECONDS):
            self._stalled_at = writer.writing
            for place, pending in enumerate(self._pending):
                self._pending[place] = pending._replace(parts=list_entry_parts(pending.entry, pending.shape))
            writer.clear()

    def _pass_copies(self, writer: BlockWriter) -> None:
        """Pass the launched copies to the writer."""
        for name, cut in self._cuts:
            writer.put(name, cut.collect())
        self._cuts.clear()
