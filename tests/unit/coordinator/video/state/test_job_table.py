"""The job table with random events in any order, and with the scenarios that it was made for."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.video.state.events import (
    Action,
    CoordinatorRestarted,
    DeleteJob,
    Event,
    ExpireFiles,
    FetchFiles,
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
    RecordPeak,
    ReleaseLease,
    RequestLease,
    SaveJob,
)
from coordinator.video.state.job_table import JobRules, JobTable
from coordinator.video.state.job_transitions import advance
from coordinator.video.state.jobs import (
    TRANSITIONS,
    IllegalTransitionError,
    JobFault,
    JobState,
    RequestedClip,
    StoredFile,
    VideoJob,
    change_state,
    to_row,
)
from coordinator.video.state.table_draft import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS
from tests.effort import scale_examples
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.state_machine import IllegalEventError
from wire.video import Artifact, LeaseState, ReleaseCause

FILES = (StoredFile("video.mp4", 100, "ab"),)
ARTIFACTS = (Artifact("video.mp4", 100, b"\xab"),)


def a_job(number: int, **changes: Any) -> VideoJob:
    wanted = RequestedClip("wan", "a fox", 384, 224, 49, 16, 20, 336)
    job = VideoJob(id=f"video_{number}", sequence=number, key="k", created=0.0, wanted=wanted, size=36)
    return msgspec.structs.replace(job, **changes)


class Story:
    """A board, with its events and actions one by one. Unix time is `ahead` of the monotonic time `now`."""

    def __init__(self, **rules: Any) -> None:
        self.board = JobTable(JobRules(**rules))
        self.now, self.ahead = 1000.0, 0.0
        self.actions: list[Action] = []
        self.leases = 0

    def tell(self, event: Event) -> list[Action]:
        self.board, actions = advance(self.board, event, self.now + self.ahead, self.now)
        self.actions += actions
        return [action for action in actions if not isinstance(action, SaveJob)]

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.tell(JobSubmitted(a_job(number)))

    def job(self, number: int) -> VideoJob:
        return self.board.jobs[f"video_{number}"]

    def place(self, node: str = "a") -> VideoJob:
        head = self.board.head
        assert head is not None
        self.leases += 1
        self.tell(JobPlaced(head.id, node, f"lease_{self.leases}"))
        return self.board.jobs[head.id]

    def grant(self, job: VideoJob) -> list[Action]:
        return self.tell(LeaseAnswered(job.node, LeaseGranted(job.lease, job.generation, "/f")))

    def end(self, job: VideoJob, code: str = "completed", **more: Any) -> list[Action]:
        files = ARTIFACTS if code == "completed" else ()
        return self.tell(LeaseAnswered(job.node, LeaseEnded(job.lease, job.generation, code, code, files, **more)))

    def running(self, number: int = 1, node: str = "a") -> VideoJob:
        self.submit(number)
        job = self.place(node)
        self.grant(job)
        return self.board.jobs[job.id]

    def report(self, node: str, *leases: LeaseState) -> list[Action]:
        return self.tell(LeasesReported(node, leases))


def state_of(job: VideoJob, phase: str = "denoising", **more: Any) -> LeaseState:
    return LeaseState(job.lease, job.generation, job.id, 36, phase, **more)


def test_job_runs_from_queue_to_files():
    story = Story()
    story.submit(1)
    job = story.place()
    assert story.actions[-1] == RequestLease(job)
    story.grant(job)
    assert story.job(1).state == JobState.IN_PROGRESS
    story.report("a", state_of(job, progress=40, step=8, peak=77))
    assert (story.job(1).progress, story.job(1).phase, story.job(1).due) == (40, "denoising", None)
    actions = story.end(job, peak=80, seconds=9.0, made=b'{"frames":49}')
    assert [type(one) for one in actions] == [RecordPeak, FetchFiles]
    assert to_row(story.job(1))["status"] == "in_progress"
    assert story.board.holds == {}, "its memory is back before its files are fetched"
    assert story.tell(FilesFetched("video_1", 1, FILES)) == [ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)]
    told = to_row(story.job(1))
    assert (told["status"], told["progress"], told["peak"], told["made"]) == ("completed", 100, 80, {"frames": 49})
    assert told["wall_seconds"] == 9.0
    assert told["expires_at"] == int(story.now + 86400)


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (
            b'{"frames":49,"fps":16.5,"files":["video.mp4"],"seed":null}',
            {"frames": 49, "fps": 16.5, "files": ["video.mp4"], "seed": None},
        ),
        (b'{"frames":', None),
        (b'{"a":%s}' % (b"[" * 1500 + b"]" * 1500), None),
        (b"[49]", None),
        (b'{"a":"\xff"}', None),
        (b'{"a":"%s"}' % (b"x" * 4088), {"a": "x" * 4088}),
        (b'{"a":"%s"}' % (b"x" * 4089), None),
    ],
)
def test_only_a_short_json_object_is_shown_as_the_properties_of_a_clip(made: bytes, shown: object):
    story = Story()
    story.end(story.running(), made=made)
    assert to_row(story.job(1))["made"] == shown


def test_progress_and_peak_of_a_job_never_fall_and_its_phase_and_step_are_the_newest():
    story = Story()
    job = story.running()
    story.report("a", state_of(job, "denoising", progress=40, step=8, peak=77))
    story.report("a", state_of(job, "decoding", progress=30, step=9, peak=50))
    now = story.job(1)
    assert (now.progress, now.peak, now.phase, now.step) == (40, 77, "decoding", 9)
    story.report("a", state_of(job, "saving", progress=100))
    assert story.job(1).progress < 100, "its files are not here yet"
    story.report("a", state_of(job, "saving", progress=-5))
    assert story.job(1).progress > 40


@pytest.mark.parametrize("finalizing", [False, True])
def test_only_reports_in_a_row_without_a_lease_lose_a_job(finalizing: bool):
    story = Story()
    job = story.running()
    if finalizing:
        story.end(job)
    for told in (False, True, False, True):
        story.report("a", *([state_of(job, "ended" if finalizing else "denoising")] if told else []))
        assert story.job(1).state == (JobState.FINALIZING if finalizing else JobState.IN_PROGRESS), "one may be late"
    story.report("a")
    story.report("a")
    assert story.job(1).state == JobState.FAILED
    assert (story.job(1).fault or JobFault("", "")).code == ("artifact_lost" if finalizing else "worker_lost")


def test_first_come_first_served_and_one_question_at_a_time():
    story = Story()
    story.submit(3, 1, 2)
    first = story.place("a")
    assert first.id == "video_1"
    assert story.board.head is None, "no job is placed while a node has not answered"
    story.tell(
        LeaseAnswered(
            "a", LeaseRefused(first.lease, 1, "no_headroom", "no", retry_after=5, waiting_for="waiting for x")
        )
    )
    assert story.board.head is not None
    assert story.board.head.id == "video_1", "it keeps its place"
    assert story.board.head.phase == "waiting for x"
    assert story.board.pauses == {"a": story.now + 5}
    with pytest.raises(IllegalEventError, match="not to be placed"):
        story.tell(JobPlaced("video_2", "a", "lease_x"))
    story.grant(story.place("a"))
    with pytest.raises(IllegalEventError, match="not to be placed"):
        story.tell(JobPlaced("video_2", "a", "lease_x"))
    assert story.place("b").id == "video_2"


def test_report_of_an_older_lease_is_released_without_a_change():
    story = Story(on_node_loss="requeue")
    old = story.running()
    story.tell(NodeAway("a"))
    story.now += 61
    story.tell(JobTick())
    assert story.job(1).state == JobState.QUEUED
    new = story.place("b")
    story.grant(new)
    before = story.board
    assert story.report("a", state_of(old, progress=90)) == [
        ReleaseLease("a", old.lease, old.generation, ReleaseCause.SUPERSEDED)
    ]
    assert story.end(old)[-1] == ReleaseLease("a", old.lease, old.generation, ReleaseCause.ACKNOWLEDGED)
    assert story.tell(LeaseAnswered("a", LeaseGranted(old.lease, old.generation)))[-1].cause == "superseded"  # pyright: ignore
    story.tell(LeaseAnswered("a", LeaseEnded(new.lease, new.generation, "worker_crashed")))  # another node's lease
    story.tell(FilesFetched("video_1", old.generation, FILES))
    assert story.board.jobs == before.jobs
    story.tell(LeaseAnswered("b", LeaseEnded(new.lease, old.generation, "worker_crashed")))  # an older generation
    story.tell(LeaseAnswered("a", LeaseRefused(new.lease, new.generation, "no_headroom", "no")))
    assert (story.board.holds, story.board.pauses) == (before.holds, before.pauses)


@pytest.mark.parametrize(("rule", "state"), [("fail", JobState.FAILED), ("requeue", JobState.QUEUED)])
def test_absent_node_ends_its_job_after_the_configured_time(rule: Any, state: JobState):
    story = Story(on_node_loss=rule)
    story.running()
    story.tell(NodeAway("a"))
    assert (story.job(1).state, len(story.board.holds)) == (JobState.IN_PROGRESS, 1)
    story.now += 61
    story.tell(JobTick())
    assert story.job(1).state == state
    assert story.board.holds == {}
    assert (story.job(1).fault or JobFault("node_lost", "")).code == "node_lost"


@pytest.mark.parametrize("code", ["worker_lost", "node_paused", "node_stopping"])
@pytest.mark.parametrize(("rule", "state"), [("fail", JobState.FAILED), ("requeue", JobState.QUEUED)])
def test_a_job_whose_node_ends_its_lease_is_lost_by_the_configured_rule(rule: Any, state: JobState, code: str):
    story = Story(on_node_loss=rule)
    story.end(story.running(), code)
    assert (story.job(1).state, story.board.holds) == (state, {})
    assert (story.job(1).fault or JobFault(code, "")).code == code


@pytest.mark.parametrize("how", ["worker", "away"])
def test_a_job_that_is_lost_again_and_again_is_requeued_so_many_times_and_then_fails(how: str):
    story = Story(on_node_loss="requeue", attempts=2)
    story.submit(1)
    for attempt in range(3):
        job = story.place()
        story.grant(job)
        if how == "worker":
            story.end(job, "worker_lost")
        else:
            story.tell(NodeAway("a"))
            story.now += 61
            story.tell(JobTick())
        assert story.board.holds == {}
        assert story.job(1).state == (JobState.FAILED if attempt == 2 else JobState.QUEUED), attempt
    assert (story.job(1).fault or JobFault("", "")).code == ("worker_lost" if how == "worker" else "node_lost")
    assert story.job(1).attempts == 2


def test_a_job_that_starts_again_shows_no_progress_and_records_the_peak_of_its_last_worker():
    story = Story(on_node_loss="requeue")
    job = story.running()
    story.report("a", state_of(job, progress=40, step=8, peak=99))
    story.end(job, "worker_lost")
    assert (story.job(1).progress, story.job(1).step, story.job(1).peak) == (0, 0, 99)
    again = story.place()
    story.grant(again)
    recorded = story.end(again, peak=80)[0]
    assert isinstance(recorded, RecordPeak)
    assert recorded.peak == 80


def test_returning_node_continues_its_job():
    story = Story()
    job = story.running()
    story.tell(NodeAway("a"))
    due = story.job(1).due
    story.now += 30
    story.tell(NodeAway("a"))
    assert story.job(1).due == due, "a link that ends again gives it no more time"
    story.report("a", state_of(job, progress=50))
    story.now += 300
    story.tell(JobTick())
    assert (story.job(1).state, story.job(1).progress) == (JobState.IN_PROGRESS, 50)
    story.end(job)
    assert story.job(1).state == JobState.FINALIZING


def test_returning_node_has_the_whole_time_to_start_its_worker():
    story = Story(start_seconds=90.0, away_seconds=60.0)
    job = story.running()
    story.tell(NodeAway("a"))
    story.now += 59
    story.report("a", state_of(job, "granted"))
    story.now += 89
    story.tell(JobTick())
    assert story.job(1).state == JobState.IN_PROGRESS, "the time until its return does not count"
    story.now += 1
    story.tell(JobTick())
    assert story.job(1).state == JobState.QUEUED, "then its start is tried again"


def test_a_node_that_only_repeats_its_grant_has_no_more_time_to_start():
    story = Story(start_seconds=90.0, attempts=0)
    job = story.running()
    for _ in range(3):
        story.now += 30
        story.report("a", state_of(job, "granted"))
    story.tell(JobTick())
    assert (story.job(1).fault or JobFault("", "")).code == "start_failed"


def test_reports_and_the_end_of_one_node_change_no_job_of_another():
    story = Story()
    story.running(1, "a")
    story.end(story.running(2, "b"))
    story.submit(3)
    story.place("c")
    before = story.board
    for event in (*[LeasesReported("d", ())] * 3, NodeAway("d"), NodeRemoved("d")):
        assert story.tell(event) == []
        assert (story.board.jobs, story.board.holds) == (before.jobs, before.holds), event


def test_reports_and_the_loss_of_a_link_are_not_stored():
    """A node reports several times a second, and a restart begins all waits again."""
    story = Story()
    job, fetched = story.running(1, "a"), story.running(2, "b")
    story.end(fetched)
    del story.actions[:]
    story.report("a", state_of(job, "x" * 50, progress=10))
    assert story.job(1).phase == "x" * 40
    story.report("b")
    story.report("b", state_of(fetched, "ended"))
    story.tell(NodeAway("a"))
    assert (story.job(1).phase, story.job(1).away) == ("waiting for its node", True)
    story.tell(CoordinatorRestarted())
    assert story.actions == []


def test_returning_node_without_the_job_loses_it():
    story = Story()
    story.running()
    story.tell(NodeAway("a"))
    story.report("a")
    assert story.job(1).state == JobState.IN_PROGRESS, "one report may have crossed the lease"
    story.report("a")
    assert (story.job(1).fault or JobFault("", "")).code == "worker_lost"
    assert story.board.holds == {}


def test_a_restart_changes_no_ended_job_and_none_whose_files_are_fetched():
    story = Story()
    completed(story, 1)
    story.submit(2)
    story.tell(JobCancelled("video_2"))
    story.end(story.running(3))
    before = story.board.jobs
    story.tell(CoordinatorRestarted())
    assert story.board.jobs == before
    assert story.board.holds == {}


def test_a_node_that_ends_a_lease_before_its_grant_returns_the_job_to_the_queue():
    story = Story()
    story.submit(1)
    job = story.place()
    assert story.end(job, "node_stopping") == [ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)]
    again = story.job(1)
    assert (again.state, again.phase, again.attempts) == (JobState.QUEUED, "node_stopping", 0)
    assert story.board.holds == {}


def test_reports_before_the_answer_to_a_request_take_no_lease():
    story = Story()
    story.submit(1)
    job = story.place()
    for _ in range(3):
        assert story.report("a") == []
    assert story.job(1).state == JobState.LEASING
    assert story.board.holds[job.lease].generation == job.generation
    story.grant(job)
    assert story.board.holds[job.lease].granted
    story.report("a")
    assert story.job(1).state == JobState.IN_PROGRESS, "a report may be older than the grant and published after it"


def test_a_waiting_job_is_stored_only_when_its_state_changes():
    story = Story()
    story.submit(1)
    job = story.place()
    for event in (JobWaited("video_1", "waiting", False), JobWaited("video_9", "waiting", False)):
        assert story.tell(event) == []
    assert story.job(1) == job, "a job that has a node does not wait"
    refused(story, job)
    del story.actions[:]
    story.tell(JobWaited("video_1", "waiting", False))
    assert (story.job(1).phase, story.actions) == ("waiting", []), "the reason of a wait is not stored"


def test_this_process_began_again():
    story = Story()
    running = story.running(1, "a")
    story.submit(2, 3)
    asked = story.place("b")
    story.tell(CoordinatorRestarted())
    assert [story.job(n).state for n in (1, 2, 3)] == [JobState.IN_PROGRESS, JobState.QUEUED, JobState.QUEUED]
    hold = story.board.find_hold("a")
    assert hold is not None
    assert (hold.granted, hold.job, hold.size, hold.since) == (True, "video_1", 36, story.job(1).started)
    assert story.board.find_hold("b") is None
    assert story.report("b", state_of(asked, "granted"))[-1].cause == "superseded"  # pyright: ignore
    story.report("a", state_of(running, progress=60))
    assert story.job(1).progress == 60
    story.now += 61
    story.tell(JobTick())
    assert story.job(1).state == JobState.IN_PROGRESS


def test_files_are_fetched_again_when_their_node_reports_them():
    story = Story()
    job = story.running()
    story.end(job)
    assert story.report("a", state_of(job, "ended")) == []
    assert isinstance(story.end(job)[-1], FetchFiles)
    ending = state_of(job, "ending")
    assert story.report("b", ending) == [], "its release was ordered already"
    story.tell(FilesFetched("video_1", 1, FILES))
    assert story.end(job)[-1] == ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)


def test_cancel_ends_a_job_at_once_and_its_lease_with_the_node():
    story = Story()
    job = story.running()
    assert story.tell(JobCancelled("video_1")) == [
        ReleaseLease("a", job.lease, job.generation, ReleaseCause.CANCELLED)
    ], "its node removes the files itself"
    assert (story.job(1).fault or JobFault("", "")).code == "cancelled"
    assert story.job(1).generation == job.generation + 1, "later reports of the worker are outdated"
    story.submit(2)
    with pytest.raises(IllegalEventError, match="not to be placed"):
        story.tell(JobPlaced("video_2", "a", "lease_x"))
    assert story.report("a", state_of(job)) == [], "the end was reported already"
    assert story.end(job, ReleaseCause.CANCELLED)[-1] == ReleaseLease(
        "a", job.lease, job.generation, ReleaseCause.ACKNOWLEDGED
    )
    assert story.place("a").id == "video_2"
    assert story.job(1).state == JobState.FAILED


def test_delete_keeps_the_lease_until_the_node_confirms_its_end():
    story = Story()
    job = story.running()
    released = ReleaseLease("a", job.lease, job.generation, ReleaseCause.CANCELLED)
    assert story.tell(JobDeleted("video_1")) == [released, DeleteJob("video_1")]
    assert story.board.jobs == {}
    assert story.board.find_hold("a") is not None
    story.end(job, ReleaseCause.CANCELLED)
    assert story.board.holds == {}


@pytest.mark.parametrize("end", [JobCancelled("video_1"), JobDeleted("video_1")])
def test_a_cancelled_job_of_an_absent_node_keeps_no_lease(end: Event):
    story = Story()
    job = story.running()
    story.tell(NodeAway("a"))
    story.tell(end)
    assert story.board.holds == {}
    superseded = ReleaseLease("a", job.lease, job.generation, ReleaseCause.SUPERSEDED)
    assert story.report("a", state_of(job)) == [superseded], "it returns with the lease"


def test_late_files_of_a_deleted_job_are_removed():
    story = Story()
    story.end(story.running())
    story.tell(JobDeleted("video_1"))
    assert DeleteJob("video_1") in story.tell(FilesFetched("video_1", 1, FILES))


@pytest.mark.parametrize("event", ["late", "node"])
def test_a_worker_that_does_not_start_is_tried_again_so_many_times(event: str):
    story = Story(attempts=2)
    story.submit(1)
    for attempt in range(3):
        story.now += 100
        story.tell(JobTick())
        job = story.place()
        story.grant(job)
        if event == "late":
            story.now += 91
            actions = story.tell(JobTick())
        else:
            actions = story.end(job, "start_failed")
            assert story.board.find_hold("a") is None, "the node has reported the end of the lease"
            story.grant(job)
            assert story.board.holds == {}
        assert any(isinstance(one, ReleaseLease) and one.lease == job.lease for one in actions)
        assert story.job(1).state == (JobState.FAILED if attempt == 2 else JobState.QUEUED)
        assert event == "node" or story.board.find_hold("a") is not None, "until the node reports the end of the lease"
        story.end(job, "start_failed")
    assert (story.job(1).fault or JobFault("", "")).code == "start_failed"


def late_to_start(story: Story) -> VideoJob:
    """Fail the job of a story without further attempts, because its worker does not start in time. Return the job
    before its end."""
    job = story.running()
    story.now += 91
    assert story.tell(JobTick()) == [ReleaseLease("a", job.lease, job.generation, ReleaseCause.START_TIMEOUT)]
    assert story.job(1).state == JobState.FAILED
    assert story.board.find_hold("a") is not None
    return job


@pytest.mark.parametrize("event", [NodeAway("a"), NodeRemoved("a")])
def test_lease_of_a_job_that_failed_to_start_ends_with_its_node(event: Event):
    story = Story(attempts=0)
    late_to_start(story)
    story.tell(event)
    assert story.board.holds == {}


def test_node_that_returns_with_the_lease_of_a_failed_job_must_release_it():
    story = Story(attempts=0)
    job = late_to_start(story)
    story.tell(NodeAway("a"))
    superseded = ReleaseLease("a", job.lease, job.generation, ReleaseCause.SUPERSEDED)
    assert story.report("a", state_of(job)) == [superseded]
    assert story.tell(LeaseAnswered("a", LeaseGranted(job.lease, job.generation))) == [superseded]


def test_lease_end_of_another_node_does_not_change_a_job_whose_files_are_fetched():
    story = Story()
    job = story.running()
    story.end(job)
    before = story.board
    for code in ("worker_crashed", "completed"):
        frame = LeaseEnded(job.lease, job.generation, code, code, ARTIFACTS)
        assert story.tell(LeaseAnswered("b", frame)) == [
            ReleaseLease("b", job.lease, job.generation, ReleaseCause.ACKNOWLEDGED)
        ]
    assert story.board == before


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("finalizing", [False, True])
def test_report_of_another_node_about_a_lease_does_not_change_its_job(away: bool, finalizing: bool):
    story = Story()
    job = story.running()
    if finalizing:
        story.end(job)
    if away:
        story.tell(NodeAway("a"))
    before = story.board
    assert story.report("b", state_of(job, progress=90, peak=99)) == [
        ReleaseLease("b", job.lease, job.generation, ReleaseCause.SUPERSEDED)
    ]
    assert story.board == before


def test_a_second_answer_changes_nothing_of_a_running_job():
    story = Story()
    job = story.running()
    assert (job.phase, job.started, job.due) == ("starting", story.now, story.now + story.board.rules.start_seconds)
    before = story.board
    story.now += 1
    assert story.grant(job) == []
    story.tell(LeaseAnswered("a", LeaseRefused(job.lease, job.generation, "lease_held", "asked twice")))
    assert story.board == before


def test_no_job_is_placed_from_an_empty_queue():
    with pytest.raises(IllegalEventError, match="video_1 is not to be placed on a now"):
        Story().tell(JobPlaced("video_1", "a", "lease_x"))


def test_a_node_that_does_not_answer_is_left_alone():
    story = Story()
    story.submit(1)
    job = story.place()
    story.now += 31
    assert ReleaseLease("a", job.lease, 1, ReleaseCause.LEASE_TIMEOUT) in story.tell(JobTick())
    assert story.job(1).state == JobState.QUEUED
    assert "a" in story.board.pauses
    assert story.tell(LeaseAnswered("a", LeaseGranted(job.lease, 1)))[-1].cause == "superseded"  # pyright: ignore


def test_a_head_without_headroom_fails_only_when_nothing_runs():
    story = Story()
    story.submit(1)
    story.tell(JobWaited("video_1", "waiting: b makes another video", True))
    story.now += 4000
    story.tell(JobTick())
    assert story.job(1).state == JobState.QUEUED
    story.tell(JobWaited("video_1", "waiting: a has too little", False))
    story.now += 3599
    story.tell(JobWaited("video_1", "waiting: a has still too little", False))
    story.tell(JobTick())
    assert story.job(1).state == JobState.QUEUED
    story.now += 2
    story.tell(JobTick())
    assert (story.job(1).fault or JobFault("", "")).code == "no_headroom"
    assert "a has still too little" in (story.job(1).fault or JobFault("", "")).message


def refused(story: Story, job: VideoJob) -> None:
    story.tell(LeaseAnswered(job.node, LeaseRefused(job.lease, job.generation, "no_headroom", "no", retry_after=5)))


def test_the_next_job_starts_after_repeated_refusals():
    story = Story(headroom_seconds=60.0)
    story.submit(1, 2)
    began = story.now
    while story.job(1).state == JobState.QUEUED:
        assert story.now < began + 70
        refused(story, story.place())
        story.now += 5
        story.tell(JobTick())
    fault = story.job(1).fault or JobFault("", "")
    assert (fault.code, story.now) == ("no_headroom", began + 60)
    assert "within 60 s" in fault.message
    assert story.place().id == "video_2"


def test_grant_or_restart_resets_the_deadline_of_a_job():
    story = Story(headroom_seconds=60.0, attempts=3)
    story.submit(1)
    refused(story, story.place())
    assert (story.job(1).room_by, story.job(1).phase) == (story.now + 60, "no")
    story.tell(CoordinatorRestarted())
    assert (story.job(1).room_by, story.job(1).phase) == (None, "queued")
    story.place()
    assert story.job(1).room_by == story.now + 60
    story.tell(CoordinatorRestarted())
    assert (story.job(1).state, story.job(1).room_by) == (JobState.QUEUED, None)
    refused(story, story.place())
    story.grant(story.place())
    assert story.job(1).room_by is None


def completed(story: Story, number: int, size: int = 100) -> None:
    story.end(story.running(number))
    story.tell(FilesFetched(f"video_{number}", 1, (StoredFile("video.mp4", size, ""),)))


def test_retention_deletes_the_oldest_files_and_keeps_the_record():
    story = Story(keep_count=2, keep_bytes=250, keep_seconds=100.0)
    for number in (1, 2, 3):
        completed(story, number)
        story.now += 1
    assert [story.job(n).expired for n in (1, 2, 3)] == [True, False, False]
    assert ExpireFiles("video_1") in story.actions
    completed(story, 4, 150)
    assert [story.job(n).expired for n in (2, 3, 4)] == [True, False, False], "250 bytes are not too many"
    completed(story, 5, 101)
    assert [story.job(n).expired for n in (3, 4, 5)] == [True, True, False]
    story.now += 101
    for seconds, expired in ((0, False), (99, False), (1, True)):
        story.now += seconds
        story.tell(JobTick())
        assert story.job(5).expired is expired
    assert story.job(5).state == JobState.COMPLETED


def test_retention_deletes_the_files_of_the_job_that_ended_first():
    story = Story(keep_count=1)
    first, second = story.running(1, "a"), story.running(2, "b")
    for job in (second, first):
        story.end(job)
        story.tell(FilesFetched(job.id, 1, FILES))
        story.now += 1
    assert [story.job(number).expired for number in (1, 2)] == [False, True]


def test_a_clock_that_is_ahead_for_a_moment_expires_no_files():
    story = Story()
    completed(story, 1)
    for story.ahead, seconds in ((1e9, 0), (1e9, 3599), (0.0, 1), (1e9, 1), (1e9, 3599)):
        story.now += seconds
        story.tell(JobTick())
        assert story.job(1).files
    story.now += 1
    story.tell(JobTick())
    assert ExpireFiles("video_1") in story.actions


def test_only_so_many_records_are_kept():
    story = Story(records=2)
    story.submit(1, 2, 3)
    for number in (1, 2, 3):
        story.tell(JobCancelled(f"video_{number}"))
    story.tell(JobTick())
    assert list(story.board.jobs) == ["video_2", "video_3"]


def test_a_removed_node_is_not_kept_anywhere():
    story = Story()
    completed(story, 1)
    story.running(2)
    story.tell(NodeRemoved("a"))
    assert "'a'" not in repr(story.board)
    assert story.job(2).state == JobState.FAILED


def test_fetched_files_complete_a_job():
    story = Story(keep_count=1, keep_seconds=100.0)
    completed(story, 1)
    job = story.running(2)
    story.report("a", state_of(job, progress=40))
    story.end(job)
    actions = story.tell(FilesFetched("video_2", 1, FILES))
    acknowledged = ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)
    assert actions == [acknowledged, ExpireFiles("video_1")], "the older files leave at once"
    ended = story.job(2)
    assert (ended.state, ended.phase, ended.progress, ended.files) == (JobState.COMPLETED, "completed", 100, FILES)
    assert (ended.ended, ended.expires) == (story.now, story.now + 100)


def test_lost_files_fail_a_job():
    story = Story(records=1)
    story.submit(1)
    story.tell(JobCancelled("video_1"))
    job = story.running(2)
    story.end(job)
    fault = JobFault("storage_full", "the disk is full")
    acknowledged = ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)
    assert story.tell(FilesLost("video_2", 1, fault)) == [ExpireFiles("video_2"), acknowledged, DeleteJob("video_1")]
    assert (story.job(2).state, story.job(2).fault, story.job(2).files) == (JobState.FAILED, fault, ())


def test_files_of_another_lease_or_state_change_no_job():
    story = Story()
    running, files = story.running(), FilesFetched("video_1", 1, FILES)
    assert (story.tell(files), story.job(1).state) == ([], JobState.IN_PROGRESS)
    story.end(running)
    assert (story.tell(FilesFetched("video_1", 0, FILES)), story.job(1).state) == ([], JobState.FINALIZING)
    story.tell(JobCancelled("video_1"))
    cancelled = story.job(1)
    assert story.tell(files) == [ExpireFiles("video_1")]
    assert story.job(1) == cancelled


def test_overdue_lease_returns_the_job_to_the_queue_and_pauses_the_node():
    story = Story()
    story.submit(1)
    job = story.place()
    story.now += 30
    assert story.tell(JobTick()) == [ReleaseLease("a", job.lease, 1, ReleaseCause.LEASE_TIMEOUT)]
    assert (story.job(1).state, story.job(1).phase) == (JobState.QUEUED, "its node did not answer")
    assert story.board.pauses == {"a": story.now + MAX_PAUSE_SECONDS / 2}


def test_overdue_start_releases_the_lease_and_a_job_of_an_absent_node_does_not():
    story = Story()
    job = story.running()
    story.now += 90
    assert story.tell(JobTick()) == [ReleaseLease("a", job.lease, 1, ReleaseCause.START_TIMEOUT)]
    assert (story.job(1).state, list(story.board.holds)) == (JobState.QUEUED, [job.lease])
    assert story.board.pauses == {"a": story.now + 5 * MIN_PAUSE_SECONDS}
    story = Story()
    story.running()
    story.tell(NodeAway("a"))
    story.now += 60
    assert story.tell(JobTick()) == []
    assert (story.job(1).fault or JobFault("", "")).code == "node_lost"
    assert story.board.holds == {}


def test_overdue_fetch_fails_the_job():
    story = Story(keep_seconds=100.0, on_node_loss="requeue")
    story.end(story.running())
    story.now += 99
    assert (story.tell(JobTick()), story.job(1).state) == ([], JobState.FINALIZING)
    story.now += 1
    assert story.tell(JobTick()) == [ExpireFiles("video_1")]
    assert (story.job(1).fault or JobFault("", "")).code == "artifact_lost"


@pytest.mark.parametrize("how", ["report", "removal", "contradiction"])
def test_files_of_a_job_that_fails_during_their_fetch_are_removed(how: str):
    story = Story()
    job = story.running()
    story.end(job)
    if how == "report":
        story.report("a")
        actions = story.report("a")
    elif how == "removal":
        actions = story.tell(NodeRemoved("a"))
    else:
        actions = story.end(job, "worker_crashed")
    assert (story.job(1).state, ExpireFiles("video_1") in actions) == (JobState.FAILED, True)


def test_nothing_follows_an_end():
    for state in (JobState.COMPLETED, JobState.FAILED):
        assert TRANSITIONS[state] == frozenset()
        for other in JobState:
            with pytest.raises(IllegalTransitionError):
                change_state(a_job(1, state=state), other)


# random events in any order

LEASES = st.integers(1, 6).map(lambda number: f"lease_{number}")
NODES = st.sampled_from(["a", "b"])
JOBS = st.integers(1, 4).map(lambda number: f"video_{number}")
GENERATIONS = st.integers(0, 4)
STATES = st.builds(
    LeaseState,
    LEASES,
    GENERATIONS,
    st.just(""),
    st.just(36),
    st.sampled_from(["granting", "granted", "starting", "denoising", "ending", "ended"]),
    st.integers(0, 100),
)
FRAMES = st.one_of(
    st.builds(LeaseGranted, LEASES, GENERATIONS),
    st.builds(LeaseRefused, LEASES, GENERATIONS, st.just("no_headroom"), st.just("no")),
    st.builds(
        LeaseEnded, LEASES, GENERATIONS, st.sampled_from(["completed", "worker_crashed", "worker_lost", "start_failed"])
    ),
)
EVENTS = st.one_of(
    st.just("place"),
    st.just("place"),
    st.just("grant"),
    st.just("end"),
    st.integers(1, 40),
    st.builds(LeaseAnswered, NODES, FRAMES),
    st.builds(LeasesReported, NODES, st.lists(STATES, max_size=2).map(tuple)),
    st.builds(NodeAway, NODES),
    st.builds(NodeRemoved, NODES),
    st.builds(FilesFetched, JOBS, GENERATIONS, st.just(FILES)),
    st.builds(FilesLost, JOBS, GENERATIONS, st.just(JobFault("artifact_lost", ""))),
    st.builds(JobCancelled, JOBS),
    st.builds(JobDeleted, JOBS),
    st.builds(JobWaited, JOBS, st.just("waits"), st.booleans()),
    st.just(CoordinatorRestarted()),
    st.just(JobTick()),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from(["fail", "requeue"]))
@settings(max_examples=scale_examples(2000))
def test_the_rules_hold_after_any_events(events: list[Any], rule: Any):
    story = Story(on_node_loss=rule)
    story.submit(1, 2, 3, 4)
    placed: list[int] = []
    for event in events:
        before = story.board
        if event == "place":
            free = [node for node in ("a", "b") if story.board.find_hold(node) is None]
            if story.board.head is not None and free:
                assert story.board.head.sequence == min(job.sequence for job in story.board.waiting)
                placed.append(story.place(free[0]).sequence)
            continue
        if event in ("grant", "end"):
            state = JobState.LEASING if event == "grant" else JobState.IN_PROGRESS
            for job in [job for job in story.board.jobs.values() if job.state == state][:1]:
                story.grant(job) if event == "grant" else story.end(job)
        elif isinstance(event, int):
            story.now += event
        else:
            story.tell(event)
        check(before, story.board)
        if isinstance(event, LeaseAnswered):
            fenced(before, story.board, event)


def check(before: JobTable, board: JobTable) -> None:
    nodes = [hold.node for hold in board.holds.values()]
    assert len(nodes) == len(set(nodes)), "one hold on a node"
    assert sum(job.state == JobState.LEASING for job in board.jobs.values()) <= 1
    for job in board.jobs.values():
        old = before.jobs.get(job.id)
        if old is not None and not old.open:
            assert (job.state, job.fault) == (old.state, old.fault), "nothing follows an end"
        if old is not None:
            assert job.generation >= old.generation
        if job.state in (JobState.LEASING, JobState.IN_PROGRESS):
            hold = board.holds[job.lease]
            assert (hold.node, hold.job, hold.generation) == (job.node, job.id, job.generation)
            assert hold.granted == (job.state == JobState.IN_PROGRESS)
        assert not job.away or job.state not in (JobState.LEASING, JobState.FINALIZING)
        if job.state == JobState.QUEUED:
            assert (job.lease, job.node) == ("", "")


def fenced(before: JobTable, after: JobTable, said: LeaseAnswered) -> None:
    """Check that a message about a lease that is not a job's newest changes no job."""
    newest = {(job.lease, job.generation, job.node) for job in before.jobs.values() if job.lease}
    if (said.frame.lease, said.frame.generation, said.node) not in newest:
        assert after.jobs == before.jobs


def test_fewer_ended_jobs_than_the_maximum_are_all_kept():
    story = Story(records=3)
    story.submit(1, 2)
    for number in (1, 2):
        story.tell(JobCancelled(f"video_{number}"))
    story.tell(JobTick())
    assert list(story.board.jobs) == ["video_1", "video_2"]


@pytest.mark.parametrize(
    "end", ["leasing", "start_failed", "worker_lost", "worker_crashed", "fetched", "lost", "cancelled"]
)
def test_an_end_is_acknowledged_after_the_action_that_stores_its_result(end: str):
    """The controller waits for the changes that precede the acknowledgement."""
    story = Story()
    story.submit(1)
    job = story.place()
    if end != "leasing":
        story.grant(job)
    if end in ("fetched", "lost", "cancelled"):
        story.end(job)
    del story.actions[:]
    match end:
        case "fetched":
            story.tell(FilesFetched("video_1", 1, FILES))
        case "lost":
            story.tell(FilesLost("video_1", 1, JobFault("artifact_broken", "")))
        case "cancelled":
            story.tell(JobCancelled("video_1"))
        case _:
            story.end(job, "worker_lost" if end == "leasing" else end)
    stored, acknowledged = story.actions[0], story.actions[-1]
    assert stored == SaveJob(story.job(1))
    assert acknowledged == ReleaseLease("a", job.lease, 1, ReleaseCause.ACKNOWLEDGED)


def test_every_transition_of_a_job_is_stored():
    """The controller stores a new job before its event."""
    story = Story()
    completed(story, 1)
    saved = [action.job for action in story.actions if isinstance(action, SaveJob)]
    states = [JobState.LEASING, JobState.IN_PROGRESS, JobState.FINALIZING, JobState.COMPLETED]
    assert [state for state in dict.fromkeys(job.state for job in saved)] == states  # noqa: C416
    assert saved[-1] == story.job(1)


def test_a_node_that_goes_away_before_its_answer_returns_the_job_with_a_new_generation():
    story = Story()
    story.submit(1)
    asked = story.place("a")
    assert story.job(1).due == story.now + story.board.rules.lease_seconds
    story.tell(NodeAway("a"))
    job = story.job(1)
    assert (job.state, job.node, job.lease, job.generation) == (JobState.QUEUED, "", "", asked.generation + 1)
    assert story.board.holds == {}
    again = story.place("b")
    assert again.generation == asked.generation + 2


def test_a_lease_request_is_due_before_the_deadline_for_headroom():
    story = Story(lease_seconds=30.0, headroom_seconds=100.0)
    story.submit(1)
    story.tell(JobWaited("video_1", "waiting", busy=False))
    story.now += 90.0
    job = story.place("a")
    assert job.due == story.now + 10.0


def test_a_cancelled_job_whose_files_are_fetched_acknowledges_its_end():
    story = Story()
    job = story.running()
    story.end(job)
    assert story.tell(JobCancelled("video_1")) == [
        ExpireFiles("video_1"),
        ReleaseLease("a", job.lease, job.generation, ReleaseCause.ACKNOWLEDGED),
    ]
    assert story.job(1).state == JobState.FAILED


@pytest.mark.parametrize(
    ("asked", "pause"),
    [(0.0, MAX_PAUSE_SECONDS), (0.5, MIN_PAUSE_SECONDS), (5.0, 5.0), (10**6, MAX_PAUSE_SECONDS)],
)
def test_the_pause_of_a_node_that_refuses_has_bounds(asked: float, pause: float):
    story = Story()
    story.submit(1)
    job = story.place("a")
    story.tell(LeaseAnswered("a", LeaseRefused(job.lease, 1, "no_headroom", "no", retry_after=asked)))
    assert story.board.pauses == {"a": story.now + pause}
    story.tell(NodeAway("a"))
    assert story.board.pauses == {}, "a node that returns may be asked at once"


@pytest.mark.parametrize("wait", ["room", "lease", "start", "return", "files"])
def test_a_job_waits_no_longer_or_shorter_after_the_clock_was_set(wait: str):
    story, rules = Story(), JobRules()
    if wait in ("room", "lease"):
        story.submit(1)
    else:
        job = story.running()
        if wait == "return":
            story.tell(NodeAway("a"))
        elif wait == "files":
            story.end(job)
    if wait == "room":
        story.tell(JobWaited("video_1", "no room", busy=False))
    elif wait == "lease":
        story.place()
    before = story.job(1)
    seconds = {
        "room": rules.headroom_seconds,
        "lease": rules.lease_seconds,
        "start": rules.start_seconds,
        "return": rules.away_seconds,
        "files": rules.keep_seconds,
    }
    story.now += seconds[wait] - 1
    for story.ahead in (1e6, -1e6):
        story.tell(JobTick())
        assert (story.job(1).state, story.job(1).generation) == (before.state, before.generation)
    story.now += 1
    story.tell(JobTick())
    assert story.job(1).generation > before.generation


def test_the_pause_of_a_node_ends_after_its_seconds_when_the_clock_is_set():
    story = Story()
    story.submit(1)
    job = story.place("a")
    story.tell(LeaseAnswered("a", LeaseRefused(job.lease, 1, "no_headroom", "no", retry_after=MAX_PAUSE_SECONDS)))
    for story.ahead, seconds in ((1e6, MAX_PAUSE_SECONDS - 1), (-1e6, 1)):
        assert "a" in story.board.pauses
        story.now += seconds
        story.tell(JobTick())
    assert story.board.pauses == {}


def test_files_of_a_node_are_awaited_again_after_a_restart():
    """Monotonic times of the previous process have no meaning."""
    story = Story(keep_seconds=100.0)
    story.end(story.running())
    story.now = 0.0
    story.tell(CoordinatorRestarted())
    story.now += 99
    story.tell(JobTick())
    assert story.job(1).state == JobState.FINALIZING
    story.now += 1
    story.tell(JobTick())
    assert story.job(1).state == JobState.FAILED


def test_a_running_job_keeps_the_begin_of_its_lease_over_a_restart():
    story = Story()
    running = story.running(1, "a")
    assert running.started == story.now
    story.now += 50.0
    story.tell(CoordinatorRestarted())
    hold = story.board.find_hold("a")
    assert hold is not None
    assert hold.since == running.started
    assert (story.job(1).away, story.job(1).due) == (True, story.now + story.board.rules.away_seconds)


@pytest.mark.parametrize(
    ("rule", "finalizing", "state", "code"),
    [
        ("fail", False, JobState.FAILED, "node_lost"),
        ("requeue", False, JobState.QUEUED, ""),
        ("requeue", True, JobState.FAILED, "artifact_lost"),
    ],
)
def test_a_removed_node_ends_or_requeues_its_job(rule: Any, finalizing: bool, state: JobState, code: str):
    story = Story(on_node_loss=rule)
    job = story.running()
    if finalizing:
        story.end(job)
    story.tell(NodeRemoved("a"))
    assert (story.job(1).state, (story.job(1).fault or JobFault("", "")).code) == (state, code)
