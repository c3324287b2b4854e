"""Last use of models: recorded, stored now and then, and read by the next process."""

from pathlib import Path

import pytest

from node.models.last_use import FILE, STORE_INTERVAL_SECONDS, LastUse


class Wall:
    """Clock of the test, in Unix seconds."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_last_use_is_the_time_before_the_idle_seconds_and_survives_a_restart(tmp_path: Path) -> None:
    wall = Wall()
    use = LastUse(tmp_path, wall)
    assert use.find("m") == 0.0
    assert use.record("m", 100.0) == 999_900.0
    assert LastUse(tmp_path, wall).find("m") == 999_900.0


def test_last_use_is_stored_at_most_once_an_hour(tmp_path: Path) -> None:
    wall = Wall()
    use = LastUse(tmp_path, wall)
    use.record("m", 0.0)
    first = (tmp_path / FILE).read_bytes()
    wall.now += STORE_INTERVAL_SECONDS - 1
    assert use.record("m", 0.0) == wall.now
    assert (tmp_path / FILE).read_bytes() == first
    wall.now += 1
    use.record("m", 0.0)
    assert LastUse(tmp_path, wall).find("m") == wall.now


def test_a_clock_that_was_set_back_does_not_move_the_last_use_back(tmp_path: Path) -> None:
    wall = Wall()
    use = LastUse(tmp_path, wall)
    use.record("m", 0.0)
    wall.now -= 5000
    assert use.record("m", 0.0) == 1_000_000.0


def test_an_unreadable_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    use = LastUse(tmp_path, Wall())
    assert use.find("m") == 0.0
    use.record("m", 0.0)
    assert LastUse(tmp_path, Wall()).find("m") == 1_000_000.0


def test_the_folder_is_created_with_the_folders_above(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "node"
    LastUse(folder, Wall()).record("m", 0.0)
    assert LastUse(folder).find("m") == 1_000_000.0


def test_without_a_folder_the_last_use_is_in_memory_only() -> None:
    use = LastUse(None, Wall())
    assert use.record("m", 100.0) == use.find("m") == 999_900.0


def test_of_too_many_models_the_one_that_was_stored_longest_ago_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.models.last_use.MAX_MODELS", 2)
    wall = Wall()
    use = LastUse(tmp_path, wall)
    for name in ("a", "b", "a", "c"):
        wall.now += STORE_INTERVAL_SECONDS
        use.record(name, 0.0)
    assert [LastUse(tmp_path).find(name) for name in ("a", "b", "c")] == [
        wall.now - STORE_INTERVAL_SECONDS,
        0,
        wall.now,
    ]
