"""Events for followers: the newest, new ones, missed ones, and events that a slow reader loses."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator

import pytest

from coordinator.observe import event_log
from coordinator.observe.event_log import KEEPALIVE_SECONDS, MAX_EVENTS, MAX_QUEUED_EVENTS, MAX_READERS, EventLog


def tell(hub: EventLog, *numbers: int) -> None:
    for number in numbers:
        hub.add_event({"logger": "coordinator.cluster.registry", "event": "node state", "number": number})


async def settled() -> None:
    await asyncio.sleep(0)


def parse_numbers(pieces: list[bytes]) -> list[int]:
    return [json.loads(piece.partition(b"data: ")[2])["number"] for piece in pieces if b"data: " in piece]


def parse_ids(pieces: list[bytes]) -> list[int]:
    return [int(piece.partition(b"\n")[0].removeprefix(b"id: ")) for piece in pieces]


async def all_of(reading: AsyncGenerator[bytes]) -> list[bytes]:
    return [piece async for piece in reading]


async def test_event_log_returns_the_newest_events_in_order():
    hub = EventLog()
    tell(hub, *range(MAX_EVENTS + 50))
    await settled()
    assert parse_numbers(await all_of(hub.stream_events(None, 3, follow=False))) == [
        MAX_EVENTS + 47,
        MAX_EVENTS + 48,
        MAX_EVENTS + 49,
    ]
    assert len(await all_of(hub.stream_events(None, MAX_EVENTS, follow=False))) == MAX_EVENTS
    assert await all_of(hub.stream_events(None, 0, follow=False)) == []


async def test_event_log_returns_events_after_a_number():
    hub = EventLog()
    tell(hub, 1, 2, 3)
    await settled()
    first, *others = parse_ids(await all_of(hub.stream_events(None, 3, follow=False)))
    pieces = await all_of(hub.stream_events(first, 0, follow=False))
    assert parse_numbers(pieces) == [2, 3]
    assert parse_ids(pieces) == others == [first + 1, first + 2]


async def test_a_reader_of_an_earlier_process_receives_all_events_of_the_new_one():
    former = EventLog()
    tell(former, 1, 2, 3)
    await settled()
    last = parse_ids(await all_of(former.stream_events(None, 3, follow=False)))[-1]
    await asyncio.sleep(0.01)  # no process starts in less time
    hub = EventLog()
    tell(hub, 4, 5)
    await settled()
    assert parse_numbers(await all_of(hub.stream_events(last, 0, follow=False))) == [4, 5]


async def test_event_log_notifies_all_followers_until_they_leave():
    hub = EventLog()
    first, second = (hub.stream_events(None, 0, follow=True) for _ in range(2))
    waiting = [asyncio.create_task(anext(one)) for one in (first, second)]
    await settled()
    tell(hub, 7)
    assert [parse_numbers([await one]) for one in waiting] == [[7], [7]]
    for one in (first, second):
        await one.aclose()
    assert hub.readers == 0


async def test_event_log_reports_lost_events_to_a_slow_follower():
    hub = EventLog()
    reading = hub.stream_events(None, 1, follow=True)
    tell(hub, 0)
    await settled()
    assert parse_numbers([await anext(reading)]) == [0]
    tell(hub, *range(1, MAX_QUEUED_EVENTS + 11))
    await settled()
    assert await anext(reading) == b": 10 events were lost\n\n"
    assert parse_numbers([await anext(reading)]) == [11]
    await reading.aclose()


async def test_silence_is_broken_by_a_comment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_log, "KEEPALIVE_SECONDS", 0.01)
    reading = EventLog().stream_events(None, 5, follow=True)
    assert await anext(reading) == b": still here\n\n"
    await reading.aclose()


async def test_event_log_ignores_other_loggers_and_accepts_odd_values():
    hub = EventLog()
    for logger in ("uvicorn.error", "node.agent.agent", "coordinators", ""):
        hub.add_event({"logger": logger, "event": "x"})
    hub.add_event({"logger": "coordinator.x", "event": "x", "value": object(), "number": 1})
    hub.add_event({"logger": "router.x", "event": "x", "number": 2})
    await settled()
    assert parse_numbers(await all_of(hub.stream_events(None, 50, follow=False))) == [1, 2]


async def test_event_values_cannot_break_a_log_line():
    hub = EventLog()
    hub.add_event({"logger": "coordinator.x", "event": "a\n\ndata: evil\n\n", "number": 1})
    await settled()
    (piece,) = await all_of(hub.stream_events(None, 50, follow=False))
    assert piece.count(b"\n") == 3


def test_an_event_after_the_end_of_the_loop_does_no_harm():
    async def make() -> EventLog:
        return EventLog()

    tell(asyncio.run(make()), 1)


async def test_a_reader_waits_again_after_each_event(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_log, "KEEPALIVE_SECONDS", 0.001)
    hub = EventLog()
    reading = hub.stream_events(None, 0, follow=True)
    assert await anext(reading) == b": still here\n\n"
    for number in (1, 2):
        tell(hub, number)
        await settled()
        assert parse_numbers([await anext(reading)]) == [number]
        assert await anext(reading) == b": still here\n\n"
    await reading.aclose()


async def test_the_log_is_full_with_its_maximum_of_readers():
    hub = EventLog()
    tell(hub, 1)
    await settled()
    readings = [hub.stream_events(None, 1, follow=True) for _ in range(MAX_READERS)]
    for reading in readings:
        assert not hub.full
        await anext(reading)
    assert hub.full
    await readings[0].aclose()
    assert not hub.full
    for reading in readings:
        await reading.aclose()


async def test_an_event_of_another_thread_reaches_a_reader_at_once():
    hub, loop = EventLog(), asyncio.get_running_loop()
    reading = hub.stream_events(None, 0, follow=True)
    waiting = asyncio.ensure_future(anext(reading))
    await settled()
    began = loop.time()
    thread = threading.Timer(0.05, tell, (hub, 1))
    thread.start()
    assert parse_numbers([await waiting]) == [1]
    assert loop.time() - began < KEEPALIVE_SECONDS / 2
    thread.join()
    await reading.aclose()
