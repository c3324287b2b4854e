"""The time in which a job finds room: the real job table and the real placement with nodes that behave randomly."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.video.state.events import JobSubmitted, JobTick, JobWaited, LeaseAnswered
from coordinator.video.state.jobs import JobState, VideoJob
from coordinator.video.state.lease_placement import LeaseChoice, NoLeaseChoice, choose_node
from router.placement.cluster_view import ClusterView
from tests.effort import scale_examples
from tests.unit.coordinator.video.state.test_job_table import Story, a_job
from tests.unit.coordinator.video.state.test_lease_placement import a_node
from wire.frames import LeaseRefused
from wire.units import GIB


@dataclass
class World:
    """Nodes that randomly refuse, grant, stay silent or are full, with the real placement and the real job table."""

    chance: random.Random
    story: Story
    kinds: dict[str, str]
    answers: list[tuple[float, VideoJob, bool]] = field(default_factory=list)

    def view(self) -> ClusterView:
        rooms = {node: 8 * GIB if kind == "full" else 80 * GIB for node, kind in self.kinds.items()}
        return ClusterView(tuple(a_node(node, room, reported_at=self.story.now) for node, room in rooms.items()))

    def second(self) -> None:
        story = self.story
        for at, job, grants in [one for one in self.answers if one[0] <= story.now]:
            self.answers.remove((at, job, grants))
            if grants:
                story.grant(job)
                story.end(story.board.jobs[job.id], "worker_crashed")
            else:
                retry = self.chance.uniform(0.0, 20.0)
                frame = LeaseRefused(job.lease, job.generation, "no_headroom", "no", retry_after=retry)
                story.tell(LeaseAnswered(job.node, frame))
        found = choose_node(story.board, self.view(), {}, story.now)
        if isinstance(found, LeaseChoice):
            job, kind = story.place(found.node), self.kinds[found.node]
            if kind != "silent":
                grants = kind == "grants" or (kind == "moody" and self.chance.random() < 0.05)
                self.answers.append((story.now + self.chance.uniform(0.0, 3.0), job, grants))
        elif isinstance(found, NoLeaseChoice):
            story.tell(JobWaited(found.job.id, found.phase, found.busy))
        story.now += 1.0
        story.tell(JobTick())


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["refuses", "silent", "full", "moody", "grants"]), max_size=3))
@settings(max_examples=scale_examples(1000), deadline=None)
def test_a_lease_is_granted_or_refused_for_good_within_room_seconds(seed: int, kinds: list[str]):
    story = Story(headroom_seconds=60.0, lease_seconds=10.0, attempts=1)
    for number in range(1, 4):
        story.tell(JobSubmitted(a_job(number, size=36 * GIB)))
    world = World(random.Random(seed), story, {f"node-{place}": kind for place, kind in enumerate(kinds)})
    since = story.now
    for number in range(1, 4):
        while story.job(number).state in (JobState.QUEUED, JobState.LEASING):
            world.second()
            assert story.now <= since + 62, f"job {number} is {story.job(number)} with {kinds}"
        since = story.now
