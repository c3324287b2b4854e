"""Calls that models write incompletely: they are calls, with all arguments, and no markers are left in the content."""

import json
import time
from importlib import import_module
from pathlib import Path

import pytest

from node.engine.text import tokenizer_loader
from node.engine.text.call_repairs import wrap_parser
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tool_call_parser import MAX_BLOCK_CHARS, ToolCallParser
from tests.support.engine import vocabulary
from wire.frames import Channel

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "run",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        }
    ]
)
CALL = "<function=run>\n<parameter=command>\nls -l\n</parameter>\n</function>"
RUN = {"command": "ls -l"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def load(parser: str) -> Tokenizer:
        folder: Path = vocabulary.byte_level(tmp_path_factory.mktemp(parser))
        return tokenizer_loader.load(vocabulary.configure(folder, tool_parser_type=parser))

    return {parser: load(parser) for parser in ("qwen3_coder", "glm47")}


def read(model: Tokenizer, text: str, tools: str = TOOLS) -> tuple[str, list[object], str]:
    """Return content, arguments of the calls, and finish reason of an answer."""
    made = model.create_pipeline("r", 0, (), tools, False)
    pieces = [piece for token in model.encode(text, plain=False) for piece in made.feed(token).pieces]
    last, reason = made.finish("stop")
    pieces += last
    calls = [json.loads(json.loads(text)["arguments"]) for channel, text in pieces if channel is Channel.TOOL_CALL]
    return "".join(text for channel, text in pieces if channel is Channel.CONTENT), calls, reason


@pytest.mark.parametrize("end", ["", "\n</tool_call>", "</tool_call>\n"])
def test_a_call_without_its_first_marker_is_a_call(models: dict[str, Tokenizer], end: str):
    model = models["qwen3_coder"]
    assert read(model, f"I look.\n\n{CALL}{end}") == ("I look.\n\n", [RUN], "tool_calls")
    assert read(model, f"<tool_call>\n{CALL}\n</tool_call>") == ("", [RUN], "tool_calls")
    assert read(model, f"{CALL}{end}{CALL}{end}") == ("", [RUN, RUN], "tool_calls")


def test_all_functions_of_a_block_are_calls(models: dict[str, Tokenizer]):
    assert read(models["qwen3_coder"], f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>") == ("", [RUN, RUN], "tool_calls")


@pytest.mark.parametrize("text", ["a <function=run", "a <function=>b</function> c", "<function=run>\nno end"])
def test_text_that_is_no_call_stays_content(models: dict[str, Tokenizer], text: str):
    assert read(models["qwen3_coder"], text) == (text, [], "stop")
    assert read(models["qwen3_coder"], CALL, "") == (CALL, [], "stop")


@pytest.mark.parametrize("opening", ["<arg_value>", "\n<arg_value>", "\\n<arg_value>", ""])
def test_a_value_without_its_first_marker_is_an_argument(models: dict[str, Tokenizer], opening: str):
    text = f"<tool_call>run<arg_key>command</arg_key>{opening}ls -l</arg_value></tool_call>"
    assert read(models["glm47"], text) == ("", [RUN], "tool_calls")


def parse_block(parser: str, block: str) -> list[object]:
    """Return name and arguments of the calls in a block of a parser of mlx-lm."""
    parse = import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    calls = map(json.loads, ToolCallParser("c", wrap_parser(parser, parse), [[]], "end").parse_block(block))
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("parser", "unfinished"),
    [
        ("qwen3_coder", "<function="),
        ("qwen3_coder", "<function=a><parameter="),
        ("glm47", "a<arg_key>a</arg_key>"),
        ("glm47", "a<arg_key>a</arg_key><arg_value>"),
        ("gemma4", "call:a{"),
        ("gemma4", 'call:a{a:<|"|>'),
        ("function_gemma", "call:a{"),
    ],
)
def test_a_block_of_markers_without_ends_stops_no_other_answer(parser: str, unfinished: str):
    began = time.process_time()
    found = parse_block(parser, (unfinished * MAX_BLOCK_CHARS)[:MAX_BLOCK_CHARS])
    assert time.process_time() - began < 2
    assert found == ([("a", {})] if parser == "glm47" else [])


@pytest.mark.parametrize(
    ("parser", "block", "calls"),
    [
        (
            "qwen3_coder",
            "<function=a>\n<parameter=x>\n</function>\n</parameter>\n</function>\n<function=b>\n</function>",
            [("a", {"x": "</function>"}), ("b", {})],
        ),
        (
            "qwen3_coder",
            "<function=a>\n<parameter=x>\n<function=b></function>\n</parameter>\n</function>",
            [("a", {"x": "<function=b></function>"})],
        ),
        ("qwen3_coder", "<function=a>\n<parameter=x>\nno end\n</function>", [("a", {})]),
        ("glm47", "run<arg_key>a</arg_key>1</arg_value>,<arg_key>b</arg_key><arg_value>2", [("run", {"a": 1})]),
        ("glm47", "run<arg_key>a</arg_key></arg_key></arg_value>", [("run", {"a": "</arg_key>"})]),
        ("glm47", "run", [("run", {})]),
        ("gemma4", 'call:a{x:{y:1}}call:b{z:<|"|>}<|"|>}', [("a", {"x": {"y": 1}}), ("b", {"z": "}"})]),
        ("gemma4", "call:a{x:1}call:b{y:2", [("a", {"x": 1})]),
        ("gemma4", "call a", []),
        ("function_gemma", "call:a{x:1}call:b{y:", [("a", {"x": 1})]),
    ],
)
def test_complete_functions_and_arguments_of_a_block_are_kept(parser: str, block: str, calls: list[object]):
    assert parse_block(parser, block) == calls
