"""Records of jobs and of measured memory on disk."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.state.store_errors import StoreError
from coordinator.video.job_records import JobRecords
from coordinator.video.state.memory_model import get_profile_key, predict_profile
from coordinator.video.store import FILE, VideoStore
from router.placement.cluster_view import ClusterView
from tests.unit.coordinator.video.state.test_job_table import a_job
from tests.unit.coordinator.video.state.test_lease_placement import WAN, a_node
from wire.units import GIB

VIEW = ClusterView((a_node("a"), a_node("b", package=replace(WAN, cause="a file is missing"))))


def records(folder: Path) -> JobRecords:
    return JobRecords(VideoStore(folder))


async def test_a_measured_peak_is_stored_for_the_package_of_its_node(tmp_path: Path):
    made, key = records(tmp_path), get_profile_key(WAN)
    job, expected = a_job(1, node="a"), predict_profile(WAN)
    for ignored in (replace(job, node="b"), replace(job, node="c")):
        made.add_peak(ignored, 40 * GIB, VIEW)
    for peak in (0, -1):
        made.add_peak(job, peak, VIEW)
    assert made.profiles == {}
    for peak in (40 * GIB, 1):
        made.add_peak(job, peak, VIEW)
        expected = expected.add_measurement(job.wanted.tokens, peak)
    made.put_job(job)
    made.put_job(a_job(2))
    made.delete_job("video_2")
    await made.flush()
    made.close()
    assert os.listdir(tmp_path) == [FILE], "a closed database has no log"
    again = records(tmp_path)
    stored = VideoStore(tmp_path)
    assert stored.jobs == (job,)
    stored.close()
    assert (made.profiles, again.profiles) == ({key: expected}, {key: expected})
    assert expected.measured == 2
    assert expected.predict_peak(job.wanted.tokens) == 40 * GIB
    again.close()


@pytest.mark.parametrize("broken", ["database", "write"])
async def test_a_job_is_confirmed_only_when_the_disk_has_it(tmp_path: Path, broken: str):
    made = records(tmp_path)
    if broken == "database":
        (tmp_path / FILE).mkdir()
    else:
        made.put_job(a_job(1))
        await made.flush()
        made.raise_failure()
        with closing(sqlite3.connect(tmp_path / FILE)) as other:
            other.execute("ALTER TABLE jobs RENAME TO away")
    for change in (lambda: made.put_job(a_job(2)), lambda: made.delete_job("video_1")):
        change()
        with pytest.raises(StoreError):
            await made.flush()
    assert made.count_unwritten() == (0 if broken == "database" else 2)
    if broken == "database":
        (tmp_path / FILE).rmdir()
        made.raise_failure()
        made.put_job(a_job(2))
        await made.flush()
    else:
        with pytest.raises(StoreError):
            made.raise_failure()
        with closing(sqlite3.connect(tmp_path / FILE)) as other:
            other.execute("ALTER TABLE away RENAME TO jobs")
    made.close()
    stored = VideoStore(tmp_path)
    assert stored.jobs == (a_job(2),)
    stored.close()
