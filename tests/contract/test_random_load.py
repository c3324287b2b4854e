"""Everything at once: clients connect, read, stall and disconnect while nodes refuse, crash, disappear and return."""

import asyncio
import random

import httpx
import pytest

from router.settings import RouterSettings
from tests.effort import thin_cases
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory
from wire.units import MIB

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}

PATIENCE = [0.005, 0.02, 0.1, 20.0, 20.0]
"""Seconds until a client disconnects."""


async def client(url: str, key: str, chance: random.Random, patience: float) -> str:
    """Send one request, in one of many ways.

    Return "left" if the client left after `patience` seconds, and "answered" for a complete answer. Otherwise return a
    text with the status of the error.
    """
    body = ASK | {"stream": chance.random() < 0.6, "n": chance.randint(1, 3)}
    async with httpx.AsyncClient(
        trust_env=False, base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30
    ) as http:
        try:
            async with asyncio.timeout(patience), http.stream("POST", "/v1/chat/completions", json=body) as answer:
                text = (await answer.aread()).decode()
        except TimeoutError:
            return "left"
    whole = "[DONE]" in text or '"object":"chat.completion"' in text
    assert whole or '"error"' in text, text[-500:]
    return "answered" if whole else f"told {answer.status_code}"


async def trouble(cluster: LoopbackCluster, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(0.01)
        node = chance.choice(list(cluster.nodes.values()))
        what = chance.random()
        if what < 0.3:
            node.refuse = 2
        elif what < 0.4:
            cluster.fail(node)
        elif what < 0.5 and node.up:
            cluster.cut(node)
        elif what < 0.6:
            node.memory = a_memory(chance.choice([MIB, 300 * MIB, 2000 * MIB]))
        elif not node.up:
            node.up, node.state, node.memory = True, "ready", a_memory()


@pytest.mark.parametrize("seed", thin_cases([1, 2], 2))
async def test_after_random_load_the_ledger_is_empty_and_the_next_request_is_answered(seed: int):
    chance = random.Random(seed)
    nodes = [LoopbackNode(name, step_seconds=0.002, text=("word ",) * 20) for name in "abc"]
    cluster = LoopbackCluster(*nodes, settings=RouterSettings(queue_timeout_seconds=1.0, queue_limit=1000))
    async with cluster.serving() as url:
        storm = asyncio.create_task(trouble(cluster, chance))
        ends: list[str] = []
        for _ in range(6):
            keys = [cluster.make_key("infer") for _ in range(25)]
            ends += await asyncio.gather(*(client(url, key, chance, chance.choice(PATIENCE)) for key in keys))
            cluster.dispatcher.ledger.check()
        storm.cancel()
        for node in nodes:
            node.up, node.state, node.memory, node.refuse = True, "ready", a_memory(), 0
        cluster.report()
        assert await client(url, cluster.key, chance, 20) == "answered"
        async with asyncio.timeout(30):
            while not cluster.dispatcher.ledger.empty:  # noqa: ASYNC110  the ledger tells nobody
                await asyncio.sleep(0.01)
    cluster.dispatcher.ledger.check()
    assert len(cluster.dispatcher.queue) == 0
    assert cluster.dispatcher.idle
    assert ends.count("answered") > 5, "the storm left some alone"
    assert "left" in ends
