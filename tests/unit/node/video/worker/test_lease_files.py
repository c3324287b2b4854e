"""The files by which an agent and a worker's parent communicate: locks, files written once, and a growing file."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import pytest

from node.video.worker.lease_files import (
    CLAIM,
    GRANT,
    MAX_LINE_BYTES,
    FileTail,
    LeaseGrant,
    WorkerClaim,
    is_locked,
    lock_file,
    read_claim,
    read_grant,
    write_new,
)


def test_an_exclusive_lock_excludes_all_others_until_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "guard"
    held = lock_file(file)
    assert held is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not os.get_inheritable(held), "a worker must not hold the lock of its parent"
    assert (lock_file(file), lock_file(file, shared=True), is_locked(file)) == (None, None, True)
    os.close(held)
    assert not is_locked(file)


def test_a_lock_is_awaited_until_it_is_released(tmp_path: Path) -> None:
    file = tmp_path / "guard"
    held = lock_file(file, wait=True)
    assert held is not None
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lock_file, file, wait=True)
        assert wait([waiting], 0.05).not_done
        os.close(held)
        descriptor = waiting.result(10)
    assert descriptor is not None
    assert is_locked(file)
    os.close(descriptor)


def test_shared_locks_exclude_only_an_exclusive_lock(tmp_path: Path) -> None:
    file = tmp_path / "guard"
    shared = [lock_file(file, shared=True), lock_file(file, shared=True)]
    assert None not in shared
    assert (lock_file(file), is_locked(file)) == (None, False)
    for descriptor in shared:
        assert descriptor is not None
        os.close(descriptor)
    held = lock_file(file)
    assert held is not None
    os.close(held)


def test_a_look_at_a_lock_leaves_no_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "guard"
    held = lock_file(file)
    assert held is not None
    before = len(os.listdir("/dev/fd"))
    assert [is_locked(file), lock_file(file)] == [True, None]
    assert len(os.listdir("/dev/fd")) == before
    os.close(held)
    assert not is_locked(file)
    assert len(os.listdir("/dev/fd")) == before - 1


def test_a_lock_is_no_link_and_its_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path, number in ((tmp_path / "link", errno.ELOOP), (tmp_path / "none" / "guard", errno.ENOENT)):
        for attempt in (lock_file, is_locked):
            with pytest.raises(OSError, match=os.strerror(number)) as failed:
                attempt(path)
            assert failed.value.errno == number


def test_a_file_is_written_once_and_privately(tmp_path: Path) -> None:
    file = tmp_path / CLAIM
    write_new(file, b"first")
    with pytest.raises(FileExistsError):
        write_new(file, b"second")
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"first", 0o600)
    assert os.listdir(tmp_path) == [CLAIM], "no temporary file is left"
    leftover = tmp_path / f"{GRANT}.{os.getpid()}"
    leftover.write_bytes(b"longer than the new content")
    write_new(tmp_path / GRANT, b"new")
    assert (tmp_path / GRANT).read_bytes() == b"new"
    leftover.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write_new(tmp_path / GRANT, b"")
    assert not (tmp_path / "elsewhere").exists()


def test_grant_and_claim_are_read_from_their_files(tmp_path: Path) -> None:
    grant = LeaseGrant(
        lease="l-1", generation=2, size=3, python="/bin/python", environment={"A": "b"}, job={"prompt": "x"}
    )
    claim = WorkerClaim(attendant=4, worker=5, born="6")
    assert (read_grant(tmp_path), read_claim(tmp_path)) == (None, None)
    (tmp_path / GRANT).write_bytes(msgspec.json.encode(grant))
    (tmp_path / CLAIM).write_bytes(msgspec.json.encode(claim))
    assert (read_grant(tmp_path), read_claim(tmp_path)) == (grant, claim)
    for content in (b"", b"{}", b"[", b'{"lease": 1}', b"\xff"):
        (tmp_path / GRANT).write_bytes(content)
        (tmp_path / CLAIM).write_bytes(content)
        assert (read_grant(tmp_path), read_claim(tmp_path)) == (None, None)


def test_a_growing_file_is_read_by_complete_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    tail = FileTail(file)
    assert tail.read_lines() == []
    with file.open("ab", buffering=0) as events:
        events.write(b"one\ntw")
        assert tail.read_lines() == [b"one"]
        assert tail.read_lines() == []
        events.write(b"o\n\nthree\nf")
        assert tail.read_lines() == [b"two", b"", b"three"]
        file.unlink()
        assert tail.read_lines() == [], "the file cannot be read"
        events.write(b"our\n")


def test_lines_over_the_limit_are_left_out_and_the_reader_continues_after_them(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    longest = b"x" * MAX_LINE_BYTES
    tail = FileTail(file)
    with file.open("ab", buffering=0) as events:
        events.write(b"a\n" + longest + b"\n" + longest + b"x\nb\n")
        assert tail.read_lines() == [b"a", longest, b"b"]
        events.write(longest)
        assert tail.read_lines() == []
        events.write(b"\nc")
        assert tail.read_lines() == [longest], "a partial line of the maximum is kept"
        events.write(longest)
        assert tail.read_lines() == []
        events.write(b"end\nd\n")
        assert tail.read_lines() == [b"end", b"d"], "a longer one is dropped, so that memory is bounded"


def test_one_call_reads_a_bounded_part(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    line = b"x" * (MAX_LINE_BYTES - 1) + b"\n"
    file.write_bytes(line * 17 + b"last\n")
    tail = FileTail(file)
    assert [len(tail.read_lines()) for _ in range(3)] == [16, 2, 0]
