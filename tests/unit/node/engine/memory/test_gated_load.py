"""Loads under the gate: every piece is checked, a load ends before any answer, and its bytes are released."""

import json
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from tests import models
from tests.support.engine.checkpoints import fp8
from tests.support.engine.text_engine import ROOMY, Driver
from wire.frames import (
    Failed,
    Finished,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
    UnloadModel,
)
from wire.refusals import RefusalCode
from wire.report import Memory, MemoryLevel, Model
from wire.units import GIB, MIB

LLAMA = models.path("llama").name
EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ORDER = 9000
LAYERS = 4


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm models up with 2 tokens, because a forward of 32 tokens in bf16 takes 0.1 s of CPU time here."""
    monkeypatch.setattr("node.engine.models.loaded_model.WARMUP_TOKENS", 2)


def endless(tokens: int) -> GenerationParams:
    return GenerationParams(temperature=0.0, max_tokens=tokens, logit_bias=((EOS, -100.0),))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 30 MiB in fp8, 61 MiB loaded."""
    return fp8(tmp_path_factory.mktemp("models") / "grown", layers=LAYERS)


@pytest.fixture
def folder(grown: Path, tmp_path: Path) -> Path:
    """Return a folder with `grown`."""
    (tmp_path / "grown").symlink_to(grown)
    return tmp_path


@pytest.fixture
def driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return an engine that reads a model in pieces of 2 MiB while the tiny model can answer."""
    monkeypatch.setattr("node.engine.models.loaded_model.BYTES_BETWEEN_STEPS", 2 * MIB)
    made = Driver(
        models.path("llama"),
        folder,
        max_batch_size=8,
        prefill_step_size=512,
        min_prefill_step=64,
        prefix_cache_size="off",
    )
    made.answer("hello", endless(2), model=LLAMA)
    return made


def memory(driver: Driver) -> Memory:
    release_free_memory()
    return driver.engine.report(time.monotonic()).memory


def described(driver: Driver, name: str = "grown") -> Model:
    return next(one for one in driver.engine.report(time.monotonic()).models if one.name == name)


def squeeze(driver: Driver, room: int, *, cap: int = 8 * GIB, margin: int = 0) -> MemoryLimits:
    """Leave `room` bytes above the current footprint and reservations."""
    driver.take(ROOMY)
    release_free_memory()
    driver.engine.parts.footprint.reset_peak()  # a recent peak of earlier tests in this process
    now = memory(driver)
    assert now.current is not None
    limits = MemoryLimits(cap, now.current + now.reserved + room, margin, "static")
    driver.take(limits)
    return limits


def begun(driver: Driver, share: float = 0.3, number: int = ORDER) -> None:
    """Order the load of `grown`, and step until more than `share` of it is read."""
    driver.take(LoadModel(number, "grown"))
    driver.until(lambda: described(driver).progress > share)


def running(driver: Driver, tokens: int = 200, expected: int = 200) -> int:
    number = driver.ask("hello", endless(tokens), model=LLAMA, expected=expected)
    driver.until(lambda: len(driver.ids[number, 0]) > 2)
    return number


def test_a_checkpoint_that_grows_is_counted_by_its_size_once_loaded(driver: Driver):
    model = described(driver)
    assert model.weights == pytest.approx(61 * MIB, rel=0.02)
    driver.take(LoadModel(ORDER, "grown"))
    assert isinstance(driver.end(ORDER), Finished)
    assert described(driver).weights == pytest.approx(model.weights, rel=0.02)


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_larger_in_memory_than_its_files_is_refused_before_it_is_read(tmp_path: Path, again: bool):
    fp8(tmp_path / "grown", layers=LAYERS, scale="F32")
    driver = Driver(models.path("llama"), tmp_path, prefix_cache_size="off")
    driver.answer("hello", endless(2), model=LLAMA)
    expected = described(driver).weights
    assert expected == pytest.approx(61 * MIB, rel=0.02), "loaded it takes twice that"
    for number in (ORDER, ORDER + 1) if again else (ORDER,):
        squeeze(driver, 100 * MIB)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        driver.take(LoadModel(number, "grown"))
        end = driver.end(number)
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.NO_ROOM
        assert mx.get_peak_memory() - before < 16 * MIB, "no weight was read"
    assert described(driver).weights == pytest.approx(122 * MIB, rel=0.02), "the exact size is known from then on"


def test_a_load_needs_no_margin_and_a_request_does(driver: Driver):
    squeeze(driver, described(driver).weights + 96 * MIB, margin=512 * MIB)
    driver.take(LoadModel(ORDER, "grown"))
    assert isinstance(driver.end(ORDER), Finished), "its weights fit under the ceiling"
    end = driver.end(driver.ask("hello", endless(2), model="grown"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM


def test_the_only_model_stays_where_its_size_alone_leaves_no_headroom(folder: Path):
    driver = Driver(folder, prefix_cache_size="off")
    limits = squeeze(driver, described(driver).weights + 96 * MIB, margin=512 * MIB)
    driver.take(LoadModel(ORDER, "grown"))
    assert isinstance(driver.end(ORDER), Finished)
    driver.take(MemoryLimits(limits.ceiling, limits.ceiling, limits.margin, "static"))
    driver.take(ReduceMemory(1, MemoryLevel.OVER_SOFT))
    assert described(driver).loaded, "the next request would only load it again"
    driver.take(limits)
    driver.take(ReduceMemory(2, MemoryLevel.OVER_SOFT))
    assert not described(driver).loaded, "other applications need the memory: the ceiling is below the cap"


@pytest.mark.parametrize("waits", [False, True])
def test_a_ceiling_that_falls_in_the_middle_of_a_load_ends_the_load_and_no_answer(driver: Driver, waits: bool):
    number = running(driver, 100, 100)
    before = memory(driver).active
    waiting = driver.ask("hello", endless(2), model="grown") if waits else 0
    begun(driver)
    limits = squeeze(driver, -8 * MIB)
    end = driver.end(ORDER)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    if waiting:
        end = driver.ended(waiting)
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.NO_ROOM, "the router places the request again"
    assert memory(driver).active < before + 8 * MIB, "what was read is released"
    assert (described(driver).loaded, described(driver).loading) == (False, False)
    assert driver.ended(number) is None
    driver.take(MemoryLimits(limits.cap, 8 * GIB, 0, "static"))
    driver.take(LoadModel(ORDER + 1, "grown"))
    assert isinstance(driver.end(ORDER + 1), Finished), "the second load fits"
    assert isinstance(driver.end(number), Finished)


def test_a_row_that_grows_ends_the_load_and_preempts_no_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.scheduling.rules.commitment_length.KV_GROWTH_TOKENS", 4)
    numbers = [running(driver, 80, 16), running(driver, 80, 80)]
    begun(driver)
    squeeze(driver, 16 * MIB, margin=32 * MIB)
    driver.until(lambda: driver.ended(ORDER))
    assert isinstance(driver.ended(ORDER), Refusal)
    assert driver.engine.report(time.monotonic()).counts.preemptions == 0
    assert not any(isinstance(driver.ended(number), Failed | Refusal) for number in numbers)
    driver.take(ROOMY)
    for number in numbers:
        assert isinstance(driver.end(number), Finished)


def test_over_the_cap_the_load_ends_before_any_request(driver: Driver):
    number = running(driver)
    begun(driver, 0.6)
    now = memory(driver)
    driver.take(ReduceMemory(1, MemoryLevel.OVER_HARD, 16 * MIB))
    end = driver.ended(ORDER)
    assert isinstance(end, Refusal)
    assert "over its cap" in end.refused.message
    assert memory(driver).active < now.active - 32 * MIB
    assert driver.ended(number) is None
    driver.cancel(number)


def test_a_forward_over_the_cap_ends_the_load_before_the_newest_request(driver: Driver):
    number = running(driver, 60, 60)
    begun(driver, 0.6)
    now = memory(driver)
    driver.take(MemoryLimits(max(now.active, now.phys or 0) - 8 * MIB, 8 * GIB, 0, "static"))
    driver.turn()
    assert isinstance(driver.ended(ORDER), Refusal)
    assert driver.engine.report(time.monotonic()).counts.preemptions == 0
    driver.take(ROOMY)
    assert isinstance(driver.end(number), Finished)


@pytest.mark.parametrize("waits", [False, True])
def test_a_lease_ends_a_load_that_no_request_waits_for(driver: Driver, waits: bool):
    waiting = driver.ask("hello", endless(2), model="grown") if waits else 0
    begun(driver)
    squeeze(driver, 0)
    driver.take(ReclaimMemory(1, 40 * MIB))
    assert (driver.ended(ORDER) is None) == waits
    driver.take(ROOMY)
    if waits:
        assert isinstance(driver.end(waiting), Finished)
        assert isinstance(driver.end(ORDER), Finished)


def test_only_a_running_request_ends_a_load(driver: Driver):
    number, manager = running(driver), driver.engine.parts.model_manager
    begun(driver)
    squeeze(driver, 0)
    assert not manager.free_for_forward(GateSite.PREFLIGHT, 8 * MIB)
    assert manager.is_loading("grown")
    assert manager.free_for_forward(GateSite.GROW, 8 * MIB)
    assert not manager.is_loading("grown")
    driver.cancel(number)


def test_an_unload_ends_a_load_that_is_read_or_queued(driver: Driver, tmp_path: Path):
    shutil.copytree(tmp_path / "grown", tmp_path / "second")
    driver.engine.parts.catalogue.scan()
    before = memory(driver).active
    waiting = driver.ask("hello", endless(2), model="grown")
    begun(driver)
    driver.take(LoadModel(ORDER + 1, "second"))
    for number, name in ((ORDER + 2, "second"), (ORDER + 3, "grown")):
        driver.take(UnloadModel(number, name))
        assert isinstance(driver.ended(number), Finished)
    for number in (ORDER, ORDER + 1, waiting):
        end = driver.ended(number)
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.NOT_READY
        assert "cancelled by `cluster model unload`" in end.refused.message
    assert memory(driver).active < before + 8 * MIB
    assert not driver.engine.parts.model_manager.busy
    driver.take(LoadModel(ORDER + 4, "grown"))
    assert isinstance(driver.end(ORDER + 4), Finished)


def test_every_piece_of_a_load_passes_the_gate(driver: Driver):
    before = driver.engine.gate.checks[GateSite.LOAD]
    driver.take(LoadModel(ORDER, "grown"))
    assert isinstance(driver.end(ORDER), Finished)
    assert driver.engine.gate.checks[GateSite.LOAD] - before > 64 * MIB // (8 * MIB), "and the warm-up"
