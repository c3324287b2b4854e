"""Every process of the chain that makes a video is killed, in one phase of a job after the other.

The table that is printed is the one of docs/video.md; `python -m tests.bench video` fills all of it.
"""

import os

import pytest

from tests.support.chain import PHASES, chain, expected, table
from tests.support.processes import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PORTS = 23000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
BACK = 2.0 + 3.0
"""Seconds until the memory is back, with what a busy machine may add; at rest it is below 2 s."""
CELLS = {
    "node": (
        ("worker", "loading"), ("worker", "saving"), ("actor", "loading"), ("actor", "denoising"), ("actor", "saving"),
        ("raylet", "denoising"), ("engine", "acquiring"), ("agent", "saving"), ("launcher", "loading"),
        ("engine", "denoising"), ("agent", "pulling"), ("launcher", "acquiring"), ("agent", "queued"),
    ),
    "coordinator": (
        ("broker", "denoising"), ("coordinator", "denoising"), ("gcs_server", "denoising"), ("coordinator", "pulling"),
        ("head's launcher", "loading"), ("coordinator", "acquiring"), ("broker", "acquiring"),
        ("head's raylet", "saving"),
    ),
}  # fmt: skip
"""Those that cost no minutes. Whoever waits twice as long each time before it starts a process again (broker and head,
whose end is the broker's, too; Ray and engine on a node) is itself killed in between."""


@pytest.mark.parametrize("side", CELLS)
def test_whoever_is_killed_and_whenever_the_memory_is_back(
    cluster_pool: Pool, side: str, capsys: pytest.CaptureFixture[str]
):
    with chain(cluster_pool, PORTS) as one:
        outcomes = [one.kill(victim, phase) for victim, phase in CELLS[side]]
        assert one.chats()
    with capsys.disabled():
        print("\n" + table(outcomes))
    assert {phase for _, phase in CELLS[side]} <= set(PHASES)
    for outcome in outcomes:
        assert outcome.end == expected(outcome.victim, outcome.phase), outcome
        assert outcome.back is None or outcome.back < BACK, outcome
