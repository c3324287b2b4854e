"""Steps that several events of video jobs share: every field of a job that fails or waits again."""

from msgspec.structs import replace

from coordinator.video.state.events import ExpireFiles, SaveJob
from coordinator.video.state.job_table import JobRules, JobTable
from coordinator.video.state.jobs import JobFault, JobState, RequestedClip, VideoJob
from coordinator.video.state.table_draft import TableDraft

RUNNING = VideoJob(
    id="j1",
    sequence=1,
    key="k",
    created=5.0,
    wanted=RequestedClip("wan", "a fox", 384, 224, 49, 16, 20, 336),
    size=36,
    state=JobState.IN_PROGRESS,
    generation=3,
    lease="lease_1",
    node="a",
    progress=40,
    step=8,
    phase="denoising",
    started=20.0,
    attempts=1,
    due=130.0,
)


def begin(job: VideoJob) -> TableDraft:
    """Begin a transition at the Unix time 100 s and the monotonic time 50 s."""
    return TableDraft(JobTable(JobRules(), {job.id: job}), 100.0, 50.0)


def test_a_failed_job_keeps_its_node_and_has_its_fault_and_its_end():
    turn = begin(RUNNING)
    turn.fail_job(RUNNING, "worker_crashed", "it ended with code 9")
    failed = replace(
        RUNNING,
        state=JobState.FAILED,
        generation=4,
        fault=JobFault("worker_crashed", "it ended with code 9"),
        phase="failed",
        ended=100.0,
        due=None,
    )
    assert (turn.jobs["j1"], turn.actions) == (failed, [SaveJob(failed)])


def test_a_job_that_fails_while_its_files_are_fetched_loses_them():
    turn = begin(replace(RUNNING, state=JobState.FINALIZING))
    turn.fail_job(turn.jobs["j1"], "artifact_lost", "gone")
    assert turn.actions == [SaveJob(turn.jobs["j1"]), ExpireFiles("j1")]


def test_a_job_that_waits_again_has_no_trace_of_its_node():
    turn = begin(RUNNING)
    turn.requeue_job(RUNNING, "again")
    queued = replace(
        RUNNING,
        state=JobState.QUEUED,
        generation=4,
        lease="",
        node="",
        progress=0,
        step=0,
        phase="again",
        started=None,
        due=None,
    )
    assert (turn.jobs["j1"], turn.actions) == (queued, [SaveJob(queued)])
