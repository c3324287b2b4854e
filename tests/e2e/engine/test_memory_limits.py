"""The cap of a real node: valid settings, and enforcement from outside the engine."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.effort import thin_cases
from tests.support.cluster.engine_pool import api
from tests.support.processes import Pool, environment, until
from wire.units import GIB

pytestmark = pytest.mark.slow


IMPOSSIBLE = (
    (["memory.cap=0"], ["memory.cap", "cannot be 0", "memory.guard"]),
    (["memory.cap=64GiB", "memory.tier=safe"], ["memory.tier", "contradicts", "memory.cap = 64GiB", "remove"]),
    (["memory.cap=-5GiB"], ["memory.cap", "is not a size"]),
    (
        ["memory.cap=110GiB"],
        ["memory.cap", "above the Metal limit of 107.5 GiB", "sysctl", "memory.allow_above_metal_limit"],
    ),
    (["memory.cap=200GiB"], ["memory.cap", "more than the RAM of 128.0 GiB"]),
    (["memory.tier=custom"], ["memory.tier", "custom needs memory.cap"]),
    (["memory.margin=-1"], ["memory.margin", "is not a size"]),
    (["memory.guard=maybe"], ["memory.guard", "on, off"]),
)


@pytest.mark.parametrize(
    ("settings", "words"),
    thin_cases(IMPOSSIBLE, 3, kept=2),
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
    assert done.stderr.startswith("Error: ")
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "node" / "identity").exists()


@pytest.mark.nightly
def test_the_limit_that_the_device_reports_becomes_the_cap_and_a_later_start_begins_with_it(cluster_pool: Pool) -> None:
    """CI has these tests:

    - `tests/unit/node/memory/test_limits.py`
    - `tests/unit/node/memory/test_cap.py`
    """
    cluster_pool.up()
    process = cluster_pool.join("studio", "engine.scripted.metal=40GiB")
    until(lambda: cluster_pool.node("studio")["cap"] == 40 * GIB, what="the reported limit as the cap")
    node = cluster_pool.node("studio")
    assert (node["cap_bound_by"], node["bound_by"], node["gate_armed"]) == ("metal", "metal", True)
    assert node["engine"]["wired"] == 0
    kept = cluster_pool.folder / "studio" / "node" / "metal.json"
    assert json.loads(kept.read_text())["limit"] == 40 * GIB
    assert kept.stat().st_mode & 0o777 == 0o600
    examine = [sys.executable, "-m", "node.inspect.report", "--state", str(cluster_pool.folder / "studio")]
    seen = json.loads(subprocess.run(examine, capture_output=True, env=environment(), check=True, timeout=30).stdout)
    assert (seen["memory"]["cap"], seen["memory"]["metal_reported"]) == (40 * GIB, True)
    assert process.stop() == 0
    again = cluster_pool.join("studio", "memory.cap=44GiB", wait=False)
    assert again.popen.wait(30) == 2, "this machine cannot give it, as is known from the start now"
    assert "above the Metal limit of 40.0 GiB" in again.log.read_text()
    cluster_pool.join("studio", "memory.cap=44GiB", "engine.scripted.memory=64GiB", "engine.scripted.metal=40GiB")
    until(lambda: cluster_pool.node("studio")["cap"] == 40 * GIB, what="the lower limit")
    danger = "memory.cap is 44.0 GiB, above the Metal limit of 40.0 GiB: the lower value is used"
    assert danger in cluster_pool.node("studio")["enforcement"]["warnings"], "another machine's figure is ignored"


def test_a_margin_as_large_as_the_cap_is_reported_everywhere_with_sizes(cluster_pool: Pool) -> None:
    cluster_pool.up()
    cluster_pool.join("tight", "memory.cap=8GiB", "memory.margin=9GiB")
    until(lambda: cluster_pool.get("/api/v1/status")["dangers"], what="a warning")
    status = cluster_pool.cli("status")
    assert any("memory.margin is as large as the cap of 8.0 GiB" in danger for danger in status["dangers"])
    assert any("raise memory.cap or lower memory.margin" in warning for warning in status["warnings"])
    assert "is as large as the cap of 8.0 GiB" in cluster_pool.nodes["tight"].log.read_text()


def test_an_engine_over_its_cap_is_ended_only_when_it_does_not_answer(cluster_pool: Pool) -> None:
    """A cap of 16 MiB is less than any Python process uses. The agent reads the engine over its cap from the first poll
    on."""
    cluster_pool.up()
    process = cluster_pool.join("small", "memory.cap=16MiB", "memory.margin=1MiB")

    def enforcement() -> dict[str, object]:
        return cluster_pool.node("small").get("enforcement", {})

    until(lambda: enforcement().get("level") == "over_hard", what="seen over its cap")
    polls = int(str(enforcement()["polls"]))
    until(lambda: int(str(enforcement()["polls"])) > polls + 8, what="more polls")
    assert (enforcement()["kills"], cluster_pool.node("small")["engine"]["restarts"]) == (0, 0), "it answers"
    assert any("over its cap of 16.0 MiB" in danger for danger in cluster_pool.cli("status")["dangers"])
    engine = process.engine
    engine.suspend()
    begun = time.monotonic()
    until(lambda: not engine.is_running() or engine.pid not in [one.pid for one in process.children()], what="its end")
    assert time.monotonic() - begun < 8, "it was asked, and terminated, and killed"
    until(lambda: cluster_pool.node("small")["engine"]["restarts"] == 1, what="a restart")
    cause = cluster_pool.node("small")["engine"]["cause"]
    assert cause.startswith("over its cap: ")
    assert cause.endswith(" of 16.0 MiB in two readings, without an answer of the engine")
    assert enforcement()["kills"] == 1


class Readings:
    """Memory readings of a node's pretended machine, in bytes."""

    def __init__(self, file: Path, **sizes: int | None) -> None:
        self.file = file
        self.read(**sizes)

    def read(self, **sizes: int | None) -> None:
        """Set the readings."""
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(sizes))
        beside.replace(self.file)


@pytest.mark.nightly
def test_a_sensor_that_fails_for_a_moment_or_for_long_ends_nothing_and_evicts_nothing(
    cluster_pool: Pool, tmp_path: Path
) -> None:
    """CI has these tests:

    - `tests/unit/node/engine/memory/test_unreadable.py`
    - `tests/unit/node/memory/test_poll.py`
    """
    readings = Readings(tmp_path / "readings", reclaimable=60 * GIB)
    cluster_pool.up("router.queue_timeout_seconds=1")
    cluster_pool.join(
        "blind",
        f"engine.scripted.readings={readings.file}",
        "engine.scripted.step_ms=50",
        "node.report_idle_seconds=0.5",
    )
    client = api(cluster_pool)

    def node() -> dict[str, Any]:
        return cluster_pool.node("blind")

    def polls() -> int:
        return node()["enforcement"]["polls"]

    def ask(tokens: int, *, stream: bool = False) -> Any:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        return client.chat.completions.create(model="scripted-1", messages=messages, max_tokens=tokens, stream=stream)

    until(lambda: node()["bound_by"] == "dynamic", what="the system's memory binds")
    ceiling = node()["ceiling"]
    assert 60 * GIB <= ceiling < 61 * GIB

    before = polls()
    readings.read(reclaimable=None)
    until(lambda: polls() >= before + 2, what="a look that failed")
    assert abs(node()["ceiling"] - ceiling) < GIB
    readings.read(reclaimable=60 * GIB)
    assert ask(4).usage.completion_tokens == 4

    running = ask(400, stream=True)
    next(running)
    readings.read(reclaimable=None)
    until(lambda: node()["bound_by"] == "unreadable", what="unknown by now")
    with pytest.raises(openai.InternalServerError) as caught:
        ask(4)
    assert (caught.value.status_code, caught.value.code) == (503, "memory_unreadable")
    rest = list(running)
    assert rest[-1].choices[0].finish_reason == "length", "what ran was not disturbed"
    readings.read(reclaimable=60 * GIB)
    until(lambda: node()["bound_by"] == "dynamic", what="it can be read again")
    assert ask(4).usage.completion_tokens == 4
    enforced = node()["enforcement"]
    assert (enforced["kills"], enforced["over_caps"], node()["engine"]["restarts"]) == (0, 0, 0)


def test_wired_memory_of_ended_engines_is_reported_everywhere(cluster_pool: Pool, tmp_path: Path) -> None:
    """After the first leak the engine starts again. After the second none is started, because each would have less
    memory."""
    readings = Readings(tmp_path / "readings", wired=3 * GIB)
    cluster_pool.up()
    process = cluster_pool.join(
        "leaky",
        f"engine.scripted.readings={readings.file}",
        "engine.scripted.weights=20GiB",
        "node.report_idle_seconds=0.5",
    )

    def engine() -> dict[str, Any]:
        return cluster_pool.node("leaky")["engine"]

    for leak in (1, 2):
        readings.read(wired=(3 + 20 * leak) * GIB)
        process.engine.kill()
        until(lambda leak=leak: engine()["leaked"] == 20 * leak * GIB, what="the leak")
        if leak == 1:
            until(lambda: cluster_pool.serves("leaky"), what="another engine")
    until(lambda: engine()["state"] == "failed", what="no third")
    assert process.children() == []
    status = cluster_pool.cli("status")
    said = (
        "leaky: 40.0 GiB of ended engines stayed wired (this Mac had 23.0 GiB wired before the last one started and has"
    )
    assert any(danger.startswith(said) and "restart this Mac" in danger for danger in status["dangers"])
    assert any("its engine is failed: the engine is not restarted" in warning for warning in status["warnings"])
    until(lambda: "WiredLeak" in {one["name"] for one in cluster_pool.get("/api/v1/conditions")["conditions"]})
    assert "wired memory lost" in (cluster_pool.folder / "leaky" / "logs" / "node.log").read_text()
