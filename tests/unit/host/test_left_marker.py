import os
from pathlib import Path

from host.left_marker import delete_left_mark, has_left, mark_left


def test_a_node_that_left_is_marked_until_the_mark_is_deleted(tmp_path: Path):
    before = os.umask(0)
    try:
        assert not has_left(tmp_path)
        mark_left(tmp_path)
        mark_left(tmp_path)
    finally:
        os.umask(before)
    assert has_left(tmp_path)
    assert (tmp_path / "left").stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        delete_left_mark(tmp_path)
        assert not has_left(tmp_path)
