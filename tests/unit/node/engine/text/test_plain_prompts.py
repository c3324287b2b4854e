"""Prompts without a template, counts without an answer, reported stop strings, and the limit of one call."""

from collections import defaultdict
from pathlib import Path

import pytest
from msgspec.structs import replace

from node.engine.requests.preparer import RequestPreparer
from node.engine.text import tokenizer_loader
from node.engine.text.detokenizer import TextPipeline
from node.engine.text.markers import MarkerSet
from tests import models
from tests.support.engine.text_engine import GREEDY, Driver
from tests.unit.node.engine.scripted.test_engine import Bench
from tests.unit.node.engine.text.test_detokenizer import LOOK, pipeline
from wire.frames import Channel, CountTokens, Finished, Generate, GenerationParams, Message, Refusal
from wire.refusals import RefusalCode

KNOWN = next(one for one in models.answers() if "system" not in one and "reasoning" not in one)
HELLO = (Message("user", KNOWN["prompt"]),)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(models.path("llama"))


def test_a_raw_prompt_that_spells_the_template_is_answered_alike(driver: Driver):
    folder = Path(models.path("llama"))
    ids = tokenizer_loader.load(folder).tokenize_request(Generate(1, 1, "r", "m", HELLO, GenerationParams(), 0)).ids
    by_ids = driver.ask(messages=(), ids=ids)
    whole = driver.end(by_ids)
    assert isinstance(whole, Finished)
    assert whole.prompt_tokens == len(ids)
    assert driver.text[by_ids, 0, Channel.CONTENT] == KNOWN["answer"]


def test_raw_text_is_counted_as_it_is(driver: Driver):
    number = driver.ask(messages=(), text="once upon a time", params=replace(GREEDY, max_tokens=2))
    end = driver.end(number)
    assert isinstance(end, Finished)
    direct = tokenizer_loader.load(Path(models.path("llama"))).wrapper.encode("once upon a time")
    assert (end.prompt_tokens, end.completion_tokens) == (len(direct), 2)


def test_nothing_is_read_in_the_answer_to_a_plain_prompt():
    """Without a template, the model was not taught marks of thoughts and calls. They are plain text there."""
    library = Driver(models.path("llama")).engine.parts.catalogue
    door, (name,) = RequestPreparer(library), library.get_models()
    tools = '[{"type": "function", "function": {"name": "look"}}]'
    asked = Generate(1, 1, "r", name, (), GenerationParams(), 0, text="x", tools=tools)
    answer = "<think>well</think>yes"
    ids = door.load_tokenizer(library.get_models()[name]).wrapper.encode(answer, add_special_tokens=False)

    def heard(request: Generate) -> dict[Channel, str]:
        voice = door.prepare(request).create_pipeline
        assert voice is not None
        made, said = voice(0), defaultdict[Channel, str](str)
        pieces = [piece for token in ids for piece in made.feed(token).pieces]
        for channel, text in (*pieces, *made.finish("stop")[0]):
            said[channel] += text
        return said

    assert heard(asked) == {Channel.CONTENT: answer}
    assert heard(replace(asked, text="", messages=HELLO)) == {Channel.REASONING: "well", Channel.CONTENT: "yes"}


def test_an_id_that_is_none_is_refused(driver: Driver):
    end = driver.end(driver.ask(messages=(), ids=(1, 10**7)))
    assert isinstance(end, Refusal)
    assert end.refused.final


def test_a_count_is_that_of_the_request_and_loads_nothing():
    driver = Driver(models.path("llama"))
    driver.take(CountTokens(7, driver.default, HELLO, 0))
    end = driver.ended(7)
    assert isinstance(end, Finished)
    assert not driver.engine.report(0.0).memory.reserved
    assert not any(model.loaded or model.loading for model in driver.engine.report(0.0).models)
    answered = driver.end(driver.ask(messages=HELLO))
    assert isinstance(answered, Finished)
    assert end.prompt_tokens == answered.prompt_tokens


def test_a_count_for_no_model_is_refused(driver: Driver):
    driver.take(CountTokens(8, "nothing", HELLO, 0))
    end = driver.ended(8)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_MODEL


def test_the_end_has_the_stop_string(driver: Driver):
    word = KNOWN["answer"].split()[1]
    end = driver.end(driver.ask(KNOWN["prompt"], replace(GREEDY, stop=("never so", word))))
    assert isinstance(end, Finished)
    assert end.stops == (word,)
    end = driver.end(driver.ask(KNOWN["prompt"], replace(GREEDY, stop=("never so",))))
    assert isinstance(end, Finished)
    assert end.stops == ()


def test_thoughts_are_counted():
    pieces = ["<think>", "a ", "b", "</think>", "c"]
    made = pipeline(pieces)
    for token in range(len(pieces)):
        made.feed(token)
    made.finish("stop")
    assert made.reasoning_tokens == 3  # the opening mark counts as reasoning, the closing one does not


def test_the_tokens_of_a_call_are_no_thought():
    pieces = ["<think>", "a", "</think>", LOOK, "b"]
    made = pipeline(pieces)
    for token in range(len(pieces)):
        made.feed(token)
    assert made.reasoning_tokens == 2
    cut = pipeline(["<call>", "still open"])
    for token in range(2):
        cut.feed(token)
    assert cut.reasoning_tokens == 0


def one_call(pieces: list[str]) -> TextPipeline:
    return pipeline(pieces, markup=MarkerSet(("<think>", "</think>"), ("<call>", "</call>")), one_call=True)


def test_with_one_call_the_answer_ends_with_it():
    made = one_call(["Let me. ", LOOK, LOOK, "more"])
    said = [made.feed(token) for token in range(4)]
    assert [step.stopped for step in said] == [False, True, True, True]
    pieces = [piece for step in said for piece in step.pieces]
    assert [channel for channel, _ in pieces] == [Channel.CONTENT, Channel.TOOL_CALL]
    assert made.finish("stop") == ((), "tool_calls")


def test_a_possible_start_of_a_stop_string_is_sent_before_the_call_that_ends_the_answer():
    markup = MarkerSet(("<think>", "</think>"), ("<call>", "</call>"))
    made = pipeline(["I look: ST", LOOK, "OP"], stops=("STOP",), markup=markup, one_call=True)
    said = [piece for token in range(3) for piece in made.feed(token).pieces]
    assert said[:-1] == [(Channel.CONTENT, "I look: "), (Channel.CONTENT, "ST")]
    assert said[-1][0] is Channel.TOOL_CALL
    assert made.finish("stop") == ((), "tool_calls")


def test_of_several_calls_in_one_block_the_first_is_the_one():
    look = LOOK.removeprefix("<call>").removesuffix("</call>")
    step = one_call([f"<call>[{look}, {look}]</call>"]).feed(0)
    assert [channel for channel, _ in step.pieces] == [Channel.TOOL_CALL]
    assert step.stopped


def test_the_scripted_engine_takes_raw_prompts_and_counts():
    bench = Bench()
    assert bench.engine.handle(CountTokens(1, bench.settings.model, HELLO, 0), 0.0) == [
        Finished(1, (), 4 + len(KNOWN["prompt"].split()), 0)
    ]
    admitted = bench.engine.handle(
        Generate(2, 1, "r", bench.settings.model, (), GenerationParams(max_tokens=2), 0, text="one two three"), 0.0
    )
    assert admitted[0].prompt_tokens == 3  # pyright: ignore
    admitted = bench.engine.handle(
        Generate(3, 2, "r", bench.settings.model, (), GenerationParams(max_tokens=2), 0, ids=(5, 6)), 0.0
    )
    assert admitted[0].prompt_tokens == 2  # pyright: ignore
