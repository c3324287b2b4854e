import os
from pathlib import Path

import pytest

from tests.sim.membership import play

SCENARIOS = sorted(Path(__file__).parent.glob("membership-*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_ends_as_written(path: Path) -> None:
    script = path.read_text()
    outcome = play(script)
    if os.environ.get("MACPOOL_REWRITE"):
        path.write_text(outcome)
    assert outcome == script


def test_there_are_stories() -> None:
    assert len(SCENARIOS) >= 9
