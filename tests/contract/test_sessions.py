"""How a client names its conversation, through both doors: it goes back to where it was read."""

from typing import Any

import pytest

from tests.contract.test_chat import ASK, CHAT, by, cluster, plain
from tests.support.loopback_cluster import LoopbackCluster

__all__ = ["by", "cluster"]


@pytest.mark.parametrize(("field", "header"), [
    ("prompt_cache_key", None), ("user", None), (None, "x-session-id"), ("user", "x-session-id"),
])  # fmt: skip
async def test_a_named_conversation_reaches_the_router(cluster: LoopbackCluster, field: str | None, header: str | None):
    seen: list[str] = []
    submit = cluster.dispatcher.submit

    def noted(job: Any) -> Any:
        seen.append(job.session)
        return submit(job)

    cluster.dispatcher.submit = noted  # pyright: ignore[reportAttributeAccessIssue]
    body = {**ASK, field: "in the body"} if field else ASK
    async with plain(cluster) as client:
        answer = await client.post(CHAT, json=body, headers={header: "in the head"} if header else {})
        assert answer.status_code == 200, answer.text
        await client.post(CHAT, json=ASK, headers={"x-session-id": "x" * 300})
        wrong = await client.post(CHAT, json={**ASK, "user": 7})
    assert seen == ["in the head" if header else "in the body", ""]
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "user"


async def test_the_next_turn_meets_the_node_that_read_the_last_one(cluster: LoopbackCluster):
    turn: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a long story " * 300}]}
    for node in cluster.nodes.values():
        node.keeps = True
    async with plain(cluster) as client:
        first = (await client.post(CHAT, json=turn)).headers["x-macpool-node"]
        said = [*turn["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
        for _ in range(6):
            answer = await client.post(CHAT, json={**turn, "messages": said})
            assert answer.headers["x-macpool-node"] == first
