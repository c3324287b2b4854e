"""Disks that fail under a running engine: each costs prefill time and a line in the log, never a wrong answer."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests import models
from tests.support.engine.disk import answer, open_driver, words, write_all
from tests.support.engine.text_engine import Driver

COUNT = 250
"""Words of a prompt of two blocks."""

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture(scope="module")
def wanted() -> dict[int, list[int]]:
    """Return the tokens of answers without a cache, by the seed of the prompt."""
    driver = Driver(models.path("llama"), prefix_cache_size="off", prefill_step_size=256)
    return {seed: answer(driver, words(COUNT, seed))[1] for seed in (1, 2)}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function that mounts a file system in memory with its options, and returns the folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def store(driver: Driver, seed: int, wanted: dict[int, list[int]]) -> None:
    """Answer a prompt as without a cache, and wait for the writer."""
    end, ids = answer(driver, words(COUNT, seed))
    assert (ids, end.cached_tokens < 64) == (wanted[seed], True)
    write_all(driver)


def repeat(driver: Driver, wanted: dict[int, list[int]], cached: int) -> None:
    """Answer the first prompt again, without the cache in memory: as before, with at least `cached` tokens."""
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    end, ids = answer(driver, words(COUNT, 1))
    assert ids == wanted[1]
    assert end.cached_tokens >= cached if cached else end.cached_tokens < 64


@needs_mount
def test_a_disk_without_room_for_a_file_stores_nothing_more(
    mounted: Callable[[str], Path], wanted: dict[int, list[int]]
):
    driver = open_driver(models.path("llama"), mounted("size=64m,nr_inodes=9") / "cache")
    store(driver, 1, wanted)
    with capture_logs() as logs:
        assert answer(driver, words(COUNT, 2))[1] == wanted[2]
        driver.until(lambda: driver.engine.report(0.0).cache.disk_errors)
    state = driver.engine.report(0.0).cache
    assert (state.disk_errors, state.disk_saves > state.disk_persisted) == (1, True)
    assert any(line["event"] == "not written" and "No space left" in line["error"] for line in logs)
    repeat(driver, wanted, 512)


@needs_mount
def test_an_engine_starts_without_a_disk_cache_if_its_disk_is_read_only(
    mounted: Callable[[str], Path], wanted: dict[int, list[int]]
):
    disk = mounted("size=64m")
    driver = open_driver(models.path("llama"), disk / "cache")
    store(driver, 1, wanted)
    files = sorted(disk.rglob("*.t"))
    driver.engine.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with capture_logs() as logs:
        late = open_driver(models.path("llama"), disk / "cache")
    assert any(line["event"] == "no disk cache" and "Read-only" in line["error"] for line in logs)
    assert answer(late, words(COUNT, 1))[1] == wanted[1]
    assert sorted(disk.rglob("*.t")) == files


def test_a_folder_that_vanishes_costs_prefills_only(tmp_path: Path, wanted: dict[int, list[int]]):
    folder = tmp_path / "cache"
    driver = open_driver(models.path("llama"), folder)
    store(driver, 1, wanted)
    shutil.rmtree(folder)
    with capture_logs() as logs:
        store(driver, 2, wanted)
        repeat(driver, wanted, 0)
    assert {"disk not readable", "not restored"} <= {line["event"] for line in logs}
    assert driver.engine.report(0.0).cache.disk_hits == 0


def test_a_file_that_does_not_come_costs_its_prefill_only(
    tmp_path: Path, wanted: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.engine.kv.disk.block_reader.STALLED_SECONDS", 0.2)
    folder = tmp_path / "cache"
    driver = open_driver(models.path("llama"), folder)
    store(driver, 1, wanted)
    for file in folder.rglob("*.t"):
        file.unlink()
        os.mkfifo(file)
    files = list(folder.rglob("*.t"))
    held = [os.open(file, os.O_RDWR) for file in files]
    repeat(driver, wanted, 0)
    state = driver.engine.report(0.0).cache
    assert (state.disk_hits, state.disk_errors >= 1) == (0, True)
    for descriptor in held:
        os.close(descriptor)


def test_without_a_quota_nothing_is_written(tmp_path: Path, wanted: dict[int, list[int]]):
    driver = open_driver(models.path("llama"), tmp_path / "cache", size="0")
    store(driver, 1, wanted)
    state = driver.engine.report(0.0).cache
    assert (state.disk_files, state.disk_persisted, state.disk_drops > 0) == (0, 0, True)
    repeat(driver, wanted, 0)
