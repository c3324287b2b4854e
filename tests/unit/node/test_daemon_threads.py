"""Calls in daemon threads: their results, and the end of an event loop while one blocks."""

import asyncio
import threading
import time

import pytest

from host.event_loop import run_event_loop
from node import daemon_threads
from node.daemon_threads import DaemonExecutor, start_call


def test_call_has_the_result_or_the_error_of_its_function():
    assert start_call(lambda: (threading.current_thread().name, threading.current_thread().daemon), "one").result(
        20
    ) == (
        "one",
        True,
    )
    with pytest.raises(ZeroDivisionError):
        start_call(lambda: 1 // 0, "two").result(20)


def test_blocked_call_does_not_delay_the_end_of_an_event_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon_threads, "END_TIMEOUT_SECONDS", 0.01)
    release = threading.Event()

    async def main() -> str:
        loop, entered = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(DaemonExecutor())

        def block() -> None:
            loop.call_soon_threadsafe(entered.set)
            release.wait(30)

        blocked = asyncio.create_task(asyncio.to_thread(block))
        await entered.wait()
        blocked.cancel()
        return await asyncio.to_thread(str, 7)

    began = time.monotonic()
    assert run_event_loop(main()) == "7"
    assert time.monotonic() - began < 10
    release.set()


def test_end_of_an_event_loop_waits_for_a_call_that_ends_soon():
    ended = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.02), ended.set()))

    run_event_loop(main())
    assert ended.is_set()
