"""Prompts that are restored from the disk by another engine: fewer prefill tokens, and the same answers."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.build import build
from node.engine.kv.disk import disk_budget
from node.engine.kv.disk.block_chain import parse_name
from node.engine.kv.disk.block_file import decode_block
from node.engine.kv.disk.block_reader import DiskRestore, PlannedPart, ReadPlan
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.kv_cache import Layers, TextModel
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.memory.gate import GateSite
from node.engine.models.loaded_model import run_forward
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.scheduling.disk.disk_tier import MAX_PARTS_PER_TURN
from node.settings import EngineSettings, MlxSettings, ModelSettings, NodeSettings
from tests import models
from tests.effort import thin_cases
from tests.support.cluster.engine_pool import link
from tests.support.engine.disk import BRIEF, answer, fill_and_kill, get_disk, open_driver, words, write_all
from tests.support.engine.text_engine import Driver
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, ClearCache, Failed, Finished, GenerationParams, Message, Refusal
from wire.report import Memory

COUNT = 1000
"""Words of a prompt of about 2600 tokens, of which the last block is less than a tenth."""
FEW = 300
"""Words of a prompt of three blocks. `words(FEW)` is the beginning of `words(COUNT)`."""
MODELS = (
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in thin_cases(("gemma3_text", "qwen3", "lfm2"), 3)),
    *(pytest.param(name, marks=pytest.mark.slow) for name in thin_cases(("qwen3_next", "qwen3_moe"), 2)),
)


def list_files(folder: Path) -> set[str]:
    """Return the names of the files of blocks."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert all(map(parse_name, found)), "no other file"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a folder with the stored prompt of `words(COUNT)`, and the answer. Only `filled` reads it."""
    folder = tmp_path_factory.mktemp("written") / "cache"
    driver = open_driver(models.path("llama"), folder)
    _, ids = answer(driver, words(COUNT))
    write_all(driver)
    driver.engine.close()
    return folder, ids


@pytest.fixture
def filled(written: tuple[Path, list[int]], folder: Path) -> tuple[Path, list[int]]:
    """Return a folder of the test with the stored prompt of `words(COUNT)`, and the answer."""
    source, ids = written
    shutil.copytree(source, folder)
    return folder, ids


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of each forward of a prefill."""
    forwards: list[int] = []

    def run(model: TextModel, ids: list[int], cache: Layers, *, last: bool) -> mx.array | None:
        forwards.append(len(ids))
        return run_forward(model, ids, cache, last=last)

    monkeypatch.setattr("node.engine.scheduling.prefill_runner.run_forward", run)
    return forwards


@pytest.mark.parametrize("name", MODELS)
def test_after_a_kill_another_process_restores_the_prompt_and_answers_the_same(
    name: str, folder: Path, tiny_model: Callable[..., Path], prefilled: list[int]
):
    model = tiny_model(name, trained=name != "qwen3_moe")
    wanted = fill_and_kill(model, folder, COUNT)
    driver = open_driver(model, folder)
    end, ids = answer(driver, words(COUNT))
    assert ids == wanted
    assert end.cached_tokens >= 0.9 * end.prompt_tokens
    assert sum(prefilled) == end.prompt_tokens - end.cached_tokens, "counted at the forwards"
    assert driver.engine.report(0.0).counts.prefill_tokens == sum(prefilled)
    state = driver.engine.report(0.0).cache
    assert (state.disk_hits, state.disk_hit_tokens, state.disk_errors) == (1, end.cached_tokens, 0)
    assert [each.disk_hits for each in state.models] == [1]
    assert driver.gate.checks[GateSite.RESTORE] >= end.cached_tokens // BLOCK_TOKENS
    driver.engine.close()


def test_a_prompt_with_windows_is_restored_at_the_block_where_it_parts(folder: Path):
    model = models.path("gemma3_text")
    driver, prompt = open_driver(model, folder), words(FEW) + " sun" * 60
    answer(driver, words(400))
    write_all(driver)
    driver.engine.close()
    again, fresh = open_driver(model, folder), Driver(model, prefix_cache_size="off", prefill_step_size=256)
    end, ids = answer(again, prompt)
    assert end.cached_tokens == 3 * BLOCK_TOKENS
    assert ids == answer(fresh, prompt)[1]


@pytest.mark.parametrize("doing", ["cut", "changed", "gone", "foreign"])
def test_a_file_that_is_invalid_ends_the_restoration_there(filled: tuple[Path, list[int]], doing: str):
    folder, wanted = filled
    driver = open_driver(models.path("llama"), folder)
    answer(driver, "Hello!")
    number = driver.ask(words(COUNT), BRIEF)
    plan = driver.engine.parts.scheduler.prefills[0].past.plan  # type: ignore[union-attr]
    assert plan is not None
    file = folder / plan.parts[7].name.file
    content = file.read_bytes()
    if doing == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif doing == "changed":
        file.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    elif doing == "gone":
        file.unlink()
    else:
        file.write_bytes((folder / plan.parts[8].name.file).read_bytes())
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert driver.ids[number, 0] == wanted
    assert end.cached_tokens == 7 * BLOCK_TOKENS
    assert driver.engine.report(0.0).cache.disk_errors == 1
    write_all(driver)
    name = plan.parts[7].name
    assert decode_block(file.read_bytes(), name.chain, name.part, name.tokens), "it is written again"


def test_another_key_finds_nothing(filled: tuple[Path, list[int]]):
    folder, _ = filled
    driver = open_driver(models.path("llama"), folder)
    number = driver.ask(words(FEW), BRIEF, weighted_key=WeightedKey("mallory"))
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert end.cached_tokens == 0
    assert driver.engine.report(0.0).cache.disk_hits == 0


def test_a_shared_system_prompt_is_restored_for_another_key(folder: Path):
    system, cached = Message("system", words(FEW)), list[int]()
    for key in ("alice", "bob"):
        driver = open_driver(models.path("llama"), folder)
        messages = (system, Message("user", f"I am {key}"))
        end = driver.end(driver.ask("", BRIEF, messages=messages, weighted_key=WeightedKey(key), shared=True))
        assert isinstance(end, Finished)
        cached.append(end.cached_tokens)
        write_all(driver)
        driver.engine.close()
    assert cached == [0, 3 * BLOCK_TOKENS]


def test_other_weights_under_the_name_find_nothing(filled: tuple[Path, list[int]], tmp_path: Path):
    folder, _ = filled
    changed = tmp_path / "llama"
    changed.mkdir()
    for file in models.path("llama").iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = changed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-8:] = bytes(8)
    weights.write_bytes(content)
    end, _ = answer(open_driver(changed, folder), words(FEW))
    assert end.cached_tokens == 0


def test_a_second_engine_reads_the_folder_and_does_not_write(filled: tuple[Path, list[int]]):
    folder, wanted = filled
    first, second = (open_driver(models.path("llama"), folder) for _ in range(2))
    end, ids = answer(second, words(COUNT))
    assert (ids, end.cached_tokens > 0) == (wanted, True)
    files = len(list_files(folder))
    answer(second, words(FEW, seed=2))
    for _ in range(20):
        second.turn()
    assert len(list_files(folder)) == files
    assert second.engine.report(0.0).cache.disk_saves == 0
    first.engine.close()
    answer(second, words(FEW, seed=3))
    write_all(second)
    assert len(list_files(folder)) > files, "the first has ended"


def test_others_decode_while_a_prompt_is_restored(filled: tuple[Path, list[int]]):
    folder, _ = filled
    driver = open_driver(models.path("llama"), folder)
    beside = driver.ask("word", GenerationParams(temperature=1.0, max_tokens=400, seed=1))
    driver.until(lambda: driver.ids[beside, 0])
    number = driver.ask(words(COUNT), BRIEF)
    seen = set[int]()
    driver.until(
        lambda: (
            seen.add(len(driver.ids[beside, 0])) if driver.engine.parts.scheduler.prefills else None,
            driver.ids[number, 0],
        )[1]
    )
    assert len(seen) >= 8, "a token about every part"


def test_a_restoration_that_does_not_fit_waits_or_is_refused(
    filled: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
):
    folder, wanted = filled
    driver = open_driver(models.path("llama"), folder)
    refusals = iter([True, True, False, True] + [False] * 99)
    driver.gate.refuses = lambda site, _: site is GateSite.RESTORE and next(refusals)
    beside = driver.ask("word", GenerationParams(temperature=1.0, max_tokens=60, seed=1))
    driver.until(lambda: driver.ids[beside, 0])
    plans, delays, begin = list[ReadPlan](), list[float](), DiskCache.begin_restore

    def begin_restore(disk: DiskCache, plan: ReadPlan, cache: Layers) -> DiskRestore:
        plans.append(plan)
        delays.extend(prefill.retry_at for prefill in driver.engine.parts.scheduler.prefills)
        return begin(disk, plan, cache)

    monkeypatch.setattr(DiskCache, "begin_restore", begin_restore)
    end, ids = answer(driver, words(COUNT))
    assert (ids, end.cached_tokens >= 2304) == (wanted, True)
    (plan,) = plans
    assert delays == [0.0], "a prompt that is being restored waits no longer"
    needs = {estimate for site, estimate in driver.gate.asked if site is GateSite.RESTORE}
    assert needs == {3 * plan.nbytes // len(plan.parts)}, "a file and its arrays"


def test_a_preempted_row_returns_from_the_disk(filled: tuple[Path, list[int]], prefilled: list[int]):
    folder, wanted = filled
    driver = open_driver(models.path("llama"), folder)
    number = driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: len(driver.ids[number, 0]) >= 5)
    scheduler = driver.engine.parts.scheduler
    scheduler.preemptor.preempt(scheduler.live[number])
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    prefilled.clear()
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert driver.ids[number, 0] == wanted
    report = driver.engine.report(0.0)
    assert report.cache.disk_hits == 2
    assert sum(prefilled) <= 0.1 * end.prompt_tokens
    assert report.counts.recomputed_tokens == sum(prefilled), "counted at the forwards"
    assert 0 < report.counts.returned_tokens - end.prompt_tokens <= len(wanted)


def test_a_cancelled_restoration_leaves_nothing(filled: tuple[Path, list[int]]):
    folder, wanted = filled
    driver = open_driver(models.path("llama"), folder)
    scheduler, before = driver.engine.parts.scheduler, threading.enumerate()
    number = driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: scheduler.prefills and scheduler.prefills[0].past.restoring)  # type: ignore[union-attr]
    (reader,) = [thread for thread in threading.enumerate() if thread not in before]
    driver.cancel(number)
    assert not scheduler.prefills
    reader.join(10)
    assert not reader.is_alive(), "the thread that reads ahead"
    assert answer(driver, words(COUNT))[1] == wanted


def test_a_failed_request_removes_its_own_files_only(filled: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch):
    folder, _ = filled
    driver = open_driver(models.path("llama"), folder)
    answer(driver, words(FEW, seed=2))
    write_all(driver)
    files = list_files(folder)
    with monkeypatch.context() as patch:
        patch.setattr("node.engine.scheduling.prefill_runner.run_forward", lambda *_, **__: 1 / 0)
        driver.end(driver.ask(words(COUNT), BRIEF))
    left = list_files(folder)
    assert left < files
    assert len(files) - len(left) == 10, "the blocks of the other prompt stay"


def test_a_failed_request_without_a_prefix_cache_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    driver = Driver(models.path("llama"), disk_folder=folder, disk_cache_size="auto", prefix_cache_size="off")
    assert driver.engine.parts.prefix_cache.disk.cache is not None
    with monkeypatch.context() as patch:
        patch.setattr("node.engine.scheduling.prefill_runner.run_forward", lambda *_, **__: 1 / 0)
        assert isinstance(driver.end(driver.ask(words(FEW), BRIEF)), Failed)
    assert isinstance(driver.end(driver.ask(words(FEW), BRIEF)), Finished)


def test_only_what_saves_time_is_written(folder: Path):
    driver = open_driver(models.path("llama"), folder, min_seconds=3600.0)
    answer(driver, words(100))
    assert get_disk(driver).queue.get_next_write() is None
    off = open_driver(models.path("llama"), folder, size="off")
    assert off.engine.parts.prefix_cache.disk.cache is None
    assert off.engine.report(0.0).cache.store == ""


def test_copies_for_the_disk_leave_memory_for_one_more_part(folder: Path, monkeypatch: pytest.MonkeyPatch):
    driver, rooms = open_driver(folder, folder / "cache"), list[int]()
    monkeypatch.setattr(DiskCache, "write_next", lambda _, now, *, busy, room, urgent: rooms.append(room))
    answer(driver, words(100))
    part = get_disk(driver).queue.get_next_bytes()
    assert part
    rooms.clear()
    for parts in (1, 2):
        monkeypatch.setattr(PrefixMemory, "has_room", lambda _, size, parts=parts: size <= parts * part)
        driver.engine.parts.prefix_cache.disk.write_next(time.monotonic() + 3600, busy=False)
    assert rooms == [0, 1]
    rooms.clear()
    monkeypatch.setattr(PrefixMemory, "has_room", lambda *_: True)
    for spare in (True, False):
        monkeypatch.setattr(PrefixMemory, "has_spare", lambda *_, spare=spare: spare)
        driver.engine.parts.prefix_cache.disk.write_next(time.monotonic() + 3600, busy=False)
    assert rooms == [1, MAX_PARTS_PER_TURN], "more if the entry may soon be evicted"


def test_the_disk_is_read_only_if_a_prefill_of_the_missing_tokens_takes_longer(filled: tuple[Path, list[int]]):
    folder, _ = filled
    driver = open_driver(models.path("llama"), folder, min_seconds=1e-9)
    driver.ask(words(COUNT), BRIEF)
    driver.until(lambda: driver.engine.parts.scheduler.prefills)
    prefill, tier = driver.engine.parts.scheduler.prefills[0], driver.engine.parts.prefix_cache.disk
    past = prefill.past
    assert past is not None
    plan = past.plan
    assert plan is not None
    assert prefill.stored_tokens == plan.length
    reading, half = get_disk(driver).estimate_read_seconds(plan.nbytes), plan.length // 2
    for seconds, cached, expected in (
        (2 * reading, (0, half - 1, half + 1), [plan.length, plan.length, 0]),
        (0.9 * reading, (0,), [0]),
        (1.1 * reading, (0, plan.length - 1), [plan.length, 0]),
    ):
        for _ in range(100):  # the running mean of the speed
            prefill.loaded_model.stats.record_prefill(plan.length, seconds, 0)
        assert [tier.find(prefill, past, tokens) for tokens in cached] == expected
        assert (past.plan is None) is (expected[-1] == 0)
    get_disk(driver).min_seconds = 0.0
    lengths = [tier.find(prefill, past, tokens) for tokens in (plan.length - 1, plan.length)]
    assert lengths == [plan.length, 0], "the prefix in memory is as long"


def test_queued_parts_go_before_a_request_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_budget, "BUSY_WRITE_SPEED", 1)  # a part per second, however slow this machine is
    driver = open_driver(models.path("llama"), folder)
    answer(driver, words(COUNT))
    memory: Memory = driver.engine.report(0.0).memory
    assert memory.reusable > 0
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    write_all(driver)
    assert driver.engine.report(0.0).cache.disk_drops >= 1, "the entry went before all of it was written"
    assert get_disk(driver).queue.get_next_write() is None


def test_the_engine_process_opens_the_folder_of_its_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MACPOOL_DISK_CACHE", str(folder))
    settings = NodeSettings(
        engine=EngineSettings(mlx=MlxSettings(disk_cache_size="1GiB")),
        models=ModelSettings(folders=(str(models.path("llama")),), use_huggingface_cache=False),
    )
    engine = build(settings, CrashRecorder())
    identity = engine.report(0.0).cache.store
    engine.close()
    assert identity
    assert build(settings, CrashRecorder()).report(0.0).cache.store == identity


def clear(driver: Driver, model: str = "") -> object:
    """Clear the cache of a model, or of all models; return the answer."""
    driver.number += 1
    driver.take(ClearCache(driver.number, model))
    return driver.said[driver.number][-1]


def test_the_cache_of_one_model_is_cleared_in_memory_and_on_the_disk(folder: Path):
    driver = Driver(
        link(folder.with_name("models"), llama=models.path("llama"), qwen3=models.path("qwen3")),
        disk_folder=folder,
        disk_cache_size="1GiB",
        disk_cache_min_seconds=0.0,
    )
    for name in ("llama", "qwen3"):
        end = driver.end(driver.ask(words(FEW), BRIEF, model=name))
        assert isinstance(end, Finished)
    write_all(driver)
    before = {entry.model: entry for entry in driver.engine.report(0.0).cache.models}
    assert all(entry.nbytes and entry.entries and entry.disk_files and entry.disk_bytes for entry in before.values())
    assert isinstance(clear(driver, "llama"), Finished)
    assert driver.engine.report(0.0).cache.models == (before["qwen3"],)
    fingerprint = driver.resident("qwen3").descriptor.fingerprint
    assert {name.partition("/")[0] for name in list_files(folder)} == {fingerprint}
    end = driver.end(driver.ask(words(FEW), BRIEF, model="llama"))
    assert isinstance(end, Finished)
    assert end.cached_tokens == 0
    evicted = driver.engine.report(0.0).cache.evictions
    driver.engine.parts.prefix_cache.evict_model("qwen3")
    assert driver.engine.report(0.0).cache.evictions == evicted, "the disk still has the prompt of the other model"
    store = driver.engine.report(0.0).cache.store
    assert isinstance(clear(driver), Finished)
    assert driver.engine.report(0.0).cache.models == ()
    assert not list_files(folder)
    assert driver.engine.report(0.0).cache.store != store, "the router forgets its links"


def test_files_of_an_earlier_process_are_cleared_where_the_disk_cache_is_off(filled: tuple[Path, list[int]]):
    folder, _ = filled
    holder, off = open_driver(models.path("llama"), folder), open_driver(models.path("llama"), folder, size="off")
    assert isinstance(clear(off), Refusal), "another engine writes there"
    holder.engine.close()
    assert isinstance(clear(off), Finished)
    assert not list_files(folder)


def test_what_waits_to_be_written_is_cleared_as_well(folder: Path):
    driver = open_driver(models.path("llama"), folder)
    answer(driver, words(FEW))
    driver.turn()
    assert isinstance(clear(driver), Finished)
    write_all(driver)
    assert not list_files(folder)
    assert driver.engine.report(0.0).cache.disk_files == 0


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_an_eviction_is_reported_once_both_tiers_have_lost_the_prompt(name: str, folder: Path):
    driver = open_driver(models.path(name), folder)
    number = driver.ask(words(FEW), BRIEF)
    driver.end(number)
    write_all(driver)
    first = driver.said[number][0]
    assert isinstance(first, Admitted)
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    assert driver.engine.report(0.0).cache.evictions == 0, "it is on the disk"
    disk = get_disk(driver)
    disk.remove_parts([PlannedPart(parsed, 0) for file in list_files(folder) if (parsed := parse_name(file))])
    state = driver.engine.report(0.0).cache
    assert state.evictions >= 1
    assert first.prompt_hash in state.evicted
    _, ids = answer(driver, words(FEW))
    write_all(driver)
    before = driver.engine.report(0.0).cache.evictions
    disk.remove_parts([PlannedPart(parsed, 0) for file in list_files(folder) if (parsed := parse_name(file))])
    assert driver.engine.report(0.0).cache.evictions == before, "it is in memory"
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    assert driver.engine.report(0.0).cache.evictions > before
    assert ids == driver.ids[number, 0]
