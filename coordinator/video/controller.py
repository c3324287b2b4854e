"""Controller of video jobs, which applies events to the job table and performs its actions, on the coordinator's loop.

The controller owns the job table (`JobTable`). Its parts own the effects: records on disk, files, permissions of nodes,
and counts. Nodes' frames arrive through `handle_frame` and `apply_view`, requests of clients through `submit_job`,
`cancel_job` and `delete_job`. `state.job_transitions` makes all decisions.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.state.store_errors import StoreError
from coordinator.video.artifacts import ArtifactFolder, FetchFromNode
from coordinator.video.job_files import RETRY_SECONDS, JobFiles
from coordinator.video.job_history import JobHistory
from coordinator.video.job_records import JobRecords
from coordinator.video.job_timer import JobTimer
from coordinator.video.metrics import VideoSnapshot, take_video_snapshot
from coordinator.video.permissions import VideoPermissions
from coordinator.video.settings import VideoSettings
from coordinator.video.state import events
from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.job_transitions import advance
from coordinator.video.state.jobs import JobState, RequestedClip, VideoJob
from coordinator.video.state.lease_placement import LeaseChoice, choose_node
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey
from coordinator.video.store import VideoStore
from router.placement.cluster_view import ClusterView, NodeView
from wire.frames import Frame, LeaseEnded, LeaseGranted, LeaseRefused, LeaseRelease, LeaseRequest
from wire.identity import NodeId
from wire.node_state import LINKED
from wire.refusals import FailureCode
from wire.state_machine import IllegalEventCounts, IllegalEventError, StateMachine
from wire.video import ReleaseCause

log = structlog.get_logger("coordinator.video")

LEASE_FRAMES = (LeaseGranted, LeaseRefused, LeaseEnded)
"""Frames about leases that nodes send."""


@dataclass(frozen=True, slots=True)
class IdempotentJob:
    """Job of an earlier request with the same idempotency key.

    `same` is whether the bodies of both requests are equal.
    """

    job: VideoJob
    same: bool


class VideoController:
    """Controller of video jobs.

    `send` sends a frame to a node and returns False if the node is not linked. `fetch` fetches a file of a node. `wall`
    returns Unix seconds. `clock` returns monotonic seconds on the clock of `NodeView.reported_at`; by default, that of
    the event loop.

    The constructor raises `StoreError` if the database in `folder` cannot be opened or read. If a method raises
    `StoreError` for a cancellation or deletion, the change is in effect and waits for the disk.
    """

    def __init__(
        self,
        folder: Path,
        settings: VideoSettings,
        send: Callable[[NodeId, Frame], bool],
        fetch: FetchFromNode,
        illegal_events: IllegalEventCounts,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings
        self.artifacts = ArtifactFolder(folder / "videos", fetch)
        self._send = send
        self._illegal_events = illegal_events
        self._wall = wall
        self._clock = clock or asyncio.get_running_loop().time
        store = VideoStore(folder)
        self.records = JobRecords(store)
        """Records of the jobs on disk."""
        self._files = JobFiles(self.artifacts, self.apply_event)
        self._permissions = VideoPermissions(send, enabled=settings.enabled)
        self._history = JobHistory(wall)
        self.view = ClusterView()
        """Newest view of the cluster."""
        self.table = JobTable(settings.rules, {job.id: job for job in store.jobs})
        """Table of all jobs, and of the memory that nodes reserve for them."""
        self._storing: dict[str, asyncio.Future[None]] = {}
        """New jobs that are not on disk yet, with the futures of their writes."""
        self._sequence = max((job.sequence for job in store.jobs), default=0)
        self._reported_at: dict[str, float] = {}
        self._events: deque[events.Event] = deque()
        self._timer = JobTimer(self._tick)
        self._running = False
        if self.table.jobs:
            self.apply_event(events.CoordinatorRestarted())
            self.artifacts.remove_unknown(set(self.table.jobs))

    async def close(self) -> None:
        """Stop the controller and close the store. Jobs continue on their nodes."""
        self._timer.cancel()
        await self._files.close()
        self.records.close()

    @property
    def profiles(self) -> Mapping[VideoProfileKey, VideoMemoryProfile]:
        """Measured memory profiles, by package, version of the engine, and bits of the quantization."""
        return self.records.profiles

    # -- requests of clients --------------------------------------------------------------

    def find_idempotent_job(self, key: str, idempotency: str, digest: str) -> IdempotentJob | None:
        """Return the job of an API key with this idempotency key, and whether its body has this digest.

        Return None if there is no such job, or `idempotency` is empty.
        """
        for job in self.table.jobs.values():
            if idempotency and (job.key, job.idempotency) == (key, idempotency):
                return IdempotentJob(job, job.digest == digest)
        return None

    async def submit_job(self, wanted: RequestedClip, key: str, idempotency: str = "", digest: str = "") -> VideoJob:
        """Enqueue a job of an API key (`VideoJob.key`), and return the job after it is on disk.

        `idempotency` is the idempotency key of the request, and `digest` the digest of its body; both may be empty. If
        the caller is cancelled meanwhile, the job remains. Raise `StoreError` if the job cannot be stored; it is then
        deleted. A failed write of a later state of the job is not an error here, because a restart queues the stored
        job again.
        """
        self.records.raise_failure()
        self._sequence += 1
        job = VideoJob(
            f"video_{secrets.token_hex(12)}",
            self._sequence,
            key,
            self._wall(),
            wanted,
            self.settings.lease_bytes,
            idempotency=idempotency,
            digest=digest,
        )
        log.info("video submitted", job=job.id, model=wanted.model, size=f"{wanted.width}x{wanted.height}")
        self.records.put_job(job)
        self._storing[job.id] = self.records.flush()
        self.apply_event(events.JobSubmitted(job))
        try:
            await self.wait_until_stored(job.id)
        except StoreError:
            self._history.mark_refused(job.id)
            self.apply_event(events.JobDeleted(job.id))
            raise
        finally:
            del self._storing[job.id]
        return self.table.jobs.get(job.id, job)

    async def wait_until_stored(self, job: str) -> None:
        """Wait until a job of `submit_job` is on disk. Return at once for any other job.

        Raise `StoreError` if the job cannot be stored.
        """
        if (stored := self._storing.get(job)) is not None:
            await asyncio.shield(stored)  # a client that disconnects must not cancel the write

    async def cancel_job(self, job: str) -> None:
        """Cancel a job and release its lease, and wait until the change is on disk.

        Do nothing if the job has ended or is unknown. The end of its worker is not awaited. Raise `StoreError` if the
        change cannot be stored; the job is cancelled nevertheless.
        """
        self.apply_event(events.JobCancelled(job))
        await self.records.flush()

    async def delete_job(self, job: str) -> None:
        """Cancel a job if it is open, and delete its record and files. Ignore an unknown job.

        The files are removed in the background. Wait until the change is on disk. Raise `StoreError` if it cannot be
        stored; the job is deleted in memory nevertheless.
        """
        self.apply_event(events.JobDeleted(job))
        await self.records.flush()

    def find_job(self, name: str) -> VideoJob | None:
        """Return the job with the id `name`; None if it is unknown."""
        return self.table.jobs.get(name)

    def list_jobs(self) -> list[VideoJob]:
        """Return all jobs, newest first."""
        return sorted(self.table.jobs.values(), key=lambda job: -job.sequence)

    def list_holds(self) -> list[LeaseHold]:
        """Return all lease holds, oldest first: requested, granted, or not confirmed as released."""
        return sorted(self.table.holds.values(), key=lambda hold: hold.since)

    def take_snapshot(self) -> VideoSnapshot:
        """Return counters and current state of the jobs, for metrics."""
        offered = any(node.video.packages for node in self.view.nodes)
        return take_video_snapshot(self._history.counters, self.table.jobs.values(), self._wall(), offered=offered)

    # -- events of nodes -------------------------------------------------------------------

    def apply_view(self, view: ClusterView) -> None:
        """Apply a new cluster view: send permissions to nodes, apply new reports about leases, and place a job.

        The first queued job is placed. It remains queued if no node can be asked for its lease now.
        """
        self.view = view
        for node in view.nodes:
            self._permissions.send_to(node)
            if self._reported_at.get(node.id, 0.0) != node.reported_at and self._is_report_relevant(node):
                self._reported_at[node.id] = node.reported_at
                if node.state in LINKED:  # a report of any other node is older than the end of its link
                    self.apply_event(events.LeasesReported(node.id, node.video.leases))
        if not self._running:
            self._try_placement()
            self._process_events()

    def _is_report_relevant(self, node: NodeView) -> bool:
        """Return whether a node's report about leases can change anything, including a report without leases."""
        if node.video.leases or self.table.find_hold(node.id) is not None:
            return True
        return any(job.node == node.id and job.state == JobState.FINALIZING for job in self.table.jobs.values())

    def handle_frame(self, node: NodeId, frame: LeaseGranted | LeaseRefused | LeaseEnded) -> None:
        """Apply a node's answer to a lease request, or the end of a lease.

        A frame that contradicts an earlier end of the same lease is counted as an illegal event and ignored.
        """
        log.info("lease", node=node, lease=frame.lease, frame=type(frame).__name__, code=getattr(frame, "code", ""))
        try:
            self.apply_event(events.LeaseAnswered(node, frame))
        except IllegalEventError:
            log.exception("lease frame ignored", node=node, lease=frame.lease)

    def handle_node_gone(self, node: NodeId) -> None:
        """Apply the end of a node's link.

        A job that waits for a lease of the node is requeued. A running job waits for the node's return.
        """
        self.apply_event(events.NodeAway(node))

    def delete_node_data(self, node: NodeId) -> None:
        """Delete the data of a node that has left the pool, and requeue or fail its jobs."""
        self._reported_at.pop(node, None)
        self._permissions.delete(node)
        self.apply_event(events.NodeRemoved(node))

    # -- the job table ---------------------------------------------------------------------

    def apply_event(self, event: events.Event) -> None:
        """Apply an event to the job table, perform the resulting actions, and place waiting jobs.

        Events that these actions cause are applied in the same call. A call during an action only queues its event.
        Raise `IllegalEventError` if the event is illegal in the state of its job.
        """
        self._events.append(event)
        self._process_events()

    def _process_events(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                self._process_event(self._events.popleft())
                if not self._events:
                    self._try_placement()
        finally:
            self._running = False
        self._schedule_tick()

    def _process_event(self, event: events.Event) -> None:
        before = self.table
        with self._illegal_events.count_errors(StateMachine.VIDEO_JOB):
            self.table, actions = advance(before, event, self._wall(), self._clock())
        for action in actions:
            self._perform_action(action)
        self._history.record(before, self.table)

    def _try_placement(self) -> None:
        choice = choose_node(self.table, self.view, self.records.profiles, self._clock())
        if choice is None:
            return
        if isinstance(choice, LeaseChoice):
            self._events.append(events.JobPlaced(choice.job.id, choice.node, f"lease_{secrets.token_hex(12)}"))
        elif (choice.job.phase, choice.job.room_by is None) != (choice.phase, choice.busy):
            self._events.append(events.JobWaited(choice.job.id, choice.phase, choice.busy))

    def _schedule_tick(self) -> None:
        if self.table.jobs or self.table.holds:
            self._timer.schedule(busy=bool(self.table.holds) or any(job.open for job in self.table.jobs.values()))
        else:
            self._timer.cancel()

    def _tick(self) -> None:
        self.apply_event(events.JobTick())

    def _perform_action(self, action: events.Action) -> None:
        match action:
            case events.SaveJob(job):
                self.records.put_job(job)
            case events.RequestLease(job):
                self._request_lease(job)
            case events.ReleaseLease(node, lease, generation, ReleaseCause.ACKNOWLEDGED as cause):
                acknowledgement = LeaseRelease(lease, generation, cause)  # the node then deletes the end and the files
                self.records.call_when_stored(lambda: self._send(NodeId(node), acknowledgement))
            case events.ReleaseLease(node, lease, generation, cause):
                self._send(NodeId(node), LeaseRelease(lease, generation, cause))
            case events.FetchFiles(job, artifacts):
                self._files.start_fetch(job, artifacts)
            case events.RecordPeak(job, peak):
                self.records.add_peak(job, peak, self.view)
            case events.DeleteJob(job):
                self.records.delete_job(job)
                self._files.start_removal(job)
            case events.ExpireFiles(job):
                self._files.start_removal(job)

    def _request_lease(self, job: VideoJob) -> None:
        lease = LeaseRequest(job.lease, job.generation, job.id, job.wanted.model, job.size, job.wanted.encode_spec())
        if not self._send(NodeId(job.node), lease):
            why = "its node is not linked"
            refused = LeaseRefused(
                job.lease, job.generation, FailureCode.LINK_LOST, why, retry_after=RETRY_SECONDS, waiting_for=why
            )
            self._events.append(events.LeaseAnswered(job.node, refused))
