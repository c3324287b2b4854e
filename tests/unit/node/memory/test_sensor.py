import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.memory import linux
from node.memory.cap import MachineBounds
from node.memory.sensor import (
    Sensor,
    describe_machine,
    list_group_members,
    measure_footprint,
    measure_group_footprint,
    open_machine,
    open_sensor,
    read_process_identity,
)
from node.settings import NodeSettings, resolve_settings
from tests.support.readings import FailingSource
from wire.units import GIB


def test_a_sensor_dates_its_readings_and_names_their_source():
    sensor = open_sensor(os.getpid())
    reading = sensor.read_footprint()
    assert reading.is_live(time.monotonic())
    assert reading.source in {"statm", "phys_footprint"}
    sensor.close()


def test_the_scripted_engine_has_a_simulated_machine():
    settings = resolve_settings([("test", {"engine.kind": "scripted", "engine.scripted.memory": "64GiB"})]).value
    pretended = open_machine(settings)
    assert pretended.hardware.memory == 64 * GIB
    assert pretended.read_bounds() == MachineBounds(64 * GIB, int(51.84 * GIB))
    assert pretended.read_reclaimable() == 64 * GIB
    assert pretended.read_available().available == 64 * GIB
    assert open_machine(NodeSettings()).hardware == describe_machine(), "real models are judged on the real machine"


def test_a_simulated_machine_reads_its_file_at_each_reading(tmp_path: Path):
    file = tmp_path / "readings"
    tree = {"engine.kind": "scripted", "engine.scripted.memory": "64GiB", "engine.scripted.readings": str(file)}
    pretended = open_machine(resolve_settings([("test", tree)]).value)
    assert (pretended.read_reclaimable(), pretended.read_wired()) == (64 * GIB, None), "there is no file yet"
    for text, reclaimable, wired in (
        ('{"reclaimable": 5, "wired": 7}', 5, 7),
        ('{"reclaimable": null, "wired": null}', None, None),
        ('{"wired": 8}', 64 * GIB, 8),
        ("{", 64 * GIB, None),
        ('{"reclaimable": "much"}', 64 * GIB, None),
    ):
        file.write_text(text)
        assert (pretended.read_reclaimable(), pretended.read_available().available, pretended.read_wired()) == (
            reclaimable,
            reclaimable,
            wired,
        )


def test_a_real_machine_has_wired_bytes():
    wired = open_machine(NodeSettings()).read_wired()
    assert wired is not None
    assert 0 <= wired <= describe_machine().memory


@pytest.fixture
def idle_child() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own that waits on its standard input, and has started."""
    program = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def _read_child(pid: int) -> tuple[tuple[int, ...], str, int | None]:
    return list_group_members(pid), read_process_identity(pid), measure_group_footprint(pid)


def test_other_own_processes_are_read_by_their_group(idle_child: subprocess.Popen[bytes]):
    pid = idle_child.pid
    members, mark, footprint = _read_child(pid)
    assert members == (pid,)
    assert mark
    assert mark != read_process_identity(os.getpid())
    assert footprint == pytest.approx(open_sensor(pid).read_footprint().phys, rel=0.2)


def test_a_dead_process_holds_nothing_as_a_zombie_and_after(idle_child: subprocess.Popen[bytes]):
    pid = idle_child.pid
    idle_child.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert _read_child(pid) == ((), "", None), "a zombie holds nothing"
    assert measure_footprint((pid,)) is None
    idle_child.wait()
    assert _read_child(pid) == ((), "", None)
    assert measure_footprint((pid,)) is None, "it ended after the group was listed"
    own = measure_footprint((os.getpid(),))
    assert own is not None
    assert measure_footprint((os.getpid(), pid)) == pytest.approx(own, rel=0.2)


def test_a_living_process_that_cannot_be_read_makes_the_total_unknown(monkeypatch: pytest.MonkeyPatch):
    def open_failing(pid: int) -> Sensor:
        return Sensor(FailingSource(open_sensor(pid).source, fails=pid == os.getppid()))

    monkeypatch.setattr("node.memory.sensor.open_sensor", open_failing)
    assert measure_footprint((os.getpid(),))
    assert measure_footprint((os.getpid(), os.getppid())) is None


@pytest.mark.skipif(sys.platform != "linux", reason="a reader on macOS has no descriptor")
def test_readings_leave_no_descriptor_open():
    process = psutil.Process()
    before = process.num_fds()
    sensor = open_sensor(os.getpid())
    assert process.num_fds() == before + 1
    assert sensor.begin_interval() is sensor.source.begin_interval()
    sensor.close()
    assert measure_footprint((os.getpid(), os.getppid()))
    assert process.num_fds() == before


def test_what_the_system_has_left_has_a_source_and_a_time():
    spare = open_machine(NodeSettings()).read_available()
    assert spare.available
    assert spare.source
    assert spare.pressure in {"", "normal", "warn", "critical"}
    assert 0 <= time.monotonic() - spare.at < 1


def test_a_real_machine_bounds_a_cap_by_its_ram():
    bounds = open_machine(NodeSettings()).read_bounds()
    assert bounds.total >= bounds.ram == describe_machine().memory


def test_this_machine_is_described():
    hardware = describe_machine()
    assert hardware.memory > GIB
    assert hardware.cores >= 1
    assert hardware.chip
    assert sys.platform != "linux" or hardware.chip == linux.read_chip_name() or not linux.read_chip_name()
    assert hardware.python.count(".") == 2


@pytest.mark.parametrize("memory", [1, 5 * GIB])
def test_the_ram_can_be_overridden(memory: int):
    assert describe_machine(memory).memory == memory
