"""Each invariant of the scheduler, broken alone in a healthy engine, is reported with its sentences."""

import json
from typing import Any

import mlx.core as mx
import pytest

from node.engine.kv.commitments import Commitment
from node.engine.requests.sequence import Row
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.invariants import find_violations
from node.engine.scheduling.rules.row_state import RowState
from tests import models
from tests.support.engine.text_engine import ONE_TOKEN, Driver
from wire.frames import GenerationParams

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = GenerationParams(temperature=0.0, max_tokens=400, logit_bias=((EOS, -100.0),))
DECODES, PREEMPTED, STARTED, WAITING = range(2, 6)
"""Numbers of the requests of `Engine`."""


class Engine:
    """Scheduler's state with four requests: one decodes, one is preempted, one is prefilled, and one waits for its
    prefill."""

    def __init__(self) -> None:
        driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=64, prefix_cache_size="off")
        driver.answer("hello", ONE_TOKEN)
        scheduler = driver.engine.parts.scheduler
        numbers = [driver.ask("hello", ENDLESS) for _ in range(2)]
        driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in numbers))
        numbers += [driver.ask("word " * 120, ENDLESS)]
        driver.until(lambda: any(prefill.started for prefill in scheduler.prefills))
        numbers += [driver.ask("word " * 120, ENDLESS)]
        scheduler.preemptor.preempt(scheduler.live[PREEMPTED])
        assert numbers == [DECODES, PREEMPTED, STARTED, WAITING]
        self.model = driver.resident()
        self.live, self.batches = dict(scheduler.live), dict(driver.batches())
        self.prefills, self.preempted = list(scheduler.prefills), list(scheduler.preempted)

    def row(self, number: int) -> Row:
        return self.live[number].rows[0]

    def find(self, *, loaded: bool = True) -> list[str]:
        models = {self.model.name: self.model} if loaded else {}
        return find_violations(self.live, self.prefills, self.preempted, models, lambda _: self.batches)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_a_healthy_engine_violates_no_invariant(engine: Engine):
    assert engine.find() == []


def test_each_wrong_state_of_a_row_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    started, _ = engine.prefills
    decoding, lost, first, second = (engine.row(number) for number in (DECODES, PREEMPTED, STARTED, WAITING))
    (batch,), name = engine.batches, engine.model.name
    rows = [f"{name} has 3 commitments and 2 rows", "{row} is running and in 0 prefills and batches"]
    place = f"batch {batch} of {name}"
    unreasoned = [
        "{row} is in a prefill and has the state ended, not waiting",
        "{row} has the state ended and the reason ''",
    ]
    cases: list[tuple[int, Any, str, object, list[str]]] = [
        (WAITING, second, "state", RowState.ENDED, unreasoned),
        (STARTED, started, "rows", [], ["a prefill of {request} without rows", *rows]),
        (STARTED, started, "logits", mx.zeros(1), ["{row} is in a prefill and has the state prefill, not join"]),
        (STARTED, started, "cache", None, ["{row} is in a prefill and has the state prefill, not waiting"]),
        (STARTED, first, "state", RowState.JOIN, ["{row} is in a prefill and has the state join, not prefill"]),
        (STARTED, first.commitment, "is_joined", True, ["{row} is in a prefill and counts as joined"]),
        (WAITING, second, "commitment", Commitment(5), ["{row} is in a prefill without a commitment"]),
        (DECODES, decoding, "state", RowState.JOIN, ["{row} decodes and has the state join"]),
        (DECODES, decoding.commitment, "is_joined", False, ["{row} decodes and does not count as joined"]),
        (DECODES, decoding, "commitment", Commitment(5), [f"{{row}} decodes in {place} without a commitment there"]),
        (PREEMPTED, lost, "state", RowState.JOIN, ["{row} is preempted and has the state join"]),
        (PREEMPTED, lost, "commitment", Commitment(5), ["{row} is preempted and holds a commitment of 5 tokens"]),
    ]
    for number, row, state, where in (
        (STARTED, first, "prefill", ["{row} is in a prefill and has ended: stop"]),
        (WAITING, second, "waiting", ["{row} is in a prefill and has ended: stop"]),
        (DECODES, decoding, "decode", ["{row} decodes and has ended: stop"]),
        (PREEMPTED, lost, "preempted", []),
    ):
        whole = "{request} is live and all of its rows have ended"
        cases.append(
            (number, row, "reason", "stop", [*where, whole, f"{{row}} has the state {state} and the reason 'stop'"])
        )
    for number, owner, attribute, value, expected in cases:
        request = f"request {number}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            assert engine.find() == [text.format(request=request, row=f"row 0 of {request}") for text in expected]
    assert engine.find() == []


def test_each_request_without_its_place_is_reported(engine: Engine):
    def find_without(number: int) -> list[str]:
        sequence = engine.live.pop(number)
        try:
            return engine.find()
        finally:
            engine.live[number] = sequence

    assert find_without(DECODES) == [f"row 0 of request {DECODES} decodes and is not live"]
    assert find_without(STARTED) == [f"a prefill of request {STARTED}, which is not live"]
    assert find_without(PREEMPTED) == ["1 preempted requests are not live"]
    batches, engine.batches = engine.batches, {}
    assert find_without(PREEMPTED)[1:] == [
        f"row 0 of request {DECODES} is running and in 0 prefills and batches",
        "1 preempted requests are not live",
    ]
    engine.batches = batches
    for number in (DECODES, PREEMPTED, STARTED, WAITING):
        assert f"request {number} is live and its model {engine.model.name} is not loaded" in engine.find(loaded=False)
    engine.preempted.append(engine.live[DECODES])
    committed = engine.row(DECODES).commitment.committed_tokens
    assert engine.find() == [
        f"row 0 of request {DECODES} is preempted and has the state decode",
        f"row 0 of request {DECODES} is preempted and in 1 prefills and batches",
        f"row 0 of request {DECODES} is preempted and holds a commitment of {committed} tokens",
    ]
    engine.preempted.pop()


def test_each_wrong_batch_is_reported(engine: Engine):
    ((number, batch),) = engine.batches.items()
    name, row = engine.model.name, f"row 0 of request {DECODES}"
    engine.batches = {number: batch, 90: DecodeBatch(engine.model.model)}
    assert engine.find() == [f"batch 90 of {name} is empty"]
    engine.batches = {90: batch}
    assert engine.find() == [f"{row} decodes in batch 90 of {name} without a commitment there"]
    engine.batches = {number: batch, 90: batch}
    assert engine.find() == [
        f"{row} decodes in batch 90 of {name} without a commitment there",
        f"{name} has 3 commitments and 4 rows",
        f"{row} is running and in 2 prefills and batches",
    ]
    engine.batches = {}
    assert engine.find() == [
        f"{name} has 3 commitments and 2 rows",
        f"{row} is running and in 0 prefills and batches",
    ]
    engine.batches = {number: batch}
    engine.prefills.append(engine.prefills[1])
    assert engine.find() == [
        f"{name} has 3 commitments and 4 rows",
        f"row 0 of request {WAITING} is running and in 2 prefills and batches",
    ]
    engine.prefills.pop()
    assert engine.find() == []
