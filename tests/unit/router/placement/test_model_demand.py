"""Recent demand for models."""

import pytest

from router.placement.model_demand import HALF_LIFE_SECONDS, MAX_MODELS, ModelDemand

NOW = 1000.0


def demand(**counts: int) -> ModelDemand:
    made = ModelDemand()
    for model, count in counts.items():
        for _ in range(count):
            made.record_request(model, NOW)
    return made


def test_demand_halves_within_its_half_life_and_adds_up():
    made = demand(hot=4)
    now = made.compute_rates(NOW)["hot"]
    assert made.compute_rates(NOW + HALF_LIFE_SECONDS)["hot"] == pytest.approx(now / 2)
    made.record_request("hot", NOW + HALF_LIFE_SECONDS)
    assert made.compute_rates(NOW + HALF_LIFE_SECONDS)["hot"] == pytest.approx(now * 3 / 4)


def test_steady_requests_have_the_rate_at_which_they_arrive():
    made = ModelDemand()
    for second in range(0, 10_000, 20):
        made.record_request("m", float(second))
    assert made.compute_rates(9_990.0)["m"] == pytest.approx(0.05, rel=0.05)


def test_the_models_of_made_up_names_are_bounded():
    made = demand(hot=3)
    for at in range(2 * MAX_MODELS):
        made.record_request(f"m{at}", NOW)
    rates = made.compute_rates(NOW)
    assert len(rates) == MAX_MODELS
    assert "hot" in rates
