"""Ledger of the router's reservations on each node, which the node's report may not contain yet.

Theory. A report shows the memory of a past moment. Between two reports the router may place many requests, and adds the
reservations of these requests to the report. In simulated bursts, nodes refuse 67-99 % of first attempts without this,
and 0.15 % with it. A reservation has three states:

    reserve ──► open ──(Admitted seen and a report with acked_seq >= seq)──► settled ──► released
                 └───────────────── any end: finished, refused, failed, cancelled, node gone ──►┘

`get_unacknowledged_bytes` includes open bytes, but not settled ones, because `memory.reserved` of the report contains
them. `count_in_flight` includes requests of both states. `Admitted` is required in addition to `acked_seq`, because the
engine counts prompts out of order. A short later prompt may be committed and acknowledged before a long earlier one.

Invariants: an attempt of a request has at most one reservation, and every reservation is released exactly once. A
duplicate end releases nothing.

A reservation includes the weights of a model that the node must load for the request. From the first report that shows
the running load, the report counts the weights and the reservation does not.

A hold reserves room for a request that still waits in the queue, because smaller later requests would take that room. A
node has at most one such hold, because two waiting requests would keep each other out of an empty node. A key has at
most one such hold, because a key with many waiting requests would keep all other keys out of all nodes. Holds of
requests that have lost a node, or for which a node swaps models, do not count for these limits.
"""

from dataclasses import dataclass, field

import msgspec

from wire.identity import NodeId


class LedgerError(AssertionError):
    """Raised for inconsistent reservations, which only a bug of the router can cause."""


class Reservation(msgspec.Struct, gc=False):
    """Reservation of one request on one node. Only the ledger changes it."""

    node: NodeId
    """Id of the node."""
    seq: int
    """Sequence number of the request's frame, compared with `acked_seq` of the node's reports."""
    need: int
    """Reserved bytes, including `weights`."""
    tokens: int
    """Tokens to prefill: prompt tokens that are probably not cached, and known tokens of a resumed answer."""
    seconds: float = 0.0
    """Expected prefill time of the prompt on that node, in seconds."""
    weights: int = 0
    """Bytes of weights that the node must load for the request; 0 for no load, and once the node's report counts them.
    """
    rows: int = 1
    """Decode rows: one for each choice."""
    admitted: bool = False
    """Whether the node has committed memory for the request."""
    settled: bool = False
    """Whether the node's report counts the reservation."""

    def admit(self) -> None:
        """Record that the node has committed memory for the request."""
        self.admitted = True

    def settle(self) -> None:
        """Record that the node's report counts the reservation."""
        self.settled = True

    def drop_weights(self) -> int:
        """Remove the weights of a load from the reservation, and return their bytes."""
        weights, self.weights = self.weights, 0
        self.need -= weights
        return weights


@dataclass(slots=True)
class NodeReservations:
    """Open requests and reservations of one node, as sums over its requests."""

    need: int = 0
    """Reserved bytes that the node's report does not contain."""
    tokens: int = 0
    """Tokens to prefill that the node's report does not contain.

    These are prompt tokens that are probably not cached, and known tokens of resumed answers.
    """
    rows: int = 0
    """Decode rows of all requests on the node."""
    requests: set[int] = field(default_factory=set[int])
    """Attempt numbers of all requests on the node."""
    open_requests: set[int] = field(default_factory=set[int])
    """Attempt numbers of the requests whose reservation the report does not contain."""
    pending_prefills: dict[int, Reservation] = field(default_factory=dict[int, Reservation])
    """Reservations of requests without a first token, by attempt number."""
    pending_tokens: int = 0
    """Sum of the tokens in `pending_prefills`."""

    def add(self, request: int, reservation: Reservation) -> None:
        """Add the reservation of a request."""
        self.need += reservation.need
        self.tokens += reservation.tokens
        self.rows += reservation.rows
        self.requests.add(request)
        self.open_requests.add(request)
        self.pending_prefills[request] = reservation
        self.pending_tokens += reservation.tokens

    def settle(self, request: int, reservation: Reservation) -> None:
        """Subtract the bytes and tokens of a request's reservation, which the report counts or which is released."""
        self.need -= reservation.need
        self.tokens -= reservation.tokens
        self.open_requests.discard(request)

    def drop_need(self, need: int) -> None:
        """Subtract bytes of a reservation from the node's `need`, because the node's report counts them."""
        self.need -= need

    def remove(self, request: int, reservation: Reservation) -> None:
        """Remove a request with its rows, its prompt, and the bytes and tokens that the report does not count."""
        if not reservation.settled:
            self.settle(request, reservation)
        self.requests.discard(request)
        self.rows -= reservation.rows
        if request in self.pending_prefills:
            self.remove_prompt(request)

    def remove_prompt(self, request: int) -> None:
        """Remove the prompt of a request from `pending_prefills`, if present."""
        prompt = self.pending_prefills.pop(request, None)
        if prompt is not None:
            self.pending_tokens -= prompt.tokens


_EMPTY = NodeReservations()


class SwapTurn(msgspec.Struct, frozen=True, gc=False):
    """Model swap on a node. The node takes no new requests for the models to unload, and loads no third model."""

    node: NodeId
    name: str
    """Display name of the node."""
    model: str
    """Name of the model that the node loads."""
    leaving: frozenset[str]
    """Names of the models that the node unloads."""
    request: int
    """Number of the queued request for which the node swaps."""
    began: float
    """Start of the swap, in monotonic seconds."""
    sent_at: float | None = None
    """Time at which the request was sent to the node, in monotonic seconds; None before."""

    def is_barred(self, model: str, loaded: bool) -> bool:
        """Return whether the node takes no new requests for `model` during this swap.

        `loaded` is whether the node has loaded `model`.
        """
        return model != self.model and (model in self.leaving or not loaded)

    @property
    def models(self) -> str:
        """Models to unload and the model to load, as text for a person."""
        return f"{', '.join(sorted(self.leaving))} -> {self.model}"


class ReservationLedger:
    """Ledger of the reservations, holds and model swaps of one router.

    Attempt numbers identify reservations, and arrival numbers of queued requests identify holds.
    """

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._accounts: dict[NodeId, NodeReservations] = {}
        self.holds: dict[int, tuple[NodeId, int]] = {}
        """Node and bytes of the hold of each queued request that has one, by the arrival number of the request."""
        self.turns: dict[NodeId, SwapTurn] = {}
        """Model swaps in progress, by node (`router.dispatch.model_swaps`)."""

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

        `need` is in bytes, of which `weights` are for a load. `tokens` is the number of tokens to prefill, which take
        `seconds`. `rows` is the number of decode rows, one for each choice. `seq` is the sequence number of the
        request; `acknowledge` compares it with `acked_seq` of a report.

        Raise `LedgerError` if the request already has a reservation.
        """
        if request in self._reservations:
            raise LedgerError(f"request {request} has two reservations")
        reservation = self._reservations[request] = Reservation(node, seq, need, tokens, seconds, weights, rows)
        account = self._accounts.get(node)
        if account is None:
            account = self._accounts[node] = NodeReservations()
        account.add(request, reservation)

    def mark_admitted(self, request: int) -> None:
        """Record that the node has committed memory for the request. Unknown requests are ignored."""
        reservation = self._reservations.get(request)
        if reservation is not None:
            reservation.admit()

    def mark_prefilled(self, request: int) -> None:
        """Record that the node has prefilled the prompt of a request, or that no first token is expected.

        Unknown requests are ignored.
        """
        reservation = self._reservations.get(request)
        if reservation is not None:
            self._accounts[reservation.node].remove_prompt(request)

    def mark_first_token(self, request: int) -> None:
        """Record the first token of a request: the node has prefilled its prompt and committed its memory.

        Unknown requests are ignored.
        """
        reservation = self._reservations.get(request)
        if reservation is not None:
            reservation.admit()
            self._accounts[reservation.node].remove_prompt(request)

    def acknowledge(self, node: NodeId, acked_seq: int) -> None:
        """Settle the reservations that a node's report counts: the admitted ones with a `seq` up to `acked_seq`."""
        account = self._accounts.get(node)
        if account is None:
            return
        for request in tuple(account.open_requests):
            reservation = self._reservations[request]
            if reservation.admitted and reservation.seq <= acked_seq:
                self._settle(account, request, reservation)

    def release_weights(self, request: int) -> None:
        """Release the weights in a request's reservation, because the node's report counts them now.

        Ignore requests without a reservation, and settled reservations.
        """
        reservation = self._reservations.get(request)
        if reservation is None or reservation.settled:
            return
        self._accounts[reservation.node].drop_need(reservation.drop_weights())

    def release(self, request: int) -> bool:
        """Release the reservation of a request, in any state. Return False if the request has none."""
        reservation = self._reservations.pop(request, None)
        if reservation is None:
            return False
        self._accounts[reservation.node].remove(request, reservation)
        return True

    def remove_node(self, node: NodeId) -> None:
        """Remove the holds, the model swap and the account of a node that is no longer a member.

        The account is kept while requests are on the node, because their release needs it.
        """
        if not self.count_in_flight(node):
            self._accounts.pop(node, None)
        for waiting in [waiting for waiting, (where, _) in self.holds.items() if where == node]:
            del self.holds[waiting]
        self.turns.pop(node, None)

    def _settle(self, account: NodeReservations, request: int, reservation: Reservation) -> None:
        reservation.settle()
        account.settle(request, reservation)

    def hold_memory(self, waiting: int, node: NodeId, need: int) -> None:
        """Hold `need` bytes on a node for a queued request, in place of its earlier hold.

        `waiting` is the arrival number of the request (`ActiveRequest.number`), because it has no attempt.
        """
        self.drop_hold(waiting)
        self.holds[waiting] = (node, need)

    def drop_hold(self, waiting: int) -> None:
        """Release the hold of a queued request, if it has one. `waiting` is its arrival number."""
        self.holds.pop(waiting, None)

    def find_holder(self, node: NodeId) -> int | None:
        """Return the arrival number of the queued request that has a hold on a node; None if there is none."""
        return next((number for number, (where, _) in self.holds.items() if where == node), None)

    def begin_turn(self, turn: SwapTurn, hold: int) -> None:
        """Begin a model swap, or assign it to another request, and hold `hold` bytes for that request on the node.

        The new hold replaces any other hold on the node, and any other hold of that request.
        """
        self.turns[turn.node] = turn
        holder = self.find_holder(turn.node)
        if holder is not None:
            self.drop_hold(holder)
        self.hold_memory(turn.request, turn.node, hold)

    def mark_turn_sent(self, turn: SwapTurn) -> None:
        """Record that the request of a model swap was sent to the node. `turn` is the swap with its new `sent_at`."""
        self.turns[turn.node] = turn

    def end_turn(self, turn: SwapTurn) -> None:
        """End a model swap, and release the hold of its request. Raise `KeyError` if the node has no model swap."""
        del self.turns[turn.node]
        self.drop_hold(turn.request)

    def find_hold_node(self, waiting: int) -> NodeId | None:
        """Return the node on which a queued request has a hold; None if it has none."""
        hold = self.holds.get(waiting)
        return None if hold is None else hold[0]

    def get_unacknowledged_bytes(self, node: NodeId, waiting: int = -1) -> int:
        """Return the reserved bytes on a node that its report does not contain.

        Holds on the node are included, except the hold of the queued request `waiting`; -1 excludes none.
        """
        return self._accounts.get(node, _EMPTY).need + self.sum_holds(node, waiting)

    def sum_holds(self, node: NodeId, waiting: int = -1) -> int:
        """Return the bytes of the holds on a node, except that of the queued request `waiting`; -1 excludes none."""
        return sum(
            held_bytes for number, (where, held_bytes) in self.holds.items() if where == node and number != waiting
        )

    def get_account(self, node: NodeId) -> NodeReservations:
        """Return the account of a node, read-only; an empty one for a node without requests."""
        return self._accounts.get(node, _EMPTY)

    def count_in_flight(self, node: NodeId) -> int:
        """Return the number of this router's requests on a node."""
        return len(self._accounts.get(node, _EMPTY).requests)

    def get_reserved_requests(self) -> set[int]:
        """Return the attempt numbers of the requests that have a reservation."""
        return set(self._reservations)

    def get_holders(self) -> set[int]:
        """Return the arrival numbers of the queued requests that have a hold."""
        return set(self.holds)

    @property
    def empty(self) -> bool:
        """Whether the ledger has no reservation, no hold and no model swap."""
        return (
            not self._reservations
            and not self.holds
            and not self.turns
            and not any(
                account.need or account.tokens or account.pending_prefills for account in self._accounts.values()
            )
        )

    def check(self) -> None:
        """Check that every account is the sum of its reservations. Raise `LedgerError` otherwise."""
        for node, account in self._accounts.items():
            mine = {
                number: reservation for number, reservation in self._reservations.items() if reservation.node == node
            }
            open_ = {number: reservation for number, reservation in mine.items() if not reservation.settled}
            if account.requests != mine.keys() or account.open_requests != open_.keys():
                raise LedgerError(f"{node}: requests of account and reservations differ")
            if account.rows != sum(reservation.rows for reservation in mine.values()):
                raise LedgerError(f"{node}: {account.rows} rows on account, reservations differ")
            if not account.pending_prefills.keys() <= mine.keys():
                raise LedgerError(f"{node}: unprefilled prompts of requests that do not exist")
            if account.pending_tokens != sum(prompt.tokens for prompt in account.pending_prefills.values()):
                raise LedgerError(f"{node}: {account.pending_tokens} unprefilled tokens on account, prompts differ")
            if account.need != sum(reservation.need for reservation in open_.values()):
                raise LedgerError(f"{node}: {account.need} bytes on account, reservations differ")
            if account.tokens != sum(reservation.tokens for reservation in open_.values()):
                raise LedgerError(f"{node}: {account.tokens} tokens on account, reservations differ")
        if any(reservation.node not in self._accounts for reservation in self._reservations.values()):
            raise LedgerError("a reservation without an account")
