"""Prompts of decoding rows are written to the disk although memory has no room to store them."""

import json
import time
from pathlib import Path

from node.engine.kv.prefix_store import BLOCK_TOKENS
from tests import models
from tests.support.engine.disk import answer, get_disk, open_driver, words
from tests.support.engine.text_engine import Driver
from wire.capacity.fairness import WeightedKey
from wire.frames import GenerationParams
from wire.report import CacheState

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
FEW, MANY = 200, 300
"""Words of two prompts of two and three whole blocks."""
LONG = GenerationParams(temperature=0.0, max_tokens=1500, logit_bias=((EOS, -100.0),))
"""More tokens than a row decodes until its prompt is on the disk, even on a busy machine."""
NO_ROOM = "1B"
"""Size of a prefix cache in memory that stores nothing."""


def open_small(folder: Path) -> Driver:
    """Return an engine with a disk cache, and without room for entries in memory."""
    return Driver(
        models.path("llama"),
        disk_folder=folder,
        disk_cache_size="auto",
        disk_cache_min_seconds=0.0,
        prefix_cache_size=NO_ROOM,
        prefill_step_size=256,
        max_batch_size=8,
    )


def wait_for_files(driver: Driver, count: int) -> CacheState:
    """Decode until the disk has `count` files, and return the state of the cache."""
    disk, until = get_disk(driver), time.monotonic() + 60
    while disk.files < count:
        assert time.monotonic() < until
        driver.turn()
    return driver.engine.report(0.0).cache


def test_prompts_of_rows_of_different_lengths_are_written_and_restored(tmp_path: Path):
    driver = open_small(tmp_path)
    prompts = [words(FEW), words(MANY, 2)]
    wanted = [answer(open_driver(models.path("llama"), tmp_path / "other"), prompt)[1] for prompt in prompts]
    numbers = [driver.ask(prompt, LONG) for prompt in prompts]
    state = wait_for_files(driver, 5)
    assert all(driver.ids[number, 0] for number in numbers), "both rows decode"
    assert (state.entries, state.stores) == (0, 0)
    for number in numbers:
        driver.cancel(number)
    for prompt, ids in zip(prompts, wanted, strict=True):
        end, found = answer(driver, prompt)
        assert found == ids
        assert end.cached_tokens == end.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_row_that_memory_could_not_store_returns_from_the_disk(tmp_path: Path):
    driver = open_small(tmp_path)
    number = driver.ask(words(MANY), LONG, weighted_key=WeightedKey("ada"))
    wait_for_files(driver, 3)
    scheduler = driver.engine.parts.scheduler
    scheduler.preemptor.preempt(scheduler.live[number])
    known = len(driver.ids[number, 0])
    driver.until(lambda: len(driver.ids[number, 0]) > known)
    driver.cancel(number)
    counts = driver.engine.report(0.0).counts
    assert counts.recomputed_tokens == counts.returned_tokens - 3 * BLOCK_TOKENS


def test_a_row_that_ends_before_its_prompt_is_written_is_forgotten(tmp_path: Path):
    driver = open_small(tmp_path)
    number = driver.ask(words(1000), LONG)
    driver.until(lambda: driver.ids[number, 0])
    driver.cancel(number)
    while get_disk(driver).queue.get_next_write() is not None or get_disk(driver).queued_bytes:
        driver.turn()
    state = driver.engine.report(0.0).cache
    assert (state.disk_drops, state.disk_files < 10) == (1, True)
