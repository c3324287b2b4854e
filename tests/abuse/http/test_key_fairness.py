"""One key holds all rows, or all memory, of a real engine with long answers; another key asks for four tokens."""

import json
import time

import pytest

from node.engine.memory.footprint import release_free_memory
from node.engine.scheduling.prefill import Prefill
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.fairness import WeightedKey
from wire.frames import Finished, GenerationParams, MemoryLimits, Refusal
from wire.units import GIB, KIB

GREEDY_KEY, OTHER = WeightedKey("greedy", 4), WeightedKey("other", 4)
ROWS, LONG = 4, 80
EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
FOUR = GenerationParams(temperature=0.0, max_tokens=4)
ENDLESS = GenerationParams(temperature=0.0, max_tokens=LONG, logit_bias=((EOS, -100.0),))


@pytest.fixture
def driver() -> Driver:
    made = Driver(models.path("llama"), max_batch_size=ROWS, prefill_step_size=256)
    made.answer("hello", FOUR)
    return made


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """Return the tokens of a long answer that nothing interrupts."""
    driver = Driver(models.path("llama"), max_batch_size=ROWS, prefill_step_size=256)
    number = driver.ask("hello", ENDLESS)
    driver.end(number)
    return driver.ids[number, 0]


def fill(driver: Driver, count: int) -> list[int]:
    """Fill all rows with requests of one key, and queue more of them."""
    numbers = [driver.ask("hello", ENDLESS, weighted_key=GREEDY_KEY) for _ in range(count)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in numbers[:ROWS]))
    return numbers


def turns_to_first(driver: Driver, key: WeightedKey) -> tuple[int, int]:
    number, before = driver.ask("Hello!", FOUR, weighted_key=key), driver.turns
    driver.until(lambda: driver.ids[number, 0])
    return number, driver.turns - before


def preemptions(driver: Driver) -> int:
    return driver.engine.report(time.monotonic()).counts.preemptions


def test_short_request_of_another_key_is_served_promptly(driver: Driver, alone: list[int]):
    _, quiet = turns_to_first(driver, OTHER)
    numbers = fill(driver, 3 * ROWS)
    other, turns = turns_to_first(driver, OTHER)
    assert turns <= 2 * quiet, f"{turns} turns, {quiet} in quiet"
    assert preemptions(driver) == 1, "one row is enough"
    assert isinstance(driver.end(other), Finished)
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
        assert driver.ids[number, 0] == alone, "what was preempted is resumed word for word"


def test_preempted_request_is_queued_with_all_keys(driver: Driver):
    """Otherwise it would take back its row before a new request of the other key."""
    fill(driver, ROWS)
    turns_to_first(driver, OTHER)
    (sequence,) = driver.engine.parts.scheduler.preempted
    resident = driver.resident()
    returning = Prefill(resident, sequence, list(sequence.iterate_active_rows()), list(sequence.prompt))
    assert (bool(sequence.joined), returning.answered) == (True, False)


def test_a_key_alone_has_all_rows_and_nothing_is_preempted(driver: Driver):
    numbers = fill(driver, 2 * ROWS)
    assert driver.engine.report(time.monotonic()).running == ROWS
    for number in numbers:
        driver.end(number)
    assert preemptions(driver) == 0


def test_two_keys_with_many_requests_have_half_of_the_rows_each_and_take_none_back(driver: Driver):
    numbers = fill(driver, 2 * ROWS)
    others = [driver.ask("hello", ENDLESS, weighted_key=OTHER) for _ in range(2 * ROWS)]
    driver.until(lambda: sum(bool(driver.ids[number, 0]) for number in others) == ROWS // 2)
    for _ in range(20):
        driver.turn()
    assert preemptions(driver) == ROWS // 2
    assert sum(bool(driver.ids[number, 0]) for number in others) == ROWS // 2
    for number in (*numbers, *others):
        assert isinstance(driver.end(number), Finished)
    assert preemptions(driver) <= ROWS, "no row goes to and fro"


def test_a_key_with_more_weight_has_more_rows(driver: Driver):
    fill(driver, ROWS)
    others = [driver.ask("hello", ENDLESS, weighted_key=WeightedKey("vip", 12)) for _ in range(ROWS)]
    driver.until(lambda: sum(bool(driver.ids[number, 0]) for number in others) == 3)
    assert preemptions(driver) == 3


def squeeze(driver: Driver, room: int) -> None:
    """Leave `room` bytes above the current footprint and reservations."""
    release_free_memory()
    driver.take(ROOMY)
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current + memory.reserved + room, 0, "dynamic"))


def test_another_key_is_admitted_where_one_has_taken_all_memory():
    """The newest request of the key that holds the memory is preempted at once, and returns when there is room."""
    driver = Driver(models.path("llama"), max_batch_size=ROWS, prefill_step_size=256, prefix_cache_size="off")
    driver.answer("hello", FOUR)
    numbers = [driver.ask("hello", ENDLESS, weighted_key=GREEDY_KEY, expected=LONG) for _ in range(ROWS)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in numbers))
    squeeze(driver, 0)
    mine = driver.ask("Hello!", FOUR, weighted_key=GREEDY_KEY)
    (refusal,) = driver.said[mine]
    assert isinstance(refusal, Refusal)
    assert refusal.refused.numbers is not None
    squeeze(driver, refusal.refused.numbers.estimate - 64 * KIB)
    again = driver.ask("Hello!", FOUR, weighted_key=GREEDY_KEY)
    assert not driver.admitted(again), "a key does not preempt its own requests"
    other = driver.ask("Hello!", FOUR, weighted_key=OTHER)
    assert driver.admitted(other)
    assert preemptions(driver) == 1
    assert isinstance(driver.end(other), Finished)
    driver.take(ROOMY)
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
