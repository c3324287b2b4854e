import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import pytest

from coordinator.ui import live_stream as module
from coordinator.ui.live_stream import MAX_VIEWERS, LiveStream


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_SECONDS", 0.01)


def parse_events(news: bytes) -> dict[str, object]:
    found: dict[str, object] = {}
    for event in news.decode().split("\n\n"):
        if event.startswith("event: "):
            name, data = event.split("\n")
            found[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    return found


async def soon(stream: AsyncIterator[bytes]) -> dict[str, object]:
    async with asyncio.timeout(30):
        return parse_events(await anext(stream))


async def test_live_stream_sends_a_snapshot_and_then_changes():
    state: dict[str, object] = {"nodes": ["a"], "status": {"queued": 0}}
    stream = LiveStream(lambda: state).stream_events(lambda: True)
    assert await soon(stream) == state
    state["nodes"] = ["a", "b\n\nevent: x"]
    assert await soon(stream) == {"nodes": ["a", "b\n\nevent: x"]}
    await stream.aclose()


async def test_live_stream_without_follow_sends_one_snapshot():
    stream = LiveStream(lambda: {"n": 1}).stream_events(lambda: True, follow=False)
    async with asyncio.timeout(30):
        assert [parse_events(news) async for news in stream] == [{"n": 1}]


async def test_live_stream_skips_steps_for_a_slow_reader():
    state = {"n": 0}
    live = LiveStream(lambda: state)
    quick, slow = live.stream_events(lambda: True), live.stream_events(lambda: True)
    assert await soon(quick) == await soon(slow) == {"n": 0}
    for number in (1, 2, 3):
        state["n"] = number
        assert await soon(quick) == {"n": number}
    assert await soon(slow) == {"n": 3}
    await quick.aclose()
    await slow.aclose()


@pytest.mark.parametrize("fault", ["raised", "not JSON"])
async def test_a_failing_check_stops_no_other_check(fault: str):
    state, failed = {"n": 1}, asyncio.Event()

    def sections() -> dict[str, object]:
        if not state:
            failed.set()
            if fault == "not JSON":
                return {"n": "\ud800"}
            raise RuntimeError("no picture")
        return {"n": state["n"]}

    stream = LiveStream(sections).stream_events(lambda: True)
    assert await soon(stream) == {"n": 1}
    state.clear()
    waiting = asyncio.ensure_future(soon(stream))
    await failed.wait()
    state["n"] = 2
    assert await waiting == {"n": 2}
    await stream.aclose()


async def test_no_snapshot_is_made_without_a_viewer():
    looks: asyncio.Queue[int] = asyncio.Queue()
    live = LiveStream(lambda: looks.put_nowait(1) or {})
    for _ in range(2):  # the stream stops with the last viewer, and starts again with the next one
        waiting = asyncio.ensure_future(anext(live.stream_events(lambda: True)))
        async with asyncio.timeout(30):
            for _ in range(3):
                await looks.get()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(30):
            await live.wait_stopped()
        looks = asyncio.Queue()


async def test_silence_is_broken_by_a_comment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.03)
    stream = LiveStream(lambda: {"n": 1}).stream_events(lambda: True)
    await soon(stream)
    async with asyncio.timeout(30):
        assert [await anext(stream) for _ in range(2)] == [b": still here\n\n"] * 2
    await stream.aclose()


async def test_a_comment_never_takes_the_place_of_a_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.03)
    numbers = itertools.count()
    stream = LiveStream(lambda: {"n": next(numbers)}).stream_events(lambda: True)
    found = [(await soon(stream))["n"] for _ in range(6)]
    assert len(set(found)) == 6
    await stream.aclose()


async def test_live_stream_ends_for_a_revoked_key():
    state, welcome = {"n": 0}, [True]
    stream = LiveStream(lambda: state).stream_events(lambda: welcome[0])
    await soon(stream)
    welcome[0] = False
    state["n"] = 1
    async with asyncio.timeout(30):
        assert [news async for news in stream] == []


async def test_viewers_are_counted():
    live = LiveStream(lambda: {"n": 1})
    streams = [live.stream_events(lambda: True) for _ in range(MAX_VIEWERS)]
    for stream in streams:
        await soon(stream)
    assert live.full
    await streams[0].aclose()
    assert not live.full
    for stream in streams[1:]:
        await stream.aclose()
