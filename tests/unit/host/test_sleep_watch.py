"""Sleep, announced beforehand or detected afterwards."""

import asyncio
import sys
import threading
import time

import pytest

from host import sleep_watch
from host.iokit import SleepNotificationListener
from host.sleep_watch import Acknowledge, NoSleepNotices, SleepWatch, open_sleep_notices, system_clocks


class Clocks:
    """Two clocks that agree until the machine sleeps."""

    def __init__(self):
        self.on, self.off = 100.0, 40.0

    def sleep(self, seconds: float):
        self.on += seconds

    def stay_awake(self, seconds: float):
        self.on += seconds
        self.off += seconds

    def pair(self):
        return (lambda: self.on), (lambda: self.off)


class Told(NoSleepNotices):
    """A system that announces a sleep when the test does."""

    stopped = False

    def start(self, on_sleep, on_wake):
        self.sleep, self.wake = on_sleep, on_wake
        return True

    def stop(self):
        self.stopped = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sleep_watch, "POLL_INTERVAL_SECONDS", 0.01)


class Owner:
    """Records its notifications."""

    def __init__(self):
        self.heard: list[str] = []
        self.changed = asyncio.Event()

    def slept(self, said: Acknowledge):
        self.heard.append("sleeps")
        said()
        self.changed.set()

    def woke(self, seconds: float):
        self.heard.append(f"woke after {seconds:.0f}")
        self.changed.set()

    async def next(self):
        async with asyncio.timeout(30):
            await self.changed.wait()
        self.changed.clear()


async def test_a_sleep_is_found_when_it_is_over():
    clocks, owner = Clocks(), Owner()
    watch = SleepWatch(owner.slept, owner.woke, notices=NoSleepNotices(), clocks=clocks.pair())
    watch.start()
    clocks.sleep(2.0)  # too short to be noticed
    await asyncio.sleep(0.05)
    assert owner.heard == []
    clocks.sleep(120.0)
    await owner.next()
    assert owner.heard == ["woke after 122"]
    clocks.sleep(sleep_watch.MIN_SLEEP_SECONDS)
    await owner.next()
    watch.stop()
    assert owner.heard == ["woke after 122", "woke after 3"]


async def test_an_announced_sleep_is_notified_once_at_each_end():
    clocks, owner, system, said = Clocks(), Owner(), Told(), threading.Event()
    watch = SleepWatch(owner.slept, owner.woke, notices=system, clocks=clocks.pair())
    watch.start()
    await asyncio.to_thread(system.sleep, said.set)
    await owner.next()
    assert said.is_set()
    clocks.sleep(300.0)
    await asyncio.to_thread(system.wake)
    await owner.next()
    await asyncio.sleep(0.05)
    watch.stop()
    assert owner.heard == ["sleeps", "woke after 300"]


async def test_an_announced_sleep_includes_the_dark_wakes():
    clocks, owner, system, looks = Clocks(), Owner(), Told(), asyncio.Semaphore(0)
    watch = SleepWatch(owner.slept, owner.woke, on_look=looks.release, notices=system, clocks=clocks.pair())
    watch.start()
    await asyncio.to_thread(system.sleep, lambda: None)
    await owner.next()
    for _ in range(4):
        clocks.sleep(900.0)
        clocks.stay_awake(sleep_watch.MAX_DARK_WAKE_SECONDS / 2)
        await wait_for_checks(looks)
    assert owner.heard == ["sleeps"]
    await asyncio.to_thread(system.wake)
    await owner.next()
    watch.stop()
    assert owner.heard == ["sleeps", "woke after 3600"]


@pytest.mark.parametrize("slept", [0.0, 900.0])
async def test_an_announced_sleep_without_a_notice_of_its_end_ends_after_a_minute_awake(slept: float):
    clocks, owner, system, looks = Clocks(), Owner(), Told(), asyncio.Semaphore(0)
    watch = SleepWatch(owner.slept, owner.woke, on_look=looks.release, notices=system, clocks=clocks.pair())
    watch.start()
    await asyncio.to_thread(system.sleep, lambda: None)
    await owner.next()
    clocks.sleep(slept)
    await wait_for_checks(looks)
    clocks.stay_awake(sleep_watch.MAX_DARK_WAKE_SECONDS - 1)
    await wait_for_checks(looks)
    assert owner.heard == ["sleeps"]
    clocks.stay_awake(1.0)
    await owner.next()
    watch.stop()
    assert owner.heard == ["sleeps", f"woke after {slept:.0f}"]


async def wait_for_checks(looks: asyncio.Semaphore):
    """Wait until a check has begun and ended from now on."""
    while not looks.locked():
        await looks.acquire()
    async with asyncio.timeout(30):
        for _ in range(2):
            await looks.acquire()


async def test_a_sleep_that_was_called_off_ends_too():
    clocks, owner, system, failed = Clocks(), Owner(), Told(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    watch = SleepWatch(owner.slept, owner.woke, notices=system, clocks=clocks.pair())
    watch.start()
    system.wake()
    system.sleep(lambda: None)
    await owner.next()
    system.wake()
    await owner.next()
    system.wake()
    await asyncio.sleep(0.05)
    watch.stop()
    assert (owner.heard, failed) == (["sleeps", "woke after 0"], [])


async def test_a_watch_looks_by_this_systems_own_means_until_it_is_stopped():
    owner, looks = Owner(), asyncio.Semaphore(0)
    watch = SleepWatch(owner.slept, owner.woke, on_look=looks.release)
    watch.stop()
    watch.start()
    async with asyncio.timeout(30):
        for _ in range(3):
            await looks.acquire()
    watch.stop()
    await asyncio.sleep(0.05)
    assert looks.locked(), "it looks no longer"
    assert owner.heard == []


def test_a_notice_after_the_loop_is_closed_has_no_effect():
    owner, system = Owner(), Told()

    async def begin():
        watch = SleepWatch(owner.slept, owner.woke, notices=system, clocks=Clocks().pair())
        watch.start()
        watch.stop()

    asyncio.run(begin())
    assert system.stopped
    system.sleep(lambda: None)
    system.wake()
    assert owner.heard == []


def test_only_macos_announces_a_sleep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(open_sleep_notices(), SleepNotificationListener)
    monkeypatch.setattr(sys, "platform", "linux")
    assert isinstance(open_sleep_notices(), NoSleepNotices)
    assert NoSleepNotices().start(lambda _: None, lambda: None) is False


@pytest.mark.parametrize(
    ("platform", "boot", "read"), [("linux", 7, (7.0, 1.0)), ("darwin", None, (1.0, 8.0)), ("linux", None, None)]
)
def test_one_clock_counts_sleep_and_one_does_not(
    monkeypatch: pytest.MonkeyPatch, platform: str, boot: int | None, read: tuple[float, float] | None
):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", 1)
    monkeypatch.setattr(time, "CLOCK_UPTIME_RAW", 8, raising=False)
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", boot, raising=False)
    monkeypatch.setattr(time, "clock_gettime", float)
    clocks = system_clocks()
    assert clocks == (time.monotonic, time.monotonic) if read is None else (clocks[0](), clocks[1]()) == read


def test_both_clocks_advance_together_while_the_system_is_awake():
    on, off = system_clocks()
    first = on() - off()
    assert abs(on() - off() - first) < 1.0
