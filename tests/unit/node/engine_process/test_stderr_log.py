import os
from pathlib import Path

from node.engine_process.stderr_log import MAX_LOG_BYTES, TAIL_BYTES, EngineLog


def test_the_tail_since_a_start_omits_lines_that_only_inform(tmp_path: Path):
    path = tmp_path / "deep" / "engine.log"
    log = EngineLog(path)
    assert (log.measure_size(), log.read_tail(0)) == (0, "")
    os.close(log.open())
    path.write_text("old death\n")
    start = log.measure_size()
    assert log.read_tail(start) == ""
    path.write_text("old death\none\n\n two \nthree\n 2026 [info ] gate\nfour\n")
    assert log.read_tail(start) == "two | three | four"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_quotation_is_short_and_never_fails_on_bad_bytes(tmp_path: Path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"\xff" * 10 * TAIL_BYTES)
    assert 0 < len(EngineLog(path).read_tail(0)) <= TAIL_BYTES


def test_a_long_log_is_put_aside_and_a_shorter_one_is_read_from_its_beginning(tmp_path: Path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    log = EngineLog(path)
    start = log.measure_size()
    os.close(log.open())
    assert log.measure_size() == 0
    assert path.with_suffix(".log.1").stat().st_size == MAX_LOG_BYTES + 1
    path.write_text("dead\n")
    assert log.read_tail(start) == "dead"


def test_a_log_is_bounded_while_its_engine_writes_on(tmp_path: Path):
    path = tmp_path / "engine.log"
    log = EngineLog(path)
    descriptor = log.open()
    try:
        os.write(descriptor, b"first\n")
        older = path.with_suffix(".log.1")
        older.write_bytes(b"former\n")
        log.bound()
        assert (log.measure_size(), older.read_bytes()) == (6, b"former\n"), "the older lines stay until a rotation"
        older.unlink()
        os.write(descriptor, b"x" * MAX_LOG_BYTES + b"last\n")
        start = log.measure_size()
        log.bound()
        assert log.measure_size() == 0
        assert (older.stat().st_size, older.stat().st_mode & 0o777) == (MAX_LOG_BYTES, 0o600)
        assert older.read_bytes().endswith(b"xlast\n"), "the end of the log has the cause of a crash"
        os.write(descriptor, b"dead\n")
        assert (path.read_bytes(), log.read_tail(start)) == (b"dead\n", "dead")
    finally:
        os.close(descriptor)


def test_a_log_that_is_not_there_is_bounded(tmp_path: Path):
    EngineLog(tmp_path / "none.log").bound()
