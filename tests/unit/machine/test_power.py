"""Power readings: what macOS's tools print and what Linux shows, and the None of what neither says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine.power import BATTERIES, TOUCHED, Power, batteries_in, idle_in, read_power, supplied_by

LAPTOP = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t85%; discharging; 4:12 remaining present: true
"""
CHARGED = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)\t100%; charged; 0:00 remaining present: true
"""
HELD = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)\t80%; AC attached; not charging present: true
"""
STUDIO = "Now drawing from 'AC Power'\n"
BEHIND_UPS = """Now drawing from 'UPS Power'
 -Back-UPS ES 700G FW:871.O4 .I USB FW:O4  (id=51118080)\t97%; discharging; 0:31 remaining present: true
"""
IOREG = """+-o IOHIDSystem  <class IOHIDSystem, id 0x100000b2c, registered, matched, active, busy 0 (0 ms), retain 18>
    {
      "IOClass" = "IOHIDSystem"
      "HIDIdleTime" = 62017345875
      "HIDPointerAcceleration" = 45056
    }
"""


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        (LAPTOP, (False, 85.0)),
        (CHARGED, (True, 100.0)),
        (HELD, (True, 80.0)),
        (STUDIO, (True, None)),
        (BEHIND_UPS, (False, 97.0)),
        ("", (None, None)),
        ("No adapter attached.\n", (None, None)),
    ],
)
def test_what_pmset_prints(listing: str, found: tuple[bool | None, float | None]):
    assert batteries_in(listing) == found


def test_idle_time_is_in_nanoseconds():
    assert idle_in(IOREG) == pytest.approx(62.017345875)
    assert idle_in("") is None


@given(st.text(max_size=300))
def test_no_text_breaks_the_parsers(text: str):
    plugged, battery = batteries_in(text)
    assert plugged in (None, True, False)
    assert battery is None or 0 <= battery <= 999
    assert idle_in(text) is None or isinstance(idle_in(text), float)


BATTERY = {"type": "Battery", "present": "1", "capacity": "41", "status": "Discharging"}
MOUSE = {"type": "Battery", "scope": "Device", "capacity": "3", "status": "Discharging"}


@pytest.mark.parametrize(
    ("supplies", "found"),
    [
        ([], (True, None)),
        ([MOUSE], (True, None)),
        ([{"type": "Mains", "online": "0"}, BATTERY, MOUSE], (False, 41.0)),
        ([{"type": "Mains", "online": "1"}, BATTERY], (True, 41.0)),
        ([{"type": "USB", "online": "1"}, {"type": "Mains", "online": "0"}, BATTERY], (True, 41.0)),
        ([BATTERY], (False, 41.0)),
        ([{**BATTERY, "status": "Full", "capacity": "100"}], (True, 100.0)),
        ([BATTERY, {**BATTERY, "capacity": "7"}], (False, 7.0)),
        ([{**BATTERY, "capacity": "?"}], (False, None)),
        ([{**BATTERY, "present": "0"}], (True, None)),
    ],
)
def test_what_linux_shows(supplies: list[dict[str, str]], found: tuple[bool | None, float | None]):
    assert supplied_by(supplies) == found


def test_a_mac_is_read_through_its_tools():
    said = {BATTERIES: LAPTOP, TOUCHED: IOREG}
    assert read_power("darwin", said.__getitem__) == Power(False, 85.0, pytest.approx(62.017345875))


def test_linux_is_read_from_its_files(tmp_path: Path):
    for name, files in (("AC", {"type": "Mains\n", "online": "0\n"}), ("BAT0", BATTERY)):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    assert read_power("linux", supplies=tmp_path) == Power(False, 41.0, None)


def test_nothing_readable_is_nothing_known(tmp_path: Path):
    assert read_power("linux", supplies=tmp_path / "none") == Power()
    assert read_power("darwin", lambda _: "") == Power()
