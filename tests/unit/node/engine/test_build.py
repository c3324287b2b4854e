"""The composition of the text engine: each setting and each folder reaches the part that it is for."""

import gc
import hashlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.engine.build import build, open_disk_cache
from node.engine.memory.gate import GateSite
from node.engine.models import load_times
from node.engine.process.crash_recorder import CrashRecorder
from node.hub.digests import DigestStore, compute_content, list_content_files, record_digest
from node.models import last_use
from node.settings import EngineSettings, MlxSettings, ModelSettings, NodeSettings
from tests import models
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, Driver
from wire.frames import Finished, GenerationParams, Refusal
from wire.refusals import RefusalCode
from wire.units import MIB

LLAMA = models.path("llama")


# the disk cache


@pytest.mark.parametrize(("size", "quota"), [("8MiB", 8 * MIB), (3 * MIB, 3 * MIB)])
def test_the_disk_cache_has_the_size_and_the_seconds_of_the_settings(tmp_path: Path, size: str | int, quota: int):
    cache = open_disk_cache(tmp_path / "cache", size, 2.5)
    assert cache is not None
    assert cache.writer is not None
    assert (cache.writer.quota, cache.min_seconds) == (quota, 2.5)
    assert (tmp_path / "cache").is_dir()


def test_an_automatic_disk_cache_follows_the_disk(tmp_path: Path):
    cache = open_disk_cache(tmp_path, "auto", 1.0)
    assert cache is not None
    assert cache.writer is not None
    assert cache.writer.quota > 0


def test_there_is_no_disk_cache_without_a_folder_or_a_size(tmp_path: Path):
    (tmp_path / "file").touch()
    assert open_disk_cache(None, "auto", 1.0) is None
    assert open_disk_cache(tmp_path / "cache", "off", 1.0) is None
    assert not (tmp_path / "cache").exists()
    with capture_logs() as logs:
        assert open_disk_cache(tmp_path / "file", "auto", 1.0) is None
    assert [(entry["event"], entry["folder"]) for entry in logs] == [("no disk cache", str(tmp_path / "file"))]
    with pytest.raises(ValueError, match="much"):
        open_disk_cache(tmp_path, "much", 1.0)


# models


def test_an_unknown_model_is_named_and_the_others_are_loaded():
    with capture_logs() as logs:
        driver = Driver(LLAMA, preload=("absent", LLAMA.name, "gone"))
    assert [entry["model"] for entry in logs if entry["event"] == "preload"] == ["absent", "gone"]
    driver.until(lambda: driver.engine.parts.models.loaded)
    assert list(driver.engine.parts.models.loaded) == [LLAMA.name]
    (model,) = driver.engine.report(0.0).models
    assert (model.loaded, model.pinned) == (True, True)


def test_measurements_are_stored_in_their_folder(tmp_path: Path):
    driver = Driver(LLAMA, profiles=tmp_path)
    driver.answer("Hello!", ONE_TOKEN)
    driver.engine.report(0.0)
    assert {file.name for file in tmp_path.iterdir()} == {load_times.FILE, last_use.FILE}


# requests


def test_answers_and_prompts_have_the_limits_of_the_settings():
    driver = Driver(LLAMA, max_tokens=2, max_context=100, max_batch_size=2)
    end = driver.end(driver.ask("Hello!"))
    assert isinstance(end, Finished)
    assert (end.reasons, end.completion_tokens) == (("length",), 2), "the request has no limit"
    long, wide = driver.ask("word " * 200), driver.ask("Hello!", GenerationParams(n=3))
    ends = [driver.end(number) for number in (long, wide)]
    assert all(isinstance(end, Refusal) for end in ends)
    refused = [end.refused for end in ends if isinstance(end, Refusal)]
    assert refused[0].code is RefusalCode.CONTEXT
    assert "100" in refused[0].message
    assert refused[1].code is not RefusalCode.NO_ROOM


@pytest.mark.parametrize(("size", "cached"), [("auto", True), ("off", False)])
def test_prompts_are_cached_unless_the_cache_is_off(size: str, cached: bool):
    driver = Driver(LLAMA, prefix_cache_size=size)
    driver.answer("word " * 100, ONE_TOKEN)
    end = driver.end(driver.ask("word " * 100, ONE_TOKEN))
    assert isinstance(end, Finished)
    assert (end.cached_tokens > 0) is cached


def test_a_prompt_is_prefilled_in_chunks_of_the_setting():
    driver = Driver(LLAMA, prefill_step_size=32, prefix_cache_size="off")
    driver.answer("Hello!", ONE_TOKEN)
    before = driver.engine.report(0.0).counts
    end = driver.end(driver.ask("word " * 100, GREEDY))
    counts = driver.engine.report(0.0).counts
    assert isinstance(end, Finished)
    assert counts.prefill_tokens - before.prefill_tokens == end.prompt_tokens > 96


def test_the_smallest_chunk_is_no_larger_than_a_chunk():
    driver = Driver(LLAMA, prefill_step_size=16, min_prefill_step=64, prefix_cache_size="off")
    driver.answer("Hello!", ONE_TOKEN)
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL
    driver.ask("word " * 100)
    scheduler = driver.engine.parts.scheduler
    driver.until(lambda: scheduler.prefills[0].retry_at)
    tokens = len(scheduler.prefills[0].ids)
    assert scheduler.compute_required_bytes() == driver.resident().estimator.estimate_chunk(16, tokens)


# the process


def test_the_environment_names_the_places_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digests = {name: hashlib.sha256((LLAMA / name).read_bytes()).hexdigest() for name in list_content_files(LLAMA)}
    entries = {LLAMA / name: record_digest(LLAMA / name, digest) for name, digest in digests.items()}
    DigestStore(tmp_path / "digests.json").add(entries)
    monkeypatch.setenv("MACPOOL_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv("MACPOOL_DIGESTS", str(tmp_path / "digests.json"))
    monkeypatch.setenv("MACPOOL_DISK_CACHE", str(tmp_path / "cache"))
    settings = NodeSettings(
        engine=EngineSettings(mlx=MlxSettings(disk_cache_size="1GiB")),
        models=ModelSettings(folders=(str(LLAMA),), use_huggingface_cache=False),
    )
    gc.unfreeze()
    engine = build(settings, CrashRecorder())
    assert gc.get_freeze_count() > 0, "full collections skip the modules"
    (descriptor,) = engine.parts.catalogue.get_models().values()
    assert (descriptor.name, descriptor.content) == (LLAMA.name, compute_content(digests))
    assert engine.report(0.0).cache.store
    assert (tmp_path / "cache").is_dir()
    engine.close()
    for name in ("MACPOOL_PROFILES", "MACPOOL_DIGESTS", "MACPOOL_DISK_CACHE"):
        monkeypatch.delenv(name)
    engine = build(settings, CrashRecorder())
    (descriptor,) = engine.parts.catalogue.get_models().values()
    assert (descriptor.content, engine.report(0.0).cache.store) == ("", "")
    engine.close()
