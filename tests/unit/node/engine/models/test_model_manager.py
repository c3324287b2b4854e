"""Loading and unloading of real models: idle unloads, reported progress of a load, and released memory."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from node.engine.memory.reserve import HEADROOM_BEFORE_REFILL_SECONDS
from node.engine.models.load_blocks import READ_RETRY_SECONDS
from node.engine.models.load_state import LoadPhase
from node.engine.models.model_manager import MIN_LOAD_TRANSIENT_BYTES
from tests import models
from tests.support.engine.text_engine import Driver
from tests.support.readings import trailing
from wire.frames import Finished, GenerationParams, LoadModel, MemoryLimits, Refusal, UnloadModel
from wire.refusals import RefusalCode
from wire.report import Model
from wire.units import MIB

HOUR = 3600.0
ENDLESS = GenerationParams(logit_bias=((2, -100.0),), max_tokens=400)


def two(tmp_path: Path, **more: object) -> Driver:
    for name in ("one", "two"):
        shutil.copytree(models.path("llama"), tmp_path / name)
    return Driver(tmp_path, **more)  # type: ignore[arg-type]


def model(driver: Driver, name: str) -> Model:
    return next(one for one in driver.engine.report(time.monotonic()).models if one.name == name)


def loaded(driver: Driver) -> set[str]:
    return {one.name for one in driver.engine.report(time.monotonic()).models if one.loaded}


def load(driver: Driver, *names: str) -> None:
    for number, name in enumerate(names, 900):
        driver.take(LoadModel(number, name))
        assert isinstance(driver.end(number), Finished)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[read] Unable to read from file."),
        RuntimeError("[malloc] Unable to allocate 1048576 bytes."),
        RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
        MemoryError("no memory"),
    ],
    ids=str,
)
def test_a_model_that_could_not_be_read_or_allocated_once_is_loaded_by_a_later_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    driver = two(tmp_path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("node.engine.models.loaded_model.evaluate", fail)
    first = driver.end(driver.ask("Hello!", model="one"))
    monkeypatch.undo()
    again = driver.end(driver.ask("Hello!", model="one"))
    assert isinstance(first, Refusal)
    assert isinstance(again, Refusal)
    assert first.refused.message.endswith(str(error))
    assert again.refused.message.endswith(f"{error}; the next try is in 60 s")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + READ_RETRY_SECONDS)
    assert isinstance(driver.end(driver.ask("Hello!", GenerationParams(max_tokens=4), model="one")), Finished)


def test_an_idle_model_is_unloaded_after_its_time(tmp_path: Path):
    driver = two(tmp_path, idle_unload=HOUR)
    load(driver, "one", "two")
    driver.end(driver.ask("Hello!", GenerationParams(max_tokens=4), model="one"))
    first, second = (driver.resident(name).usage.used_at + HOUR for name in ("two", "one"))
    assert driver.engine.parts.unloader.find_next_idle_unload() == first < second
    list(driver.engine.step(first - 1.0))
    assert loaded(driver) == {"one", "two"}
    list(driver.engine.step(first))
    assert loaded(driver) == {"one"}, "a request puts it off"
    assert driver.engine.next_step_at(first) == second, "the engine wakes for nothing else"
    list(driver.engine.step(second))
    assert loaded(driver) == set()
    assert driver.engine.next_step_at(second) is None
    assert driver.engine.report(second).counts.departures == 2
    assert driver.engine.report(second).counts.evictions == 0


def test_a_model_replaces_another_although_the_footprint_falls_late(tmp_path: Path):
    driver = two(tmp_path)
    load(driver, "one")
    trailing(driver.engine.parts.footprint.sensor, 0.3)
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    need = driver.resident("one").weights + MIN_LOAD_TRANSIENT_BYTES
    driver.take(MemoryLimits(2**33, memory.current + memory.reserved + need - MIB // 2, 0, "static"))
    driver.take(LoadModel(910, "two"))
    assert isinstance(driver.end(910), Finished)
    assert loaded(driver) == {"two"}


def test_neither_a_preloaded_model_nor_one_in_use_leaves(tmp_path: Path):
    driver = two(tmp_path, idle_unload=HOUR, preload=("one",))
    number = driver.ask("Hello!", ENDLESS, model="two")
    driver.until(lambda: driver.ids[number, 0])
    assert loaded(driver) == {"one", "two"}
    pinned = {model.name: model.pinned for model in driver.engine.report(time.monotonic()).models}
    assert pinned == {"one": True, "two": False}, "the router asks no preloaded model to leave"
    list(driver.engine.step(time.monotonic() + 2 * HOUR))
    assert loaded(driver) == {"one", "two"}
    driver.cancel(number)
    list(driver.engine.step(time.monotonic() + 2 * HOUR))
    assert loaded(driver) == {"one"}


def test_no_model_leaves_by_itself_unless_it_is_set(tmp_path: Path):
    driver = two(tmp_path)
    load(driver, "one")
    assert driver.engine.parts.unloader.find_next_idle_unload() is None
    list(driver.engine.step(time.monotonic() + 1000 * HOUR))
    assert loaded(driver) == {"one"}


def test_a_load_reports_its_progress_while_rows_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.models.loaded_model.BYTES_BETWEEN_STEPS", 1)
    driver = two(tmp_path)
    load(driver, "one")
    number = driver.ask("Hello!", ENDLESS, model="one")
    driver.until(lambda: driver.ids[number, 0])
    waits = driver.ask("Hello!", GenerationParams(max_tokens=4), model="two")
    written, told = len(driver.ids[number, 0]), [0.0]
    while not model(driver, "two").loaded:
        told.append(model(driver, "two").progress)
        driver.turn()
    assert told == sorted(told)
    assert len({share for share in told if 0.0 < share < 1.0}) > 5
    assert told[-1] == 1.0
    assert model(driver, "two").progress == 0.0
    assert len(driver.ids[number, 0]) - written >= len(set(told)), "a row got a token for every piece"
    assert isinstance(driver.end(waits), Finished)


def test_an_illegal_event_of_a_load_ends_that_load_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.models.loaded_model.BYTES_BETWEEN_STEPS", 1)
    driver = two(tmp_path)
    load(driver, "one")
    number = driver.ask("Hello!", GenerationParams(max_tokens=8, logit_bias=((2, -100.0),)), model="one")
    waits, table = driver.ask("Hello!", GenerationParams(max_tokens=4), model="two"), driver.engine.parts.models
    driver.until(lambda: table.load is not None and table.load.loaded_bytes > 0)
    assert table.load is not None
    table.set_load(replace(table.load, phase=LoadPhase.QUEUED, total=0, bytes_left=0))
    end = driver.end(waits)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    assert "PieceDue is illegal for a load in the phase queued" in end.refused.message
    assert isinstance(driver.end(number), Finished)
    assert isinstance(driver.end(driver.ask("Hello!", GenerationParams(max_tokens=4), model="two")), Finished)


def unload(driver: Driver, *names: str) -> None:
    for number, name in enumerate(names, 950):
        driver.said.clear()
        driver.take(UnloadModel(number, name))
        assert isinstance(driver.said[number][0], Finished)


def look(driver: Driver) -> int:
    """Step the engine at the time of its leak check, and return the unreturned bytes that it reports."""
    at = driver.engine.parts.model_manager.next_leak_check_at
    assert at is not None
    assert (driver.engine.next_step_at(time.monotonic()) or at) <= at, "it wakes for it by itself"
    list(driver.engine.step(at))
    assert driver.engine.parts.model_manager.next_leak_check_at is None
    return driver.engine.report(at).unreturned


def test_after_the_last_unload_the_memory_is_back(tmp_path: Path):
    driver = two(tmp_path)
    base = driver.engine.report(0.0).memory.base
    for name in ("one", "two"):
        driver.end(driver.ask("Hello! " * 100, GenerationParams(max_tokens=10), model=name))
    unload(driver, "one")
    assert driver.engine.parts.model_manager.next_leak_check_at is None, (
        "a model's memory cannot be distinguished from missing memory"
    )
    unload(driver, "two")
    assert look(driver) == 0
    phys = driver.engine.report(0.0).memory.phys
    assert phys is not None
    assert phys <= base + 64 * MIB


def test_a_load_that_fails_cancels_no_leak_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver = two(tmp_path)
    load(driver, "one")
    unload(driver, "one")

    def broken(*_: object) -> None:
        raise ValueError("no shape fits")

    monkeypatch.setattr("node.engine.models.loaded_model.evaluate", broken)
    assert isinstance(driver.end(driver.ask("Hello!", model="two")), Refusal)
    assert look(driver) == 0


def test_the_emergency_reserve_is_no_unreturned_memory(tmp_path: Path):
    driver = two(tmp_path, canary="256MiB")
    load(driver, "one")
    reserve = driver.engine.parts.emergency_reserve
    for later in (1, 2):
        reserve.maintain(time.monotonic() + later * 2 * HEADROOM_BEFORE_REFILL_SECONDS)
    assert reserve.nbytes == 256 * MIB
    unload(driver, "one")
    assert look(driver) == 0
    assert reserve.nbytes == 256 * MIB, "the idle engine keeps it"


def test_unreturned_memory_is_reported_until_the_next_load(tmp_path: Path):
    driver = two(tmp_path)
    load(driver, "one")
    leak = bytearray(b"x") * (256 * MIB)
    unload(driver, "one")
    missing = look(driver)
    assert 128 * MIB < missing < 384 * MIB, "earlier tests of this process may still release memory"
    del leak
    driver.take(LoadModel(970, "two"))
    driver.end(970)
    assert driver.engine.report(0.0).unreturned == 0
