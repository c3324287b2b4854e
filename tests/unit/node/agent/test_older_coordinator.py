"""A node between two coordinators of its cluster, one of which has an older generation."""

import asyncio
from pathlib import Path

from node.agent.identity import adopt_generation, load_identity, store_address
from node.agent.machine_id import compute_machine_id
from tests.support.cluster.node import unstarted_node
from tests.support.cluster.older_protocol import old_coordinator
from wire.frames import Goodbye, Hello


async def test_a_node_refuses_a_coordinator_of_an_older_generation(tmp_path: Path) -> None:
    async with old_coordinator(tmp_path) as before:
        state = before.node("studio")
        folder = state / "node" / "identity"
        known = load_identity(folder, compute_machine_id("studio"))
        assert known is not None
        seal = before.authority.seal_generation(5)
        identity = store_address(adopt_generation(known, 5, seal), before.address)
        again = load_identity(folder, compute_machine_id("studio"))
        assert again is not None
        assert (again.generation, again.seal) == (5, seal), "it outlives the node"
        assert adopt_generation(identity, 4, b"") is identity
        agent = unstarted_node(identity, tmp_path / "node").agent
        task = asyncio.create_task(agent.run())
        try:
            greeting = await before.until(Hello)
            assert greeting.takeover is False
            await asyncio.wait_for(_left(before.address, folder), 30)
            assert not agent.welcomed.is_set()
            assert not task.done(), "it looks for the other, for ever"
        finally:
            await agent.stop(0.0)
            await asyncio.wait_for(task, 30)
        assert not [frame for frame in before.heard if isinstance(frame, Goodbye)]


async def _left(address: str, folder: Path) -> None:
    """Wait until the node has forgotten an address."""
    while True:
        kept = load_identity(folder, compute_machine_id("studio"))
        assert kept is not None
        if address not in kept.addresses:
            return
        await asyncio.sleep(0.02)
