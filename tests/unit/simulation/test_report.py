import math

from hypothesis import given
from hypothesis import strategies as st

from simulation.report import compute_fair_shares, compute_quantile

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
