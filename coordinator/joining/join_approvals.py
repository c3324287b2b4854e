"""Pairing codes: the queue of nodes without a token that wait for approval, and the lock after wrong codes.

The code has six digits, and guessing is bounded. At most `MAX_WAITING` nodes wait, and at most `MAX_NEW_CODES` new
codes appear within `APPROVAL_TIMEOUT_SECONDS`. An attacker in the middle would need about a million codes to match a
waiting one. Two waiting nodes never share a code. After `MAX_WRONG_CODES` wrong codes in a row, decisions are locked
for `LOCK_SECONDS`. An approval may be repeated, because its response may be lost. `now` is monotonic seconds.

One address alone cannot exclude other addresses, because each address may use only a small part of both limits. If the
queue is full when a node arrives, the oldest request of the address with the most requests is removed. That address
must have more requests than the node's address. A machine with a token does not wait here.
"""

import hmac
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.joining.rate_limit import get_network
from wire.report import Hardware

APPROVAL_TIMEOUT_SECONDS = 600.0
"""Seconds after which a join request without an approval or rejection expires."""
MAX_WAITING = 16
"""Maximum waiting join requests of all addresses together."""
MAX_WAITING_PER_ADDRESS = 4
"""Maximum waiting join requests of one address."""
MAX_NEW_CODES = 256
"""Maximum new codes within `APPROVAL_TIMEOUT_SECONDS`. The chance that one matches a given code is 1 in 4,000."""
MAX_NEW_CODES_PER_ADDRESS = 8
"""Maximum new codes of one address within `APPROVAL_TIMEOUT_SECONDS`."""
MAX_WRONG_CODES = 3
"""Consecutive wrong codes that lock decisions."""
LOCK_SECONDS = 60.0
"""Seconds without decisions after `MAX_WRONG_CODES` consecutive wrong codes."""

REPEAT_SECONDS = 300.0
"""Seconds for which an approval may be repeated with its code. A repetition has no effect and the same result."""


class ApprovalDecision(StrEnum):
    """Decision of a person about a waiting node."""

    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class WaitingNode:
    """Description of a node that waits for approval, as shown to a person."""

    code: str
    """Short code that the node's screen shows. A person compares it to recognize the node."""
    name: str
    machine: str
    hardware: Hardware
    address: str
    expires: float
    """Monotonic time, in seconds, at which the wait for an approval ends."""
    replaces: str = ""
    """Name of the member with the same machine id, whose certificate ends with an approval; empty if there is none."""


@dataclass(slots=True)
class ApprovalRequest:
    """Request for approval in the queue. `decision` is None until a person decides."""

    waiting: WaitingNode
    wake: Callable[[], object]
    """Function that is called once, when `decision` or `displaced` is set."""
    decision: ApprovalDecision | None = None
    displaced: bool = False
    """Whether the request was removed in favour of a node from another address."""

    def decide(self, decision: ApprovalDecision) -> None:
        """Record a person's decision, and call `wake`."""
        self.decision = decision
        self.wake()

    def displace(self) -> None:
        """Record that the request was removed from the queue for another one, and call `wake`."""
        self.displaced = True
        self.wake()


@dataclass(frozen=True, slots=True)
class DecidedApproval:
    """Decision of a person about a waiting node, which has left the queue."""

    waiting: WaitingNode
    decision: ApprovalDecision


@dataclass(frozen=True, slots=True)
class WrongCode:
    """Result of a decision with a code that no waiting node has.

    `tries_left` is the number of further wrong codes after which all decisions are locked.
    """

    tries_left: int


@dataclass(frozen=True, slots=True)
class ApprovalLock:
    """Result of a decision while decisions are locked after wrong codes. The lock ends in `seconds`."""

    seconds: float


class ApprovalQueue:
    """Queue of nodes that wait for approval of their codes. In all methods, `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._requests: dict[str, ApprovalRequest] = {}
        self._recent: deque[tuple[float, str]] = deque()
        """Time and address of each new code within `APPROVAL_TIMEOUT_SECONDS`."""
        self._approved: deque[tuple[float, DecidedApproval]] = deque()
        """Time and result of each approval within `REPEAT_SECONDS`."""
        self._wrong = 0
        self._locked_until = float("-inf")

    @property
    def requests(self) -> Mapping[str, ApprovalRequest]:
        """Waiting requests, by code. Expired requests are included until the next call of a method with `now`."""
        return self._requests

    def enqueue(
        self, waiting: WaitingNode, now: float, wake: Callable[[], object] = lambda: None
    ) -> ApprovalRequest | float:
        """Enqueue a node at `now` (monotonic seconds). Return its request, or the seconds until a retry may succeed.

        `wake` is called at most once, when a person has decided or the request has lost its place in the queue. Seconds
        are returned at a limit, and if the code is in use. If the queue is full, the address with the most requests
        loses its oldest one. That address must have at least two more than this node's address.
        """
        self._delete_expired(now)
        here = get_network(waiting.address)
        mine = [at for at, address in self._recent if address == here]
        if len(mine) >= MAX_NEW_CODES_PER_ADDRESS or len(self._recent) >= MAX_NEW_CODES:
            return (
                (mine[0] if len(mine) >= MAX_NEW_CODES_PER_ADDRESS else self._recent[0][0])
                + APPROVAL_TIMEOUT_SECONDS
                - now
            )
        self._recent.append((now, here))
        if waiting.code in self._requests:
            return 1.0
        by_address = Counter(get_network(request.waiting.address) for request in self._requests.values())
        full = by_address[here] >= MAX_WAITING_PER_ADDRESS
        if full or (len(self._requests) >= MAX_WAITING and not self._displace_oldest(by_address, by_address[here])):
            return max(1.0, min(request.waiting.expires for request in self._requests.values()) - now)
        request = self._requests[waiting.code] = ApprovalRequest(waiting, wake)
        return request

    def _displace_oldest(self, by_address: Counter[str], fewer: int) -> bool:
        """Remove the oldest request of the address with the most requests. Return whether a request was removed.

        Nothing is removed if that address has at most `fewer` + 1 requests.
        """
        address, most = by_address.most_common(1)[0]
        if most <= fewer + 1:
            return False
        code = next(code for code, request in self._requests.items() if get_network(request.waiting.address) == address)
        self._requests.pop(code).displace()
        return True

    def withdraw(self, request: ApprovalRequest) -> None:
        """Remove a request from the queue, if it is still waiting."""
        if self._requests.get(request.waiting.code) is request:
            del self._requests[request.waiting.code]

    def list_waiting(self, now: float) -> list[WaitingNode]:
        """Return the nodes that wait at `now` (monotonic seconds), oldest first."""
        self._delete_expired(now)
        return [request.waiting for request in self._requests.values()]

    def approve(self, code: str, now: float) -> DecidedApproval | WrongCode | ApprovalLock:
        """Approve the node with this code at `now` (monotonic seconds). A wrong code counts towards the lock.

        Return the decision, `WrongCode`, or `ApprovalLock` while decisions are locked. The code of an approval within
        the last `REPEAT_SECONDS` is not wrong: that decision is returned again.
        """
        return self._decide(code, ApprovalDecision.APPROVED, now)

    def reject(self, code: str, now: float) -> DecidedApproval | WrongCode | ApprovalLock:
        """Reject the node with this code at `now` (monotonic seconds). A wrong code counts towards the lock.

        Return the decision, `WrongCode`, or `ApprovalLock` while decisions are locked.
        """
        return self._decide(code, ApprovalDecision.REJECTED, now)

    def _decide(self, code: str, decision: ApprovalDecision, now: float) -> DecidedApproval | WrongCode | ApprovalLock:
        self._delete_expired(now)
        if now < self._locked_until:
            return ApprovalLock(self._locked_until - now)
        request = self._requests.pop(code.strip(), None)
        if request is None:
            repeated = self._find_approval(code.strip()) if decision is ApprovalDecision.APPROVED else None
            return repeated or self._count_wrong_code(now)
        self._wrong = 0
        request.decide(decision)
        decided = DecidedApproval(request.waiting, decision)
        if decision is ApprovalDecision.APPROVED:
            self._approved.append((now, decided))
        return decided

    def _find_approval(self, code: str) -> DecidedApproval | None:
        """Return the newest approval with this code within `REPEAT_SECONDS`; None if there is none.

        The duration of the search does not depend on the number of equal digits.
        """
        given = code.encode(errors="replace")
        same = [one for _, one in self._approved if hmac.compare_digest(one.waiting.code.encode(), given)]
        return same[-1] if same else None

    def _count_wrong_code(self, now: float) -> WrongCode | ApprovalLock:
        self._wrong += 1
        if self._wrong < MAX_WRONG_CODES:
            return WrongCode(MAX_WRONG_CODES - self._wrong)
        self._wrong = 0
        self._locked_until = now + LOCK_SECONDS
        return ApprovalLock(LOCK_SECONDS)

    def _delete_expired(self, now: float) -> None:
        while self._recent and self._recent[0][0] + APPROVAL_TIMEOUT_SECONDS <= now:
            self._recent.popleft()
        while self._approved and self._approved[0][0] + REPEAT_SECONDS <= now:
            self._approved.popleft()
        for code in [code for code, request in self._requests.items() if request.waiting.expires <= now]:
            del self._requests[code]
