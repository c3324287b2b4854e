"""Engines with a disk cache: answer a prompt, write all that waits, or fill a folder from a process that is killed.

`python -m tests.support.engine.disk MODEL FOLDER WORDS` answers a prompt in an engine with a disk cache, writes its
files, prints its tokens and waits to be killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from node.engine.kv.disk.disk_cache import DiskCache
from tests.support.engine.text_engine import Driver
from wire.frames import Finished, GenerationParams

BRIEF = GenerationParams(temperature=0.0, max_tokens=24)
SECONDS = 60.0


def words(count: int, seed: int = 1) -> str:
    """Return random words that the tokenizer of the tests knows."""
    random = Random(seed)
    return " ".join(random.choice(["cat", "word", "sun", "Mac", "seven"]) for _ in range(count))


def open_driver(model: Path, folder: Path, *, size: str = "auto", min_seconds: float = 0.0) -> Driver:
    """Return an engine with a disk cache, which writes everything by default."""
    return Driver(
        model,
        disk_folder=folder,
        disk_cache_size=size,
        disk_cache_min_seconds=min_seconds,
        prefill_step_size=256,
        max_batch_size=8,
    )


def get_disk(driver: Driver) -> DiskCache:
    """Return the disk cache of an engine."""
    disk = driver.engine.parts.prefix_cache.disk.cache
    assert disk is not None
    return disk


def write_all(driver: Driver) -> None:
    """Step an idle engine until all files are written."""
    disk, until = get_disk(driver), time.monotonic() + SECONDS
    while disk.queue.get_next_write() is not None or disk.queued_bytes:
        assert time.monotonic() < until
        driver.turn()


def answer(driver: Driver, prompt: str) -> tuple[Finished, list[int]]:
    """Answer a prompt; return its end and its tokens."""
    number = driver.ask(prompt, BRIEF)
    end = driver.end(number)
    assert isinstance(end, Finished), end
    return end, driver.ids[number, 0]


def fill_and_kill(model: Path, folder: Path, count: int) -> list[int]:
    """Answer a prompt of this many words in another process, kill it at rest, and return the tokens of the answer."""
    command = [sys.executable, "-m", __name__, str(model), str(folder), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("["))
        process.send_signal(signal.SIGKILL)
    return json.loads(line)


def _main() -> None:
    model, folder, count = sys.argv[1:]
    driver = open_driver(Path(model), Path(folder))
    _, ids = answer(driver, words(int(count)))
    write_all(driver)
    sys.stdout.write(f"{json.dumps(ids)}\n")
    sys.stdout.flush()
    while os.getppid() != 1:
        time.sleep(1)


if __name__ == "__main__":
    _main()
