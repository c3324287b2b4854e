"""Course of a simulated request: its tries, its first token, and the refusal of its first try."""

from router.dispatch.request import RequestFailure
from simulation.outcomes import RequestOutcome
from simulation.workload import ConversationTurn

TURN = ConversationTurn("r0", "key", "chat", 100, 10, 400, None, 0.0)


def test_a_request_was_sent_with_its_last_try_before_the_first_token():
    outcome = RequestOutcome(TURN, 1.0, True)
    outcome.record_try("a", 2.0)
    outcome.record_try("b", 3.0)
    assert outcome.sent == 3.0
    assert (outcome.record_token(4.0), outcome.record_token(5.0), outcome.first) == (True, False, 4.0)
    outcome.record_try("c", 6.0)
    assert (outcome.sent, outcome.tries, outcome.nodes) == (3.0, 3, ["a", "b", "c"])


def test_only_the_refusal_of_the_first_try_counts_as_one_at_the_first_try():
    later, first = RequestOutcome(TURN, 1.0, True), RequestOutcome(TURN, 1.0, True)
    for outcome in (first, later):
        outcome.record_try("a", 2.0)
    first.record_refusal()
    for outcome in (first, later):
        outcome.record_try("b", 3.0)
        outcome.record_refusal()
    assert (first.first_refused, later.first_refused) == (True, False)


def test_a_failed_request_is_not_served():
    outcome = RequestOutcome(TURN, 1.0, True)
    outcome.record_end(RequestFailure("node_lost", "it is gone"), 9.0)
    assert (outcome.served, outcome.ended) == (False, 9.0)
