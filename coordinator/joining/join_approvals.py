"""Nodes that ask to join without a token, waiting for a person who compares the codes on both screens.

The code has six digits, so guessing is bounded everywhere: at most MOST_WAITING wait at once, at most MOST_NEW new
codes come up in LIFE seconds (a man in the middle would need about a million to meet a wanted one), two that wait
never share a code, and after three wrong codes nobody may decide for a minute. `now` is monotonic seconds.

One address cannot keep others out: it has a small part of both, and in a full list the oldest request of the address
that has the most gives way to a newcomer from an address that has fewer. A machine with a token does not wait here.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.joining.rate_limit import network_of
from wire.report import Hardware

LIFE = 600.0
"""Seconds that a request waits for a person."""
MOST_WAITING = 16
MOST_WAITING_HERE = 4
"""Requests of one address that wait at once."""
MOST_NEW = 256
"""New codes within LIFE: one in 4,000 that one of them is a wanted one."""
MOST_NEW_HERE = 8
"""New codes of one address within LIFE."""
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
    """A node's place in the line. `wake` is called once when `decision` is set, or when it `gave_way` to another."""

    waiting: Waiting
    decision: Decision | None = None
    gave_way: bool = False
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
        self._recent: deque[tuple[float, str]] = deque()
        """When new codes came up, and from which address."""
        self._wrong = 0
        self._locked_until = float("-inf")

    @property
    def tickets(self) -> Mapping[str, Ticket]:
        """Requests to join that wait for a decision, by code."""
        return self._tickets

    def ask(self, waiting: Waiting, now: float) -> Ticket | float:
        """Take a place in the line, or give the seconds after which there may be one."""
        self._expire(now)
        here = network_of(waiting.address)
        mine = [at for at, address in self._recent if address == here]
        if len(mine) >= MOST_NEW_HERE or len(self._recent) >= MOST_NEW:
            return (mine[0] if len(mine) >= MOST_NEW_HERE else self._recent[0][0]) + LIFE - now
        self._recent.append((now, here))
        if waiting.code in self._tickets:
            return 1.0
        by_address = Counter(network_of(ticket.waiting.address) for ticket in self._tickets.values())
        full = by_address[here] >= MOST_WAITING_HERE
        if full or (len(self._tickets) >= MOST_WAITING and not self._make_room(by_address, by_address[here])):
            return max(1.0, min(ticket.waiting.expires for ticket in self._tickets.values()) - now)
        ticket = self._tickets[waiting.code] = Ticket(waiting)
        return ticket

    def _make_room(self, by_address: Counter[str], fewer: int) -> bool:
        """Send away the oldest request of the address that has the most, if it has more than `fewer` + 1."""
        address, most = by_address.most_common(1)[0]
        if most <= fewer + 1:
            return False
        code = next(code for code, one in self._tickets.items() if network_of(one.waiting.address) == address)
        ticket = self._tickets.pop(code)
        ticket.gave_way = True
        ticket.wake()
        return True

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
        while self._recent and self._recent[0][0] + LIFE <= now:
            self._recent.popleft()
        for code in [code for code, ticket in self._tickets.items() if ticket.waiting.expires <= now]:
            del self._tickets[code]
