"""The watch itself: it detects a held loop, and ignores a process that waits for a core."""

import asyncio
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.loop_watch import MAX_HELD_SECONDS, watch_loop, watch_server
from tests.support.processes import pool


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_loop_that_is_held_is_seen():
    with watch_loop() as held:
        await asyncio.sleep(0.02)
        spin(0.12)
        await asyncio.sleep(0.02)
    assert 0.1 < held.seconds <= held.wall_seconds
    assert held.ticks > 5


async def test_a_loop_that_is_free_is_not_blamed():
    with watch_loop() as held:
        for _ in range(40):
            spin(0.002)
            await asyncio.sleep(0.002)
    assert held.seconds < MAX_HELD_SECONDS


@pytest.mark.slow
def test_a_coordinator_is_watched_from_outside():
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as running:
        running.up()
        assert running.coordinator is not None
        with watch_server(running.base, running.coordinator.pid) as held:
            time.sleep(0.5)
        assert held.ticks > 20
        assert held.seconds < MAX_HELD_SECONDS
