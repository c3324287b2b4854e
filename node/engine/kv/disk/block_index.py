"""Index of the files of the disk cache, least recently used first. Any thread may use it.

The index is built from the names at start and holds no content. A prompt is looked up by its chain: one dictionary
access for each block of 256 tokens.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from node.engine.kv.disk.block_chain import BlockName, name_state, parse_name
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.kv.radix_trie import ID_BYTES

MAX_EVICTIONS_PER_SAVE = 32
"""Maximum files that are deleted for one new file, because each deletion delays the writer."""
TEMPORARY = ".new"
"""Suffix of a file that is being written."""


class BlockIndex:
    """Files of the disk cache with their sizes (see the module's docstring)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._states: dict[bytes, dict[int, set[str]]] = {}
        """Files of states by the block before them and their number of tokens."""
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: BlockName) -> bool:
        return name.file in self._sizes

    def add(self, name: BlockName, size: int) -> None:
        """Add a file, or replace its size. It is the most recently used from now on."""
        with self._lock:
            self._nbytes += size - self._sizes.pop(name.file, 0)
            self._sizes[name.file] = size
            if name.part is BlockPart.STATE:
                self._states.setdefault(name.parent, {}).setdefault(name.tokens, set()).add(name.file)

    def remove(self, file: str) -> bool:
        """Remove a file by its name; return whether it was there."""
        with self._lock:
            size = self._sizes.pop(file, None)
            self._nbytes -= size or 0
            name = parse_name(file)
            if name is not None and name.part is BlockPart.STATE:
                places = self._states.get(name.parent, {})
                places.get(name.tokens, set()).discard(file)
                if not places.get(name.tokens):
                    places.pop(name.tokens, None)
                if not places:
                    self._states.pop(name.parent, None)
        return size is not None

    def mark_used(self, files: Sequence[str]) -> None:
        """Mark files as used, the first ones last, because the other blocks are of no use without the first."""
        with self._lock:
            for file in reversed(files):
                if file in self._sizes:
                    self._sizes.move_to_end(file)

    def choose_evictions(self, size: int, quota: int) -> list[str]:
        """Return the least recently used files without which `size` more bytes are within the quota, at most
        `MAX_EVICTIONS_PER_SAVE`."""
        with self._lock:
            over, chosen = self._nbytes + size - quota, list[str]()
            for file, nbytes in self._sizes.items():
                if over <= 0 or len(chosen) == MAX_EVICTIONS_PER_SAVE:
                    break
                chosen.append(file)
                over -= nbytes
        return chosen

    def count_blocks(self, chain: Sequence[bytes]) -> int:
        """Return the number of whole blocks from the first on whose tokens are stored."""
        for place, link in enumerate(chain[1:]):
            if f"{link.hex()}.t" not in self._sizes:
                return place
        return len(chain) - 1

    def find_state(self, chain: Sequence[bytes], key: bytes, most: int) -> tuple[int, BlockName] | None:
        """Return the longest stored state of a prompt with at most `most` tokens, with its length in tokens. `key` has
        the packed ids, `chain` its hashes whose blocks are stored."""
        with self._lock:
            for place in range(len(chain) - 1, -1, -1):
                for tokens in sorted(self._states.get(chain[place], ()), reverse=True):
                    length = place * BLOCK_TOKENS + tokens
                    if length <= most and length * ID_BYTES <= len(key):
                        name = name_state(chain[place], key[place * BLOCK_TOKENS * ID_BYTES : length * ID_BYTES])
                        if name.file in self._sizes:
                            return length, name
        return None

    def get_size(self, name: BlockName) -> int:
        """Return the bytes of a file; 0 if it is not stored."""
        return self._sizes.get(name.file, 0)

    def scan(self, folder: Path, *, clean: bool) -> None:
        """Add the files of a folder, oldest first, by names and sizes alone. With `clean`, delete files that were not
        completed."""
        found = list[tuple[float, BlockName, int]]()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(TEMPORARY):
                    if clean:
                        os.unlink(entry.path)
                elif (name := parse_name(entry.name)) is not None:
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, name, stat.st_size))
        for _, name, size in sorted(found, key=lambda one: one[0]):
            self.add(name, size)
