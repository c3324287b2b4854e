"""A session of a coding agent in every dialect, with the official libraries, over a pool with a real model.

The embedded model was trained on these conversations with tools. Answers can therefore be compared word for word. The
model's own calls are sent back in the form in which each library keeps them.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.models.conversations import TOOL_USES, TOOLS
from tests.support.cluster.engine_pool import GREETING, HELLO, MLX, api
from tests.support.processes import NO_TLS, Pool, pool

if TYPE_CHECKING:
    from anthropic import Anthropic

pytestmark = pytest.mark.slow

USE: Any = TOOL_USES[0]
BOTH: Any = TOOL_USES[4]
NAME = "macpool-tiny"


@pytest.fixture(scope="module")
def made() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as one:
        one.up()
        one.join("studio", *MLX, f"models.preload={NAME}")
        yield one


@pytest.fixture
def client(made: Pool) -> OpenAI:
    return api(made)


@pytest.fixture
def claude(made: Pool) -> "Iterator[Anthropic]":
    from anthropic import Anthropic

    direct = httpx2.Client(trust_env=False, verify=NO_TLS, timeout=60)
    base = made.facts["base_url"].removesuffix("/v1")
    with Anthropic(base_url=base, api_key=made.key, max_retries=0, http_client=direct) as one:
        yield one


def theirs() -> Any:
    functions = (tool["function"] for tool in TOOLS)
    return [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in functions
    ]


def flat() -> Any:
    return [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_completions_go_on_with_a_rendered_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["Hello!", "Once"], max_tokens=4)
    by_ids = client.completions.create(model=NAME, prompt=[[5, 6, 7], [8]], max_tokens=2, n=2)
    assert [choice.index for choice in by_ids.choices] == [0, 1, 2, 3]
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 4
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    streamed = client.completions.create(model=NAME, prompt="Hello!", max_tokens=4, stream=True, echo=True)
    text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    assert text == "Hello!" + answer.choices[0].text


@pytest.mark.parametrize("use", [USE, BOTH], ids=["one call", "two calls"])
def test_anthropics_library_calls_a_tool_and_is_answered(claude: "Anthropic", use: Any) -> None:
    asking: Any = {"model": NAME, "max_tokens": 200, "tools": theirs(), "extra_body": {"temperature": 0.0}}
    messages: list[Any] = [{"role": "user", "content": use.prompt}]
    counted = claude.messages.count_tokens(model=NAME, messages=messages, tools=theirs()).input_tokens
    whole = claude.messages.create(messages=messages, **asking)
    with claude.messages.stream(messages=messages, **asking) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == whole.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == list(use.calls)
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result}
        for call, result in zip(calls, use.results, strict=True)
    ]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    after = claude.messages.create(messages=messages, **asking)
    assert [block.text for block in after.content if block.type == "text"] == [use.answer]
    assert after.stop_reason == "end_turn"


def test_one_call_at_most(client: OpenAI, claude: "Anthropic") -> None:
    every: Any = TOOLS
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": BOTH.prompt}], tools=every, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    said = claude.messages.create(
        model=NAME,
        max_tokens=200,
        tools=theirs(),
        messages=[{"role": "user", "content": BOTH.prompt}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in said.content].count("tool_use") == 1


def test_the_matched_stop_sequence_is_reported(claude: "Anthropic") -> None:
    answer = claude.messages.create(
        model=NAME, max_tokens=50, messages=[{"role": "user", "content": HELLO}], stop_sequences=["very"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "very")
    assert answer.content[0].text == GREETING.partition("very")[0]  # pyright: ignore


def test_responses_call_a_tool_and_go_on_by_id(client: OpenAI) -> None:
    with client.responses.stream(model=NAME, input=BOTH.prompt, tools=flat(), temperature=0.0) as stream:
        first = list(stream)[-1].response  # pyright: ignore
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == list(BOTH.calls)
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, BOTH.results, strict=True)
    ]
    after = client.responses.create(
        model=NAME, input=results, previous_response_id=first.id, tools=flat(), temperature=0.0
    )
    assert after.output_text == BOTH.answer
    items: Any = [{"role": "user", "content": BOTH.prompt}, *[item.to_dict() for item in first.output], *results]
    by_items = client.responses.create(
        model=NAME,
        tools=flat(),
        store=False,
        temperature=0.0,
        input=items,
    )
    assert by_items.output_text == BOTH.answer


def test_ollamas_routes_answer(made: Pool) -> None:
    base = made.facts["base_url"].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {made.key}"}
    asking: Any = {
        "model": NAME + ":latest",
        "messages": [{"role": "user", "content": USE.prompt}],
        "tools": list(TOOLS),
        "options": {"temperature": 0},
        "stream": False,
    }
    with httpx.Client(trust_env=False, verify=NO_TLS, base_url=base, headers=headers, timeout=60) as ollama:
        first = ollama.post("/api/chat", json=asking).json()["message"]
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in first["tool_calls"]] == list(
            USE.calls
        )
        asking["messages"] += [first, {"role": "tool", "content": USE.results[0], "tool_name": USE.calls[0][0]}]
        assert ollama.post("/api/chat", json=asking).json()["message"]["content"] == USE.answer
        answer = ollama.post("/api/generate", json={"model": NAME, "prompt": HELLO, "options": {"temperature": 0}})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert "".join(line["response"] for line in lines) == GREETING
        assert lines[-1]["eval_duration"] > 0
        assert [model["name"] for model in ollama.get("/api/ps").json()["models"]] == [NAME]


# structured output


class User(BaseModel):
    """The object that the model must generate."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def test_an_answer_is_parsed_into_a_model(client: OpenAI, claude: "Anthropic"):
    said: Any = [{"role": "user", "content": "Say hello in French."}]
    answer = client.chat.completions.parse(
        model=NAME, messages=said, response_format=User, temperature=0, max_tokens=200
    )
    found = answer.choices[0].message.parsed
    assert isinstance(found, User)
    assert answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(
        model=NAME, input="Say hello in Greek.", text_format=User, temperature=0, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, User)
    message = claude.messages.parse(
        model=NAME, messages=said, output_format=User, max_tokens=200, extra_body={"temperature": 0}
    )
    assert isinstance(message.parsed_output, User)


def test_a_call_is_made_because_it_is_required(client: OpenAI, claude: "Anthropic"):
    said: Any = [{"role": "user", "content": "Hello!"}]
    tools: Any = TOOLS
    answer = client.chat.completions.create(
        model=NAME, messages=said, tools=tools, tool_choice="required", temperature=0, max_tokens=200
    )
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    assert isinstance(json.loads(call.function.arguments), dict)
    named: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    message = claude.messages.create(
        model=NAME, messages=said, tools=theirs(), tool_choice=named, max_tokens=200, extra_body={"temperature": 0}
    )
    assert [block.name for block in message.content if block.type == "tool_use"] == ["add"]
    assert message.stop_reason == "tool_use"


def test_a_hostile_schema_is_a_400(client: OpenAI):
    endless: Any = {"allOf": [{"pattern": f".*a.{{{count}}}b.*"} for count in range(30)]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    said: Any = [{"role": "user", "content": "Hello!"}]
    with pytest.raises(BadRequestError, match="too long to compile"):
        client.chat.completions.create(model=NAME, messages=said, response_format=form)
