"""Names of conversations, through the fast path and the ASGI application: a conversation returns to its node."""

from typing import Any

import pytest

from tests.contract.dialects.test_chat import ASK, CHAT, by, cluster, plain
from tests.support.cluster.loopback_cluster import LoopbackCluster

__all__ = ["by", "cluster"]


@pytest.mark.parametrize(
    ("field", "header"),
    [
        ("prompt_cache_key", None),
        ("user", None),
        (None, "x-session-id"),
        ("user", "x-session-id"),
    ],
)
async def test_a_named_conversation_reaches_the_router(cluster: LoopbackCluster, field: str | None, header: str | None):
    seen: list[str] = []
    submit = cluster.dispatcher.submit

    def noted(spec: Any) -> Any:
        seen.append(spec.session)
        return submit(spec)

    cluster.dispatcher.submit = noted
    body = {**ASK, field: "in the body"} if field else ASK
    async with plain(cluster) as client:
        answer = await client.post(CHAT, json=body, headers={header: "in the head"} if header else {})
        assert answer.status_code == 200, answer.text
        await client.post(CHAT, json=ASK, headers={"x-session-id": "x" * 300})
        wrong = await client.post(CHAT, json={**ASK, "user": 7})
    assert seen == ["in the head" if header else "in the body", ""]
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "user"


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/responses": ({"model": "tiny", "input": "hello"}, {"prompt_cache_key": "mine"}),
    "/v1/completions": ({"model": "tiny", "prompt": "hello"}, {"user": "mine"}),
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
        {"metadata": {"user_id": "mine"}},
    ),
    "/api/chat": ({"model": "tiny", "stream": False, "messages": [{"role": "user", "content": "hello"}]}, {}),
}


@pytest.mark.parametrize("route", NAMED)
async def test_every_dialect_can_name_its_conversation(cluster: LoopbackCluster, route: str):
    seen: list[str] = []
    submit = cluster.dispatcher.submit

    def noted(spec: Any) -> Any:
        seen.append(spec.session)
        return submit(spec)

    cluster.dispatcher.submit = noted
    body, name = NAMED[route]
    async with plain(cluster) as client:
        for asked in (body, body | name):
            answer = await client.post(route, json=asked)
            assert answer.status_code == 200, answer.text
        await client.post(route, json=body, headers={"x-session-id": "in the head"})
        if route == "/v1/messages":
            await client.post(route, json=body | {"metadata": {"user_id": 7, "more": None}})
    assert seen[:3] == ["", "mine" if name else "", "in the head"]
    assert not any(seen[3:]), "a name is a text"


async def test_the_next_message_is_placed_on_the_node_of_the_previous_one(cluster: LoopbackCluster):
    turn: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a long story " * 300}]}
    for node in cluster.nodes.values():
        node.keeps = True
    async with plain(cluster) as client:
        first = (await client.post(CHAT, json=turn)).headers["x-macpool-node"]
        said = [*turn["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
        for _ in range(6):
            answer = await client.post(CHAT, json={**turn, "messages": said})
            assert answer.headers["x-macpool-node"] == first
