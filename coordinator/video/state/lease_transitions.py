"""Transitions of the video job table for messages of nodes about leases, and for missing messages. Pure."""

from dataclasses import replace as changed

import msgspec
from msgspec.structs import replace

from coordinator.video.state.events import FetchFiles, LeasesReported, RecordPeak, ReleaseLease
from coordinator.video.state.job_table import LeaseHold
from coordinator.video.state.jobs import FETCHING_PROGRESS, JobFaultCode, JobState, VideoJob, change_state
from coordinator.video.state.table_draft import MAX_PAUSE_SECONDS, TableDraft
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import LeaseEndCode, LeaseState, ReleaseCause

ClipProperty = str | float | bool | list[str] | None
"""Value of a property of a clip in `LeaseEnded.made`."""
MAX_MADE_BYTES = 4096
"""Maximum bytes of the properties of a clip (`LeaseEnded.made`). Longer properties are not stored."""
MAX_MISSED_REPORTS = 2
"""Consecutive reports without a lease after which the lease, or the files of its finished job, count as lost.

One report is not enough, because the first one may be older than the lease request.
"""
LOST = frozenset({LeaseEndCode.WORKER_LOST, LeaseEndCode.NODE_PAUSED, LeaseEndCode.NODE_STOPPING})
"""Codes of lease ends that count as a loss of the worker or its node (`TableDraft.handle_loss`)."""


def apply_answer(turn: TableDraft, node: str, frame: LeaseGranted | LeaseRefused | LeaseEnded) -> None:
    """Apply a node's frame about a lease. Ignore a frame of another node or generation than that of the hold.

    Raise `IllegalTransitionError` for a lease end that would restart a job whose files are being fetched.
    """
    hold = turn.holds.get(frame.lease)
    if hold is not None and (hold.node, hold.generation) != (node, frame.generation):
        return
    match frame:
        case LeaseGranted():
            _apply_granted(turn, node, frame)
        case LeaseRefused():
            _apply_refused(turn, node, frame)
        case LeaseEnded():
            _apply_ended(turn, node, frame)


def _apply_granted(turn: TableDraft, node: str, frame: LeaseGranted) -> None:
    job = turn.find_job(node, frame.lease, frame.generation)
    if job is None:
        turn.actions.append(ReleaseLease(node, frame.lease, frame.generation, ReleaseCause.SUPERSEDED))
        return
    if job.state != JobState.LEASING:
        return
    turn.holds[frame.lease] = changed(turn.holds[frame.lease], granted=True, misses=0)
    turn.put_job(
        change_state(
            replace(job, room_by=None),
            JobState.IN_PROGRESS,
            phase="starting",
            started=turn.now,
            due=turn.steady + turn.rules.start_seconds,
        )
    )


def _apply_refused(turn: TableDraft, node: str, frame: LeaseRefused) -> None:
    job = turn.find_job(node, frame.lease, frame.generation)
    if job is not None and job.state != JobState.LEASING:
        return  # it was granted before, and holds until its node says that it ended
    turn.holds.pop(frame.lease, None)
    turn.pause_node(node, frame.retry_after or MAX_PAUSE_SECONDS)
    if job is not None:
        turn.requeue_job(job, frame.waiting_for or frame.message)


def _apply_ended(turn: TableDraft, node: str, frame: LeaseEnded) -> None:
    job = turn.find_job(node, frame.lease, frame.generation) or _find_fetching_job(turn, node, frame)
    turn.holds.pop(frame.lease, None)
    if job is None or not job.open or job.state == JobState.QUEUED:
        turn.actions.append(ReleaseLease(node, frame.lease, frame.generation, ReleaseCause.ACKNOWLEDGED))
        return
    job = replace(job, peak=max(job.peak, frame.peak), seconds=frame.seconds, made=_check_properties(frame.made))
    if frame.code == LeaseEndCode.COMPLETED:
        if job.state == JobState.LEASING:  # its grant was not received
            job = change_state(job, JobState.IN_PROGRESS)
        if job.state == JobState.IN_PROGRESS:
            job = change_state(job, JobState.FINALIZING, progress=FETCHING_PROGRESS, phase="fetching")
            turn.actions.append(RecordPeak(job, frame.peak))
        turn.put_job(replace(job, due=turn.steady + turn.rules.keep_seconds, away=False))
        turn.actions.append(FetchFiles(job, frame.artifacts))
        return
    if job.state == JobState.LEASING:
        turn.requeue_job(job, frame.message)
    elif frame.code == LeaseEndCode.START_FAILED:
        turn.retry_start(job, frame.code, frame.message)
    elif frame.code in LOST:
        turn.handle_loss(job, frame.code, frame.message or "its worker was lost")
    else:
        turn.fail_job(job, frame.code, frame.message)
    turn.actions.append(ReleaseLease(node, frame.lease, frame.generation, ReleaseCause.ACKNOWLEDGED))


def _find_fetching_job(turn: TableDraft, node: str, frame: LeaseEnded) -> VideoJob | None:
    """Return the job of a repeated lease end whose files are being fetched from `node`; None if there is none.

    The job has no hold any more.
    """
    for job in turn.jobs.values():
        lease = (job.node, job.lease, job.generation)
        if job.state == JobState.FINALIZING and lease == (node, frame.lease, frame.generation):
            return job
    return None


def _check_properties(made: bytes) -> str:
    """Return the properties of a clip as text, if they are a JSON object of `ClipProperty`; else an empty text.

    The text is also empty if the properties have more than `MAX_MADE_BYTES` bytes.
    """
    try:
        msgspec.json.decode(made, type=dict[str, ClipProperty])
        return made.decode() if len(made) <= MAX_MADE_BYTES else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def apply_report(turn: TableDraft, event: LeasesReported) -> None:
    """Apply a node's report about leases.

    Record the progress of listed leases, release unknown ones, and count missing ones as lost.
    """
    reported = {state.lease: state for state in event.leases}
    for state in event.leases:
        if turn.find_job(event.node, state.lease, state.generation) is None and not _is_kept(turn, event.node, state):
            cause = ReleaseCause.ACKNOWLEDGED if state.phase == "ended" else ReleaseCause.SUPERSEDED
            turn.actions.append(ReleaseLease(event.node, state.lease, state.generation, cause))
        else:
            _apply_progress(turn, event.node, state)
    for hold in [hold for hold in turn.holds.values() if hold.node == event.node]:
        _apply_presence(turn, hold, hold.lease in reported)
    for job in [job for job in turn.jobs.values() if job.node == event.node and job.state == JobState.FINALIZING]:
        _apply_file_presence(turn, job, job.lease in reported)


def _apply_file_presence(turn: TableDraft, job: VideoJob, present: bool) -> None:
    if not present and job.misses + 1 >= MAX_MISSED_REPORTS:
        turn.fail_job(job, JobFaultCode.ARTIFACT_LOST, "its node came back without its files")
    else:
        turn.put_job(replace(job, misses=0 if present else job.misses + 1), save=False)


def _is_kept(turn: TableDraft, node: str, state: LeaseState) -> bool:
    """Return whether a node keeps a lease without a running job.

    Either its files are being fetched, or its release was already requested.
    """
    hold = turn.holds.get(state.lease)
    if state.phase == "ending" or (hold is not None and hold.node == node):
        return True
    return any(
        (job.node, job.lease) == (node, state.lease) and job.state == JobState.FINALIZING for job in turn.jobs.values()
    )


def _apply_progress(turn: TableDraft, node: str, state: LeaseState) -> None:
    job = turn.find_job(node, state.lease, state.generation)
    if job is None or job.state != JobState.IN_PROGRESS:
        return
    began = state.phase not in ("", "granting", "granted")
    due = None if began else (turn.steady + turn.rules.start_seconds if job.away else job.due)
    percent = max(job.progress, min(FETCHING_PROGRESS, max(0, state.progress)))
    phase = state.phase if began else "starting"
    turn.put_job(
        replace(
            job,
            progress=percent,
            phase=phase[:40],
            step=state.step,
            peak=max(job.peak, state.peak),
            due=due,
            away=False,
        ),
        save=False,
    )


def _apply_presence(turn: TableDraft, hold: LeaseHold, present: bool) -> None:
    if present:
        turn.holds[hold.lease] = changed(hold, misses=0)
        return
    if hold.misses + 1 < MAX_MISSED_REPORTS:
        turn.holds[hold.lease] = changed(hold, misses=hold.misses + 1)
        return
    job = turn.find_job(hold.node, hold.lease, hold.generation)
    if job is not None and job.state == JobState.LEASING:
        return  # the node is still making up its mind; the deadline rules
    del turn.holds[hold.lease]
    if job is not None and job.state == JobState.IN_PROGRESS:
        turn.handle_loss(job, LeaseEndCode.WORKER_LOST, "its node came back without it")


def apply_node_away(turn: TableDraft, node: str) -> None:
    """Apply the end of a node's link: requeue a job that waits for a lease, and set a deadline for a running job.

    Also delete the node's pause, and its lease holds that belong to no job.
    """
    for job in [job for job in turn.jobs.values() if job.node == node]:
        if job.state == JobState.LEASING:
            turn.holds.pop(job.lease, None)
            turn.requeue_job(job, "its node went away")
        elif job.state == JobState.IN_PROGRESS and not job.away:
            due = turn.steady + turn.rules.away_seconds
            turn.put_job(replace(job, away=True, due=due, phase="waiting for its node"), save=False)
    for hold in [hold for hold in turn.holds.values() if hold.node == node]:
        if turn.find_job(hold.node, hold.lease, hold.generation) is None:
            del turn.holds[hold.lease]
    turn.pauses.pop(node, None)


def apply_node_removed(turn: TableDraft, node: str) -> None:
    """Handle the departure of a node from the pool: requeue or fail the open jobs of the node.

    Clear `VideoJob.node` in all jobs of the node, including ended ones. Delete the node's pause and lease holds.
    """
    apply_node_away(turn, node)
    for job in [job for job in turn.jobs.values() if job.node == node and job.open]:
        turn.holds.pop(job.lease, None)
        _apply_node_loss(turn, job, "its node was removed from the cluster")
    for job in [job for job in turn.jobs.values() if job.node == node]:
        turn.put_job(replace(job, node=""))


def _apply_node_loss(turn: TableDraft, job: VideoJob, message: str) -> None:
    if job.state == JobState.FINALIZING:
        turn.fail_job(job, JobFaultCode.ARTIFACT_LOST, f"{message} before its files were fetched")
    else:
        turn.handle_loss(job, JobFaultCode.NODE_LOST, message)
