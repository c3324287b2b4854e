"""Snapshots within long prompts of models whose caches cannot be cut."""

from pathlib import Path

import pytest

from node.engine.scheduling.rules.snapshots import (
    LONG_SNAPSHOT_SECONDS,
    LONG_SNAPSHOT_TOKENS,
    MAX_LONG_SNAPSHOTS,
    is_long_snapshot_due,
)
from tests import models
from tests.support.engine.disk import BRIEF, answer, words, write_all
from tests.support.engine.text_engine import Driver

CHUNK = 128
COUNT = 450
"""Words of a prompt of about nine chunks."""


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a snapshot after each chunk."""
    monkeypatch.setattr("node.engine.scheduling.rules.snapshots.LONG_SNAPSHOT_TOKENS", CHUNK)
    monkeypatch.setattr("node.engine.scheduling.rules.snapshots.LONG_SNAPSHOT_SECONDS", 0.0)


@pytest.fixture
def model() -> Path:
    return models.path("qwen3_next")


def open_engine(model: Path, **changes: object) -> Driver:
    return Driver(model, **{"prefill_step_size": CHUNK, "min_prefill_step": CHUNK, **changes})  # type: ignore[arg-type]


def list_lengths(driver: Driver) -> list[int]:
    return [entry.length for entry in driver.engine.parts.prefix_cache.entries]


def test_a_long_prompt_leaves_its_newest_snapshots_and_another_starts_at_one(model: Path):
    driver, fresh = open_engine(model), open_engine(model, prefix_cache_size="off")
    end, _ = answer(driver, words(COUNT))
    lengths = list_lengths(driver)
    assert lengths == sorted(lengths)
    assert len(lengths) == MAX_LONG_SNAPSHOTS + 2, "those, the end of the turn, and the whole row"
    assert lengths[-2] - lengths[0] <= (MAX_LONG_SNAPSHOTS + 1) * CHUNK, "the newest ones"
    prompt = " ".join(words(COUNT).split()[:-100]) + " Hello!" * 40
    again, ids = answer(driver, prompt)
    assert again.cached_tokens in lengths[:MAX_LONG_SNAPSHOTS]
    assert again.cached_tokens > end.prompt_tokens // 2
    assert ids == answer(fresh, prompt)[1]


def test_snapshots_of_a_long_prompt_keep_their_distance(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.scheduling.rules.snapshots.LONG_SNAPSHOT_TOKENS", 3 * CHUNK)
    driver = open_engine(model)
    answer(driver, words(COUNT))
    assert list_lengths(driver)[:2] == [3 * CHUNK, 6 * CHUNK]


def test_a_cancelled_prompt_leaves_no_snapshot(model: Path):
    driver = open_engine(model)
    number = driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: len(list_lengths(driver)) == MAX_LONG_SNAPSHOTS)
    driver.cancel(number)
    assert list_lengths(driver) == []
    assert driver.engine.report(0.0).cache.nbytes == 0


def test_a_cancelled_request_leaves_the_snapshots_of_another_prompt(model: Path):
    driver = open_engine(model)
    driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: list_lengths(driver))
    before = list_lengths(driver)
    driver.cancel(driver.ask("Hello!", BRIEF))
    assert list_lengths(driver) == before


def test_a_failed_prompt_leaves_no_snapshot_and_no_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver = open_engine(model, disk_cache_size="1GiB", disk_cache_min_seconds=0.0, disk_folder=tmp_path / "cache")
    number = driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: driver.engine.report(0.0).cache.disk_persisted)
    monkeypatch.setattr("node.engine.scheduling.prefill_runner.run_forward", lambda *_, **__: 1 / 0)
    driver.end(number)
    write_all(driver)
    assert list_lengths(driver) == []
    assert driver.engine.report(0.0).cache.disk_files == 0


def test_a_snapshot_evicts_nothing(model: Path):
    driver = open_engine(model, prefix_cache_size="1KiB")
    answer(driver, words(COUNT))
    assert list_lengths(driver) == []


def test_a_snapshot_is_due_after_both_tokens_and_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    tokens, seconds = LONG_SNAPSHOT_TOKENS, LONG_SNAPSHOT_SECONDS
    due = [is_long_snapshot_due(*case) for case in ((tokens, seconds), (tokens - 1, 9.0), (tokens, seconds - 0.1))]
    assert due == [True, False, False]
