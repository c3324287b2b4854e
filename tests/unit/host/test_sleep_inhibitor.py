import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

import host.sleep_inhibitor
from host.sleep_inhibitor import SleepInhibitor
from tests.support.processes import ROOT, environment, until

SLEEPER = (sys.executable, "-IS", "-c", "import sys, time; time.sleep(60)")
CAFFEINATE = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.02)
"""
"""A program that ends with the watched process, as `caffeinate -w` does."""


def test_the_inhibitor_is_started_once_and_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.sleep_inhibitor, "END_TIMEOUT_SECONDS", 3600.0)  # it is terminated without waiting for it
    awake = SleepInhibitor(SLEEPER)
    awake.set_held(False)
    assert not awake.held
    awake.set_held(True)
    child = awake.pid
    awake.set_held(True)
    assert awake.held
    assert awake.pid == child
    awake.set_held(False)
    assert not awake.held
    assert child is not None
    assert not psutil.pid_exists(child)
    assert awake.pid is None
    awake.set_held(False)


def test_an_ended_one_is_held_again():
    awake = SleepInhibitor((sys.executable, "-IS", "-c", "pass"))
    awake.set_held(True)
    until(lambda: not awake.held, 10)
    awake.set_held(True)
    awake.set_held(False)


@pytest.mark.parametrize(("command", "warnings"), [((), 0), (("/nonexistent/caffeinate",), 1)])
def test_a_system_without_it_is_left_alone_and_a_missing_tool_is_logged_once(command: tuple[str, ...], warnings: int):
    awake = SleepInhibitor(command)
    with capture_logs() as logs:
        for _ in range(2):
            awake.set_held(True)
            assert not awake.held
    assert [line["event"] for line in logs] == ["idle sleep not prevented"] * warnings


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note = pathlib.Path(sys.argv[1])
note.with_suffix(".new").write_text(f"{os.getpid()} {os.getsid(0)}")
note.with_suffix(".new").rename(note)
time.sleep(60)
"""


def test_a_tool_has_a_session_of_its_own_and_is_killed_if_it_ignores_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host.sleep_inhibitor, "END_TIMEOUT_SECONDS", 0.1)
    awake, note = SleepInhibitor((sys.executable, "-IS", "-c", STUBBORN, str(tmp_path / "note"))), tmp_path / "note"
    awake.set_held(True)
    until(note.exists, 20)
    pid, session = map(int, note.read_text().split())
    awake.set_held(False)
    assert session == pid, "an interrupt at the terminal does not reach it"
    assert not psutil.pid_exists(pid)


def test_it_ends_if_its_parent_is_killed(tmp_path: Path):
    note = tmp_path / "pid"
    code = (
        "import sys, time; from host.sleep_inhibitor import SleepInhibitor; "
        f"SleepInhibitor((sys.executable, '-IS', '-c', {CAFFEINATE!r}, {str(note)!r})).set_held(True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    try:
        until(lambda: note.exists() and note.read_text(), 20)
    finally:
        process.kill()
        process.wait()
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize(("platform", "held"), [("darwin", True), ("linux", False)])
def test_a_mac_is_held_awake_by_caffeinate_for_our_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, held: bool
):
    assert host.sleep_inhibitor.CAFFEINATE == ("/usr/bin/caffeinate", "-i", "-w")
    tool, note = tmp_path / "caffeinate", tmp_path / "arguments"
    tool.write_text(f'#!/bin/sh\necho "$@" > {note}.new\nmv {note}.new {note}\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(host.sleep_inhibitor, "CAFFEINATE", (str(tool), "-i", "-w"))
    awake = SleepInhibitor()
    awake.set_held(True)
    assert awake.held is held
    if held:
        until(note.exists, 10)
        assert note.read_text() == f"-i -w {os.getpid()}\n"
    awake.set_held(False)
    assert not awake.held
