"""State machine of the lease of a node, as data: events in, actions out. The lease manager performs the actions. Pure.

The machine has one lease at a time, and handles orders to end it, pause and stop. An exception of the lease's task
leads to `idle`. Other modules decide whether a lease fits (`leases`), watch the worker (`worker.worker_monitor`), and
store leases (`lease_store`).

    idle ─(request)─► granting ─(granted)─► held ─(ordered, worker ended or at fault)─► ending ─(memory returned)─► idle
                          └─(refused)─► idle
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from node.video import lease_rules
from node.video.lease_rules import LeaseRecord
from node.video.worker.watchdog_policy import EndWorker
from wire.frames import LeaseRefused, LeaseRequest
from wire.state_machine import IllegalEventError, InvariantError
from wire.video import LeaseEndCode, LeaseRefusalCode

RETRY_SOON_SECONDS = 2.0
"""Seconds after which a refused lease may be requested again, if the node is answering another request."""


class LeaseStage(StrEnum):
    """Stage of the node's lease in the state machine. `LeasePhase` is the finer phase in reports."""

    IDLE = "idle"
    """The node has no lease."""
    GRANTING = "granting"
    """A request for a lease is being answered."""
    HELD = "held"
    """The lease is granted, with or without a worker."""
    ENDING = "ending"
    """The worker is being ended, or its end is not reported yet."""


@dataclass(frozen=True, slots=True)
class LeaseLife:
    """State of the node's lease."""

    stage: LeaseStage = LeaseStage.IDLE
    lease: str = ""
    """Id of the lease; empty while idle."""
    generation: int = 0
    """Generation of the lease (`LeaseRequest.generation`); 0 while idle."""
    order: str = ""
    """Cause of an ordered end; empty without an order."""
    actor_failure: str = ""
    """Reason why Ray could not start the actor of the lease; empty as long as no start has failed."""
    has_worker: bool = False
    """Whether the worker of the lease has started."""
    paused: str = ""
    """Reason why the node accepts no leases; empty if it accepts leases."""
    stopping: bool = False
    """Whether the agent stops."""

    @property
    def end(self) -> EndWorker | None:
        """Reason to end the worker now, with its code; None without a reason."""
        if self.order:
            return EndWorker(self.order, self._describe_order())
        if self.actor_failure and not self.has_worker:
            return EndWorker(LeaseEndCode.START_FAILED, self.actor_failure)
        return None

    def _describe_order(self) -> str:
        if self.stopping:
            return "this node is stopping"
        return (
            f"its node stopped sharing: {self.paused}"
            if self.order == LeaseEndCode.NODE_PAUSED
            else "the coordinator ended the lease"
        )

    def is_current(self, lease: str, generation: int) -> bool:
        """Return whether the node's lease has this id and generation: it is being granted, held or ended now."""
        return self.stage is not LeaseStage.IDLE and (lease, generation) == (self.lease, self.generation)

    def check(self) -> None:
        """Raise `InvariantError` if two values contradict each other."""
        idle = self.stage is LeaseStage.IDLE
        wrong = [
            "idle with a lease" * (idle and bool(self.lease or self.order or self.actor_failure or self.has_worker)),
            "a worker before the grant" * (self.stage is LeaseStage.GRANTING and self.has_worker),
        ]
        if any(wrong):
            raise InvariantError(f"{', '.join(filter(None, wrong))}: {self}")


# events


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    """Event: the coordinator requests a new lease. `holding` is the stored lease that has not ended, if any."""

    request: LeaseRequest
    holding: LeaseRecord | None = None


@dataclass(frozen=True, slots=True)
class GrantCompleted:
    """Event: the engine has confirmed the lower ceiling, and the lease is granted."""


@dataclass(frozen=True, slots=True)
class GrantRefused:
    """Event: the lease is not granted, and the ceiling is restored."""


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """Event: the worker of the lease has started."""


@dataclass(frozen=True, slots=True)
class ActorFailed:
    """Event: Ray could not start the actor of a lease, because of `reason`. A lease with a worker continues."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndBegun:
    """Event: the worker is being ended, or has ended."""


@dataclass(frozen=True, slots=True)
class MemoryReturned:
    """Event: all processes of the worker have ended, and the end is reported."""


@dataclass(frozen=True, slots=True)
class LeaseAbandoned:
    """Event: the task of the lease has ended, also by an exception."""


@dataclass(frozen=True, slots=True)
class ReleaseOrdered:
    """Event: the coordinator ends the current lease. `cause` is machine-readable."""

    cause: str


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """Event: the node accepts no leases for the reason `reason`; empty if it accepts leases again."""

    reason: str


@dataclass(frozen=True, slots=True)
class OwnerReclaimed:
    """Event: the Mac has stopped sharing for the reason `reason`, and its owner takes the memory of the lease back.

    `holding` is whether the ceiling is lowered for a lease. Without `holding`, while idle, or if the end of the lease
    is ordered already, the event changes nothing.
    """

    reason: str
    holding: bool


@dataclass(frozen=True, slots=True)
class NodeStopping:
    """Event: the agent stops."""


Event = (
    LeaseWanted
    | GrantCompleted
    | GrantRefused
    | WorkerStarted
    | ActorFailed
    | EndBegun
    | MemoryReturned
    | LeaseAbandoned
    | ReleaseOrdered
    | PauseChanged
    | OwnerReclaimed
    | NodeStopping
)


# actions


@dataclass(frozen=True, slots=True)
class BeginGrant:
    """Action: check the request, lower the ceiling and wait for the engine's confirmation."""

    request: LeaseRequest


@dataclass(frozen=True, slots=True)
class RefuseLease:
    """Action: send a refusal."""

    refused: LeaseRefused


@dataclass(frozen=True, slots=True)
class CheckLease:
    """Action: wake the task of the lease, which then checks its state."""


Action = BeginGrant | RefuseLease | CheckLease
Step = tuple[LeaseLife, tuple[Action, ...]]
"""State after an event, and the actions to perform in order."""

_I, _G, _H, _E = LeaseStage
_SAME = {stage: frozenset({stage}) for stage in LeaseStage}

TABLE: Mapping[type, Mapping[LeaseStage, frozenset[LeaseStage]]] = {
    LeaseWanted: _SAME | {_I: frozenset({_I, _G})},
    GrantCompleted: {_G: frozenset({_H})},
    GrantRefused: {_G: frozenset({_I})},
    WorkerStarted: {_H: frozenset({_H})},
    ActorFailed: _SAME,
    EndBegun: {_H: frozenset({_E})},
    MemoryReturned: {_E: frozenset({_I})},
    LeaseAbandoned: {stage: frozenset({_I}) for stage in LeaseStage},
    ReleaseOrdered: {stage: frozenset({stage}) for stage in (_G, _H, _E)},
    PauseChanged: _SAME,
    OwnerReclaimed: _SAME,
    NodeStopping: _SAME,
}
"""For each event: the stages in which it is legal, and the stages that may follow."""


def step(life: LeaseLife, event: Event) -> Step:
    """Apply one event. Return the new state and the actions in order.

    Raise `IllegalEventError` if `TABLE` does not allow the event in the stage. Raise `InvariantError` if the new stage
    is not in `TABLE` or the state contradicts itself, which only a bug can cause.
    """
    allowed = TABLE[type(event)].get(life.stage)
    if allowed is None:
        raise IllegalEventError(f"the lease is {life.stage}: {event} cannot happen")
    after, actions = _apply(life, event)
    if after.stage not in allowed:
        raise InvariantError(f"{life.stage} -> {after.stage} by {event} is not in the table")
    after.check()
    return after, actions


def _apply(life: LeaseLife, event: Event) -> Step:
    match event:
        case LeaseWanted():
            return _request(life, event)
        case GrantCompleted():
            return replace(life, stage=LeaseStage.HELD), ()
        case GrantRefused() | MemoryReturned() | LeaseAbandoned():
            return LeaseLife(paused=life.paused, stopping=life.stopping), ()
        case WorkerStarted():
            return replace(life, has_worker=True), ()
        case ActorFailed() if life.stage is LeaseStage.HELD and event.lease == life.lease and not life.has_worker:
            return replace(life, actor_failure=event.reason), (CheckLease(),)
        case ActorFailed():
            return life, ()
        case EndBegun():
            return replace(life, stage=LeaseStage.ENDING), ()
        case ReleaseOrdered():
            return replace(life, order=event.cause), (CheckLease(),)
        case PauseChanged():
            return replace(life, paused=event.reason), ()
        case OwnerReclaimed() if event.holding and life.stage is not LeaseStage.IDLE and not life.order:
            return replace(life, paused=event.reason, order=LeaseEndCode.NODE_PAUSED), (CheckLease(),)
        case OwnerReclaimed():
            return life, ()
        case NodeStopping():
            stopping = replace(life, stopping=True)
            if life.stage is LeaseStage.IDLE:
                return stopping, ()
            return replace(stopping, order=life.order or LeaseEndCode.NODE_STOPPING), (CheckLease(),)


def _request(life: LeaseLife, event: LeaseWanted) -> Step:
    request = event.request
    if life.stopping:
        return life, (RefuseLease(refuse_stopping(request)),)
    if life.paused:
        return life, (RefuseLease(refuse_paused(request, life.paused)),)
    if life.stage is not LeaseStage.IDLE:
        holder, wait = "already", RETRY_SOON_SECONDS
        if event.holding is not None:
            holder, wait = f"to {event.holding.job}", lease_rules.HELD_RETRY_SECONDS
        text = f"this node has granted memory {holder}: one lease at a time"
        return life, (RefuseLease(lease_rules.refuse(request, LeaseRefusalCode.LEASE_HELD, text, wait)),)
    granting = replace(life, stage=LeaseStage.GRANTING, lease=request.lease, generation=request.generation)
    return granting, (BeginGrant(request),)


def refuse_stopping(request: LeaseRequest) -> LeaseRefused:
    """Return the refusal of a lease while the node stops."""
    return lease_rules.refuse(
        request, LeaseRefusalCode.NODE_STOPPING, "this node is stopping", lease_rules.READY_RETRY_SECONDS
    )


def refuse_paused(request: LeaseRequest, reason: str) -> LeaseRefused:
    """Return the refusal of a lease while the node accepts no leases, for the reason `reason`."""
    return lease_rules.refuse(
        request, LeaseRefusalCode.NODE_PAUSED, f"this node accepts no leases: {reason}", lease_rules.READY_RETRY_SECONDS
    )
