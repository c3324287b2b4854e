"""The full sweep on request: under the gate, during answers, in place of an older profile, and aborted for requests."""

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest

from node.engine.kv.kv_cache import Layers, TextModel
from node.engine.memory.gate import GateSite
from node.engine.models import context_search, memory_probe
from node.engine.models.profile import MemoryProfile
from node.engine.scheduling.rules.chunk_policy import ChunkPace
from tests import models
from tests.support.engine.text_engine import Driver
from wire.capacity.arithmetic import compute_max_context
from wire.frames import (
    Cancel,
    Failed,
    Finished,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    ProfileModel,
    Refusal,
    UnloadModel,
)
from wire.refusals import RefusalCode, Refused
from wire.report import Model
from wire.units import MIB

ORDER = 10**6
SHORT = GenerationParams(temperature=0.0, max_tokens=4)


def a_driver(folder: Path | None = None, **more: object) -> Driver:
    fields = {
        "profile": "off",
        "profiles": folder,
        "prefill_step_size": 256,
        "max_batch_size": 4,
        "max_context": 1024,
    } | more
    driver = Driver(models.path("llama"), **fields)  # type: ignore[arg-type]
    driver.take(LoadModel(ORDER - 1, driver.default))
    driver.until(lambda: driver.said[ORDER - 1])
    return driver


def bounded(driver: Driver) -> Driver:
    """Refuse a probe, which ends the walk early."""
    driver.gate.refuses = lambda site, need: site is GateSite.PROBE and driver.gate.checks[site] == 12
    return driver


def swept(driver: Driver, number: int = ORDER) -> Finished | Refusal | Failed:
    driver.take(ProfileModel(number, driver.default))
    driver.until(lambda: driver.said[number])
    (end,) = driver.said[number]
    assert isinstance(end, Finished | Refusal | Failed)
    return end


def resident(driver: Driver):
    return driver.resident()


def test_a_sweep_replaces_the_stored_profile_and_returns_measurements(tmp_path: Path):
    driver = a_driver(tmp_path, profile="auto")
    (file,) = tmp_path.glob("[0-9a-f]*.json")
    first = msgspec.json.decode(file.read_bytes(), type=MemoryProfile)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(first, reach=1)))
    end = swept(driver)
    assert isinstance(end, Finished)
    model = end.measured
    assert isinstance(model, Model)
    assert model.profiled
    assert model.covered == 256
    assert 0 < model.max_context <= 1024
    assert model.max_batch >= 1
    assert model.kv_per_token == resident(driver).kv.per_token
    assert model.observed > 0
    assert [one.name for one in tmp_path.glob("[0-9a-f]*.json")] == [file.name]
    again = msgspec.json.decode(file.read_bytes(), type=MemoryProfile)
    assert again.reach > 512
    assert again == resident(driver).stats.profile


def test_no_forward_exceeds_the_context_of_its_model(tmp_path: Path):
    short = tmp_path / "short"
    shutil.copytree(models.path("llama"), short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 100}
    (short / "config.json").write_text(json.dumps(config))
    driver = Driver(short, profile="auto", prefill_step_size=256, max_batch_size=2)
    driver.take(LoadModel(ORDER - 1, driver.default))
    driver.until(lambda: driver.said[ORDER - 1])
    first = resident(driver).stats.profile
    driver.take(ProfileModel(ORDER, driver.default))
    sweeps = driver.engine.parts.sweeps
    driver.until(lambda: sweeps.running.current)
    assert sweeps.running.current is not None
    probe = sweeps.running.current.probe
    driver.until(lambda: driver.said[ORDER])
    assert max(chunk.past + chunk.tokens for chunk in probe.chunks) == 100
    assert max(step.longest for step in probe.steps) < 100
    assert first is not None
    assert (first.chunk, first.reach) == (100, 100)
    assert driver.engine.parts.models.compute_residual(256) is not None, "its largest chunk was measured"


def test_a_model_that_is_not_loaded_is_loaded_for_it():
    driver = Driver(models.path("llama"), prefill_step_size=256, max_batch_size=2, max_context=1024)
    assert isinstance(swept(driver), Finished)
    assert driver.default in driver.engine.parts.models.loaded


def test_what_cannot_be_measured_is_refused():
    driver = Driver(models.path("llama"))
    driver.take(ProfileModel(1, "no/such"))
    (end,) = driver.said[1]
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_MODEL


def test_rows_decode_between_forwards_of_a_sweep_and_each_passes_the_gate():
    driver = a_driver()
    number = driver.ask("word", GenerationParams(temperature=0.0, max_tokens=200, logit_bias=((2, -100.0),)))
    driver.until(lambda: driver.ids[number, 0])
    had, asked = len(driver.ids[number, 0]), driver.engine.gate.checks[GateSite.PROBE]
    driver.take(ProfileModel(ORDER, driver.default))
    for _ in range(8):
        driver.turn()
    assert len(driver.ids[number, 0]) >= had + 7
    assert driver.engine.gate.checks[GateSite.PROBE] >= asked + 7
    driver.until(lambda: driver.said[ORDER])
    assert isinstance(driver.end(number), Finished)
    assert isinstance(driver.said[ORDER][0], Finished)


def test_the_gate_refuses_a_forward_and_it_does_not_run(monkeypatch: pytest.MonkeyPatch):
    driver = a_driver()
    ran: list[int] = []
    whole = memory_probe.run_forward
    monkeypatch.setattr(memory_probe, "run_forward", lambda *args, **more: ran.append(1) or whole(*args, **more))
    driver.gate.refuses = lambda site, need: site is GateSite.PROBE
    end = swept(driver)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert ran == []


def test_the_forwards_of_a_slow_model_are_expected_to_take_their_time(monkeypatch: pytest.MonkeyPatch):
    driver = a_driver()
    resident(driver).stats.pace = ChunkPace(each=1.0)
    forwards = list[tuple[int, float]]()
    whole = memory_probe.run_forward

    def run_forward(model: TextModel, ids: Iterable[int], cache: Layers, *, last: bool) -> mx.array | None:
        known, call = list(ids), driver.engine.read_running_call()
        forwards.append((len(known), 0.0 if call is None else call.expected))
        return whole(model, known, cache, last=last)

    monkeypatch.setattr(memory_probe, "run_forward", run_forward)
    assert isinstance(swept(driver), Finished)
    assert max(tokens for tokens, _ in forwards) == 256
    assert [(tokens, expected) for tokens, expected in forwards if expected < tokens] == []


def test_its_model_is_not_unloaded_meanwhile_and_a_cancel_ends_it():
    driver = a_driver()
    before = mx.get_active_memory()
    driver.take(ProfileModel(ORDER, driver.default))
    for _ in range(9):
        driver.turn()
    driver.take(UnloadModel(1, driver.default))
    assert isinstance(driver.said[1][0], Refusal)
    driver.take(Cancel(ORDER))
    assert resident(driver).usage.users == 0
    assert driver.said[ORDER] == []
    assert mx.get_active_memory() - before <= MIB, "the sweep releases its memory"
    assert isinstance(swept(driver, ORDER + 1), Finished)


def test_its_row_is_given_up_before_a_request_is_refused():
    driver = a_driver()
    driver.take(ProfileModel(ORDER, driver.default))
    sweeps = driver.engine.parts.sweeps
    driver.until(lambda: sweeps.running.nbytes > MIB)
    taken = sweeps.running.nbytes
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    tight = memory.current + taken // 2
    driver.take(MemoryLimits(tight, tight, 0, "static"))
    assert driver.engine.parts.model_manager.free_memory(taken)
    assert sweeps.running.nbytes == 0
    driver.take(MemoryLimits(2 * tight, 2 * tight, 0, "static"))
    driver.until(lambda: driver.said[ORDER])
    (end,) = driver.said[ORDER]
    assert isinstance(end, Refusal)
    assert "requests need the memory" in end.refused.message


def tries(driver: Driver, monkeypatch: pytest.MonkeyPatch, passing: Callable[[int], bool]) -> list[int]:
    """Make `passing` decide each attempt by its number, and return the sizes of the attempts."""
    asked: list[int] = []

    def ask(site: GateSite, need: int) -> Refused | None:
        asked.append(need)
        return None if passing(len(asked)) else Refused(RefusalCode.NO_ROOM, "too long")

    monkeypatch.setattr(driver.engine.parts.forwards, "check", ask)
    return asked


def test_the_longest_row_follows_from_the_formula_and_shrinks_until_it_passes(monkeypatch: pytest.MonkeyPatch):
    driver = bounded(a_driver(max_context=0))
    asked = tries(driver, monkeypatch, lambda attempt: attempt >= 3)
    end = swept(driver)
    assert isinstance(end, Finished)
    assert end.measured is not None
    assert len(asked) == 3
    assert asked[0] > asked[1] > asked[2]
    memory = driver.engine.report(time.monotonic()).memory
    formula = compute_max_context(memory, msgspec.structs.replace(end.measured, max_context=0))
    assert end.measured.max_context == pytest.approx(formula * context_search.SHRINK**2, abs=2)


def test_what_never_passes_ends_in_the_diagnosis_which_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    driver = bounded(a_driver(tmp_path, max_context=0))
    asked = tries(driver, monkeypatch, lambda attempt: False)
    end = swept(driver)
    assert isinstance(end, Refusal)
    assert context_search.KNOBS in end.refused.message
    assert len(asked) == context_search.ATTEMPTS
    (file,) = tmp_path.glob("[0-9a-f]*.json")
    kept = msgspec.json.decode(file.read_bytes(), type=MemoryProfile)
    assert kept.failed == end.refused.message
    assert kept.share < 1


def test_a_context_that_is_set_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    driver = a_driver(max_context=512)
    asked = tries(driver, monkeypatch, lambda attempt: False)
    end = swept(driver)
    assert isinstance(end, Refusal)
    assert "1 attempt," in end.refused.message
    assert "512 tokens" in end.refused.message
    assert len(asked) == 1
