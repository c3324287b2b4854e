"""The cap of a real node: what a person may set, and what holds an engine to it from outside."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import Pool, environment, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["memory.cap=0"], ["memory.cap", "never 0", "memory.guard"]),
        (["memory.cap=-5GiB"], ["memory.cap", "is not a size"]),
        (["memory.cap=100GiB"], ["memory.cap", "above the Metal limit of 96.0 GiB", "sysctl", "memory.above_metal"]),
        (["memory.cap=200GiB"], ["memory.cap", "more than the RAM of 128.0 GiB"]),
        (["memory.cap=64GiB", "memory.tier=safe"], ["memory.tier", "contradicts", "memory.cap = 64GiB", "leave"]),
        (["memory.tier=custom"], ["memory.tier", "custom needs memory.cap"]),
        (["memory.margin=-1"], ["memory.margin", "is not a size"]),
        (["memory.guard=maybe"], ["memory.guard", "on, off"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, settings: list[str], words: list[str]
) -> None:
    command = [sys.executable, "-m", "node.run", "--state", str(tmp_path), "--set", "engine.kind=scripted"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "node" / "identity").exists()


def test_a_margin_that_leaves_nothing_is_said_everywhere_with_the_resolved_sizes(cluster_pool: Pool) -> None:
    cluster_pool.up()
    cluster_pool.join("tight", "memory.cap=8GiB", "memory.margin=9GiB")
    until(lambda: cluster_pool.cli("status")["dangers"], what="a warning")
    status = cluster_pool.cli("status")
    assert any("memory.margin leaves nothing of the cap of 8.0 GiB" in danger for danger in status["dangers"])
    assert any("raise memory.cap or lower memory.margin" in warning for warning in status["warnings"])
    assert "leaves nothing of the cap of 8.0 GiB" in cluster_pool.nodes["tight"].log.read_text()


def test_an_engine_over_its_cap_is_ended_only_when_it_does_not_answer(cluster_pool: Pool) -> None:
    """16 MiB are less than any Python process takes, so the agent reads it over its cap from the first poll on."""
    cluster_pool.up()
    process = cluster_pool.join("small", "memory.cap=16MiB", "memory.margin=1MiB")

    def enforcement() -> dict[str, object]:
        return cluster_pool.node("small").get("enforcement", {})

    until(lambda: enforcement().get("level") == "over_hard", what="seen over its cap")
    polls = int(str(enforcement()["polls"]))
    until(lambda: int(str(enforcement()["polls"])) > polls + 8, what="more polls")
    assert (enforcement()["kills"], cluster_pool.node("small")["engine"]["restarts"]) == (0, 0), "it answers"
    assert any("over its cap of 16.0 MiB" in danger for danger in cluster_pool.cli("status")["dangers"])
    (engine,) = process.children()
    engine.suspend()
    begun = time.monotonic()
    until(lambda: not engine.is_running() or engine.pid not in [one.pid for one in process.children()], what="its end")
    assert time.monotonic() - begun < 5
    until(lambda: cluster_pool.node("small")["engine"]["restarts"] == 1, what="a restart")
    cause = cluster_pool.node("small")["engine"]["cause"]
    assert cause.startswith("over its cap: ")
    assert cause.endswith(" of 16.0 MiB on two readings, and it did not answer")
    assert enforcement()["kills"] == 1
