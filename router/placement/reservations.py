"""Reservations of the router on each node that the node's report does not contain yet.

Theory. A report shows the memory of a past moment. Between two reports the router may place many requests and adds its
reservations since then. Simulated under bursts: 67-99 % of first attempts are refused without this, 0.15 % with it. A
reservation has three states:

    reserve ──► open ──(Admitted seen and a report with acked_seq >= seq)──► settled ──► released
                 └───────────────── any end: finished, refused, failed, cancelled, node gone ──►┘

Open bytes count in `unacknowledged`. Settled bytes do not, because `memory.reserved` of the report contains them.
Both count in `in_flight`. `Admitted` is required in addition to `acked_seq`, because prompts are counted out of order.
A short later prompt may be committed and acknowledged before a long earlier one.

Invariants: a request holds at most one reservation, and every reservation is released exactly once. A duplicate end
releases nothing.

A reservation includes the weights of a model that the request makes its node load. From the first report that shows the
running load, that report counts the weights and the reservation does not.

A hold reserves room for a request that still waits in the queue, because smaller requests behind it would take all of
it. A node has at most one hold, because two waiting requests would keep each other out of an empty node. A key has at
most one hold, because a key with many waiting requests would keep all other keys out of all nodes.
"""

from dataclasses import dataclass, field

import msgspec

from wire.identity import NodeId


class LedgerError(AssertionError):
    """Inconsistent reservations, which only a bug can cause: never a consequence of a node's or client's action."""


class _Reservation(msgspec.Struct, gc=False):
    """Reservation of one request on one node."""

    node: NodeId
    seq: int
    need: int
    tokens: int
    weights: int = 0
    rows: int = 1
    admitted: bool = False
    settled: bool = False

    def admit(self) -> None:
        """Record that the node has committed memory for the request."""
        self.admitted = True

    def settle(self) -> None:
        """Record that the node's report counts the reservation."""
        self.settled = True

    def drop_weights(self) -> int:
        """Remove the weights of a load, and return their bytes."""
        weights, self.weights = self.weights, 0
        self.need -= weights
        return weights


class PendingPrefill(msgspec.Struct, frozen=True, gc=False):
    """Prompt that a node has not prefilled yet, as far as the router knows."""

    tokens: int
    """Tokens left to prefill."""
    seconds: float
    """Expected prefill time on that node, in seconds."""


@dataclass(slots=True)
class NodeReservations:
    """Open requests and reservations of one node, as sums over its requests."""

    need: int = 0
    """Reserved bytes that the node's report does not contain."""
    tokens: int = 0
    """Prompt tokens that the node's report does not contain."""
    rows: int = 0
    """Decode rows of all requests on the node."""
    requests: set[int] = field(default_factory=set[int])
    """Numbers of all requests on the node."""
    promised: set[int] = field(default_factory=set[int])
    """Numbers of the requests whose reservation the report does not contain."""
    unread: dict[int, PendingPrefill] = field(default_factory=dict[int, PendingPrefill])
    """Prompts without a first token, by request number."""
    unread_tokens: int = 0
    """Sum of the tokens in `unread`."""

    def add(self, request: int, promise: _Reservation, seconds: float) -> None:
        """Add the reservation of a request whose prompt takes `seconds` to prefill."""
        self.need += promise.need
        self.tokens += promise.tokens
        self.rows += promise.rows
        self.requests.add(request)
        self.promised.add(request)
        self.unread[request] = PendingPrefill(promise.tokens, seconds)
        self.unread_tokens += promise.tokens

    def settle(self, request: int, promise: _Reservation) -> None:
        """Take off the bytes and tokens of a reservation, which the report counts or which is released."""
        self.need -= promise.need
        self.tokens -= promise.tokens
        self.promised.discard(request)

    def drop_need(self, need: int) -> None:
        """Take off bytes of a reservation that the report counts."""
        self.need -= need

    def remove(self, request: int, promise: _Reservation) -> None:
        """Remove a request with its rows and its prompt."""
        self.requests.discard(request)
        self.rows -= promise.rows
        self.has_read(request)

    def has_read(self, request: int) -> None:
        """Remove the prompt of a request from `unread`, if present."""
        prompt = self.unread.pop(request, None)
        if prompt is not None:
            self.unread_tokens -= prompt.tokens


_EMPTY = NodeReservations()


class SwapTurn(msgspec.Struct, frozen=True, gc=False):
    """Model swap on a node: no new requests for the models in the way, and no load of a third model."""

    node: NodeId
    name: str
    """Name of the node."""
    model: str
    """Model to load."""
    leaving: frozenset[str]
    """Models to unload."""
    request: int
    """Number of the queued request for which the node swaps."""
    began: float
    """Start of the swap, in monotonic seconds."""
    sent_at: float | None = None
    """Time at which the request was sent to the node, in monotonic seconds; None before."""

    def bars(self, model: str, loaded: bool) -> bool:
        """Return whether the node takes no new request for a model during this swap. `loaded`: the node has the model
        loaded."""
        return model != self.model and (model in self.leaving or not loaded)

    @property
    def models(self) -> str:
        """Models to unload and the model to load, as text for a person."""
        return f"{', '.join(sorted(self.leaving))} -> {self.model}"


class ReservationLedger:
    """Reservations of one router in bytes and prompt tokens, by request and by node. Requests are identified by attempt
    number."""

    def __init__(self) -> None:
        self._promises: dict[int, _Reservation] = {}
        self._accounts: dict[NodeId, NodeReservations] = {}
        self._holds: dict[int, tuple[NodeId, int]] = {}
        self.turns: dict[NodeId, SwapTurn] = {}
        """Model swaps under way, by node (`router.dispatch.model_swaps`)."""

    def reserve(
        self,
        node: NodeId,
        request: int,
        seq: int,
        need: int,
        tokens: int = 0,
        weights: int = 0,
        seconds: float = 0.0,
        rows: int = 1,
    ) -> None:
        """Reserve memory, prefill and decode rows on a node for a request.

        `need` is in bytes, of which `weights` are for a load. `tokens` is the number of prompt tokens to prefill, which
        take `seconds`. `rows` is the number of decode rows, one for each choice. `seq` is the sequence number of the
        request; `acknowledge` compares it with `acked_seq` of a report.

        Raise `LedgerError` if the request already has a reservation.
        """
        if request in self._promises:
            raise LedgerError(f"request {request} has two reservations")
        promise = self._promises[request] = _Reservation(node, seq, need, tokens, weights, rows)
        account = self._accounts.get(node)
        if account is None:
            account = self._accounts[node] = NodeReservations()
        account.add(request, promise, seconds)

    def admitted(self, request: int) -> None:
        """Record that the node has committed memory for the request. Unknown requests are ignored."""
        promise = self._promises.get(request)
        if promise is not None:
            promise.admit()

    def read(self, request: int) -> None:
        """Record that the node has prefilled the prompt of a request, or that no first token is expected. Unknown
        requests are ignored."""
        promise = self._promises.get(request)
        if promise is not None:
            self._accounts[promise.node].has_read(request)

    def acknowledge(self, node: NodeId, acked_seq: int) -> None:
        """Settle the reservations that a node's report already counts: admitted ones with a sequence number up to
        `acked_seq`."""
        account = self._accounts.get(node)
        if account is None:
            return
        for request in tuple(account.promised):
            promise = self._promises[request]
            if promise.admitted and promise.seq <= acked_seq:
                self._settle(account, request, promise)

    def read_in(self, request: int) -> None:
        """Release the weights in a request's reservation, because the node's report counts them now."""
        promise = self._promises.get(request)
        if promise is None or promise.settled:
            return
        self._accounts[promise.node].drop_need(promise.drop_weights())

    def release(self, request: int) -> bool:
        """Release a reservation in any state. Return False if the request has none."""
        promise = self._promises.pop(request, None)
        if promise is None:
            return False
        account = self._accounts[promise.node]
        if not promise.settled:
            self._settle(account, request, promise)
        account.remove(request, promise)
        return True

    def forget(self, node: NodeId) -> None:
        """Remove the account of a node that is no longer a member, unless it has open requests, and the holds on that
        node."""
        if not self.in_flight(node):
            self._accounts.pop(node, None)
        for waiting in [waiting for waiting, (where, _) in self._holds.items() if where == node]:
            del self._holds[waiting]
        self.turns.pop(node, None)

    def _settle(self, account: NodeReservations, request: int, promise: _Reservation) -> None:
        promise.settle()
        account.settle(request, promise)

    def hold(self, waiting: int, node: NodeId, need: int) -> None:
        """Hold `need` bytes on a node for a queued request, in place of its earlier hold.

        `waiting` is the number of the queued request.
        """
        self.drop_hold(waiting)
        self._holds[waiting] = (node, need)

    def drop_hold(self, waiting: int) -> None:
        """Release the hold of a queued request, if it has one."""
        self._holds.pop(waiting, None)

    def holder(self, node: NodeId) -> int | None:
        """Return the number of the queued request that has a hold on a node; None if there is none."""
        return next((number for number, (where, _) in self._holds.items() if where == node), None)

    def begin_turn(self, turn: SwapTurn, hold: int) -> None:
        """Begin a model swap, or give it to another request, and hold `hold` bytes for that request on the node."""
        self.turns[turn.node] = turn
        holder = self.holder(turn.node)
        if holder is not None:
            self.drop_hold(holder)
        self.hold(turn.request, turn.node, hold)

    def mark_turn_sent(self, turn: SwapTurn) -> None:
        """Record that the request of a model swap was sent to the node."""
        self.turns[turn.node] = turn

    def end_turn(self, turn: SwapTurn) -> None:
        """End a model swap, and release the hold of its request."""
        del self.turns[turn.node]
        self.drop_hold(turn.request)

    def node_of_hold(self, waiting: int) -> NodeId | None:
        """Return the node on which a queued request has a hold; None if it has none."""
        kept = self._holds.get(waiting)
        return None if kept is None else kept[0]

    def unacknowledged(self, node: NodeId, waiting: int = -1) -> int:
        """Return the reserved bytes on a node that its report does not contain.

        They include the holds on the node, except that of the queued request `waiting`.
        """
        need = self._accounts.get(node, _EMPTY).need
        if not self._holds:
            return need
        return need + sum(kept for number, (where, kept) in self._holds.items() if where == node and number != waiting)

    def account(self, node: NodeId) -> NodeReservations:
        """Return the account of a node, read-only; an empty one for a node without requests."""
        return self._accounts.get(node, _EMPTY)

    def in_flight(self, node: NodeId) -> int:
        """Return the number of this router's requests on a node."""
        return len(self._accounts.get(node, _EMPTY).requests)

    def promised(self) -> set[int]:
        """Return the numbers of the requests that have a reservation."""
        return set(self._promises)

    def holders(self) -> set[int]:
        """Return the numbers of the queued requests that have a hold."""
        return set(self._holds)

    @property
    def empty(self) -> bool:
        """Whether no reservation, hold or swap exists."""
        return (
            not self._promises
            and not self._holds
            and not self.turns
            and not any(one.need or one.tokens or one.unread for one in self._accounts.values())
        )

    def check(self) -> None:
        """Check that every account is the sum of its reservations. Raise `LedgerError` otherwise."""
        for node, account in self._accounts.items():
            mine = {number: promise for number, promise in self._promises.items() if promise.node == node}
            open_ = {number: promise for number, promise in mine.items() if not promise.settled}
            if account.requests != mine.keys() or account.promised != open_.keys():
                raise LedgerError(f"{node}: nodes of account and reservations differ")
            if account.rows != sum(promise.rows for promise in mine.values()):
                raise LedgerError(f"{node}: {account.rows} rows on account, reservations differ")
            if not account.unread.keys() <= mine.keys():
                raise LedgerError(f"{node}: unprefilled prompts of requests that do not exist")
            if account.unread_tokens != sum(prompt.tokens for prompt in account.unread.values()):
                raise LedgerError(f"{node}: {account.unread_tokens} unprefilled tokens on account, prompts differ")
            if account.need != sum(promise.need for promise in open_.values()):
                raise LedgerError(f"{node}: {account.need} bytes on account, reservations differ")
            if account.tokens != sum(promise.tokens for promise in open_.values()):
                raise LedgerError(f"{node}: {account.tokens} tokens on account, reservations differ")
        if any(promise.node not in self._accounts for promise in self._promises.values()):
            raise LedgerError("a reservation without an account")
