"""Files of the disk cache: mutated files are read by the reader of the engine, and compared with the original.

A file is damaged, or its header is changed and gets new checksums, as by a program that can write to the folder. A
damaged file is never restored. A changed header is restored only with arrays that suit the model. Neither raises.
"""

import itertools
import logging
import struct
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import structlog
from mlx_lm.models.cache import KVCache

from node.engine.kv.disk.block_chain import BlockName
from node.engine.kv.disk.block_file import DIGEST_BYTES, MAGIC, BlockArray, BlockPart, encode_block
from node.engine.kv.disk.block_reader import DiskRestore, PlannedPart, ReadPlan
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS

COUNT = 10_000
"""Files of a complete run."""
SHAPE = (1, 1, BLOCK_TOKENS, 2)
NAMES = tuple(BlockName("m", BlockPart.TOKENS, bytes([number]) * 16) for number in range(2))
TIMEOUT_SECONDS = 10.0
VALUES: tuple[Any, ...] = (0, -1, 1, 2**31, 2**62, 2**64 - 1, "", "float64", "object", "bfloat16", None, [], b"x" * 16)


def _write(number: int) -> bytes:
    """Return the file of a block with random keys and values."""
    arrays = np.random.default_rng(number).random((2, *SHAPE), np.float32)
    parts = [BlockArray("float32", array) for array in arrays]
    return b"".join(map(bytes, encode_block(NAMES[number].chain, BlockPart.TOKENS, BLOCK_TOKENS, parts)))


FILES = tuple(map(_write, range(2)))


def _flip(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 8, 64))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content))]


def _insert(random: Random, content: bytes) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + random.randbytes(random.choice((1, 4, 4096))) + content[at:]


def _splice(random: Random, content: bytes) -> bytes:
    """Return the start of a file with the end of the file of another block."""
    at = random.randrange(len(content))
    return content[:at] + FILES[1][at:]


def _swap(random: Random, content: bytes) -> bytes:
    del random, content
    return FILES[1]


def _seal(random: Random, content: bytes) -> bytes:
    """Change a value of the header, and compute its checksum again."""
    start = len(MAGIC) + 4
    (size,) = struct.unpack("<I", content[len(MAGIC) : start])
    header = msgspec.msgpack.decode(content[start : start + size])
    if random.random() < 0.5:
        header[random.choice(list(header))] = random.choice(VALUES)
    else:
        kind, shape = random.choice(header["arrays"])
        shape = [*shape, 1] if random.random() < 0.2 else [*shape]
        shape[random.randrange(len(shape))] = random.choice(VALUES)
        header["arrays"] = [[random.choice((kind, *VALUES)), shape], *header["arrays"][1:]]
    encoded = msgspec.msgpack.encode(header)
    digest = sha256(encoded).digest()[:DIGEST_BYTES]
    return content[: len(MAGIC)] + struct.pack("<I", len(encoded)) + encoded + digest + content[start + size + 16 :]


MUTATIONS: tuple[Callable[[Random, bytes], bytes], ...] = (_flip, _cut, _insert, _splice, _swap, _seal, _seal)


def _restore(folder: Path, content: bytes) -> tuple[DiskRestore, Any]:
    """Read a file as the only part of a prompt into an empty cache; return the ended restoration and that cache."""
    (folder / NAMES[0].file).write_bytes(content)
    cache: Any = KVCache()
    plan = ReadPlan(BLOCK_TOKENS, (PlannedPart(NAMES[0], 0),), len(content))
    restore = DiskRestore(folder, plan, Layers([cache]))
    if not restore.step(TIMEOUT_SECONDS):
        raise TimeoutError("the reader did not end")
    return restore, cache


def run(seed: int, count: int) -> list[str]:
    """Return a sentence for each mutated file that raised an error, or was restored with damaged content or shapes."""
    random, wrong = Random(seed), list[str]()
    written = mx.array(np.random.default_rng(0).random((2, *SHAPE), np.float32))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        with tempfile.TemporaryDirectory(prefix="mp-cache-") as place:
            (Path(place) / "m").mkdir()
            for number, mutate in zip(range(count), itertools.cycle(MUTATIONS), strict=False):
                content = mutate(random, FILES[0])
                try:
                    restore, cache = _restore(Path(place), content)
                except Exception as error:
                    wrong.append(f"{mutate.__name__} {number}: {type(error).__name__}: {error}")
                    continue
                if restore.layers is None:
                    continue
                same = bool(mx.all(cache.state[0] == written[0])) and bool(mx.all(cache.state[1] == written[1]))
                if not same and mutate is not _seal:
                    wrong.append(f"{mutate.__name__} {number}: a damaged file was restored")
                elif cache.state[0].shape != SHAPE or cache.state[1].shape != SHAPE:
                    wrong.append(f"{mutate.__name__} {number}: arrays of {cache.state[0].shape} were restored")
    finally:
        structlog.reset_defaults()
    return wrong
