"""Decide whether memory is leased to a video job. Pure functions; `node.video.lease_manager` performs the decisions.

A lease lowers the node's ceiling by its bytes for as long as it lasts. The engine therefore never counts on these
bytes, and the job never takes memory that the engine uses. The node alone decides, in two phases:

    requested ─(superseded, held, guard off, never fits)─► refused
      └─(does not fit now)─► the engine is ordered once to evict and unload ─(still does not fit)─► refused
      └─(fits)─► ceiling lowered ─► the engine confirms the limits ─(still fits)─► granted
                                                └─(timeout, or new work in between)─► ceiling restored, refused
    granted ─► starting ─► loading … saving ─► ending ─► ended
        └─(no worker is started)──────────────┘   └ the worker's processes are verified dead

A node has one lease at a time. Of two generations of a job, the older is void, and its output is discarded. On every
path the memory is returned, after all processes of the worker have ended. A lease is checked like a request: `size`
bytes in addition to all memory in use. At the grant, `headroom` is ≥ 0. No request is ended for a lease. With
`memory.guard` off, leases are refused, because no process would enforce them.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from wire.capacity.arithmetic import compute_most_bytes, judge
from wire.frames import LeaseEnded, LeaseRefused, LeaseRequest
from wire.refusals import RefusalCode, Refused
from wire.report import Memory, Model
from wire.units import show_size
from wire.video import LeaseRefusalCode, LeaseState

HELD_RETRY_SECONDS = 30.0
"""Seconds until a retry, if the node has another lease."""
HEADROOM_RETRY_SECONDS = 5.0
"""Seconds until a retry, if memory is in use or the engine does not confirm the lower ceiling."""
READY_RETRY_SECONDS = 60.0
"""Seconds until a retry, if the node is not ready for videos, is paused or stops, or cannot store the lease."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,96}")
"""Pattern of the name of a lease or job."""
MAX_JOBS_REMEMBERED = 64
"""Maximum number of jobs whose newest generation is stored. Above that, the job stored first is forgotten."""


class LeasePhase(StrEnum):
    """Phase of a lease, as in `LeaseState.phase`."""

    GRANTING = "granting"
    """The request is being answered."""
    GRANTED = "granted"
    """The lease is granted, and its worker has not started."""
    STARTING = "starting"
    """The worker has started."""
    LOADING = "loading"
    """The worker loads the package."""
    DENOISING = "denoising"
    """The worker computes denoising steps."""
    DECODING = "decoding"
    """The worker decodes and converts the frames."""
    SAVING = "saving"
    """The worker writes and checks the clip."""
    ENDING = "ending"
    """The worker is being ended, or its memory is not returned yet."""
    ENDED = "ended"
    """The lease has ended, and the coordinator has not acknowledged that."""


WORKING = frozenset(
    {LeasePhase.STARTING, LeasePhase.LOADING, LeasePhase.DENOISING, LeasePhase.DECODING, LeasePhase.SAVING}
)
"""Phases in which the worker runs."""
SHARES = {
    LeasePhase.STARTING: 2,
    LeasePhase.LOADING: 3,
    LeasePhase.DENOISING: 5,
    LeasePhase.DECODING: 95,
    LeasePhase.SAVING: 97,
}
"""Completed percent of a job at the start of each phase."""


class WorkerGroup(Struct, frozen=True, kw_only=True):
    """Process group of a worker."""

    pid: int
    """Process id of the group's leader."""
    born: str
    """Start time of the leader, which distinguishes it from a later process with the same id; empty if unreadable."""


class LeaseRecord(Struct, frozen=True, kw_only=True):
    """Lease as stored on the disk, from before the ceiling is lowered until its end is acknowledged."""

    lease: str
    """Id of the lease, as in `LeaseRequest`."""
    generation: int
    """Sequence number of the lease among the leases of the job."""
    job: str
    """Id of the video job."""
    model: str
    """Name of the video package."""
    size: int
    """Leased bytes."""
    worker: WorkerGroup | None = None
    """Process group of the worker; None before the worker starts."""
    ended: LeaseEnded | None = None
    """Frame that reports the end; None until the lease has ended."""


class LeaseLedger(Struct, frozen=True, kw_only=True):
    """Leases and generations as stored on the disk, from which a restarted agent recovers."""

    leases: tuple[LeaseRecord, ...] = ()
    """Leases that have not ended, and ended leases whose end is not acknowledged."""
    newest: tuple[tuple[str, int], ...] = ()
    """Jobs with their newest generations, at most `MAX_JOBS_REMEMBERED`."""

    def find(self, lease: str, generation: int) -> LeaseRecord | None:
        """Return the lease with this id and generation; None if there is none."""
        return next(
            (record for record in self.leases if (record.lease, record.generation) == (lease, generation)), None
        )

    @property
    def holding(self) -> LeaseRecord | None:
        """Lease that has not ended; None if there is none."""
        return next((lease for lease in self.leases if lease.ended is None), None)

    def put(self, record: LeaseRecord) -> "LeaseLedger":
        """Return a ledger with this lease in place of its earlier state, and the newest generation of its job."""
        others = tuple(
            lease for lease in self.leases if (lease.lease, lease.generation) != (record.lease, record.generation)
        )
        newest = {job: number for job, number in self.newest if job != record.job}
        newest[record.job] = max(record.generation, dict(self.newest).get(record.job, 0))
        return replace(self, leases=(*others, record), newest=tuple(newest.items())[-MAX_JOBS_REMEMBERED:])

    def drop(self, lease: str, generation: int) -> "LeaseLedger":
        """Return a ledger without this lease, but with the newest generation of its job."""
        left = tuple(record for record in self.leases if (record.lease, record.generation) != (lease, generation))
        return replace(self, leases=left)


def refuse(request: LeaseRequest, code: str, message: str, retry_after: float = 0.0) -> LeaseRefused:
    """Return the refusal of a lease as a frame. `retry_after` is in seconds; 0 if a retry has the same result."""
    return LeaseRefused(request.lease, request.generation, code, message, request.size, retry_after=retry_after)


def check_name(request: LeaseRequest) -> LeaseRefused | None:
    """Return the refusal of an invalid name or generation; None if the request passes.

    Names are checked because the name of a lease is also the name of a folder.
    """
    if NAME.fullmatch(request.lease) and NAME.fullmatch(request.job) and request.generation >= 0:
        return None
    return refuse(
        request, RefusalCode.INVALID, "leases and jobs are named by 1 to 96 letters, digits, dashes or underscores"
    )


def check_generation(request: LeaseRequest, ledger: LeaseLedger) -> LeaseRefused | None:
    """Return the refusal of an old generation, or of a second lease at a time; None if the request passes.

    A generation is old if the ledger has a newer generation of the job, or the same generation and not this lease. The
    first generation of a job is 1.
    """
    newest = dict(ledger.newest).get(request.job, 0)
    if request.generation < newest or (request.generation == newest and not _is_known(request, ledger)):
        return refuse(
            request,
            LeaseRefusalCode.LEASE_SUPERSEDED,
            f"generation {request.generation} of {request.job} is older than generation {newest} on this node",
        )
    holding = ledger.holding
    if holding is not None:
        return refuse(
            request,
            LeaseRefusalCode.LEASE_HELD,
            f"this node has granted {show_size(holding.size)} to {holding.job}: one lease at a time",
            HELD_RETRY_SECONDS,
        )
    return None


def _is_known(request: LeaseRequest, ledger: LeaseLedger) -> bool:
    return ledger.find(request.lease, request.generation) is not None


def check_ready(request: LeaseRequest, memory: Memory, unready: str) -> LeaseRefused | None:
    """Return the refusal of a request that fails for reasons other than memory in use; None if the request passes.

    The reasons are: the guard is off, the node is not ready for videos, or the size is invalid or can never fit.
    `unready` is why the node is not ready; empty if it is ready.
    """
    if not memory.guard:
        return refuse(
            request,
            LeaseRefusalCode.GUARD_OFF,
            "memory.guard is off on this node, and no lease can be enforced: set memory.guard = on",
        )
    if unready:
        return refuse(request, LeaseRefusalCode.VIDEO_NOT_READY, unready, READY_RETRY_SECONDS)
    if request.size <= 0:
        return refuse(request, RefusalCode.INVALID, f"a lease of {request.size} bytes")
    if memory.cap and request.size > compute_most_bytes(memory):
        message = (
            f"{show_size(request.size)} can never fit on this node: the cap of {show_size(memory.cap)} leaves "
            f"{show_size(max(0, compute_most_bytes(memory)))} after margin and engine"
        )
        return refuse(request, LeaseRefusalCode.LEASE_TOO_LARGE, message)
    return None


def check_fits(
    request: LeaseRequest, memory: Memory, models: Iterable[Model], pinned: frozenset[str]
) -> LeaseRefused | None:
    """Return the refusal of a lease that does not fit in addition to the memory in use; None if the lease fits.

    `models` of the engine's report and `pinned`, the names of preloaded models, only serve to name in the refusal which
    models use the memory.
    """
    answer = judge(memory, request.size)
    if not isinstance(answer, Refused):
        return None
    free_bytes = answer.numbers.headroom if answer.numbers is not None else None
    return LeaseRefused(
        request.lease,
        request.generation,
        answer.code.value,
        f"the lease {answer.message}",
        request.size,
        free_bytes,
        answer.retry_after or HEADROOM_RETRY_SECONDS,
        describe_shortage(request.size, free_bytes, memory, models, pinned),
    )


def describe_shortage(
    size: int, free_bytes: int | None, memory: Memory, models: Iterable[Model], pinned: frozenset[str]
) -> str:
    """Return a text for a person: how much headroom the lease lacks, and which models use it.

    `size` is the size of the lease and `free_bytes` the headroom, in bytes. `free_bytes` is None if the footprint of
    the engine is unknown. `pinned` are the names of preloaded models.
    """
    if free_bytes is None:
        return "a reading of the engine's footprint"
    holders = [
        f"{model.name} ({'preloaded' if model.name in pinned else 'loading' if model.loading else 'in use'})"
        for model in models
        if model.loaded or model.loading
    ]
    shortage = f"{show_size(size - free_bytes)} more headroom"
    return (
        f"{shortage}, held by {', '.join(holders)}"
        if holders
        else f"{shortage}, bound by {memory.bound_by or 'the cap'}"
    )


def compute_progress(phase: LeasePhase, step: int, steps: int) -> int:
    """Return the completed percent of a job, with `step` of `steps` denoising steps done.

    In the denoising phase the percentage grows from 5 to 95. It is 100 for an ended lease. In other phases it is the
    value in `SHARES`, or 0.
    """
    if phase is LeasePhase.ENDED:
        return 100
    share = 90 * step // steps if phase is LeasePhase.DENOISING and steps else 0
    return SHARES.get(phase, 0) + share


def build_lease_state(
    record: LeaseRecord, phase: LeasePhase, step: int = 0, steps: int = 0, footprint: int = 0, peak: int = 0
) -> LeaseState:
    """Return the state of a lease for the node's report.

    `step` of `steps` denoising steps are done. `footprint` and `peak` are the current and the highest footprint of the
    worker in bytes. For a lease that has ended, size and footprint are 0, all steps count as done, and the peak is that
    of `record.ended`.
    """
    if record.ended is not None:
        return LeaseState(
            record.lease, record.generation, record.job, 0, LeasePhase.ENDED, 100, steps, steps, 0, record.ended.peak
        )
    done = compute_progress(phase, step, steps)
    return LeaseState(
        record.lease, record.generation, record.job, record.size, phase, done, step, steps, footprint, peak
    )
