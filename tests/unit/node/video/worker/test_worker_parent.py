"""The parent of a worker in this process, with a program that ends at once as its worker.

`tests/e2e/video` has the parent in its own process, with a real worker.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from node.video.worker.lease_files import CLAIM, EVENTS, GO, GRANT, GUARD, SCRATCH, LeaseGrant, lock_file
from node.video.worker.worker_parent import WORKER, LeaseFenced, WorkerParent
from tests.support.processes import until

WAIT = 10.0
RECORDS = """#!/bin/sh
printf '%s\\n' "$@" > words
/usr/bin/env > variables
echo $$ > pid
/bin/ps -o pgid= -p $$ > group
read -r job
printf '%s' "$job" > job
"""
"""A program in place of Python, which records how it was started."""
SLEEPS = """#!/bin/sh
echo '{"event":"start"}'
exec /bin/sleep 600
"""


def test_a_parent_whose_lease_ends_before_the_agent_has_seen_its_worker_ends_at_once(tmp_path: Path):
    (tmp_path / SCRATCH).mkdir()
    guard = lock_file(tmp_path / GUARD)
    assert guard is not None
    program = shutil.which("true")
    assert program is not None
    grant = LeaseGrant(lease="l-1", generation=1, size=1, python=program, environment={}, job={})
    (tmp_path / GRANT).write_bytes(msgspec.json.encode(grant))
    parent, codes = WorkerParent(tmp_path, "l-1", 1), list[int]()
    running = threading.Thread(target=lambda: codes.append(parent.run()), daemon=True)
    running.start()
    try:
        until((tmp_path / CLAIM).exists, WAIT)
        (tmp_path / GRANT).unlink()
        running.join(WAIT)
        assert codes == [0]
    finally:
        parent.stop()
        os.close(guard)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[int]:
    """Hold the lock of the agent in a folder whose worker may begin at once."""
    (tmp_path / SCRATCH).mkdir()
    (tmp_path / GO).touch()
    descriptor = lock_file(tmp_path / GUARD)
    assert descriptor is not None
    yield descriptor
    with open(os.devnull) as closed:
        os.dup2(closed.fileno(), descriptor)
    os.close(descriptor)


def grant_worker(folder: Path, program: str, **job: object) -> WorkerParent:
    """Grant a lease of 7 bytes whose worker is `program`; return its parent."""
    file = folder / "program"
    file.write_text(program)
    file.chmod(0o700)
    grant = LeaseGrant(lease="l-1", generation=1, size=7, python=str(file), environment={"ONLY": "this"}, job=job)
    (folder / GRANT).write_bytes(msgspec.json.encode(grant))
    return WorkerParent(folder, "l-1", 1)


def test_a_worker_has_its_own_group_only_the_granted_environment_and_the_granted_size(
    tmp_path: Path, guard: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "1")
    assert grant_worker(tmp_path, RECORDS, prompt="fox", size=10**12).run() == 0
    scratch = tmp_path / SCRATCH
    assert (scratch / "words").read_text().splitlines() == ["-I", str(WORKER)]
    variables = (scratch / "variables").read_text().splitlines()
    assert "ONLY=this" in variables
    assert not [one for one in variables if one.startswith("SECRET")]
    assert (scratch / "group").read_text().strip() == (scratch / "pid").read_text().strip()
    assert msgspec.json.decode((scratch / "job").read_text()) == {"prompt": "fox", "size": 7}
    assert (tmp_path / EVENTS).read_text() == '{"event":"exit","code":0}\n'


@pytest.mark.parametrize("end", ["the parent is stopped", "the agent ends"])
def test_a_worker_that_the_parent_ends_has_no_exit_event(tmp_path: Path, guard: int, end: str):
    parent, codes = grant_worker(tmp_path, SLEEPS), list[int]()
    running = threading.Thread(target=lambda: codes.append(parent.run()), daemon=True)
    running.start()
    begun = '{"event":"start"}\n'
    until(lambda: (tmp_path / EVENTS).exists() and (tmp_path / EVENTS).read_text() == begun, WAIT)
    if end == "the parent is stopped":
        parent.stop()
    else:
        with open(os.devnull) as closed:
            os.dup2(closed.fileno(), guard)
    running.join(WAIT)
    parent.stop()
    assert codes == [-9]
    assert (tmp_path / EVENTS).read_text() == begun


def test_a_lease_of_another_generation_has_no_worker(tmp_path: Path, guard: int):
    grant_worker(tmp_path, SLEEPS)
    for lease, generation in (("l-1", 2), ("l-2", 1)):
        with pytest.raises(LeaseFenced, match="not granted"):
            WorkerParent(tmp_path, lease, generation).run()
    assert not (tmp_path / CLAIM).exists()
