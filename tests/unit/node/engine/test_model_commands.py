"""Orders about models: repeated loads, profiles of broken models, and reports of unloaded models."""

import json
import shutil
import time
from pathlib import Path

from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.batches import compute_waste_bytes
from wire.frames import Finished, LoadModel, ProfileModel, Refusal, UnloadModel
from wire.refusals import RefusalCode


def make_broken(folder: Path) -> Path:
    """Return a copy of a model whose weights do not fit its config, which only a load finds."""
    copied = Path(shutil.copytree(models.path("llama"), folder))
    config = copied / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    return copied


def test_an_ordered_load_is_tried_again_after_a_failure_of_the_files(tmp_path: Path):
    driver = Driver(make_broken(tmp_path / "m"))
    for order in (1, 2):
        driver.take(LoadModel(order, driver.default))
        assert driver.said[order] == [], "no refusal before the files are read"
        end = driver.end(order)
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.LOAD_FAILED


def test_the_profile_of_a_model_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path):
    driver = Driver(make_broken(tmp_path / "m"))
    driver.take(ProfileModel(1, driver.default))
    end = driver.end(1)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED


def test_a_report_has_the_padding_of_a_loaded_model_and_the_last_use_of_an_unloaded_one():
    driver = Driver(models.path("llama"))
    assert driver.engine.report(time.monotonic()).models[0].used == 0
    driver.take(LoadModel(1, driver.default))
    assert isinstance(driver.end(1), Finished)
    (loaded,) = driver.engine.report(time.monotonic()).models
    assert loaded.kv_waste == compute_waste_bytes(ROOMY.cap) > 0
    driver.take(UnloadModel(2, driver.default))
    (unloaded,) = driver.engine.report(time.monotonic()).models
    assert not unloaded.loaded
    assert abs(unloaded.used - time.time()) < 60
