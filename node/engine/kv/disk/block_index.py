"""Index of the files of the disk cache, least recently used first. Its methods may be called from any thread.

The index is built from the names, sizes and times of the files, and contains none of their content. A prompt is looked
up by its chain of hashes (`block_chain`).
"""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from node.engine.kv.disk.block_chain import WHOLE_BLOCK, BlockName, name_state, parse_name
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.kv.radix_trie import ID_BYTES

MAX_EVICTIONS_PER_SAVE = 32
"""Maximum files that are deleted for one new file, because each deletion delays the writer."""
MAX_REMOVED = 4096
"""Maximum number of names of removed files that are kept. The oldest name is discarded first."""
TEMPORARY = ".new"
"""Suffix of a file that is being written."""


class FolderSize(NamedTuple):
    """Number and total size of the files of a model."""

    files: int = 0
    """Number of files."""
    nbytes: int = 0
    """Bytes of these files."""


_STATE_SUFFIX = f".{BlockPart.STATE}"
ScannedFile = tuple[float, str, int]
"""Time of the last use in Unix seconds, name with the folder of the model, and bytes of a file."""


class BlockIndex:
    """Index of the files of the disk cache, with their sizes (see the module's docstring)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._states: dict[bytes, dict[int, set[str]]] = {}
        """Files of states, by the hash of the last whole block before the state and the number of tokens after it."""
        self._nbytes = 0
        self.removed: deque[str] = deque(maxlen=MAX_REMOVED)
        """Names of the most recently removed files. `DiskCache.take_lost` takes them from here."""
        self._models: dict[str, list[int]] = {}
        """Files and bytes of each model, by its fingerprint."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: BlockName) -> bool:
        return name.file in self._sizes

    def has_files(self, files: Iterable[str]) -> bool:
        """Return whether all files with these names are in the index."""
        return all(file in self._sizes for file in files)

    def add(self, name: BlockName, size: int) -> None:
        """Add a file of `size` bytes, or replace its size. The file becomes the most recently used file."""
        with self._lock:
            before = self._sizes.pop(name.file, None)
            self._sizes[name.file] = size
            self._count(name.model, int(before is None), size - (before or 0))
            if name.part is BlockPart.STATE:
                self._put_state(name)

    def _put_state(self, name: BlockName) -> None:
        self._states.setdefault(name.parent, {}).setdefault(name.tokens, set()).add(name.file)

    def remove(self, file: str) -> bool:
        """Remove a file from the index by its name, and add the name to `removed`. Return False, and change nothing, if
        the index does not have the file. The file itself is not deleted."""
        with self._lock:
            size, name = self._sizes.pop(file, None), parse_name(file)
            if size is not None and name is not None:
                self._count(name.model, -1, -size)
                self.removed.append(file)
            if name is not None and name.part is BlockPart.STATE:
                places = self._states.get(name.parent, {})
                places.get(name.tokens, set()).discard(file)
                if not places.get(name.tokens):
                    places.pop(name.tokens, None)
                if not places:
                    self._states.pop(name.parent, None)
        return size is not None

    def _count(self, model: str, files: int, nbytes: int) -> None:
        size = self._models.setdefault(model, [0, 0])
        size[0] += files
        size[1] += nbytes
        self._nbytes += nbytes

    def list_models(self) -> dict[str, FolderSize]:
        """Return the number and total bytes of the files of each model that has files, by the model's fingerprint."""
        with self._lock:
            return {model: FolderSize(*size) for model, size in self._models.items() if size[0]}

    def list_files(self, model: str) -> list[str]:
        """Return the names of all files of a model, by its fingerprint."""
        with self._lock:
            return [file for file in self._sizes if file.startswith(f"{model}/")]

    def mark_used(self, files: Sequence[str]) -> None:
        """Mark files as used. The first file becomes the most recently used, because the other files are useless
        without it."""
        with self._lock:
            for file in reversed(files):
                if file in self._sizes:
                    self._sizes.move_to_end(file)

    def choose_evictions(self, size: int, quota: int) -> list[str]:
        """Return the names of the least recently used files without which `size` more bytes are within `quota` bytes.
        Return at most `MAX_EVICTIONS_PER_SAVE` names, even if more would be necessary."""
        with self._lock:
            over, chosen = self._nbytes + size - quota, list[str]()
            for file, nbytes in self._sizes.items():
                if over <= 0 or len(chosen) == MAX_EVICTIONS_PER_SAVE:
                    break
                chosen.append(file)
                over -= nbytes
        return chosen

    def count_blocks(self, model: str, chain: Sequence[bytes]) -> int:
        """Return the number of leading whole blocks of a prompt that are stored, up to the first gap. `model` is the
        fingerprint, `chain` the hashes of the prompt, root first."""
        for place, link in enumerate(chain[1:]):
            if f"{model}/{link.hex()}.t" not in self._sizes:
                return place
        return len(chain) - 1

    def find_state(self, model: str, chain: Sequence[bytes], key: bytes, most: int) -> tuple[int, BlockName] | None:
        """Return the length in tokens and the name of the longest stored state of a prompt, at most `most` tokens long.
        Return None if there is none.

        `key` has the packed ids of the prompt. `chain` has the hashes of its leading stored blocks, root first. `model`
        is the fingerprint.
        """
        with self._lock:
            for place in range(len(chain) - 1, -1, -1):
                for tokens in sorted(self._states.get(chain[place], ()), reverse=True):
                    length = place * BLOCK_TOKENS + tokens
                    if length <= most and length * ID_BYTES <= len(key):
                        tail = key[place * BLOCK_TOKENS * ID_BYTES : length * ID_BYTES]
                        name = name_state(model, chain[place], tail)
                        if name.file in self._sizes:
                            return length, name
        return None

    def get_size(self, name: BlockName) -> int:
        """Return the bytes of a file; 0 if it is not stored."""
        return self._sizes.get(name.file, 0)

    def scan(self, folder: Path, *, clean: bool) -> None:
        """Rebuild the index from the files in the folders of all models below `folder`, without reading the files.

        The times of the files decide which are the least recently used. With `clean`, delete files that were not
        completed. Files and folders that another process deletes during the scan are left out. Raise `OSError` if a
        folder cannot be read or a file cannot be deleted.
        """
        found, models = list[ScannedFile](), list[str]()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    models.append(entry.name)
                elif clean and entry.name.endswith(TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
        with self._lock:
            self._sizes.clear()
            self._states.clear()
            self._models.clear()
            self._nbytes = 0
            for model in models:
                files = list(_scan_model(folder, model, clean=clean))
                self._count(model, len(files), sum(size for _, _, size in files))
                found += files
            found.sort()
            self._sizes.update((file, size) for _, file, size in found)
            for _, file, _ in found:
                if file.endswith(_STATE_SUFFIX) and (name := parse_name(file)) is not None:
                    self._put_state(name)


def _scan_model(folder: Path, model: str, *, clean: bool) -> Iterator[ScannedFile]:
    """Yield the files of a model; with `clean`, delete those that were not completed.

    Entries are read relative to their folder, which is faster than by their paths. Another process may delete the
    folder, or evict its files, meanwhile.
    """
    is_whole_block = WHOLE_BLOCK.fullmatch
    try:
        place = os.open(folder / model, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                last = entry.name
                file = f"{model}/{last}"
                if is_whole_block(last) or parse_name(file) is not None:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield stat.st_mtime, file, stat.st_size
                elif clean and last.endswith(TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(last, dir_fd=place)
    finally:
        os.close(place)
