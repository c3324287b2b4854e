"""Names of tools that a model's format cannot express: the prompt gets other names, the client's calls keep theirs."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from node.engine.requests.preparer import RequestPreparer
from node.engine.requests.tool_names import NAMES, find_tool_names, rename_tools
from node.engine.text import harmony
from node.models.catalogue import ModelCatalogue
from node.settings import ModelSettings
from tests import models
from tests.support.engine import vocabulary
from wire.frames import Channel, CountTokens, Generate, GenerationParams, GrammarSpec, Message, ToolCall

ODD = "a.b-c:d/E_9"


def tools(*names: str) -> str:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return json.dumps([{"type": "function", "function": {"name": name, "parameters": schema}} for name in names])


CALLS = {
    "function_gemma": "call:{}{{a:1}}",
    "gemma4": "call:{}{{a:1}}",
    "glm47": "{}<arg_key>a</arg_key><arg_value>1</arg_value>",
    "harmony": '{} <|constrain|>json<|message|>{{"a":1}}',
    "json_tools": '{{"name":"{}","arguments":{{"a":1}}}}',
    "kimi_k2": '<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{"a":1}}<|tool_call_end|>',
    "minicpm5": '"{}"><param name="a">1</param>',
    "minimax_m2": '<invoke name="{}"><parameter name="a">1</parameter></invoke>',
    "mistral": '{}[ARGS]{{"a":1}}',
    "pythonic": "[{}(a=1)]",
    "qwen3_coder": "<function={}><parameter=a>1</parameter></function>",
}


@pytest.mark.parametrize("parser", CALLS)
def test_the_parser_of_a_format_reads_the_names_that_its_prompt_has(parser: str):
    """Without the names of this module, the parsers in `NAMES` lose the call, or return another name."""
    parse = (
        harmony.parse_call if parser == "harmony" else import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    )
    name = find_tool_names(parser, tools(ODD)).get(ODD, ODD)
    assert (name == ODD) == (parser not in NAMES)
    found = parse(CALLS[parser].format(name), json.loads(tools(name)))
    call = found[0] if isinstance(found, list) else found
    assert (call["name"], call["arguments"]) == (name, {"a": 1})


@pytest.mark.parametrize(
    ("parser", "names", "renamed"),
    [
        ("json_tools", [ODD], {}),
        ("gemma4", ["a-b", "a_b", "c"], {}),
        ("gemma4", ["a.b", "a_b", "a/b"], {"a.b": "a_b_2", "a/b": "a_b_3"}),
        ("pythonic", ["get-it", "class", "9x"], {"get-it": "get_it", "class": "_class", "9x": "_9x"}),
        ("function_gemma", ["a-b", "a-b"], {"a-b": "a_b"}),
        ("mistral", [""], {}),
        ("harmony", ["a.b", "a:b"], {"a:b": "a_b"}),
    ],
)
def test_only_names_that_the_format_cannot_express_are_replaced(parser: str, names: list[str], renamed: dict[str, str]):
    assert find_tool_names(parser, tools(*names)) == renamed


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"function": 1}]'])
def test_tools_that_are_no_functions_have_no_names(text: str):
    assert find_tool_names("mistral", text) == {}


def test_all_places_of_a_request_get_the_new_name():
    said = (Message("user", "hi", "a.b"), Message("assistant", tool_calls=(ToolCall("1", "a.b", "{}"),)))
    params = GenerationParams(grammar=GrammarSpec(calls="required", tool="a.b"))
    request = Generate(1, 1, "r", "m", (*said, Message("tool", "x", "a.b")), params, 0, tools=tools("a.b", "c"))
    found = rename_tools(request, {"a.b": "a_b"})
    assert json.loads(found.tools) == json.loads(tools("a_b", "c"))
    assert [message.name for message in found.messages] == ["a.b", "", "a_b"]
    assert found.messages[1].tool_calls == (ToolCall("1", "a_b", "{}"),)
    assert found.params.grammar == GrammarSpec(calls="required", tool="a_b")
    assert rename_tools(request, {}) is request


def test_the_model_gets_the_new_name_and_the_client_its_own(tmp_path: Path):
    folder = tmp_path / "models" / "m"
    shutil.copytree(models.path("qwen3"), folder)
    vocabulary.configure(folder, tool_parser_type="mistral")
    catalogue = ModelCatalogue(ModelSettings(folders=(str(tmp_path / "models"),), use_huggingface_cache=False), {})
    catalogue.scan()
    preparer = RequestPreparer(catalogue)
    ask = Generate(1, 1, "r", "m", (Message("user", "hi"),), GenerationParams(), 0, tools=tools("srv.look"))
    prepared = preparer.prepare(ask)
    assert prepared.refused is None
    tokenizer = preparer.load_tokenizer(catalogue.get_models()["m"])
    prompt = tokenizer.wrapper.decode(list(prepared.ids))
    assert ("srv_look" in prompt, "srv.look" in prompt) == (True, False)
    counted = preparer.count_tokens(CountTokens(1, "m", ask.messages, 0, ask.tools))
    assert counted.prompt_tokens == len(prepared.ids)
    assert prepared.create_pipeline is not None
    pipeline = prepared.create_pipeline(0)
    said = tokenizer.encode('[TOOL_CALLS]srv_look[ARGS]{"a": 1}', plain=False)
    pieces = [piece for token in said for piece in pipeline.feed(token).pieces]
    pieces += pipeline.finish("stop")[0]
    (call,) = [json.loads(text) for channel, text in pieces if channel is Channel.TOOL_CALL]
    assert (call["name"], json.loads(call["arguments"])) == ("srv.look", {"a": 1})
