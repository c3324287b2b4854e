"""Both tiers of the prefix cache at their limits, with a full queue: a short run of `tests.bench tiers`."""

import asyncio
from pathlib import Path

import pytest

from tests.bench.engine.tiers import TierRun, measure_rest, run_tiers
from tests.bench.engine.torture import lay_out

pytestmark = pytest.mark.slow

SECONDS = 60.0
"""Maximum seconds until requests have waited, rows have returned, and files were evicted and restored."""


@pytest.mark.nightly
def test_at_the_limits_of_both_tiers_no_sample_is_over_the_cap_and_no_request_is_lost(tmp_path: Path):
    """CI has these tests of both tiers:

    - `tests/unit/node/engine/scheduling/disk/test_disk_tier.py::test_a_preempted_row_returns_from_the_disk`
    - `tests/unit/node/engine/scheduling/disk/test_disk_tier.py`
    - `tests/unit/node/engine/memory/test_pressure.py`
    """
    lay_out(tmp_path)

    async def run() -> TierRun:
        return await run_tiers(tmp_path, await measure_rest(tmp_path), SECONDS, until_complete=True)

    seen = asyncio.run(run())
    assert seen.is_at_limits(), seen.describe()
    assert (seen.over, seen.restarts, seen.lost) == (0, 0, 0), seen.describe()
