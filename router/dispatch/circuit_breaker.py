"""Circuit breakers: send no requests to a node or an upstream that keeps failing, and later probe it with one request.

A breaker counts only faults: an engine that died or broke a request. A refusal is an answer, membership handles a lost
link, and a cancelled request does not show the state of the engine.

    closed ──MAX_FAULTS in a row─────► open ──its time is over──► half open: one request, the probe
      ▲                                 ▲                             │
      └────── the probe succeeds ───────┼─────────────────────────────┤
                                        └── it fails: twice as long ──┘

Faults within `SAME_FAULT_SECONDS` count as one, because a dead engine fails all of its requests. Faults are in a row if
no answer succeeds between them, and at most `FAULT_WINDOW_SECONDS` pass from each to the next.

Only the probe closes or reopens a breaker that is not closed, because earlier requests do not show the current state. A
probe that is refused, cancelled or moved has no result, and the next request becomes the probe. A probe that runs for
`PROBE_SUCCESS_SECONDS` succeeds.

Times are in monotonic seconds.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_FAULTS = 3
"""Number of faults in a row that opens a breaker."""
SAME_FAULT_SECONDS = 1.0
"""Seconds after a counted fault in which further faults are not counted."""
FAULT_WINDOW_SECONDS = 60.0
"""Seconds without a counted fault after which the count starts again."""
MIN_OPEN_SECONDS, MAX_OPEN_SECONDS = 5.0, 120.0
"""First and longest open time of a breaker, in seconds. A failed probe doubles the time."""
PROBE_SUCCESS_SECONDS = 10.0
"""Running time in seconds after which a probe succeeds."""

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BreakerState:
    """State of a breaker that is not closed."""

    state: str
    """`open` until the time `until`, then `half open` until a request is sent, the probe, then `probing` until it ends.
    """
    why: str
    """Message of the newest fault that had a message; empty if none had."""
    until: float
    """End of the open time, in monotonic seconds."""
    opened: int
    """Number of openings since the breaker was last closed."""


@dataclass(slots=True)
class _Breaker:
    faults: int = 0
    why: str = ""
    opened: int = 0
    last: float = 0.0
    until: float | None = None
    open_seconds: float = MIN_OPEN_SECONDS
    probe: int | None = None
    probed: float = 0.0

    def close(self) -> None:
        """Close the breaker after a successful probe."""
        self.until = self.probe = None
        self.faults = self.opened = 0

    def open(self, open_seconds: float, now: float) -> None:
        """Open the breaker for `open_seconds` from `now` (monotonic seconds)."""
        self.until, self.open_seconds, self.probe = now + open_seconds, open_seconds, None
        self.opened += 1

    def begin_probe(self, request: int, now: float) -> None:
        """Record that the attempt `request` is the probe, sent at `now` (monotonic seconds)."""
        self.probe, self.probed = request, now

    def end_probe(self) -> None:
        """Record that the probe ended without a result. The next request becomes the probe."""
        self.probe = None

    def set_message(self, why: str) -> None:
        """Record the message of a fault, unless it is empty."""
        self.why = why or self.why

    def count_fault(self, now: float) -> int:
        """Count a fault at `now` (monotonic seconds). Return the number of faults in a row."""
        self.faults = self.faults + 1 if now <= self.last + FAULT_WINDOW_SECONDS else 1
        self.last = now
        return self.faults


class CircuitBreakers(Generic[N]):
    """Circuit breakers, one for each node or one for each upstream, by id or name. A node without faults has none.

    In the methods, `node` stands for the node or the upstream. `request` is the number of the attempt, at an upstream
    the number of the request. All times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self.by_node: dict[N, _Breaker] = {}
        """Breakers of the nodes with a fault. Only this class may change them."""
        self.opened = 0
        """Number of openings of all breakers since the creation of this object."""

    def list_barred_nodes(self, now: float) -> list[N]:
        """Return the nodes that take no request now, because their breaker is open or waits for its probe.

        A probe that has run for `PROBE_SUCCESS_SECONDS` closes its breaker in this call.
        """
        return [node for node in self.by_node if self._is_barred(node, now)]

    def _is_barred(self, node: N, now: float) -> bool:
        breaker = self.by_node[node]
        if breaker.until is None:
            return False
        if now < breaker.until:
            return True
        if breaker.probe is not None and now >= breaker.probed + PROBE_SUCCESS_SECONDS:
            breaker.close()
        return breaker.probe is not None

    def record_attempt(self, node: N, request: int, now: float) -> None:
        """Record that a request was sent to a node. If the node's breaker is half open, the request is the probe.

        With a closed breaker, the call has no lasting effect.
        """
        breaker = self.by_node.get(node)
        if breaker is not None and breaker.probe is None:
            breaker.begin_probe(request, now)

    def get_state(self, node: N, now: float) -> BreakerState | None:
        """Return the state of a node's breaker; None if the breaker is closed.

        A probe that has run for `PROBE_SUCCESS_SECONDS` closes the breaker in this call.
        """
        breaker = self.by_node.get(node)
        barred = breaker is not None and self._is_barred(node, now)
        if breaker is None or breaker.until is None:
            return None
        state = "half open" if not barred else "probing" if now >= breaker.until else "open"
        return BreakerState(state, breaker.why, breaker.until, breaker.opened)

    def record_fault(self, node: N, request: int, now: float, why: str = "") -> None:
        """Record that a node broke the attempt `request`, with the node's message `why`; empty if it sent none.

        Faults within `SAME_FAULT_SECONDS` count as one, because one crash breaks many requests. A closed breaker opens
        after `MAX_FAULTS` faults in a row. Another breaker opens again if the attempt was its probe, for twice as long
        as before. Of any other fault it stores only the message.
        """
        breaker = self.by_node.setdefault(node, _Breaker())
        breaker.set_message(why)
        if breaker.until is not None:
            if breaker.probe == request:
                self._open_breaker(breaker, min(MAX_OPEN_SECONDS, 2 * breaker.open_seconds), now)
            return
        if breaker.faults and now < breaker.last + SAME_FAULT_SECONDS:
            return
        if breaker.count_fault(now) >= MAX_FAULTS:
            self._open_breaker(breaker, MIN_OPEN_SECONDS, now)

    def _open_breaker(self, breaker: _Breaker, open_seconds: float, now: float) -> None:
        breaker.open(open_seconds, now)
        self.opened += 1

    def record_success(self, node: N, request: int) -> None:
        """Record that a node finished a request.

        This clears the faults of a closed breaker, and closes another breaker if the request was its probe.
        """
        breaker = self.by_node.get(node)
        if breaker is not None and (breaker.until is None or breaker.probe == request):
            del self.by_node[node]

    def record_departure(self, node: N, request: int) -> None:
        """Record that a request left a node without a result. After a probe, the next request becomes the probe."""
        breaker = self.by_node.get(node)
        if breaker is not None and breaker.probe == request:
            breaker.end_probe()

    def remove_node(self, node: N) -> None:
        """Remove the breaker of a node that is no longer a member."""
        self.by_node.pop(node, None)
