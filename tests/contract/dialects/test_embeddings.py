"""Embeddings over a real server, as the clients of OpenAI and Ollama request them."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.dialects.test_chat import library, plain, served, until
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model, vector
from wire.frames import Embed, Finished, Refusal, Vectors
from wire.refusals import RefusalCode, Refused

MODEL = "vectors"
TEXTS = ["one", "two two", "three three three"]
ASK: dict[str, Any] = {"model": MODEL, "input": TEXTS}


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    models = (a_model("tiny"), a_model(MODEL, features=("embed",)))
    async with served(LoopbackCluster(LoopbackNode("studio", models=models))) as one:
        yield one


def embedded(cluster: LoopbackCluster) -> Embed:
    """Return the last request for embeddings that a node received."""
    return next(one for node in cluster.nodes.values() for one in reversed(node.heard) if isinstance(one, Embed))


def numbers(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


async def test_the_sdk_of_openai_gets_the_vectors_in_order(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.embeddings.create(model=MODEL, input=TEXTS)
        with_ids = await client.embeddings.create(model=MODEL, input=[[1, 2], [3]])
        one = await client.embeddings.create(model=MODEL, input="one", dimensions=4)
    assert [row.embedding for row in answer.data] == [numbers(vector(text)) for text in TEXTS]
    assert [row.index for row in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text) // 4 + 1 for text in TEXTS)
    assert [row.embedding for row in with_ids.data] == [numbers(vector(ids)) for ids in ((1, 2), (3,))]
    assert one.data[0].embedding == numbers(vector("one", 4))


async def test_base64_and_numbers_are_equal_bit_for_bit(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        as_numbers = (await client.post("/v1/embeddings", json=ASK)).json()
        as_text = (await client.post("/v1/embeddings", json=ASK | {"encoding_format": "base64"})).json()
    for text, left, right in zip(TEXTS, as_numbers["data"], as_text["data"], strict=True):
        raw = base64.b64decode(right["embedding"])
        assert raw == vector(text) == struct.pack("<8f", *left["embedding"])
    assert as_numbers["model"] == MODEL


async def test_the_client_of_ollama_gets_the_vectors(cluster: LoopbackCluster):
    import ollama

    client = ollama.AsyncClient(
        host=cluster.base_url, headers={"authorization": f"Bearer {cluster.key}"}, trust_env=False
    )
    many = await client.embed(model=f"{MODEL}:latest", input=TEXTS)
    cut = embedded(cluster).truncate
    older = await client.embeddings(model=MODEL, prompt="one")
    shown = await client.show(MODEL)
    assert [list(one) for one in many.embeddings] == [numbers(vector(text)) for text in TEXTS]
    assert many.prompt_eval_count == sum(len(text) // 4 + 1 for text in TEXTS)
    assert list(older.embedding) == numbers(vector("one"))
    assert cut, "Ollama cuts long texts unless a request says otherwise"
    assert shown.capabilities == ["embedding"]


async def test_fields_reach_the_node(cluster: LoopbackCluster):
    fields = {"dimensions": 4, "truncate": True, "prompt_name": "query", "user": "ada"}
    async with plain(cluster) as client:
        answer = await client.post("/v1/embeddings", json=ASK | fields)
        frame = embedded(cluster)
        await client.post("/api/embed", json=ASK | {"truncate": False, "options": {"num_ctx": 4}, "keep_alive": 0})
    assert (frame.texts, frame.dimensions, frame.truncate, frame.prompt) == (tuple(TEXTS), 4, True, "query")
    assert answer.headers["x-macpool-ignored"] == "user"
    assert not embedded(cluster).truncate


BAD = [
    {"input": ""},
    {"input": []},
    {"input": [""]},
    {"input": ["a", ""]},
    {"input": [[]]},
    {"input": [[1], []]},
    {"input": ["a", [1]]},
    {"input": ["a"] * 10_000},
    {"input": [-1]},
    {"input": [2**31]},
    {"input": {"text": "a"}},
    {"input": None},
    {"input": "a", "dimensions": 0},
    {"input": "a", "encoding_format": "int8"},
    {"input": "a", "truncate": "yes"},
    {"input": "a", "prompt_name": 1},
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: json.dumps(fields)[:40])
async def test_a_bad_body_is_refused_before_any_node(cluster: LoopbackCluster, fields: dict[str, Any]):
    async with plain(cluster) as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(next(name for name in reversed(fields)))
    assert not cluster.nodes[next(iter(cluster.nodes))].heard


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_ollama_s_routes_refuse_a_bad_body_and_load_without_a_text(cluster: LoopbackCluster, path: str):
    name = "prompt" if path.endswith("embeddings") else "input"
    async with plain(cluster) as client:
        for value in ([["a"]], [1], None):
            answer = await client.post(path, json={"model": MODEL, name: value})
            assert (answer.status_code, answer.json()["param"].startswith(name)) == (400, True), value
        load = await client.post(path, json={"model": MODEL, name: ""})
    vectors = {"embedding": []} if name == "prompt" else {"model": MODEL, "embeddings": []}
    assert (load.status_code, load.json()) == (200, vectors)


async def test_a_model_of_another_kind_is_refused_with_the_route(cluster: LoopbackCluster):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    async with plain(cluster) as client:
        on_chat = await client.post("/v1/embeddings", json=ASK | {"model": "tiny"})
        on_vectors = await client.post("/v1/chat/completions", json=chat)
    for answer, route in ((on_chat, "/v1/chat/completions"), (on_vectors, "/v1/embeddings")):
        assert answer.status_code == 400
        assert route in answer.json()["error"]["message"]


async def test_the_list_of_models_has_the_kinds(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        rows = {row["id"]: row for row in (await client.get("/v1/models")).json()["data"]}
    assert (rows["tiny"]["features"][0], rows["tiny"]["type"]) == ("chat", "llm")
    assert (rows[MODEL]["features"], rows[MODEL]["type"]) == (["embed"], "embeddings")
    assert "dimensions" in rows[MODEL]["supported_parameters"]


async def test_a_refusal_of_the_node_reaches_the_client_with_its_numbers(cluster: LoopbackCluster):
    (node,) = cluster.nodes.values()
    text = "input 1 has 90 tokens, the longest text for vectors has 64: shorten the text, or set truncate"
    node.refuse, node.refusal = 1, Refused(RefusalCode.CONTEXT, text)
    async with plain(cluster) as client:
        answer = await client.post("/v1/embeddings", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["message"] == text


async def test_an_answer_without_all_vectors_is_an_error(cluster: LoopbackCluster):
    (node,) = cluster.nodes.values()
    node.mute = True
    async with plain(cluster) as client:
        answer = await client.post("/v1/embeddings", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


async def test_requests_are_counted_and_explained(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        answer = await client.post("/v1/embeddings", json=ASK)
    (record,) = cluster.dispatcher.history.records
    assert record.request_id == answer.headers["x-request-id"]
    assert (record.model, record.outcome, record.prompt_tokens) == (MODEL, "ok", 8)
    assert cluster.dispatcher.counters.get_model(MODEL).prompt_tokens == 8
    assert not cluster.dispatcher.count_leaks()


async def test_vectors_of_an_earlier_attempt_are_discarded():
    models = (a_model(MODEL, features=("embed",)),)
    first, second = (LoopbackNode(name, models=models, silent=True) for name in ("studio", "mini"))
    async with served(LoopbackCluster(first, second)) as cluster, plain(cluster) as client:
        asking = asyncio.create_task(client.post("/v1/embeddings", json=ASK))
        await until(lambda: first.heard or second.heard)
        had, other = (first, second) if first.heard else (second, first)
        (frame,) = had.heard
        assert isinstance(frame, Embed)
        cluster.say(had, Vectors(frame.request, (0, 1), vector("stale") + vector("stale")))
        cluster.say(had, Refusal(frame.request, Refused(RefusalCode.NO_ROOM, "no room")))
        await until(lambda: other.heard)
        (again,) = other.heard
        assert isinstance(again, Embed)
        cluster.say(other, Vectors(again.request, (2,), vector("fresh")))
        cluster.say(other, Finished(again.request, (), 3, 0))
        answer = await asking
    assert answer.status_code == 500, "two texts have no vector of this node"
