"""Quota and write budget of the disk cache."""

from pathlib import Path

import pytest

from node.engine.kv.disk.disk_budget import FILE, WriteBudget, compute_pause_seconds, compute_quota
from wire.units import MIB


def test_write_budget_saves_up_one_day_at_most():
    budget = WriteBudget(100.0, 0.0)
    assert [budget.take(60, 0.0), budget.take(60, 0.0), budget.take(60, 86_400 * 0.2)] == [True, False, True]
    assert [budget.take(101, 1e9), budget.take(100, 1e9), budget.take(1, 1e9)] == [False, True, False]


def test_the_write_budget_continues_in_the_next_process(tmp_path: Path):
    def left(wall: float) -> float:
        return WriteBudget(1000.0, 7.0, tmp_path, lambda: wall).compute_left(7.0)

    first = WriteBudget(1000.0, 0.0, tmp_path, lambda: 1e9)
    assert first.take(9, 0.0)
    assert left(1e9) == 1000, "too few bytes to store"
    assert first.take(791, 0.0)
    assert [left(1e9), left(1e9 + 0.3 * 86_400), left(2e9)] == [200, pytest.approx(500), 1000]
    assert first.take(9, 0.0)
    assert left(1e9) == 200, "bytes that are stored already do not count again"
    assert left(0.0) == 200, "a clock that was set back adds nothing"
    (tmp_path / FILE).write_text("{")
    assert left(1e9) == 1000


def test_a_write_budget_that_cannot_be_stored_is_used(tmp_path: Path):
    budget = WriteBudget(1000.0, 0.0, tmp_path / "gone")
    assert budget.take(500, 0.0)
    assert budget.compute_left(0.0) == 500


def test_compute_quota_leaves_a_part_of_the_disk_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = {"total": 1000, "used": 600, "free": 400}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), disk))
    assert compute_quota("auto", tmp_path, 0) == 200
    assert compute_quota(10_000, tmp_path, 0) == 350
    assert compute_quota(100, tmp_path, 0) == 100
    disk["free"] = 900
    assert compute_quota("auto", tmp_path, 0) == 200, "a fifth of the disk"
    disk["free"] = 300
    assert compute_quota("auto", tmp_path, 0) == 150, "half of the free space"
    disk["free"] = 60
    assert compute_quota("auto", tmp_path, 20) == 30
    disk["free"] = 200
    assert compute_quota("auto", tmp_path, 100) == 150, "the files of the cache count as free space"
    disk["free"] = 10
    assert compute_quota("auto", tmp_path, 20) == 0


def test_a_disk_that_cannot_be_read_has_no_quota(tmp_path: Path):
    assert compute_quota(100, tmp_path / "gone", 0) == 0


@pytest.mark.parametrize(
    ("size", "urgent", "seconds"),
    [(6 * MIB, False, 0.5), (24 * MIB, False, 1), (4 * MIB, True, 0.125), (16 * MIB, True, 0.25)],
)
def test_parts_are_written_at_a_speed_and_large_ones_in_an_interval(size: int, urgent: bool, seconds: float):
    assert compute_pause_seconds(size, urgent=urgent) == seconds
