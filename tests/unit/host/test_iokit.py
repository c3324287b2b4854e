"""Answers of the listener for sleep notifications to macOS, through a library with the same functions."""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host import iokit
from host.iokit import SleepNotificationListener

SOURCE = Path(__file__).parents[2] / "support" / "iokit_standin.c"
ONLY_PORT, ONLY_CONNECTION = 2, 3


def build(made: Path, source: Path) -> Path:
    """Compile a C file to a library."""
    compiler = shutil.which("cc") or "cc"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("iokit") / "iokit.so", SOURCE)


@pytest.fixture
def library(compiled: Path, tmp_path: Path) -> Path:
    """Copy the library, because each path is loaded once and has variables of its own."""
    return Path(shutil.copy(compiled, tmp_path / "iokit.so"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise the time limit, and check that no call waits until the limit."""
    monkeypatch.setattr(iokit, "ANSWER_TIMEOUT_SECONDS", 60.0)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 10


def list_answers(library: Path) -> list[int]:
    """Return the arguments of the answered notices in their order."""
    answers = ctypes.CDLL(str(library)).answers
    return [answer for number in range(8) if (answer := answers(number)) >= 0]


def find_thread() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == "sleep notice"), None)


@pytest.mark.usefixtures("patient")
def test_macos_is_answered_after_the_goodbye(library: Path):
    heard, asked, woke = list[str](), threading.Event(), threading.Event()
    permissions: list[Callable[[], None]] = []

    def sleeps(permit: Callable[[], None]):
        heard.append("sleeps")
        permissions.append(permit)
        asked.set()

    def wakes():
        heard.append("wakes")
        woke.set()

    notice = SleepNotificationListener(str(library), str(library))
    assert notice.start(sleeps, wakes)
    assert asked.wait(10)
    thread = find_thread()
    assert thread is not None
    assert thread.daemon, "a process may end without an answer of the system"
    assert not woke.wait(0.05), "the system waits"
    assert list_answers(library) == [11, 0], "an idle sleep is not refused"
    permissions[0]()
    assert woke.wait(10)
    assert list_answers(library) == [11, 0, 12], "a wake-up needs no answer"
    counters = ctypes.CDLL(str(library))
    assert counters.deregistrations() == 0
    notice.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert heard == ["sleeps", "wakes"], "other notices are no end of a sleep"
    notice.stop()
    assert (counters.deregistrations(), counters.stop_calls()) == (1, 1)


def test_a_sleep_without_permission_is_allowed_at_the_time_limit(library: Path, monkeypatch: pytest.MonkeyPatch):
    woke = threading.Event()
    notice = SleepNotificationListener(str(library), str(library))
    assert notice.start(lambda _: monkeypatch.setattr(iokit, "ANSWER_TIMEOUT_SECONDS", 0.01), woke.set)
    assert woke.wait(10)
    assert list_answers(library) == [11, 0, 12]
    notice.stop()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", [1, ONLY_PORT, ONLY_CONNECTION])
def test_a_listener_that_the_system_refuses_does_not_start(library: Path, how: int):
    counters = ctypes.CDLL(str(library))
    counters.refuse_with(how)
    notice = SleepNotificationListener(str(library), str(library))
    assert not notice.start(lambda _: None, lambda: None)
    notice.stop()
    assert (list_answers(library), counters.stop_calls()) == ([], 0)
    if thread := find_thread():
        thread.join(10)
    assert find_thread() is None


def test_a_mac_without_the_frameworks_or_their_functions_has_no_notices(library: Path, tmp_path: Path):
    (tmp_path / "empty.c").touch()
    empty = build(tmp_path / "empty.so", tmp_path / "empty.c")
    for kit, core in ((tmp_path / "none", library), (library, tmp_path / "none"), (library, empty), (empty, library)):
        missing = SleepNotificationListener(str(kit), str(core))
        assert missing.start(lambda _: None, lambda: None) is False
        missing.stop()
    assert find_thread() is None
