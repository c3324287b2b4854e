"""Rows of one prompt join the batches for which they were admitted, as far as there is room."""

from typing import Any

import pytest

from node.engine.kv.commitments import Commitment, CommitmentLedger
from node.engine.scheduling.decode_batch import DecodeBatch
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import Channel, Finished, GenerationParams
from wire.units import GIB

FIRST, SECOND = [
    one for one in models.answers() if "system" not in one and "reasoning" not in one and len(one["answer"]) < 80
][:2]


def test_rows_that_had_no_room_join_later_and_the_others_once(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)
    other = driver.ask(FIRST["prompt"])
    driver.until(lambda: driver.engine.report(0.0).running)
    joining, join, refused, joined = CommitmentLedger.compute_joined_bytes, DecodeBatch.join, list[int](), list[int]()

    def dear(ledger: CommitmentLedger, row: Commitment, rows: int) -> int:
        short = rows == 2 and not refused
        refused.extend([rows] * short)
        return joining(ledger, row, rows) + short * 1024 * GIB

    def counted(batch: DecodeBatch[Any], rows: list[Any], *past: Any) -> list[Any]:
        joined.append(len(rows))
        return join(batch, rows, *past)

    monkeypatch.setattr(CommitmentLedger, "compute_joined_bytes", dear)
    monkeypatch.setattr(DecodeBatch, "join", counted)
    number = driver.ask(SECOND["prompt"], GenerationParams(temperature=0.0, n=3))
    ends = driver.end(number), driver.end(other)
    assert all(isinstance(end, Finished) for end in ends), ends
    assert [driver.text[number, choice, Channel.CONTENT] for choice in range(3)] == [SECOND["answer"]] * 3
    assert driver.text[other, 0, Channel.CONTENT] == FIRST["answer"]
    assert (refused, joined) == ([2], [1, 2]), "one row beside the other's at once, two by themselves later"
