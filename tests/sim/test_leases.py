import os
from pathlib import Path

import pytest

from tests.sim.leases import play

SCENARIOS = sorted(Path(__file__).parent.glob("lease-*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_lease_ends_as_written(path: Path) -> None:
    script = path.read_text()
    outcome = play(script)
    if os.environ.get("MACPOOL_REWRITE"):
        path.write_text(outcome)
    assert outcome == script


def test_there_are_lease_scenarios() -> None:
    assert len(SCENARIOS) >= 7
