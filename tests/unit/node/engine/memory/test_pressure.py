"""The text engine with little memory: chunks shrink, prompts wait, the newest request is preempted and returns.

The tests lower the ceiling relative to the readings of this process.
"""

import json
import time

import mlx.core as mx
import pytest

from node.engine.kv.kv_cache import sum_nbytes
from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import estimate_request_transient
from wire.capacity.batches import compute_padded_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import Failed, Finished, GenerationParams, MemoryLimits, Refusal
from wire.refusals import RefusalCode
from wire.report import BatchGroup, EngineCounters
from wire.units import GIB, MIB

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
SHORT = [one for one in models.answers() if "system" not in one and "reasoning" not in one]


def endless(tokens: int) -> GenerationParams:
    return GenerationParams(temperature=0.0, max_tokens=tokens, logit_bias=((EOS, -100.0),))


@pytest.fixture
def driver() -> Driver:
    made = Driver(
        models.path("llama"), max_batch_size=8, prefill_step_size=512, min_prefill_step=64, prefix_cache_size="off"
    )
    made.answer(SHORT[0]["prompt"])
    return made


def squeeze(driver: Driver, room: int) -> None:
    """Leave `room` bytes above the current footprint and commitments."""
    release_free_memory()
    driver.take(ROOMY)
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current + memory.reserved + room, 0, "dynamic"))


def counts(driver: Driver) -> EngineCounters:
    return driver.engine.report(time.monotonic()).counts


def row(driver: Driver, tokens: int) -> int:
    """Return the bytes of a row."""
    return compute_padded_bytes(BatchGroup(1, tokens, tokens), driver.engine.report(time.monotonic()).models[0].kv)


def test_a_chunk_is_made_smaller_before_it_is_refused(driver: Driver):
    prompt, wide = "word " * 600, endless(4)
    number = driver.ask(prompt, wide)
    driver.end(number)
    expected = driver.ids[number, 0]
    estimator = driver.resident().estimator
    number = driver.ask(prompt, wide)
    assert driver.admitted(number)
    squeeze(driver, (estimator.estimate_chunk(64, 1500) + estimator.estimate_chunk(512, 1500)) // 2)
    before = counts(driver).shrinks
    assert isinstance(driver.end(number), Finished)
    assert counts(driver).shrinks > before
    assert driver.ids[number, 0] == expected, "chunks of any size write the same"


def test_of_four_long_prompts_with_room_for_two_two_run_to_their_end_and_none_is_refused_on_the_way():
    driver = Driver(models.path("llama"), prefix_cache_size="off", prefill_step_size=256)
    driver.end(driver.ask("word " * 680, endless(1)))  # the first long prompt makes the process larger
    model = driver.engine.report(time.monotonic()).models[0]
    squeeze(driver, int(2.9 * row(driver, 2100)) + estimate_request_transient(model, 2050, 8))
    numbers = [driver.ask(f"{one} " + "word " * 680, endless(8), expected=8) for one in range(4)]
    admitted = [number for number in numbers if driver.admitted(number)]
    assert len(admitted) == 2, [driver.ended(number) for number in numbers]
    turned_away = [driver.ended(number) for number in numbers if number not in admitted]
    for end in turned_away:
        assert isinstance(end, Refusal), "refused at admission, before any prefill: the router queues the request"
        assert end.refused.code is RefusalCode.NO_ROOM
    for number in admitted:
        assert isinstance(driver.end(number), Finished)


def test_a_prefill_that_does_not_fit_waits_for_those_who_will_end(driver: Driver):
    first = driver.ask("hello", endless(50))
    driver.until(lambda: len(driver.ids[first, 0]) > 2)
    number = driver.ask("word " * 400, endless(4))
    driver.turn()
    held = driver.engine.report(time.monotonic()).memory.ceiling
    squeeze(driver, -2 * MIB)
    for _ in range(20):
        driver.turn()
    assert driver.ended(number) is None, "it waits"
    assert driver.engine.gate.refusals[GateSite.PREFILL] > 0
    assert driver.engine.parts.scheduler.compute_required_bytes() > 0, "and newcomers let it pass"
    driver.take(MemoryLimits(8 * GIB, held, 0, "dynamic"))
    assert isinstance(driver.end(number), Finished)
    assert isinstance(driver.end(first), Finished)
    assert driver.engine.parts.scheduler.compute_required_bytes() == 0


def test_a_row_whose_join_has_no_room_joins_later(driver: Driver):
    first = driver.ask("hello", endless(100))
    driver.until(lambda: len(driver.ids[first, 0]) > 2)
    driver.gate.refuses = lambda site, need: site is GateSite.JOIN
    number, asked = driver.ask(SHORT[0]["prompt"], endless(8)), driver.gate.checks[GateSite.JOIN]
    driver.until(lambda: driver.gate.checks[GateSite.JOIN] > asked + 2)
    assert driver.ended(number) is None, "its prompt is written, it waits"
    assert not driver.ids[number, 0]
    driver.gate.refuses = lambda site, need: False
    assert isinstance(driver.end(number), Finished)
    alone = driver.ask(SHORT[0]["prompt"], endless(8))
    driver.end(alone)
    assert driver.ids[number, 0] == driver.ids[alone, 0]
    driver.cancel(first)


def test_a_row_that_outgrows_its_promise_makes_the_newest_give_way_which_comes_back_word_for_word(driver: Driver):
    asked = [(one["prompt"], endless(50)) for one in SHORT[:3]]
    alone: list[list[int]] = []
    for prompt, params in asked:
        number = driver.ask(prompt, params, expected=16)
        driver.end(number)
        alone.append(driver.ids[number, 0])
    stays = driver.ask("hello", endless(250), expected=250)
    numbers = [driver.ask(prompt, params, expected=16) for prompt, params in asked]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    squeeze(driver, -8 * MIB)
    driver.until(lambda: counts(driver).preemptions)
    assert driver.ended(stays) is None, "its promise holds"
    assert not any(isinstance(driver.ended(number), Failed) for number in numbers)
    assert driver.ended(numbers[0]) is None, "the oldest stays"
    refused = driver.engine.gate.refusals[GateSite.PREFLIGHT]
    driver.until(lambda: driver.engine.gate.refusals[GateSite.PREFLIGHT] > refused)  # checked before its return
    squeeze(driver, 64 * MIB)
    for number, expected in zip(numbers, alone, strict=True):
        assert isinstance(driver.end(number), Finished)
        assert driver.ids[number, 0] == expected
    driver.cancel(stays)
    assert driver.engine.report(time.monotonic()).memory.reserved == 0


def test_who_waits_for_a_row_gives_way_before_any_answer_does_and_first_of_who_has_most():
    driver = Driver(
        models.path("llama"), max_batch_size=2, prefill_step_size=512, min_prefill_step=64, prefix_cache_size="off"
    )
    driver.answer(SHORT[0]["prompt"])
    running = [driver.ask("hello", endless(40), expected=16, weighted_key=WeightedKey(name)) for name in ("ada", "dia")]
    greedy = [driver.ask("hello", endless(1500), expected=1500, weighted_key=WeightedKey("greedy")) for _ in range(3)]
    bob = driver.ask("hello", endless(1500), expected=1500, weighted_key=WeightedKey("bob"))
    driver.until(lambda: all(driver.ids[number, 0] for number in running))
    squeeze(driver, 0)
    driver.until(lambda: any(driver.ended(number) for number in (*running, *greedy, bob)))
    ends = {number: end for number in (*running, *greedy, bob) if (end := driver.ended(number)) is not None}
    assert list(ends) == [greedy[-1]], "the newest request of the key with the most requests"
    assert isinstance(ends[greedy[-1]], Refusal), "nothing of it is lost"
    driver.take(ROOMY)
    for number in running:
        assert isinstance(driver.end(number), Finished)
    assert counts(driver).preemptions == 0


def test_who_is_alone_and_outgrows_the_machine_ends_with_the_numbers(driver: Driver):
    number = driver.ask(SHORT[0]["prompt"], endless(400), expected=16)
    driver.until(lambda: driver.ids[number, 0])
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current // 2, 0, "dynamic"))
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert end.code == "no_headroom"
    assert "headroom is" in end.message
    driver.take(ROOMY)
    assert driver.answer(SHORT[1]["prompt"]) == SHORT[1]["answer"]


def test_what_gave_way_can_be_cancelled_and_leaves_nothing(driver: Driver):
    """One request whose reservation suffices stays. All preempted requests wait for it."""
    stays = driver.ask("hello", endless(250), expected=250)
    numbers = [driver.ask(one["prompt"], endless(50), expected=16) for one in SHORT[:2]]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    squeeze(driver, -8 * MIB)
    driver.until(lambda: counts(driver).preemptions)
    driver.cancel(numbers[1])
    driver.take(ROOMY)
    assert isinstance(driver.end(numbers[0]), Finished)
    driver.cancel(stays)
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)
    assert driver.ended(numbers[1]) is None


@pytest.mark.parametrize("decodes", [False, True])
def test_a_cancelled_prompt_leaves_nothing_in_the_pool(driver: Driver, decodes: bool):
    """Pooled buffers are also memory of the process: another program would have to wait for them."""
    first = driver.ask("hello", endless(300)) if decodes else None
    driver.until(lambda: first is None or driver.ids[first, 0])
    release_free_memory()
    held = mx.get_active_memory() + mx.get_cache_memory()
    number = driver.ask("word " * 600, endless(4))
    driver.until(lambda: any(one.stored_tokens > 700 for one in driver.engine.parts.scheduler.prefills))
    (prefill,) = driver.engine.parts.scheduler.prefills
    written = sum_nbytes(prefill.cache or [])
    driver.cancel(number)
    assert written > MIB // 2
    assert mx.get_active_memory() + mx.get_cache_memory() < held + written // 2


def test_a_forecast_that_did_not_hold_ends_that_request_and_no_other(driver: Driver):
    first = driver.ask(SHORT[0]["prompt"], endless(60))
    driver.until(lambda: driver.ids[first, 0])
    number = driver.ask("word " * 600, endless(4))
    driver.until(lambda: driver.engine.parts.scheduler.measure_load()[1])
    memory = driver.engine.report(time.monotonic()).memory
    driver.take(MemoryLimits(max(memory.active, memory.phys or 0) + MIB, 8 * GIB, 0, "dynamic"))
    driver.until(lambda: driver.ended(number))
    end = driver.ended(number)
    assert isinstance(end, Refusal), end
    assert "over its cap" in end.refused.message
    assert counts(driver).overs >= 1
    driver.take(ROOMY)
    assert isinstance(driver.end(first), Finished)


def test_newcomers_do_not_pass_those_who_gave_way(driver: Driver):
    numbers = [driver.ask(one["prompt"], endless(100), expected=16) for one in SHORT[:2]]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    squeeze(driver, -8 * MIB)
    driver.until(lambda: counts(driver).preemptions)
    wanted = driver.engine.parts.scheduler.compute_required_bytes()
    assert wanted > 0
    report = driver.engine.report(time.monotonic())
    assert report.memory.reserved >= wanted, "the router sees the bytes as reserved"
    for number in numbers:
        driver.cancel(number)
    assert driver.engine.parts.scheduler.compute_required_bytes() == 0
