import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.request import RequestFailure
from simulation.report import compute_fair_shares, compute_quantile, compute_statistics, render_table
from tests.unit.simulation.test_routers import ONE_MAC, run

amounts = st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1e6), min_size=1, max_size=8)


@given(amounts, st.floats(0, 1e7))
def test_shares_are_fair(asked: dict[str, float], whole: float):
    shares = compute_fair_shares(asked, whole)
    assert all(shares[key] <= asked[key] + 1e-6 for key in asked)
    assert math.isclose(sum(shares.values()), min(whole, sum(asked.values())), rel_tol=1e-6, abs_tol=1e-3)
    most = max(shares.values())
    assert all(shares[key] >= min(asked[key], most) - 1e-3 for key in asked), (
        "a key with a smaller share had a smaller demand"
    )


def test_quantiles_are_of_those_that_are_there():
    ordered = [float(number) for number in range(1, 101)]
    assert [compute_quantile(ordered, part) for part in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1.0, 50.0, 95.0, 99.0, 100.0]
    assert math.isnan(compute_quantile([], 0.5))


def test_an_answer_that_broke_off_counts_as_never_and_failed():
    event = 'at = 9\ndoes = "lease"\nseconds = 1\nsize = "1MiB"\n'
    pool = run(ONE_MAC.format(seconds=10, prompt=200) + event, "balanced")
    before = compute_statistics("x", pool, 100.0)
    assert (before.served, before.failed, math.isfinite(before.ttft_p99)) == (before.fit, 0, True)
    broken = list(pool.outcomes.values())[-1]
    assert broken.first is not None
    broken.record_end(RequestFailure("node_lost", "it is gone"), 9.0)
    after = compute_statistics("x", pool, 100.0)
    assert (after.served, after.failed, after.ttft_p99, after.whole_p95) == (before.fit - 1, 1, math.inf, math.inf)
    shown = replace(after, first_refused=0.25, ttft_p50=1.234, ratio_p95=math.nan)
    assert render_table([shown]).splitlines()[1].split()[:9] == [
        "x",
        "1.23",
        "never",
        "never",
        "-",
        f"{after.whole_p50:.2f}",
        "never",
        "0",
        "25.00",
    ]
