"""Tools, reasoning, log probabilities and sampling, read by a real client library.

Each test runs through the fast path and through the ASGI application.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model
from wire.frames import Channel, Delta, Generate, Logprob, Message, ToolCall

Play = tuple[Sequence[Delta], str]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "what is the weather in Ulm?"}]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FEATURES = ("tools", "logprobs", "sampling", "grammar")


@pytest.fixture(autouse=True, params=["front", "asgi"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test through the product's own protocol and through the ASGI app alone: both must answer the same."""
    before, LoopbackCluster.front = LoopbackCluster.front, request.param == "front"
    yield request.param
    LoopbackCluster.front = before


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    """Serve a pool of one node whose model has all features. Each test sets the answer."""
    one = LoopbackCluster(LoopbackNode("studio", models=(a_model(features=FEATURES),)))
    async with one.serving() as url:
        one.base_url = url
        yield one
    assert one.dispatcher.ledger.empty


def plays(cluster: LoopbackCluster, play: Callable[[Generate], Play]) -> LoopbackNode:
    (node,) = cluster.nodes.values()
    node.play = play
    return node


def find_generate(node: LoopbackNode) -> Generate:
    return next(frame for frame in node.heard if isinstance(frame, Generate))


def library(cluster: LoopbackCluster) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60)
    return openai.AsyncOpenAI(base_url=cluster.base_url + "/v1", api_key=cluster.key, max_retries=0, http_client=http)


async def by_sync(cluster: LoopbackCluster, use: Callable[[openai.OpenAI], ChatCompletion]) -> ChatCompletion:
    """Use the library's synchronous client, in a thread."""

    def run() -> ChatCompletion:
        http = openai.DefaultHttpxClient(trust_env=False, timeout=60)
        with openai.OpenAI(
            base_url=cluster.base_url + "/v1", api_key=cluster.key, max_retries=0, http_client=http
        ) as client:
            return use(client)

    return await asyncio.to_thread(run)


CITIES = ("Ulm", "Ulm 0")


def arguments(city: str) -> str:
    return json.dumps({"city": city})


def call(place: int, city: str) -> tuple[int, str]:
    piece = {"index": place, "id": f"call_r_{place}", "name": "weather", "arguments": arguments(city)}
    return Channel.TOOL_CALL, json.dumps(piece)


def calling(asked: Generate) -> Play:
    """Return an answer with reasoning, text and two calls, with a broken call between them."""
    number = asked.request
    return [
        delta
        for choice in range(asked.params.n)
        for delta in (
            Delta(number, choice, (1,), ((Channel.REASONING, "which city? "),)),
            Delta(number, choice, (2,), ((Channel.REASONING, "Ulm."), (Channel.CONTENT, "I look."))),
            Delta(number, choice, (3, 4), (call(0, "Ulm"), (Channel.TOOL_CALL, '{"index":1,'))),
            Delta(number, choice, (5,), (call(1, f"Ulm {choice}"),)),
        )
    ], "tool_calls"


def spelled(asked: Generate) -> Play:
    """Return one character in two tokens, then a word; the first token has no text yet."""
    top = ((b"A", -0.5), (b"B", -1.5), (b"C", -2.5))[: asked.params.top_logprobs]
    return [
        delta
        for choice in range(asked.params.n)
        for delta in (
            Delta(asked.request, choice, (1,), (), (Logprob(b"\xc3", -0.5, top),)),
            Delta(asked.request, choice, (2,), ((Channel.CONTENT, "ä"),), (Logprob(b"\xa4", -0.25, top),)),
            Delta(asked.request, choice, (3,), ((Channel.CONTENT, " word"),), (Logprob(b" word", float("-inf"), top),)),
        )
    ], "stop"


def thinking(asked: Generate) -> Play:
    return [
        Delta(asked.request, 0, (1,), ((Channel.REASONING, "hm, "),)),
        Delta(asked.request, 0, (2,), ((Channel.REASONING, "yes"), (Channel.CONTENT, "Yes."))),
    ], "stop"


# tools


def check_calls(answer: ChatCompletion, choices: int = 1) -> None:
    assert len(answer.choices) == choices
    for number, choice in enumerate(answer.choices):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls or []
        assert [call.id for call in calls] == ["call_r_0", "call_r_1"]
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Ulm", f"Ulm {number}"]  # pyright: ignore


@pytest.mark.parametrize("choices", [1, 2])
async def test_calls_whole_and_streamed(cluster: LoopbackCluster, choices: int):
    node = plays(cluster, calling)
    ask: dict[str, Any] = ASK | {"tools": [TOOL], "n": choices}
    async with library(cluster) as client:
        check_calls(await client.chat.completions.create(**ask), choices)
        state = ChatCompletionStreamState(input_tools=[TOOL])
        stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            state.handle_chunk(chunk)
        final = state.get_final_completion()
        check_calls(final, choices)
        assert final.usage is not None
        assert final.usage.completion_tokens == 4 * choices
    check_calls(await by_sync(cluster, lambda api: api.chat.completions.create(**ask)), choices)
    assert json.loads(find_generate(node).tools) == [TOOL]


async def test_the_stream_helper_gives_calls_as_events(cluster: LoopbackCluster):
    plays(cluster, calling)
    async with (
        library(cluster) as client,
        client.chat.completions.stream(**ASK, tools=[TOOL], parallel_tool_calls=True) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    check_calls(final)
    assert kinds.count("tool_calls.function.arguments.done") == 2

    def helped(api: openai.OpenAI) -> ChatCompletion:
        with api.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
            return stream.get_final_completion()

    check_calls(await by_sync(cluster, helped))


async def test_conversation_continues_with_messages_of_the_library(cluster: LoopbackCluster):
    node = plays(cluster, calling)
    async with library(cluster) as client:
        async with client.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**ASK, tools=[TOOL])
        parsed = await client.chat.completions.parse(**ASK, tools=[TOOL])
        for said in (final.choices[0].message, whole.choices[0].message, parsed.choices[0].message):
            node.heard.clear()
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls or []]
            told: Any = [*ASK["messages"], said, *results]
            await client.chat.completions.create(model="tiny", messages=told, tools=[TOOL])
            _, asked, *answers = find_generate(node).messages
            calls = [ToolCall(f"call_r_{place}", "weather", arguments(city)) for place, city in enumerate(CITIES)]
            assert asked == Message("assistant", "I look.", "", tuple(calls), "", "which city? Ulm.")
            assert answers == [Message("tool", "sunny", tool_call_id=f"call_r_{place}") for place in range(2)]


async def test_tool_call_without_text_has_null_content(cluster: LoopbackCluster):
    plays(cluster, lambda asked: ([Delta(asked.request, 0, (1,), (call(0, "Ulm"),))], "tool_calls"))
    async with library(cluster) as client:
        answer = await client.chat.completions.create(**ASK, tools=[TOOL])
    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.tool_calls


async def test_tools_that_may_not_be_called_stay_out(cluster: LoopbackCluster):
    node = plays(cluster, thinking)
    async with library(cluster) as client:
        answer = await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert find_generate(node).tools == ""


# reasoning


async def test_reasoning_whole_and_streamed(cluster: LoopbackCluster):
    node = plays(cluster, thinking)
    async with library(cluster) as client:
        ask: dict[str, Any] = ASK | {
            "reasoning_effort": "none",
            "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        }
        answer = await client.chat.completions.create(**ask)
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == ("Yes.", {"reasoning_content": "hm, yes"})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "hm, yes"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert json.loads(find_generate(node).template) == {"reasoning_effort": "none", "enable_thinking": True}


# log probabilities


def check_logprobs(answer: ChatCompletion, choices: int) -> None:
    assert len(answer.choices) == choices
    for choice in answer.choices:
        assert choice.message.content == "ä word"
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert bytes(byte for one in content for byte in one.bytes or []).decode() == "ä word"
        assert [one.logprob for one in content] == [-0.5, -0.25, -9999.0]
        assert [[each.token for each in one.top_logprobs] for one in content] == [["A", "B"]] * 3
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("choices", [1, 2])
async def test_log_probabilities_whole_and_streamed(cluster: LoopbackCluster, choices: int):
    node = plays(cluster, spelled)
    ask: dict[str, Any] = ASK | {"logprobs": True, "top_logprobs": 2, "n": choices}
    async with library(cluster) as client:
        check_logprobs(await client.chat.completions.create(**ask), choices)
        async with client.chat.completions.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            check_logprobs(await stream.get_final_completion(), choices)
    assert kinds.count("logprobs.content.delta") == 3 * choices
    check_logprobs(await by_sync(cluster, lambda api: api.chat.completions.create(**ask)), choices)
    params = find_generate(node).params
    assert (params.logprobs, params.top_logprobs, params.n) == (True, 2, choices)


# sampling


async def test_every_sampling_parameter_reaches_the_engine(cluster: LoopbackCluster):
    node = plays(cluster, thinking)
    more = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5}
    async with library(cluster) as client:
        await client.chat.completions.create(
            **ASK,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            temperature=0.7,
            top_p=0.9,
            seed=7,
            stop=["x"],
            logit_bias={"5": -100},
            extra_body=more,
        )
    params = find_generate(node).params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (40, 0.1, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.5, -0.5, ((5, -100.0),))
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.7, 0.9, 7, ("x",))


# Features that are not supported


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [LOOSE]}, "no node supports tools with tiny"),
        ({"tools": [TOOL]}, "no node supports formats, strict tools or forced calls and tools with tiny"),
        (
            {"response_format": {"type": "json_object"}},
            "no node supports formats, strict tools or forced calls with tiny",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "no node supports formats, strict tools or forced calls with tiny"),
        ({"logprobs": True}, "no node supports logprobs with tiny"),
        ({"presence_penalty": 1.0}, "no node supports top_k, min_p, penalties or logit_bias with tiny"),
        ({"logprobs": True, "tools": [LOOSE]}, "no node supports logprobs and tools with tiny"),
        ({"tools": [LOOSE], "stream": True}, "no node supports tools with tiny"),
    ],
)
async def test_a_model_that_does_not_offer_it_is_a_400(cluster: LoopbackCluster, fields: dict[str, Any], named: str):
    (node,) = cluster.nodes.values()
    node.models = (a_model(),)
    cluster.report()
    async with library(cluster) as client:
        with pytest.raises(openai.BadRequestError, match=named) as caught:
            await client.chat.completions.create(**ASK, **fields)
        assert caught.value.code == "unsupported_parameter"
        answer = await client.chat.completions.create(**ASK, tools=[], logprobs=False, presence_penalty=0)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"extra_body": {"guided_json": {}, "guided_decoding_backend": "outlines"}}, "guided_decoding_backend"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
    ],
)
async def test_unsupported_field_is_named(cluster: LoopbackCluster, fields: dict[str, Any], param: str):
    async with library(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASK, **fields)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
