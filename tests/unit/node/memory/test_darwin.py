import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from node.memory.cap import MachineBounds, estimate_metal_limit
from node.memory.darwin import DarwinFootprint, LibSystem, ProcBsdInfo, RusageV4
from node.memory.reading import HighWaterMarks
from node.memory.sensor import Mac, open_machine
from node.settings import resolve_settings
from wire.report import Hardware
from wire.units import GIB, MIB

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="compiles a stand-in that reads /proc"
)
SOURCE = Path(__file__).parents[3] / "support" / "libproc_standin.c"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> LibSystem:
    return LibSystem(build(tmp_path_factory.mktemp("standin")))


def build(folder: Path, *flags: str) -> str:
    library = folder / "libstandin.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", library, SOURCE], check=True)
    return str(library)


def _offset(layout: type[ctypes.Structure], field: str) -> int:
    return getattr(layout, field).offset


def test_the_layouts_are_apples():
    assert ctypes.sizeof(RusageV4) == 296
    assert _offset(RusageV4, "phys_footprint") == 72
    assert _offset(RusageV4, "lifetime_max_phys_footprint") == 240
    assert _offset(RusageV4, "interval_max_phys_footprint") == 280


def test_the_footprint_of_a_process_is_read_and_that_of_none_is_unknown(system: LibSystem):
    phys = DarwinFootprint(os.getpid(), system).read_footprint()
    assert phys is not None
    assert abs(phys - psutil.Process().memory_info().rss) < 8 * MIB
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert DarwinFootprint(child.pid, system).read_footprint() is None


def test_a_footprint_of_zero_is_unknown(system: LibSystem):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert system.read_footprint(child.pid) is None
    child.wait()


def test_the_footprint_rises_by_what_is_touched(system: LibSystem):
    source = DarwinFootprint(os.getpid(), system)
    before = source.read_footprint()
    block = bytearray(os.urandom(64 * MIB)) * 4
    after = source.read_footprint()
    assert before is not None
    assert after is not None
    assert after - before >= 200 * MIB
    assert len(block) == 256 * MIB


def test_high_water_marks_stay_after_the_memory_is_released_until_the_next_interval(system: LibSystem):
    source = DarwinFootprint(os.getpid(), system)
    block = bytearray(os.urandom(64 * MIB))
    high = source.read_footprint()
    del block
    low = source.read_footprint()
    assert high is not None
    assert low is not None
    assert low < high - 32 * MIB
    marks = source.read_high_water_marks()
    assert marks.lifetime is not None
    assert marks.interval is not None
    assert min(marks.lifetime, marks.interval) >= high
    assert source.begin_interval()
    marks = source.read_high_water_marks()
    assert marks.interval is not None
    assert marks.interval < high - 32 * MIB
    assert marks.lifetime is not None
    assert marks.lifetime >= high


def test_marks_of_no_process_are_unknown_and_a_refused_reset_returns_false(system: LibSystem):
    assert DarwinFootprint(2**22 + 1, system).read_high_water_marks() == HighWaterMarks()
    assert not DarwinFootprint(0, system).begin_interval()


def test_a_system_without_the_reset_reads_everything_else(tmp_path: Path):
    other = LibSystem(build(tmp_path, "-DWITHOUT_RESET"))
    assert not DarwinFootprint(os.getpid(), other).begin_interval()
    assert DarwinFootprint(os.getpid(), other).read_high_water_marks().lifetime


@pytest.mark.parametrize(("level", "word"), [("1", "normal"), ("2", "warn"), ("4", "critical"), ("9", "")])
def test_the_pressure_is_the_systems_own_word(
    system: LibSystem, monkeypatch: pytest.MonkeyPatch, level: str, word: str
):
    assert system.read_pressure() == ""
    monkeypatch.setenv("STANDIN_PRESSURE", level)
    assert system.read_pressure() == word


def test_a_mac_reads_its_limits_at_each_poll(system: LibSystem, monkeypatch: pytest.MonkeyPatch):
    mac = Mac(Hardware("M5", 128 * GIB), 0.5, system)
    assert mac.read_bounds() == MachineBounds(128 * GIB, estimate_metal_limit(128 * GIB))
    monkeypatch.setenv("STANDIN_WIRED_MB", "110000")
    assert mac.read_bounds() == MachineBounds(128 * GIB, 110000 * MIB, wired=110000 * MIB)
    monkeypatch.delenv("STANDIN_WIRED_MB")
    old = Mac(Hardware("M5", 128 * GIB, system="macOS 15.5"), 0.5, system)
    assert old.read_bounds() == MachineBounds(128 * GIB, 96 * GIB), "an older system gives less"


def test_a_macs_memory_is_psutils_counts(system: LibSystem):
    """Free and inactive pages are available; the cap also counts a share of the active ones."""
    counts: Any = SimpleNamespace(total=128 * GIB, available=15 * GIB, active=2 * GIB, wired=3 * GIB)
    mac = Mac(Hardware("M5", 128 * GIB), 0.5, system, lambda: counts)
    spare = mac.read_available()
    assert (spare.available, spare.pressure, spare.source) == (15 * GIB, "", "psutil")
    assert mac.read_reclaimable() == 16 * GIB
    assert mac.read_wired() == 3 * GIB
    blind = Mac(Hardware("M5", 128 * GIB), 0.5, system, lambda: None)
    assert (blind.read_available().available, blind.read_reclaimable(), blind.read_wired()) == (None, None, None)


def test_the_machine_is_described(system: LibSystem):
    assert system.read_chip_name() == "Apple M5 Max"


def test_a_mac_is_opened_with_the_active_pages_that_its_tier_counts(system: LibSystem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("node.memory.darwin.LibSystem", lambda: system)
    for tier, share in (("safe", 0.2), ("balanced", 0.5), ("aggressive", 0.8)):
        mac = open_machine(resolve_settings([("test", {"engine.kind": "mlx", "memory.tier": tier})]).value)
        assert isinstance(mac, Mac)
        assert (mac.active_share, mac.hardware.chip) == (share, "Apple M5 Max")


def test_a_wired_limit_is_a_configured_one(system: LibSystem, monkeypatch: pytest.MonkeyPatch):
    assert system.read_wired_limit() is None
    monkeypatch.setenv("STANDIN_WIRED_MB", "110000")
    assert system.read_wired_limit() == 110000 * MIB
    monkeypatch.setenv("STANDIN_WIRED_FAIL", "1")
    assert system.read_wired_limit() == 110000 * MIB, "one that cannot be read for once is what it was"
    monkeypatch.delenv("STANDIN_WIRED_FAIL")
    monkeypatch.setenv("STANDIN_WIRED_MB", "0")
    assert system.read_wired_limit() is None


def test_a_missing_library_is_an_error():
    with pytest.raises(OSError):
        LibSystem("/nowhere/libSystem.dylib")


def test_a_process_identity_distinguishes_processes_of_one_id(system: LibSystem):
    assert ctypes.sizeof(ProcBsdInfo) == 136
    assert _offset(ProcBsdInfo, "start_seconds") == 120
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert system.read_process_identity(os.getpid()) == f"{ticks // 100}.{ticks % 100 * 10_000}"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert system.read_process_identity(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert system.read_process_identity(child.pid) == "", "a zombie counts as ended"
    child.communicate()
    assert system.read_process_identity(child.pid) == ""
