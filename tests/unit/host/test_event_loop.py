"""One clock for the loop, its timers and `time.monotonic`, also on a machine that has slept."""

import asyncio
import time

import pytest

from host.event_loop import MonotonicLoop, run_event_loop

SLEPT = 3600.0


@pytest.fixture
def _other_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `time.monotonic` differ from the system's clock, as on a Mac that has slept."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() - SLEPT)


@pytest.mark.usefixtures("_other_clock")
def test_the_loop_has_the_clock_of_time_monotonic() -> None:
    async def main() -> tuple[float, float, float]:
        return time.monotonic(), asyncio.get_running_loop().time(), time.monotonic()

    before, now, after = run_event_loop(main())
    assert before <= now <= after


@pytest.mark.usefixtures("_other_clock")
def test_timers_and_timeouts_are_due_by_the_same_clock() -> None:
    async def main() -> str:
        loop, due = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, MonotonicLoop)
        loop.call_at(time.monotonic() + 0.01, due.set)
        await asyncio.wait_for(due.wait(), 30)
        handle = loop.call_at(time.monotonic() + SLEPT / 2, due.clear)
        try:
            async with asyncio.timeout_at(time.monotonic() + 0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timeout"
        finally:
            handle.cancel()
            assert due.is_set()
        return "none"

    assert run_event_loop(main()) == "timeout"
