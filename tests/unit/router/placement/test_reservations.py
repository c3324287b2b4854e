from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.placement.reservations import LedgerError, NodeReservations, Reservation, ReservationLedger, SwapTurn
from tests.effort import scale_examples
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def test_a_reservation_counts_until_the_report_contains_it():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, seq=10, need=100, tokens=7)
    assert (ledger.get_unacknowledged_bytes(A), ledger.get_account(A).tokens, ledger.count_in_flight(A)) == (100, 7, 1)
    ledger.acknowledge(A, 10)
    assert ledger.get_unacknowledged_bytes(A) == 100, "not admitted yet: a later seq may have been committed first"
    ledger.mark_admitted(1)
    ledger.acknowledge(A, 9)
    assert ledger.get_unacknowledged_bytes(A) == 100
    ledger.acknowledge(A, 10)
    assert (ledger.get_unacknowledged_bytes(A), ledger.get_account(A).tokens, ledger.count_in_flight(A)) == (0, 0, 1)
    assert ledger.release(1)
    assert ledger.count_in_flight(A) == 0
    assert ledger.empty


def test_a_reservation_is_freed_exactly_once():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    ledger.reserve(A, 2, 2, 50)
    assert ledger.release(1)
    assert not ledger.release(1)
    assert not ledger.release(99)
    assert ledger.get_unacknowledged_bytes(A) == 50


def test_two_reservations_for_one_request_are_an_error():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    with pytest.raises(LedgerError):
        ledger.reserve(B, 1, 2, 100)


def test_remove_node_deletes_its_reservations_and_holds():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    ledger.hold_memory(7, A, 300)
    ledger.hold_memory(8, B, 200)
    ledger.release(1)
    ledger.remove_node(A)
    assert (ledger.find_hold_node(7), ledger.find_holder(A), ledger.get_unacknowledged_bytes(A)) == (None, None, 0)
    assert (ledger.find_hold_node(8), ledger.find_holder(B), ledger.get_holders()) == (B, 8, {8})


def test_hold_counts_for_every_other_request():
    ledger = ReservationLedger()
    ledger.hold_memory(7, A, 300)
    assert (
        ledger.get_unacknowledged_bytes(A),
        ledger.get_unacknowledged_bytes(A, 7),
        ledger.get_unacknowledged_bytes(B),
    ) == (300, 0, 0)
    ledger.hold_memory(7, B, 200)
    assert (ledger.get_unacknowledged_bytes(A), ledger.get_unacknowledged_bytes(B), ledger.find_hold_node(7)) == (
        0,
        200,
        B,
    )
    assert (ledger.find_holder(A), ledger.find_holder(B)) == (None, 7)
    ledger.drop_hold(7)
    ledger.drop_hold(7)
    assert ledger.empty


class AllOrders(RuleBasedStateMachine):
    """Every event in every order, including events that only a broken or lying node causes."""

    @initialize()
    def start(self):
        self.ledger = ReservationLedger()
        self.open: dict[int, NodeId] = {}
        self.next = 1

    @rule(node=st.sampled_from([A, B]), need=st.integers(0, 10**12), tokens=st.integers(0, 10**6))
    def claim(self, node, need, tokens):
        self.ledger.reserve(node, self.next, self.next, need, tokens, seconds=tokens / 100, rows=1 + need % 3)
        self.open[self.next] = node
        self.next += 1

    @rule(request=st.integers(0, 12))
    def admit(self, request):
        self.ledger.mark_admitted(request)

    @rule(request=st.integers(0, 12))
    def read(self, request):
        self.ledger.mark_prefilled(request)
        assert not any(request in self.ledger.get_account(node).pending_prefills for node in (A, B))

    @rule(node=st.sampled_from([A, B]), acked=st.integers(-1, 15))
    def report(self, node, acked):
        self.ledger.acknowledge(node, acked)

    @rule(request=st.integers(0, 12))
    def end(self, request):
        assert self.ledger.release(request) == (self.open.pop(request, None) is not None)

    @rule(waiting=st.integers(1, 3), node=st.sampled_from([A, B]))
    def hold(self, waiting, node):
        self.ledger.hold_memory(waiting, node, 5)

    @rule(waiting=st.integers(1, 3))
    def drop(self, waiting):
        self.ledger.drop_hold(waiting)

    @invariant()
    def balanced(self):
        self.ledger.check()
        for node in (A, B):
            assert self.ledger.count_in_flight(node) == list(self.open.values()).count(node)
            assert self.ledger.get_unacknowledged_bytes(node) >= 0

    def teardown(self):
        for request in list(self.open):
            assert self.ledger.release(request)
        for waiting in (1, 2, 3):
            self.ledger.drop_hold(waiting)
        self.ledger.check()
        assert self.ledger.empty
        assert self.ledger.get_unacknowledged_bytes(A) == self.ledger.get_unacknowledged_bytes(B) == 0
        assert self.ledger.get_account(A).rows == self.ledger.get_account(B).rows == 0


AllOrders.TestCase.settings = settings(max_examples=scale_examples(500), stateful_step_count=30, deadline=None)
TestAllOrders = AllOrders.TestCase


@given(st.permutations(["admitted", "acknowledged", "released"]))
def test_ledger_returns_to_zero_in_any_order(order: list[str]):
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 5, 100, 10)
    steps = {
        "admitted": lambda: ledger.mark_admitted(1),
        "acknowledged": lambda: ledger.acknowledge(A, 5),
        "released": lambda: ledger.release(1),
    }
    for step in order:
        steps[step]()
        ledger.check()
    assert ledger.empty


def test_release_weights_reduces_an_open_reservation_once():
    ledger = ReservationLedger()
    ledger.reserve(NodeId("a"), 1, 1, 100, weights=60)
    ledger.release_weights(1)
    ledger.release_weights(1)
    ledger.release_weights(2)
    assert ledger.get_unacknowledged_bytes(NodeId("a")) == 40
    ledger.mark_admitted(1)
    ledger.acknowledge(NodeId("a"), 1)
    ledger.release_weights(1)
    ledger.check()
    assert ledger.release(1)
    ledger.reserve(NodeId("a"), 3, 2, 100, weights=60)
    ledger.mark_admitted(3)
    ledger.acknowledge(NodeId("a"), 2)
    ledger.release_weights(3)
    assert ledger.get_unacknowledged_bytes(NodeId("a")) == 0
    ledger.check()
    assert ledger.release(3)
    assert ledger.empty


def test_reservations_and_holds_are_listed():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    ledger.reserve(B, 2, 2, 100)
    ledger.hold_memory(7, A, 10)
    assert (ledger.get_reserved_requests(), ledger.get_holders()) == ({1, 2}, {7})
    assert (ledger.find_hold_node(7), ledger.find_hold_node(8)) == (A, None)
    assert ledger.get_unacknowledged_bytes(A) == 110


def turn(node: NodeId, model: str = "new", leaving: frozenset[str] = frozenset({"old", "idle"})) -> SwapTurn:
    return SwapTurn(node, "studio", model, leaving, request=1, began=0.0)


@pytest.mark.parametrize(
    ("model", "loaded", "barred"),
    [
        ("new", False, False),
        ("new", True, False),
        ("old", True, True),
        ("old", False, True),
        ("third", False, True),
        ("other", True, False),
    ],
)
def test_a_swap_bars_the_models_in_the_way_and_all_that_are_not_loaded(model: str, loaded: bool, barred: bool):
    assert turn(A).is_barred(model, loaded) is barred
    assert turn(A, leaving=frozenset({"new"})).is_barred("new", loaded) is False


def test_swap_names_unloaded_and_loaded_models():
    assert turn(A).models == "idle, old -> new"


def test_a_forgotten_node_leaves_no_account_hold_or_swap():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    ledger.release(1)
    kept = ledger.get_account(A)
    ledger.hold_memory(7, A, 10)
    ledger.hold_memory(8, B, 20)
    ledger.turns[A] = turn(A)
    ledger.remove_node(A)
    assert ledger.get_account(A) is not kept
    assert (ledger.find_hold_node(7), ledger.find_hold_node(8)) == (None, B)
    assert A not in ledger.turns


def test_a_node_with_requests_under_way_keeps_its_account_until_they_end():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100)
    ledger.remove_node(A)
    assert (ledger.count_in_flight(A), ledger.get_unacknowledged_bytes(A)) == (1, 100)
    assert ledger.release(1)
    assert ledger.empty


def test_a_ledger_is_empty_only_without_reservations_holds_and_swaps():
    ledger = ReservationLedger()
    assert ledger.empty
    ledger.turns[A] = turn(A)
    assert not ledger.empty
    ledger.turns.clear()
    ledger.hold_memory(7, A, 0)
    assert not ledger.empty
    ledger.drop_hold(7)
    ledger.reserve(A, 1, 1, 0)
    assert not ledger.empty
    ledger.release(1)
    assert ledger.empty


@pytest.mark.parametrize("field", ["need", "tokens"])
def test_an_account_with_a_remainder_is_not_empty(field: str):
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 5)
    ledger.release(1)
    setattr(ledger.get_account(A), field, 1)
    assert not ledger.empty
    setattr(ledger.get_account(A), field, 0)
    ledger.get_account(A).pending_prefills[9] = Reservation(A, 0, 0, 0)
    assert not ledger.empty


def _swap(account: NodeReservations) -> None:
    account.requests.symmetric_difference_update({1, 9})


DAMAGES: dict[str, Callable[[NodeReservations], object]] = {
    "a request too many": lambda account: account.requests.add(9),
    "a request too few": lambda account: account.requests.discard(1),
    "another request": _swap,
    "a promise too many": lambda account: account.open_requests.add(9),
    "a promise too few": lambda account: account.open_requests.discard(1),
    "a row": lambda account: setattr(account, "rows", account.rows + 1),
    "a prompt of another request": lambda account: account.pending_prefills.update({9: Reservation(A, 0, 0, 0)}),
    "a token of a prompt": lambda account: setattr(account, "pending_tokens", account.pending_tokens + 1),
    "a byte": lambda account: setattr(account, "need", account.need + 1),
    "a token": lambda account: setattr(account, "tokens", account.tokens + 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_finds_every_difference_between_an_account_and_its_reservations(damage: str):
    ledger = ReservationLedger()
    ledger.reserve(A, 1, 1, 100, tokens=7)
    ledger.reserve(B, 2, 2, 100, tokens=7)
    ledger.check()
    DAMAGES[damage](ledger.get_account(A))
    with pytest.raises(LedgerError, match="a:"):
        ledger.check()


def test_the_first_token_shows_that_the_node_has_committed_the_memory():
    ledger = ReservationLedger()
    ledger.reserve(A, 1, seq=1, need=100, tokens=7)
    ledger.mark_first_token(1)
    assert ledger.get_account(A).pending_prefills == {}
    ledger.acknowledge(A, 1)
    assert ledger.get_unacknowledged_bytes(A) == 0


def test_a_swap_holds_memory_for_its_request_until_its_end():
    ledger = ReservationLedger()
    ledger.hold_memory(9, A, 50)
    ledger.begin_turn(turn(A), 300)
    assert (ledger.turns, ledger.holds) == ({A: turn(A)}, {1: (A, 300)})
    ledger.end_turn(turn(A))
    assert ledger.empty
    with pytest.raises(KeyError):
        ledger.end_turn(turn(A))
