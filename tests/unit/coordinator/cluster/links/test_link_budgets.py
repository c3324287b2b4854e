"""Rate limits of a node for frames, reports, renewals, queries and links."""

from collections.abc import Callable

import pytest

from coordinator.cluster.links.link_budgets import (
    FRAMES_BURST,
    FRAMES_PER_SECOND,
    LINKS_BURST,
    LINKS_PER_SECOND,
    LOGGED_BURST,
    LOGGED_PER_SECOND,
    PROGRESS_BURST,
    PROGRESS_PER_SECOND,
    QUERIES_BURST,
    QUERIES_PER_SECOND,
    RENEWALS_BURST,
    RENEWALS_PER_SECOND,
    REPORT_BYTES_BURST,
    REPORT_BYTES_PER_SECOND,
    REPORTS_BURST,
    REPORTS_PER_SECOND,
    LinkBudget,
    NodeBudgets,
)
from wire.frames import (
    TAGS,
    Deltas,
    Goodbye,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    ModelOrderEnded,
    ModelOrderProgress,
    RenewCertificate,
    Report,
)

TAG_OF = {kind: tag for tag, kind in TAGS.items()}
NOW = 1000.0


def test_a_budget_is_filled_with_its_rate_up_to_its_burst():
    budget = LinkBudget("frames", 2.0, 4.0)
    assert [budget.charge(NOW) for _ in range(4)] == [""] * 4
    for _ in range(3):
        assert budget.charge(NOW) == "too many frames: 2 a second, 4 at once", "a refused frame costs nothing"
    assert budget.charge(NOW + 0.5) == ""
    assert budget.charge(NOW + 0.5) != ""
    assert budget.charge(NOW + 100.0, 5.0) != ""
    assert budget.charge(NOW + 100.0, 4.0) == ""
    assert budget.charge(NOW + 100.0, 0.5) != ""


def frame(kind: type, size: int = 10) -> Callable[[NodeBudgets, float], str]:
    return lambda budgets, now: budgets.charge_frame(TAG_OF[kind], size, now)


@pytest.mark.parametrize(
    ("charge", "rate", "burst"),
    [
        (frame(Deltas), FRAMES_PER_SECOND, FRAMES_BURST),
        (frame(Report), REPORTS_PER_SECOND, REPORTS_BURST),
        (frame(RenewCertificate), RENEWALS_PER_SECOND, RENEWALS_BURST),
        (frame(ModelOrderProgress), PROGRESS_PER_SECOND, PROGRESS_BURST),
        *((frame(kind), LOGGED_PER_SECOND, LOGGED_BURST) for kind in (Goodbye, LeaseGranted, LeaseRefused)),
        *((frame(kind), LOGGED_PER_SECOND, LOGGED_BURST) for kind in (LeaseEnded, ModelOrderEnded)),
        (NodeBudgets.charge_link, LINKS_PER_SECOND, LINKS_BURST),
        (NodeBudgets.charge_query, QUERIES_PER_SECOND, QUERIES_BURST),
    ],
)
def test_each_kind_has_a_budget_of_its_own(charge: Callable[[NodeBudgets, float], str], rate: float, burst: float):
    budgets = NodeBudgets()
    assert {charge(budgets, NOW) for _ in range(int(burst))} == {""}
    why = charge(budgets, NOW)
    assert why.endswith(f": {rate:g} a second, {burst:g} at once")
    others = [
        one(budgets, NOW)
        for one in (frame(Report), frame(RenewCertificate), frame(Goodbye), frame(ModelOrderProgress))
        if "too many frames" not in why
    ]
    others += [budgets.charge_link(NOW), budgets.charge_query(NOW)]
    assert {text for text in others if text} <= {why}
    assert charge(budgets, NOW + 1 / rate + 1e-6) == ""


def test_reports_are_limited_by_their_bytes_too():
    budgets, size = NodeBudgets(), int(REPORT_BYTES_BURST / 4)
    charge = frame(Report, size)
    assert [charge(budgets, NOW) for _ in range(4)] == [""] * 4
    assert charge(budgets, NOW).startswith("too many bytes of reports: ")
    assert charge(budgets, NOW + size / REPORT_BYTES_PER_SECOND) == ""


def test_every_frame_counts_towards_all_frames():
    budgets = NodeBudgets()
    charges = [frame(kind) for kind in (Report, RenewCertificate, Goodbye, ModelOrderProgress)]
    assert [charge(budgets, NOW) for charge in charges] == [""] * 4
    assert {frame(Deltas)(budgets, NOW) for _ in range(int(FRAMES_BURST) - 4)} == {""}
    assert all(charge(budgets, NOW).startswith("too many frames: ") for charge in charges)
