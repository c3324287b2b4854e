"""Who takes over what waits elsewhere. A request is sent at once wherever it fits, so a batch may stand on one machine
when another one joins, wakes up, or has done sooner than was expected; this lets that one have a part of it.

A node has its hands free when it has read every prompt that it was given and has a row for one more. Then what waits on
other nodes and of which no word was heard may begin anew there, the oldest first, each once. It must be worth it, for
what was read of its prompt is lost: as the last one where it is, less what its own prompt takes there, it would wait
TIMES as long as where it goes, and SOONER more. Simulated: a batch of 70 of which a second Mac finds half waiting is
done after 4.5 minutes instead of 8; the slowest hundredth of a lab waits 105 s instead of 116, of a household 104
instead of 107.
"""

from collections.abc import Iterable, Mapping

from router.placement import BESIDE_ROWS, Candidate
from router.reservations import Ledger
from router.ticket import Ticket
from router.view import NodeView
from wire.identity import NodeId

SOONER = 5.0
"""Seconds that a request must gain at least, and must have waited."""
TIMES = 3
"""The expected times are no surer than that (simulated: 2 lets the slowest wait longer where machines come and go)."""
MOST = 16
"""Requests that are moved at once."""


def free(node: NodeView, ledger: Ledger) -> bool:
    """Whether a node has nothing to read and a row for one more."""
    engine, account = node.engine, ledger.account(node.id)
    if node.state != "ready" or engine.waiting or engine.queued_tokens or account.unread:
        return False
    return not engine.rows or account.rows < engine.rows


def waiting(
    tickets: Iterable[Ticket], busy: Mapping[NodeId, NodeView], now: float
) -> list[tuple[Ticket, NodeView]]:  # fmt: skip
    """List those that wait on a busy node for their first word and were sent nowhere before, the oldest first."""
    found = [
        (one, busy[where]) for one in tickets
        if (where := one.node) is not None and where in busy
        and one.first_at is None and one.attempts == 1 and now - one.arrived > SOONER
    ]  # fmt: skip
    return sorted(found, key=lambda one: one[0].number)[:MOST]


def worth(here: Candidate, there: Candidate) -> bool:
    """Whether a request that waits `here`, judged as if it came now, is better off `there`."""
    own = BESIDE_ROWS * here.reading / here.model.prefill_speed if here.model else 0.0
    return here.expected_ttft - own > TIMES * there.expected_ttft + SOONER
