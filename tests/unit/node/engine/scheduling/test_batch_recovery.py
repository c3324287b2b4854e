"""Faults of a request or a batch: each ends or rebuilds its own requests, and the engine keeps running."""

import json
import time

import mlx.core as mx
import pytest
from msgspec.structs import replace

from node.engine.memory.gate import GateSite
from node.engine.scheduling.batch_recovery import MAX_REBUILDS
from node.engine.scheduling.rules.row_state import RowEvent, RowState
from tests import models
from tests.support.engine.text_engine import ONE_TOKEN, Driver
from wire.frames import Failed, Finished, GenerationParams

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = GenerationParams(temperature=0.0, max_tokens=60, logit_bias=((EOS, -100.0),))


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), max_batch_size=4, prefill_step_size=64, min_prefill_step=32)
    driver.answer("hello", ONE_TOKEN)
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


def test_a_choice_that_ended_in_the_step_of_a_fault_leaves_its_batch_with_its_request(driver: Driver):
    (other,) = decoding(driver, 1)
    number = driver.ask("hello", replace(ENDLESS, n=3, max_tokens=6))
    driver.until(lambda: len(driver.ids[number, 2]) > 2)
    row = driver.engine.parts.scheduler.live[number].rows[2]
    feed = row.pipeline.feed
    row.pipeline.feed = lambda token: feed(token) if len(row.ids) < 6 else 1 / 0  # type: ignore[method-assign, assignment, return-value]
    failed = driver.end(number)
    assert isinstance(failed, Failed)
    assert "ZeroDivisionError" in failed.message
    assert sum(len(batch) for batch in driver.batches().values()) == 1
    assert len(driver.resident().ledger) == 1
    assert isinstance(driver.end(other), Finished)
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_sampler_that_raises_is_a_fault_of_the_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.scheduling.prefill.create_sampler", lambda *_: lambda logprobs: 1 / 0)
    end = driver.end(driver.ask("hello", ENDLESS))
    assert isinstance(end, Failed)
    assert (end.code, "ZeroDivisionError" in end.message) == ("engine_error", True)
    assert driver.engine.report(0.0).counts.failures == 1


def test_a_batch_that_is_discarded_twice_is_rebuilt_once_without_its_ended_and_failing_rows(driver: Driver):
    ended, failing, other = decoding(driver, 3)
    scheduler, loaded_model = driver.engine.parts.scheduler, driver.resident()
    (number,) = driver.batches()
    (row,), (broken,) = scheduler.live[ended].rows, scheduler.live[failing].rows
    row.finish("stop")
    for _ in range(2):
        scheduler.recovery.rebuild_batch(loaded_model, number, RuntimeError("native fault"), [broken])
    assert [prefill.sequence.number for prefill in scheduler.prefills] == [other]
    scheduler.recovery.fail_request(scheduler.live[failing], "engine_error", "a fault")
    scheduler.recovery.end_rows(loaded_model, [row], time.monotonic())
    for request in (ended, other):
        assert isinstance(driver.end(request), Finished)


def test_rows_of_a_broken_batch_are_prefilled_before_queued_prompts_and_alone_count_as_returned(driver: Driver):
    scheduler, (number,) = driver.engine.parts.scheduler, decoding(driver, 1)
    assert driver.engine.report(0.0).counts.returned_tokens == 0
    new, known = driver.ask("word " * 50, ENDLESS), scheduler.live[number].rows[0].list_token_ids()
    (batch,) = driver.batches()
    scheduler.recovery.rebuild_batch(driver.resident(), batch, RuntimeError("native fault"))
    assert [prefill.sequence.number for prefill in scheduler.prefills] == [number, new]
    assert driver.engine.report(0.0).counts.returned_tokens == len(known)


def test_preempted_and_resumed_requests_are_prefilled_before_new_ones(driver: Driver):
    (number,) = decoding(driver, 1)
    scheduler = driver.engine.parts.scheduler
    scheduler.preemptor.preempt(scheduler.live[number])
    driver.gate.refuses = lambda site, need: site is GateSite.PREFILL
    new = driver.ask("hello", ENDLESS)
    resumed = driver.ask("hello", ENDLESS, resume=(tuple(driver.ids[number, 0]),))
    driver.until(lambda: len(scheduler.prefills) == 3)
    answered = {prefill.sequence.number: prefill.answered for prefill in scheduler.prefills}
    assert answered == {number: True, new: False, resumed: True}
    driver.gate.refuses = lambda site, need: False
    assert isinstance(driver.end(number), Finished)


def test_a_cancel_is_a_use_of_the_model_and_unknown_requests_are_not_cancelled(driver: Driver):
    (number,) = decoding(driver, 1)
    scheduler, later = driver.engine.parts.scheduler, time.monotonic() + 100.0
    assert scheduler.cancel(number, later)
    assert driver.resident().usage.used_at == later
    assert not scheduler.cancel(number, later)


def test_a_request_that_fails_while_its_rows_are_stored_ends_alone(driver: Driver):
    """The store of the first row fails the request, which releases the commitment of its second row."""
    (other,) = decoding(driver, 1)
    broken = driver.ask("word " * 100, replace(ENDLESS, n=2))
    driver.until(lambda: all(len(driver.ids[broken, choice]) > 2 for choice in range(2)))
    scheduler, loaded_model = driver.engine.parts.scheduler, driver.resident()
    first, second = scheduler.live[broken].rows
    first.rebuilt = MAX_REBUILDS
    batch = driver.batches()[loaded_model.ledger.get_batch_number(first.commitment)]
    batch.extract = lambda row: 1 / 0  # type: ignore[method-assign, assignment]
    scheduler.recovery.store_rows(loaded_model, [first, second])
    ends_alone(driver, broken, other, "the engine failed twice on this request: ZeroDivisionError")


def test_two_batches_that_break_at_one_cancel_queue_no_row_of_the_cancelled_request(driver: Driver):
    """The break of one batch fails a request that shares both batches with the cancelled one, and breaks the other."""
    params = replace(ENDLESS, max_tokens=900, n=2)
    scheduler, ledger = driver.engine.parts.scheduler, driver.resident().ledger
    (alone,) = decoding(driver, 1)
    cancelled = driver.ask("word " * 100, params)
    driver.until(lambda: all(len(driver.ids[cancelled, choice]) > 2 for choice in range(2)))
    ids = tuple(driver.ids[alone, 0][:3])
    shared = driver.ask("word " * 100, params, resume=(ids, ids * 160))
    driver.cancel(alone)
    driver.until(lambda: all(len(driver.ids[shared, choice]) > 2 for choice in range(2)))
    scheduler.preemptor.preempt(scheduler.live[shared])
    ledger.extend(scheduler.live[cancelled].rows[0].commitment, 400)
    driver.until(lambda: not scheduler.preempted and not scheduler.prefills)
    numbers = [
        [ledger.get_batch_number(row.commitment) for row in scheduler.live[request].rows]
        for request in (cancelled, shared)
    ]
    assert numbers[1] == numbers[0][::-1], "they share two batches"
    for row in scheduler.live[shared].rows:
        row.rebuilt = MAX_REBUILDS
    for batch in driver.batches().values():
        batch.drop_rows = lambda rows: 1 / 0  # type: ignore[method-assign, assignment]
    driver.cancel(cancelled)
    assert (scheduler.live, scheduler.prefills) == ({}, ())
    assert driver.engine.check() == []
    assert isinstance(driver.end(driver.ask("hello", ENDLESS)), Finished)


def test_a_row_that_was_preempted_is_rebuilt_with_its_next_batch(driver: Driver):
    (number,) = decoding(driver, 1)
    scheduler, known = driver.engine.parts.scheduler, len(driver.ids[number, 0])
    scheduler.preemptor.preempt(scheduler.live[number])
    driver.until(lambda: len(driver.ids[number, 0]) > known)
    (batch,) = driver.batches().values()
    batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    assert isinstance(driver.end(number), Finished)
    assert scheduler.measure_load() == (0, 0, 0)


def test_a_rebuild_frees_the_memory_of_a_batch_that_its_caller_holds(driver: Driver):
    driver.answer("word " * 60, ONE_TOKEN)
    decoding(driver, 2)
    (batch,), (number,) = driver.batches().values(), driver.batches()
    nbytes, active = batch.sum_nbytes(), mx.get_active_memory()
    assert driver.engine.parts.prefix_cache.entries
    driver.engine.parts.scheduler.recovery.rebuild_batch(driver.resident(), number, RuntimeError("native fault"))
    assert active - mx.get_active_memory() >= nbytes > 0
    assert mx.get_cache_memory() == 0
    assert driver.engine.parts.prefix_cache.entries == (), "the fault may be in a cached prefix"
