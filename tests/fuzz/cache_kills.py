"""Kill -9 of processes that save to the disk cache: the next process restores no damaged file and no other tokens.

`python -m tests.fuzz.cache_kills FOLDER SEED` saves prompts to the disk cache of a folder until it is killed. The
values of a prompt's cache are its tokens, so that the reader can compare them.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.disk.write_queue import CacheShape
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_store import BLOCK_TOKENS, CachedPrefix
from node.engine.kv.radix_trie import pack

COUNT = 100
"""Kills of a complete run."""
PROMPTS = 8
"""Prompts that a process saves again and again."""
SHAPE = CacheShape("m", frozenset({BlockPart.TOKENS}), 0)
MAX_SECONDS = 0.2
"""Maximum time of a kill after the first file, in seconds."""
TIMEOUT_SECONDS = 60.0


def _build_ids(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2**20) for _ in range(4 * BLOCK_TOKENS)]


def _build_cache(ids: list[int]) -> Layers:
    values = mx.broadcast_to(mx.array(ids, mx.float32).reshape(1, 1, -1, 1), (1, 1, len(ids), 64))
    layers: list[Any] = [KVCache(), KVCache()]
    for layer in layers:
        layer.update_and_fetch(values, -values)
    return Layers(layers)


def _save_forever(folder: Path, seed: int) -> None:
    """Save prompts, and delete them as a person does, until the process is killed."""
    disk = DiskCache(folder, "auto", 0.0)
    for number in itertools.count():
        ids = _build_ids(seed + number % PROMPTS)
        disk.offer(CachedPrefix("m", pack(ids), _build_cache(ids), 1), SHAPE, 1.0)
        while disk.queue.get_next_write() is not None or disk.queued_bytes:
            disk.write_next(time.monotonic(), busy=False, room=1)
        if not number:
            sys.stdout.write("saving\n")
            sys.stdout.flush()
        if number % PROMPTS == PROMPTS - 1:
            disk.clear("")


def _check(folder: Path, seed: int) -> list[str]:
    """Restore all prompts of a killed process; return a sentence for each wrong one."""
    wrong, disk = list[str](), DiskCache(folder, "auto", 0.0)
    for number in range(PROMPTS):
        ids = _build_ids(seed + number)
        plan = disk.find(SHAPE, "", pack([*ids, 0]))
        if plan is None:
            continue
        layers: list[Any] = [KVCache(), KVCache()]
        restore = disk.begin_restore(plan, Layers(layers))
        while not restore.step(TIMEOUT_SECONDS):
            pass
        if restore.layers is None:
            wrong.append(f"seed {seed}: {restore.invalid} is indexed and damaged")
            continue
        expected = mx.array(ids[: plan.length], mx.float32)
        for layer in layers:
            keys, values, *_ = layer.state
            if not bool(mx.all(keys[0, 0, :, 0] == expected)) or not bool(mx.all(values[0, 0, :, 1] == -expected)):
                wrong.append(f"seed {seed}: prompt {number} has other tokens")
    if left := list(folder.rglob("*.new")):
        wrong.append(f"seed {seed}: {left} is left")
    if disk.writer is None:
        wrong.append(f"seed {seed}: the lock of the killed process is left")
    disk.close()
    return wrong


def run(seed: int, count: int) -> list[str]:
    """Return a sentence for each wrong result after `count` kills, in one folder."""
    random, wrong = Random(seed), list[str]()
    with tempfile.TemporaryDirectory(prefix="mp-kills-") as place:
        folder = Path(place) / "cache"
        for _ in range(count):
            first = random.randrange(2**32)
            command = [sys.executable, "-m", __name__, str(folder), str(first)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                if not any(line == "saving\n" for line in process.stdout):
                    wrong.append(f"seed {first}: the process ended with {process.wait()}")
                time.sleep(random.random() * MAX_SECONDS)
                process.kill()
            wrong += _check(folder, first)
    return wrong


if __name__ == "__main__":
    _save_forever(Path(sys.argv[1]), int(sys.argv[2]))
