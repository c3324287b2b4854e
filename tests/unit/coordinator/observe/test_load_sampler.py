"""Readings of the load at intervals."""

import asyncio

import pytest
import structlog

from coordinator.observe import load_sampler
from coordinator.observe.load_history import LoadHistory, LoadReading
from coordinator.observe.load_sampler import sample_load


async def test_readings_continue_after_failures_of_which_the_first_in_a_row_is_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_sampler, "INTERVAL_SECONDS", 0.0)
    history = LoadHistory()
    works = iter((False, False, True, True, False))

    def read(at: float) -> LoadReading:
        if not next(works, None):
            raise OSError("no reading")
        return LoadReading(at, {})

    with structlog.testing.capture_logs() as logs:
        sampling = asyncio.create_task(sample_load(history, read))
        async with asyncio.timeout(5):
            while len(logs) < 2:  # noqa: ASYNC110  the sampler has no event
                await asyncio.sleep(0)
        sampling.cancel()
    assert [entry["event"] for entry in logs] == ["load not read"] * 2
    assert history.to_row()["number"] == 0, "two readings make one point"
