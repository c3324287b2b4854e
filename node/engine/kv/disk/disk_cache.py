"""Disk cache: the second tier of the prefix cache, which survives the engine process.

    entry stored in memory ─► offer ─► write (one part a call, while there is time) ─► writer thread ─► files
    prompt ─► find (index only) ─► restore: reader thread ─► one part a turn, through the gate ─► cache of the row

Rules
- A lookup guarantees nothing. A missing or invalid file ends the restoration; the prompt is then looked up again.
- A prefix is written only if its prefill is expected to take at least `min_seconds` longer than a read of its files.
- One process at a time writes to a folder, under a lock. Another process only reads until it gets the lock.
- Files belong to a model by its fingerprint, and to a scope: a key finds only files of its own scope and shared files.
- The text of prompts can be recovered from the files. Only the user of this process can read the folder.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import structlog
from msgspec.structs import replace

from host.private_files import create_private_folder, write_private
from node.engine.kv.disk.block_chain import BlockName, compute_chain, compute_root
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import BlockIndex, FolderSize
from node.engine.kv.disk.block_reader import DiskRestore, PlannedPart, ReadPlan
from node.engine.kv.disk.block_writer import DISCARD_SECONDS, BlockWriter
from node.engine.kv.disk.disk_budget import DAILY_DISK_SHARE, WriteBudget, compute_quota
from node.engine.kv.disk.layer_parts import count_window_blocks
from node.engine.kv.disk.write_queue import VERSIONS, CacheShape, PendingEntry, RowView, WriteQueue, list_entry_parts
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS, MAX_EVICTIONS_REPORTED, CachedPrefix, DiskCopy
from node.engine.kv.radix_trie import ID_BYTES
from wire.report import CacheState
from wire.units import GIB, show_size

FIRST_READ_SPEED = 1.0 * GIB
"""Bytes per second that a disk is expected to read before a measurement."""
SPEED_WEIGHT = 0.2
"""Weight of the newest measurement in the mean speed of reading."""
LOCK, IDENTITY = "lock", "identity"
"""Names of the files with the lock and the identity of the folder."""

log = structlog.get_logger("engine.disk_cache")


class DiskCache:
    """Disk cache in `folder` (see the module's docstring). `size` is the setting `disk_cache_size`: bytes or `auto`.
    Raise `OSError` if the folder cannot be created or read.

    `min_seconds` is the expected time that reading an entry must save for the entry to be written. `hits` counts
    complete restorations, `hit_tokens` and `read_bytes` their tokens and bytes. `faults` counts restorations that an
    invalid or stalled file ended.
    """

    def __init__(self, folder: Path, size: str | int, min_seconds: float) -> None:
        self.min_seconds = min_seconds
        self.hits = self.hit_tokens = self.read_bytes = self.faults = 0
        self.model_hits: Counter[str] = Counter()
        """Hits by the fingerprint of the model."""
        self._folder = create_private_folder(folder)
        self._size = size
        self._index = BlockIndex()
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        self.queue = WriteQueue(self._index, self._add_copy)
        """Entries that wait to be written."""
        self._copies: dict[str, dict[bytes, DiskCopy]] = {}
        """Written copies of entries, by the file without which a copy is of no use, and by the hash of the prompt."""
        self._unwritten: list[tuple[DiskCopy, str, set[str], list[str]]] = []
        """Copies of which parts may still wait for the writer. Each has its key in `_copies`, the files to check, and
        all of its files in the order of the blocks."""
        self._unusable = set[str]()
        """Files that `remove_parts` left in the folder, because another process writes to it."""
        self._read_speed = FIRST_READ_SPEED
        self.writer: BlockWriter | None = None
        """Writer; None while another process writes to this folder. `offer` and `clear` try again to take the lock."""
        self.store_id = ""
        """Random identity of the folder. It changes when the files of all models are deleted."""
        if not self._open_writer():
            log.warning("disk cache in use", folder=str(folder), effect="this engine only reads it")
            self._read_folder(clean=False)
        log.info("disk cache", folder=str(folder), files=len(self._index), size=show_size(self._index.nbytes))

    def _open_writer(self) -> bool:
        """Take the lock of the folder, read the folder and start the writer; return whether this process is the one
        that writes. Raise `OSError` if the disk cannot be read."""
        if self.writer is not None:
            return True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._read_folder(clean=True)
        while self._unusable:
            self._delete_file(self._unusable.pop())
        daily = DAILY_DISK_SHARE * shutil.disk_usage(self._folder).total
        budget = WriteBudget(daily, time.monotonic(), self._folder)
        self.writer = BlockWriter(self._folder, self._index, self._compute_quota, budget)
        return True

    def _read_folder(self, *, clean: bool) -> None:
        """Read the names of all files and the identity of the folder. With `clean`, delete incomplete files."""
        self._index.scan(self._folder, clean=clean)
        self.store_id = _read_identity(self._folder / IDENTITY)

    def _compute_quota(self) -> int:
        return compute_quota(self._size, self._folder, self._index.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._index.nbytes

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._index)

    def describe(self, state: CacheState) -> CacheState:
        """Return `state` with the fields `store` and `disk_…` filled in. Numbers of the writer are 0 without a writer.

        `disk_drops` also counts entries that left the queue unwritten. `disk_errors` also counts failed restorations.
        """
        writer = self.writer
        return replace(
            state,
            disk_bytes=self.nbytes,
            disk_files=len(self._index),
            disk_hits=self.hits,
            disk_hit_tokens=self.hit_tokens,
            disk_read_bytes=self.read_bytes,
            disk_saves=0 if writer is None else writer.saves,
            disk_persisted=0 if writer is None else writer.persisted,
            disk_drops=self.queue.unwritten + (0 if writer is None else writer.drops),
            disk_errors=self.faults + (0 if writer is None else writer.errors),
            disk_evictions=0 if writer is None else writer.evictions,
            store=self.store_id,
            disk_quota=0 if writer is None else writer.quota,
            disk_budget=0 if writer is None else writer.budget_bytes,
            disk_waiting=len(self.queue) + (0 if writer is None else len(writer)),
        )

    @property
    def queued_bytes(self) -> int:
        """Bytes in memory of the parts that are queued for the writer or being written, and of the copies that were
        launched for the writer."""
        return self.queue.nbytes + (0 if self.writer is None else self.writer.nbytes)

    def clear_queue(self) -> int:
        """Block until the parts that are copied or queued for the writer are written. Drop parts that are not written
        within `FLUSH_SECONDS`. Return the released bytes of memory; 0 without a writer."""
        before = self.queued_bytes
        if self.writer is not None and before:
            self.queue.flush(self.writer)
        return before - self.queued_bytes

    def take_lost(self) -> list[bytes]:
        """Return the hashes of prompts that are lost since the last call: neither memory nor the disk has them. They
        were evicted from memory, and then removed from the disk or dropped by the writer."""
        removed, gone, lost = self._index.removed, list[DiskCopy](), list[bytes]()
        while removed:
            gone += self._copies.pop(removed.popleft(), {}).values()
        for copy in [*gone, *self._take_dropped()]:
            if copy.on_disk:
                copy.leave_disk()
                if not copy.in_memory:
                    lost.append(copy.prompt_hash)
        return lost

    def _take_dropped(self) -> list[DiskCopy]:
        """Return the copies of which a part was dropped and not written, and record those whose parts are all written.

        Mark the files of the latter as used. Otherwise the files of a shorter prompt that such a copy continues would
        be older than the files after them, and would be evicted first.
        """
        waiting = self.queue.launched | (set[str]() if self.writer is None else self.writer.waiting)
        unwritten, dropped = self._unwritten, list[DiskCopy]()
        self._unwritten = []
        for copy, key_file, files, ordered in unwritten:
            if not self._index.has_files(files - waiting):
                dropped.append(copy)
            elif files & waiting:
                self._unwritten.append((copy, key_file, files & waiting | {key_file}, ordered))
            else:
                copies = self._copies.setdefault(key_file, {})
                copies[copy.prompt_hash] = copy
                if len(copies) > MAX_EVICTIONS_REPORTED:
                    del copies[next(iter(copies))]
                _mark_used(self._index, self._folder, ordered)
        return dropped

    def _add_copy(self, pending: PendingEntry) -> None:
        """Set the copy of an entry on the disk, once all of its parts were copied for the writer."""
        entry, files = pending.entry, pending.list_files()
        copy = DiskCopy(entry.prompt_hash, in_memory=entry.is_stored)
        self._unwritten.append((copy, pending.key_file, set(files) - pending.absent | {pending.key_file}, files))
        entry.set_copy(copy)

    def list_models(self) -> dict[str, FolderSize]:
        """Return the number and total bytes of the files of each model that has files, by the model's fingerprint."""
        return self._index.list_models()

    def clear(self, model: str) -> None:
        """Delete the files of the model with the fingerprint `model`; if `model` is empty, those of all models. Drop
        all entries and parts that wait to be written, even of other models. Wait up to `DISCARD_SECONDS` for a file
        that is being written. If `model` is empty, the folder gets a new identity. Raise `OSError` if files cannot be
        deleted, and `BlockingIOError` if another process writes to the folder.
        """
        if not self._open_writer() or self.writer is None:
            raise BlockingIOError(f"another process writes to {self._folder}")
        self.queue.clear()
        self.writer.discard()
        self.writer.wait(DISCARD_SECONDS)
        for fingerprint in [model] if model else self.list_models():
            for file in self._index.list_files(fingerprint):
                self._index.remove(file)
        delete_files(self._folder, model)
        if not model:
            self.store_id = _read_identity(self._folder / IDENTITY)

    def close(self) -> None:
        """Release the lock of the folder, because the process ends."""
        os.close(self._lock)

    # reading

    def find(self, shape: CacheShape, scope: str, key: bytes) -> ReadPlan | None:
        """Return a plan to read the longest stored prefix of a prompt; None if no prefix is stored. The prefix leaves
        out at least the last token of the prompt, because a forward must compute its logits.

        `key` is the packed token ids of the prompt. `scope` is the scope of its API key, or the scope of all keys.
        """
        if not shape.parts or not len(self._index):
            return None
        model, most = shape.fingerprint, len(key) // ID_BYTES - 1
        chain = compute_chain(compute_root(model, VERSIONS, scope), key)
        blocks = min(self._index.count_blocks(model, chain), most // BLOCK_TOKENS)
        if BlockPart.STATE in shape.parts:
            state = self._index.find_state(model, chain[: blocks + 1], key, most)
            if state is None:
                return None
            length, name = state
            blocks = length // BLOCK_TOKENS
            return self._plan(length, [*_list_blocks(model, chain, 0, blocks, BlockPart.TOKENS), (name, blocks)])
        behind = count_window_blocks(shape.window)
        while blocks:
            windows = _list_blocks(model, chain, max(0, blocks - behind), blocks, BlockPart.WINDOW) if behind else []
            if all(name in self._index for name, _ in windows):
                tokens = _list_blocks(model, chain, 0, blocks, BlockPart.TOKENS)
                return self._plan(blocks * BLOCK_TOKENS, [*windows, *tokens])
            blocks -= 1
        return None

    def _plan(self, length: int, parts: list[tuple[BlockName, int]]) -> ReadPlan:
        planned = tuple(PlannedPart(name, block * BLOCK_TOKENS) for name, block in parts)
        return ReadPlan(length, planned, sum(self._index.get_size(part.name) for part in planned))

    def estimate_read_seconds(self, nbytes: int) -> float:
        """Return the expected seconds to read `nbytes` bytes, from the mean speed of earlier restorations."""
        return nbytes / self._read_speed

    def begin_restore(self, plan: ReadPlan, cache: Layers) -> DiskRestore:
        """Start to read the files of a plan into the empty `cache`, and return the restoration in progress."""
        return DiskRestore(self._folder, plan, cache)

    def end_restore(self, restore: DiskRestore) -> None:
        """Count a complete restoration as a hit, update the mean read speed, and mark the files as used. If a file was
        invalid or stalled, count a fault and remove that file instead."""
        if restore.invalid is not None:
            self.faults += 1
            self.remove_parts([restore.invalid])
            return
        plan = restore.plan
        self.hits += 1
        self.model_hits[plan.parts[0].name.model] += 1
        self.hit_tokens += plan.length
        self.read_bytes += plan.nbytes
        speed = plan.nbytes / max(restore.seconds, 1e-6)
        self._read_speed += SPEED_WEIGHT * (speed - self._read_speed)
        _mark_used(self._index, self._folder, [part.name.file for part in plan.parts])

    def remove_parts(self, parts: tuple[PlannedPart, ...] | list[PlannedPart]) -> None:
        """Remove files from index and disk, because they are invalid or a request that used or stored them has failed.

        While another process writes to the folder, the files stay on the disk. They are deleted when this process gets
        the lock of the folder.
        """
        for part in parts:
            if self.writer is not None:
                self._delete_file(part.name.file)
            elif self._index.remove(part.name.file):
                self._unusable.add(part.name.file)

    def _delete_file(self, file: str) -> None:
        self._index.remove(file)
        with contextlib.suppress(OSError):
            (self._folder / file).unlink()

    def remove_entry(self, entry: CachedPrefix[Layers], shape: CacheShape) -> None:
        """Remove the files of an entry, and its parts that are queued or copied for the writer, because the entry's
        request has failed. A file that is being written is deleted when it is complete."""
        parts = [PlannedPart(name, start) for name, start, _ in list_entry_parts(entry, shape)]
        files = {part.name.file for part in parts}
        self.queue.remove(entry, files)
        if self.writer is not None:
            self.writer.remove(files)
        self.remove_parts(parts)

    # writing

    def offer(
        self, entry: CachedPrefix[Layers], shape: CacheShape, prefill_seconds: float, view: RowView | None = None
    ) -> None:
        """Queue an entry to be written, if its prefill of `prefill_seconds` takes at least `min_seconds` longer than a
        read of its files. Ignore the entry if another process writes to the folder, or the folder cannot be read.
        Ignore it as well if the disk cache cannot store the caches of the model.

        `view()` returns the cache of a decoding row with the same tokens, or None after the end of the row. This cache
        is written if the entry is not in memory.
        """
        saved = prefill_seconds - self.estimate_read_seconds(entry.nbytes)
        if not shape.parts or saved < self.min_seconds:
            return
        try:
            opened = self._open_writer()
        except OSError as error:
            log.warning("disk cache not opened", folder=str(self._folder), error=str(error))
            return
        if opened:
            self.queue.add(entry, shape, view)

    def write_next(self, now: float, *, busy: bool, room: int, urgent: bool = False) -> None:
        """Launch the copies of the parts that are due at the monotonic time `now`, and pass earlier copies to the
        writer. Do nothing if another process writes to the folder.

        `busy`: requests run, and writes are spaced out. `room`: maximum number of parts for which memory suffices.
        `urgent`: the newest entry may soon be evicted from memory.
        """
        if self.writer is not None:
            self.queue.write_next(self.writer, now, busy=busy, room=room, urgent=urgent)


def clear_folder(folder: Path, model: str) -> None:
    """Delete the files of the model with the fingerprint `model`, or of all models if `model` is empty.

    No disk cache of this process may use the folder. Do nothing if the folder does not exist.

    Raise `OSError` if files cannot be deleted, `BlockingIOError` if another process writes to the folder.
    """
    if not folder.exists():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        delete_files(folder, model)
    finally:
        os.close(lock)


def delete_files(folder: Path, model: str) -> None:
    """Delete the subfolder of the model with the fingerprint `model`. If `model` is empty, delete the subfolders of all
    models and the identity of the folder. Raise `OSError` if files cannot be deleted."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and model in ("", path.name):
            shutil.rmtree(path)
    if not model:
        (folder / IDENTITY).unlink(missing_ok=True)


def _list_blocks(model: str, chain: list[bytes], first: int, last: int, part: BlockPart) -> list[tuple[BlockName, int]]:
    return [(BlockName(model, part, chain[block + 1]), block) for block in range(first, last)]


def _read_identity(file: Path) -> str:
    """Return the identity that the file has. Create the file with a random identity if it is missing."""
    if not file.exists():
        write_private(file, secrets.token_hex(8).encode())
    return file.read_text(errors="replace")[:32]


def _mark_used(index: BlockIndex, folder: Path, files: list[str]) -> None:
    """Mark the files of a prompt as used, in the order of its blocks, also for the next process."""
    index.mark_used(files)
    threading.Thread(target=_set_file_times, args=(folder, files), daemon=True).start()


def _set_file_times(folder: Path, files: list[str]) -> None:
    """Set the times of files, the first ones last and 1 µs apart, so that the next process knows the order of use."""
    now = time.time_ns()
    for place, file in enumerate(reversed(files)):
        with contextlib.suppress(OSError):
            os.utime(folder / file, ns=(now, now + 1000 * place))
