from pathlib import Path

import pytest

from tests.sim.requests import play
from tests.sim.script import check_script

SCENARIOS = sorted(Path(__file__).parent.glob("request-*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_request_ends_as_written(path: Path) -> None:
    check_script(path, play)


def test_there_are_request_scenarios() -> None:
    assert len(SCENARIOS) >= 10
