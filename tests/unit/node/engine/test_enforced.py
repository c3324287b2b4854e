"""The text engine with real models under the enforcer's orders: released memory, ended requests, and their refusals."""

import json
import time
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.footprint import release_free_memory
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from tests.support.readings import trailing
from wire.frames import (
    Channel,
    EngineReport,
    Failed,
    Finished,
    GenerationParams,
    MemoryLimits,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
)
from wire.refusals import RefusalCode
from wire.report import MemoryLevel
from wire.units import GIB, MIB

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
LONG = GenerationParams(temperature=0.0, max_tokens=400, logit_bias=((EOS, -100.0),))
ANSWERS = [one for one in models.answers() if "system" not in one and "reasoning" not in one]
SOFT, HARD = MemoryLevel.OVER_SOFT, MemoryLevel.OVER_HARD


@pytest.fixture
def driver() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)


def report(driver: Driver) -> EngineReport:
    return driver.engine.report(0.0)


def free_buffers(size: int) -> None:
    """Leave `size` free bytes in MLX's buffer cache."""
    mx.set_cache_limit(2 * size)
    held = mx.zeros((size // 4,))
    mx.eval(held)
    del held
    assert mx.get_cache_memory() >= size


def squeezed(driver: Driver, by: int) -> MemoryLimits:
    """Return limits whose ceiling is `by` bytes below the engine's footprint."""
    memory = report(driver).memory
    assert memory.phys is not None
    return MemoryLimits(memory.phys + GIB, max(memory.phys, memory.active) - by, 0, "dynamic")


def loaded(driver: Driver) -> set[str]:
    return {model.name for model in report(driver).models if model.loaded}


def three(folder: Path) -> Driver:
    """Return an engine with three models of which the first is pinned, used in their order."""
    for name in ("a", "b", "c"):
        (folder / name).symlink_to(models.path("llama"))
    driver = Driver(folder, preload=("a",), prefix_cache_size="off")
    for name in ("a", "b", "c"):
        driver.end(driver.ask("Hello!", GenerationParams(max_tokens=1), model=name))
    assert loaded(driver) == {"a", "b", "c"}
    return driver


def test_within_its_lines_an_order_costs_nothing(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    free_buffers(32 * MIB)
    driver.take(ReduceMemory(7, SOFT))
    assert mx.get_cache_memory() >= 32 * MIB
    assert len(loaded(driver)) == 1
    assert report(driver).enforced == 7


def test_over_soft_free_buffers_go_first_and_may_be_enough(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    free_buffers(64 * MIB)
    driver.take(squeezed(driver, 16 * MIB))
    driver.take(ReduceMemory(1, SOFT))
    assert mx.get_cache_memory() == 0
    assert len(loaded(driver)) == 1
    assert report(driver).counts.evictions == 0


def test_over_soft_idle_models_go_least_recently_used_first_and_only_as_many_as_it_takes(tmp_path: Path):
    driver = three(tmp_path)
    driver.take(squeezed(driver, MIB))
    driver.take(ReduceMemory(1, SOFT))
    assert loaded(driver) == {"a", "c"}, "the least recently used that is not pinned"
    assert report(driver).counts.evictions == 1


def test_over_soft_no_more_models_go_if_the_footprint_falls_late(tmp_path: Path):
    driver = three(tmp_path)
    trailing(driver.engine.parts.footprint.sensor, 0.5)
    driver.take(squeezed(driver, MIB))
    driver.take(ReduceMemory(1, SOFT))
    assert loaded(driver) == {"a", "c"}


def test_over_hard_nothing_is_freed_for_memory_that_leaves_the_footprint_soon(tmp_path: Path):
    driver = three(tmp_path)
    trailing(driver.engine.parts.footprint.sensor, 60.0)
    free_buffers(64 * MIB)
    driver.engine.report(time.monotonic())
    release_free_memory()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.phys is not None
    driver.take(MemoryLimits(memory.phys - 16 * MIB, memory.phys - 16 * MIB, 0, "static"))
    driver.take(ReduceMemory(1, HARD, 16 * MIB))
    assert driver.engine.parts.forwards.check_cap() is None
    assert loaded(driver) == {"a", "b", "c"}
    assert report(driver).enforced == 1


def test_memory_for_a_lease_has_left_the_footprint_before_the_answer(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    driver.take(squeezed(driver, -16 * MIB))
    trailing(driver.engine.parts.footprint.sensor, 0.3)
    free_buffers(64 * MIB)
    driver.engine.report(time.monotonic())
    driver.take(ReclaimMemory(1, 8 * MIB))
    assert driver.engine.report(time.monotonic()).freed_order == 1
    headroom = driver.engine.parts.memory.read_now().headroom
    assert headroom is not None
    assert headroom >= 8 * MIB


def test_over_soft_the_pinned_and_those_in_use_stay_whatever_is_missing(tmp_path: Path):
    driver = three(tmp_path)
    number = driver.ask("Hello!", LONG, model="b")
    driver.until(lambda: driver.ids[number, 0])
    driver.take(squeezed(driver, GIB // 8))
    driver.take(ReduceMemory(1, SOFT))
    assert loaded(driver) == {"a", "b"}
    assert driver.ended(number) is None
    driver.take(ROOMY)
    assert isinstance(driver.end(number), Finished)


def test_over_hard_the_newest_that_holds_memory_ends_and_the_others_go_on(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    old = driver.ask(ANSWERS[0]["prompt"])
    driver.until(lambda: driver.ids[old, 0])
    new = driver.ask("word " * 20, LONG)
    driver.until(lambda: driver.ids[new, 0])
    waits = driver.ask(ANSWERS[1]["prompt"])
    resident = driver.resident()
    before = resident.ledger.compute_stored_bytes()
    driver.take(ReduceMemory(1, HARD, GIB))
    end = driver.ended(new)
    assert isinstance(end, Failed)
    assert end.code == "memory_pressure"
    assert "1.0 GiB over its cap" in end.message
    assert resident.ledger.compute_stored_bytes() < before
    for number, one in ((old, ANSWERS[0]), (waits, ANSWERS[1])):
        assert isinstance(driver.end(number), Finished)
        assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    counts = report(driver).counts
    assert (counts.sheds, counts.failures) == (1, 0), "nothing failed"


def test_over_hard_what_was_not_delivered_is_refused_with_numbers_and_can_be_placed_elsewhere(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    number = driver.ask("word " * 4000)
    driver.turn()
    assert driver.ended(number) is None
    driver.take(ReduceMemory(1, HARD, GIB))
    end = driver.ended(number)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert end.refused.numbers is not None
    assert end.refused.numbers.cap == ROOMY.cap
    assert end.prompt_tokens is not None
    assert end.prompt_tokens > 4000
    assert report(driver).memory.reserved == 0


def test_each_order_ends_one(driver: Driver):
    numbers = [driver.ask("Hello!", LONG) for _ in range(3)]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    for poll, number in enumerate(reversed(numbers), 1):
        driver.take(ReduceMemory(poll, HARD, GIB))
        assert driver.ended(number)
        assert report(driver).enforced == poll
        assert report(driver).counts.sheds == poll
    driver.take(ReduceMemory(4, HARD, GIB))
    assert report(driver).enforced == 4, "with nothing left to end it answers all the same"
    assert report(driver).counts.sheds == 3


def test_over_hard_no_request_is_ended_where_freeing_memory_was_enough(driver: Driver):
    number = driver.ask("Hello!", LONG)
    driver.until(lambda: driver.ids[number, 0])
    free_buffers(64 * MIB)
    driver.take(ReduceMemory(1, HARD, 16 * MIB))
    assert mx.get_cache_memory() == 0
    assert driver.ended(number) is None
    assert isinstance(driver.end(number), Finished)
    assert report(driver).counts.sheds == 0


def test_what_a_shed_freed_counts_against_no_request(driver: Driver):
    driver.answer(ANSWERS[0]["prompt"])
    number = driver.ask("word " * 4000)
    for _ in range(12):
        driver.turn()
    driver.take(ReduceMemory(1, HARD, GIB))
    assert driver.ended(number)
    memory = report(driver).memory
    assert memory.recent <= max(memory.phys or 0, memory.active)


def test_the_report_has_the_number_of_the_limits_and_the_buffers_of_mlx(driver: Driver):
    assert report(driver).limits_number == 0
    driver.take(MemoryLimits(8 * GIB, 8 * GIB, 0, "static", number=5))
    assert report(driver).limits_number == 5
    free_buffers(32 * MIB)
    memory = report(driver).memory
    assert memory.cache >= 32 * MIB
    assert memory.peak >= 32 * MIB


def test_room_for_a_lease_is_made_of_idle_models_and_of_nothing_in_use(tmp_path: Path):
    driver = three(tmp_path)
    driver.take(squeezed(driver, -GIB))
    room = report(driver).memory.headroom
    assert room is not None
    driver.take(ReclaimMemory(1, room // 2))
    assert (loaded(driver), report(driver).freed_order) == ({"a", "b", "c"}, 1), "it fits as it is"
    driver.take(ReclaimMemory(2, 2 * GIB))
    assert (loaded(driver), report(driver).freed_order) == ({"a", "b", "c"}, 2), "nothing goes for what will not fit"
    driver.take(ReclaimMemory(3, room + 512 * 1024))
    assert "b" not in loaded(driver), "the least recently used goes"
    assert "a" in loaded(driver), "the pinned stays"
    assert report(driver).counts.evictions >= 1
