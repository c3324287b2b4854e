import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.state.store_errors import StoreError
from coordinator.video.state.memory_model import FIRST_MEASURED_PROFILE, VideoProfileKey
from coordinator.video.store import FILE, VideoStore
from tests.support.processes import ROOT, environment
from tests.unit.coordinator.video.state.test_job_table import a_job

WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from coordinator.video.store import VideoStore
from tests.unit.coordinator.video.state.test_job_table import a_job

async def write():
    store = VideoStore(Path(sys.argv[1]))
    for number in itertools.count():
        store.put_job(a_job(number))
        await store.flush()
        print(number, flush=True)

asyncio.run(write())
"""


def test_a_pool_without_videos_has_no_database(tmp_path: Path):
    VideoStore(tmp_path).close()
    assert not (tmp_path / FILE).exists()


async def test_store_returns_jobs_after_a_reopen(tmp_path: Path):
    store = VideoStore(tmp_path)
    for number in (2, 1, 3):
        store.put_job(a_job(number))
    store.put_job(a_job(2, phase="changed"))
    store.delete_job("video_3")
    key = VideoProfileKey("wan", "0.18.14", 8)
    store.put_profile(key, FIRST_MEASURED_PROFILE.add_measurement(336, 2**40))
    await store.flush()
    store.close()
    store.close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert FILE in (names := os.listdir(tmp_path))
    assert len(names) == 1, "a closed database has no log"
    again = VideoStore(tmp_path)
    assert again.jobs == (a_job(1), a_job(2, phase="changed"))
    assert again.profiles == {key: FIRST_MEASURED_PROFILE.add_measurement(336, 2**40)}
    again.close()


async def test_a_write_that_fails_is_not_confirmed_and_written_later(tmp_path: Path):
    store = VideoStore(tmp_path)
    store.put_job(a_job(1))
    await store.flush()
    assert store.count_unwritten() == 0
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("ALTER TABLE jobs RENAME TO away")
        store.put_job(a_job(2))
        with pytest.raises(StoreError, match="make room"):
            await store.flush()
        for write in (lambda: store.put_job(a_job(3)), lambda: store.delete_job("video_1")):
            with pytest.raises(StoreError, match="make room"):
                write()
        with pytest.raises(StoreError, match="make room"):
            store.raise_failure()
        with pytest.raises(StoreError, match="make room"):
            await store.flush()
        assert store.count_unwritten() == 3
        other.execute("ALTER TABLE away RENAME TO jobs")
    store.close()
    again = VideoStore(tmp_path)
    assert again.jobs == (a_job(2), a_job(3))
    again.close()


@pytest.mark.parametrize("content", [b"junk" * 1000, b""])
def test_damaged_database_error_names_the_next_step(tmp_path: Path, content: bytes):
    (tmp_path / FILE).write_bytes(content)
    if not content:
        VideoStore(tmp_path).close()
        return
    with pytest.raises(StoreError, match="restore a backup"):
        VideoStore(tmp_path)


@pytest.mark.slow
def test_confirmed_job_survives_a_kill(tmp_path: Path):
    script = tmp_path / "write.py"
    script.write_text(WRITER)
    command = [sys.executable, str(script), str(tmp_path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(100)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    store = VideoStore(tmp_path)
    assert set(confirmed) <= {job.sequence for job in store.jobs}
    store.close()
