"""Answers of gpt-oss: channels, recipients, and answers that do not keep to the format."""

import json
import time
from pathlib import Path

import pytest

from node.engine.text import harmony, tokenizer_loader
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tool_call_parser import MAX_BLOCK_CHARS
from node.models.template_files import has_reasoning
from tests.support.engine import vocabulary
from wire.frames import Channel, Generate, GenerationParams, Message, ToolCall

TOOLS = json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}])
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.thinking }}|{{ m.content }}<|end|>{% endfor %}"
    "{# <|channel|>analysis<|message|> #}<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vocabulary.byte_level(tmp_path_factory.mktemp("oss"), tokens=(*harmony.TOKENS, "<|constrain|>"))
    return tokenizer_loader.load(vocabulary.configure(folder, chat_template=TEMPLATE, eos_token="<|return|>"))


def read(
    model: Tokenizer, text: str, tools: str = TOOLS, end: str = "stop"
) -> tuple[str, str, list[tuple[str, object]], str]:
    """Return content, reasoning, calls and finish reason of an answer."""
    made = model.create_pipeline("r", 0, (), tools, False)
    pieces = [piece for token in model.encode(text, plain=False) for piece in made.feed(token).pieces]
    last, reason = made.finish(end)
    pieces += last
    calls = [json.loads(text) for channel, text in pieces if channel is Channel.TOOL_CALL]
    content, reasoning = (
        "".join(text for channel, text in pieces if channel is wanted)
        for wanted in (Channel.CONTENT, Channel.REASONING)
    )
    return content, reasoning, [(call["name"], json.loads(call["arguments"])) for call in calls], reason


@pytest.mark.parametrize("tools", [TOOLS, ""])
def test_analysis_is_reasoning_and_final_is_content(model: Tokenizer, tools: str):
    text = f"{THOUGHT}<|channel|>final<|message|>It is sunny.\n\nEnjoy!<|return|>"
    assert read(model, text, tools) == ("It is sunny.\n\nEnjoy!", "Need the weather.", [], "stop")
    assert read(model, "<|channel|>final<|message|>Hi") == ("Hi", "", [], "stop")


@pytest.mark.parametrize(
    "message",
    [
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"}',
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        '<|channel|>analysis to=functions.get_weather code<|message|>\n{"city": "Oslo"}\n<|call|>',
    ],
    ids=["constrained", "plain", "recipient first", "on analysis"],
)
def test_a_message_to_a_function_is_a_call(model: Tokenizer, message: str):
    call = ("get_weather", {"city": "Oslo"})
    assert read(model, THOUGHT + message) == ("", "Need the weather.", [call], "tool_calls")
    preamble = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    assert read(model, preamble + message) == ("One moment.", "", [call], "tool_calls")


def test_a_call_that_the_token_limit_cuts_before_its_arguments_is_left_out(model: Tokenizer):
    message = '<|channel|>commentary to=functions.get_weather<|message|>{"city": {"a": 1}}'
    calls = [len(read(model, THOUGHT + message[:size], end="length")[2]) for size in range(len(message) + 1)]
    assert calls == [0] * len(message) + [1]
    whole = THOUGHT + message.partition("{")[0]
    assert read(model, whole) == ("", "Need the weather.", [("get_weather", {})], "tool_calls")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello there", "Hello there"),
        ("<|channel|>other<|message|>Hello", "Hello"),
        ('<|channel|>commentary to=python<|message|>{"a": 1}', '{"a": 1}'),
        ("<|channel|>commentary to=functions.get_weather<|message|>no JSON<|call|>", None),
        ("<|channel|>commentary to=functions.get_weather", None),
    ],
)
def test_no_answer_is_lost_that_does_not_keep_to_the_format(model: Tokenizer, text: str, content: str | None):
    expected = text.removeprefix("<|channel|>commentary").removesuffix("<|call|>") if content is None else content
    assert read(model, text) == (expected, "", [], "stop")


def test_text_that_continues_a_message_of_the_prompt_is_content_at_once(model: Tokenizer):
    made = model.create_pipeline("r", 0, (), TOOLS, False, continued=True)
    assert [piece for token in model.encode("Hi", plain=False) for piece in made.feed(token).pieces] == [
        (Channel.CONTENT, "H"),
        (Channel.CONTENT, "i"),
    ]
    text = f"<|end|><|start|>assistant{THOUGHT}<|channel|>final<|message|>Ho<|return|>"
    pieces = [piece for token in model.encode(text, plain=False) for piece in made.feed(token).pieces]
    assert "".join(text for channel, text in pieces if channel is Channel.CONTENT) == "Ho"


def test_the_model_has_calls_and_reasoning_and_ends_at_a_call(model: Tokenizer, tmp_path: Path):
    words = model.wrapper.get_vocab()
    assert model.features == ("tools",)
    assert {words[token] for token in harmony.ENDS} <= model.eos
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert has_reasoning(tmp_path)


def test_a_call_with_reasoning_and_content_has_only_its_content(model: Tokenizer):
    call = ToolCall("c1", "get_weather", "{}")
    messages = (
        Message("user", "weather?"),
        Message("assistant", "", reasoning="Look it up.", tool_calls=(call,)),
        Message("tool", "sunny", tool_call_id="c1"),
        Message("assistant", "Once more.", reasoning="Not sure.", tool_calls=(call,)),
    )
    request = Generate(1, 1, "r1", "m", messages, GenerationParams(), 0)
    prompt = b"".join(map(model.token_bytes, model.tokenize_request(request).ids)).decode()
    assert "<|start|>assistant<|message|>Look it up.|<|end|>" in prompt
    assert "<|start|>assistant<|message|>|Once more.<|end|>" in prompt


@pytest.mark.parametrize(
    "block", ["a" * MAX_BLOCK_CHARS, "a{<|message|>{}", "<|message|>{}"], ids=["long", "brace", "nameless"]
)
def test_a_block_without_name_or_arguments_is_refused_at_once(block: str):
    began = time.process_time()
    with pytest.raises(ValueError, match="a call has a name, a header and arguments"):
        harmony.parse_call(block, [])
    assert time.process_time() - began < 2
