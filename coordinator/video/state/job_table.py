"""All video jobs and the memory that they hold. Pure; `coordinator.video.state.transitions` moves it on.

Theory. A job at the head of the line is given a lease on one node, and from then on three parties talk about it: the
node, which lends the memory and watches the worker; Ray, which starts it; and whoever wants it cancelled. Messages
cross, nodes vanish and come back, this process is restarted in between. Two things keep that simple:

- The generation. Every lease of a job has the next number, and so has the job once it is taken off that lease. What is
  said of an older one changes nothing of the job; a node that still holds it is told to give it back.
- The hold. Memory that was asked of a node counts as lent until the node says that it ended or refused it, no longer
  tells of it, or is itself gone. A job may end before: then its hold outlives it, and nothing else is sent there.

Rules that nobody may break
- Only the head of the line is placed, and only while no other job waits for a node's answer: first come, first served.
- At most one hold on a node.
- Nothing follows an end.
- What a node lends and this board does not know is given back at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.video.state.jobs import Job, State


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings, in seconds, bytes and counts. `records` are the ended jobs that are told of."""

    on_node_loss: Literal["fail", "requeue"] = "fail"
    attempts: int = 2
    lease_seconds: float = 30.0
    start_seconds: float = 90.0
    away_seconds: float = 60.0
    room_seconds: float = 3600.0
    keep_seconds: float = 86400.0
    keep_count: int = 50
    keep_bytes: int = 50 * 2**30
    records: int = 1000


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory of a node that was asked for and is not known to be back. `misses`: reports that did not tell of it."""

    lease: str
    node: str
    generation: int
    job: str
    size: int
    since: float
    granted: bool = False
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """Everything. `pauses` say until when a node is not asked again."""

    rules: Rules = field(default_factory=Rules)
    jobs: Mapping[str, Job] = field(default_factory=dict[str, Job])
    holds: Mapping[str, Hold] = field(default_factory=dict[str, Hold])
    pauses: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def waiting(self) -> list[Job]:
        """The line, head first."""
        return sorted((job for job in self.jobs.values() if job.state == State.QUEUED), key=lambda job: job.sequence)

    @property
    def head(self) -> Job | None:
        """The job that may be placed now; None while the line is empty or a node has yet to answer."""
        if any(job.state == State.LEASING for job in self.jobs.values()):
            return None
        return next(iter(self.waiting), None)

    def held(self, node: str) -> Hold | None:
        """Give what a node has lent."""
        return next((hold for hold in self.holds.values() if hold.node == node), None)
