from pathlib import Path

import pytest

from tests.sim.membership import play
from tests.sim.script import check_script

SCENARIOS = sorted(Path(__file__).parent.glob("membership-*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_ends_as_written(path: Path) -> None:
    check_script(path, play)


def test_there_are_stories() -> None:
    assert len(SCENARIOS) >= 9
