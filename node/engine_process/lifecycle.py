"""State machine of the engine process, as data: events in, actions out. The supervisor performs the actions. Pure.

The machine decides about stages, restarts and their delay, readiness, replacement of a healthy child, rest, and models
to load again. Other modules have the process and its signals (`child`), open requests (`open_requests`), leaked wired
memory (`wired_check`), and models that crash the engine (`quarantine`).

    starting ─(report with limits in force)─► ready ─(exit)─► restarting ─► starting …
        └──────────────────┬────────────────────┘                └─(longest delay)─► failed ─► starting …
                           ├─(no answer, or one call for too long)─► hung ─(exit)─► restarting
                           └─(replaced, over the cap, protocol)─► restarting ─(exit)─► restarting

Invariants
- A child gets requests only between its first report with limits in force and the first request to end it.
- A later event does not make a child end more slowly; the supervisor keeps the earlier deadline.
- The replacement of a healthy child is no failure, and its successor starts without a delay.
- While the engine rests (`EngineLife.resting`), because this Mac does not share, a new child loads no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from node.engine_process.timeouts import ExitUrgency, SupervisorTimeouts
from wire.frames import EngineReport
from wire.node_state import EngineStage
from wire.refusals import RefusalCode, Refused
from wire.state_machine import IllegalEventError, InvariantError
from wire.units import show_size

REST_CAUSE = "replaced by an engine without models, to free memory for the owner"
WAKE_CAUSE = "replaced by an engine that loads the preloaded models"


@dataclass(frozen=True, slots=True)
class ChildLife:
    """State of the current child."""

    ready: bool = False
    """Whether the child has reported with limits in force, and was not asked to end."""
    ending: bool = False
    """Whether the child was asked to end."""
    cause: str = ""
    """First reason for which the agent ends the child; empty without a reason, and if only the agent stops."""
    hung: bool = False
    """Whether the agent ends the child because it hung."""
    recycled: bool = False
    """Whether the agent ends a healthy child to replace it."""
    resting: bool = False
    """Whether the child was started during a rest, without preloaded models, or ran when a rest began."""
    attempted: frozenset[str] = frozenset()
    """Models that the child has loaded or begun to load."""


@dataclass(frozen=True, slots=True)
class EngineLife:
    """State of the engine process over all of its children."""

    preloads: bool
    """Whether the settings name models to preload."""
    stage: EngineStage = EngineStage.STARTING
    cause: str = ""
    """Reason of the last end, hang or replacement, for users; empty before the first."""
    restarts: int = 0
    """Number of children that died or could not be started, without replaced ones."""
    recycles: int = 0
    """Number of healthy children that were replaced."""
    failures: int = 0
    """Failed starts and deaths of children in a row. The death of a healthy child counts as the first."""
    resting: bool = False
    """Whether the engine was asked to hold no memory."""
    stopping: bool = False
    """Whether the agent stops."""
    models: frozenset[str] = frozenset()
    """Models that a new child loads again."""
    child: ChildLife | None = None
    """Current child; None while none runs."""

    def check(self) -> None:
        """Raise `InvariantError` if two values contradict each other."""
        child = self.child or ChildLife()
        wrong = [
            "ready without a ready child" * (self.stage is EngineStage.READY and self.child is None),
            "a ready child in another stage" * (child.ready and self.stage is not EngineStage.READY),
            "a ready child that ends" * (child.ready and child.ending),
            "hung or replaced, and does not end" * ((child.hung or child.recycled) and not child.ending),
            "hung without a hung child" * (self.stage is EngineStage.HUNG and not child.hung),
            "failed with a child" * (self.stage is EngineStage.FAILED and self.child is not None),
        ]
        if any(wrong):
            raise InvariantError(f"{', '.join(filter(None, wrong))}: {self}")


# events


@dataclass(frozen=True, slots=True)
class StartDue:
    """Event: a new child is about to be started."""


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """Event: the process of a child runs. `banned` are the models in quarantine."""

    banned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ChildReported:
    """Event: a report of the child arrived. `loaded` and `loading` are names of models."""

    armed: bool = True
    """Whether memory limits are in force. Before the first limits, the gate of the child is closed."""
    loaded: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    """Models that could not be loaded."""
    unreturned: int = 0
    """Bytes of unloaded models that the process has not released."""
    busy: bool = False
    """Whether a request is open, running or waiting."""


@dataclass(frozen=True, slots=True)
class ChildHung:
    """Event: the child did not answer, or one native call took too long."""

    cause: str


@dataclass(frozen=True, slots=True)
class ProtocolViolated:
    """Event: the child sent an invalid frame."""

    cause: str


@dataclass(frozen=True, slots=True)
class CapExceeded:
    """Event: the enforcer ends the child, because the child holds more memory than cap − leases."""

    cause: str


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """Event: the child has closed its socket, and still runs `EXIT_AFTER_CLOSE_SECONDS` later."""


@dataclass(frozen=True, slots=True)
class ChildExited:
    """Event: the child has ended, or could not be started."""

    cause: str
    healthy: bool = False
    """Whether the child lived long enough to reset the restart delay."""


@dataclass(frozen=True, slots=True)
class LeaksExceeded:
    """Event: ended children leaked wired memory too often. No child is started until the memory has returned."""

    cause: str


@dataclass(frozen=True, slots=True)
class RestRequested:
    """Event: this Mac has stopped sharing, and the engine must release all its memory."""


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """Event: this Mac shares again, and the engine may load models."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Event: the agent stops."""


OfChild = ChildReported | ChildHung | ProtocolViolated | CapExceeded | SocketClosed
Event = StartDue | ChildStarted | OfChild | ChildExited | LeaksExceeded | RestRequested | WakeRequested | StopRequested


# actions


@dataclass(frozen=True, slots=True)
class EndChild:
    """Action: ask the child to end, and kill the child after the timeouts of this urgency."""

    urgency: ExitUrgency


@dataclass(frozen=True, slots=True)
class WaitForRestart:
    """Action: start the next child after a delay in seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class StateChanged:
    """Action: publish the state."""


Action = EndChild | WaitForRestart | StateChanged
Step = tuple[EngineLife, tuple[Action, ...]]

_S, _R, _H, _A, _F = (
    EngineStage.STARTING,
    EngineStage.READY,
    EngineStage.HUNG,
    EngineStage.RESTARTING,
    EngineStage.FAILED,
)
_REPLACED: Mapping[EngineStage, frozenset[EngineStage]] = {
    _S: frozenset({_S, _A}),
    _R: frozenset({_R, _A}),
    _H: frozenset({_H}),
    _A: frozenset({_A}),
    _F: frozenset({_F}),
}

TABLE: Mapping[type, Mapping[EngineStage, frozenset[EngineStage]]] = {
    StartDue: {_S: frozenset({_S}), _A: frozenset({_S}), _F: frozenset({_S})},
    ChildStarted: {_S: frozenset({_S})},
    ChildReported: {
        _S: frozenset({_S, _R}),
        _R: frozenset({_R, _A}),
        _H: frozenset({_H}),
        _A: frozenset({_A}),
    },
    ChildHung: {_S: frozenset({_H}), _R: frozenset({_H})},
    ProtocolViolated: {stage: frozenset({_A}) for stage in (_S, _R, _H, _A)},
    CapExceeded: {stage: frozenset({_A}) for stage in (_S, _R, _H, _A)},
    SocketClosed: {stage: frozenset({stage}) for stage in (_S, _R, _H, _A)},
    ChildExited: {stage: frozenset({_A, _F}) for stage in (_S, _R, _H, _A)},
    LeaksExceeded: {_A: frozenset({_F}), _F: frozenset({_F})},
    RestRequested: _REPLACED,
    WakeRequested: _REPLACED,
    StopRequested: {stage: frozenset({stage}) for stage in EngineStage},
}
"""For each event: the stages in which it is legal, and the stages that may follow."""


def step(life: EngineLife, event: Event, timeouts: SupervisorTimeouts) -> Step:
    """Apply one event. Return the new state and the actions in order.

    Raise `IllegalEventError` if `TABLE` or the state of the child, such as a missing child, does not allow the event.
    Raise `InvariantError` for a new state that `TABLE` or `check` does not allow.
    """
    allowed = TABLE[type(event)].get(life.stage)
    if allowed is None:
        raise IllegalEventError(f"the engine is {life.stage}: {event} cannot happen")
    exited_twice = isinstance(event, ChildExited) and life.stage is not EngineStage.STARTING
    if (isinstance(event, OfChild) or exited_twice) and life.child is None:
        raise IllegalEventError(f"the engine is {life.stage} without a child: {event} cannot happen")
    if isinstance(event, StartDue | ChildStarted | LeaksExceeded) and life.child is not None:
        raise IllegalEventError(f"the engine is {life.stage} with a child: {event} cannot happen")
    if isinstance(event, ChildHung) and (life.child or ChildLife()).ending:
        raise IllegalEventError(f"the child was asked to end: {event} cannot happen")
    after, actions = _apply(life, event, timeouts)
    if after.stage not in allowed:
        raise InvariantError(f"{life.stage} -> {after.stage} by {event} is not in the table")
    after.check()
    return after, actions


def _apply(life: EngineLife, event: Event, timeouts: SupervisorTimeouts) -> Step:
    child = life.child or ChildLife()
    match event:
        case StartDue():
            return replace(life, stage=EngineStage.STARTING), (StateChanged(),)
        case ChildStarted():
            return _start_child(life, event)
        case ChildReported():
            return _apply_report(life, child, event)
        case ChildHung():
            marked = replace(child, hung=True)
            ending, actions = _end_child(life, marked, f"the engine hung: {event.cause}", ExitUrgency.UNRESPONSIVE)
            return replace(ending, stage=EngineStage.HUNG, cause=event.cause), (*actions, StateChanged())
        case ProtocolViolated():
            return _restart(life, child, event.cause, ExitUrgency.GRACEFUL)
        case CapExceeded():
            return _restart(life, child, event.cause, ExitUrgency.OVER_CAP)
        case SocketClosed():
            return _end_child(life, child, "it closed its socket without exiting", ExitUrgency.UNRESPONSIVE)
        case ChildExited():
            return _apply_exit(life, child, event, timeouts)
        case LeaksExceeded():
            return replace(life, stage=EngineStage.FAILED, cause=event.cause), (StateChanged(),)
        case RestRequested():
            return _begin_rest(life)
        case WakeRequested():
            return _wake(life)
        case StopRequested():
            stopping = replace(life, stopping=True)
            return (stopping, ()) if life.child is None else _end_child(stopping, child, "", ExitUrgency.AGENT_STOPS)


def _start_child(life: EngineLife, event: ChildStarted) -> Step:
    models = frozenset[str]() if life.resting else life.models - event.banned
    child = ChildLife(resting=life.resting)
    started = replace(life, models=models, child=child)
    return _end_child(started, child, "", ExitUrgency.AGENT_STOPS) if life.stopping else (started, ())


def _apply_report(life: EngineLife, child: ChildLife, event: ChildReported) -> Step:
    """Update the models to load again. Make the child ready, or replace it if only its end frees its memory."""
    attempted = child.attempted | event.loaded | event.loading
    missing = life.models - event.broken
    models = event.loaded | {name for name in missing if name in event.loading or name not in attempted}
    if attempted != child.attempted or models != life.models:
        child = replace(child, attempted=attempted)
        life = replace(life, models=models, child=child)
    if event.armed and not child.ready and not child.ending:
        return replace(life, stage=EngineStage.READY, child=replace(child, ready=True)), (StateChanged(),)
    if _is_replaceable(life, child, event):
        return _recycle(
            life, child, f"{show_size(event.unreturned)} of unloaded models were not freed: the engine was replaced"
        )
    return life, (StateChanged(),)


def _is_replaceable(life: EngineLife, child: ChildLife, event: ChildReported) -> bool:
    """Return whether only the end of this child frees its memory, and no client would notice the replacement.

    With preloaded models a client would notice, because a new child loads them again, even after a user unloaded them.
    """
    used = event.busy or (life.preloads and not child.resting) or event.loaded or event.loading
    return event.unreturned > 0 and child.ready and bool(child.attempted) and not used


def _apply_exit(life: EngineLife, child: ChildLife, event: ChildExited, timeouts: SupervisorTimeouts) -> Step:
    after = replace(life, child=None)
    if child.recycled:
        return after, (WaitForRestart(0.0),)
    after = replace(after, failures=1 if event.healthy else life.failures + 1)
    if life.stopping:
        return replace(after, stage=EngineStage.RESTARTING), ()
    delay = timeouts.compute_restart_delay(after.failures)
    stage = EngineStage.RESTARTING if delay < timeouts.longest else EngineStage.FAILED
    after = replace(after, stage=stage, cause=event.cause, restarts=life.restarts + 1)
    return after, (StateChanged(), WaitForRestart(delay))


def _begin_rest(life: EngineLife) -> Step:
    """Replace a child that has loaded a model or will load one, because only its end frees all its memory."""
    resting, child = replace(life, resting=True), life.child
    if child is None or child.resting:
        return resting, ()
    marked = replace(child, resting=True)
    if child.attempted or life.models or life.preloads:
        return _recycle(resting, marked, REST_CAUSE)
    return replace(resting, child=marked), ()


def _wake(life: EngineLife) -> Step:
    child = life.child
    if child is not None and child.resting and life.preloads:
        return _recycle(replace(life, resting=False), child, WAKE_CAUSE)
    return replace(life, resting=False, child=child and replace(child, resting=False)), ()


def _recycle(life: EngineLife, child: ChildLife, cause: str) -> Step:
    """End a healthy child to replace it. If it was asked to end before, store `child` and end nothing."""
    if child.ending:
        return replace(life, child=child), ()
    recycling = replace(life, recycles=life.recycles + 1)
    return _restart(recycling, replace(child, recycled=True), cause, ExitUrgency.GRACEFUL)


def _restart(life: EngineLife, child: ChildLife, cause: str, urgency: ExitUrgency) -> Step:
    ending, actions = _end_child(life, child, cause, urgency)
    return replace(ending, stage=EngineStage.RESTARTING, cause=cause), (*actions, StateChanged())


def _end_child(life: EngineLife, child: ChildLife, cause: str, urgency: ExitUrgency) -> Step:
    ending = replace(child, ready=False, ending=True, cause=child.cause or cause)
    return replace(life, child=ending), (EndChild(urgency),)


def refuse_not_ready(life: EngineLife, timeouts: SupervisorTimeouts) -> Refused:
    """Return the refusal of a request, because the engine is not ready or does not read its requests."""
    ended = f", it ended: {life.cause}" if life.cause else ""
    cause = ", but does not read its requests: retry" if (life.child or ChildLife()).ready else ended
    wait = timeouts.compute_restart_delay(max(1, life.failures)) + 1.0
    return Refused(RefusalCode.NOT_READY, f"the engine is {life.stage}{cause}", None, wait)


def make_report_event(report: EngineReport, *, busy: bool) -> ChildReported:
    """Convert a report of the engine to its event. `busy` is whether a request is open, running or waiting."""
    return ChildReported(
        armed=report.memory.cap > 0,  # a report before the limits arrived has no cap, and its gate is closed
        loaded=frozenset(model.name for model in report.models if model.loaded),
        loading=frozenset(model.name for model in report.models if model.loading),
        broken=frozenset(model.name for model in report.models if model.cause),
        unreturned=report.unreturned,
        busy=busy,
    )
