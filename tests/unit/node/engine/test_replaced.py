"""A model whose files are replaced on disk: the loaded one keeps answering until it is idle, then it is unloaded."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import Finished, GenerationParams, LoadModel, Ping, Refusal
from wire.refusals import RefusalCode
from wire.report import Model

ENDLESS = GenerationParams(logit_bias=((2, -100.0),), max_tokens=400, temperature=0.0)
FOUR = GenerationParams(max_tokens=4, temperature=0.0)


def two(tmp_path: Path, **more: object) -> Driver:
    for name in ("one", "two"):
        shutil.copytree(models.path("llama"), tmp_path / name, copy_function=shutil.copyfile)
    return Driver(tmp_path, **more)  # type: ignore[arg-type]


def replace(tmp_path: Path, name: str) -> None:
    """Replace a model's weights by different ones of the same shapes, in a new file as after a download."""
    file = tmp_path / name / "model.safetensors"
    raw = np.frombuffer(file.read_bytes(), dtype=np.uint8).copy()
    raw[8 + int.from_bytes(raw[:8].tobytes(), "little") + 3 :: 4] ^= 0x80
    other = tmp_path / "other"
    other.write_bytes(raw.tobytes())
    other.replace(file)


@pytest.fixture(autouse=True)
def _every_ping_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.models.catalogue.SCAN_INTERVAL_SECONDS", 0.0)


def scan(driver: Driver) -> None:
    """Scan the catalogue with a ping, as happens when the last scan is old."""
    driver.take(Ping(1))


def model(driver: Driver, name: str) -> Model:
    return next(one for one in driver.engine.report(time.monotonic()).models if one.name == name)


def load(driver: Driver, name: str, number: int = 900) -> None:
    driver.take(LoadModel(number, name))
    assert isinstance(driver.end(number), Finished)


def test_a_replaced_model_answers_as_itself_until_it_is_idle(tmp_path: Path):
    driver = two(tmp_path)
    load(driver, "one")
    load(driver, "two", 901)
    old, running = model(driver, "one").fingerprint, driver.ask("Hello!", ENDLESS, model="one")
    driver.until(lambda: driver.ids[running, 0])
    replace(tmp_path, "one")
    scan(driver)
    late = driver.ask("Hello!", FOUR, model="one")
    assert isinstance(driver.end(late), Finished)
    assert (model(driver, "one").loaded, model(driver, "one").fingerprint) == (True, old)
    driver.cancel(running)
    driver.until(lambda: not model(driver, "one").loaded)
    assert not model(driver, "one").loading, "only a preloaded model is loaded again"
    new = model(driver, "one").fingerprint
    assert new not in ("", old)
    assert model(driver, "two").loaded, "the other one stays"
    load(driver, "one", 902)
    assert (model(driver, "one").loaded, model(driver, "one").fingerprint) == (True, new)
    assert driver.engine.report(0.0).counts.departures == 0


def test_an_idle_one_leaves_at_once_and_a_preloaded_one_comes_again(tmp_path: Path):
    driver = two(tmp_path, preload=("one",))
    driver.until(lambda: model(driver, "one").loaded)
    old = model(driver, "one").fingerprint
    replace(tmp_path, "one")
    scan(driver)
    driver.until(lambda: model(driver, "one").loaded and model(driver, "one").fingerprint != old)


def test_an_answer_that_another_model_began_is_not_continued(tmp_path: Path):
    driver = two(tmp_path)
    old = model(driver, "one").fingerprint
    begun = {"resume": ((5, 6),), "model": "one", "fingerprint": old}
    assert isinstance(driver.end(driver.ask("Hello!", FOUR, **begun)), Finished)
    replace(tmp_path, "one")
    scan(driver)
    driver.until(lambda: not model(driver, "one").loaded)
    end = driver.end(driver.ask("Hello!", FOUR, **begun))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NOT_READY
    assert "differs from the one that began the answer" in end.refused.message
    assert isinstance(driver.end(driver.ask("Hello!", FOUR, model="one")), Finished), "a new request is answered"


def test_a_loaded_model_serves_after_its_files_were_deleted(tmp_path: Path):
    driver = two(tmp_path)
    assert isinstance(driver.end(driver.ask("Hello!", FOUR, model="one")), Finished)
    shutil.rmtree(tmp_path / "one")
    scan(driver)
    assert isinstance(driver.end(driver.ask("Hello!", FOUR, model="one")), Finished)
    assert model(driver, "one").loaded


def test_files_that_change_during_a_load_end_it_and_the_next_request_tries_again(tmp_path: Path):
    driver = two(tmp_path)
    old = model(driver, "one").fingerprint
    waiting = driver.ask("Hello!", FOUR, model="one")
    driver.turn()
    assert model(driver, "one").loading
    replace(tmp_path, "one")
    end = driver.end(waiting)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NOT_READY
    assert "the files of one changed during the load" in end.refused.message
    assert not model(driver, "one").loaded
    assert not model(driver, "one").cause
    assert isinstance(driver.end(driver.ask("Hello!", FOUR, model="one")), Finished)
    assert model(driver, "one").fingerprint not in ("", old)
