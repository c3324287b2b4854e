"""Nodes that ask to join without a token, waiting for a person who compares the codes on both screens.

The code has six digits, so guessing is bounded everywhere: at most MOST_WAITING wait at once, at most MOST_NEW new
codes come up in LIFE seconds (a man in the middle would need about a million to meet a wanted one), two that wait
never share a code, and after three wrong codes nobody may decide for a minute. `now` is monotonic seconds.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from wire.report import Hardware

LIFE = 600.0
"""Seconds that a request waits for a person."""
MOST_WAITING = 16
MOST_NEW = 32
"""New codes within LIFE."""
MOST_WRONG = 3
LOCKED_FOR = 60.0
"""Seconds without decisions after MOST_WRONG wrong codes in a row."""


class Decision(StrEnum):
    """What the person said."""

    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node that waits: the code it shows, what it says of itself, where from, until when. `replaces` is the name of
    the member whose machine it says it is: approving it ends that member's certificate."""

    code: str
    name: str
    machine: str
    hardware: Hardware
    address: str
    expires: float
    replaces: str = ""


@dataclass(slots=True)
class Ticket:
    """A node's place in the line. `wake` is called once when `decision` is set."""

    waiting: Waiting
    decision: Decision | None = None
    wake: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class Decided:
    """The code was one of those that wait."""

    waiting: Waiting
    decision: Decision


@dataclass(frozen=True, slots=True)
class WrongCode:
    """Nobody who waits shows this code; `tries` more until a lock."""

    tries: int


@dataclass(frozen=True, slots=True)
class Locked:
    """Too many wrong codes: nothing is decided for `seconds`."""

    seconds: float


class Approvals:
    """The line of waiting nodes."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._recent: deque[float] = deque()
        self._wrong = 0
        self._locked_until = float("-inf")

    def ask(self, waiting: Waiting, now: float) -> Ticket | float:
        """Take a place in the line, or give the seconds after which there may be one."""
        self._expire(now)
        if len(self._recent) >= MOST_NEW:
            return self._recent[0] + LIFE - now
        self._recent.append(now)
        if waiting.code in self._tickets:
            return 1.0
        if len(self._tickets) >= MOST_WAITING:
            return max(1.0, min(ticket.waiting.expires for ticket in self._tickets.values()) - now)
        ticket = self._tickets[waiting.code] = Ticket(waiting)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Give a place up."""
        if self._tickets.get(ticket.waiting.code) is ticket:
            del self._tickets[ticket.waiting.code]

    def list(self, now: float) -> list[Waiting]:
        """Give those that wait, the oldest first."""
        self._expire(now)
        return [ticket.waiting for ticket in self._tickets.values()]

    def approve(self, code: str, now: float) -> Decided | WrongCode | Locked:
        """Let the node that shows this code in."""
        return self._decide(code, Decision.APPROVED, now)

    def reject(self, code: str, now: float) -> Decided | WrongCode | Locked:
        """Send the node that shows this code away."""
        return self._decide(code, Decision.REJECTED, now)

    def _decide(self, code: str, decision: Decision, now: float) -> Decided | WrongCode | Locked:
        self._expire(now)
        if now < self._locked_until:
            return Locked(self._locked_until - now)
        ticket = self._tickets.pop(code.strip(), None)
        if ticket is None:
            return self._count_wrong(now)
        self._wrong = 0
        ticket.decision = decision
        ticket.wake()
        return Decided(ticket.waiting, decision)

    def _count_wrong(self, now: float) -> WrongCode | Locked:
        self._wrong += 1
        if self._wrong < MOST_WRONG:
            return WrongCode(MOST_WRONG - self._wrong)
        self._wrong = 0
        self._locked_until = now + LOCKED_FOR
        return Locked(LOCKED_FOR)

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0] + LIFE <= now:
            self._recent.popleft()
        for code in [code for code, ticket in self._tickets.items() if ticket.waiting.expires <= now]:
            del self._tickets[code]
