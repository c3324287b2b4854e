"""Who takes over what waits elsewhere. A request is sent at once wherever it fits, so a batch may stand on one machine
when another one joins, wakes up, or has done sooner than was expected; this lets that one have a part of it.

A node has its hands free when it has read every prompt that it was given and has a row for one more. Then what waits on
other nodes and of which no word was heard may begin anew there, the oldest first, each once. It must be worth it, for
what was read of its prompt is lost: where it is it would wait TIMES as long as where it goes, and SOONER more
(simulated: a batch of 70 of which a second Mac finds half waiting is done after 4.5 minutes instead of 8; the waits of
a household and of a lab, where nobody joins, stay as they are).
"""

from collections.abc import Iterable

from router.dispatch.request import Ticket
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import BESIDE_ROWS, Candidate
from router.placement.reservations import Ledger

SOONER = 5.0
"""Seconds that a request must gain at least, and must have waited."""
TIMES = 3
"""The expected times are no surer than that (simulated: 2 lets the slowest wait longer where machines come and go)."""
MOST, MANY, FEW = 64, 256, 16
"""Requests that are judged in one go, of so many that are looked at, and nodes that may take one over: in a large
cluster there are more of each, later."""


def helpers(view: ClusterView, ledger: Ledger) -> dict[str, ClusterView]:
    """Give the nodes that have their hands free, by the models that they have, FEW of each."""
    found: dict[str, list[NodeView]] = {}
    for node in view.nodes:
        if _free(node, ledger):
            for name in node.models:
                found.setdefault(name, []).append(node)
    return {name: ClusterView(tuple(nodes[:FEW])) for name, nodes in found.items()}


def _free(node: NodeView, ledger: Ledger) -> bool:
    engine, account = node.engine, ledger.account(node.id)
    if node.state != "ready" or engine.waiting or engine.queued_tokens or account.unread:
        return False
    return not engine.rows or account.rows < engine.rows


def waiting(tickets: Iterable[Ticket], now: float) -> list[Ticket]:
    """List those that wait on a node for their first word and were sent to no other before, the oldest first."""
    found = [one for one in tickets if one.first_at is None and one.attempts == 1 and now - one.arrived > SOONER]
    return sorted(found, key=lambda one: one.number)[:MANY]


def behind(here: Candidate) -> float:
    """Give the seconds that a request waits where it is. It was judged as if it came now, so its own prompt is counted
    twice, as its own and as one in front of it."""
    return here.expected_ttft - BESIDE_ROWS * here.reading / here.model.prefill_speed if here.model else 0.0


def worth(here: Candidate, there: Candidate) -> bool:
    """Whether a request is better off `there`."""
    return behind(here) > TIMES * there.expected_ttft + SOONER
