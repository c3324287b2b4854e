"""The file of a pause is read as it was written, by its owner alone, and a change is detected. A node that left is
marked."""

import os
import stat
from pathlib import Path

import pytest

from host.node_marks import MAX_NAME_CHARS, PauseFile, PauseRecord, delete_left_mark, has_left, mark_left


def test_a_pause_is_kept_privately_until_it_is_removed(tmp_path: Path):
    file = PauseFile(tmp_path / "node")
    assert (file.read_stamp(), file.remove()) == (None, False)
    file.write(PauseRecord(1_700_000_000.5, "x" * 200))
    assert file.path == tmp_path / "node" / "pause.json"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (file.path, file.path.parent)] == [0o600, 0o700]
    assert file.read() == PauseRecord(1_700_000_000.5, "x" * MAX_NAME_CHARS)
    first = file.read_stamp()
    file.write(PauseRecord(None))
    assert file.read() == PauseRecord(None, "")
    assert first is not None
    assert file.read_stamp() not in (None, first)
    assert (file.remove(), file.remove(), file.read_stamp()) == (True, False, None)
    with pytest.raises(FileNotFoundError):
        file.read()


def test_a_file_that_is_no_pause_is_a_value_error(tmp_path: Path):
    for text in ("", "[]", '{"until": "soon"}', '{"until": null, "else": 1}'):
        (tmp_path / "pause.json").write_text(text)
        with pytest.raises(ValueError, match=r"\w"):
            PauseFile(tmp_path).read()


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
