"""Answers that follow a grammar, on a trained tiny model: they match it, and other answers do not change."""

import json
import re
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from node.engine.grammar.logits_mask import LogitsMask
from node.engine.grammar.matcher import GrammarFailed, GrammarMatcher
from tests import models
from tests.effort import thin_cases
from tests.models.conversations import TOOLS
from tests.support.engine.text_engine import GREEDY, Driver
from tests.support.schemas import violations
from wire.frames import Channel, Failed, Finished, GenerationParams, GrammarSpec, Refusal
from wire.refusals import RefusalCode

USER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec("json_schema", json.dumps(USER))
THINK = next(one for one in models.answers() if "reasoning" in one)
GIVEN = json.dumps(TOOLS)
STRICT = json.dumps([{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS])


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(models.path("llama"))


def bound(grammar: GrammarSpec, **more: object) -> GenerationParams:
    fields: dict[str, object] = {"temperature": 0.0, "max_tokens": 120, "grammar": grammar} | more
    return GenerationParams(**fields)  # type: ignore[arg-type]


def finished(driver: Driver, number: int) -> Finished:
    end = driver.end(number)
    assert isinstance(end, Finished), end
    return end


def content(driver: Driver, prompt: str, params: GenerationParams, **fields: object) -> str:
    number = driver.ask(prompt, params, **fields)
    assert finished(driver, number).reasons == ("stop",)
    return driver.text[number, 0, Channel.CONTENT]


@pytest.mark.parametrize("prompt", ["Give me a user as JSON.", "Hello!", "Say hello in Japanese."])
@pytest.mark.parametrize("seed", [None, 7])
def test_an_answer_follows_its_schema(driver: Driver, prompt: str, seed: int | None):
    params = bound(SCHEMA) if seed is None else bound(SCHEMA, temperature=1.5, seed=seed, max_tokens=400)
    assert violations(json.loads(content(driver, prompt, params)), USER) == []


def test_an_answer_that_the_model_knows_is_not_bent(driver: Driver):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
    }
    said = content(driver, "Give me a user as JSON.", bound(GrammarSpec("json_schema", json.dumps(schema))))
    assert said == '{"name": "Ada", "age": 36, "tags": ["math", "code"]}'


def test_other_kinds_of_grammar(driver: Driver):
    assert re.fullmatch(
        "[0-9]{3}-[0-9]{4}", content(driver, "Hello!", bound(GrammarSpec("regex", "[0-9]{3}-[0-9]{4}")))
    )
    assert content(driver, "Hello!", bound(GrammarSpec("choice", '["maybe", "n\\u00e4\\"in\\n"]'))) in (
        "maybe",
        'nä"in\n',
    )
    lark = 'start: GREETING ", " NAME\nGREETING: "Servus" | "Grüß Gott"\nNAME: /[a-c]{2,3}/'
    assert re.fullmatch("(Servus|Grüß Gott), [a-c]{2,3}", content(driver, "Hello!", bound(GrammarSpec("lark", lark))))
    gbnf = 'root ::= "yes" | "no"'
    assert content(driver, "Hello!", bound(GrammarSpec("lark", gbnf))) in ("yes", "no")
    json.loads(content(driver, "Give me a user as JSON.", bound(GrammarSpec("json_object"))))


def test_blanks_of_an_answer_are_those_of_its_grammar(driver: Driver):
    blank = Tokenizer.from_file(str(models.path("llama") / "tokenizer.json")).token_to_id("_")
    grammar = GrammarSpec("json_schema", SCHEMA.value, "_")
    said = content(driver, "Give me a user as JSON.", bound(grammar, logit_bias=((blank, 100.0),)))
    assert "_" in said
    assert violations(json.loads(said.replace("_", "")), USER) == []


def test_a_thought_comes_first_and_is_free(driver: Driver):
    number = driver.ask(THINK["prompt"], bound(GrammarSpec("regex", "[0-9] [+] 2 = 4[.]")))
    assert finished(driver, number).reasons == ("stop",)
    assert driver.text[number, 0, Channel.REASONING] == THINK["reasoning"]
    assert driver.text[number, 0, Channel.CONTENT] == THINK["answer"]


def test_a_thought_that_the_prompt_opens_or_closes(driver: Driver):
    closed = driver.ask(THINK["prompt"], bound(SCHEMA), template='{"enable_thinking": false}')
    finished(driver, closed)
    assert driver.text[closed, 0, Channel.REASONING] == ""
    assert violations(json.loads(driver.text[closed, 0, Channel.CONTENT]), USER) == []


def test_a_thought_does_not_end_the_answer(driver: Driver):
    """A bias for the end token has no effect within the reasoning, because the answer would be empty."""
    (eos,) = driver.tokenizer().eos
    params = bound(SCHEMA, logit_bias=((eos, 12.0),), max_tokens=200)
    number = driver.ask(THINK["prompt"], params)
    end = finished(driver, number)
    if end.reasons == ("stop",):
        assert violations(json.loads(driver.text[number, 0, Channel.CONTENT]), USER) == []
    else:
        assert end.completion_tokens == 200


def test_others_in_the_batch_answer_as_if_nothing_was(driver: Driver):
    plain = [one for one in models.answers() if "system" not in one and "reasoning" not in one][:3]
    alone = [driver.ask(one["prompt"]) for one in plain]
    for number in alone:
        finished(driver, number)
    beside = driver.ask("Hello!", bound(SCHEMA, max_tokens=200))
    numbers = [driver.ask(one["prompt"]) for one in plain]
    for before, number in zip(alone, numbers, strict=True):
        finished(driver, number)
        assert driver.ids[number, 0] == driver.ids[before, 0]
    finished(driver, beside)
    assert violations(json.loads(driver.text[beside, 0, Channel.CONTENT]), USER) == []


def test_every_choice_has_a_grammar_of_its_own(driver: Driver):
    number = driver.ask("Hello!", bound(SCHEMA, n=3, temperature=1.2, seed=5, max_tokens=300))
    assert finished(driver, number).reasons == ("stop",) * 3
    said = [driver.text[number, choice, Channel.CONTENT] for choice in range(3)]
    assert len(set(said)) > 1
    assert [violations(json.loads(one), USER) for one in said] == [[]] * 3


def test_an_answer_cut_by_its_length_has_the_reason_length(driver: Driver):
    number = driver.ask("Hello!", bound(SCHEMA, max_tokens=5))
    assert finished(driver, number).reasons == ("length",)
    with pytest.raises(ValueError):
        json.loads(driver.text[number, 0, Channel.CONTENT])


def test_bias_and_penalties_come_before_the_mask(driver: Driver):
    (eos,) = driver.tokenizer().eos
    params = bound(SCHEMA, logit_bias=((eos, 100.0),), presence_penalty=2.0, frequency_penalty=1.0, max_tokens=300)
    number = driver.ask("Hello!", params)
    finished(driver, number)
    assert violations(json.loads(driver.text[number, 0, Channel.CONTENT]), USER) == []


def test_log_probabilities_are_returned_on_request(driver: Driver):
    number = driver.ask("Hello!", bound(GrammarSpec("choice", '["yes","no"]'), logprobs=True, top_logprobs=5))
    finished(driver, number)
    values = [one.logprob for one in driver.logprobs[number, 0]]
    values += [value for one in driver.logprobs[number, 0] for _, value in one.top]
    assert values
    assert all(value > -1e9 for value in values), "what the grammar forbids is no alternative"


@pytest.mark.parametrize(("prompt", "grammar"), [("Hello!", SCHEMA), (THINK["prompt"], SCHEMA)])
def test_a_resumed_answer_continues_at_every_cut(driver: Driver, prompt: str, grammar: GrammarSpec):
    other = Driver(models.path("llama"))
    params = bound(grammar, temperature=1.2, seed=11, max_tokens=300)
    number = driver.ask(prompt, params, request_id="r")
    end = finished(driver, number)
    ids = driver.ids[number, 0]
    for cut in thin_cases(range(1, len(ids)), 18, kept=1):
        again = other.ask(prompt, params, request_id="r", resume=(tuple(ids[:cut]),))
        assert finished(other, again).reasons == end.reasons
        assert other.ids[again, 0] == ids[cut:]


def test_ids_that_no_grammar_allows_end_a_resumed_answer(driver: Driver):
    number = driver.ask("Hello!", bound(SCHEMA), resume=((50, 51, 52),))
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert "is not allowed" in end.message


def test_a_preempted_row_continues_in_its_grammar(driver: Driver):
    params = bound(SCHEMA, temperature=1.2, seed=3, max_tokens=300)
    alone = driver.ask("Hello!", params)
    finished(driver, alone)
    again = driver.ask("Hello!", params)
    driver.until(lambda: len(driver.ids[again, 0]) > 5)
    live = driver.engine.parts.scheduler.live[again]
    driver.engine.parts.scheduler.preemptor.preempt(live)
    finished(driver, again)
    assert driver.ids[again, 0] == driver.ids[alone, 0]


def test_a_batch_that_breaks_costs_no_grammar(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    params = bound(SCHEMA, temperature=1.2, seed=4, max_tokens=300)
    alone = driver.ask("Hello!", params)
    finished(driver, alone)
    again = driver.ask("Hello!", params)
    driver.until(lambda: len(driver.ids[again, 0]) > 5)
    (batch,) = driver.batches().values()
    monkeypatch.setattr(batch, "step", lambda: 1 / 0)
    finished(driver, again)
    assert driver.ids[again, 0] == driver.ids[alone, 0]


def test_a_grammar_that_fails_ends_its_request_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    mask, asked = GrammarMatcher.compute_mask, 0

    def failing(self: GrammarMatcher) -> bytes | None:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise GrammarFailed("the matcher failed: too many states")
        return mask(self)

    monkeypatch.setattr(GrammarMatcher, "compute_mask", failing)
    beside = driver.ask(THINK["prompt"], GREEDY)
    number = driver.ask("Hello!", bound(SCHEMA))
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert (end.code, "too many states" in end.message) == ("grammar_failed", True)
    finished(driver, beside)
    assert driver.text[beside, 0, Channel.CONTENT] == THINK["answer"]
    assert driver.engine.report(0.0).counts.failures == 0, "its grammar failed, not the engine"


# tools


def calls(driver: Driver, number: int) -> list[dict[str, str]]:
    found = [
        text for delta in driver.deltas[number, 0] for channel, text in delta.pieces if channel == Channel.TOOL_CALL
    ]
    return [json.loads(text) for text in found]


@pytest.mark.parametrize("prompt", ["Hello!", "What is the weather in Paris?", "Say hello in Greek."])
def test_a_required_call_is_made_in_one_piece(driver: Driver, prompt: str):
    number = driver.ask(prompt, bound(GrammarSpec(calls="required"), max_tokens=400), tools=STRICT)
    assert finished(driver, number).reasons == ("tool_calls",)
    assert driver.text[number, 0, Channel.CONTENT] == ""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    made = calls(driver, number)
    assert made
    for call in made:
        assert violations(json.loads(call["arguments"]), schemas[call["name"]]) == []


@pytest.mark.parametrize("name", ["get_weather", "add"])
def test_a_named_call_is_of_that_tool(driver: Driver, name: str):
    params = bound(GrammarSpec(calls="required", tool=name), one_call=True, max_tokens=400)
    number = driver.ask("What is the weather in Paris?", params, tools=GIVEN)
    assert finished(driver, number).reasons == ("tool_calls",)
    assert [call["name"] for call in calls(driver, number)] == [name]


def speaking(folder: Path, parser: str) -> Path:
    """Return a folder with the tiny model, configured for another format of calls."""
    folder.mkdir()
    for file in models.path("llama").iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((models.path("llama") / "tokenizer_config.json").read_text()) | {"tool_parser_type": parser}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


FORMATS = ("qwen3_coder", "minimax_m2", "kimi_k3", "pythonic", "gemma4", "mistral")


@pytest.mark.parametrize("parser", thin_cases(FORMATS, 2))
def test_a_call_is_made_in_every_format_even_by_a_model_that_never_learned_it(tmp_path: Path, parser: str):
    mode, count = {"enum": ["fast", "slow"]}, {"type": "integer", "minimum": 0, "maximum": 99}
    whole = {
        "type": "object",
        "properties": {"mode": mode, "count": count},
        "required": ["mode", "count"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "work", "strict": True, "parameters": whole}}
    driver = Driver(speaking(tmp_path / parser, parser))
    params = bound(GrammarSpec(calls="required"), one_call=True, temperature=1.0, seed=3, max_tokens=200)
    number = driver.ask("Hello!", params, tools=json.dumps([tool]))
    assert finished(driver, number).reasons == ("tool_calls",)
    assert driver.text[number, 0, Channel.CONTENT] == ""
    (call,) = calls(driver, number)
    assert violations(json.loads(call["arguments"]), whole) == []
    ids = driver.ids[number, 0]
    again = driver.ask("Hello!", params, tools=json.dumps([tool]), resume=(tuple(ids[: len(ids) // 2]),))
    assert finished(driver, again).reasons == ("tool_calls",)
    assert [one["arguments"] for one in calls(driver, again)] == [call["arguments"]]


def test_a_loaded_tokenizer_reports_unsupported_features(tmp_path: Path):
    folder = speaking(tmp_path / "plain", "json_tools")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}", "tool_parser_type": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for other in folder.glob("chat_template*"):
        other.unlink()
    driver = Driver(folder)

    def offered() -> tuple[str, ...]:
        (model,) = driver.engine.report(time.monotonic()).models
        return model.features

    assert offered() == ("grammar", "logprobs", "sampling", "tools")
    refused = driver.end(driver.ask("Hello!", bound(GrammarSpec(calls="required")), tools=GIVEN))
    assert isinstance(refused, Refusal)
    assert refused.refused.code is RefusalCode.UNSUPPORTED
    assert offered() == ("grammar", "logprobs", "sampling")
    reasoning = Driver(models.path("llama")).engine.report(time.monotonic()).models
    assert "reasoning" in reasoning[0].features, "its template has thoughts, which is known before the first request"


def test_strict_tools_leave_words_free(driver: Driver):
    free = GrammarSpec(calls="free")
    assert content(driver, "Hello!", bound(free), tools=STRICT) == driver.answer("Hello!", tools=STRICT)
    number = driver.ask("What is the weather in Rome and Lima?", bound(free), tools=STRICT)
    assert finished(driver, number).reasons == ("tool_calls",)
    assert [json.loads(call["arguments"]) for call in calls(driver, number)] == [{"city": "Rome"}, {"city": "Lima"}]


def test_an_answer_in_a_format_may_be_a_call_instead(driver: Driver):
    either = GrammarSpec("json_schema", SCHEMA.value, calls="free")
    number = driver.ask("What is the weather in Oslo?", bound(either), tools=GIVEN)
    assert finished(driver, number).reasons == ("tool_calls",)
    said = content(driver, "Give me a user as JSON.", bound(either), tools=GIVEN)
    assert violations(json.loads(said), USER) == []


def test_a_markers_words_within_the_arguments_are_words(driver: Driver):
    text = {
        "properties": {"text": {"const": 'a "</tool_call>" b'}},
        "required": ["text"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "say", "strict": True, "parameters": text}}
    number = driver.ask("Hello!", bound(GrammarSpec(calls="required"), one_call=True), tools=json.dumps([tool]))
    assert finished(driver, number).reasons == ("tool_calls",)
    assert [json.loads(call["arguments"]) for call in calls(driver, number)] == [{"text": 'a "</tool_call>" b'}]


def test_markers_within_an_answer_are_words(driver: Driver):
    said = content(driver, "Hello!", bound(GrammarSpec("choice", '["a <think>b</think><tool_call>"]')))
    assert said == "a <think>b</think><tool_call>"


def test_what_cannot_be_enforced_is_refused(driver: Driver):
    for grammar, tools in (
        (GrammarSpec("json_schema", '{"type": "nope"}'), ""),
        (GrammarSpec("unheard_of"), ""),
        (GrammarSpec(calls="required"), ""),
        (GrammarSpec(calls="required", tool="unknown"), GIVEN),
    ):
        end = driver.end(driver.ask("Hello!", bound(grammar), tools=tools))
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.INVALID
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)
    assert all("grammar" in model.features for model in report.models)


def test_a_step_without_a_grammar_waits_for_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    heard: list[int] = []
    monkeypatch.setattr(LogitsMask, "add_id", lambda _, token: heard.append(token))
    driver.answer("Hello!")
    assert heard == []
