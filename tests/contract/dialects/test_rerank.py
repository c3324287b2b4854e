"""Rerank over a real server, as the clients of Jina and Cohere request it."""

import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.dialects.test_chat import plain, served
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model, score
from wire.frames import Embed

MODEL = "scores"
DOCUMENTS = ["one", "two two", "three three three", "one"]
ASK: dict[str, Any] = {"model": MODEL, "query": "which one?", "documents": DOCUMENTS}


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    models = (a_model("tiny"), a_model("vectors", features=("embed",)), a_model(MODEL, features=("rerank",)))
    async with served(LoopbackCluster(LoopbackNode("studio", models=models))) as one:
        yield one


def asked(cluster: LoopbackCluster) -> Embed:
    """Return the last request for scores that a node received."""
    return next(one for node in cluster.nodes.values() for one in reversed(node.heard) if isinstance(one, Embed))


def value(document: str) -> float:
    (found,) = struct.unpack("<f", score(ASK["query"], document))
    return found


def order() -> list[int]:
    """Return the places of the documents, the highest score first; equal scores in the order of the documents."""
    return sorted(range(len(DOCUMENTS)), key=lambda place: (-value(DOCUMENTS[place]), place))


async def test_results_are_ordered_by_score_and_equal_scores_by_place(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        answer = (await client.post("/v1/rerank", json=ASK)).json()
    places = [one["index"] for one in answer["results"]]
    assert places == order()
    assert places.index(0) < places.index(3)
    for one in answer["results"]:
        assert one["relevance_score"] == value(DOCUMENTS[one["index"]])
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    tokens = answer["usage"]["total_tokens"]
    assert answer["model"] == MODEL
    assert tokens == answer["usage"]["prompt_tokens"] > 0


async def test_top_n_and_documents_shape_the_answer(cluster: LoopbackCluster):
    objects = [{"text": text} for text in DOCUMENTS]
    async with plain(cluster) as client:
        two = (await client.post("/v1/rerank", json=ASK | {"top_n": 2, "return_documents": False})).json()
        more = (await client.post("/v1/rerank", json=ASK | {"top_n": 99, "documents": objects})).json()
    assert [one["index"] for one in two["results"]] == order()[:2]
    assert all(one.keys() == {"index", "relevance_score"} for one in two["results"])
    assert [one["index"] for one in more["results"]] == order()
    assert asked(cluster).texts == tuple(DOCUMENTS)
    assert asked(cluster).query == ASK["query"]


async def test_the_shape_of_cohere(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        answer = (await client.post("/v2/rerank", json=ASK | {"top_n": 3, "priority": 0})).json()
        first = asked(cluster)
        await client.post("/v2/rerank", json=ASK | {"max_tokens_per_doc": 7})
        wrong = await client.post("/v2/rerank", json=ASK | {"model": "none"})
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
        (place, value(DOCUMENTS[place])) for place in order()[:3]
    ]
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert answer["meta"]["tokens"]["input_tokens"] > 0
    assert first.truncate
    assert first.max_tokens == 4096
    assert asked(cluster).max_tokens == 7
    assert wrong.status_code == 404
    assert "none" in wrong.json()["message"]
    assert wrong.json()["code"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [""]}, "documents"),
        ({"documents": "one"}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents"),
        ({"documents": ["x"] * 2049}, "documents"),
        ({"query": ""}, "query"),
        ({"query": "x" * (16 * 1024 + 1)}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
    ids=str,
)
async def test_bad_input_is_a_400_that_names_the_field(
    cluster: LoopbackCluster, path: str, fields: dict[str, Any], named: str
):
    async with plain(cluster) as client:
        answer = await client.post(path, json=ASK | fields)
    message = answer.json()["message"] if path == "/v2/rerank" else answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert named in message


@pytest.mark.parametrize(
    ("path", "body", "route"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}, "/v1/rerank"),
        ("/v1/embeddings", {"model": MODEL, "input": "x"}, "/v1/rerank"),
        ("/v1/rerank", ASK | {"model": "tiny"}, "/v1/chat/completions"),
        ("/v1/rerank", ASK | {"model": "vectors"}, "/v1/embeddings"),
    ],
)
async def test_a_model_of_another_kind_is_a_400_that_names_its_route(
    cluster: LoopbackCluster, path: str, body: dict[str, Any], route: str
):
    async with plain(cluster) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert route in answer.json()["error"]["message"]


async def test_models_name_their_kind(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        found = (await client.get(f"/v1/models/{MODEL}")).json()
        shown = (await client.post("/api/show", json={"model": MODEL})).json()
    assert found["type"] == "rerank"
    assert found["features"] == ["rerank"]
    assert "top_n" in found["supported_parameters"]
    assert found["architecture"]["output_modalities"] == ["rerank"]
    assert shown["capabilities"] == ["rerank"]
