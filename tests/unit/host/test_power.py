"""The power supply read by psutil, the idle time printed by macOS's tool, and None where neither is known."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import host.power
from host.power import TOUCHED, Battery, PowerState, parse_idle_seconds, read_battery, read_power

IOREG = """+-o IOHIDSystem  <class IOHIDSystem, id 0x100000b2c, registered, matched, active, busy 0 (0 ms), retain 18>
    {
      "IOClass" = "IOHIDSystem"
      "HIDIdleTime" = 62017345875
      "HIDPointerAcceleration" = 45056
    }
"""


def test_idle_time_is_in_nanoseconds():
    assert parse_idle_seconds(IOREG) == 62.017345875
    assert parse_idle_seconds("") is None


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(text: str):
    assert parse_idle_seconds(text) is None or isinstance(parse_idle_seconds(text), float)


def battery(percent: float, plugged: bool | None) -> Battery:
    return cast("Battery", SimpleNamespace(percent=percent, power_plugged=plugged))


@pytest.mark.parametrize(
    ("found", "power"),
    [
        (battery(85.0, False), PowerState(False, 85.0)),
        (battery(100.0, True), PowerState(True, 100.0)),
        (battery(7.0, None), PowerState(None, 7.0)),
        (None, PowerState(True, None)),
    ],
)
def test_a_machine_without_a_battery_is_on_mains(found: Battery | None, power: PowerState):
    assert read_power("linux", battery=lambda: found) == power


def test_a_mac_is_read_through_psutil_and_its_tool():
    found: dict[tuple[str, ...], str] = {TOUCHED: IOREG}
    power = read_power("darwin", lambda command: found[tuple(command)], lambda: battery(85.0, False))
    assert (power.plugged, power.battery) == (False, 85.0)
    assert power.idle_s == pytest.approx(62.017345875)


@pytest.mark.parametrize("error", [OSError("no"), RuntimeError("no"), psutil.Error()])
def test_what_cannot_be_read_is_not_known(error: Exception):
    def fails() -> Battery | None:
        raise error

    assert read_power("linux", battery=fails) == PowerState()
    assert read_power("darwin", lambda _: "", fails) == PowerState()
    assert read_power("darwin", lambda _: IOREG, fails) == PowerState(idle_s=62.017345875), "the tool still counts"


@pytest.mark.parametrize(("status", "idle"), [(0, 62.017345875), (1, None)])
def test_the_output_of_the_tool_counts_only_if_it_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, idle: float | None
):
    (tmp_path / "listing").write_text(IOREG)
    tool = ("/bin/sh", "-c", f"cat '{tmp_path}/listing'; exit {status}")
    monkeypatch.setattr(host.power, "TOUCHED", tool)
    assert read_power("darwin", battery=lambda: None) == PowerState(True, None, idle)
    assert read_power("linux", battery=lambda: None) == PowerState(True, None, None)
    monkeypatch.setattr(host.power, "TOUCHED", (str(tmp_path / "missing"),))
    assert read_power("darwin", battery=lambda: None) == PowerState(True, None, None)


def test_the_battery_is_the_one_of_psutil(monkeypatch: pytest.MonkeyPatch):
    found = battery(85.0, False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    assert read_battery() is found
    monkeypatch.delattr(psutil, "sensors_battery")
    assert read_battery() is None


def test_this_machine_is_readable():
    found = read_battery()
    assert found is None or 0 <= found.percent <= 100
