"""The expected seconds of a load: an estimate before the first, measured after it, kept for the next process."""

import shutil
import time
from pathlib import Path

import pytest

from node.engine.models.load_times import (
    ASSUMED_WARMUP_SECONDS,
    FILE,
    MAX_MODELS,
    MAX_SECONDS,
    MIN_LOAD_BYTES_PER_SECOND,
    LoadTimes,
)
from node.engine.models.profiler import PROBE_SECONDS
from tests import models
from tests.support.engine.encoders import make_encoder
from tests.support.engine.text_engine import Driver
from wire.frames import Finished, LoadModel, UnloadModel
from wire.report import Model
from wire.units import GIB, MIB


def test_until_something_is_measured_weights_kernels_and_profile_count():
    times = LoadTimes(None)
    assert times.estimate_seconds("a", 10 * GIB, 0.0) == 10 * GIB / MIN_LOAD_BYTES_PER_SECOND + ASSUMED_WARMUP_SECONDS
    assert times.estimate_seconds("a", 10 * GIB, 8.0) == times.estimate_seconds("a", 10 * GIB, 0.0) + 8.0


def test_a_model_is_expected_to_take_what_it_took_and_others_what_its_parts_took():
    times = LoadTimes(None)
    times.record("a", 10 * GIB, read=5.0, warm=1.0, probe=4.0)
    assert times.estimate_seconds("a", 10 * GIB, 0.0) == 6.0
    assert times.estimate_seconds("a", 10 * GIB, PROBE_SECONDS) == 10.0
    assert times.estimate_seconds("b", 20 * GIB, PROBE_SECONDS) == pytest.approx(10.0 + 1.0 + 4.0)
    times.record("tiny", MIB, read=5.0, warm=1.0, probe=0.0)
    assert times.estimate_seconds("b", 20 * GIB, 0.0) == pytest.approx(11.0), (
        "a small model does not change the measured disk speed"
    )
    times.record("a", 10 * GIB, read=2.0, warm=1.0, probe=0.0)
    assert times.estimate_seconds("a", 10 * GIB, 0.0) == 3.0


def test_it_is_kept_on_disk_and_bounded(tmp_path: Path):
    times = LoadTimes(tmp_path)
    for number in range(MAX_MODELS + 5):
        times.record(str(number), GIB, read=float(number), warm=1.0, probe=0.0)
    again = LoadTimes(tmp_path)
    assert again.estimate_seconds(str(MAX_MODELS), GIB, 0.0) == MAX_MODELS + 1.0
    assert len(again.measured.models) == MAX_MODELS
    oldest, second, *_ = again.measured.models
    again.record(oldest, GIB, read=9.0, warm=1.0, probe=0.0)
    again.record("new", GIB, read=9.0, warm=1.0, probe=0.0)
    assert (oldest in again.measured.models, second in again.measured.models) == (True, False), "the order of loads"
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"speed": "fast"}',
        b'{"speed": -1}',
        b'{"warm": 1e300}',
        b'{"models": {"a": -5}}',
        b'{"models": {"a": 1e9}}',
        b'{"speed": 1e999}',
    ],
)
def test_a_file_that_makes_no_sense_is_ignored(tmp_path: Path, text: bytes):
    (tmp_path / FILE).write_bytes(text)
    expected = GIB / MIN_LOAD_BYTES_PER_SECOND + ASSUMED_WARMUP_SECONDS
    assert LoadTimes(tmp_path).estimate_seconds("a", GIB, 0.0) == expected


def test_parts_of_a_very_long_load_leave_the_file_usable(tmp_path: Path):
    times = LoadTimes(tmp_path)
    for _ in range(3):
        times.record("a", 10 * GIB, read=1e5, warm=1e5, probe=1e5)
    assert LoadTimes(tmp_path).measured == times.measured
    assert times.measured.models == {"a": MAX_SECONDS}


def test_a_disk_that_cannot_be_written_costs_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    times = LoadTimes(tmp_path / "file")
    times.record("a", GIB, read=1.0, warm=1.0, probe=0.0)
    assert times.estimate_seconds("a", GIB, 0.0) == 2.0


def test_the_first_load_counts_the_profile_and_the_next_one_what_was_measured(tmp_path: Path):
    for name in ("one", "two"):
        shutil.copytree(models.path("llama" if name == "one" else "qwen3"), tmp_path / "models" / name)

    def drive() -> Driver:
        return Driver(tmp_path / "models", profile="auto", profiles=tmp_path / "profiles")

    def model(driver: Driver, name: str = "one") -> Model:
        return next(one for one in driver.engine.report(time.monotonic()).models if one.name == name)

    driver = drive()
    assert model(driver).load_seconds == pytest.approx(ASSUMED_WARMUP_SECONDS + PROBE_SECONDS, abs=0.1)
    driver.take(LoadModel(1, "one"))
    assert isinstance(driver.end(1), Finished)
    whole = model(driver).load_seconds
    driver.take(UnloadModel(2, "one"))
    kept = driver.engine.parts.times.measured
    assert kept.probe > 0
    assert kept.warm > 0
    assert 0 < model(driver).load_seconds == pytest.approx(whole - kept.probe, abs=0.5)
    assert model(drive()).load_seconds == model(driver).load_seconds, "another process knows it"
    assert model(driver, "two").load_seconds == pytest.approx(kept.warm + kept.probe, abs=0.1), (
        "its first profile is due"
    )


def test_an_encoder_is_never_profiled_and_no_probe_is_expected_or_counted(tmp_path: Path):
    make_encoder(tmp_path / "models" / "encoder", "bert")
    driver = Driver(tmp_path / "models", profile="auto", profiles=tmp_path / "profiles")

    def report() -> float:
        return driver.engine.report(time.monotonic()).models[0].load_seconds

    assert report() == pytest.approx(ASSUMED_WARMUP_SECONDS, abs=0.1)
    driver.take(LoadModel(1, driver.default))
    assert isinstance(driver.end(1), Finished)
    driver.take(UnloadModel(2, driver.default))
    times = driver.engine.parts.times.measured
    assert (times.probe, [report()]) == (0.0, list(times.models.values()))
