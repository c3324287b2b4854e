import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from node.memory import linux
from node.memory.cap import MachineBounds
from node.memory.linux import (
    LinuxFootprint,
    read_chip_name,
    read_container_free_bytes,
    read_container_limit,
    read_pressure,
    read_process_identity,
    read_unevictable_bytes,
)
from node.memory.reading import HighWaterMarks
from node.memory.sensor import LinuxMachine, describe_machine, list_group_members
from wire.units import GIB, MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_statm_agrees_with_psutil_and_sees_what_is_touched():
    source = LinuxFootprint(os.getpid())
    before = source.read_footprint()
    assert before is not None
    assert abs(before - psutil.Process().memory_info().rss) < 8 * MIB
    block = bytearray(os.urandom(64 * MIB))
    after = source.read_footprint()
    assert after is not None
    assert after - before > 56 * MIB
    assert len(block) == 64 * MIB
    source.close()
    assert source.read_footprint() is None


def test_a_process_that_is_gone_is_unknown_and_so_is_a_zombie():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    source = LinuxFootprint(child.pid)
    assert source.read_footprint()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert source.read_footprint() is None
    child.communicate()
    assert source.read_footprint() is None
    assert LinuxFootprint(child.pid).read_footprint() is None


def test_a_reading_rises_by_what_is_touched_and_a_mark_stays_when_it_falls():
    """Runs in a child process, because the memory of earlier tests must not be part of its marks."""
    script = """
        import os
        from node.memory.linux import LinuxFootprint
        source = LinuxFootprint(os.getpid())
        before = source.read_footprint()
        block = bytearray(os.urandom(2**26)) * 4
        high = source.read_footprint()
        del block
        low, marks = source.read_footprint(), source.read_high_water_marks()
        begun = source.begin_interval()
        later = source.read_high_water_marks()
        print(high - before, high - low, marks.lifetime - high, marks.interval - high, begun, high - later.interval,
              later.lifetime - marks.lifetime)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    rise, fall, lifetime, interval, begun, reset, kept = out.stdout.split()
    assert int(rise) >= 200 * MIB
    assert int(fall) >= 200 * MIB
    assert int(lifetime) >= -8 * MIB
    assert int(interval) >= -8 * MIB
    if begun == "True":
        assert int(reset) >= 200 * MIB, "the interval started again"
    assert int(kept) == 0, "the mark of all time does not"


def test_marks_of_a_process_that_is_gone_are_unknown(tmp_path: Path):
    gone = LinuxFootprint(7, tmp_path)
    assert gone.read_footprint() is None
    assert gone.read_high_water_marks() == HighWaterMarks()
    assert not gone.begin_interval()


@pytest.mark.parametrize(
    ("some", "word"), [("0.00", "normal"), ("9.99", "normal"), ("10.00", "warn"), ("60.00", "critical"), ("x", "")]
)
def test_pressure_is_a_word_for_how_long_tasks_waited(tmp_path: Path, some: str, word: str):
    assert read_pressure(tmp_path) == ""
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(f"some avg10={some} avg60=0.00 avg300=0.00 total=0\nfull avg10=99\n")
    assert read_pressure(tmp_path) == word


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        "MemTotal:       33554432 kB\nMemFree: 1024 kB\nBuffers: 0 kB\nCached: 0 kB\nActive: 0 kB\n"
        "Inactive: 0 kB\nShmem: 0 kB\nMemAvailable:   16777216 kB\nHugePages_Total:       3\n"
    )
    (folder / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Fine Chip\n")
    return folder


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_unevictable_bytes_are_read_if_meminfo_has_them(proc: Path):
    assert read_unevictable_bytes(proc) is None
    with (proc / "meminfo").open("a") as file:
        file.write("Unevictable:      2048 kB\nMlocked:          1024 kB\n")
    assert read_unevictable_bytes(proc) == 2 * MIB, "locked pages are included"
    assert read_unevictable_bytes(proc / "nowhere") is None


def test_the_chip_is_named(proc: Path):
    assert read_chip_name(proc) == "A Fine Chip"
    assert read_chip_name(proc / "missing") == ""


def test_without_a_cgroup_the_machine_counts(proc: Path, tmp_path: Path):
    assert read_container_limit(proc, tmp_path / "none") is None
    assert read_container_free_bytes(proc, tmp_path / "none") is None


def test_the_lowest_limit_of_a_v2_hierarchy_counts(proc: Path, tmp_path: Path):
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    cgroups = tmp_path / "cgroup"
    write(cgroups / "outer" / "inner", memory__max="max", memory__current=GIB)
    write(cgroups / "outer", memory__max=8 * GIB, memory__current=5 * GIB)
    assert read_container_limit(proc, cgroups) == 8 * GIB
    assert read_container_free_bytes(proc, cgroups) == 3 * GIB
    write(cgroups / "outer", memory__stat=f"anon 1\ninactive_file {GIB}")
    assert read_container_free_bytes(proc, cgroups) == 4 * GIB
    (cgroups / "outer" / "memory.current").unlink()
    assert read_container_free_bytes(proc, cgroups) is None, "free memory needs the limit and the use"


def test_a_v1_limit_counts_and_no_limit_does_not(proc: Path, tmp_path: Path):
    (proc / "self" / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    box = tmp_path / "cgroup" / "memory" / "box"
    write(box, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    assert read_container_limit(proc, tmp_path / "cgroup") is None
    write(box, memory__limit_in_bytes=2 * GIB)
    assert read_container_limit(proc, tmp_path / "cgroup") == 2 * GIB
    assert read_container_free_bytes(proc, tmp_path / "cgroup") == GIB
    write(box, memory__usage_in_bytes=3 * GIB)
    assert read_container_free_bytes(proc, tmp_path / "cgroup") == 0
    write(box, memory__stat=f"inactive_file {GIB // 4}\ntotal_inactive_file {2 * GIB}")
    assert read_container_free_bytes(proc, tmp_path / "cgroup") == GIB, "page cache of its child groups counts"


def test_a_v1_path_that_is_not_mounted_here_falls_back_to_the_mounts_top(proc: Path, tmp_path: Path):
    (proc / "self" / "cgroup").write_text("4:memory:/docker/abc\n")
    write(tmp_path / "cgroup" / "memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    assert read_container_limit(proc, tmp_path / "cgroup") == 4 * GIB


def test_this_machine_is_readable():
    here = LinuxMachine(describe_machine())
    total, available = here.read_bounds().total, here.read_reclaimable()
    assert here.hardware.memory <= total
    assert available
    assert available <= total
    assert here.read_available().available == pytest.approx(available, rel=0.1)


def test_the_memory_of_a_machine_that_cannot_be_read_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    here = LinuxMachine(describe_machine())
    assert (
        here.hardware.memory,
        here.read_bounds().total,
        here.read_reclaimable(),
        here.read_available().available,
    ) == (0, 0, None, None)


def test_the_free_memory_of_a_container_counts(proc: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    monkeypatch.setattr(linux, "read_container_free_bytes", lambda: 3 * GIB)
    assert LinuxMachine(describe_machine()).read_reclaimable() == 3 * GIB
    monkeypatch.setattr(linux, "read_container_free_bytes", lambda: 20 * GIB)
    assert LinuxMachine(describe_machine()).read_reclaimable() == 16 * GIB, "the machine has less"
    monkeypatch.setattr(linux, "read_container_free_bytes", lambda: None)
    assert LinuxMachine(describe_machine()).read_reclaimable() == 16 * GIB


def test_the_limit_of_a_container_counts_as_ram_if_it_is_lower(proc: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    for limit, memory in ((4 * GIB, 4 * GIB), (64 * GIB, 32 * GIB), (None, 32 * GIB)):
        monkeypatch.setattr(linux, "read_container_limit", lambda limit=limit: limit)
        assert describe_machine().memory == memory
        assert LinuxMachine(describe_machine()).read_bounds() == MachineBounds(32 * GIB, None, limit)


def test_a_group_is_its_living_processes():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert list_group_members(child.pid) == (child.pid,)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert list_group_members(child.pid) == (), "a zombie holds nothing"
    child.communicate()
    assert list_group_members(child.pid) == ()


def list_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_the_lifetime_maximum_survives_the_intervals(tmp_path: Path):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "clear_refs").touch()
    source = LinuxFootprint(7, tmp_path)

    def mark(size: int) -> HighWaterMarks:
        (folder / "status").write_text(f"Name:\tx\nVmHWM:\t{size} kB\nThreads:\t3\n")
        return source.read_high_water_marks()

    assert mark(100) == HighWaterMarks(100 * 1024, 100 * 1024)
    assert mark(40) == HighWaterMarks(100 * 1024, 40 * 1024)
    (folder / "status").write_text("VmHWM:\t300 kB\n")
    assert source.begin_interval()
    assert (folder / "clear_refs").read_text() == "5"
    assert mark(50) == HighWaterMarks(300 * 1024, 50 * 1024), "the maximum before the reset counts"


def test_a_closed_source_holds_no_descriptor_and_may_be_closed_again():
    before = list_descriptors()
    source = LinuxFootprint(os.getpid())
    assert len(list_descriptors()) == len(before) + 1
    for _ in range(2):
        source.close()
        assert list_descriptors() == before
    assert source.read_footprint() is None


def test_a_process_is_identified_by_boot_and_start_time(tmp_path: Path):
    (tmp_path / "7").mkdir()
    boot, stat = tmp_path / "sys/kernel/random/boot_id", tmp_path / "7/stat"
    boot.parent.mkdir(parents=True)
    boot.write_text("b-1\n")
    fields = ["S", *("0" for _ in range(18)), "4711"]

    def identify(*changed: str) -> str:
        stat.write_text(f"7 (a) b (c)) {' '.join(changed)}")
        return read_process_identity(7, tmp_path)

    before = list_descriptors()
    assert identify(*fields) == identify(*fields, "0") == "b-1:4711"
    assert list_descriptors() == before
    assert [identify(state, *fields[1:]) for state in ("R", "Z", "X")] == ["b-1:4711", "", ""]
    assert identify(*fields[:-1]) == "", "a line without a start time"
    boot.unlink()
    assert identify(*fields) == ":4711"
    assert read_process_identity(8, tmp_path) == ""


def test_sizes_have_their_unit_and_the_pressure_its_line(proc: Path):
    (proc / "meminfo").write_text("Unevictable:      2048\n")
    assert read_unevictable_bytes(proc) == 2048
    write(proc / "pressure", memory="full avg10=70.00 total=0\nsome avg10=20.00 total=0")
    assert read_pressure(proc) == "warn"


@pytest.mark.parametrize(("inner", "outer"), [(2, 8), (8, 2)])
def test_the_lowest_limit_and_the_least_free_memory_count_at_any_level(
    proc: Path, tmp_path: Path, inner: int, outer: int
):
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    cgroups = tmp_path / "cgroup"
    write(cgroups / "outer" / "inner", memory__max=inner * GIB, memory__current=GIB)
    write(cgroups / "outer", memory__max=outer * GIB, memory__current=GIB)
    assert read_container_limit(proc, cgroups) == 2 * GIB
    assert read_container_free_bytes(proc, cgroups) == GIB


def test_limits_of_cgroups_for_other_controllers_do_not_count(proc: Path, tmp_path: Path):
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/small\n4:memory:/box\n")
    write(tmp_path / "cgroup" / "memory" / "small", memory__limit_in_bytes=MIB, memory__usage_in_bytes=0)
    write(tmp_path / "cgroup" / "memory" / "box", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    assert read_container_limit(proc, tmp_path / "cgroup") == GIB
