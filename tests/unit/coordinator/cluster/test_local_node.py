"""The supervisor of the coordinator's own node, with real processes."""

import asyncio
import os
from pathlib import Path

import pytest

from coordinator.cluster import local_node
from coordinator.cluster.local_node import (
    LocalNode,
    LocalNodeElsewhereError,
    check_node_cluster,
    compute_restart_delay,
)
from coordinator.state.store_errors import StoreError


@pytest.mark.parametrize("error", [OSError("too many open files"), StoreError("the state could not be written")])
async def test_a_restart_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(local_node, "RESTART_DELAYS_SECONDS", (0.01, 0.02))
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    starts, started_again = 0, asyncio.Event()

    def create_token() -> str:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise error
        if starts == 3:
            started_again.set()
        return "no token"

    (tmp_path / "node").write_text("")  # the program ends at once, because its folder cannot be created
    node = LocalNode(tmp_path, "127.0.0.1:1", ("--set", "engine.kind=scripted"), create_token)
    await node.start()
    try:
        async with asyncio.timeout(30):
            await started_again.wait()
        assert not node.given_up.is_set()
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("identity", "cluster", "words"),
    [
        (None, "c1", None),
        ('{"cluster": "c1", "addresses": ["10.0.0.1:8081"]}', "c1", None),
        (
            '{"cluster": "c2", "addresses": ["10.0.0.1:8081", "10.0.0.2:8081"]}',
            "c1",
            "another cluster at 10.0.0.1:8081:",
        ),
        ('{"cluster": "c2", "addresses": null}', "c1", "another cluster:"),
        ('{"cluster": "c2"}', "", "another cluster:"),
        ('{"addresses": []}', "c1", None),
        ("[]", "c1", None),
        ("{", "c1", None),
    ],
)
def test_a_node_of_another_cluster_is_not_started(
    tmp_path: Path, identity: str | None, cluster: str, words: str | None
):
    if identity is not None:
        file = tmp_path / "node" / "identity" / "identity.json"
        file.parent.mkdir(parents=True)
        file.write_text(identity)
    if words is None:
        check_node_cluster(tmp_path, cluster)
    else:
        with pytest.raises(LocalNodeElsewhereError, match=words) as raised:
            check_node_cluster(tmp_path, cluster)
        assert "`cluster leave`" in str(raised.value)


def test_the_delay_before_a_restart_doubles_to_its_maximum_and_is_short_after_a_long_run():
    first, longest = local_node.RESTART_DELAYS_SECONDS
    delays = [compute_restart_delay(first, 60.0)]
    while delays[-1] < longest:
        delays.append(compute_restart_delay(delays[-1]))
    assert delays[:-1] == [first * 2**count for count in range(1, len(delays))]
    assert delays[-1] == longest < 2 * delays[-2]
    assert compute_restart_delay(longest, 60.1) == first
