import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.memory.sensor import read_process_identity
from node.video.lease_rules import LeasePhase, LeaseRecord, WorkerGroup
from node.video.worker import lease_files, worker_monitor
from node.video.worker.watchdog_policy import EndWorker, WorkerBounds
from node.video.worker.worker_monitor import (
    WorkerJob,
    WorkerMonitor,
    build_worker_environment,
    find_living_processes,
    kill_worker_group,
)
from tests.support.readings import Later
from wire.video import LeaseEndCode


def hear(*events: object) -> WorkerJob:
    job = WorkerJob()
    for event in events:
        job.handle_event(json.dumps(event).encode(), 1.0)
    return job


def progress(phase: str, step: int) -> dict[str, object]:
    return {"event": "progress", "phase": phase, "step": step, "steps": 4}


def test_events_set_the_phase_of_a_job():
    job = hear({"event": "start"}, {"event": "loading"})
    assert job.phase is LeasePhase.LOADING
    job = hear(progress("denoise", 3))
    assert (job.phase, job.step, job.steps) == (LeasePhase.DENOISING, 3, 4)
    assert hear(progress("denoise", 4), progress("decode", 4)).phase is LeasePhase.DECODING


def test_steps_that_a_worker_makes_up_are_within_its_own_count():
    assert (hear(progress("denoise", 9)).step, hear(progress("denoise", -3)).step) == (4, 0)


def test_the_time_of_a_job_begins_with_its_worker_and_not_with_the_grant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    held = LeaseRecord(lease="l", generation=1, job="j", model="m", size=2**40)
    one = WorkerMonitor(held, tmp_path / "l", WorkerBounds(2**40, 90, 50), 100, 0)
    one.open(lease_files.LeaseGrant(lease="l", generation=1, size=1, python="p", environment={}, job={}))
    attended = lease_files.lock_file(tmp_path / "l" / lease_files.ATTENDED)
    assert attended is not None
    clock.by += 99
    assert one.check() is None
    claim = lease_files.WorkerClaim(attendant=os.getpid(), worker=process.pid, born=read_process_identity(process.pid))
    lease_files.write_new(tmp_path / "l" / lease_files.CLAIM, msgspec.json.encode(claim))
    assert one.check() is None
    clock.by += 49
    assert one.check() is None
    assert 49 <= one.seconds < 50
    clock.by += 2
    end = one.check()
    assert end is not None
    assert end.code == "job_timeout"
    process.kill()
    process.wait()
    one.close()
    os.close(attended)


def test_the_folder_of_a_lease_replaces_an_older_one(tmp_path: Path):
    held = LeaseRecord(lease="l", generation=1, job="j", model="m", size=2**40)
    (tmp_path / "l").mkdir()
    (tmp_path / "l" / lease_files.CLAIM).write_text("of an older lease")
    one = WorkerMonitor(held, tmp_path / "l", WorkerBounds(2**40, 90, 50), 100, 0)
    one.open(lease_files.LeaseGrant(lease="l", generation=1, size=1, python="p", environment={}, job={}))
    assert not (tmp_path / "l" / lease_files.CLAIM).exists()
    assert one.check() is None
    one.close()


async def test_a_worker_ends_at_once_only_where_the_end_demands_it_and_its_scratch_folder_is_deleted(tmp_path: Path):
    script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    for number, (at_once, code) in enumerate(((False, 7), (True, -9))):
        process = subprocess.Popen(  # noqa: ASYNC220  the start takes no time
            ["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        held = LeaseRecord(lease="l", generation=1, job="j", model="m", size=2**40)
        place = tmp_path / str(number)
        one = WorkerMonitor(held, place, WorkerBounds(2**40, 90, 50), 100, 60.0)
        one.open(lease_files.LeaseGrant(lease="l", generation=1, size=1, python="p", environment={}, job={}))
        one.worker = WorkerGroup(pid=process.pid, born=read_process_identity(process.pid))
        killing = asyncio.create_task(one.kill(EndWorker(LeaseEndCode.NODE_PAUSED, "its owner", at_once=at_once)))
        assert await asyncio.to_thread(process.wait, 30) == code
        await asyncio.wait_for(killing, 30)
        assert not (place / lease_files.GRANT).exists()
        assert (place / lease_files.SCRATCH).exists()
        one.close()
        assert not (place / lease_files.SCRATCH).exists()


def test_each_sign_of_progress_is_another_mark_and_a_beat_alone_is_none():
    events = [
        {"event": "start"},
        {"event": "loading"},
        {"event": "loaded"},
        progress("start", 0),
        progress("denoise", 1),
        {"event": "beat", "blocks": 1},
        {"event": "beat", "blocks": 2},
        progress("denoise", 2),
        progress("decode", 2),
        progress("save", 2),
    ]
    marks = [hear(*events[:count]).mark for count in range(len(events) + 1)]
    assert len(set(marks)) == len(marks)
    assert hear(*events).mark == hear(*events, {"event": "beat", "blocks": 2}, {"event": "?"}, "?").mark


def test_the_first_end_counts_and_unknown_codes_are_replaced():
    done = hear({"event": "done", "made": {"width": 64}}, {"event": "exit", "code": 0})
    assert done.end is not None
    assert (done.end.code, done.clip) == ("completed", {"width": 64})
    failed = hear({"event": "failed", "code": "rm -rf", "message": "x" * 9000})
    assert failed.end is not None
    assert (failed.end.code, len(failed.end.message)) == ("generation_failed", 1000)
    killed = hear({"event": "exit", "code": -9})
    assert killed.end is not None
    assert (killed.end.code, "SIGKILL" in killed.end.message) == ("worker_crashed", True)
    unheard = hear({"event": "exit", "code": -9999})
    assert unheard.end is not None
    assert "signal 9999" in unheard.end.message


@given(st.binary(max_size=300))
def test_nothing_that_a_worker_writes_ends_the_watch(line: bytes):
    WorkerJob().handle_event(line, 0.0)


NAMES = st.sampled_from(["event", "phase", "step", "code", "made", "blocks"])
KINDS = st.sampled_from(["progress", "done", "exit", "beat"])


@given(st.dictionaries(NAMES, st.one_of(KINDS, st.integers(), st.none(), st.dictionaries(st.text(), st.text()))))
def test_nor_does_any_event(event: dict[str, object]):
    hear(event)


def test_a_worker_gets_only_the_listed_variables(tmp_path: Path):
    inherited = {"PATH": "/bin", "OPENAI_API_KEY": "sk", "MACPOOL_X": "1", "HOME": "/nonexistent", "LANG": "C"}
    told = build_worker_environment(inherited, tmp_path)
    assert set(told) == {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "TOKENIZERS_PARALLELISM",
    }
    assert told["HOME"] == str(tmp_path)


async def test_a_group_is_killed_whatever_it_ignores_and_a_namesake_is_left_alone():
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", stubborn]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)  # noqa: ASYNC220  it is quick
    assert process.stdout is not None
    process.stdout.readline()
    other = WorkerGroup(pid=process.pid, born="another boot:1")
    assert find_living_processes(other) == ()
    await kill_worker_group(other, 0.0)
    assert process.poll() is None
    await kill_worker_group(WorkerGroup(pid=process.pid, born=read_process_identity(process.pid)), 0.2)
    assert process.wait(30) == -9


# the folder between agent and worker parent


def watched(place: Path, process: "subprocess.Popen[bytes]") -> WorkerMonitor:
    """Watch a process as the worker of a lease. No worker parent runs."""
    held = LeaseRecord(lease="l", generation=1, job="j", model="m", size=2**40)
    made = WorkerMonitor(held, place, WorkerBounds(2**40, 100, 100), 100, 0)
    made.open(lease_files.LeaseGrant(lease="l", generation=1, size=1, python="p", environment={}, job={}))
    claim = lease_files.WorkerClaim(attendant=os.getpid(), worker=process.pid, born=read_process_identity(process.pid))
    lease_files.write_new(place / lease_files.CLAIM, msgspec.json.encode(claim))
    assert made.check() is None
    return made


def test_a_lease_that_cannot_be_written_leaves_neither_folder_nor_lock(tmp_path: Path):
    held = LeaseRecord(lease="l", generation=1, job="j", model="m", size=2**40)
    one = WorkerMonitor(held, tmp_path / "l", WorkerBounds(2**40, 100, 100), 100, 0)
    grant = lease_files.LeaseGrant(lease="l", generation=1, size=1, python="p", environment={}, job={})
    before, (soft, hard) = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            one.open(grant)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (psutil.Process().num_fds(), (tmp_path / "l").exists()) == (before, False)
    one.open(grant)
    one.close()


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ("nothing", LeaseEndCode.WORKER_CRASHED),
        ("a word", LeaseEndCode.WORKER_CRASHED),
        ("its own end", LeaseEndCode.WORKER_LOST),
    ],
)
def test_a_worker_that_ended_has_crashed_unless_its_parent_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, code: str
):
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    one = watched(tmp_path / "l", process)
    attended = lease_files.lock_file(tmp_path / "l" / lease_files.ATTENDED)
    assert attended is not None
    assert one.check() is None, "the parent process has not reported yet"
    if after == "a word":
        (tmp_path / "l" / lease_files.EVENTS).write_text('{"event": "exit", "code": -9}\n')
    elif after == "its own end":
        os.close(attended)
    else:
        monkeypatch.setattr(worker_monitor, "REPORT_TIMEOUT_SECONDS", 1e-9)  # passes between two checks
    end = one.check()
    assert end is not None
    assert end.code == code
    one.close()
    if after != "its own end":
        os.close(attended)


def test_a_completed_worker_is_not_lost_if_its_parent_exits_first(tmp_path: Path):
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    one = watched(tmp_path / "l", process)
    (tmp_path / "l" / lease_files.EVENTS).write_text('{"event": "done", "made": {}}\n')
    assert one.check() is None, "it leaves by itself"
    process.kill()
    process.wait()
    end = one.check()
    assert end is not None
    assert end.code == "completed"
    one.close()


def test_a_lock_ends_with_its_holder(tmp_path: Path):
    place = tmp_path / "guard"
    assert not lease_files.is_locked(place)
    held = lease_files.lock_file(place)
    assert held is not None
    assert lease_files.lock_file(place) is None
    assert lease_files.is_locked(place)
    os.close(held)
    assert not lease_files.is_locked(place)
    assert place.stat().st_mode & 0o777 == 0o600


def test_a_claim_is_made_once(tmp_path: Path):
    lease_files.write_new(tmp_path / "claim.json", b"first")
    with pytest.raises(FileExistsError):
        lease_files.write_new(tmp_path / "claim.json", b"second")
    assert (tmp_path / "claim.json").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["claim.json"]


def test_an_invalid_grant_is_none(tmp_path: Path):
    assert lease_files.read_grant(tmp_path) is None
    (tmp_path / lease_files.GRANT).write_text('{"lease": 5}')
    assert lease_files.read_grant(tmp_path) is None


def test_lines_are_read_whole_and_those_that_are_too_long_are_left_out(tmp_path: Path):
    file = tmp_path / "events"
    tail = lease_files.FileTail(file)
    assert tail.read_lines() == []
    file.write_bytes(b"one\ntw")
    assert tail.read_lines() == [b"one"]
    with file.open("ab") as more:
        more.write(b"o\n" + b"x" * (lease_files.MAX_LINE_BYTES + 1) + b"\nthree\n")
    assert tail.read_lines() == [b"two", b"three"]
