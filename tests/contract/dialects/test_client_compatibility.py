"""Data that clients read apart from the answer: model properties, model names as clients spell them, rates, base
URL."""

import json
from typing import Any

import httpx
import pytest

from router.admission.rate_limits import KeyLimits
from router.errors import build_not_found
from tests.contract.dialects.test_chat import plain, served
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def a_cluster() -> LoopbackCluster:
    big = a_model("Qwen/Qwen3-8B", loaded=False, context=8192, fingerprint="q", features=("tools", "sampling"))
    tiny = a_model("tiny", features=("grammar",))
    return LoopbackCluster(LoopbackNode("studio", models=(tiny, big)))


async def ask(client: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    return await client.post(CHAT, json={"model": model, "messages": HELLO, **more})


async def test_model_list_has_fields_of_other_servers():
    async with served(a_cluster()) as cluster, plain(cluster) as client:
        big, tiny = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/tiny")).json()
    assert one == tiny
    assert (big["id"], big["state"], big["loaded_context_length"]) == ("Qwen/Qwen3-8B", "not-loaded", None)
    assert (tiny["state"], tiny["loaded_context_length"], tiny["size"]) == ("loaded", 4096, 2**30)
    for name in ("context_length", "max_model_len", "max_context_length"):
        assert (big[name], tiny[name]) == (8192, 4096)
    assert big["meta"]["n_ctx_train"] == 8192
    assert (big["capabilities"], tiny["capabilities"]) == (["tool_use"], [])
    assert {"tools", "top_k", "temperature"} <= set(big["supported_parameters"])
    assert "response_format" in tiny["supported_parameters"]
    assert (tiny["type"], tiny["object"], tiny["owned_by"]) == ("llm", "model", "macpool")


@pytest.mark.parametrize(
    ("asked", "served_as"),
    [
        ("tiny", "tiny"),
        ("Tiny", "tiny"),
        ("openai/tiny", "tiny"),
        ("ollama/TINY", "tiny"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("openrouter/qwen/qwen3-8b", "Qwen/Qwen3-8B"),
    ],
)
async def test_a_model_is_found_without_case_and_without_the_providers_name(asked: str, served_as: str):
    async with served(a_cluster()) as cluster, plain(cluster) as client:
        for stream in (False, True):
            answer = await ask(client, asked, stream=stream)
            assert answer.status_code == 200, answer.text
            first = answer.text.partition("\n")[0].removeprefix("data: ")
            assert json.loads(first)["model"] == served_as
        shown = await client.post("/api/show", json={"model": asked})
        found = await client.get(f"/v1/models/{asked}")
        counted = await client.post("/v1/messages/count_tokens", json={"model": asked, "messages": HELLO})
    assert [one.status_code for one in (shown, found, counted)] == [200, 200, 200]
    assert found.json()["id"] == served_as


async def test_exact_model_name_has_priority_over_case_folding():
    node = LoopbackNode("studio", models=(a_model("tiny"), a_model("Tiny", fingerprint="other")))
    async with served(LoopbackCluster(node)) as cluster, plain(cluster) as client:
        for name in ("tiny", "Tiny"):
            assert (await ask(client, name)).json()["model"] == name


async def test_a_key_finds_no_model_that_it_may_not_use():
    async with served(a_cluster()) as cluster, plain(cluster) as client:
        cluster.limits = lambda _: KeyLimits(models=("Qwen*",))
        hidden, missing = await ask(client, "TINY"), await ask(client, "NONE")
        assert (await ask(client, "qwen/qwen3-8b")).status_code == 200
    assert hidden.json()["error"]["message"].replace("TINY", "NONE") == missing.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_key_with_rates_gets_rate_limit_headers(path: str, stream: bool):
    body = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": stream}
    if path == "/v1/responses":
        body = {"model": "tiny", "max_output_tokens": 5, "input": "x", "stream": stream}
    async with served(a_cluster()) as cluster, plain(cluster) as client:
        usual = await client.post(path, json=body)
        limits = KeyLimits(requests_per_minute=3, tokens_per_minute=600)
        cluster.limits = lambda _: limits
        answers = [await client.post(path, json=body) for _ in range(4)]
    assert not [name for name in usual.headers if name.startswith("x-ratelimit")]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    first = answers[0].headers
    assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-limit-tokens"]) == ("3", "600")
    assert 500 < int(first["x-ratelimit-remaining-tokens"]) < 600
    assert 19 < float(first["x-ratelimit-reset-requests"].removesuffix("s")) <= 20


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_its_reasoning_tokens_and_its_model(stream: bool):
    cluster = a_cluster()
    next(iter(cluster.nodes.values())).thought = 3
    async with served(cluster), plain(cluster) as client:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answers = [await ask(client, name, **more) for name in ("tiny", "tiny", "Qwen/Qwen3-8B")]
    found: list[dict[str, Any]] = []
    for answer in answers:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith(("{", "data: {"))]
        bodies = [json.loads(line) for line in lines]
        assert len({body["system_fingerprint"] for body in bodies}) == 1
        found.append(bodies[-1])
    assert found[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    prints = [one["system_fingerprint"] for one in found]
    assert prints[0].startswith("fp_")
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/chat/completions", "/v1"),
        ("/models", "/v1"),
        ("/messages", "/v1"),
        ("/responses/x", "/v1"),
        ("/v1/v1/chat/completions", ""),
        ("/v1/v1/messages", ""),
        ("//v1/v1/models", ""),
        ("/v1/api/chat", ""),
        ("/api/v1/chat/completions", "/v1"),
        ("/openai/v1/models", "/v1"),
    ],
)
def test_a_wrong_base_url_gets_the_right_one(path: str, base: str):
    message = build_not_found(path, "https://studio.local:8080").message
    assert message.endswith(f": set the client's base URL to https://studio.local:8080{base}")


def test_any_other_path_gets_no_advice():
    for path in ("/", "/nothing", "/v1", "/v1/embeddings/x", "/v1/videos/x/y", "/x" * 5000):
        assert "base URL" not in build_not_found(path).message
        assert len(build_not_found(path).message) < 300


def test_a_slash_at_the_end_is_named():
    """The base URL of such a client is right."""
    for path in ("/v1/chat/completions/", "/api/tags/"):
        assert build_not_found(path).message == f"unknown path {path}: leave out the slash at its end"
