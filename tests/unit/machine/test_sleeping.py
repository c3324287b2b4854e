"""Sleep, told before it comes or found when it is over; and macOS's word for it through a library of its shape."""

import asyncio
import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from machine import sleeping
from machine.iokit import PowerNotice
from machine.sleeping import NoNotice, Said, SleepWatch, system_clocks

SOURCE = Path(__file__).parents[2] / "support" / "iokit_standin.c"


class Clocks:
    """Two clocks that agree until the machine sleeps."""

    def __init__(self):
        self.on, self.off = 100.0, 40.0

    def sleep(self, seconds: float):
        self.on += seconds

    def pair(self):
        return (lambda: self.on), (lambda: self.off)


class Told(NoNotice):
    """A system that tells of a sleep when the test does."""

    def start(self, on_sleep, on_wake):
        self.sleep, self.wake = on_sleep, on_wake
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sleeping, "LOOK_SECONDS", 0.01)


class Owner:
    """Writes down what it hears."""

    def __init__(self):
        self.heard: list[str] = []
        self.changed = asyncio.Event()

    def slept(self, said: Said):
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
    watch = SleepWatch(owner.slept, owner.woke, notice=NoNotice(), clocks=clocks.pair())
    watch.start()
    clocks.sleep(2.0)  # nobody notices that
    await asyncio.sleep(0.05)
    assert owner.heard == []
    clocks.sleep(120.0)
    await owner.next()
    assert owner.heard == ["woke after 122"]
    clocks.sleep(60.0)
    await owner.next()
    watch.stop()
    assert owner.heard == ["woke after 122", "woke after 60"]


async def test_a_sleep_that_is_told_is_told_once_each_way():
    clocks, owner, system, said = Clocks(), Owner(), Told(), threading.Event()
    watch = SleepWatch(owner.slept, owner.woke, notice=system, clocks=clocks.pair())
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


async def test_a_sleep_that_was_called_off_ends_too():
    clocks, owner, system = Clocks(), Owner(), Told()
    watch = SleepWatch(owner.slept, owner.woke, notice=system, clocks=clocks.pair())
    watch.start()
    system.sleep(lambda: None)
    await owner.next()
    system.wake()
    await owner.next()
    system.wake()
    await asyncio.sleep(0.05)
    watch.stop()
    assert owner.heard == ["sleeps", "woke after 0"]


def test_this_systems_clocks_go_on_together_while_it_is_awake():
    on, off = system_clocks()
    first = on() - off()
    assert abs(on() - off() - first) < 1.0


# macOS


@pytest.fixture
def library(tmp_path: Path) -> Path:
    made = tmp_path / "iokit.so"
    compiler = shutil.which("cc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, SOURCE], check=True, capture_output=True)
    return made


def test_macos_is_answered_after_the_goodbye(library: Path):
    heard, woke = list[str](), threading.Event()

    def sleeps(said):
        heard.append(f"sleeps, answered so far {ctypes.CDLL(str(library)).answers(0)}")
        said()

    def wakes():
        heard.append("wakes")
        woke.set()

    notice = PowerNotice(str(library), str(library))
    assert notice.start(sleeps, wakes)
    assert woke.wait(10)
    notice.stop()
    answers = ctypes.CDLL(str(library)).answers
    assert heard == ["sleeps, answered so far 11", "wakes"]
    assert [answers(0), answers(1), answers(2)] == [11, 12, 0], "asked, told, and nothing is to be answered at wake"


def test_a_system_that_does_not_let_us_listen_is_none_that_tells(library: Path, tmp_path: Path):
    ctypes.CDLL(str(library)).refuse_all()
    assert not PowerNotice(str(library), str(library)).start(lambda _: None, lambda: None)
    missing = PowerNotice(str(tmp_path / "none"), str(tmp_path / "none"))
    assert not missing.start(lambda _: None, lambda: None)
    missing.stop()
