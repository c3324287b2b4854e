"""A video job: what it is, which state may follow which, and how it looks from outside. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace


class State(StrEnum):
    """Where a job is. `leasing`: a node was asked for memory; `finalizing`: the worker is done, its files come."""

    QUEUED = "queued"
    LEASING = "leasing"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"


MOVES: Mapping[State, frozenset[State]] = MappingProxyType({
    State.QUEUED: frozenset({State.LEASING, State.FAILED}),
    State.LEASING: frozenset({State.QUEUED, State.IN_PROGRESS, State.FAILED}),
    State.IN_PROGRESS: frozenset({State.QUEUED, State.FINALIZING, State.FAILED}),
    State.FINALIZING: frozenset({State.COMPLETED, State.FAILED}),
    State.COMPLETED: frozenset(),
    State.FAILED: frozenset(),
})  # fmt: skip
"""Which state may follow which; nothing follows an end."""
OPEN = frozenset({State.QUEUED, State.LEASING, State.IN_PROGRESS, State.FINALIZING})
SHOWN: Mapping[State, str] = MappingProxyType({State.LEASING: "queued", State.FINALIZING: "in_progress"})
"""How the states are called that OpenAI's API does not have."""
FETCHING = 99
"""Progress while the files are fetched."""


class IllegalMoveError(ValueError):
    """A job was moved where the table has no way: a mistake of ours."""


class Fault(msgspec.Struct, frozen=True):
    """Why a job failed: a code for programs, a sentence for people."""

    code: str
    message: str


class Kept(msgspec.Struct, frozen=True):
    """A file of a finished job, in the folder of the job."""

    name: str
    size: int
    sha256: str


class Wanted(msgspec.Struct, frozen=True):
    """What was asked for, checked and rounded. Sides in pixels; None: the package's own default. `labels`: those that
    a node must have, because the key is bound to them."""

    model: str
    prompt: str
    width: int
    height: int
    frames: int
    fps: int
    steps: int
    tokens: int
    negative_prompt: str = ""
    guidance: float | None = None
    guidance_2: float | None = None
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def spec(self) -> bytes:
        """Give it as the worker reads it (`wire.frames.Lease.spec`)."""
        spec: dict[str, Any] = {
            "prompt": self.prompt, "width": self.width, "height": self.height, "frames": self.frames, "fps": self.fps,
            "steps": self.steps, "negative_prompt": self.negative_prompt or None, "guidance": self.guidance,
            "guidance_2": self.guidance_2, "seed": self.seed,
        }  # fmt: skip
        return msgspec.json.encode({name: value for name, value in spec.items() if value is not None})


class Job(msgspec.Struct, frozen=True):
    """One job. Times in Unix seconds, sizes in bytes. `sequence` is its place in the line, for ever; `key` whose it is.

    `generation` counts its leases: what is said of an older one is not heard. `due` is when something has to have
    happened: the answer to a lease, the start of the worker, the return of a node. `room_by` is when a job fails that
    has found no room: it is set when a node is first asked or none can be, stays through all refusals, and is cleared
    when memory is granted or only other videos are in the way. `away`: its node is not linked. `attempts` were begun
    and lost through no fault of its own. `misses`: reports of its node that did not list files that are to be fetched.
    """

    id: str
    sequence: int
    key: str
    created: float
    wanted: Wanted
    size: int
    state: State = State.QUEUED
    idempotency: str = ""
    digest: str = ""
    node: str = ""
    lease: str = ""
    generation: int = 0
    attempts: int = 0
    phase: str = "queued"
    progress: int = 0
    step: int = 0
    due: float | None = None
    away: bool = False
    started: float | None = None
    ended: float | None = None
    expires: float | None = None
    expired: bool = False
    fault: Fault | None = None
    files: tuple[Kept, ...] = ()
    peak: int = 0
    seconds: float = 0.0
    made: str = ""
    misses: int = 0
    room_by: float | None = None

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    @property
    def bytes(self) -> int:
        """What its files take."""
        return sum(file.size for file in self.files)


def moved(job: Job, state: State, **changes: object) -> Job:
    """Give the job in another state. IllegalMoveError where the table has no way."""
    if state not in MOVES[job.state]:
        raise IllegalMoveError(f"{job.id}: {state} does not follow {job.state}")
    return replace(job, state=state, due=changes.pop("due", None), away=False, **changes)


def shown(job: Job) -> dict[str, Any]:
    """Give a job as the API shows it: OpenAI's fields, and ours beside them."""
    wanted = job.wanted
    return {
        "id": job.id,
        "object": "video",
        "model": wanted.model,
        "status": SHOWN.get(job.state, str(job.state)),
        "progress": 100 if job.state == State.COMPLETED else job.progress,
        "created_at": int(job.created),
        "completed_at": _whole(job.ended) if job.state == State.COMPLETED else None,
        "expires_at": _whole(job.expires),
        "error": None if job.fault is None else {"code": job.fault.code, "message": job.fault.message},
        "prompt": wanted.prompt,
        "remixed_from_video_id": None,
        "seconds": f"{wanted.frames / wanted.fps:.3f}".rstrip("0").rstrip("."),
        "size": f"{wanted.width}x{wanted.height}",
        "phase": job.phase,
        "frames": wanted.frames,
        "fps": wanted.fps,
        "steps": wanted.steps,
        "seed": wanted.seed,
        "warnings": list(wanted.warnings),
        "wall_seconds": round(job.seconds, 3) if job.seconds else None,
        "node": job.node or None,
        "peak": job.peak or None,
        "made": msgspec.json.decode(job.made) if job.made else None,
    }


def _whole(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
