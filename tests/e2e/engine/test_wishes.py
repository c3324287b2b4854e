"""Power cycles of a pool with wishes: real nodes with MLX engines load the wanted models again, and none twice."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import MLX, api, greets, link, loaded
from tests.support.processes import Pool, pool, until

pytestmark = pytest.mark.slow

WANTED, SINGLE, OTHER = "wanted", "single", "other"
NODES = ("studio", "mini")


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    """Start two nodes with three models each, none of them loaded."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        link(Path(folder) / "models", **dict.fromkeys((WANTED, SINGLE, OTHER), EMBEDDED))
        made.up()
        for name in NODES:
            join(made, name)
        yield made


def join(made: Pool, name: str) -> None:
    made.join(name, *MLX, f"models.folders={made.folder / 'models'}")


def list_loads(made: Pool) -> Counter[tuple[str, str]]:
    """Return how often each node loaded each model for a wish, by the coordinator's log of all its starts."""
    lines = (made.state / "logs" / "coordinator.log").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return Counter((one["node"], one["model"]) for one in found if one.get("event") == "wish loads")


def is_met(made: Pool) -> bool:
    plan = made.get("/api/v1/models/plan")
    rows = plan["wishes"]
    return len(rows) == 2 and all(row["met"] for row in rows) and not plan["running"] and not plan["next"]


def settle(made: Pool) -> None:
    """Wait until both wishes are met, and no action is left."""
    until(lambda: is_met(made), 120, "both wishes met")


def start_again(made: Pool) -> None:
    """Start the coordinator with the addresses that its nodes know."""
    port = int(made.facts["cluster_url"].rpartition(":")[2])
    made.up(cluster_listen=f"127.0.0.1:{port}")


@pytest.mark.nightly
def test_wanted_models_are_loaded_and_again_after_every_power_cycle(two: Pool):
    """CI has a wish of a real pool in tests/browser/test_models_view.py, and the rules of restarts:

    - `tests/unit/coordinator/models/test_reconciler.py::test_a_node_that_returns_without_its_replica_loads_it_again`
    - `tests/unit/coordinator/models/test_reconciler.py`
    - `tests/unit/coordinator/models/test_wish_runner.py::test_a_wish_is_kept_by_the_database`
    """
    two.cli("model", "want", WANTED, "--replicas", "2")
    two.cli("model", "want", SINGLE, "--deny", "mini")
    settle(two)
    expected = Counter({("studio", WANTED): 1, ("mini", WANTED): 1, ("studio", SINGLE): 1})
    assert list_loads(two) == expected
    assert {name: loaded(two, name) for name in NODES} == {"studio": {WANTED, SINGLE}, "mini": {WANTED}}
    assert greets(api(two), WANTED)

    two.nodes["studio"].kill()
    until(lambda: two.node("studio")["state"] == "lost", what="studio is lost")
    join(two, "studio")
    settle(two)
    expected += Counter({("studio", WANTED): 1, ("studio", SINGLE): 1})
    assert list_loads(two) == expected, "one node"

    assert two.coordinator is not None
    two.coordinator.kill()
    start_again(two)
    settle(two)
    assert list_loads(two) == expected, "the coordinator: its nodes have kept their models"

    for process in (two.coordinator, *two.nodes.values()):
        process.kill()
    start_again(two)
    for name in NODES:
        join(two, name)
    settle(two)
    expected += Counter({("studio", WANTED): 1, ("mini", WANTED): 1, ("studio", SINGLE): 1})
    assert list_loads(two) == expected, "all machines"
    assert all(OTHER not in loaded(two, name) for name in NODES)

    shown = two.run("model", "plan", "--state", str(two.state)).stdout.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["MODEL", "WANTED", "READY"],
        [SINGLE, "1", "1"],
        [WANTED, "2", "2"],
    ]
