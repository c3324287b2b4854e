"""Measurement of a disk for the report, which a lost network disk must not delay."""

import shutil
import threading
from pathlib import Path

import pytest

from node.agent.disk_meter import INTERVAL_SECONDS, UNREADABLE_SECONDS, DiskMeter, measure_disk
from wire.machine import Disk


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ["cache", "n" * 300], ids=["missing", "not readable"])
def test_measure_disk_reads_the_disk_of_a_folder_that_cannot_be_read_yet(tmp_path: Path, name: str) -> None:
    disk = measure_disk(tmp_path / name / "hub")
    usage = shutil.disk_usage(tmp_path)
    assert disk.total == usage.total
    assert abs(disk.free - usage.free) < 1 << 30
    assert disk.folder == str(tmp_path / name / "hub")


def test_meter_measures_at_once_and_again_after_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.agent.disk_meter.FIRST_SECONDS", 20.0)
    sizes, measured, clock = iter(range(1, 9)), threading.Semaphore(0), Clock()

    def measure(folder: Path) -> Disk:
        disk = Disk(next(sizes), 100, str(folder))
        measured.release()
        return disk

    meter = DiskMeter(tmp_path, measure, clock)
    assert (meter.read(), measured.acquire(timeout=20)) == (Disk(1, 100, str(tmp_path)), True)
    clock.now += INTERVAL_SECONDS - 1
    assert meter.read().free == 1
    assert not measured.acquire(blocking=False)
    clock.now += 1
    while meter.read().free != 2:
        threading.Event().wait(0.001)
    assert measured.acquire(timeout=20)
    assert not measured.acquire(timeout=0.05), "the next interval has begun with this measurement"
    assert DiskMeter(tmp_path).read().total == shutil.disk_usage(tmp_path).total


def test_disk_that_does_not_answer_delays_nothing_and_becomes_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.agent.disk_meter.FIRST_SECONDS", 0.01)
    answers, entered, clock = threading.Event(), threading.Semaphore(0), Clock()

    def measure(folder: Path) -> Disk:
        entered.release()
        answers.wait(20)
        return Disk(1, 100, str(folder))

    meter = DiskMeter(tmp_path, measure, clock)
    unreadable = Disk(folder=str(tmp_path))
    assert (meter.read(), entered.acquire(timeout=20)) == (unreadable, True)
    answers.set()
    while meter.read() == unreadable:
        threading.Event().wait(0.001)
    answers.clear()
    clock.now += INTERVAL_SECONDS
    while not entered.acquire(timeout=0.01):
        meter.read()
    clock.now += UNREADABLE_SECONDS - 1
    assert meter.read().total == 100, "the last measurement"
    clock.now += 1
    assert meter.read() == unreadable
    assert not entered.acquire(blocking=False), "no second thread waits for the disk"
    answers.set()
