"""Admission near the ceiling."""

import json
import time

import pytest

from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from node.engine.request_admission import PREEMPTION_INTERVAL_SECONDS
from node.engine.scheduling.preemptor import Preemptor
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import estimate_request_need
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    Admitted,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    Refusal,
)
from wire.refusals import RefusalCode
from wire.units import GIB, KIB, MIB

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
LONG_TOKENS = 1500
ORDER = 900
LONG = GenerationParams(temperature=0.0, max_tokens=LONG_TOKENS, logit_bias=((EOS, -100.0),))
SHORT = GenerationParams(temperature=0.0, max_tokens=2)


def ask_at(driver: Driver, now: float, key: str) -> Frame:
    """Send a long request of a key at the monotonic time `now`; return its only answer."""
    driver.number += 1
    message = Message("user", "hello")
    frame = Generate(
        driver.number,
        driver.number,
        f"r{driver.number}",
        driver.default,
        (message,),
        LONG,
        0,
        weighted_key=WeightedKey(key),
        expected=LONG_TOKENS,
    )
    work = driver.engine.prepare(frame)
    assert work is not None
    (answer,) = driver.engine.handle(work, now)
    assert isinstance(answer, Admitted | Refusal)
    return answer


def squeeze_until_missing(driver: Driver, key: str, missing: int) -> None:
    """Lower the ceiling until `missing` bytes are missing for a long request of a key, which must have no room at all
    before that."""
    release_free_memory()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current, 0, "dynamic"))
    refusal = ask_at(driver, time.monotonic(), key)
    assert isinstance(refusal, Refusal)
    numbers = refusal.refused.numbers
    assert numbers is not None
    assert numbers.current is not None
    assert numbers.estimate > missing
    ceiling = numbers.current + numbers.reserved + numbers.estimate - missing
    driver.take(MemoryLimits(8 * GIB, ceiling, 0, "dynamic"))


def test_the_next_preemption_for_a_key_waits_until_memory_of_the_last_one_can_have_returned():
    driver = Driver(models.path("llama"), max_batch_size=8, prefix_cache_size="off")
    driver.answer("hello", SHORT)
    greedy = [driver.ask("hello", LONG, weighted_key=WeightedKey("greedy"), expected=LONG_TOKENS) for _ in range(4)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in greedy))
    half_a_row = compute_row_bytes(driver.resident().kv, LONG_TOKENS) // 2

    def count_preemptions() -> int:
        return driver.engine.report(time.monotonic()).counts.preemptions

    squeeze_until_missing(driver, "ada", half_a_row)
    now = time.monotonic()
    assert isinstance(ask_at(driver, now, "ada"), Admitted)
    assert count_preemptions() == 1
    squeeze_until_missing(driver, "bea", half_a_row)
    for later in (0.0, PREEMPTION_INTERVAL_SECONDS - 0.01):
        refusal = ask_at(driver, now + later, "bea")
        assert isinstance(refusal, Refusal)
        assert refusal.refused.code is RefusalCode.NO_ROOM
        assert count_preemptions() == 1
    assert isinstance(ask_at(driver, now + PREEMPTION_INTERVAL_SECONDS, "bea"), Admitted)
    assert count_preemptions() == 2


def test_a_prompt_that_is_refused_before_its_tokenization_holds_nothing():
    driver = Driver(models.path("llama"), prefix_cache_size="off")
    driver.take(LoadModel(ORDER, driver.default))
    assert isinstance(driver.end(ORDER), Finished)
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFLIGHT
    end = driver.end(driver.ask("hello", SHORT))
    assert (isinstance(end, Refusal), driver.engine.parts.preparer.tokenizers) == (True, {})
    assert (driver.resident().usage.users, driver.engine.report(time.monotonic()).waiting) == (0, 0)


def test_choices_that_ended_on_another_node_need_no_memory():
    driver, estimates = Driver(models.path("llama"), prefix_cache_size="off"), list[int]()
    driver.answer("hello", SHORT)  # its tokenizer is loaded: the only check is that of the admission

    def refuse(site: GateSite, estimate: int) -> bool:
        if site is GateSite.PREFLIGHT:
            estimates.append(estimate)
        return site is GateSite.PREFLIGHT

    driver.gate.refuses = refuse
    whole, begun = (5,) * LONG_TOKENS, (5, 5)
    for resume in ((begun,), (whole, begun, whole), (begun, begun)):
        params = GenerationParams(temperature=0.0, max_tokens=LONG_TOKENS, n=len(resume))
        assert isinstance(driver.end(driver.ask("hello", params, resume=resume, expected=LONG_TOKENS)), Refusal)
    one, one_of_three, two = estimates[::2]  # each is checked again after memory was freed
    assert one == one_of_three < two


def test_what_is_missing_below_the_ceiling_is_preempted_as_well(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(models.path("llama"), max_batch_size=8, prefix_cache_size="off")
    driver.answer("hello", SHORT)
    greedy = driver.ask("hello", LONG, weighted_key=WeightedKey("greedy"), expected=LONG_TOKENS)
    driver.until(lambda: driver.ids[greedy, 0])
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(Preemptor, "preempt_for_key", lambda _, key, need, missing: asked.append((need, missing)))
    release_free_memory()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current + memory.reserved - 64 * MIB, 0, "dynamic"))
    refusal = ask_at(driver, time.monotonic(), "ada")
    assert isinstance(refusal, Refusal)
    numbers, ((need, missing),) = refusal.refused.numbers, asked
    assert numbers is not None
    assert numbers.headroom is not None
    assert numbers.headroom < -32 * MIB
    assert missing >= need - numbers.headroom


def test_memory_is_freed_for_a_new_request_and_the_preempted_one_before_it():
    """The request alone would fit. The preempted request needs its bytes first, so that an idle model is unloaded."""
    driver = Driver(models.path("llama"), models.path("qwen3"), max_batch_size=8, prefix_cache_size="off")
    idle = models.path("qwen3").name
    driver.answer("hello", SHORT, model=idle)
    driver.answer("hello", SHORT)
    first, second = (driver.ask("hello", LONG, expected=LONG_TOKENS) for _ in range(2))
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in (first, second)))
    scheduler = driver.engine.parts.scheduler
    scheduler.preemptor.preempt(scheduler.live[second])
    missing = 256 * KIB
    assert scheduler.compute_required_bytes() > missing, "without the bytes of the preempted request there is room"
    assert driver.resident(idle).weights > missing
    squeeze_until_missing(driver, "", missing)
    assert set(driver.engine.parts.models.loaded) == {driver.default, idle}
    assert isinstance(ask_at(driver, time.monotonic(), ""), Admitted)
    assert set(driver.engine.parts.models.loaded) == {driver.default}


def test_a_request_does_not_evict_its_own_model():
    driver = Driver(models.path("llama"), prefix_cache_size="off")
    driver.answer("hello", GenerationParams(temperature=0.0, max_tokens=2))
    release_free_memory()
    driver.engine.parts.footprint.reset_peak()
    report = driver.engine.report(time.monotonic())
    assert report.memory.current is not None
    prompt, params = "word " * 380, GenerationParams(temperature=0.0, max_tokens=2)
    driver.take(MemoryLimits(8 * GIB, report.memory.current, 0, "dynamic"))
    first = driver.end(driver.ask(prompt, params))
    assert isinstance(first, Refusal)
    assert first.prompt_tokens is not None
    needed, refused = estimate_request_need(report.models[0], first.prompt_tokens, 2), 0
    for missing in range(0, 4 * MIB, MIB // 4):
        driver.take(MemoryLimits(8 * GIB, report.memory.current + needed - missing, 0, "dynamic"))
        end = driver.end(driver.ask(prompt, params))
        refused += isinstance(end, Refusal) and end.refused.code is RefusalCode.NO_ROOM
        assert driver.default in driver.engine.parts.models.loaded
    assert refused > 2
    driver.take(ROOMY)
    assert isinstance(driver.end(driver.ask("word " * 380, GenerationParams(max_tokens=2))), Finished)


def test_a_cancel_that_comes_first_drops_one_request_and_the_highest_sequence_number_is_acknowledged():
    driver = Driver(models.path("llama"))

    def send(number: int, seq: int) -> int:
        params = GenerationParams(max_tokens=2, temperature=0.0)
        driver.take(Generate(number, seq, "r", driver.default, (Message("user", "Hello!"),), params, 0))
        return driver.engine.report(time.monotonic()).acked_seq

    assert send(1, 2) == 2
    assert isinstance(driver.end(1), Finished)
    driver.cancel(7)
    assert (send(7, 5), driver.said[7]) == (5, [])
    assert send(8, 3) == 5
    assert send(7, 6) == 6
    assert [isinstance(driver.end(number), Finished) for number in (7, 8)] == [True, True]
