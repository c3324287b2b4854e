"""The limiter over a machine with settable readings."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from host.settings_loader import SettingsError
from node.memory import sensor as memory_sensor
from node.memory.cap import MachineBounds
from node.memory.limits import LeaseHolder, Limiter
from node.memory.reading import STALE_AFTER_SECONDS, AvailableMemory
from node.memory.sensor import Sensor, open_sensor
from node.settings import resolve_settings
from tests.support.readings import FailingSource, Later
from wire.capacity.arithmetic import UNREADABLE
from wire.frames import MemoryLimits
from wire.report import Hardware
from wire.units import GIB, MIB

WORKER = """
import subprocess, sys
below = "held = bytearray(64 * 2**20); print(flush=True); input()"
mine = bytearray(32 * 2**20)
with subprocess.Popen([sys.executable, "-c", below], stdin=-1, stdout=-1) as child:
    child.stdout.readline()
    print("both are here", flush=True)
    sys.stdin.read()
    child.communicate(b"\\n")
"""


@dataclass
class SetMachine:
    """A machine of 128 GiB with readings that a test sets."""

    total: int = 128 * GIB
    metal: int | None = 96 * GIB
    container: int | None = None
    free: int | None = 128 * GIB
    sysctl: int | None = None
    held: int | None = None
    hardware: Hardware = field(default_factory=lambda: Hardware("M5", 128 * GIB))

    def read_bounds(self) -> MachineBounds:
        return MachineBounds(self.total, self.metal, self.container, self.sysctl)

    def read_reclaimable(self) -> int | None:
        return self.free

    def read_available(self) -> AvailableMemory:
        return AvailableMemory(self.free, "", "set", time.monotonic())

    def read_wired(self) -> int | None:
        return self.held


def limiter(machine: SetMachine, folder: Path | None = None, **memory: object) -> Limiter:
    resolved = resolve_settings([("--set", {f"memory.{key}": value for key, value in memory.items()})])
    return Limiter(resolved.value, machine, resolved.origins, folder)


def test_one_log_event_at_the_start_has_the_limits_and_their_sources():
    with structlog.testing.capture_logs() as logs:
        limiter(SetMachine(), cap="64GiB", margin="2GiB")
    (line,) = logs
    assert line["event"] == "guard resolved"
    assert (line["cap"], line["bound_by"], line["margin"], line["guard"]) == ("64.0 GiB", "setting", "2.0 GiB", "on")
    assert line["tier"] == "custom"
    assert line["remedy"]
    assert line["sources"] == {"memory.cap": "--set", "memory.margin": "--set"}
    with structlog.testing.capture_logs() as logs:
        limiter(SetMachine())
    assert logs[0]["sources"] == "defaults"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"margin": "0"}, "memory.margin is 0"),
        ({"guard": "off"}, "memory.guard is off"),
        ({"cap": "100GiB", "allow_above_metal_limit": True}, "above the Metal limit"),
        ({"cap": "8GiB", "margin": "8GiB"}, "is as large as the cap of 8.0 GiB"),
        ({"cap": "8GiB", "margin": "9GiB"}, "is as large as the cap of 8.0 GiB"),
    ],
)
def test_what_weakens_the_guard_is_warned_about_for_ever(settings: dict[str, Any], words: str):
    with structlog.testing.capture_logs() as logs:
        one = limiter(SetMachine(), **settings)
        one.warn()
    warnings = [line["warning"] for line in logs if line["event"] == "guard weakened"]
    assert len(warnings) == 2
    assert all(words in warning for warning in warnings)


def test_metals_limit_is_read_at_each_poll():
    machine = SetMachine()
    one = limiter(machine, margin="auto")
    before = one.compute_limits(GIB)
    machine.metal = 48 * GIB
    after = one.compute_limits(GIB)
    assert (before.cap, after.cap, after.ceiling) == (96 * GIB, 48 * GIB, 48 * GIB)
    assert after.bound_by == "metal"
    assert after.margin < before.margin, "a margin that follows the cap follows it down"
    machine.metal = 96 * GIB
    assert one.compute_limits(GIB) == before


@pytest.mark.parametrize("reported", [107 * GIB, 60 * GIB])
def test_what_the_device_reports_replaces_the_guess_and_a_later_start_begins_with_it(tmp_path: Path, reported: int):
    machine = SetMachine()
    one = limiter(machine, tmp_path)
    before = one.compute_limits(GIB)
    assert (before.cap, before.bound_by) == (96 * GIB, "metal")
    with structlog.testing.capture_logs() as logs:
        one.report_metal(7, reported)
        after = one.compute_limits(GIB)
    assert (after.cap, after.ceiling, after.bound_by) == (reported, reported, "metal")
    assert [line["event"] for line in logs] == ["metal limit", "cap changed"]
    with structlog.testing.capture_logs() as logs:
        one.report_metal(7, reported)
        one.report_metal(8, reported)
        assert one.compute_limits(GIB) == after
    assert logs == [], "the same figure is no news"
    assert limiter(machine, tmp_path).cap.bytes == reported
    assert limiter(machine).cap.bytes == 96 * GIB, "without a folder nothing is known"


def test_an_engine_without_metal_changes_nothing(tmp_path: Path):
    one = limiter(SetMachine(), tmp_path)
    one.report_metal(7, 0)
    assert one.compute_limits(GIB).cap == 96 * GIB
    assert list(tmp_path.iterdir()) == []


def test_a_cap_above_the_reported_limit_is_lowered_with_a_lasting_warning_and_refused_at_the_next_start(
    tmp_path: Path,
):
    machine = SetMachine()
    one = limiter(machine, tmp_path, cap="90GiB")
    assert one.list_warnings() == []
    one.report_metal(7, 80 * GIB)
    assert (one.compute_limits(GIB).cap, one.cap.bound_by) == (80 * GIB, "metal")
    assert one.list_warnings() == ["memory.cap is 90.0 GiB, above the Metal limit of 80.0 GiB: the lower value is used"]
    with pytest.raises(SettingsError, match=r"90GiB is 90.0 GiB, above the Metal limit of 80.0 GiB"):
        limiter(machine, tmp_path, cap="90GiB")
    assert limiter(machine, tmp_path, cap="90GiB", allow_above_metal_limit=True).cap.bytes == 90 * GIB


def test_a_limit_that_a_person_sets_or_removes_while_we_run_counts_where_it_is_lower_until_the_next_engine():
    machine = SetMachine()
    one = limiter(machine)
    one.report_metal(7, 107 * GIB)
    for wired, metal, cap in [(60, 60, 60), (112, 112, 107), (None, 96, 107)]:
        machine.sysctl, machine.metal = wired and wired * GIB, metal * GIB
        one.report_metal(7, 107 * GIB)
        assert one.compute_limits(GIB).cap == cap * GIB
    machine.sysctl = machine.metal = 112 * GIB
    one.report_metal(8, 112 * GIB)
    assert one.compute_limits(GIB).cap == 112 * GIB, "the next engine's device has the raised limit"
    machine.sysctl, machine.metal = None, 96 * GIB
    one.report_metal(8, 112 * GIB)
    assert one.compute_limits(GIB).cap == 96 * GIB, "the raised limit is gone, and the default is not known yet"


def test_a_figure_from_under_another_set_limit_does_not_stop_a_start_that_the_new_limit_allows(tmp_path: Path):
    machine = SetMachine()
    limiter(machine, tmp_path).report_metal(7, 107 * GIB)
    machine.sysctl = machine.metal = 116 * GIB
    assert limiter(machine, tmp_path, cap="112GiB").cap.bytes == 112 * GIB


def test_a_containers_limit_that_falls_while_we_run_counts_at_once():
    machine = SetMachine(metal=None)
    one = limiter(machine, cap="64GiB")
    assert one.compute_limits(GIB).ceiling == 64 * GIB
    machine.container = 16 * GIB
    assert one.compute_limits(GIB).ceiling == 16 * GIB
    assert one.list_warnings()


def test_ram_that_cannot_be_read_for_once_keeps_the_cap_and_at_the_start_is_an_error():
    machine = SetMachine()
    one = limiter(machine)
    machine.total, machine.metal = 0, None
    assert one.compute_limits(GIB).cap == 96 * GIB
    with pytest.raises(SettingsError, match="cannot be read"):
        limiter(machine)


def test_a_look_reads_the_machine_once_so_that_what_it_checked_is_what_it_judges():
    @dataclass
    class FailingMachine(SetMachine):
        """A machine whose RAM can be read only every second time."""

        reads: int = 0

        def read_bounds(self) -> MachineBounds:
            self.reads += 1
            return MachineBounds(self.total if self.reads % 2 else 0, self.metal, self.container)

    one = limiter(FailingMachine())
    for _ in range(4):
        assert one.compute_limits(GIB).cap == 96 * GIB


def test_what_the_system_can_spare_unreadable_means_a_ceiling_of_one_byte_by_that_name():
    machine = SetMachine()
    one = limiter(machine)
    machine.free = None
    found = one.compute_limits(GIB)
    assert (found.cap, found.ceiling, found.bound_by) == (96 * GIB, 1, UNREADABLE)
    assert one.current_ceiling.remedy


def told(one: Limiter, phys: int | None = 0) -> list[MemoryLimits]:
    """Poll once; return the limits that were sent."""
    frames: list[MemoryLimits] = []
    one.poll(phys, frames.append)
    return frames


def test_limits_are_sent_only_if_the_ceiling_moved_by_a_step():
    machine = SetMachine(free=32 * GIB)
    one = limiter(machine)
    assert len(told(one)) == 1
    machine.free = 32 * GIB - 64 * MIB + 1
    assert told(one) == []
    machine.free = 32 * GIB - 64 * MIB
    assert [frame.ceiling for frame in told(one)] == [32 * GIB - 64 * MIB]
    machine.free = 40 * GIB
    assert [frame.ceiling for frame in told(one)] == [40 * GIB], "up as well as down, and by more than a step"


def test_under_a_small_cap_a_step_is_small():
    machine = SetMachine(free=180 * MIB)
    one = limiter(machine, cap="200MiB", margin="8MiB")
    told(one)
    machine.free = 178 * MIB
    assert [frame.ceiling for frame in told(one)] == [178 * MIB]


def test_under_the_smallest_of_caps_a_step_is_a_byte():
    machine = SetMachine(free=49)
    one = limiter(machine, cap="50", margin="0")
    told(one)
    assert told(one) == []
    machine.free = 48
    assert [frame.ceiling for frame in told(one)] == [48]


def test_what_the_engine_holds_is_within_its_reach():
    one = limiter(SetMachine(free=32 * GIB))
    assert one.compute_limits(8 * GIB).ceiling == 40 * GIB
    assert one.compute_limits(0).ceiling == 32 * GIB, "before there is an engine it holds nothing"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Later:
    made = Later()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.mark.parametrize("fails", ["footprint", "spare", "both"])
def test_one_failed_reading_moves_no_ceiling(fails: str, clock: Later):
    machine = SetMachine(free=30 * GIB)
    one = limiter(machine)
    before = one.compute_limits(66 * GIB)
    assert before.ceiling == 96 * GIB
    clock.by += 1.0
    machine.free = 30 * GIB if fails == "footprint" else None
    assert one.compute_limits(66 * GIB if fails == "spare" else None) == before
    clock.by += 1.0
    machine.free = 20 * GIB
    assert one.compute_limits(66 * GIB).ceiling == 86 * GIB, "the next good reading counts at once"


@pytest.mark.parametrize("fails", ["footprint", "spare"])
def test_readings_that_fail_for_a_minute_are_unknown_once_the_last_is_stale(fails: str, clock: Later):
    machine = SetMachine(free=30 * GIB)
    one = limiter(machine)
    before = one.compute_limits(66 * GIB)
    found = []
    for _ in range(60):
        clock.by += 1.0
        machine.free = None if fails == "spare" else 30 * GIB
        found.append(one.compute_limits(None if fails == "footprint" else 66 * GIB))
    assert found[: int(STALE_AFTER_SECONDS) - 1] == [before] * (int(STALE_AFTER_SECONDS) - 1)
    assert {(limits.ceiling, limits.bound_by) for limits in found[int(STALE_AFTER_SECONDS) :]} == {(1, UNREADABLE)}
    machine.free = 30 * GIB
    assert one.compute_limits(66 * GIB) == before


def test_a_reading_that_never_came_is_unknown_from_the_first():
    one = limiter(SetMachine(free=30 * GIB))
    assert one.compute_limits(None).bound_by == UNREADABLE
    assert one.compute_limits(0).ceiling == 30 * GIB
    assert one.compute_limits(None).ceiling == 30 * GIB


def test_a_wall_clock_that_jumps_makes_no_reading_stale(clock: Later, monkeypatch: pytest.MonkeyPatch):
    machine = SetMachine(free=30 * GIB)
    one = limiter(machine)
    before = one.compute_limits(66 * GIB)
    machine.free = None
    for jump in (-1e9, 1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        assert one.compute_limits(66 * GIB) == before


def unreadable(pid: int) -> Sensor:
    return Sensor(FailingSource(open_sensor(pid).source, fails=True))


def test_a_worker_that_cannot_be_read_for_once_is_not_taken_off_the_ceiling(monkeypatch: pytest.MonkeyPatch):
    machine = SetMachine(free=32 * GIB)
    one = limiter(machine)
    one.begin_lease(4 * GIB, LeaseHolder.VIDEO)
    with subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, stdin=-1, stdout=-1) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"both are here\n"
        one.set_worker(worker.pid)
        before = one.compute_limits(0).ceiling
        with monkeypatch.context() as broken:
            broken.setattr(memory_sensor, "open_sensor", unreadable)
            assert one.measure_worker_footprint() == 0
            assert one.compute_limits(0).ceiling == before
        worker.communicate()
    assert one.compute_limits(0).ceiling == 28 * GIB, "an ended lease holds no memory"


def test_a_cap_above_metals_limit_is_an_error_at_the_start_and_lowered_while_we_run():
    with pytest.raises(SettingsError, match="above the Metal limit"):
        limiter(SetMachine(), cap="100GiB")
    machine = SetMachine()
    one = limiter(machine, cap="64GiB")
    machine.metal = 48 * GIB
    assert (one.compute_limits(GIB).cap, one.compute_limits(GIB).bound_by) == (48 * GIB, "metal")
    assert "the lower value is used" in one.list_warnings()[0]


def test_limits_are_sent_at_once_for_a_lease_of_any_size():
    one = limiter(SetMachine())
    told(one)
    one.begin_lease(MIB, LeaseHolder.VIDEO)
    (frame,) = told(one)
    assert (frame.leases, frame.ceiling, frame.bound_by) == (MIB, 96 * GIB - MIB, "leases")
    one.end_lease()
    (frame,) = told(one)
    assert (frame.leases, frame.ceiling) == (0, 96 * GIB)


def test_the_footprint_of_a_leases_worker_is_subtracted_once():
    machine = SetMachine(free=32 * GIB)
    one = limiter(machine)
    one.begin_lease(GIB, LeaseHolder.VIDEO)
    without = one.compute_limits(0).ceiling
    with subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, stdin=-1, stdout=-1) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"both are here\n"
        one.set_worker(worker.pid)
        assert one.measure_worker_footprint() > 96 * MIB, "the whole group counts"
        machine.held = GIB
        assert one.read_wired() == pytest.approx(GIB - one.measure_worker_footprint(), abs=16 * MIB), (
            "it may have all of it wired"
        )
        machine.held = None
        assert one.read_wired() is None
        assert one.compute_limits(0).ceiling - without == pytest.approx(one.measure_worker_footprint(), abs=16 * MIB)
        assert one.worker == worker.pid
        one.end_lease()
        assert (one.worker, one.holder, one.measure_worker_footprint()) == (None, None, 0)
        worker.communicate()


def test_no_worker_or_one_that_is_gone_holds_nothing():
    one = limiter(SetMachine())
    assert one.measure_worker_footprint() == 0
    one.set_worker(2**31 - 1)
    assert one.measure_worker_footprint() == 0


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    one = limiter(SetMachine(free=32 * GIB))
    told(one)
    for jump in (-1e9, 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        assert told(one) == []


def test_wired_bytes_are_never_negative_whatever_a_worker_holds():
    machine = SetMachine(held=0)
    one = limiter(machine)
    with subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, stdin=-1, stdout=-1) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"both are here\n"
        one.set_worker(worker.pid)
        assert one.read_wired() == 0
        worker.communicate()


def test_a_poll_returns_the_limits_of_this_moment_and_the_standing_ceiling_is_known_from_the_start():
    machine = SetMachine(free=32 * GIB)
    one = limiter(machine, cap="64GiB")
    assert (one.current_ceiling.bytes, one.current_ceiling.bound_by, one.leases) == (64 * GIB, "setting", 0)
    seen: list[MemoryLimits] = []
    assert one.poll(0, seen.append) == seen[0]
    machine.free = 32 * GIB - 1
    assert one.poll(0, seen.append).ceiling == 32 * GIB - 1
    assert len(seen) == 1


def test_a_cap_that_changes_while_we_run_is_warned_about_again():
    machine = SetMachine()
    one = limiter(machine, cap="64GiB")
    machine.container = 8 * GIB
    with structlog.testing.capture_logs() as logs:
        one.compute_limits(0)
    assert [line["event"] for line in logs] == ["cap changed", "guard weakened"]
