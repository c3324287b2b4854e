"""`/v1/messages` with Anthropic's own library over a real server, and in the shapes of coding agents."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.contract.dialects.test_chat import plain, served
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_model
from wire.frames import Channel, CountTokens, Delta, Generate, Message, ToolCall
from wire.refusals import RefusalCode, Refused

if TYPE_CHECKING:
    from anthropic import APIStatusError

ALL = "".join(TEXT)
HELLO: Any = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HELLO}
PATH = "/v1/messages"
WEATHER: Any = {
    "name": "weather",
    "description": "Looks",
    "input_schema": {"type": "object", "properties": {"city": {}}},
}
CALL = json.dumps({"index": 0, "id": "call_1", "name": "weather", "arguments": '{"city": "Ulm"}'})


def spoken(asked: Generate) -> tuple[list[Delta], str]:
    """Return an answer with reasoning, text, two calls, and more text."""
    second = CALL.replace("call_1", "call_2")
    pieces = [
        (Channel.REASONING, "let "),
        (Channel.REASONING, "me"),
        (Channel.CONTENT, "I look."),
        (Channel.TOOL_CALL, CALL),
        (Channel.TOOL_CALL, second),
        (Channel.CONTENT, "Done."),
    ]
    return [Delta(asked.request, 0, (1,), ((int(channel), text),)) for channel, text in pieces], "tool_calls"


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    nodes = [
        LoopbackNode(name, models=(a_model(features=("sampling", "tools", "grammar")),)) for name in ("studio", "mini")
    ]
    async with served(LoopbackCluster(*nodes)) as one:
        yield one


@contextlib.asynccontextmanager
async def library(cluster: LoopbackCluster, key: str | None = None, token: str = "") -> AsyncIterator[Any]:
    import anthropic

    direct = httpx2.AsyncClient(trust_env=False)
    options: dict[str, Any] = {"base_url": cluster.base_url, "max_retries": 0, "http_client": direct}
    credentials: dict[str, Any] = {"auth_token": token} if token else {"api_key": key or cluster.key}
    async with anthropic.AsyncAnthropic(**options, **credentials) as client:
        yield client


def _error(raised: "APIStatusError") -> Any:
    body: Any = raised.body
    return body["error"]


def generated(cluster: LoopbackCluster) -> Generate:
    """Return the newest Generate."""
    heard = (frame for node in cluster.nodes.values() for frame in node.heard if isinstance(frame, Generate))
    return max(heard, key=lambda frame: frame.seq)


def play(cluster: LoopbackCluster, **fields: object) -> None:
    for node in cluster.nodes.values():
        for name, value in fields.items():
            setattr(node, name, value)


async def test_a_whole_answer(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.messages.create(**ASK)
    assert [block.text for block in answer.content if block.type == "text"] == [ALL]
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == 2
    assert answer.usage.output_tokens == len(TEXT)
    assert answer.id == f"msg_{answer._request_id}"


async def test_the_stream_helper_puts_the_same_message_together(cluster: LoopbackCluster):
    play(cluster, play=spoken, thought=2)
    async with library(cluster) as client:
        whole = await client.messages.create(**ASK, tools=[WEATHER])
        async with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    thinking, text, first, _, last = final.content
    assert (thinking.thinking, thinking.signature) == ("let me", "unsigned")
    assert (text.text, last.text) == ("I look.", "Done.")
    assert (first.id, first.name, first.input) == ("call_1", "weather", {"city": "Ulm"})
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens_details.thinking_tokens == 2
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[1].text == "I look.Done."


async def test_the_events_are_in_the_order_that_clients_know(cluster: LoopbackCluster):
    play(cluster, play=spoken)
    async with library(cluster) as client:
        events = [event async for event in await client.messages.create(**ASK, tools=[WEATHER], stream=True)]
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3, 4]
    assert events[0].message.usage.input_tokens == 2  # the node reports it before its first token
    assert events[0].message.stop_reason is None
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
        "text_delta",
    ]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].usage.output_tokens == 6


async def test_answer_names_its_stop_sequence(cluster: LoopbackCluster):
    play(cluster, stop="END")
    async with library(cluster) as client:
        answer = await client.messages.create(**ASK, stop_sequences=["END", "other"])
        async with client.messages.stream(**ASK, stop_sequences=["END"]) as stream:
            streamed = await stream.get_final_message()
    for one in (answer, streamed):
        assert (one.stop_reason, one.stop_sequence) == ("stop_sequence", "END")
    assert generated(cluster).params.stop == ("END",)


async def test_answer_at_the_limit_has_stop_reason_max_tokens(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.messages.create(**ASK | {"max_tokens": 2})
    assert answer.stop_reason == "max_tokens"


async def test_every_part_of_a_conversation_reaches_the_node(cluster: LoopbackCluster):
    messages = [
        {"role": "system", "content": "and kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "three"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "xyz"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "be brief now"},
    ]
    system = [{"type": "text", "text": "You help."}, {"type": "text", "text": "Be exact."}]
    async with library(cluster) as client:
        await client.messages.create(
            model="tiny",
            max_tokens=9,
            system=system,
            messages=messages,
            tools=[WEATHER],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "low"},
            extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9},
            metadata={"user_id": "me"},
        )
    sent = generated(cluster)
    assert sent.messages == (
        Message("system", "You help.\n\nBe exact.\n\nand kind"),
        Message("user", "one\ntwo\nthree"),
        Message("assistant", "I look.", tool_calls=(ToolCall("toolu_1", "weather", '{"city":"Ulm"}'),), reasoning="hm"),
        Message("tool", "sun", tool_call_id="toolu_1"),
        Message("tool", "", tool_call_id="toolu_2"),
        Message("user", "so?"),
        Message("system", "be brief now"),
    )
    assert json.loads(sent.tools)[0]["function"] == {
        "name": "weather",
        "description": "Looks",
        "parameters": WEATHER["input_schema"],
    }
    assert json.loads(sent.template) == {"reasoning_effort": "low", "enable_thinking": True}
    params = sent.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 7, 0.9)
    assert params.one_call is True


@pytest.mark.parametrize("older", [False, True], ids=["output_config", "output_format"])
async def test_a_format_reaches_the_node(cluster: LoopbackCluster, older: bool):
    """Libraries of 2025 send `output_format`."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form: Any = {"type": "json_schema", "schema": schema}
    fields = {"output_format": form} if older else {"output_config": {"format": form}}
    async with library(cluster) as client:
        await client.messages.create(**ASK, extra_body=fields)
    grammar = generated(cluster).params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.value) == schema


async def test_answer_continues_a_prefilled_assistant_message(cluster: LoopbackCluster):
    async with library(cluster) as client:
        await client.messages.create(**ASK | {"messages": [*HELLO, {"role": "assistant", "content": "It is ("}]})
    assert json.loads(generated(cluster).template) == {"continue_final_message": True}


@pytest.mark.parametrize(("choice", "told"), [({"type": "none"}, False), ({"type": "auto"}, True), (None, True)])
async def test_tools_are_not_sent_with_tool_choice_none(cluster: LoopbackCluster, choice: dict | None, told: bool):
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=ASK | {"tools": [WEATHER], "tool_choice": choice})
    assert answer.status_code == 200
    assert bool(generated(cluster).tools) is told


async def test_thoughts_that_are_not_wanted_are_left_out(cluster: LoopbackCluster):
    play(cluster, play=spoken)
    async with library(cluster) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        whole = await client.messages.create(**ASK, thinking=thinking)
        async with client.messages.stream(**ASK, thinking=thinking) as stream:
            streamed = await stream.get_final_message()
    for one in (whole, streamed):
        assert "thinking" not in [block.type for block in one.content]


async def test_an_exact_count_without_an_answer(cluster: LoopbackCluster):
    async with library(cluster) as client:
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO, system="x" * 40, tools=[WEATHER])
    assert counted.input_tokens == 12
    (asked,) = [frame for node in cluster.nodes.values() for frame in node.heard if isinstance(frame, CountTokens)]
    assert [message.role for message in asked.messages] == ["system", "user"]
    assert "weather" in asked.tools
    assert len(cluster.dispatcher.commands) == 0


async def test_count_uses_another_node_while_one_is_lost(cluster: LoopbackCluster):
    import anthropic

    cluster.cut(cluster.nodes[next(iter(cluster.nodes))])
    async with library(cluster) as client:
        assert (await client.messages.count_tokens(model="tiny", messages=HELLO)).input_tokens == 2
        for node in cluster.nodes.values():
            if node.up:
                cluster.cut(node)
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.count_tokens(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503


async def test_models_in_anthropics_shape(cluster: LoopbackCluster):
    import anthropic

    async with library(cluster) as client:
        (model,) = [model async for model in client.models.list()]
        same = await client.models.retrieve("tiny")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("nothing")
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 4096)
    assert same == model


# errors


@pytest.mark.parametrize(
    ("key", "status", "kind"),
    [
        ("mp_wrong_key", 401, "authentication_error"),
        ("", 403, "permission_error"),
    ],
)
async def test_keys(cluster: LoopbackCluster, key: str, status: int, kind: str):
    import anthropic

    async with library(cluster, key or cluster.make_key("metrics")) as client:
        for call in (client.messages.create(**ASK), client.messages.count_tokens(model="tiny", messages=HELLO)):
            with pytest.raises(anthropic.APIStatusError) as caught:
                await call
            assert caught.value.status_code == status
            assert _error(caught.value)["type"] == kind
            assert caught.value.request_id


async def test_a_bearer_token_is_a_key_too(cluster: LoopbackCluster):
    async with library(cluster, token=cluster.key) as client:
        assert (await client.messages.create(**ASK)).content


async def test_an_unknown_model(cluster: LoopbackCluster):
    import anthropic

    async with library(cluster) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**ASK | {"model": "claude-sonnet-5"})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="nothing", messages=HELLO)
    assert _error(caught.value)["type"] == "not_found_error"


async def test_no_room_is_an_overload_with_its_numbers():
    import anthropic

    node = LoopbackNode("a", refuse=10**6, refusal=Refused(RefusalCode.UNSUPPORTED, "not this"))
    async with served(LoopbackCluster(node)) as cluster, library(cluster) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**ASK)
    assert _error(caught.value)["message"] == "not this"


async def test_a_stream_that_breaks_ends_with_an_error_event(cluster: LoopbackCluster):
    import anthropic

    play(cluster, step_seconds=0.05)
    async with library(cluster) as client:
        stream = await client.messages.create(**ASK, stream=True)
        assert (await anext(stream)).type == "message_start"
        for node in cluster.nodes.values():
            cluster.fail(node)
        with pytest.raises(anthropic.APIStatusError) as caught:
            _ = [event async for event in stream]
    assert _error(caught.value)["type"] == "api_error"
    assert _error(caught.value)["code"] == "engine_crashed"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
            "document",
        ),
        ({"container": "c"}, "container", "container"),
        ({"mcp_servers": [{}]}, "mcp_servers", "mcp_servers"),
        ({"speed": "fast"}, "speed", "speed"),
        ({"inference_geo": "eu"}, "inference_geo", "inference_geo"),
    ],
)
async def test_unsupported_field_is_refused_by_name(cluster: LoopbackCluster, fields: dict, param: str, word: str):
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=ASK | fields)
    error = answer.json()["error"]
    assert (answer.status_code, answer.json()["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert word in error["message"]


async def test_a_thread_is_refused_so_that_claude_code_sends_all_messages(cluster: LoopbackCluster):
    body = ASK | {
        "diagnostics": {"previous_message_id": None},
        "thinking": {"type": "adaptive", "display": "updates"},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 20000}},
    }
    async with plain(cluster) as client:
        whole = await client.post(PATH, json=body)
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            answer = await client.post(PATH, json=body | {"thread": thread})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["details"] == {"error_code": "thread_unsupported_request"}
            assert error["message"].endswith("send all messages")
    assert (whole.status_code, whole.headers["x-macpool-ignored"]) == (200, "diagnostics")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0, "stream": True}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"system": 5}, "system"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "regex", "schema": {}}}}, "output_config.format.type"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_it(cluster: LoopbackCluster, fields: dict, param: str):
    body = {name: value for name, value in (ASK | fields).items() if value is not None}
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_fields_without_an_effect_are_accepted(cluster: LoopbackCluster):
    ignored = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "speed": "standard",
        "container": None,
    }
    async with plain(cluster) as client:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
        answer = await client.post(PATH + "?beta=true", json=ASK | ignored, headers=headers)
    assert answer.status_code == 200
