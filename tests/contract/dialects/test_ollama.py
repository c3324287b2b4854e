"""Ollama's API over a real server, in the shapes of its own clients and of popular programs."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.dialects.ollama.schema import OPTIONS_INSTEAD
from tests.contract.dialects.test_anthropic import generated, play, spoken
from tests.contract.dialects.test_chat import plain, served
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_model
from wire.frames import GenerationParams, Message, ToolCall

ALL = "".join(TEXT)
ASK: dict[str, Any] = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"model": "tiny", "prompt": "hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks",
        "parameters": {"type": "object", "properties": {"city": {}}},
    },
}


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    features = ("sampling", "tools", "grammar")
    nodes = [LoopbackNode(name, models=(a_model(features=features),)) for name in ("studio", "mini")]
    async with served(LoopbackCluster(*nodes)) as one:
        yield one


def lines(answer: httpx.Response) -> list[dict]:
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_is_a_stream_of_lines_unless_it_is_not_wanted(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        streamed = await client.post("/api/chat", json=ASK)
        whole = (await client.post("/api/chat", json=ASK | {"stream": False})).json()
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(streamed)
    assert "".join(piece["message"]["content"] for piece in pieces) == ALL
    assert not any(piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    for end in (last, whole):
        assert (end["model"], end["done"], end["done_reason"]) == ("tiny", True, "stop")
        assert (end["prompt_eval_count"], end["eval_count"]) == (2, len(TEXT))
        assert all(
            isinstance(end[name], int)
            for name in (
                "total_duration",
                "load_duration",
                "prompt_eval_duration",
                "eval_duration",
            )
        )
    assert whole["message"] == {"role": "assistant", "content": ALL}


async def test_a_prompt(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        streamed = lines(await client.post("/api/generate", json=PROMPT | {"system": "be brief"}))
        sent = generated(cluster)
        whole = (await client.post("/api/generate", json=PROMPT | {"stream": False})).json()
    assert "".join(line["response"] for line in streamed) == whole["response"] == ALL
    assert sent.messages == (Message("system", "be brief"), Message("user", "hello"))


async def test_a_raw_prompt_has_no_template(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        await client.post("/api/generate", json=PROMPT | {"raw": True, "stream": False})
        both = await client.post("/api/generate", json=PROMPT | {"raw": True, "system": "x"})
    assert (generated(cluster).text, generated(cluster).messages) == ("hello", ())
    assert (both.status_code, both.json()["param"]) == (400, "system")


async def test_thoughts_and_calls(cluster: LoopbackCluster):
    play(cluster, play=spoken)
    async with plain(cluster) as client:
        streamed = lines(await client.post("/api/chat", json=ASK | {"tools": [WEATHER], "think": True}))
        whole = (await client.post("/api/chat", json=ASK | {"tools": [WEATHER], "stream": False})).json()
    assert "".join(line["message"].get("thinking", "") for line in streamed) == "let me"
    calls = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    assert calls == whole["message"]["tool_calls"]
    assert calls[0]["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}
    assert whole["message"]["thinking"] == "let me"
    assert whole["message"]["content"] == "I look.Done."


async def test_every_option_reaches_the_node(cluster: LoopbackCluster):
    options = {
        "num_predict": 7,
        "stop": ["END"],
        "seed": 5,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "num_ctx": 8192,
        "mirostat": 1,
        "typical_p": 0.7,
        "num_gpu": 99,
        "tfs_z": 1.0,
        "repeat_last_n": 64,
        "num_thread": 8,
    }
    async with plain(cluster) as client:
        answer = await client.post("/api/chat", json=ASK | {"options": options, "keep_alive": "5m", "think": "low"})
    assert answer.status_code == 200
    assert {"options.mirostat", "options.typical_p"} <= set(answer.headers["x-macpool-ignored"].split(", "))
    assert generated(cluster).params == GenerationParams(7, 0.5, 0.9, 5, ("END",), 1, 9, 0.1, 0.2, 0.3, 1.1)
    assert json.loads(generated(cluster).template) == {"reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("think", "template"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("max", {"reasoning_effort": "max", "enable_thinking": True}),
    ],
)
async def test_thinking_is_a_switch(cluster: LoopbackCluster, think: bool | str, template: dict):
    async with plain(cluster) as client:
        await client.post("/api/chat", json=ASK | {"think": think, "options": {"num_predict": -1}})
    assert json.loads(generated(cluster).template) == template
    assert generated(cluster).params.max_tokens is None


async def test_results_find_their_calls_without_ids(cluster: LoopbackCluster):
    messages = [
        {"role": "user", "content": "sun?"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": "Ulm"}}},
                {"id": "own", "function": {"name": "clock", "arguments": {}, "index": 1}},
            ],
        },
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "tool", "content": "yes"},
    ]
    async with plain(cluster) as client:
        await client.post("/api/chat", json=ASK | {"messages": messages})
    calls = (ToolCall("call_1_0", "weather", '{"city":"Ulm"}'), ToolCall("own", "clock", "{}"))
    assert generated(cluster).messages == (
        Message("user", "sun?"),
        Message("assistant", "", tool_calls=calls, reasoning="hm"),
        Message("tool", "noon", "clock", tool_call_id="own"),
        Message("tool", "yes", tool_call_id="call_1_0"),
    )


async def test_models_are_listed_and_shown(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        (tag,) = (await client.get("/api/tags")).json()["models"]
        (running,) = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": "tiny:latest"})).json()
        older = (await client.post("/api/show", json={"name": "tiny", "verbose": True})).json()
        nothing = await client.post("/api/show", json={"model": "nothing"})
        nameless = await client.post("/api/show", json={})
        version = (await client.get("/api/version")).json()["version"]
    assert (tag["name"], tag["model"], len(tag["digest"]), tag["details"]["format"]) == ("tiny", "tiny", 64, "mlx")
    assert tag["size"] == running["size_vram"] == 1024**3
    assert running["context_length"] == shown["model_info"]["mlx.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown == older
    assert (nothing.status_code, nameless.status_code) == (404, 400)
    assert isinstance(nothing.json()["error"], str)
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/api/pull", "cluster pull"),
        ("POST", "/api/push", "hf upload"),
        ("POST", "/api/create", "cluster model quantize"),
        ("POST", "/api/copy", "router.aliases"),
        ("DELETE", "/api/delete", "cluster model rm"),
        ("POST", "/api/blobs/sha256:x", "cluster model quantize"),
    ],
)
async def test_routes_that_change_models_are_refused(cluster: LoopbackCluster, method: str, path: str, instead: str):
    async with plain(cluster) as client:
        answer = await client.request(method, path, json={"model": "tiny"})
        nobody = await client.request(method, path, json={}, headers={"authorization": ""})
    assert (answer.status_code, answer.json()["code"]) == (501, "unsupported_operation")
    assert instead in answer.json()["error"]
    assert nobody.status_code == 401


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
    ],
)
async def test_unsupported_field_is_refused_by_name(cluster: LoopbackCluster, path: str, fields: dict, param: str):
    async with plain(cluster) as client:
        answer = await client.post(path, json=(ASK if path == "/api/chat" else PROMPT) | fields)
    found = answer.json()
    assert (answer.status_code, found["code"], found["param"]) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize("tokens", [0, -1])
async def test_no_limit_is_that_of_the_node(cluster: LoopbackCluster, tokens: int):
    """The node then applies `engine.mlx.max_tokens`, which the description must name."""
    async with plain(cluster) as client:
        await client.post("/api/chat", json=ASK | {"options": {"num_predict": tokens}})
    assert generated(cluster).params.max_tokens is None
    assert "engine.mlx.max_tokens" in OPTIONS_INSTEAD["num_predict"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"messages": {}}, "messages"),
        ("/api/chat", {"options": {"num_predict": 0.5}}, "options.num_predict"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"options": {"temperatur": 1}}, "options.temperatur"),
        ("/api/chat", {"think": "very"}, "think"),
        ("/api/generate", {"prompt": 7}, "prompt"),
        ("/api/generate", {"stream": "no"}, "stream"),
        ("/api/chat", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_it(cluster: LoopbackCluster, path: str, fields: dict, param: str):
    async with plain(cluster) as client:
        answer = await client.post(path, json=(ASK if path == "/api/chat" else PROMPT) | fields)
    assert (answer.status_code, answer.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "content"),
    [
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "keep_alive": "5m", "format": "json"}, {"response": ""}),
        ("/api/chat", {"keep_alive": -1}, {"message": {"role": "assistant", "content": ""}}),
        (
            "/api/chat",
            {"messages": [], "options": {"num_predict": 9}},
            {"message": {"role": "assistant", "content": ""}},
        ),
    ],
)
async def test_a_body_without_a_prompt_loads_the_model(
    cluster: LoopbackCluster, path: str, fields: dict, content: dict
):
    async with plain(cluster) as client:
        answer = await client.post(path, json={"model": "tiny", **fields})
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert found.pop("created_at")
    assert found == {"model": "tiny", "done": True, "done_reason": "load"} | content
    params = generated(cluster).params
    assert params == GenerationParams(max_tokens=1, seed=params.seed)


async def test_a_model_that_no_node_has_is_not_loaded(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        answer = await client.post("/api/generate", json={"model": "gone"})
    assert (answer.status_code, answer.json()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "-0m"])
async def test_an_unload_is_refused_and_names_the_command(cluster: LoopbackCluster, keep_alive: float | str):
    async with plain(cluster) as client:
        for path in ("/api/generate", "/api/chat"):
            answer = await client.post(path, json={"model": "tiny", "keep_alive": keep_alive})
            assert answer.status_code == 501
            assert "cluster model unload" in answer.json()["error"]
        assert (await client.post("/api/chat", json=ASK | {"keep_alive": keep_alive})).status_code == 200


async def test_failed_ollama_stream_ends_with_an_error_line(cluster: LoopbackCluster):
    play(cluster, step_seconds=0.05)
    async with plain(cluster) as client, client.stream("POST", "/api/chat", json=ASK) as answer:
        read = answer.aiter_lines()
        assert json.loads(await anext(read))["done"] is False
        for node in cluster.nodes.values():
            cluster.fail(node)
        rest = [json.loads(line) async for line in read]
    assert rest[-1]["code"] == "engine_crashed"
    assert isinstance(rest[-1]["error"], str)


async def test_no_client_is_served_without_a_key(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        for method, path in (
            ("POST", "/api/chat"),
            ("POST", "/api/generate"),
            ("GET", "/api/tags"),
            ("GET", "/api/ps"),
            ("POST", "/api/show"),
            ("GET", "/api/version"),
        ):
            answer = await client.request(method, path, json=ASK, headers={"authorization": ""})
            assert answer.status_code == 401
            assert isinstance(answer.json()["error"], str)


async def test_its_own_library(cluster: LoopbackCluster):
    import ollama

    client = ollama.AsyncClient(
        host=cluster.base_url, headers={"authorization": f"Bearer {cluster.key}"}, trust_env=False
    )
    whole = await client.chat(model="tiny", messages=ASK["messages"], options={"num_predict": 9, "seed": 3})
    assert (whole.message.content, whole.done_reason, whole.eval_count) == (ALL, "stop", len(TEXT))
    assert generated(cluster).params == GenerationParams(max_tokens=9, seed=3)
    pieces = [piece async for piece in await client.chat(model="tiny", messages=ASK["messages"], stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == ALL
    assert (await client.generate(model="tiny", prompt="hello")).response == ALL
    assert [model.model for model in (await client.list()).models] == ["tiny"]
    assert (await client.show("tiny")).modelinfo is not None
    assert [model.model for model in (await client.ps()).models] == ["tiny"]
    with pytest.raises(ollama.ResponseError, match="no node serves") as missing:
        await client.chat(model="nobody", messages=ASK["messages"])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not supported"):
        await client.pull("tiny")
