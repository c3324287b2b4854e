"""Keeps requests away from a node whose engine keeps failing, and finds out with one of them when it is well again.

A breaker is for faults alone: an engine that died or broke a request. A refusal is an answer, a lost link is
membership's affair, a client that left says nothing.

    closed ──FAULTS faults in a row──► open ──its time is over──► half open: one request, the probe
      ▲                                 ▲                             │
      └──────── the probe is well ──────┼─────────────────────────────┤
                                        └── it fails: twice as long ──┘

Rules
- Faults within TOGETHER seconds are one: a dead engine fails all that it had.
- In a row means without a good answer and without WITHIN seconds of peace in between.
- Only the probe closes or opens a breaker that is not closed: what was begun before says nothing about now.
- A probe that is refused, cancelled or moved has shown nothing, and the next request is the probe. One that runs for
  LONG seconds is well.

Times in seconds of `now`, which never goes back.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

FAULTS = 3
TOGETHER = 1.0
WITHIN = 60.0
SHORTEST, LONGEST = 5.0, 120.0
"""Seconds for which a breaker is open, the first time and at most."""
LONG = 10.0

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Standing:
    """A breaker that is not closed. `state`: `open` until `until`; then `half open` until a request goes there, which
    is the probe, and `probing` until that shows something. `why` is what the last fault said, `opened` how often in a
    row it opened."""

    state: str
    why: str
    until: float
    opened: int


@dataclass(slots=True)
class _Breaker:
    faults: int = 0
    why: str = ""
    opened: int = 0
    last: float = 0.0
    until: float | None = None
    lasts: float = SHORTEST
    probe: int | None = None
    probed: float = 0.0


class Breakers(Generic[N]):
    """The breakers of all nodes `N`; a node without faults has none. Requests are known by their numbers."""

    def __init__(self) -> None:
        self._nodes: dict[N, _Breaker] = {}
        self.opened = 0
        """How often any has opened."""

    def barred(self, now: float) -> list[N]:
        """List the nodes that get nothing now: open, or half open with a probe under way."""
        return [node for node in self._nodes if self._bars(node, now)]

    def _bars(self, node: N, now: float) -> bool:
        breaker = self._nodes[node]
        if breaker.until is None:
            return False
        if now < breaker.until:
            return True
        if breaker.probe is not None and now >= breaker.probed + LONG:
            breaker.until = breaker.probe = None
            breaker.faults = breaker.opened = 0
        return breaker.probe is not None

    def tried(self, node: N, request: int, now: float) -> None:
        """Note that a request was sent to a node: where the breaker is half open, it is the probe. Where the breaker is
        closed this decides nothing, and opening it forgets it."""
        breaker = self._nodes.get(node)
        if breaker is not None and breaker.probe is None:
            breaker.probe, breaker.probed = request, now

    def standing(self, node: N, now: float) -> Standing | None:
        """Say how a node's breaker stands; None where it is closed."""
        breaker = self._nodes.get(node)
        barred = breaker is not None and self._bars(node, now)
        if breaker is None or breaker.until is None:
            return None
        state = "half open" if not barred else "probing" if now >= breaker.until else "open"
        return Standing(state, breaker.why, breaker.until, breaker.opened)

    def fault(self, node: N, request: int, now: float, why: str = "") -> None:
        """Note that a node broke a request, and what it said of that."""
        breaker = self._nodes.setdefault(node, _Breaker())
        breaker.why = why or breaker.why
        if breaker.until is not None:
            if breaker.probe == request:
                self._open(breaker, min(LONGEST, 2 * breaker.lasts), now)
            return
        if breaker.faults and now < breaker.last + TOGETHER:
            return
        breaker.faults = breaker.faults + 1 if now <= breaker.last + WITHIN else 1
        breaker.last = now
        if breaker.faults >= FAULTS:
            self._open(breaker, SHORTEST, now)

    def _open(self, breaker: _Breaker, lasts: float, now: float) -> None:
        breaker.until, breaker.lasts, breaker.probe = now + lasts, lasts, None
        breaker.opened += 1
        self.opened += 1

    def good(self, node: N, request: int) -> None:
        """Note that a node ended a request as it should."""
        breaker = self._nodes.get(node)
        if breaker is not None and (breaker.until is None or breaker.probe == request):
            del self._nodes[node]

    def let_go(self, node: N, request: int) -> None:
        """Note that a request left a node without saying anything about it."""
        breaker = self._nodes.get(node)
        if breaker is not None and breaker.probe == request:
            breaker.probe = None

    def forget(self, node: N) -> None:
        """Forget a node that is gone for good."""
        self._nodes.pop(node, None)
