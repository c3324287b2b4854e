"""Admission near the ceiling."""

import time

from node.engine.memory.footprint import release_free_memory
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import estimate_request_need
from wire.frames import Finished, GenerationParams, MemoryLimits, Refusal
from wire.refusals import RefusalCode
from wire.units import GIB, MIB


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
