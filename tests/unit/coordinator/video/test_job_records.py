"""Records of jobs and of measured memory on disk."""

from pathlib import Path

from msgspec.structs import replace

from coordinator.video.job_records import JobRecords
from coordinator.video.state.memory_model import get_profile_key, predict_profile
from coordinator.video.store import VideoStore
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
    again = records(tmp_path)
    stored = VideoStore(tmp_path)
    assert stored.jobs == (job,)
    stored.close()
    assert (made.profiles, again.profiles) == ({key: expected}, {key: expected})
    assert expected.measured == 2
    assert expected.predict_peak(job.wanted.tokens) == 40 * GIB
    again.close()
