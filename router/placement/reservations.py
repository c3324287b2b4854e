"""What the router has promised on each node and the node's report does not contain yet.

Theory. A report shows the memory of a moment that is past. Between two reports the router may place many requests, so
it adds what it promised since (simulated under bursts: 67-99 % of first tries refused without this, 0.15 % with it).
A promise goes through three states:

    claim ──► promised ──(Admitted seen and a report with acked_seq >= seq)──► settled ──► released
                  └──────────────── any end: finished, refused, failed, cancelled, node gone ──►┘

Promised bytes count in `unacknowledged`; settled ones do not, because `memory.reserved` of the report contains them;
both count in `in_flight`. `Admitted` is asked for besides `acked_seq` because prompts are counted out of order: a short
later one may be committed, and acknowledged, before a long earlier one. Rules that nobody may break: a request holds at
most one promise, every promise is freed exactly once, and an end that comes twice frees nothing the second time.

What a request promises includes the weights of a model that it makes its node load; from the report on that shows the
load under way they count there, and no longer here.

A hold keeps room for a request that still waits in the queue, so that smaller ones behind it do not take all of it. A
node has one at most, and so has a key: two that wait would keep each other out of a node that is empty, and a key with
many that wait would keep everybody else out of all nodes.
"""

from dataclasses import dataclass, field

import msgspec

from wire.identity import NodeId


class LedgerError(AssertionError):
    """The books do not balance: a bug, never a consequence of what a node or a client did."""


class _Promise(msgspec.Struct, gc=False):
    node: NodeId
    seq: int
    need: int
    tokens: int
    weights: int = 0
    rows: int = 1
    admitted: bool = False
    settled: bool = False


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A prompt that a node has still to read: so many tokens of it, which take so many seconds there."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class Account:
    """What is open on one node: bytes and prompt tokens that its report does not contain, all requests on it and the
    rows that they decode in, and the prompts of those of which no token was heard yet, with the sum of their tokens."""

    need: int = 0
    tokens: int = 0
    rows: int = 0
    requests: set[int] = field(default_factory=set[int])
    promised: set[int] = field(default_factory=set[int])
    unread: dict[int, Unread] = field(default_factory=dict[int, Unread])
    unread_tokens: int = 0

    def has_read(self, request: int) -> None:
        """Take a prompt off those that are unread; it may be off already."""
        prompt = self.unread.pop(request, None)
        if prompt is not None:
            self.unread_tokens -= prompt.tokens


_EMPTY = Account()


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A node that makes room for a model: it gets no new requests for those in the way, and loads no third one."""

    node: NodeId
    name: str
    """The node's."""
    model: str
    """The model that comes."""
    leaving: frozenset[str]
    """The models in the way."""
    ticket: int
    """The number of the waiting request."""
    began: float
    """Monotonic seconds."""
    asked_at: float | None = None
    """When the request was sent to the node; None before."""

    def bars(self, model: str, loaded: bool) -> bool:
        """Return whether the node takes no new request for a model during this turn."""
        return model != self.model and (model in self.leaving or not loaded)

    @property
    def models(self) -> str:
        """What goes and what comes."""
        return f"{', '.join(sorted(self.leaving))} -> {self.model}"


class Ledger:
    """The books of one router. Bytes and prompt tokens, by request and by node."""

    def __init__(self) -> None:
        self._promises: dict[int, _Promise] = {}
        self._accounts: dict[NodeId, Account] = {}
        self._holds: dict[int, tuple[NodeId, int]] = {}
        self._touched: set[NodeId] = set()
        self.turns: dict[NodeId, Turn] = {}
        """The nodes that swap models now (`router.dispatch.model_swaps`)."""

    def take_touched(self) -> set[NodeId]:
        """Give the nodes whose account has changed since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def claim(
        self, node: NodeId, request: int, seq: int, need: int, tokens: int = 0, weights: int = 0, seconds: float = 0.0,
        rows: int = 1,
    ) -> None:  # fmt: skip
        """Promise `need` bytes, `weights` of them for a load, and `tokens` of prefill, which take `seconds`, on a node,
        and a row for each choice. LedgerError when the request already holds some."""
        if request in self._promises:
            raise LedgerError(f"request {request} claims twice")
        self._promises[request] = _Promise(node, seq, need, tokens, weights, rows)
        account = self._accounts.get(node)
        if account is None:
            account = self._accounts[node] = Account()
        self._touched.add(node)
        account.need += need
        account.tokens += tokens
        account.rows += rows
        account.requests.add(request)
        account.unread[request] = Unread(tokens, seconds)
        account.unread_tokens += tokens
        account.promised.add(request)

    def admitted(self, request: int) -> None:
        """Note that the node has committed the request; unknown requests are ignored."""
        promise = self._promises.get(request)
        if promise is not None:
            promise.admitted = True

    def read(self, request: int) -> None:
        """Note that the node has read the prompt, or that it is no prompt whose first token will be waited for."""
        promise = self._promises.get(request)
        if promise is not None:
            self._accounts[promise.node].has_read(request)

    def acknowledge(self, node: NodeId, acked_seq: int) -> None:
        """Settle what a report already counts: admitted promises up to `acked_seq`."""
        account = self._accounts.get(node)
        if account is None:
            return
        for request in tuple(account.promised):
            promise = self._promises[request]
            if promise.admitted and promise.seq <= acked_seq:
                self._settle(account, request, promise)

    def read_in(self, request: int) -> None:
        """Note that the node's report counts the weights that this request promised."""
        promise = self._promises.get(request)
        if promise is None or promise.settled:
            return
        self._touched.add(promise.node)
        self._accounts[promise.node].need -= promise.weights
        promise.need -= promise.weights
        promise.weights = 0

    def release(self, request: int) -> bool:
        """End a promise, whatever its state. False when there is none (any more)."""
        promise = self._promises.pop(request, None)
        if promise is None:
            return False
        account = self._accounts[promise.node]
        self._touched.add(promise.node)
        if not promise.settled:
            self._settle(account, request, promise)
        account.requests.discard(request)
        account.rows -= promise.rows
        account.has_read(request)
        return True

    def forget(self, node: NodeId) -> None:
        """Forget the account of a node that is no member any more and has nothing open, and what is kept there."""
        if not self.in_flight(node):
            self._accounts.pop(node, None)
        for waiting in [waiting for waiting, (where, _) in self._holds.items() if where == node]:
            del self._holds[waiting]
        self._touched.discard(node)
        self.turns.pop(node, None)

    def _settle(self, account: Account, request: int, promise: _Promise) -> None:
        promise.settled = True
        self._touched.add(promise.node)
        account.need -= promise.need
        account.tokens -= promise.tokens
        account.promised.discard(request)

    def hold(self, waiting: int, node: NodeId, need: int) -> None:
        """Keep room on a node for a request that waits, in place of what was kept for it before."""
        self.drop_hold(waiting)
        self._touched.add(node)
        self._holds[waiting] = (node, need)

    def drop_hold(self, waiting: int) -> None:
        """Keep nothing for it any more."""
        kept = self._holds.pop(waiting, None)
        if kept is not None:
            self._touched.add(kept[0])

    def holder(self, node: NodeId) -> int | None:
        """Give who has room kept on a node."""
        return next((who for who, (where, _) in self._holds.items() if where == node), None)

    def held_on(self, waiting: int) -> NodeId | None:
        """Give the node where room is kept for it."""
        kept = self._holds.get(waiting)
        return None if kept is None else kept[0]

    def unacknowledged(self, node: NodeId, waiting: int = -1) -> int:
        """Give the bytes promised on a node that its report does not contain, and those held there for others."""
        need = self._accounts.get(node, _EMPTY).need
        if not self._holds:
            return need
        return need + sum(kept for who, (where, kept) in self._holds.items() if where == node and who != waiting)

    def account(self, node: NodeId) -> Account:
        """Give what is open on a node, to read only."""
        return self._accounts.get(node, _EMPTY)

    def unacknowledged_tokens(self, node: NodeId) -> int:
        """Give the prompt tokens sent to a node that its report does not count as queued yet."""
        return self._accounts.get(node, _EMPTY).tokens

    def in_flight(self, node: NodeId) -> int:
        """Give how many of this router's requests are on a node."""
        return len(self._accounts.get(node, _EMPTY).requests)

    def rows(self, node: NodeId) -> int:
        """Give how many rows they decode in, or will."""
        return self._accounts.get(node, _EMPTY).rows

    def promised(self) -> set[int]:
        """Give the requests that hold a promise."""
        return set(self._promises)

    def holders(self) -> set[int]:
        """Give who has room kept somewhere."""
        return set(self._holds)

    @property
    def empty(self) -> bool:
        """Whether nothing is promised or held anywhere."""
        return (
            not self._promises
            and not self._holds
            and not self.turns
            and not any(one.need or one.tokens or one.unread for one in self._accounts.values())
        )

    def check(self) -> None:
        """Raise LedgerError unless every account is the sum of its promises."""
        for node, account in self._accounts.items():
            mine = {number: promise for number, promise in self._promises.items() if promise.node == node}
            open_ = {number: promise for number, promise in mine.items() if not promise.settled}
            if account.requests != mine.keys() or account.promised != open_.keys():
                raise LedgerError(f"{node}: account and promises differ")
            if account.rows != sum(promise.rows for promise in mine.values()):
                raise LedgerError(f"{node}: {account.rows} rows on account, promises differ")
            if not account.unread.keys() <= mine.keys():
                raise LedgerError(f"{node}: unread prompts of requests that are not there")
            if account.unread_tokens != sum(prompt.tokens for prompt in account.unread.values()):
                raise LedgerError(f"{node}: {account.unread_tokens} unread tokens on account, prompts differ")
            if account.need != sum(promise.need for promise in open_.values()):
                raise LedgerError(f"{node}: {account.need} bytes on account, promises differ")
            if account.tokens != sum(promise.tokens for promise in open_.values()):
                raise LedgerError(f"{node}: {account.tokens} tokens on account, promises differ")
        if any(promise.node not in self._accounts for promise in self._promises.values()):
            raise LedgerError("a promise without an account")
