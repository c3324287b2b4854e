"""Aliases and profiles through every dialect, over a real server and real client libraries."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import httpx2
import openai
import pytest

from router.admission.rate_limits import KeyLimits
from router.profiles import ProfileSettings
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_memory, a_model
from wire.frames import Generate
from wire.units import GIB

BIG = a_model("big-30b", weights=60 * GIB, loaded=False, fingerprint="big", features=("tools", "sampling"))
SMALL = a_model("small-8b", fingerprint="small", features=("tools", "sampling"))
SETTINGS = RouterSettings(
    aliases={"coder": ("big-30b", "small-8b"), "gone": ("nowhere",)},
    profiles={
        "calm": ProfileSettings(temperature=0.1, presence_penalty=0.5),
        "short": ProfileSettings(context_limit=8),
    },
)
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True, params=["front", "asgi"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test through the product's own protocol and through the ASGI app alone: both must answer the same."""
    before, LoopbackCluster.front = LoopbackCluster.front, request.param == "front"
    yield request.param
    LoopbackCluster.front = before


@contextlib.asynccontextmanager
async def served(settings: RouterSettings = SETTINGS) -> AsyncIterator[LoopbackCluster]:
    nodes = LoopbackNode("studio", a_memory(8 * GIB, 24 * GIB), (BIG, SMALL)), LoopbackNode("mini", models=(SMALL,))
    cluster = LoopbackCluster(*nodes, settings=settings)
    async with cluster.serving() as url:
        cluster.base_url = url
        yield cluster
    cluster.dispatcher.ledger.check()
    assert cluster.dispatcher.ledger.empty


def library(cluster: LoopbackCluster) -> openai.AsyncOpenAI:
    client = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60)
    return openai.AsyncOpenAI(base_url=cluster.base_url + "/v1", api_key=cluster.key, max_retries=0, http_client=client)


def plain(cluster: LoopbackCluster) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {cluster.key}"}
    return httpx.AsyncClient(base_url=cluster.base_url, headers=headers, trust_env=False, timeout=60)


def generates(cluster: LoopbackCluster) -> list[Generate]:
    return [frame for node in cluster.nodes.values() for frame in node.heard if isinstance(frame, Generate)]


async def test_the_openai_library_gets_the_small_model_if_the_big_one_does_not_fit():
    async with served() as cluster, library(cluster) as client:
        raw = await client.chat.completions.with_raw_response.create(model="coder", messages=MESSAGES)
        answer = raw.parse()
        assert (answer.model, answer.choices[0].message.content) == ("small-8b", "".join(TEXT))
        assert raw.headers["x-macpool-model"] == "small-8b"
        stream = await client.chat.completions.create(model="coder", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {"small-8b"}
        direct = await client.chat.completions.with_raw_response.create(model="small-8b", messages=MESSAGES)
        assert "x-macpool-model" not in direct.headers


async def test_the_big_model_answers_if_it_fits():
    async with served() as cluster, library(cluster) as client:
        cluster.nodes["studio"].memory = a_memory(80 * GIB, 96 * GIB)  # pyright: ignore
        cluster.report()
        raw = await client.chat.completions.with_raw_response.create(model="coder", messages=MESSAGES)
        assert (raw.parse().model, raw.headers["x-macpool-model"]) == ("big-30b", "big-30b")


async def test_every_dialect_takes_an_alias_and_names_the_model_that_answered():
    async with served() as cluster, plain(cluster) as client:
        bodies = {
            "/v1/completions": {"model": "coder", "prompt": ["a", "b"], "max_tokens": 9},
            "/v1/responses": {"model": "coder", "input": "hello"},
            "/v1/messages": {"model": "coder", "messages": MESSAGES, "max_tokens": 9},
            "/api/chat": {"model": "coder:latest", "messages": MESSAGES, "stream": False},
            "/api/generate": {"model": "coder", "prompt": "hello", "stream": False},
        }
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.json()["model"] == "small-8b", path
            assert answer.headers["x-macpool-model"] == "small-8b", path
        counted = await client.post("/v1/messages/count_tokens", json={"model": "coder", "messages": MESSAGES})
        assert counted.json() == {"input_tokens": 2}
        assert {frame.model for frame in generates(cluster)} == {"small-8b"}


async def test_anthropics_library_streams_from_an_alias():
    import anthropic

    async with served() as cluster:
        direct = httpx2.AsyncClient(trust_env=False)
        client = anthropic.AsyncAnthropic(base_url=cluster.base_url, api_key=cluster.key, http_client=direct)
        async with client, client.messages.stream(model="coder", messages=MESSAGES, max_tokens=9) as stream:
            message = await stream.get_final_message()
        assert message.model == "small-8b"


async def test_lists_of_models_have_the_aliases_with_their_candidates():
    async with served() as cluster, library(cluster) as client, plain(cluster) as raw:
        found = {model.id: model async for model in client.models.list()}
        assert list(found) == ["big-30b", "small-8b", "coder", "gone"]
        assert found["coder"].owned_by == "macpool-alias"
        assert found["coder"].to_dict()["alias"] == {"candidates": ["big-30b", "small-8b"]}
        assert found["coder"].to_dict()["context_length"] == BIG.context
        assert found["gone"].to_dict()["alias"] == {"candidates": ["nowhere"]}
        assert (await client.models.retrieve("CODER")).id == "coder"
        tags = (await raw.get("/api/tags")).json()["models"]
        assert [one["name"] for one in tags] == ["big-30b", "small-8b", "coder"]
        shown = await raw.post("/api/show", json={"model": "coder"})
        assert shown.status_code == 200
        listed = await raw.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [one["id"] for one in listed.json()["data"]] == ["big-30b", "small-8b", "coder"]


async def test_anthropics_library_gets_an_alias_only_if_a_node_serves_a_candidate():
    import anthropic

    async with served() as cluster:
        direct = httpx2.AsyncClient(trust_env=False)
        client = anthropic.AsyncAnthropic(base_url=cluster.base_url, api_key=cluster.key, http_client=direct)
        async with client:
            found = await client.models.retrieve("CODER")
            assert (found.id, found.type) == ("coder", "model")
            with pytest.raises(anthropic.NotFoundError, match="no node serves a candidate of the alias 'gone'"):
                await client.models.retrieve("gone")


async def test_a_key_for_the_alias_alone_uses_its_candidates_and_sees_the_alias():
    async with served() as cluster, library(cluster) as client:
        cluster.limits = lambda _: KeyLimits(models=("coder",))
        answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert answer.model == "small-8b"
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(model="small-8b", messages=MESSAGES)


async def test_no_candidate_is_there():
    async with served() as cluster, library(cluster) as client:
        with pytest.raises(openai.NotFoundError, match="no candidate of gone can start now: nowhere: no node serves"):
            await client.chat.completions.create(model="gone", messages=MESSAGES)


async def test_profile_sets_parameters_that_the_request_omits():
    async with served() as cluster, library(cluster) as client:
        await client.chat.completions.create(model="coder:calm", messages=MESSAGES)
        await client.chat.completions.create(
            model="small-8b:calm", messages=MESSAGES, temperature=1, presence_penalty=0
        )
        await client.completions.create(model="small-8b:calm", prompt="x")
        params = [(frame.params.temperature, frame.params.presence_penalty) for frame in generates(cluster)]
        assert sorted(params, key=str) == [(0.1, 0.5), (0.1, 0.5), (1.0, 0.0)]
        with pytest.raises(openai.NotFoundError, match="no profile 'wild' for coder; the profiles are calm, short"):
            await client.chat.completions.create(model="coder:wild", messages=MESSAGES)


async def test_penalties_of_ollamas_options_win_over_the_profile():
    async with served() as cluster, plain(cluster) as client:
        body = {"model": "small-8b:calm", "messages": MESSAGES, "stream": False, "options": {"presence_penalty": 0}}
        assert (await client.post("/api/chat", json=body)).status_code == 200
        assert [frame.params.presence_penalty for frame in generates(cluster)] == [0.0]


async def test_a_prompt_beyond_the_context_limit_of_a_profile_is_a_400_with_the_numbers():
    def ask(tokens: int) -> Any:
        messages = cast("Any", [{"role": "user", "content": "x" * 4 * (tokens - 1)}])
        return client.chat.completions.create(model="coder:short", messages=messages, max_tokens=7)

    async with served() as cluster, library(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(8)
        assert "the prompt has 8 tokens; the context limit of the profile short is 8" in str(caught.value)
        await ask(7)


async def test_events_of_a_stream_name_the_model_of_the_alias(by: str):
    async with served() as cluster, plain(cluster) as client:
        body = {"model": "coder", "messages": MESSAGES, "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.headers["x-macpool-model"] == "small-8b", by
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert {event["model"] for event in events} == {"small-8b"}
