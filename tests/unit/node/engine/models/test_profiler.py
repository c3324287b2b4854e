"""The profile: a probe under the gate, kept on disk, loaded instead of measured again; and its effects."""

import json
import time
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest

from node.engine.memory.gate import GateSite
from node.engine.memory.transient_estimator import CHUNKS, STEPS
from node.engine.models import profiler as tested
from tests import models
from tests.support.engine.text_engine import Driver
from wire.capacity.arithmetic import (
    Fits,
    compute_max_context,
    compute_most_bytes,
    compute_profiled_margin,
    estimate_alone_bytes,
    estimate_prefill_transient,
)
from wire.frames import Finished, GenerationParams, LoadModel, MemoryLimits, UnloadModel
from wire.refusals import Refused
from wire.units import GIB, MIB

SHORT = GenerationParams(temperature=0.0, max_tokens=4)
END = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]


def loaded(folder: Path, **more: object) -> Driver:
    small = {"prefill_step_size": 256, "max_batch_size": 4} | more
    driver = Driver(models.path("llama"), profile="auto", profiles=folder, **small)  # type: ignore[arg-type]
    driver.take(LoadModel(10**6, driver.default))
    driver.until(lambda: driver.said[10**6])
    assert driver.said[10**6] == [Finished(10**6, (), 0, 0)]
    return driver


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the complete profile of the model on this machine, however busy the machine is."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tested, "PROBE_SECONDS", 300.0)
        loaded(folder)
    return folder


def resident(driver: Driver):
    return driver.resident()


def test_a_first_load_measures_and_the_next_takes_what_was_kept(kept: Path):
    (file,) = kept.glob("[0-9a-f]*.json")
    found = msgspec.json.decode(file.read_bytes(), type=tested.MemoryProfile)
    assert found.chunk == 256
    assert found.reach >= 1024
    assert found.rows == 4
    assert found.transient.pair > 0
    again = loaded(kept)
    assert again.engine.gate.checks[GateSite.PROBE] == 0, "nothing is measured twice"
    assert resident(again).stats.profile == found
    assert resident(again).estimator.estimate_chunk(200, 700) == estimate_prefill_transient(found.transient, 200, 700)
    (model,) = again.engine.report(time.monotonic()).models
    assert model.profiled
    assert model.forward.pair == found.transient.pair
    assert model.observed >= found.highest


def test_an_invalid_file_is_ignored_and_written_again(kept: Path, tmp_path: Path):
    (file,) = kept.glob("[0-9a-f]*.json")
    key = msgspec.json.decode(file.read_bytes(), type=tested.MemoryProfile).key
    for content in (b"", b"{", b"[1, 2]", b'{"key": 1}'):
        (tmp_path / file.name).write_bytes(content)
        assert tested.MemoryProfileStore(tmp_path).read(key) is None
    driver = loaded(tmp_path)
    assert driver.engine.gate.checks[GateSite.PROBE] > 10
    assert msgspec.json.decode((tmp_path / file.name).read_bytes(), type=tested.MemoryProfile).chunk == 256


def test_a_profile_of_something_else_is_not_taken(kept: Path, tmp_path: Path):
    (file,) = kept.glob("[0-9a-f]*.json")
    found = msgspec.json.decode(file.read_bytes(), type=tested.MemoryProfile)
    other = msgspec.structs.replace(found, key=msgspec.structs.replace(found.key, mlx="0.0.1"))
    (tmp_path / file.name).write_bytes(msgspec.json.encode(other))
    assert tested.MemoryProfileStore(tmp_path).read(found.key) is None
    wild = msgspec.structs.replace(found, transient=msgspec.structs.replace(found.transient, pair=-1.0))
    (tmp_path / file.name).write_bytes(msgspec.json.encode(wild))
    assert tested.MemoryProfileStore(tmp_path).read(found.key) is None


def test_what_the_gate_refuses_ends_the_probe_and_nothing_stays_taken():
    driver = Driver(models.path("llama"), profile="auto", prefill_step_size=256, max_batch_size=4, limits=None)
    gate = driver.engine.gate
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.phys is not None
    driver.take(MemoryLimits(memory.phys + 70 * MIB, memory.phys + 70 * MIB, 0, "static"))
    driver.gate.refuses = lambda site, need: site is GateSite.PROBE and gate.checks[site] > 3
    before = mx.get_active_memory()
    driver.take(LoadModel(1, driver.default))
    driver.until(lambda: driver.said[1])
    found = resident(driver)
    assert found.stats.profile is not None
    assert found.stats.profile.reach < 1024
    assert gate.checks[GateSite.PROBE] >= 4
    assert mx.get_active_memory() - before <= found.weights * 1.01, "the probe releases its memory"


def test_a_profile_that_the_gate_cut_short_is_measured_again_when_there_is_room(tmp_path: Path):
    needs: list[int] = []

    def load(most: int) -> tuple[Driver, tested.MemoryProfile]:
        driver = Driver(
            models.path("llama"), profile="auto", profiles=tmp_path, prefill_step_size=256, max_batch_size=4
        )
        checks = driver.engine.gate.checks

        def refuses(site: GateSite, need: int) -> bool:
            if site is GateSite.PROBE:
                needs.append(need)
            return site is GateSite.PROBE and checks[site] > most

        driver.gate.refuses = refuses
        driver.take(LoadModel(10**6, driver.default))
        driver.until(lambda: driver.said[10**6])
        profile = resident(driver).stats.profile
        assert profile is not None
        return driver, profile

    _, short = load(3)
    assert (short.chunk < 256, short.refused_bytes > 0) == (True, True)
    driver, same = load(0)
    assert same == short
    assert driver.engine.gate.checks[GateSite.PROBE] == 1, "the gate still refuses the forward after the last one"
    assert needs[-1] == 2 * short.refused_bytes, "the next measurement makes progress"
    _, longer = load(6)
    assert longer.chunk > short.chunk


def test_a_stored_profile_is_used_if_nothing_can_be_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(tested.MemoryProbe, "repeat_largest", lambda probe: False)
        failed = resident(loaded(tmp_path)).stats.profile
    assert failed is not None
    driver = Driver(models.path("llama"), profile="auto", profiles=tmp_path, prefill_step_size=256, max_batch_size=4)
    driver.gate.refuses = lambda site, need: site is GateSite.PROBE
    driver.take(LoadModel(1, driver.default))
    assert isinstance(driver.end(1), Finished)
    assert driver.engine.gate.checks[GateSite.PROBE] >= 1
    assert resident(driver).stats.profile == failed
    assert resident(driver).estimator.highest == failed.highest


def test_a_longest_row_that_never_fits_is_measured_once_in_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(tested.MemoryProbe, "repeat_largest", lambda probe: False)
        first = loaded(tmp_path)
        checks = first.engine.gate.checks[GateSite.PROBE]
        assert checks > 3
        failed = resident(first).stats.profile
        assert failed is not None
        assert "the profile of" in failed.failed
        first.take(UnloadModel(1, first.default))
        assert isinstance(first.end(1), Finished)
        first.take(LoadModel(2, first.default))
        assert isinstance(first.end(2), Finished)
        assert first.engine.gate.checks[GateSite.PROBE] == checks, "the outcome is known"
        assert resident(first).stats.profile == failed
        assert first.engine.report(time.monotonic()).models[0].max_context > 0
    again = loaded(tmp_path)
    profile = resident(again).stats.profile
    assert profile is not None
    assert (profile.failed, profile.share) == ("", 1.0), "other settings are measured again"


def test_switched_off_nothing_is_measured(tmp_path: Path):
    driver = Driver(models.path("llama"), profile="off", profiles=tmp_path)
    driver.end(driver.ask("Hello!", SHORT))
    assert list(tmp_path.glob("[0-9a-f]*.json")) == []
    assert not driver.engine.report(time.monotonic()).models[0].profiled


def test_every_real_chunk_and_step_is_a_sample():
    driver = Driver(models.path("llama"), prefill_step_size=64)
    driver.end(driver.ask("word " * 300, SHORT))
    estimator = resident(driver).estimator
    assert estimator.samples[CHUNKS] >= 3
    assert estimator.highest > 0
    first = driver.ask("word", GenerationParams(temperature=0.0, max_tokens=200, logit_bias=((END, -100.0),)))
    driver.until(lambda: driver.ids[first, 0])
    driver.end(driver.ask("sun " * 900, SHORT))
    assert estimator.samples[STEPS] >= 1


def test_an_automatic_margin_follows_from_the_profile_and_a_set_one_does_not(kept: Path):
    driver = loaded(kept)
    auto = MemoryLimits(GIB, GIB, 512 * MIB, "static", margin_auto=True)
    driver.take(auto)
    profile = resident(driver).stats.profile
    assert profile is not None
    margin = driver.engine.report(time.monotonic()).memory.margin
    assert margin == compute_profiled_margin(GIB, profile.residual) < 512 * MIB
    driver.take(MemoryLimits(GIB, GIB, 512 * MIB, "static"))
    assert driver.engine.report(time.monotonic()).memory.margin == 512 * MIB
    driver.take(auto)
    resident(driver).stats.profile = None
    assert driver.engine.report(time.monotonic()).memory.margin == 512 * MIB, "a model without a profile is not covered"


def test_a_chunk_that_no_profile_covers_is_refused_by_the_full_margin(kept: Path):
    driver = loaded(kept)
    gate, estimator = driver.engine.gate, resident(driver).estimator
    driver.take(MemoryLimits(GIB, GIB, 512 * MIB, "static", margin_auto=True))
    memory = driver.engine.report(time.monotonic()).memory
    assert gate.compute_narrowed_bytes() == 512 * MIB - memory.margin > 0
    assert memory.headroom is not None
    tight = GIB - memory.headroom + estimator.estimate_prefill(257, 0)
    driver.take(MemoryLimits(GIB, tight, 512 * MIB, "static", margin_auto=True))
    memory = driver.engine.report(time.monotonic()).memory
    assert isinstance(gate.check(GateSite.PREFILL, memory, estimator.estimate_chunk(200, 0)), Fits)
    assert isinstance(gate.check(GateSite.PREFILL, memory, estimator.estimate_chunk(257, 0)), Refused)


def test_a_real_chunk_above_its_estimate_widens_the_margin(kept: Path):
    driver = loaded(kept)
    driver.take(MemoryLimits(GIB, GIB, 512 * MIB, "static", margin_auto=True))
    before = driver.engine.report(time.monotonic())
    resident(driver).estimator.observe_prefill(128, 0, resident(driver).estimator.estimate_prefill(128, 0) + 100 * MIB)
    after = driver.engine.report(time.monotonic())
    assert after.memory.margin == compute_profiled_margin(GIB, 100 * MIB) > before.memory.margin
    assert after.models[0].residual == 100 * MIB


def test_a_profile_that_ended_below_the_smallest_chunk_narrows_nothing(kept: Path):
    driver = loaded(kept)
    driver.take(MemoryLimits(GIB, GIB, 512 * MIB, "static", margin_auto=True))
    found = resident(driver).stats.profile
    assert found is not None
    resident(driver).stats.profile = msgspec.structs.replace(found, chunk=128)
    assert driver.engine.report(time.monotonic()).memory.margin == 512 * MIB


def test_the_context_that_is_reported_is_the_longest_row_that_fits(kept: Path):
    driver = loaded(kept)
    memory = driver.engine.report(time.monotonic()).memory
    driver.take(MemoryLimits(memory.base + 32 * MIB, 8 * GIB, 0, "static"))
    report = driver.engine.report(time.monotonic())
    (model,) = report.models
    assert 0 < model.max_context < model.context
    assert model.max_context == compute_max_context(report.memory, model)
    assert estimate_alone_bytes(model, model.max_context - 1, 1) <= compute_most_bytes(report.memory)
    assert estimate_alone_bytes(model, model.max_context, 1) > compute_most_bytes(report.memory)
    assert 1 <= model.max_batch <= 4


def test_a_context_that_is_set_is_the_models_context(kept: Path):
    driver = loaded(kept, max_context=512)
    assert driver.engine.report(time.monotonic()).models[0].context == 512


def test_the_margin_of_a_profile_is_the_measured_share_and_never_below_two_percent():
    assert compute_profiled_margin(100 * GIB, 0) == 2 * GIB
    assert compute_profiled_margin(100 * GIB, 10 * GIB) == int(10 * GIB * 12 / 10.6)
