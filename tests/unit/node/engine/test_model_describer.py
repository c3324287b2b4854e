"""Reports of models, and limits that follow from the cap, compared with the parts of the engine."""

import dataclasses
import time
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

from node.engine.memory.footprint import FREE_BUFFER_SHARE
from node.engine.model_report import compute_longest_row
from node.engine.models.load_times import ASSUMED_WARMUP_SECONDS
from node.engine.models.profile import MemoryProfile, build_key
from node.engine.models.profiler import PROBE_SECONDS
from tests import models
from tests.support.cluster.engine_pool import link
from tests.support.engine.text_engine import ONE_TOKEN, Driver
from wire.capacity.batches import compute_waste_bytes
from wire.frames import ClearCache, Finished, MemoryLimits
from wire.report import BatchGroup, Hardware, Model
from wire.units import GIB, MIB

CAP = 6 * GIB
LIMITS = MemoryLimits(CAP, 3 * GIB, 64 * MIB, "static")
"""A ceiling far below the cap."""


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), max_batch_size=5, prefill_step_size=64, limits=LIMITS)
    driver.answer("word " * 100, ONE_TOKEN)
    return driver


def describe(driver: Driver, name: str = "") -> Model:
    found = driver.engine.report(time.monotonic()).models
    return next(model for model in found if model.name == (name or driver.default))


def test_a_loaded_model_is_described_by_its_files_and_its_measurements(driver: Driver):
    loaded = driver.resident()
    stats, estimator = loaded.stats, loaded.estimator
    pinned = dataclasses.replace(loaded.descriptor, stored=111, content="hash", written=7.0, removable=True)
    driver.engine.parts.catalogue.pin(pinned)
    stats.record_load(3.5)
    found = describe(driver)
    assert (found.stored, found.weights, found.content) == (111, loaded.weights, "hash")
    assert (found.written, found.removable, found.pinned) == (7.0, True, False)
    assert (found.load_seconds, found.profiled, found.covered, found.residual) == (3.5, False, 0, 0)
    assert (found.kv_waste, found.kv_per_token) == (compute_waste_bytes(CAP), loaded.kv.per_token)
    assert (found.max_batch, found.observed) == (5, estimator.highest)
    assert found.observed > 0
    assert found.bytes_per_token == pytest.approx(stats.bytes_per_token)
    assert found.used == pytest.approx(time.time(), abs=60.0)


def test_a_profile_shortens_the_longest_row_and_is_reported(driver: Driver):
    loaded, before = driver.resident(), describe(driver)
    key = build_key(loaded.descriptor.fingerprint, Hardware("test", 16 * GIB))
    profile = MemoryProfile(
        key,
        loaded.estimator.transient,
        loaded.kv,
        residual=1000,
        highest=0,
        chunk=48,
        reach=100,
        rows=2,
        seconds=1.0,
        share=0.5,
    )
    loaded.stats.record_profile(profile)
    found = describe(driver)
    assert (found.profiled, found.covered, found.residual) == (True, 48, 1000)
    assert 0 < found.max_context == int(0.5 * before.max_context)
    loaded.estimator.residual = 2000
    assert describe(driver).residual == 2000, "a later forward exceeded its estimate by more"


def test_the_longest_row_is_that_of_a_model_without_rows(driver: Driver):
    loaded, memory = driver.resident(), driver.engine.report(time.monotonic()).memory
    model = describe(driver)
    crowded = replace(model, groups=(BatchGroup(4, 1000, 4000),), loaded=False)
    assert compute_longest_row(crowded, loaded, memory, 64) == compute_longest_row(model, loaded, memory, 64) > 0


def test_a_model_that_is_not_loaded_has_the_waste_and_the_seconds_of_its_load(tmp_path: Path):
    folder = link(tmp_path, llama=models.path("llama"), qwen3=models.path("qwen3"))
    for profile, probe in (("off", 0.0), ("auto", PROBE_SECONDS)):
        driver = Driver(folder, limits=LIMITS, profile=profile, preload=("qwen3",), profiles=tmp_path / profile)
        found = describe(driver, "llama")
        assert (found.loaded, found.loading, found.progress, found.pinned) == (False, False, 0.0, False)
        assert found.kv_waste == compute_waste_bytes(CAP)
        assert found.load_seconds == pytest.approx(ASSUMED_WARMUP_SECONDS + probe, abs=0.5)
        assert describe(driver, "qwen3").pinned


def test_a_new_cap_limits_free_buffers_and_padding_and_a_new_ceiling_does_not(driver: Driver):
    limit = mx.set_cache_limit(0)
    try:
        assert limit == int(CAP * FREE_BUFFER_SHARE)
        driver.take(MemoryLimits(CAP, 2 * GIB, 64 * MIB, "static"))
        assert mx.set_cache_limit(0) == 0
        driver.take(MemoryLimits(4 * GIB, 2 * GIB, 64 * MIB, "static"))
        assert mx.set_cache_limit(0) == int(4 * GIB * FREE_BUFFER_SHARE)
        assert driver.resident().ledger.kv.waste == compute_waste_bytes(4 * GIB)
        driver.take(MemoryLimits(100 * GIB, 2 * GIB, 64 * MIB, "static"))
        assert mx.set_cache_limit(0) == 256 * MIB
    finally:
        mx.set_cache_limit(limit)


def test_the_reserve_has_the_size_of_the_cap():
    driver = Driver(models.path("llama"), limits=LIMITS, canary="auto")
    reserve, now = driver.engine.parts.emergency_reserve, time.monotonic()
    for second in range(0, 30, 2):
        reserve.maintain(now + second)
    assert reserve.nbytes == int(CAP * 0.01)
    driver.take(MemoryLimits(2 * GIB, 2 * GIB, 64 * MIB, "static"))
    assert reserve.nbytes == 0, "it is larger than the new cap allows"


def test_the_cache_of_a_model_without_files_is_cleared_by_its_name_and_no_other_is(driver: Driver):
    entries = driver.engine.parts.prefix_cache.entries
    assert entries
    driver.take(ClearCache(100, "gone"))
    assert driver.said[100] == [Finished(100, (), 0, 0)]
    assert driver.engine.parts.prefix_cache.entries == entries
    driver.take(ClearCache(101, driver.default))
    assert driver.engine.parts.prefix_cache.entries == ()
