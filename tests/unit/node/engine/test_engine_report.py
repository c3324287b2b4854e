"""Reports of the text engine, and its answers to orders and new limits while it holds spare memory."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.footprint import MetalMemory, release_free_memory
from node.engine.process.interface import NativeCallKind
from node.models import catalogue
from tests import models
from tests.support.engine.embedders import make_embedder
from tests.support.engine.text_engine import ONE_TOKEN, Driver
from wire.frames import (
    ClearCache,
    EngineReport,
    Finished,
    LoadModel,
    MemoryLimits,
    ModelBan,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
    RestoreModels,
    UnloadModel,
)
from wire.refusals import RefusalCode
from wire.report import MemoryLevel
from wire.units import GIB, MIB

CAP = 6 * GIB
LIMITS = MemoryLimits(CAP, CAP, 64 * MIB, "static")


def report(driver: Driver) -> EngineReport:
    return driver.engine.report(time.monotonic())


def squeeze(driver: Driver, by: int) -> MemoryLimits:
    """Return limits with the same cap, and a ceiling `by` bytes below the memory in use."""
    memory = report(driver).memory
    return MemoryLimits(CAP, max(memory.phys or 0, memory.active) - by, 0, "dynamic")


@pytest.fixture
def reserve_driver() -> Iterator[Driver]:
    """Drive an engine that has answered once, and holds an emergency reserve of 128 MiB."""
    driver = Driver(models.path("llama"), limits=LIMITS, canary="128MiB")
    driver.answer("word " * 100, ONE_TOKEN)
    now = time.monotonic()
    for second in range(0, 30, 2):
        driver.engine.parts.emergency_reserve.maintain(now + second)
    assert driver.engine.parts.emergency_reserve.nbytes == 128 * MIB
    yield driver
    driver.engine.close()


def test_reusable_memory_has_the_reserve_and_the_cached_prefixes(reserve_driver: Driver):
    prefixes, memory = reserve_driver.engine.parts.prefix_cache.memory, report(reserve_driver).memory
    assert memory.reserve == 128 * MIB
    assert memory.reusable == 128 * MIB + prefixes.reusable > 128 * MIB


def test_new_limits_below_the_memory_in_use_release_the_reserve_and_keep_the_prefixes(reserve_driver: Driver):
    parts = reserve_driver.engine.parts
    reserve_driver.take(squeeze(reserve_driver, MIB))
    assert parts.emergency_reserve.nbytes == 0
    assert parts.prefix_cache.entries, "the reserve was enough"
    reserve_driver.take(squeeze(reserve_driver, GIB // 8))
    assert parts.prefix_cache.entries == ()


def test_the_reserve_is_not_missing_after_the_last_model_was_unloaded(reserve_driver: Driver):
    returns = reserve_driver.engine.parts.unloader.leak_check
    reserve_driver.take(UnloadModel(90, reserve_driver.default))
    reserve_driver.until(lambda: returns.next_check_at is None)
    assert reserve_driver.engine.parts.emergency_reserve.nbytes == 128 * MIB
    assert report(reserve_driver).unreturned == 0
    returns.unreturned = 70 * MIB
    assert report(reserve_driver).unreturned == 70 * MIB


def test_requests_for_embeddings_wait_and_are_queued_until_their_first_forward(tmp_path: Path):
    make_embedder(tmp_path / "plain")
    driver = Driver(tmp_path)
    driver.vectors(driver.embed("hello"))
    text = "a longer text about rivers"
    number = driver.embed(text)
    tokens = len(driver.tokenizer().encode(text, plain=True))
    assert (report(driver).waiting, report(driver).queued_tokens) == (1, tokens)
    driver.vectors(number)
    assert (report(driver).waiting, report(driver).queued_tokens) == (0, 0)


def test_the_report_has_the_limit_of_metal_and_the_wired_bytes():
    wired: list[int] = []
    driver = Driver(models.path("llama"), limits=LIMITS, wire="on", metal=lambda: MetalMemory(48 * GIB, wired.append))
    driver.answer("word", ONE_TOKEN)
    assert (report(driver).metal_limit, report(driver).wired) == (48 * GIB, wired[-1])
    assert wired[-1] > 0


def raise_recent_peak(driver: Driver) -> int:
    """Use 64 MiB for a moment, and return the memory in use after that."""
    held = mx.zeros((64 * MIB // 4,))
    mx.eval(held)
    report(driver)
    del held
    release_free_memory()
    memory = report(driver).memory
    now = max(memory.phys or 0, memory.active)
    assert memory.recent > now + 32 * MIB
    return now


def test_a_recent_peak_is_no_reason_to_free_memory_and_ends_with_an_order_to_clear():
    driver = Driver(models.path("llama"), limits=LIMITS)
    driver.answer("word " * 100, ONE_TOKEN)
    now = raise_recent_peak(driver)
    driver.engine.gate.set_limits(MemoryLimits(CAP, now + 16 * MIB, 0, "dynamic"))
    driver.take(ReduceMemory(1, MemoryLevel.OVER_SOFT))
    assert driver.engine.parts.prefix_cache.entries
    driver.take(ClearCache(90, driver.default))
    assert report(driver).memory.recent < now + 32 * MIB


# orders


def test_a_cache_whose_files_are_being_written_is_cleared_later(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(models.path("llama"), limits=LIMITS)

    def busy(*_: str) -> None:
        raise BlockingIOError("a file is being written")

    monkeypatch.setattr(driver.engine.parts.prefix_cache, "clear", busy)
    driver.take(ClearCache(1, driver.default))
    (refusal,) = driver.said[1]
    assert isinstance(refusal, Refusal)
    assert (refusal.refused.code, refusal.refused.retry_after) == (RefusalCode.NOT_READY, 2.0)


def test_a_model_that_was_added_after_the_scan_is_loaded_on_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogue, "SCAN_VALID_SECONDS", 0.0)
    (tmp_path / "old").symlink_to(models.path("llama"))
    driver = Driver(tmp_path, limits=LIMITS)
    (tmp_path / "new").symlink_to(models.path("qwen3"))
    driver.take(LoadModel(1, "new"))
    assert isinstance(driver.end(1), Finished)


def test_an_order_to_load_is_answered_once():
    driver = Driver(models.path("llama"), limits=LIMITS)
    for order in (1, 3):
        driver.take(LoadModel(order, driver.default))
        assert isinstance(driver.end(order), Finished)
        driver.take(UnloadModel(order + 1, driver.default))
    assert [len(driver.said[order]) for order in range(1, 5)] == [1, 1, 1, 1]


def test_a_banned_model_is_not_loaded_again(tmp_path: Path):
    for name in ("good", "bad"):
        shutil.copytree(models.path("llama"), tmp_path / name)
    driver = Driver(tmp_path, limits=LIMITS)
    driver.take(RestoreModels(("bad", "good", "gone"), (ModelBan("bad", 600.0, "it crashed"),)))
    assert [driver.engine.parts.model_manager.is_loading(name) for name in ("bad", "good")] == [False, True]
    driver.until(lambda: not driver.engine.parts.model_manager.busy)
    assert set(driver.engine.parts.models.loaded) == {"good"}
    assert driver.engine.loads == 1


def note_loads(driver: Driver) -> list[int]:
    """Return a list to which the request of each piece of a load is added from now on."""
    seen: list[int] = []
    begin: Callable[..., None] = driver.recorder.begin

    def noted(doing: NativeCallKind, model: str, request: int = 0) -> None:
        if doing is NativeCallKind.LOAD:
            seen.append(request)
        begin(doing, model, request)

    driver.recorder.begin = noted
    return seen


def test_a_crash_in_a_load_is_counted_for_the_first_request_that_waits():
    driver = Driver(models.path("llama"), limits=LIMITS)
    seen = note_loads(driver)
    driver.number = 40
    first, second = driver.ask("one", ONE_TOKEN), driver.ask("two", ONE_TOKEN)
    for number in (first, second):
        assert isinstance(driver.end(number), Finished)
    assert seen
    assert set(seen) == {first}


@pytest.mark.parametrize("awaited", [False, True])
def test_room_for_a_lease_ends_a_load_that_no_request_awaits(awaited: bool):
    driver = Driver(models.path("llama"), limits=LIMITS)
    number = 7
    if awaited:
        number = driver.ask("one", ONE_TOKEN)
    else:
        driver.take(LoadModel(number, driver.default))
    driver.until(lambda: driver.engine.parts.models.load is not None)
    load = driver.engine.parts.models.load
    assert load is not None
    room = report(driver).memory.headroom
    assert room is not None
    driver.take(ReclaimMemory(1, room + load.total // 2))
    assert isinstance(driver.end(number), Finished if awaited else Refusal)
