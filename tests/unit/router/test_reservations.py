import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.reservations import Ledger, LedgerError
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def test_a_promise_counts_until_the_report_contains_it():
    ledger = Ledger()
    ledger.claim(A, 1, seq=10, need=100, tokens=7)
    assert (ledger.unacknowledged(A), ledger.unacknowledged_tokens(A), ledger.in_flight(A)) == (100, 7, 1)
    ledger.acknowledge(A, 10)
    assert ledger.unacknowledged(A) == 100, "not admitted yet: a later seq may have been committed first"
    ledger.admitted(1)
    ledger.acknowledge(A, 9)
    assert ledger.unacknowledged(A) == 100
    ledger.acknowledge(A, 10)
    assert (ledger.unacknowledged(A), ledger.unacknowledged_tokens(A), ledger.in_flight(A)) == (0, 0, 1)
    assert ledger.release(1)
    assert ledger.in_flight(A) == 0
    assert ledger.empty


def test_a_promise_is_freed_exactly_once():
    ledger = Ledger()
    ledger.claim(A, 1, 1, 100)
    ledger.claim(A, 2, 2, 50)
    assert ledger.release(1)
    assert not ledger.release(1)
    assert not ledger.release(99)
    assert ledger.unacknowledged(A) == 50


def test_two_promises_for_one_request_are_a_bug():
    ledger = Ledger()
    ledger.claim(A, 1, 1, 100)
    with pytest.raises(LedgerError):
        ledger.claim(B, 1, 2, 100)


def test_a_hold_counts_for_all_but_its_owner():
    ledger = Ledger()
    ledger.hold(7, A, 300)
    assert (ledger.unacknowledged(A), ledger.unacknowledged(A, 7), ledger.unacknowledged(B)) == (300, 0, 0)
    ledger.hold(7, B, 200)
    assert (ledger.unacknowledged(A), ledger.unacknowledged(B), ledger.held_on(7)) == (0, 200, B)
    assert (ledger.holder(A), ledger.holder(B)) == (None, 7)
    ledger.drop_hold(7)
    ledger.drop_hold(7)
    assert ledger.empty


class AllOrders(RuleBasedStateMachine):
    """Every event in every order, also those that a broken or lying node causes."""

    @initialize()
    def start(self):
        self.ledger = Ledger()
        self.open: dict[int, NodeId] = {}
        self.next = 1

    @rule(node=st.sampled_from([A, B]), need=st.integers(0, 10**12), tokens=st.integers(0, 10**6))
    def claim(self, node, need, tokens):
        self.ledger.claim(node, self.next, self.next, need, tokens, seconds=tokens / 100, rows=1 + need % 3)
        self.open[self.next] = node
        self.next += 1

    @rule(request=st.integers(0, 12))
    def admit(self, request):
        self.ledger.admitted(request)

    @rule(request=st.integers(0, 12))
    def read(self, request):
        self.ledger.read(request)
        assert not any(request in self.ledger.account(node).unread for node in (A, B))

    @rule(node=st.sampled_from([A, B]), acked=st.integers(-1, 15))
    def report(self, node, acked):
        self.ledger.acknowledge(node, acked)

    @rule(request=st.integers(0, 12))
    def end(self, request):
        assert self.ledger.release(request) == (self.open.pop(request, None) is not None)

    @rule(waiting=st.integers(1, 3), node=st.sampled_from([A, B]))
    def hold(self, waiting, node):
        self.ledger.hold(waiting, node, 5)

    @rule(waiting=st.integers(1, 3))
    def drop(self, waiting):
        self.ledger.drop_hold(waiting)

    @invariant()
    def balanced(self):
        self.ledger.check()
        for node in (A, B):
            assert self.ledger.in_flight(node) == list(self.open.values()).count(node)
            assert self.ledger.unacknowledged(node) >= 0

    def teardown(self):
        for request in list(self.open):
            assert self.ledger.release(request)
        for waiting in (1, 2, 3):
            self.ledger.drop_hold(waiting)
        self.ledger.check()
        assert self.ledger.empty
        assert self.ledger.unacknowledged(A) == self.ledger.unacknowledged(B) == 0
        assert self.ledger.rows(A) == self.ledger.rows(B) == 0


AllOrders.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAllOrders = AllOrders.TestCase


@given(st.permutations(["admitted", "acknowledged", "released"]))
def test_whatever_comes_first_the_ledger_returns_to_zero(order: list[str]):
    ledger = Ledger()
    ledger.claim(A, 1, 5, 100, 10)
    steps = {
        "admitted": lambda: ledger.admitted(1),
        "acknowledged": lambda: ledger.acknowledge(A, 5),
        "released": lambda: ledger.release(1),
    }
    for step in order:
        steps[step]()
        ledger.check()
    assert ledger.empty


def test_weights_are_taken_off_a_promise_once_and_never_after_it_is_settled():
    ledger = Ledger()
    ledger.claim(NodeId("a"), 1, 1, 100, weights=60)
    ledger.read_in(1)
    ledger.read_in(1)
    ledger.read_in(2)
    assert ledger.unacknowledged(NodeId("a")) == 40
    ledger.admitted(1)
    ledger.acknowledge(NodeId("a"), 1)
    ledger.read_in(1)
    ledger.check()
    assert ledger.release(1)
    ledger.claim(NodeId("a"), 3, 2, 100, weights=60)
    ledger.admitted(3)
    ledger.acknowledge(NodeId("a"), 2)
    ledger.read_in(3)
    assert ledger.unacknowledged(NodeId("a")) == 0
    ledger.check()
    assert ledger.release(3)
    assert ledger.empty
