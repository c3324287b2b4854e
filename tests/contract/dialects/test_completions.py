"""`/v1/completions` with OpenAI's own library over a real server, and in the shapes of older clients."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.contract.dialects.test_chat import collect, library, plain, served, until
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_model
from wire.frames import Cancel, Delta, Generate, Logprob

ALL = "".join(TEXT)
ASK: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time"}
PATH = "/v1/completions"


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    async with served(LoopbackCluster(LoopbackNode("studio"), LoopbackNode("mini"))) as one:
        yield one


def generated(cluster: LoopbackCluster) -> list[Generate]:
    return [frame for node in cluster.nodes.values() for frame in node.heard if isinstance(frame, Generate)]


async def test_completion_continues_a_text(cluster: LoopbackCluster):
    async with library(cluster) as client:
        raw = await client.completions.with_raw_response.create(**ASK)
    answer = raw.parse()
    assert answer.object == "text_completion"
    assert answer.id == "cmpl-" + raw.headers["x-request-id"]
    assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [(0, ALL, "stop")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT)
    (sent,) = generated(cluster)
    assert (sent.text, sent.ids, sent.messages, sent.params.max_tokens) == ("Once upon a time", (), (), 16)


async def test_a_stream_ends_with_its_usage(cluster: LoopbackCluster):
    async with library(cluster) as client:
        stream = await client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}, n=2)
        chunks = await collect(stream)
    for index in (0, 1):
        said = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(one.text for one in said) == ALL
        assert [one.finish_reason for one in said][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * len(TEXT)


async def test_every_prompt_has_its_own_choices(cluster: LoopbackCluster):
    prompts = ["one", "two", "three"]
    async with library(cluster) as client:
        answer = await client.completions.create(model="tiny", prompt=prompts, n=2, echo=True)
        stream = await client.completions.create(model="tiny", prompt=prompts, n=2, echo=True, stream=True)
        texts = dict.fromkeys(range(6), "")
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    expected = [prompt + ALL for prompt in prompts for _ in range(2)]
    assert [one.text for one in answer.choices] == expected
    assert [one.index for one in answer.choices] == list(range(6))
    assert list(texts.values()) == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * len(TEXT)
    assert answer.usage.prompt_tokens == sum(len(prompt) // 4 + 1 for prompt in prompts)


@pytest.mark.parametrize(("prompt", "sent"), [([5, 6, 7], [(5, 6, 7)]), ([[1], [2, 3]], [(1,), (2, 3)])])
async def test_token_prompts_are_sent_unchanged(cluster: LoopbackCluster, prompt: list, sent: list):
    async with library(cluster) as client:
        answer = await client.completions.create(model="tiny", prompt=prompt)
    assert sorted(frame.ids for frame in generated(cluster)) == sorted(sent)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, sent))


def spoken(asked: Generate) -> tuple[list[Delta], str]:
    tokens = [Logprob(b"a", -0.5, ((b"a", -0.5), (b"b", -1.0))), Logprob(b"\xc3", -0.25, ((b"\xc3", -0.25),))]
    return [Delta(asked.request, 0, (1,), ((0, "a"),), tuple(tokens))], "length"


async def test_log_probabilities_in_the_older_shape():
    node = LoopbackNode("a", models=(a_model(features=("logprobs",)),), play=spoken)
    async with served(LoopbackCluster(node)) as cluster, library(cluster) as client:
        answer = await client.completions.create(**ASK, logprobs=2)
        chunks = await collect(await client.completions.create(**ASK, logprobs=2, stream=True))
    for found in (answer.choices[0].logprobs, chunks[0].choices[0].logprobs):
        assert found is not None
        assert found.tokens == ["a", "bytes:\\xc3"]
        assert found.token_logprobs == [-0.5, -0.25]
        assert found.top_logprobs == [{"a": -0.5, "b": -1.0}, {"bytes:\\xc3": -0.25}]
        assert found.text_offset == [0, 1]
    assert answer.choices[0].finish_reason == "length"


REFUSED = [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"echo": True, "prompt": [1, 2]}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_unsupported_field_is_named(cluster: LoopbackCluster, fields: dict, param: str):
    async with library(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**(ASK | fields))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


async def test_neutral_values_are_accepted(cluster: LoopbackCluster):
    async with library(cluster) as client:
        await client.completions.create(**ASK, suffix=None, best_of=2, n=2, user="me", echo=False, logprobs=None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"prompt": ["x"] * 64, "n": 5}, "n"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_it(cluster: LoopbackCluster, fields: dict, param: str):
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=ASK | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_one_refused_prompt_refuses_the_whole_and_frees_the_rest():
    node = LoopbackNode("a", step_seconds=0.02)
    async with served(LoopbackCluster(node)) as cluster, plain(cluster) as client:
        answer = await client.post(PATH, json={"model": "tiny", "prompt": [[1], [1] * 5000]})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        await until(lambda: cluster.dispatcher.idle)
        assert any(isinstance(frame, Cancel) for frame in node.heard)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_prompt(stream: bool):
    node = LoopbackNode("a", step_seconds=0.05)
    async with served(LoopbackCluster(node)) as cluster, plain(cluster) as client:
        asking = asyncio.create_task(
            client.post(PATH, json={"model": "tiny", "prompt": ["a", "b", "c"], "stream": stream})
        )
        await until(lambda: len(node.reserved) == 3)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await asking
        await until(lambda: cluster.dispatcher.idle)
        assert len({frame.request for frame in node.heard if isinstance(frame, Cancel)}) == 3


async def test_lost_node_ends_a_stream_with_an_error(cluster: LoopbackCluster):
    for node in cluster.nodes.values():
        node.step_seconds = 0.05
    async with plain(cluster) as client, client.stream("POST", PATH, json=ASK | {"stream": True}) as answer:
        lines = answer.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "The "
        for node in cluster.nodes.values():
            cluster.fail(node)
        rest = [line async for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "[DONE]" not in "".join(rest)


async def test_other_methods_and_keys(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        assert (await client.get(PATH)).status_code == 405
        assert (await client.post(PATH, json=ASK, headers={"authorization": ""})).status_code == 401
        unknown = await client.post(PATH, json=ASK | {"model": "nothing"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    async with plain(cluster, cluster.make_key("metrics")) as client:
        assert (await client.post(PATH, json=ASK)).status_code == 403
