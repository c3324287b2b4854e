"""The table of decode batches: times of their steps, rows by key, and whether the memory of a step can be measured."""

from collections import Counter
from pathlib import Path

import pytest

from node.engine.memory.footprint import MlxPeakTracker
from node.engine.scheduling.batch_table import BatchTable
from tests import models
from tests.support.cluster.engine_pool import link
from tests.support.engine.text_engine import Driver
from wire.frames import GenerationParams

ENDLESS = GenerationParams(temperature=1.0, max_tokens=400, stop=("\0",), logit_bias=((2, -100.0),))


def test_the_memory_of_a_step_is_measured_until_another_call_changes_it():
    table = BatchTable(dict)
    for grew, measurable in ((False, True), (True, False), (False, True)):
        table.mark_step(5, grew=grew)
        assert [table.is_measurable(mark) for mark in (4, 5, 6)] == [False, measurable, False]
    table.invalidate_step()
    assert [table.is_measurable(mark) for mark in (1, 5)] == [False, False]


def test_a_step_in_which_the_caches_grow_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    driver, marked, mark = Driver(models.path("llama")), list[bool](), BatchTable.mark_step

    def note(table: BatchTable, marks: int, *, grew: bool) -> None:
        marked.append(grew)
        mark(table, marks, grew=grew)

    monkeypatch.setattr(BatchTable, "mark_step", note)
    number = driver.ask("Hello!", ENDLESS)
    driver.until(lambda: len(driver.ids[number, 0]) > 300)
    assert {False, True} == set(marked)
    assert marked.count(True) < marked.count(False)
    driver.cancel(number)


def test_an_empty_table_has_no_steps_and_no_rows():
    table = BatchTable(dict)
    assert (bool(table), len(table), list(table), table.count_rows()) == (False, 0, [], 0)
    assert (table.count_rows_by_key(), table.sum_step_seconds()) == (Counter(), 0)


def test_the_memory_of_a_step_is_recorded_only_without_another_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = link(tmp_path / "models", llama=models.path("llama"), qwen3=models.path("qwen3"))
    driver, recorded = Driver(folder, prefix_cache_size="off", max_batch_size=8), list[str]()
    numbers = [driver.ask("Hello!", ENDLESS, model=model) for model in ("llama", "qwen3")]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 1 for number in numbers))
    monkeypatch.setattr(MlxPeakTracker, "measure_peak_drop", lambda _: 1)
    for model in ("llama", "qwen3"):
        estimator = driver.resident(model).estimator
        monkeypatch.setattr(estimator, "observe_step", lambda *_, model=model: recorded.append(model))
    for expected in ([], ["qwen3"]):
        driver.turn()
        driver.engine.parts.scheduler.synchronize()
        assert recorded == expected
        driver.cancel(numbers[0])


def test_a_step_of_every_batch_is_counted(tmp_path: Path):
    folder = link(tmp_path / "models", llama=models.path("llama"), qwen3=models.path("qwen3"))
    driver = Driver(folder, prefix_cache_size="off", max_batch_size=8)
    scheduler = driver.engine.parts.scheduler
    numbers = [driver.ask("Hello!", ENDLESS, model=model) for model in ("llama", "qwen3", "qwen3")]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 1 for number in numbers))
    assert [len(batch) for model in ("llama", "qwen3") for batch in driver.batches(model).values()] == [1, 2]
    seconds = [driver.resident(model).stats.step_seconds for model in ("llama", "qwen3")]
    assert min(seconds) > 0
    assert scheduler.sum_step_seconds() == sum(seconds)
    driver.cancel(numbers[0])
    assert scheduler.sum_step_seconds() == seconds[1]
    for number in numbers[1:]:
        driver.cancel(number)
    assert (len(driver.batches("qwen3")), scheduler.sum_step_seconds()) == (0, 0.0)
