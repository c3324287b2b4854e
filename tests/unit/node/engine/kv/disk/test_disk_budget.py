"""Quota and write budget of the disk cache."""

from pathlib import Path

import pytest

from node.engine.kv.disk.disk_budget import WriteBudget, compute_quota


def test_write_budget_saves_up_one_day_at_most():
    budget = WriteBudget(100.0, 0.0)
    assert [budget.take(60, 0.0), budget.take(60, 0.0), budget.take(60, 86_400 * 0.2)] == [True, False, True]
    assert [budget.take(101, 1e9), budget.take(100, 1e9), budget.take(1, 1e9)] == [False, True, False]


def test_compute_quota_leaves_a_part_of_the_disk_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = {"total": 1000, "used": 600, "free": 400}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), disk))
    assert compute_quota("auto", tmp_path, 0) == 200
    assert compute_quota(10_000, tmp_path, 0) == 350
    assert compute_quota(100, tmp_path, 0) == 100
    disk["free"] = 60
    assert compute_quota("auto", tmp_path, 20) == 30
    disk["free"] = 10
    assert compute_quota("auto", tmp_path, 20) == 0
