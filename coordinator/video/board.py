"""All video jobs and the memory that they hold: `advance(board, event, now) → (board, actions)`. Pure.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Literal

from msgspec.structs import replace

from coordinator.video.events import (
    ACKNOWLEDGED,
    Action,
    Actions,
    Ask,
    Cancelled,
    Deleted,
    Drop,
    Event,
    Expire,
    Fetch,
    Fetched,
    GiveBack,
    Measured,
    NodeAway,
    NodeRemoved,
    NotFetched,
    NotStarted,
    Placed,
    Reported,
    Restarted,
    Said,
    Save,
    Start,
    Stop,
    Submitted,
    Tick,
    Waits,
)
from coordinator.video.jobs import FETCHING, Fault, Job, State, moved
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.video import LeaseState

COMPLETED = "completed"
MISSES = 2
"""Reports in a row that have to be silent about a lease before it is taken for gone: the first may have crossed it."""
PAUSE_LEAST, PAUSE_MOST = 1.0, 60.0
LOST = frozenset({"worker_lost", "node_lost", "start_failed", "actor_lost", "node_paused"})
"""Ends that are no fault of the job: it may be begun again."""


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


class _Turn:
    """One call of `advance`: the board as it becomes, and what is to be done."""

    def __init__(self, board: Board, now: float) -> None:
        self.rules, self.now = board.rules, now
        self.jobs, self.holds, self.pauses = dict(board.jobs), dict(board.holds), dict(board.pauses)
        self.actions: list[Action] = []

    def board(self) -> Board:
        return Board(self.rules, self.jobs, self.holds, self.pauses)

    def put(self, job: Job, *, save: bool = True) -> Job:
        self.jobs[job.id] = job
        if save:
            self.actions.append(Save(job))
        return job

    def job_of(self, lease: str, generation: int) -> Job | None:
        """Give the job that this lease is the newest of."""
        hold = self.holds.get(lease)
        job = None if hold is None else self.jobs.get(hold.job)
        if job is None or job.lease != lease or job.generation != generation:
            return None
        return job

    def give_back(self, lease: str, cause: str) -> None:
        """Tell the node of a hold; the hold stays until the node says so."""
        hold = self.holds.get(lease)
        if hold is not None:
            self.actions += [GiveBack(hold.node, lease, hold.generation, cause), Stop(lease)]

    def fail(self, job: Job, code: str, message: str) -> None:
        self.put(moved(job, State.FAILED, fault=Fault(code, message), phase="failed", ended=self.now))

    def again(self, job: Job, phase: str) -> None:
        """Put a job back where it stood in the line. Its generation grows: what is still said of the lease is late."""
        self.put(moved(
            job, State.QUEUED, generation=job.generation + 1, lease="", node="", progress=0, step=0, phase=phase,
            started=None,
        ))  # fmt: skip

    def lost(self, job: Job, code: str, message: str) -> None:
        """A job that ran ended through no fault of its own: as the settings say."""
        if self.rules.on_node_loss == "requeue" and job.attempts < self.rules.attempts:
            self.again(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail(job, code, message)

    def not_begun(self, job: Job, code: str, message: str) -> None:
        """A job whose worker never began is tried again, so many times."""
        self.pause(job.node, PAUSE_LEAST * 5)
        if job.attempts < self.rules.attempts:
            self.again(replace(job, attempts=job.attempts + 1), f"again, because {message}")
        else:
            self.fail(job, code, message)

    def pause(self, node: str, seconds: float) -> None:
        self.pauses[node] = self.now + max(PAUSE_LEAST, min(PAUSE_MOST, seconds))


def advance(board: Board, event: Event, now: float) -> tuple[Board, Actions]:
    """Take an event at `now` (Unix seconds); give the board after it and what is to be done, in this order."""
    turn = _Turn(board, now)
    match event:
        case Submitted(job):
            turn.put(job)
        case Placed():
            _placed(turn, board, event)
        case Waits():
            _waits(turn, event)
        case Said(node, frame):
            _said(turn, node, frame)
        case Reported():
            _reported(turn, event)
        case NodeAway(node):
            _away(turn, node)
        case NodeRemoved(node):
            _removed(turn, node)
        case NotStarted():
            _not_started(turn, event)
        case Fetched() | NotFetched():
            _fetched(turn, event)
        case Cancelled(job, message):
            _cancelled(turn, job, message)
        case Deleted(job):
            _cancelled(turn, job, "it was deleted")
            if turn.jobs.pop(job, None) is not None:
                turn.actions.append(Drop(job))
        case Restarted():
            _restarted(turn)
        case Tick():
            _tick(turn)
    return turn.board(), tuple(turn.actions)


def _placed(turn: _Turn, board: Board, event: Placed) -> None:
    head = board.head
    if head is None or head.id != event.job or board.held(event.node) is not None:
        raise ValueError(f"{event.job} is not to be placed on {event.node} now")
    generation = head.generation + 1
    job = turn.put(moved(
        head, State.LEASING, generation=generation, node=event.node, lease=event.lease, phase="asking a node",
        due=turn.now + turn.rules.lease_seconds,
    ))  # fmt: skip
    turn.holds[event.lease] = Hold(event.lease, event.node, generation, job.id, job.size, turn.now)
    turn.actions.append(Ask(job))


def _waits(turn: _Turn, event: Waits) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.state != State.QUEUED:
        return
    due = None if event.busy else job.due or turn.now + turn.rules.room_seconds
    if (job.phase, job.due) != (event.phase, due):
        turn.put(replace(job, phase=event.phase, due=due), save=False)


def _said(turn: _Turn, node: str, frame: LeaseGranted | LeaseRefused | LeaseEnded) -> None:
    hold = turn.holds.get(frame.lease)
    if hold is not None and (hold.node, hold.generation) != (node, frame.generation):
        return
    match frame:
        case LeaseGranted():
            _granted(turn, node, frame)
        case LeaseRefused():
            _refused(turn, node, frame)
        case LeaseEnded():
            _ended(turn, node, frame)


def _granted(turn: _Turn, node: str, frame: LeaseGranted) -> None:
    job = turn.job_of(frame.lease, frame.generation)
    if job is None:
        turn.actions.append(GiveBack(node, frame.lease, frame.generation, "superseded"))
        return
    if job.state != State.LEASING:
        return
    turn.holds[frame.lease] = changed(turn.holds[frame.lease], granted=True)
    begun = turn.put(moved(
        job, State.IN_PROGRESS, phase="starting", started=turn.now, due=turn.now + turn.rules.start_seconds
    ))  # fmt: skip
    turn.actions.append(Start(begun, frame.folder))


def _refused(turn: _Turn, node: str, frame: LeaseRefused) -> None:
    job = turn.job_of(frame.lease, frame.generation)
    turn.holds.pop(frame.lease, None)
    turn.pause(node, frame.retry_after or PAUSE_MOST)
    if job is not None and job.state == State.LEASING:
        turn.again(job, frame.waiting_for or frame.message)


def _ended(turn: _Turn, node: str, frame: LeaseEnded) -> None:
    job = turn.job_of(frame.lease, frame.generation) or _fetching(turn, frame)
    turn.holds.pop(frame.lease, None)
    turn.actions.append(Stop(frame.lease))
    if job is None or not job.open or job.state == State.QUEUED:
        turn.actions.append(GiveBack(node, frame.lease, frame.generation, ACKNOWLEDGED))
        return
    job = replace(job, peak=max(job.peak, frame.peak), seconds=frame.seconds, made=_text(frame.made))
    if frame.code == COMPLETED:
        if job.state == State.LEASING:  # its grant was not heard
            job = moved(job, State.IN_PROGRESS)
        if job.state == State.IN_PROGRESS:
            job = moved(job, State.FINALIZING, progress=FETCHING, phase="fetching")
            turn.actions.append(Measured(job, frame.peak))
        turn.put(replace(job, due=turn.now + turn.rules.keep_seconds, away=False))
        turn.actions.append(Fetch(job, frame.artifacts))
        return
    turn.actions.append(GiveBack(node, frame.lease, frame.generation, ACKNOWLEDGED))
    if job.state == State.LEASING:
        turn.again(job, frame.message)
    elif frame.code in LOST:
        turn.lost(job, frame.code, frame.message or "its worker was lost")
    else:
        turn.fail(job, frame.code, frame.message)


def _fetching(turn: _Turn, frame: LeaseEnded) -> Job | None:
    """Give the job whose end is told once more while its files are fetched: by then it holds nothing."""
    return next(
        (
            job for job in turn.jobs.values()
            if job.state == State.FINALIZING and (job.lease, job.generation) == (frame.lease, frame.generation)
        ),
        None,
    )  # fmt: skip


def _text(made: bytes) -> str:
    try:
        return made[:4096].decode()
    except UnicodeDecodeError:
        return ""


def _reported(turn: _Turn, event: Reported) -> None:
    told = {state.lease: state for state in event.leases}
    for state in event.leases:
        if turn.job_of(state.lease, state.generation) is None and not _keeps(turn, state):
            cause = ACKNOWLEDGED if state.phase == "ended" else "superseded"
            turn.actions.append(GiveBack(event.node, state.lease, state.generation, cause))
        else:
            _progress(turn, state)
    for hold in [hold for hold in turn.holds.values() if hold.node == event.node]:
        _told(turn, hold, hold.lease in told)
    for job in [job for job in turn.jobs.values() if job.node == event.node and job.state == State.FINALIZING]:
        _files_told(turn, job, job.lease in told)


def _files_told(turn: _Turn, job: Job, present: bool) -> None:
    if not present and job.misses + 1 >= MISSES:
        turn.fail(job, "artifact_lost", "its node came back without its files")
    else:
        turn.put(replace(job, misses=0 if present else job.misses + 1), save=False)


def _keeps(turn: _Turn, state: LeaseState) -> bool:
    """Whether a lease that no job runs on any more is all the same to be kept by its node: its files are fetched, or
    it was told already to give it back."""
    if state.phase == "ending" or state.lease in turn.holds:
        return True
    return any(job.lease == state.lease and job.state == State.FINALIZING for job in turn.jobs.values())


def _progress(turn: _Turn, state: LeaseState) -> None:
    job = turn.job_of(state.lease, state.generation)
    if job is None or job.state != State.IN_PROGRESS:
        return
    began = state.phase not in ("", "granting", "granted")
    due = None if began else (turn.now + turn.rules.start_seconds if job.away else job.due)
    percent = max(job.progress, min(FETCHING, max(0, state.progress)))
    phase = state.phase if began else "starting"
    turn.put(
        replace(job, progress=percent, phase=phase[:40], step=state.step, peak=max(job.peak, state.peak), due=due,
                away=False),
        save=False,
    )  # fmt: skip


def _told(turn: _Turn, hold: Hold, present: bool) -> None:
    if present:
        turn.holds[hold.lease] = changed(hold, misses=0)
        return
    if hold.misses + 1 < MISSES:
        turn.holds[hold.lease] = changed(hold, misses=hold.misses + 1)
        return
    job = turn.job_of(hold.lease, hold.generation)
    if job is not None and job.state == State.LEASING:
        return  # the node is still making up its mind; the deadline rules
    del turn.holds[hold.lease]
    turn.actions.append(Stop(hold.lease))
    if job is not None and job.state == State.IN_PROGRESS:
        turn.lost(job, "worker_lost", "its node came back without it")


def _away(turn: _Turn, node: str) -> None:
    for job in [job for job in turn.jobs.values() if job.node == node]:
        if job.state == State.LEASING:
            turn.holds.pop(job.lease, None)
            turn.again(job, "its node went away")
        elif job.state == State.IN_PROGRESS and not job.away:
            due = turn.now + turn.rules.away_seconds
            turn.put(replace(job, away=True, due=due, phase="waiting for its node"), save=False)
    for hold in [hold for hold in turn.holds.values() if hold.node == node]:
        if turn.job_of(hold.lease, hold.generation) is None:
            del turn.holds[hold.lease]
    turn.pauses.pop(node, None)


def _removed(turn: _Turn, node: str) -> None:
    _away(turn, node)
    for job in [job for job in turn.jobs.values() if job.node == node and job.open]:
        turn.holds.pop(job.lease, None)
        turn.actions.append(Stop(job.lease))
        _gone(turn, job, "its node was removed from the cluster")
    for job in [job for job in turn.jobs.values() if job.node == node]:
        turn.put(replace(job, node=""))


def _gone(turn: _Turn, job: Job, message: str) -> None:
    if job.state == State.FINALIZING:
        turn.fail(job, "artifact_lost", f"{message} before its files were fetched")
    else:
        turn.lost(job, "node_lost", message)


def _not_started(turn: _Turn, event: NotStarted) -> None:
    hold = turn.holds.get(event.lease)
    job = None if hold is None else turn.job_of(event.lease, hold.generation)
    if job is None or job.state != State.IN_PROGRESS or job.due is None or job.away:
        return  # it began, and its node watches it
    turn.give_back(event.lease, "start_failed")
    turn.not_begun(job, "start_failed", event.message)


def _fetched(turn: _Turn, event: Fetched | NotFetched) -> None:
    job = turn.jobs.get(event.job)
    if job is None or job.generation != event.generation or job.state != State.FINALIZING:
        if job is None or not job.open:
            turn.actions.append(Expire(event.job) if job is not None else Drop(event.job))
        return
    if isinstance(event, Fetched):
        expires = turn.now + turn.rules.keep_seconds
        turn.put(moved(
            job, State.COMPLETED, phase="completed", progress=100, files=event.files, ended=turn.now, expires=expires
        ))  # fmt: skip
    else:
        turn.fail(job, event.fault.code, event.fault.message)
        turn.actions.append(Expire(job.id))
    turn.actions.append(GiveBack(job.node, job.lease, job.generation, ACKNOWLEDGED))
    _retain(turn)


def _cancelled(turn: _Turn, name: str, message: str) -> None:
    job = turn.jobs.get(name)
    if job is None or not job.open:
        return
    if job.state == State.FINALIZING:
        turn.actions += [GiveBack(job.node, job.lease, job.generation, ACKNOWLEDGED), Expire(job.id)]
    turn.give_back(job.lease, "cancelled")
    turn.fail(replace(job, generation=job.generation + 1), "cancelled", message)


def _restarted(turn: _Turn) -> None:
    """What was asked and not answered is asked anew; what ran is looked for on its node. All else that a node holds is
    not known here, and is given back when it tells of it."""
    turn.holds.clear()
    for job in list(turn.jobs.values()):
        if job.state == State.LEASING:
            turn.again(job, "queued")
        elif job.state == State.IN_PROGRESS:
            turn.holds[job.lease] = Hold(
                job.lease, job.node, job.generation, job.id, job.size, job.started or turn.now, granted=True
            )
            turn.put(replace(job, away=True, due=turn.now + turn.rules.away_seconds), save=False)
        elif job.state == State.QUEUED:
            turn.put(replace(job, due=None, phase="queued"), save=False)


def _tick(turn: _Turn) -> None:
    for job in [job for job in turn.jobs.values() if job.due is not None and job.due <= turn.now]:
        _overdue(turn, job)
    for node in [node for node, until in turn.pauses.items() if until <= turn.now]:
        del turn.pauses[node]
    _retain(turn)


def _overdue(turn: _Turn, job: Job) -> None:
    if job.state == State.LEASING:
        turn.give_back(job.lease, "lease_timeout")
        turn.pause(job.node, PAUSE_MOST / 2)
        turn.again(job, "its node did not answer")
    elif job.state == State.QUEUED:
        turn.fail(job, "no_headroom", f"no node had room for it within {turn.rules.room_seconds:.0f} s: {job.phase}")
    elif job.state == State.IN_PROGRESS and job.away:
        turn.holds.pop(job.lease, None)
        turn.actions.append(Stop(job.lease))
        turn.lost(job, "node_lost", f"its node was away for more than {turn.rules.away_seconds:.0f} s")
    elif job.state == State.IN_PROGRESS:
        turn.give_back(job.lease, "start_timeout")
        turn.not_begun(job, "start_failed", f"its worker did not start within {turn.rules.start_seconds:.0f} s")
    elif job.state == State.FINALIZING:
        turn.fail(job, "artifact_lost", "its node did not come back with its files")


def _retain(turn: _Turn) -> None:
    """Remove files that are too old, too many or too large together, oldest first; then forget the oldest records."""
    for job in list(_too_much(turn.jobs.values(), turn.rules, turn.now)):
        turn.put(replace(job, expired=True, files=()))
        turn.actions.append(Expire(job.id))
    ended = sorted((job for job in turn.jobs.values() if not job.open and not job.files), key=lambda job: job.sequence)
    for job in ended[: max(0, len(ended) - turn.rules.records)]:
        del turn.jobs[job.id]
        turn.actions.append(Drop(job.id))


def _too_much(jobs: Iterable[Job], rules: Rules, now: float) -> Iterator[Job]:
    kept = sorted((job for job in jobs if job.files), key=lambda job: (-(job.ended or 0.0), -job.sequence))
    size = 0
    for number, job in enumerate(kept, 1):
        size += job.bytes
        if number > rules.keep_count or size > rules.keep_bytes or (job.expires or 0.0) <= now:
            yield job
