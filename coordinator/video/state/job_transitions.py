"""State machine of the video job table: `advance(table, event, now, steady) → (table, actions)`. Pure.

`coordinator.video.state.job_table` has the concepts and invariants. `coordinator.video.state.lease_transitions`
processes messages of nodes.
"""

from msgspec.structs import replace

from coordinator.video.state.events import (
    Actions,
    CoordinatorRestarted,
    DeleteJob,
    Event,
    ExpireFiles,
    FilesFetched,
    FilesLost,
    JobCancelled,
    JobDeleted,
    JobPlaced,
    JobSubmitted,
    JobTick,
    JobWaited,
    LeaseAnswered,
    LeasesReported,
    NodeAway,
    NodeRemoved,
    ReleaseLease,
    RequestLease,
)
from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.jobs import JobFaultCode, JobState, VideoJob, change_state
from coordinator.video.state.lease_transitions import apply_answer, apply_node_away, apply_node_removed, apply_report
from coordinator.video.state.retention import apply_retention, expire_old_files
from coordinator.video.state.table_draft import MAX_PAUSE_SECONDS, TableDraft
from wire.state_machine import IllegalEventError
from wire.video import LeaseEndCode, ReleaseCause


def advance(table: JobTable, event: Event, now: float, steady: float) -> tuple[JobTable, Actions]:
    """Apply an event at `now` (Unix seconds). Return the new table and the actions in order.

    `steady` is the same time in monotonic seconds. Raise `IllegalEventError` for a `JobPlaced` whose job is not
    `table.head`, or whose node already has a lease hold. Raise `IllegalTransitionError` for a lease end that would
    restart a job whose files are being fetched.
    """
    turn = TableDraft(table, now, steady)
    match event:
        case JobSubmitted(job):
            turn.put_job(job, save=False)
        case JobPlaced():
            _apply_placed(turn, table, event)
        case JobWaited():
            _apply_wait(turn, event)
        case LeaseAnswered(node, frame):
            apply_answer(turn, node, frame)
        case LeasesReported():
            apply_report(turn, event)
        case NodeAway(node):
            apply_node_away(turn, node)
        case NodeRemoved(node):
            apply_node_removed(turn, node)
        case FilesFetched() | FilesLost():
            _apply_fetched(turn, event)
        case JobCancelled(job, message):
            _apply_cancelled(turn, job, message)
        case JobDeleted(job):
            _apply_cancelled(turn, job, "it was deleted")
            if turn.jobs.pop(job, None) is not None:
                turn.actions.append(DeleteJob(job))
        case CoordinatorRestarted():
            _apply_restart(turn)
        case JobTick():
            _apply_tick(turn)
    return turn.build_table(), tuple(turn.actions)


def _apply_placed(turn: TableDraft, table: JobTable, event: JobPlaced) -> None:
    head = table.head
    if head is None or head.id != event.job or table.find_hold(event.node) is not None:
        raise IllegalEventError(f"{event.job} is not to be placed on {event.node} now")
    generation = head.generation + 1
    fail_at = turn.compute_headroom_deadline(head)
    job = turn.put_job(
        change_state(
            replace(head, room_by=fail_at),
            JobState.LEASING,
            generation=generation,
            node=event.node,
            lease=event.lease,
            phase="asking a node",
            due=min(turn.steady + turn.rules.lease_seconds, fail_at),
        )
    )
    turn.holds[event.lease] = LeaseHold(event.lease, event.node, generation, job.id, job.size, turn.now)
    turn.actions.append(RequestLease(job))


def _apply_wait(turn: TableDraft, event: JobWaited) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.state != JobState.QUEUED:
        return
    fail_at = None if event.busy else turn.compute_headroom_deadline(job)
    if (job.phase, job.room_by) != (event.phase, fail_at):
        turn.put_job(replace(job, phase=event.phase, room_by=fail_at), save=False)


def _apply_fetched(turn: TableDraft, event: FilesFetched | FilesLost) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.generation != event.generation or job.state != JobState.FINALIZING:
        if job is None or not job.open:
            turn.actions.append(ExpireFiles(event.job) if job is not None else DeleteJob(event.job))
        return
    if isinstance(event, FilesFetched):
        expires = turn.now + turn.rules.keep_seconds
        turn.put_job(
            change_state(
                job,
                JobState.COMPLETED,
                phase="completed",
                progress=100,
                files=event.files,
                ended=turn.now,
                expires=expires,
            )
        )
    else:
        turn.fail_job(job, event.fault.code, event.fault.message)
    turn.actions.append(ReleaseLease(job.node, job.lease, job.generation, ReleaseCause.ACKNOWLEDGED))
    apply_retention(turn)


def _apply_cancelled(turn: TableDraft, name: str, message: str) -> None:
    job = turn.jobs.get(name)
    if job is None or not job.open:
        return
    turn.release_hold(job.lease, ReleaseCause.CANCELLED)
    if job.away:  # a node without a link confirms nothing; one that returns with the lease must release it
        turn.holds.pop(job.lease, None)
    turn.fail_job(job, JobFaultCode.CANCELLED, message)
    if job.state == JobState.FINALIZING:
        turn.actions.append(ReleaseLease(job.node, job.lease, job.generation, ReleaseCause.ACKNOWLEDGED))


def _apply_restart(turn: TableDraft) -> None:
    """Requeue jobs without an answer to their lease request, and wait for the nodes of running jobs.

    All waits begin again, because monotonic times of the previous process have no meaning. Any other lease of a node is
    unknown here, and is released when the node reports it.
    """
    turn.holds.clear()
    for job in list(turn.jobs.values()):
        if job.state == JobState.LEASING:
            turn.requeue_job(replace(job, room_by=None), "queued")
        elif job.state == JobState.IN_PROGRESS:
            turn.holds[job.lease] = LeaseHold(
                job.lease, job.node, job.generation, job.id, job.size, job.started or turn.now, granted=True
            )
            turn.put_job(replace(job, away=True, due=turn.steady + turn.rules.away_seconds), save=False)
        elif job.state == JobState.QUEUED:
            turn.put_job(replace(job, room_by=None, phase="queued"), save=False)
        elif job.state == JobState.FINALIZING:
            turn.put_job(replace(job, due=turn.steady + turn.rules.keep_seconds), save=False)


def _apply_tick(turn: TableDraft) -> None:
    for job in [job for job in turn.jobs.values() if job.due is not None and job.due <= turn.steady]:
        _apply_overdue(turn, job)
    for job in [
        job for job in turn.jobs.values() if job.state == JobState.QUEUED and turn.has_headroom_deadline_passed(job)
    ]:
        text = f"no node had room for it within {turn.rules.headroom_seconds:.0f} s: {job.phase}"
        turn.fail_job(job, JobFaultCode.NO_HEADROOM, text)
    for node in [node for node, until in turn.pauses.items() if until <= turn.steady]:
        del turn.pauses[node]
    expire_old_files(turn)
    apply_retention(turn)


def _apply_overdue(turn: TableDraft, job: VideoJob) -> None:
    if job.state == JobState.LEASING:
        turn.release_hold(job.lease, ReleaseCause.LEASE_TIMEOUT)
        turn.pause_node(job.node, MAX_PAUSE_SECONDS / 2)
        turn.requeue_job(job, "its node did not answer")
    elif job.state == JobState.IN_PROGRESS and job.away:
        turn.holds.pop(job.lease, None)
        turn.handle_loss(
            job, JobFaultCode.NODE_LOST, f"its node was away for more than {turn.rules.away_seconds:.0f} s"
        )
    elif job.state == JobState.IN_PROGRESS:
        turn.release_hold(job.lease, ReleaseCause.START_TIMEOUT)
        turn.retry_start(
            job, LeaseEndCode.START_FAILED, f"its worker did not start within {turn.rules.start_seconds:.0f} s"
        )
    elif job.state == JobState.FINALIZING:
        turn.fail_job(job, JobFaultCode.ARTIFACT_LOST, "its node did not come back with its files")
