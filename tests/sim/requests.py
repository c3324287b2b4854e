"""Run request scenarios: a text of events of one request, each followed by its expected results, indented.

    # a comment
    0 place a                → actions, then the state when it changed
        reserve 1 on a
        send 1 to a
        sent on a, attempt 1

Verbs: place NODE, move NODE [rebalance], deliver, no-link, no-room, deadline, deny, admit, refuse [HEADROOM], tokens,
lose KIND [stranded] (node, engine, own_call, memory), finish, fail, stop. The number before a verb is the time.
Verbs of upstreams: hand-over, upstream-end.
`attempt N` at the end of a line makes it an event of that attempt. An event that is not allowed prints `illegal`.

`MACPOOL_REWRITE=1 pytest tests/sim` writes the actual results; review the difference.
"""

from collections.abc import Iterator

from router.dispatch.request import RequestFailure
from router.dispatch.request_events import (
    Action,
    AttemptEnded,
    AttemptLost,
    CancelAttempt,
    CorrectHeadroom,
    DeadlinePassed,
    Delivered,
    Dequeue,
    EndRequest,
    Enqueue,
    Event,
    FirstTokens,
    HandedOver,
    Moved,
    NodeAdmitted,
    NodeRefused,
    NoRoom,
    Placed,
    PrefillDone,
    RecordPrompt,
    Release,
    RequestDenied,
    StartAttempt,
    Stopped,
    Undelivered,
    UpstreamEnded,
    Withdraw,
)
from router.dispatch.request_state import RequestLife, step
from router.placement.candidate import Candidate, NoPlacement
from router.placement.recovery import LossKind
from tests.sim.script import play_script
from wire.frames import Admitted, Finished
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.state_machine import IllegalEventError

FULL = Refused(RefusalCode.NO_ROOM, "full")
LOSSES = {kind.name.lower(): kind for kind in LossKind}


def play(script: str) -> str:
    """Return the script with the results after every event."""
    return play_script(script, _Story().do)


class _Story:
    def __init__(self) -> None:
        self.life = RequestLife(0.0)
        self._number = 0

    def do(self, line: str) -> Iterator[str]:
        time, verb, *words = line.split()
        before = self.life
        try:
            self.life, actions = step(self.life, self._read(verb, words), float(time))
        except IllegalEventError as error:
            yield f"illegal: {error}"
            return
        self.life.check()
        yield from map(show_action, actions)
        if show_life(before) != show_life(self.life):
            yield show_life(self.life)

    def _read(self, verb: str, words: list[str]) -> Event:
        attempt = self.life.attempt
        if words[-2:-1] == ["attempt"]:
            attempt = int(words[-1])
            words = words[:-2]
        if verb in ("place", "move"):
            self._number += 1
            chosen = Candidate(node=NodeId(words[0]), name=words[0], state="ready")
            if verb == "place":
                return Placed(self._number, self._number, chosen, 100)
            return Moved(self._number, self._number, chosen, 100, is_loss="rebalance" not in words)
        return event_of(verb, attempt, words)


def event_of(verb: str, attempt: int, words: list[str]) -> Event:
    """Return the event of a verb, other than `place` and `move`."""
    match verb:
        case "deliver":
            return Delivered(attempt)
        case "no-link":
            return Undelivered(attempt)
        case "no-room":
            return NoRoom(NoPlacement(FULL, ()))
        case "deadline":
            return DeadlinePassed()
        case "deny":
            return RequestDenied(FULL)
        case "admit":
            return NodeAdmitted(attempt, Admitted(attempt, 25))
        case "refuse":
            return NodeRefused(attempt, int(words[0]) if words else None)
        case "tokens":
            return FirstTokens(attempt)
        case "lose":
            stranded = RequestFailure("node_lost", "no other node has the model") if "stranded" in words else None
            return AttemptLost(attempt, LOSSES[words[0]], RequestFailure("node_lost", f"{words[0]} lost"), stranded)
        case "finish":
            return AttemptEnded(attempt, Finished(attempt, ("stop",), 25, 3))
        case "hand-over":
            return HandedOver("home")
        case "upstream-end":
            return UpstreamEnded(Finished(0, ("stop",), 25, 3))
        case "fail":
            return AttemptEnded(attempt, RequestFailure("grammar_failed", "no answer fits"))
        case _:
            return Stopped(RequestFailure("cancelled", "the client left"))


def show_life(life: RequestLife) -> str:
    """Render a state with its place and its counts."""
    words = [life.state.value]
    words += [f"on {life.node}, attempt {life.attempt}"] if life.node else []
    words += ["in delivery"] if life.origin else []
    words += [f"losses {life.losses}"] if life.losses else []
    words += [f"crashes {life.crashes}"] if life.crashes else []
    words += [f"in a row {life.in_a_row}"] if life.in_a_row > 1 else []
    words += [f"({life.outcome.message})"] if isinstance(life.outcome, Refused | RequestFailure) else []
    return " ".join(words)


def show_action(action: Action) -> str:
    """Render an action in a few words."""
    match action:
        case StartAttempt():
            return f"start {action.placed.attempt} on {action.placed.chosen.node}"
        case Release() | CancelAttempt():
            return f"{'release' if isinstance(action, Release) else 'cancel'} {action.attempt} on {action.node}"
        case CorrectHeadroom():
            return f"correct the headroom of {action.node} to {action.headroom}"
        case RecordPrompt():
            return f"record the prompt on {action.node}"
        case PrefillDone():
            return f"prefill done on {action.node}" + (", first token of the request" if action.first else "")
        case Enqueue():
            return "enqueue"
        case Dequeue():
            return "dequeue"
        case Withdraw():
            return "withdraw"
        case EndRequest():
            return "end the request"
        case _:
            raise AssertionError(f"{action} has no words")
