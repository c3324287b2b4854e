"""The last reserve: really held, counted, released first, and held again after there has been room for long."""

import os
import time

import pytest

from node.engine.memory.reserve import (
    CHECK_INTERVAL_SECONDS,
    HEADROOM_BEFORE_REFILL_SECONDS,
    MAX_RESERVE_BYTES,
    EmergencyReserve,
    compute_reserve_bytes,
)
from node.memory.sensor import open_sensor
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import GenerationParams, MemoryLimits, ReduceMemory
from wire.report import Memory, MemoryLevel
from wire.units import GIB, MIB


@pytest.mark.parametrize(
    ("setting", "cap", "size"),
    [
        ("auto", 96 * GIB, MAX_RESERVE_BYTES),
        ("auto", GIB, int(GIB * 0.01)),
        ("auto", 0, 0),
        ("off", GIB, 0),
        ("64MiB", GIB, 64 * MIB),
    ],
)
def test_it_is_one_percent_of_the_cap_and_256_mib_at_most(setting: str, cap: int, size: int):
    assert compute_reserve_bytes(setting, cap) == size


def held(canary: EmergencyReserve, now: float = 0.0) -> float:
    """Advance the time until the reserve is held; return the time."""
    end = now + HEADROOM_BEFORE_REFILL_SECONDS + 2 * CHECK_INTERVAL_SECONDS
    while not canary.nbytes and now < end:
        canary.maintain(now)
        now += CHECK_INTERVAL_SECONDS / 2
    return now


def test_its_pages_are_charged_to_the_process_and_are_back_at_once():
    sensor = open_sensor(os.getpid())
    canary = EmergencyReserve("64MiB", lambda: Memory(headroom=GIB))
    canary.resize(GIB)
    before = sensor.read_footprint().phys
    held(canary)
    during = sensor.read_footprint().phys
    canary.release()
    after = sensor.read_footprint().phys
    assert before is not None
    assert during is not None
    assert after is not None
    assert during - before >= 63 * MIB
    assert during - after >= 63 * MIB


def test_the_engine_works_without_a_reserve_that_the_system_does_not_give():
    canary = EmergencyReserve("1048576GiB", lambda: Memory(headroom=2**60))  # more than the address space of a process
    canary.resize(GIB)
    now = held(canary)
    assert (canary.nbytes, canary.mapping) == (0, None)
    due = canary.find_next_check()
    assert due is not None
    assert due >= now - CHECK_INTERVAL_SECONDS, "it is tried again later"


def test_it_is_random_page_by_page():
    canary = EmergencyReserve("3MiB", lambda: Memory(headroom=GIB))
    canary.resize(GIB)
    held(canary)
    assert canary.mapping is not None
    assert all(len(set(canary.mapping[start : start + 4096])) > 200 for start in range(0, 3 * MIB, 4096))


def test_it_is_taken_only_after_ten_seconds_with_twice_its_room():
    room = [4 * MIB]
    canary = EmergencyReserve("2MiB", lambda: Memory(headroom=room[0]))
    assert canary.find_next_check() is None, "not before there is a cap"
    canary.resize(GIB)
    canary.maintain(0.0)
    assert canary.find_next_check() == HEADROOM_BEFORE_REFILL_SECONDS, "without headroom the check is delayed"
    room[0] += 1
    canary.maintain(HEADROOM_BEFORE_REFILL_SECONDS)
    for second in range(1, 10):
        canary.maintain(HEADROOM_BEFORE_REFILL_SECONDS + second)
    assert canary.nbytes == 0
    room[0] -= 1
    canary.maintain(2 * HEADROOM_BEFORE_REFILL_SECONDS)
    assert canary.nbytes == 0, "it was not roomy all the time"
    room[0] += 1
    end = held(canary, 3 * HEADROOM_BEFORE_REFILL_SECONDS)
    assert canary.nbytes == 2 * MIB
    assert end - 3 * HEADROOM_BEFORE_REFILL_SECONDS >= HEADROOM_BEFORE_REFILL_SECONDS
    assert canary.find_next_check() is None


def test_the_memory_is_read_only_when_a_check_is_due():
    reads: list[int] = []

    def read() -> Memory:
        reads.append(1)
        return Memory(headroom=GIB)

    canary = EmergencyReserve("2MiB", read)
    canary.resize(GIB)
    canary.maintain(5.0)
    assert canary.find_next_check() == 5.0 + CHECK_INTERVAL_SECONDS
    canary.maintain(5.0 + CHECK_INTERVAL_SECONDS / 2)
    assert len(reads) == 1
    canary.maintain(5.0 + HEADROOM_BEFORE_REFILL_SECONDS)
    assert (len(reads), canary.nbytes) == (2, 2 * MIB), "there was room for exactly this time"
    canary.maintain(100.0)
    assert (len(reads), canary.nbytes) == (2, 2 * MIB), "nothing is due while it is held"


def test_without_room_the_next_check_is_later():
    canary = EmergencyReserve("2MiB", lambda: Memory(headroom=0))
    canary.resize(GIB)
    canary.maintain(5.0)
    assert canary.find_next_check() == 5.0 + HEADROOM_BEFORE_REFILL_SECONDS


def test_an_unknown_footprint_is_no_room():
    canary = EmergencyReserve("2MiB", lambda: Memory(headroom=None))
    canary.resize(GIB)
    held(canary)
    assert canary.nbytes == 0


def test_the_reserve_is_released_under_a_smaller_cap():
    canary = EmergencyReserve("auto", lambda: Memory(headroom=GIB))
    canary.resize(GIB)
    held(canary)
    assert canary.nbytes > 10 * MIB
    canary.resize(GIB)
    assert canary.nbytes > 0, "the same cap again changes nothing"
    canary.resize(GIB // 2)
    assert canary.nbytes == 0


def a_driver() -> Driver:
    driver = Driver(models.path("llama"), canary="48MiB")
    driver.answer("Hello!")
    held(driver.engine.parts.emergency_reserve, time.monotonic() + CHECK_INTERVAL_SECONDS)
    assert driver.engine.parts.emergency_reserve.nbytes == 48 * MIB
    return driver


def test_the_reserve_is_reported_as_reusable():
    driver = a_driver()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.reserve == 48 * MIB
    assert memory.reusable >= 48 * MIB
    driver.engine.parts.emergency_reserve.release()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.reserve == 0


def test_the_reserve_is_released_before_the_prefix_cache_and_models():
    driver = a_driver()
    kept = driver.engine.parts.prefix_cache.nbytes
    assert kept > 0
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    room = 8 * MIB
    tight = memory.current + memory.reserved + room
    driver.take(MemoryLimits(tight, tight, 0, "static"))
    assert driver.engine.parts.emergency_reserve.nbytes == 48 * MIB, "nothing was short yet"
    assert driver.engine.parts.model_manager.free_memory(room + 24 * MIB)
    assert driver.engine.parts.emergency_reserve.nbytes == 0
    assert driver.engine.parts.prefix_cache.nbytes == kept
    assert driver.default in driver.engine.parts.models.loaded


def test_the_enforcers_word_takes_it_first():
    driver = a_driver()
    kept = driver.engine.parts.prefix_cache.nbytes
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    tight = memory.current - 24 * MIB  # half of the reserve: a reading may fall meanwhile
    driver.engine.gate.set_limits(MemoryLimits(tight, tight, 0, "static"))
    driver.take(ReduceMemory(1, MemoryLevel.OVER_SOFT))
    assert driver.engine.parts.emergency_reserve.nbytes == 0
    assert driver.engine.parts.prefix_cache.nbytes == kept


def test_lower_limits_take_it_at_once():
    driver = a_driver()
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    tight = memory.current - 24 * MIB
    driver.take(MemoryLimits(tight, tight, 0, "static"))
    assert driver.engine.parts.emergency_reserve.nbytes == 0


def test_a_released_reserve_is_not_checked_while_a_request_waits():
    driver = a_driver()
    parts = driver.engine.parts
    number = driver.ask("Hello!", GenerationParams(max_tokens=60))
    driver.until(lambda: driver.ids[number, 0])
    parts.emergency_reserve.release()
    parts.scheduler.preemptor.preempt(parts.scheduler.live[number])
    now = time.monotonic()
    parts.scheduler.preemptor.return_at = now + 0.1
    due = driver.engine.next_step_at(now)
    assert due is not None
    assert now < due <= now + 0.1


def test_an_engine_at_rest_looks_for_it_and_takes_it():
    driver = Driver(models.path("llama"), canary="2MiB")
    engine = driver.engine
    now = time.monotonic()
    due = engine.next_step_at(now)
    assert due is not None
    for _ in range(40):
        now = max(now, due)
        list(engine.step(now))
        due = engine.next_step_at(now)
        if due is None:
            break
        due = max(due, now + 0.1)
    assert engine.parts.emergency_reserve.nbytes == 2 * MIB
