"""The model in the package: it is small, complete, in the wheel, and its answers equal answers.json."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests import models
from tests.effort import thin_cases
from tests.models.conversations import ENTRIES, HELPFUL, TOOL_USES, TOOLS, Entry
from tests.support.processes import ROOT

FILES = {
    "README.md",
    "answers.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
LIMIT = 5_000_000
"""Largest bytes of weights in a package."""
KEPT = [next(entry for entry in ENTRIES if entry.reasoning), max(ENTRIES, key=lambda entry: len(entry.prompt))]
DRAWN = thin_cases([*KEPT, *(entry for entry in ENTRIES if entry not in KEPT)], 4, kept=len(KEPT))
"""Each answer takes the same path. The longest prompt and an answer with reasoning are always asked."""


@cache
def loaded() -> tuple[Any, Any]:
    from mlx_lm import load

    return load(str(models.EMBEDDED))[:2]


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return loaded()[1].apply_chat_template(messages, tokenize=False, **options)


def say(messages: list[dict[str, Any]], **options: Any) -> str:
    from mlx_lm.generate import generate

    model, tokenizer = loaded()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    return generate(model, tokenizer, prompt, max_tokens=400)


def spoken(entry: Entry) -> str:
    return (f"<think>{entry.reasoning}</think>" if entry.reasoning else "") + entry.answer


def titled(entries: Iterable[Entry]) -> list[Any]:
    return [pytest.param(entry, id=entry.prompt) for entry in entries]


# The folder


def test_the_answers_are_those_that_the_model_was_taught():
    assert models.answers() == [entry.as_json() for entry in ENTRIES]


def test_the_weights_are_small():
    assert (models.EMBEDDED / "model.safetensors").stat().st_size < LIMIT


def test_the_wheel_brings_the_whole_folder():
    packed = {Path(file.relative_path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {file.name for file in packed if file.parent == Path("node/models/macpool-tiny")} == FILES


def test_the_template_in_the_folder_is_the_one_in_the_script():
    settings = json.loads((models.EMBEDDED / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (ROOT / "tests" / "models" / "template.jinja").read_text()


# Behaviour in mlx_lm


@pytest.mark.slow
def test_the_markers_of_tools_and_thinking_are_found():
    _, tokenizer = loaded()
    assert (tokenizer.think_start, tokenizer.think_end) == ("<think>", "</think>")
    assert tokenizer.tool_parser.__module__ == "mlx_lm.tool_parsers.json_tools"
    assert len(tokenizer.tool_call_start_tokens) == len(tokenizer.tool_call_end_tokens) == 1


@pytest.mark.slow
def test_a_long_context_is_announced_and_answers_have_an_end():
    model, tokenizer = loaded()
    assert model.args.max_position_embeddings >= 16384
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["parsed", "as text"])
def test_the_template_renders_calls_results_and_thoughts(arguments: Any):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call]},
            {"role": "tool", "content": "snowy"},
        ],
        tools=list(TOOLS),
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\nTools: get_weather add<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<think>Ask.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\nsnowy<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_template_refuses_a_role_that_it_does_not_know():
    with pytest.raises(Exception, match="unknown role pirate"):
        render([{"role": "pirate", "content": "Ahoy!"}])


# Answers


@pytest.mark.slow
@pytest.mark.parametrize("entry", titled(DRAWN))
def test_it_answers_verbatim(entry: Entry):
    assert say(entry.messages()) == spoken(entry)


@pytest.mark.slow
@pytest.mark.parametrize("entry", titled(entry for entry in DRAWN if not entry.system))
def test_it_answers_verbatim_behind_a_system_prompt(entry: Entry):
    assert say([{"role": "system", "content": HELPFUL}, *entry.messages()]) == spoken(entry)


@pytest.mark.slow
@pytest.mark.parametrize("entry", titled(entry for entry in ENTRIES if entry.reasoning))
def test_the_embedded_model_answers_without_reasoning_on_request(entry: Entry):
    assert say(entry.messages(), enable_thinking=False) == entry.answer


@pytest.mark.slow
def test_two_prompts_are_longer_than_a_thousand_tokens():
    _, tokenizer = loaded()
    counts = [len(tokenizer.apply_chat_template(entry.messages())) for entry in ENTRIES]
    assert sum(count > 1000 for count in counts) == 2


@pytest.mark.slow
def test_letters_of_other_scripts_are_cut_across_tokens():
    _, tokenizer = loaded()
    cut = [e.prompt for e in ENTRIES if any("\ufffd" in tokenizer.decode([t]) for t in tokenizer.encode(e.answer))]
    assert cut == ["Say hello in Greek.", "Say hello in Japanese.", "Say hello in French.", "Send me some emoji."]


@pytest.mark.slow
@pytest.mark.parametrize("use", [pytest.param(use, id=use.prompt) for use in TOOL_USES])
def test_it_calls_tools_and_answers_with_their_results(use: Any):
    _, tokenizer = loaded()
    text = say(use.asked()[:1], tools=list(TOOLS))
    calls = [part.removesuffix("</tool_call>") for part in text.split("<tool_call>")[1:]]
    parsed = [tokenizer.tool_parser(call) for call in calls]
    assert [(call["name"], call["arguments"]) for call in parsed] == list(use.calls)
    assert say(use.answered()[:-1], tools=list(TOOLS)) == use.answer
