import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from node.memory.darwin import Footprint, RusageV4, System, VmStatistics64
from wire.units import GIB, MIB

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="compiles a stand-in that reads /proc"
)
SOURCE = Path(__file__).parents[3] / "support" / "libproc_standin.c"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    library = tmp_path_factory.mktemp("standin") / "libstandin.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return System(str(library))


def test_the_layouts_are_apples():
    assert ctypes.sizeof(RusageV4) == 296
    assert RusageV4.phys_footprint.offset == 72
    assert ctypes.sizeof(VmStatistics64) == 152


def test_the_footprint_of_a_process_is_read_and_that_of_none_is_unknown(system: System):
    phys = Footprint(os.getpid(), system).phys()
    assert phys is not None
    assert abs(phys - psutil.Process().memory_info().rss) < 8 * MIB
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert Footprint(child.pid, system).phys() is None


def test_a_footprint_of_zero_is_unknown(system: System):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert system.phys(child.pid) is None
    child.wait()


def test_the_machine_is_described(system: System):
    assert system.total_memory() == 128 * GIB
    assert system.chip_name() == "Apple M5 Max"


def test_a_wired_limit_is_one_that_somebody_set(system: System, monkeypatch: pytest.MonkeyPatch):
    assert system.wired_limit() is None
    monkeypatch.setenv("STANDIN_WIRED_MB", "110000")
    assert system.wired_limit() == 110000 * MIB


def test_reclaimable_is_free_and_inactive_and_a_share_of_active(system: System, monkeypatch: pytest.MonkeyPatch):
    assert system.reclaimable(0.5) == (1000 + 500 + 100) * 16384
    monkeypatch.setenv("STANDIN_STATISTICS_FAIL", "1")
    assert system.reclaimable(0.5) is None


def test_a_missing_library_is_an_error():
    with pytest.raises(OSError):
        System("/nowhere/libSystem.dylib")
