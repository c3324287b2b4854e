"""Interval of the dispatcher's sweeps."""

import pytest

from router.admission.cache_scope import CacheScopes
from router.admission.rate_limits import RateLimits
from router.dispatch.counters import Counters
from router.dispatch.parts.composition import SWEEP_INTERVAL_SECONDS, Surroundings
from router.placement.policies import POLICIES
from router.settings import RouterSettings


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (RouterSettings(), SWEEP_INTERVAL_SECONDS),
        (RouterSettings(queue_timeout_seconds=0.5), 0.125),
        (RouterSettings(keepalive_seconds=0.25), 0.0625),
        (RouterSettings(slow_client_seconds=0.5), 0.125),
    ],
)
def test_a_limit_is_checked_four_times_before_it_passes(settings: RouterSettings, seconds: float) -> None:
    surroundings = Surroundings(
        send=lambda *_: True,
        numbers=lambda: (1, 1),
        clock=lambda: 0.0,
        draw=lambda: 0.5,
        settings=settings,
        counters=Counters(),
        quotas=RateLimits(),
        scopes=CacheScopes(),
        policy=POLICIES[settings.policy],
        on_failure=lambda *_: None,
    )
    assert surroundings.interval == seconds
