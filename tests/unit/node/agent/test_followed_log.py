"""A node's log in windows: the newest part, the part after the last window, and a file that was started again."""

from pathlib import Path

from node.agent.fetch import read_chunks
from wire.frames import FetchRequest


def window(file: Path, offset: int, limit: int = 1000) -> tuple[bytes, int, int]:
    *answers, last = read_chunks(FetchRequest(1, "logs", offset, limit), file, lines=True)
    return b"".join(piece.payload for piece in answers), last.next, last.end


def test_a_log_is_followed_from_where_the_last_window_ended(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"one\ntwo\n")
    assert window(file, -4) == (b"two\n", 0, 8)
    assert window(file, 8) == (b"", 0, 8)
    with file.open("ab") as more:
        more.write(b"three\n")
    assert window(file, 8) == (b"three\n", 0, 14)
    assert window(file, 8, 2) == (b"th", 10, 10)
    assert window(file, 1) == (b"ne\ntwo\nthree\n", 0, 14), "the offset of a reader is exact"


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"new\n")
    assert window(file, 500) == (b"new\n", 0, 4)


def test_the_rest_of_a_rotated_file_precedes_the_new_file(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"one\ntwo\nthree\n")
    file.rename(tmp_path / "node.log.1")
    assert window(file, 4) == (b"two\nthree\n", 0, 0), "no file has the name during a rotation"
    file.write_bytes(b"new\n")
    assert window(file, 8, 2) == (b"th", 10, 10)
    assert window(file, 10) == (b"ree\n", 0, 0)
    assert window(file, 14) == (b"", 0, 0)
    assert window(file, 0) == (b"new\n", 0, 4)


def test_a_missing_log_is_an_error(tmp_path: Path):
    (answer,) = read_chunks(FetchRequest(1, "logs", -10, 10), tmp_path / "none")
    assert answer.last
    assert answer.error
