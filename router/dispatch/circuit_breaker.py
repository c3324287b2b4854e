"""Circuit breakers: stop sending requests to a node or an upstream that keeps failing, and probe it with one request
later.

A breaker counts only faults: an engine that died or broke a request. A refusal is an answer, membership handles a lost
link, and a cancelled request does not show the state of the engine.

    closed ──MAX_FAULTS in a row─────► open ──its time is over──► half open: one request, the probe
      ▲                                 ▲                             │
      └────── the probe succeeds ───────┼─────────────────────────────┤
                                        └── it fails: twice as long ──┘

Faults within `SAME_FAULT_SECONDS` count as one, because a dead engine fails all of its requests. Faults are in a row if
no successful answer and no `FAULT_WINDOW_SECONDS` without a fault are between them.

Only the probe closes or reopens a breaker that is not closed, because earlier requests do not show the current state. A
probe that is refused, cancelled or moved has no result, and the next request is the probe. A probe that runs for
`PROBE_SUCCESS_SECONDS` succeeds.

Times are in monotonic seconds.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_FAULTS = 3
"""Faults in a row that open a breaker."""
SAME_FAULT_SECONDS = 1.0
"""Seconds after a counted fault in which further faults are not counted."""
FAULT_WINDOW_SECONDS = 60.0
"""Seconds without a counted fault after which the count starts again."""
MIN_OPEN_SECONDS, MAX_OPEN_SECONDS = 5.0, 120.0
"""First and maximum open time of a breaker, in seconds."""
PROBE_SUCCESS_SECONDS = 10.0
"""Running time in seconds after which a probe succeeds."""

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BreakerState:
    """State of a breaker that is not closed."""

    state: str
    """`open` until `until`; then `half open` until a request is sent, which is the probe; then `probing` until its
    result."""
    why: str
    """Message of the newest fault that had one; empty without any."""
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
        """Open the breaker for `open_seconds`."""
        self.until, self.open_seconds, self.probe = now + open_seconds, open_seconds, None
        self.opened += 1

    def begin_probe(self, request: int, now: float) -> None:
        """Record the request that is the probe."""
        self.probe, self.probed = request, now

    def end_probe(self) -> None:
        """Record that the probe has no result: the next request is the probe."""
        self.probe = None

    def set_message(self, why: str) -> None:
        """Record the message of a fault, unless it is empty."""
        self.why = why or self.why

    def count_fault(self, now: float) -> int:
        """Count a fault, and return the number of faults in a row."""
        self.faults = self.faults + 1 if now <= self.last + FAULT_WINDOW_SECONDS else 1
        self.last = now
        return self.faults


class CircuitBreakers(Generic[N]):
    """Circuit breakers by node, or by name of an upstream. A node without faults has none.

    A request is identified by the number of its attempt, or at an upstream by its own number.
    All times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self.by_node: dict[N, _Breaker] = {}
        """Breakers of the nodes with a fault; read-only outside of this class."""
        self.opened = 0
        """Number of openings of all breakers since the creation of this object."""

    def list_barred_nodes(self, now: float) -> list[N]:
        """Return the nodes that take no request now: open, or half open with a running probe.

        Close the breaker of a probe that has run for `PROBE_SUCCESS_SECONDS`.
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

        At a closed breaker the record has no effect, and opening the breaker removes it.
        """
        breaker = self.by_node.get(node)
        if breaker is not None and breaker.probe is None:
            breaker.begin_probe(request, now)

    def get_state(self, node: N, now: float) -> BreakerState | None:
        """Return the state of a node's breaker; None if the breaker is closed.

        Close the breaker of a probe that has run for `PROBE_SUCCESS_SECONDS`.
        """
        breaker = self.by_node.get(node)
        barred = breaker is not None and self._is_barred(node, now)
        if breaker is None or breaker.until is None:
            return None
        state = "half open" if not barred else "probing" if now >= breaker.until else "open"
        return BreakerState(state, breaker.why, breaker.until, breaker.opened)

    def record_fault(self, node: N, request: int, now: float, why: str = "") -> None:
        """Record that a node broke an attempt (`request`), with the node's message. `now` is in monotonic seconds.

        Faults within `SAME_FAULT_SECONDS` count as one, because one crash breaks many requests. The breaker opens at
        `MAX_FAULTS` faults, or if the attempt was its probe. If the breaker is not closed, only the message of any
        other fault is stored.
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

        This clears the faults of a closed breaker, and closes a half-open one if the request was its probe.
        """
        breaker = self.by_node.get(node)
        if breaker is not None and (breaker.until is None or breaker.probe == request):
            del self.by_node[node]

    def record_departure(self, node: N, request: int) -> None:
        """Record that a request left a node without a result. If it was the probe, the next request is the probe."""
        breaker = self.by_node.get(node)
        if breaker is not None and breaker.probe == request:
            breaker.end_probe()

    def remove_node(self, node: N) -> None:
        """Remove the breaker of a node that is no longer a member."""
        self.by_node.pop(node, None)
