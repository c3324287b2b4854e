"""Record the course and the result of each simulated request, and log notable events."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from router.dispatch.request import Outcome, RequestFailure
from simulation.workload import ConversationTurn
from wire.frames import Deltas, Finished, Frame, Generate, Refusal
from wire.identity import NodeId
from wire.refusals import Refused


@dataclass(slots=True)
class RequestOutcome:
    """Course and result of one request. Times are virtual, in seconds."""

    turn: ConversationTurn
    """Request with its true lengths."""
    arrived: float
    """Virtual time in seconds of the arrival."""
    fits: bool
    """Whether the request would fit alone on at least one node."""
    sent: float | None = None
    """Virtual time in seconds at which the request was last sent to a node before its first token; None before."""
    first: float | None = None
    """Virtual time in seconds of the first token; None before."""
    ended: float | None = None
    """Virtual time in seconds of the end; None before, and for a request that never ended."""
    outcome: Outcome | None = None
    """Complete answer, refusal or failure; None while the request is open."""
    tries: int = 0
    """Number of times that the request was sent to a node."""
    first_refused: bool = False
    """Whether the node of the first try refused the request."""
    nodes: list[str] = field(default_factory=list[str])
    """Name of the node of each try, in order."""

    @property
    def served(self) -> bool:
        """Whether the answer is complete."""
        return isinstance(self.outcome, Finished)

    def record_try(self, node: str, now: float) -> None:
        """Record that the request was sent to a node at `now` (virtual seconds)."""
        self.tries += 1
        self.nodes.append(node)
        if self.first is None:
            self.sent = now

    def record_token(self, now: float) -> bool:
        """Record that a token has arrived at `now` (virtual seconds). Return whether it is the first token."""
        if self.first is not None:
            return False
        self.first = now
        return True

    def record_refusal(self) -> None:
        """Record that a node refused the last try. Only the refusal of the first try has an effect."""
        self.first_refused |= self.tries == 1

    def record_end(self, outcome: Outcome, now: float | None) -> None:
        """Record the result at `now` (virtual seconds); None for a request that never ended."""
        self.ended, self.outcome = now, outcome


class OutcomeTable:
    """Table of the outcomes of all requests of one run.

    `log(line)` is called with a line for each notable event; None disables the log.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Callable[[str], None] | None) -> None:
        self._loop = loop
        self._log = log
        self._numbers: dict[int, str] = {}
        self.by_id: dict[str, RequestOutcome] = {}
        """Outcomes of all requests that have arrived, by request id."""

    def log_line(self, line: str) -> None:
        """Write a line with the virtual time to the log, if there is one."""
        if self._log is not None:
            self._log(f"{self._loop.time():.3f} {line}")

    def add(self, turn: ConversationTurn, *, fits: bool) -> None:
        """Record the arrival of a request. `fits` is whether it would fit alone on at least one node."""
        self.by_id[turn.id] = RequestOutcome(turn, self._loop.time(), fits)
        self.log_line(
            f"{turn.id} of {turn.key} for {turn.model}: {turn.prompt} prompt tokens, {turn.output} to generate"
        )

    def note_sent(self, node: NodeId, frame: Generate) -> None:
        """Record that a request was sent to a node. Raise `KeyError` for an unknown id."""
        self._numbers[frame.request] = frame.request_id
        self.by_id[frame.request_id].record_try(str(node), self._loop.time())
        self.log_line(f"{frame.request_id} -> {node}")

    def note_frame(self, node: NodeId, frame: Frame) -> None:
        """Record the first token of a request, or the refusal of a node. Ignore other frames and unknown requests."""
        if isinstance(frame, Deltas):
            for delta in frame.deltas:
                self._note_token(node, delta.request)
        elif isinstance(frame, Refusal):
            outcome = self._find(frame.request)
            if outcome is not None:
                outcome.record_refusal()
                self.log_line(f"{outcome.turn.id} refused by {node}: {frame.refused.code}")

    def _note_token(self, node: NodeId, number: int) -> None:
        outcome, now = self._find(number), self._loop.time()
        if outcome is not None and outcome.record_token(now):
            self.log_line(f"{outcome.turn.id} first token on {node} after {now - outcome.arrived:.2f} s")

    def _find(self, number: int) -> RequestOutcome | None:
        return self.by_id.get(self._numbers.get(number, ""))

    def end(self, request_id: str, result: Outcome) -> bool:
        """Record the end of a request. Return whether its answer is complete. Raise `KeyError` for an unknown id."""
        outcome, now = self.by_id[request_id], self._loop.time()
        outcome.record_end(result, now)
        if isinstance(result, Finished):
            self.log_line(f"{request_id} done after {now - outcome.arrived:.2f} s")
        else:
            code = result.code.value if isinstance(result, Refused) else result.code
            self.log_line(f"{request_id} ended: {code}")
        return outcome.served

    def fail_open(self) -> None:
        """Record all requests without a result as failed, because the simulation is over."""
        for request_id, outcome in self.by_id.items():
            if outcome.outcome is None:
                outcome.record_end(RequestFailure("never_ended", "the request has not ended"), None)
                self.log_line(f"{request_id} did not end")
