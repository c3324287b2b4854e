"""The controller without a link: nodes that are not linked, and fetches that are interrupted."""

import asyncio
import hashlib
import sqlite3
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.state.store_errors import StoreError
from coordinator.video import controller, job_files, job_timer
from coordinator.video.controller import VideoController
from coordinator.video.settings import VideoSettings
from coordinator.video.state.events import JobDeleted, LeasesReported
from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.jobs import JobState, VideoJob
from coordinator.video.store import FILE
from router.placement.cluster_view import ClusterView
from tests.unit.coordinator.video.state.test_job_table import a_job
from tests.unit.coordinator.video.state.test_lease_placement import a_node
from wire.frames import AllowVideo, Frame, LeaseEnded, LeaseGranted, LeaseRelease, LeaseRequest
from wire.identity import NodeId
from wire.state_machine import IllegalEventCounts
from wire.video import Artifact, LeaseState, ReleaseCause

CLIP = b"a clip"
ARTIFACT = Artifact("video.mp4", len(CLIP), hashlib.sha256(CLIP).digest())
NODE = NodeId("a")


class Cluster:
    """A controller and the frames to its only node, whose first `fails` fetches are interrupted."""

    def __init__(self, folder: Path) -> None:
        self.frames: list[Frame] = []
        self.linked, self.fails, self.fetches = True, 0, 0
        self.changed, self.proceeds = asyncio.Event(), asyncio.Event()
        self.on_clock: Callable[[], None] = lambda: None
        self.proceeds.set()
        self.controller = VideoController(
            folder, VideoSettings(), self._send, self._fetch, IllegalEventCounts(), clock=self._read_clock
        )
        self.controller.apply_view(ClusterView((a_node(NODE),)))

    def _read_clock(self) -> float:
        self.on_clock()
        return 0.0

    def _send(self, node: NodeId, frame: Frame) -> bool:
        assert node == NODE
        self.frames.append(frame)
        self.changed.set()
        return self.linked

    async def _fetch(self, node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        self.fetches += 1
        self.changed.set()
        if self.fetches <= self.fails:
            raise LookupError("the node is not linked")
        yield CLIP[:1]
        await self.proceeds.wait()
        yield CLIP[1:]

    async def submit(self) -> VideoJob:
        return await self.controller.submit_job(a_job(1).wanted, "key")

    async def finish(self) -> VideoJob:
        """Run a job until its node has its files."""
        job = await self.submit()
        assert isinstance(self.frames[-1], LeaseRequest)
        lease = self.frames[-1]
        self.controller.handle_frame(NODE, LeaseGranted(lease.lease, lease.generation))
        self.controller.handle_frame(
            NODE, LeaseEnded(lease.lease, lease.generation, "completed", artifacts=(ARTIFACT,))
        )
        return self.find(job)

    def find(self, job: VideoJob) -> VideoJob:
        found = self.controller.find_job(job.id)
        assert found is not None
        return found

    async def until_sent(self, kind: type[Frame]) -> None:
        async with asyncio.timeout(30):
            while not isinstance(self.frames[-1], kind):
                self.changed.clear()
                await self.changed.wait()

    async def until_fetches(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.fetches < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(job_files, "RETRY_SECONDS", 0.001)
    made = Cluster(tmp_path)
    yield made
    await made.controller.close()


async def test_a_job_whose_node_is_not_linked_returns_to_the_queue_at_once(cluster: Cluster):
    cluster.linked = False
    job = cluster.find(await cluster.submit())
    assert (job.state, job.phase, job.generation) == (JobState.QUEUED, "its node is not linked", 2)
    assert (cluster.controller.list_holds(), NODE in cluster.controller.table.pauses) == ([], True)


async def test_an_interrupted_fetch_is_repeated_until_the_files_are_here(cluster: Cluster, tmp_path: Path):
    cluster.fails = 2
    job = await cluster.finish()
    assert job.state == JobState.FINALIZING
    await cluster.until_sent(LeaseRelease)
    assert (cluster.fetches, cluster.find(job).state) == (3, JobState.COMPLETED)
    assert cluster.frames[-1] == LeaseRelease(job.lease, job.generation, ReleaseCause.ACKNOWLEDGED)
    assert (tmp_path / "videos" / job.id / ARTIFACT.name).read_bytes() == CLIP


@pytest.mark.parametrize("end", ["lost", "deleted"])
async def test_an_interrupted_fetch_is_not_repeated_for_a_job_that_has_ended(cluster: Cluster, end: str):
    cluster.fails = 10**6
    job = await cluster.finish()
    await cluster.until_fetches(2)
    if end == "lost":
        for _ in range(2):
            cluster.controller.apply_event(LeasesReported(NODE, ()))
        assert cluster.find(job).state == JobState.FAILED
    else:
        await cluster.controller.delete_job(job.id)
        assert cluster.controller.find_job(job.id) is None
    fetches = cluster.fetches
    await asyncio.sleep(0.02)  # twenty times the pause
    assert cluster.fetches <= fetches + 1, "one may have begun"


async def test_jobs_are_listed_newest_first_and_a_closed_controller_leaves_no_task(tmp_path: Path):
    cluster, others = Cluster(tmp_path), asyncio.all_tasks()
    cluster.fails = 10**6
    first = await cluster.finish()
    second = await cluster.submit()
    assert [job.id for job in cluster.controller.list_jobs()] == [second.id, first.id]
    await cluster.until_fetches(1)
    await cluster.controller.close()
    assert asyncio.all_tasks() == others
    unknown = tmp_path / "videos" / "video_unknown"
    unknown.mkdir(parents=True)
    again = Cluster(tmp_path)
    assert not unknown.exists(), "a crash left files of no job"
    assert [job.sequence for job in again.controller.list_jobs()] == [2, 1]
    assert (await again.submit()).sequence == 3
    await again.controller.close()


async def test_holds_are_listed_oldest_first(cluster: Cluster):
    holds = [LeaseHold(lease, lease, 1, "", 1, since) for lease, since in (("new", 3.0), ("old", 1.0), ("mid", 2.0))]
    cluster.controller.table = JobTable(holds={hold.lease: hold for hold in holds})
    assert [hold.lease for hold in cluster.controller.list_holds()] == ["old", "mid", "new"]


async def test_a_removal_that_has_ended_is_not_kept(cluster: Cluster, tmp_path: Path):
    folder = tmp_path / "videos" / (await cluster.submit()).id
    folder.mkdir(parents=True)
    others = asyncio.all_tasks()
    cluster.controller.apply_event(JobDeleted(folder.name))
    (task,) = map(weakref.ref, asyncio.all_tasks() - others)
    async with asyncio.timeout(30):
        while task() is not None:  # noqa: ASYNC110  a task that nothing references has no event
            await asyncio.sleep(0.001)
    assert not folder.exists()


async def test_the_job_table_is_checked_often_while_a_node_holds_the_lease_of_an_ended_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_timer, "TICK_SECONDS", 0.001)
    cluster, checked = Cluster(tmp_path), asyncio.Event()
    job = await cluster.submit()
    await cluster.controller.cancel_job(job.id)
    assert [hold.job for hold in cluster.controller.list_holds()] == [job.id]
    cluster.on_clock = checked.set
    for _ in range(2):
        async with asyncio.timeout(5):
            await checked.wait()
        checked.clear()
    await cluster.controller.close()
    checked.clear()
    await asyncio.sleep(0.02)  # twenty times the pause
    assert not checked.is_set(), "a closed controller checks nothing"


async def test_a_fetch_is_repeated_after_a_pause_only(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_files, "RETRY_SECONDS", 3600.0)
    cluster.fails = 10**6
    await cluster.finish()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert cluster.fetches == 1


async def test_a_deletion_ends_a_fetch_in_progress_and_removes_its_part(cluster: Cluster, tmp_path: Path):
    cluster.proceeds.clear()
    job = await cluster.finish()
    folder: Any = tmp_path / "videos" / job.id
    async with asyncio.timeout(30):
        while not (folder / f"{ARTIFACT.name}.part").exists():  # noqa: ASYNC110  a thread creates it
            await asyncio.sleep(0.005)
        await cluster.controller.delete_job(job.id)
        while folder.exists():  # noqa: ASYNC110  a thread removes it
            await asyncio.sleep(0.005)
    assert cluster.fetches == 1


async def test_a_report_that_is_published_after_the_end_of_its_link_does_not_end_the_wait_for_the_node(
    cluster: Cluster,
):
    """A large cluster publishes reports in batches, also those that arrived before the link ended."""
    job = await cluster.submit()
    lease = cluster.frames[-1]
    assert isinstance(lease, LeaseRequest)
    cluster.controller.handle_frame(NODE, LeaseGranted(lease.lease, lease.generation))
    cluster.controller.handle_node_gone(NODE)
    due = cluster.find(job).due
    report = LeaseState(lease.lease, lease.generation, job.id, lease.size, "denoising")
    video = replace(a_node(NODE).video, leases=(report,))
    cluster.controller.apply_view(ClusterView((a_node(NODE, state="lost", reported_at=5.0, video=video),)))
    assert (cluster.find(job).away, cluster.find(job).due) == (True, due)
    cluster.controller.apply_view(ClusterView((a_node(NODE, state="joining", reported_at=5.0, video=video),)))
    assert cluster.find(job).away, "the report is older than the new link"
    cluster.controller.apply_view(ClusterView((a_node(NODE, reported_at=6.0, video=video),)))
    assert not cluster.find(job).away


async def test_a_node_is_told_to_delete_its_files_only_after_the_end_of_the_job_is_on_disk(
    cluster: Cluster, tmp_path: Path
):
    cluster.proceeds.clear()
    job = await cluster.finish()
    await cluster.controller.records.flush()
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the next write waits for its end
        cluster.proceeds.set()
        async with asyncio.timeout(30):
            while cluster.find(job).state != JobState.COMPLETED:  # noqa: ASYNC110  a thread writes the file
                await asyncio.sleep(0.001)
        cluster.controller.apply_event(LeasesReported(NODE, (LeaseState(job.lease, job.generation, phase="ended"),)))
        assert [frame for frame in cluster.frames if isinstance(frame, LeaseRelease)] == []
        other.execute("ROLLBACK")
        await cluster.until_sent(LeaseRelease)
        (record,) = other.execute("SELECT record FROM jobs").fetchone()
    assert msgspec.json.decode(record, type=VideoJob) == cluster.find(job)
    assert cluster.frames[-1] == LeaseRelease(job.lease, job.generation, ReleaseCause.ACKNOWLEDGED)


async def test_a_node_keeps_its_files_while_the_end_of_the_job_cannot_be_stored(cluster: Cluster, tmp_path: Path):
    cluster.proceeds.clear()
    job = await cluster.finish()
    await cluster.controller.records.flush()
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("ALTER TABLE jobs RENAME TO away")
        cluster.proceeds.set()
        async with asyncio.timeout(30):
            while not cluster.controller.records.count_unwritten():  # noqa: ASYNC110  a thread counts
                await asyncio.sleep(0.001)
        report = LeasesReported(NODE, (LeaseState(job.lease, job.generation, phase="ended"),))
        cluster.controller.apply_event(report)
        with pytest.raises(StoreError):
            await cluster.controller.records.flush()
        assert [frame for frame in cluster.frames if isinstance(frame, LeaseRelease)] == []
        other.execute("ALTER TABLE away RENAME TO jobs")


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_the_end_of_a_job_that_cannot_be_stored_is_an_error_and_takes_effect(
    cluster: Cluster, tmp_path: Path, end: str
):
    job = await cluster.submit()
    await cluster.controller.records.flush()
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("ALTER TABLE jobs RENAME TO away")
        with pytest.raises(StoreError):
            await (cluster.controller.cancel_job if end == "cancel" else cluster.controller.delete_job)(job.id)
        found = cluster.controller.find_job(job.id)
        assert (found is None) if end == "delete" else (found is not None and not found.open)
        other.execute("ALTER TABLE away RENAME TO jobs")


async def test_a_client_that_disconnects_does_not_end_the_wait_of_a_repeated_request(cluster: Cluster, tmp_path: Path):
    await cluster.submit()  # opens the database
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the next write waits for its end
        first = asyncio.create_task(cluster.submit())
        await asyncio.sleep(0)
        job, _ = cluster.controller.list_jobs()
        again = asyncio.create_task(cluster.controller.wait_until_stored(job.id))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not again.done()
        other.execute("ROLLBACK")
        async with asyncio.timeout(30):
            await again
    assert cluster.controller.find_job(job.id) is not None


async def test_a_node_that_joins_again_is_asked_and_read_as_a_new_one(cluster: Cluster):
    video = replace(a_node(NODE).video, allowed=False)
    view = ClusterView((a_node(NODE, video=video, reported_at=5.0),))
    cluster.controller.apply_view(view)
    cluster.controller.apply_view(view)
    assert cluster.frames == [AllowVideo(allowed=True)]
    cluster.controller.delete_node_data(NODE)
    cluster.controller.apply_view(view)
    assert cluster.frames == [AllowVideo(allowed=True)] * 2


async def test_a_node_that_is_not_linked_is_asked_again_after_a_short_pause(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(controller, "RETRY_SECONDS", 7.0)
    cluster.linked = False
    await cluster.submit()
    assert dict(cluster.controller.table.pauses) == {NODE: 7.0}


async def test_an_empty_job_table_is_not_checked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    cluster.controller.apply_view(ClusterView())
    monkeypatch.setattr(job_timer, "TICK_SECONDS", 0.01)
    job = await cluster.submit()
    await cluster.controller.delete_job(job.id)
    checked = asyncio.Event()
    cluster.on_clock = checked.set
    await asyncio.sleep(0.1)  # ten times the pause
    assert not checked.is_set()


async def test_metrics_of_videos_are_shown_once_a_node_offers_any(cluster: Cluster):
    assert cluster.controller.take_snapshot().used
    cluster.controller.apply_view(ClusterView((a_node(NODE, video=replace(a_node(NODE).video, packages=())),)))
    assert not cluster.controller.take_snapshot().used


async def test_a_job_that_runs_at_a_restart_waits_for_its_node(tmp_path: Path):
    cluster = Cluster(tmp_path)
    job = await cluster.submit()
    lease = cluster.frames[-1]
    assert isinstance(lease, LeaseRequest)
    cluster.controller.handle_frame(NODE, LeaseGranted(lease.lease, lease.generation))
    assert not cluster.find(job).away
    await cluster.controller.close()
    again = Cluster(tmp_path)
    found = again.find(job)
    assert (found.state, found.away) == (JobState.IN_PROGRESS, True)
    await again.controller.close()
