"""The text engine while its memory cannot be read: it starts no new work, and releases nothing for that."""

import json
import time
from pathlib import Path

import pytest

from node.engine.memory import reserve
from node.memory.reading import POLL_PERIOD_SECONDS, RECENT_POLLS, STALE_AFTER_SECONDS
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from tests.support.readings import FailingSource, Later, failing
from wire.capacity.arithmetic import UNREADABLE
from wire.frames import (
    EngineReport,
    Finished,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
)
from wire.refusals import RefusalCode
from wire.report import MemoryLevel
from wire.units import GIB, MIB

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
BLIND = MemoryLimits(8 * GIB, 1, 64 * MIB, UNREADABLE)
"""The limits of an agent that has not been able to read its machine for long."""
QUESTION = next(one["prompt"] for one in models.answers() if "system" not in one)


def endless(tokens: int) -> GenerationParams:
    return GenerationParams(temperature=0.0, max_tokens=tokens, logit_bias=((EOS, -100.0),))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Later:
    made = Later()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.fixture
def two(tmp_path: Path) -> Driver:
    """Return an engine with two idle models, cached prefixes, and the last reserve."""
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(models.path("llama"))
    driver = Driver(tmp_path, max_batch_size=4, prefill_step_size=256, canary="1MiB")
    for name in ("a", "b"):
        driver.answer(QUESTION, model=name)
    for seconds in (2 * reserve.HEADROOM_BEFORE_REFILL_SECONDS, 3 * reserve.HEADROOM_BEFORE_REFILL_SECONDS):
        driver.engine.parts.emergency_reserve.maintain(time.monotonic() + seconds)
    assert driver.engine.parts.emergency_reserve.nbytes
    assert driver.engine.parts.prefix_cache.nbytes
    return driver


def report(driver: Driver) -> EngineReport:
    return driver.engine.report(time.monotonic())


def kept(driver: Driver) -> tuple[set[str], int, int]:
    """Return the memory that could be released: models, cached prefixes, the last reserve."""
    here = {model.name for model in report(driver).models if model.loaded}
    return here, driver.engine.parts.prefix_cache.nbytes, driver.engine.parts.emergency_reserve.nbytes


def sensor(driver: Driver) -> FailingSource:
    return failing(driver.engine.parts.footprint.sensor)


def refused(driver: Driver, model: str = "a") -> RefusalCode:
    end = driver.end(driver.ask(QUESTION, model=model))
    assert isinstance(end, Refusal)
    return end.refused.code


@pytest.mark.parametrize("blind", ["the machine", "the engine itself"])
def test_what_cannot_be_read_for_long_refuses_the_new_and_gives_up_nothing(two: Driver, blind: str, clock: Later):
    before = kept(two)
    if blind == "the engine itself":
        sensor(two).fails = True
        clock.by = STALE_AFTER_SECONDS + 1
        two.take(ROOMY)
    else:
        two.take(BLIND)
    for poll in range(1, 4):
        two.take(ReduceMemory(poll, MemoryLevel.OVER_SOFT))
    two.take(ReclaimMemory(1, 16 * MIB))
    two.take(LoadModel(99, "a"))
    assert refused(two) is RefusalCode.UNREADABLE
    assert refused(two, "b") is RefusalCode.UNREADABLE
    assert kept(two) == before
    assert report(two).counts.evictions == 0


@pytest.mark.parametrize("blind", ["the machine", "the engine itself"])
def test_a_running_answer_continues_while_memory_is_unreadable(two: Driver, blind: str, clock: Later):
    numbers = [two.ask(QUESTION, endless(100), model=name, expected=16) for name in ("a", "b")]
    two.until(lambda: all(two.ids[number, 0] for number in numbers))
    if blind == "the engine itself":
        sensor(two).fails = True
        clock.by = STALE_AFTER_SECONDS + 1
    else:
        two.take(BLIND)
    for number in numbers:
        end = two.end(number)
        assert isinstance(end, Finished)
        assert end.completion_tokens == 100
    assert report(two).counts.preemptions == 0


def test_one_failed_reading_refuses_no_request_and_follows_commitments_and_releases(two: Driver, clock: Later):
    source = sensor(two)
    good = report(two).memory
    assert good.phys is not None
    source.fails = True
    clock.by = 1.0
    memory = report(two).memory
    assert memory.phys == pytest.approx(good.phys, abs=8 * MIB)
    assert memory.age == pytest.approx(1.0, abs=0.5), "the reading has its age"
    weights = two.resident("a").weights
    two.engine.parts.unloader.unload("a")
    less = report(two).memory.phys
    assert less is not None
    assert good.phys - less > weights / 2
    assert isinstance(two.end(two.ask(QUESTION, model="b")), Finished)
    clock.by = STALE_AFTER_SECONDS + 2
    assert report(two).memory.phys is None, "not for ever"
    source.fails = False
    assert report(two).memory.phys is not None


@pytest.mark.parametrize("by", ["preempted", "rebuilt"])
def test_a_preempted_answer_waits_where_the_memory_cannot_be_read_and_comes_back(two: Driver, by: str, clock: Later):
    generation = two.engine.parts.scheduler
    number = two.ask(QUESTION, endless(60), model="a")
    two.until(lambda: len(two.ids[number, 0]) > 3)
    two.take(BLIND)
    if by == "preempted":
        generation.preemptor.preempt(generation.live[number])
    else:
        (batch,) = two.batches("a").values()
        batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    clock.leap = RECENT_POLLS * POLL_PERIOD_SECONDS  # no recent peak is left at any decision
    for _ in range(4):
        two.turn()
    clock.leap = 0.0
    assert two.ended(number) is None, "it is alone, no height will fall, and still it waits"
    assert report(two).running == 0
    two.take(ROOMY)
    end = two.end(number)
    assert isinstance(end, Finished)
    assert end.completion_tokens == 60


def test_what_is_kept_does_not_go_for_what_cannot_be_kept(two: Driver, monkeypatch: pytest.MonkeyPatch):
    """Reaching the limit must not evict old entries while the engine cannot know whether the new one fits."""
    number = two.ask(QUESTION + " And once more?", endless(40), model="a")
    two.until(lambda: len(two.ids[number, 0]) > 3)
    before = two.engine.parts.prefix_cache.nbytes
    monkeypatch.setattr("node.engine.kv.prefix_memory.AUTO_SHARE", before / BLIND.cap)
    two.take(BLIND)
    assert isinstance(two.end(number), Finished)
    assert two.engine.parts.prefix_cache.nbytes == before
