"""Run scenarios of the lease of a node: a text of events, each followed by its expected results, indented.

    # a comment
    request l1 clip          → actions, then the state when it changed
        begin the grant of l1
        granting l1

Verbs: request LEASE JOB [holding], grant, refuse, start, actor-failed LEASE REASON, end, returned, abandon,
release CAUSE, pause [REASON], reclaim REASON [holding], stop. An event that is not allowed prints `illegal`.

`MACPOOL_REWRITE=1 pytest tests/sim` writes the actual results; review the difference.
"""

from collections.abc import Iterator

from node.video.lease_rules import LeaseRecord
from node.video.lease_state import (
    Action,
    ActorFailed,
    BeginGrant,
    EndBegun,
    Event,
    GrantCompleted,
    GrantRefused,
    LeaseAbandoned,
    LeaseLife,
    LeaseWanted,
    MemoryReturned,
    NodeStopping,
    OwnerReclaimed,
    PauseChanged,
    RefuseLease,
    ReleaseOrdered,
    WorkerStarted,
    step,
)
from tests.sim.script import play_script
from wire.frames import LeaseRequest
from wire.state_machine import IllegalEventError
from wire.units import GIB

HELD = LeaseRecord(lease="held", generation=1, job="an earlier clip", model="wan", size=GIB)
EVENTS: dict[str, Event] = {
    "grant": GrantCompleted(),
    "refuse": GrantRefused(),
    "start": WorkerStarted(),
    "end": EndBegun(),
    "returned": MemoryReturned(),
    "abandon": LeaseAbandoned(),
    "stop": NodeStopping(),
}


def play(script: str) -> str:
    """Return the script with the results after every event."""
    return play_script(script, _Story().do)


class _Story:
    def __init__(self) -> None:
        self.life = LeaseLife()

    def do(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        before = self.life
        try:
            self.life, actions = step(self.life, _read(verb, words))
        except IllegalEventError as error:
            yield f"illegal: {error}"
            return
        self.life.check()
        yield from map(_show_action, actions)
        if self.life != before:
            yield _show_life(self.life)


def _read(verb: str, words: list[str]) -> Event:
    holding = "holding" in words
    words = [word for word in words if word != "holding"]
    match verb:
        case "request":
            request = LeaseRequest(words[0], 1, words[1], "wan", GIB, b"{}")
            return LeaseWanted(request, HELD if holding else None)
        case "actor-failed":
            return ActorFailed(words[0], " ".join(words[1:]))
        case "release":
            return ReleaseOrdered(words[0])
        case "pause":
            return PauseChanged(" ".join(words))
        case "reclaim":
            return OwnerReclaimed(" ".join(words), holding)
        case _:
            return EVENTS[verb]


def _show_action(action: Action) -> str:
    match action:
        case BeginGrant():
            return f"begin the grant of {action.request.lease}"
        case RefuseLease(refused):
            return f"refuse {refused.lease}: {refused.code}: {refused.message}; retry after {refused.retry_after:g} s"
        case _:
            return "check the lease"


def _show_life(life: LeaseLife) -> str:
    words = [life.stage.value]
    words += [life.lease] if life.lease else []
    words += ["with a worker"] if life.has_worker else []
    words += [f"ordered to end ({life.end.code}: {life.end.message})"] if life.end else []
    words += [f"paused ({life.paused})"] if life.paused else []
    words += ["stopping"] if life.stopping else []
    return " ".join(words)
