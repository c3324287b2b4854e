"""`/v1/responses` with OpenAI's own library over a real server, and in the shapes of coding agents."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from router.dialects.openai.responses_store import ResponseStore, build_stored_response
from router.settings import RouterSettings
from tests.contract.dialects.test_anthropic import generated, play, spoken
from tests.contract.dialects.test_chat import collect, library, plain, served, until
from tests.support.cluster.asgi_call import Call
from tests.support.cluster.loopback_cluster import TEXT, LoopbackCluster, LoopbackNode, a_model
from wire.frames import Channel, Delta, Deltas, Message, ToolCall

ALL = "".join(TEXT)
ASK: dict[str, Any] = {"model": "tiny", "input": "hello"}
PATH = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Looks",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {}}},
}


@pytest.fixture
async def cluster() -> AsyncIterator[LoopbackCluster]:
    nodes = [LoopbackNode(name, models=(a_model(features=("tools", "grammar")),)) for name in ("studio", "mini")]
    async with served(LoopbackCluster(*nodes)) as one:
        yield one


async def test_a_whole_answer(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.responses.create(**ASK, instructions="be brief", metadata={"a": "b"}, temperature=0.5)
    assert answer.output_text == ALL
    assert (answer.object, answer.status, answer.model, answer.error) == ("response", "completed", "tiny", None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(TEXT)
    assert generated(cluster).messages == (Message("system", "be brief"), Message("user", "hello"))


async def test_a_limit_makes_it_incomplete(cluster: LoopbackCluster):
    async with library(cluster) as client:
        answer = await client.responses.create(**ASK, max_output_tokens=2)
        events = await collect(await client.responses.create(**ASK, max_output_tokens=2, stream=True))
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"


async def test_the_events_of_a_text(cluster: LoopbackCluster):
    async with library(cluster) as client:
        events = await collect(await client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(TEXT),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ALL
    assert events[-1].response.output_text == ALL
    assert events[-1].response.usage.output_tokens == len(TEXT)
    assert events[0].response.status == "in_progress"
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_thoughts_and_calls(cluster: LoopbackCluster):
    play(cluster, play=spoken, thought=2)
    async with library(cluster) as client:
        whole = await client.responses.create(**ASK, tools=[WEATHER])
        events = await collect(await client.responses.create(**ASK, tools=[WEATHER], stream=True))
        async with client.responses.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            helped = await stream.get_final_response()
    final = events[-1].response
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert final.output[0].content[0].text == whole.output[0].content[0].text == "let me"
    call = final.output[2]
    assert (call.call_id, call.name, call.arguments) == ("call_1", "weather", '{"city": "Ulm"}')
    assert final.usage.output_tokens_details.reasoning_tokens == 2
    assert helped.output_text == final.output_text == "I look.Done."
    assert "response.reasoning_text.delta" in kinds
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Ulm"}'] * 2
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2, 3, 4]
    assert whole.tools[0].name == "weather"


async def test_a_conversation_of_items_reaches_the_node(cluster: LoopbackCluster):
    items: Any = [
        {"role": "developer", "content": "help"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sun?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]
    async with library(cluster) as client:
        await client.responses.create(
            model="tiny",
            input=items,
            tools=[WEATHER],
            parallel_tool_calls=False,
            reasoning={"effort": "low"},
            text={"format": {"type": "text"}},
            include=["reasoning.encrypted_content"],
            store=False,
            prompt_cache_key="x",
            truncation="disabled",
            user="me",
            service_tier="auto",
        )
    sent = generated(cluster)
    calls = (ToolCall("c1", "weather", "{}"), ToolCall("c2", "weather", "{}"))
    assert sent.messages == (
        Message("developer", "help"),
        Message("user", "sun?"),
        Message("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        Message("tool", "yes", tool_call_id="c1"),
        Message("tool", "no", tool_call_id="c2"),
    )
    assert sent.params.one_call is True
    assert json.loads(sent.template) == {"reasoning_effort": "low"}
    assert json.loads(sent.tools)[0]["function"]["strict"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_response_continues_a_conversation(cluster: LoopbackCluster, stream: bool):
    play(cluster, play=spoken)
    async with library(cluster) as client:
        if stream:
            first = (await collect(await client.responses.create(**ASK, instructions="one", stream=True)))[-1].response
        else:
            first = await client.responses.create(**ASK, instructions="one")
        again: Any = [{"type": "function_call_output", "call_id": "call_1", "output": "sun"}]
        await client.responses.create(model="tiny", input=again, previous_response_id=first.id, instructions="two")
    calls = tuple(ToolCall(name, "weather", '{"city": "Ulm"}') for name in ("call_1", "call_2"))
    assert generated(cluster).messages == (
        Message("system", "two"),
        Message("user", "hello"),
        Message("assistant", "I look.Done.", tool_calls=calls, reasoning="let me"),
        Message("tool", "sun", tool_call_id="call_1"),
    )


async def test_stored_response_belongs_to_its_key(cluster: LoopbackCluster):
    async with library(cluster) as client:
        kept = await client.responses.create(**ASK)
        not_kept = await client.responses.create(**ASK, store=False)
        assert (await client.responses.retrieve(kept.id)).output_text == ALL
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(not_kept.id)
        async with plain(cluster, cluster.make_key("infer")) as other:
            assert (await other.get(f"{PATH}/{kept.id}")).status_code == 404
            assert (await other.delete(f"{PATH}/{kept.id}")).status_code == 404
            asked = await other.post(PATH, json=ASK | {"previous_response_id": kept.id})
            assert (asked.status_code, asked.json()["error"]["code"]) == (400, "previous_response_not_found")
        await client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id)


async def test_use_of_a_stored_response_that_is_not_supported_is_refused_by_name(cluster: LoopbackCluster):
    async with library(cluster) as client:
        kept = await client.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError, match="cannot be streamed: retrieve it without stream"):
            await client.responses.retrieve(kept.id, stream=True)
        with pytest.raises(openai.NotFoundError, match=f"{kept.id}/cancel is not supported: a request ends when"):
            await client.responses.cancel(kept.id)
        with pytest.raises(openai.NotFoundError, match="input_items is not supported: send the items"):
            await client.responses.input_items.list(kept.id)
        with pytest.raises(openai.NotFoundError, match="input_tokens is not supported: /v1/messages/count_tokens"):
            await client.responses.input_tokens.count(model="tiny", input="hello")
        assert (await client.responses.retrieve(kept.id)).id == kept.id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reference_to_an_item_is_the_item(cluster: LoopbackCluster, stream: bool):
    play(cluster, play=spoken)
    hello: Any = {"role": "user", "content": "hello"}
    async with library(cluster) as client:
        if stream:
            first = (await collect(await client.responses.create(**ASK, stream=True)))[-1].response
        else:
            first = await client.responses.create(**ASK)
        items: list[Any] = [item.model_dump(exclude_unset=True) for item in first.output]
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        conversations: list[Any] = []
        for sent in (items, references):
            output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
            await client.responses.create(model="tiny", input=[hello, *sent, output])
            conversations.append(generated(cluster).messages)
    assert conversations[0] == conversations[1]
    assert [message.role for message in conversations[1]][:2] == ["user", "assistant"]
    assert conversations[1][1].reasoning == "let me"
    assert len(conversations[1][1].tool_calls) == 2


async def test_reference_to_an_item_that_is_not_stored_for_the_key_is_refused(cluster: LoopbackCluster):
    async with library(cluster) as client:
        kept, gone = [await client.responses.create(**ASK) for _ in range(2)]
        hidden = await client.responses.create(**ASK, store=False)
        await client.responses.delete(gone.id)
    item = kept.output[0].id
    wrong = ["msg_1", f"{item}0", gone.output[0].id, hidden.output[0].id]
    other = cluster.make_key("infer")
    for key, ids in [*(("", [name]) for name in wrong), ("", [item, item]), (other, [item])]:
        references = [{"type": "item_reference", "id": name} for name in ids]
        async with plain(cluster, key or cluster.key) as client:
            answer = await client.post(PATH, json=ASK | {"input": references})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"input[{len(ids) - 1}].id"), ids
        assert "is stored for this key" in error["message"]


def test_response_store_is_bounded():
    kept = ResponseStore(most=5, nbytes=10_000, of_key=3, key_bytes=5_000)
    for number in range(9):
        kept.put("a", f"a{number}", build_stored_response(b"x" * 100, ()))
    assert [kept.get("a", f"a{number}") is not None for number in range(5, 9)] == [False, True, True, True]
    kept.put("a", "large", build_stored_response(b"x" * 4_900, ()))
    assert kept.get("a", "a8") is not None
    assert kept.get("a", "a7") is None
    kept.put("a", "too large", build_stored_response(b"x" * 5_001, ()))
    assert kept.get("a", "too large") is None
    for number in range(9):
        kept.put(f"key{number}", "one", build_stored_response(b"x", (Message("user", "y" * 1_000),)))
    assert len(kept) == 5
    assert kept.nbytes <= 10_000
    for number in range(9):
        kept.drop(f"key{number}", "one")
    assert len(kept) == 0
    assert kept.nbytes == 0


async def test_failed_stream_has_the_reason(cluster: LoopbackCluster):
    play(cluster, step_seconds=0.05)
    async with library(cluster) as client:
        stream = await client.responses.create(**ASK, stream=True)
        assert (await anext(stream)).type == "response.created"
        for node in cluster.nodes.values():
            cluster.fail(node)
        events = await collect(stream)
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"


def read_id(call: Call) -> str:
    """Return the id of a streamed answer."""
    return json.loads(call.body.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]


@pytest.mark.parametrize("leaves", [True, False])
async def test_answer_so_far_of_a_stream_without_end_can_be_continued(cluster: LoopbackCluster, leaves: bool):
    play(cluster, mute=True)
    call = Call(cluster, ASK | {"stream": True}, path=PATH)
    running = asyncio.create_task(call.run())
    async with asyncio.timeout(20):
        await until(lambda: any(one.reserved for one in cluster.nodes.values()))
        node = next(one for one in cluster.nodes.values() if one.reserved)
        request = next(iter(node.reserved))
        cluster.say(node, Deltas((Delta(request, 0, (1,), ((Channel.CONTENT, "Once upon"),)),)))
        await until(lambda: b"Once upon" in b"".join(sent.get("body", b"") for sent in call.sent))
        if leaves:
            call.leave()
        else:
            while not running.done():  # also on the node that resumes the answer
                for one in cluster.nodes.values():
                    cluster.fail(one)
                await asyncio.sleep(0)
        await running
    first = read_id(call)
    play(cluster, mute=False)
    async with library(cluster) as client:
        kept = await client.responses.retrieve(first)
        assert (kept.status, kept.output_text) == ("cancelled" if leaves else "failed", "Once upon")
        more: Any = [{"type": "item_reference", "id": kept.output[0].id}, {"role": "user", "content": "more"}]
        await client.responses.create(model="tiny", input=more)
        by_reference = generated(cluster).messages
        await client.responses.create(model="tiny", input="more", previous_response_id=first)
    assert by_reference == (Message("assistant", "Once upon"), Message("user", "more"))
    assert generated(cluster).messages == (Message("user", "hello"), *by_reference)


async def test_answer_so_far_of_a_client_that_does_not_read_can_be_continued():
    node = LoopbackNode("studio", mute=True)
    async with served(LoopbackCluster(node, settings=RouterSettings(slow_client_seconds=0.1))) as cluster:
        call = Call(cluster, ASK | {"stream": True}, path=PATH)
        running = asyncio.create_task(call.run())
        async with asyncio.timeout(20):
            await until(lambda: node.reserved)
            request = next(iter(node.reserved))
            for text in ("Once", " upon"):
                cluster.say(node, Deltas((Delta(request, 0, (1,), ((Channel.CONTENT, text),)),)))
                await call.begun.wait()
                call.reading.clear()
            await running
        async with library(cluster) as client:
            kept = await client.responses.retrieve(read_id(call))
    assert (kept.status, kept.output_text) == ("cancelled", "Once upon")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_unsupported_field_is_refused_by_name(cluster: LoopbackCluster, fields: dict, param: str):
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=ASK | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"model": None}, "model"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": [5]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": []}, "messages"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_it(cluster: LoopbackCluster, fields: dict, param: str):
    async with plain(cluster) as client:
        answer = await client.post(PATH, json=ASK | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_other_methods_and_keys(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        assert (await client.get(PATH)).status_code == 405
        assert (await client.post(PATH + "/resp_x")).status_code == 405
        assert (await client.get(PATH + "/resp_x", headers={"authorization": ""})).status_code == 401
    async with plain(cluster, cluster.make_key("metrics")) as client:
        for method, path in (("POST", PATH), ("GET", PATH + "/resp_x"), ("DELETE", PATH + "/resp_x")):
            assert (await client.request(method, path, json=ASK)).status_code == 403
