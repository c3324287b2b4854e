"""Illegal events, which are errors of this program: each ends one request, and the engine keeps running."""

import json

import pytest

from node.engine.scheduling.rules.row_state import RowEvent, RowState
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import Failed, Finished, GenerationParams

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = GenerationParams(temperature=0.0, max_tokens=60, logit_bias=((EOS, -100.0),))


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), max_batch_size=4, prefill_step_size=64, min_prefill_step=32)
    driver.answer("hello")
    return driver


def decoding(driver: Driver, count: int) -> list[int]:
    numbers = [driver.ask("hello", ENDLESS) for _ in range(count)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in numbers))
    return numbers


def ends_alone(driver: Driver, broken: int, other: int, event: str) -> None:
    """Check that only the request with the illegal event fails, with its state and event."""
    end = driver.end(broken)
    assert isinstance(end, Failed)
    assert event in end.message
    assert isinstance(driver.end(other), Finished)
    assert driver.engine.check() == []
    assert driver.engine.report(0.0).memory.reserved == 0
    assert driver.engine.report(0.0).counts.failures == 1


def test_an_illegal_event_of_a_row_that_is_preempted_fails_its_request_alone(driver: Driver):
    broken, other = decoding(driver, 2)
    sequence = driver.engine.parts.scheduler.live[broken]
    sequence.rows[0].state = RowState.REBUILD
    driver.engine.parts.scheduler.preemptor.preempt(sequence)
    ends_alone(driver, broken, other, "preempted is illegal for a row in the state rebuild")


def test_an_illegal_event_in_a_rebuild_fails_its_request_alone(driver: Driver):
    broken, other = decoding(driver, 2)
    driver.engine.parts.scheduler.live[broken].rows[0].state = RowState.JOIN
    (batch,) = driver.batches().values()
    batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    ends_alone(driver, broken, other, "batch broken is illegal for a row in the state join")


def test_an_illegal_event_of_a_row_that_returns_fails_its_request_alone(driver: Driver):
    broken, other = decoding(driver, 2)
    sequence = driver.engine.parts.scheduler.live[broken]
    driver.engine.parts.scheduler.preemptor.preempt(sequence)
    sequence.rows[0].state = RowState.DECODE
    driver.until(lambda: driver.ended(broken))
    ends_alone(driver, broken, other, "returned is illegal for a row in the state decode")


def test_an_illegal_event_of_a_prefill_fails_its_request_alone(driver: Driver):
    (other,) = decoding(driver, 1)
    broken = driver.ask("word " * 200, ENDLESS)
    driver.until(lambda: any(one.started for one in driver.engine.parts.scheduler.prefills))
    driver.engine.parts.scheduler.live[broken].rows[0].state = RowState.JOIN
    driver.until(lambda: driver.ended(broken))
    ends_alone(driver, broken, other, "chunk is illegal for a row in the state join")


def test_a_request_in_any_state_is_released(driver: Driver):
    (number,) = decoding(driver, 1)
    row = driver.engine.parts.scheduler.live[number].rows[0]
    row.apply(RowEvent.RELEASED)
    driver.cancel(number)
    assert driver.engine.parts.scheduler.live == {}
    assert driver.engine.report(0.0).memory.reserved == 0
