"""An answer that begins on one engine and resumes on another: no token is repeated, lost or decoded again.

The first engine's answer is cut after every token, in CI after a part of them. The second engine gets the tokens that
were received until then.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from node.engine.models.model_stats import ModelStats
from node.engine.scheduling import prefill
from node.engine.scheduling.sampling import SamplingParameters
from tests import models
from tests.effort import thin_cases
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, Driver
from wire.frames import Admitted, Channel, Delta, Finished, GenerationParams, Logprob, Refusal
from wire.refusals import RefusalCode

FAMILIES = ("llama", "qwen3", "lfm2", "qwen3_next", "gemma3_text")
ANSWERS = models.answers()
PLAIN = next(one for one in ANSWERS if "system" not in one and "reasoning" not in one and 30 < len(one["answer"]) < 80)
EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = ((EOS, -100.0),)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = '[{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}]'


@dataclass
class Heard:
    """The received part of one choice."""

    ids: list[int] = field(default_factory=list[int])
    text: dict[int, str] = field(default_factory=dict[int, str])
    calls: list[str] = field(default_factory=list[str])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])

    def add(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        for channel, text in delta.pieces:
            if channel == Channel.TOOL_CALL:
                self.calls.append(text)
            else:
                self.text[channel] = self.text.get(channel, "") + text


def heard(*parts: Sequence[Delta]) -> Heard:
    found = Heard()
    for delta in (delta for part in parts for delta in part):
        found.add(delta)
    return found


def tokens_of(deltas: Sequence[Delta], count: int) -> Sequence[Delta]:
    """Return the deltas of the first tokens: a stream has one for each."""
    assert all(len(delta.ids) == 1 for delta in deltas)
    return deltas[:count]


def same(found: Heard, whole: Heard) -> None:
    assert (found.ids, found.text, found.calls) == (whole.ids, whole.text, whole.calls)
    assert [one.token for one in found.logprobs] == [one.token for one in whole.logprobs]
    values = [one.logprob for one in whole.logprobs]
    assert [one.logprob for one in found.logprobs] == pytest.approx(values, abs=1e-3)


def end_of(driver: Driver, number: int) -> Finished:
    end = driver.end(number)
    assert isinstance(end, Finished), end
    return end


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the tokens of every chunk that any engine prefills."""
    written: list[int] = []
    plain = ModelStats.record_prefill

    def counting(stats: ModelStats, tokens: int, seconds: float, back: float) -> None:
        written.append(tokens)
        plain(stats, tokens, seconds, back)

    monkeypatch.setattr(ModelStats, "record_prefill", counting)
    return written


def steps(driver: Driver) -> int:
    return driver.engine.report(time.monotonic()).counts.steps


def resumed_at_every_cut(
    first: Driver, second: Driver, prefilled: list[int], prompt: str, params: GenerationParams
) -> None:
    number = first.ask(prompt, params, request_id="r")
    end, deltas = end_of(first, number), first.deltas[number, 0]
    whole = heard(deltas)
    for cut in (*thin_cases(range(1, len(whole.ids)), 12), len(whole.ids)):
        prefilled.clear()
        before = steps(second)
        known = tuple(whole.ids[:cut])
        again = second.ask(prompt, params, request_id="r", resume=(known,))
        ended = end_of(second, again)
        same(heard(tokens_of(deltas, cut), second.deltas[again, 0]), whole)
        assert (ended.reasons, ended.prompt_tokens, ended.completion_tokens) == (
            end.reasons,
            end.prompt_tokens,
            end.completion_tokens,
        )
        assert second.said[again][0] == Admitted(again, end.prompt_tokens)
        rest = len(whole.ids) - cut
        assert sum(prefilled) == (end.prompt_tokens + cut if rest else 0), "what is known is prefilled"
        assert steps(second) - before in (rest, max(0, rest - 1)), "and only the rest decoded"
    report = second.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)


def pair(arch: str = "llama") -> tuple[Driver, Driver]:
    first, second = (
        Driver(models.path(arch), max_batch_size=8, prefill_step_size=256, prefix_cache_size="off") for _ in range(2)
    )
    second.answer("Hello!", ONE_TOKEN)
    return first, second


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_greedy_answer_resumes_at_every_cut(arch: str, prefilled: list[int]):
    known = models.answers(models.path(arch))
    one = next(one for one in known if "system" not in one and "reasoning" not in one and 30 < len(one["answer"]) < 80)
    resumed_at_every_cut(*pair(arch), prefilled, one["prompt"], GREEDY)


def test_a_seeded_answer_draws_what_it_would_have_drawn(prefilled: list[int]):
    params = GenerationParams(
        temperature=1.5,
        top_p=0.95,
        seed=77,
        max_tokens=24,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=ENDLESS,
        logprobs=True,
        top_logprobs=2,
    )
    resumed_at_every_cut(*pair(), prefilled, "Say something that nobody has trained.", params)


def test_reasoning_and_stop_strings_go_on(prefilled: list[int]):
    drivers = pair()
    thinking = next(one for one in ANSWERS if "reasoning" in one)
    resumed_at_every_cut(*drivers, prefilled, thinking["prompt"], GREEDY)
    stop = PLAIN["answer"][12:16]
    resumed_at_every_cut(
        *drivers, prefilled, PLAIN["prompt"], GenerationParams(temperature=0.0, stop=(stop, "never said"))
    )


def test_a_tool_call_has_the_name_that_it_would_have_had(monkeypatch: pytest.MonkeyPatch, prefilled: list[int]):
    first, second = pair()
    tokenizer = next(iter(first.engine.parts.preparer.tokenizers.values()), None)
    first.answer("Hello!", ONE_TOKEN)
    tokenizer = next(iter(first.engine.parts.preparer.tokenizers.values()))
    ids = [*tokenizer.wrapper.encode(f"Well.{CALL} So.{CALL}", add_special_tokens=False), EOS]

    def forced(sampling: SamplingParameters, seed: int, choice: int, position: int):
        left = iter(ids[position:])
        return lambda logprobs: mx.array([next(left, EOS)])

    monkeypatch.setattr(prefill, "create_sampler", forced)
    number = first.ask("What is the weather?", GREEDY, request_id="r", tools=TOOLS)
    end, deltas = end_of(first, number), first.deltas[number, 0]
    whole = heard(deltas)
    assert end.reasons == ("tool_calls",)
    assert [json.loads(call)["id"] for call in whole.calls] == ["call_r_0", "call_r_1"]
    for cut in (*thin_cases(range(1, len(ids)), 16), len(ids)):
        resume = (tuple(ids[:cut]),)
        again = second.ask("What is the weather?", GREEDY, request_id="r", tools=TOOLS, resume=resume)
        assert end_of(second, again).reasons == end.reasons
        same(heard(tokens_of(deltas, cut), second.deltas[again, 0]), whole)


def test_several_choices_go_on_each_from_where_it_was(prefilled: list[int]):
    first, second = pair()
    params = GenerationParams(temperature=1.0, seed=5, n=3, max_tokens=12, logit_bias=ENDLESS)
    number = first.ask(PLAIN["prompt"], params)
    end = end_of(first, number)
    whole = [heard(first.deltas[number, choice]) for choice in range(3)]
    for cuts in ((0, 0, 4), (3, 3, 3), (12, 1, 0), (12, 12, 7), (12, 12, 12)):
        prefilled.clear()
        known = tuple(tuple(one.ids[:cut]) for one, cut in zip(whole, cuts, strict=True))
        again = second.ask(PLAIN["prompt"], params, resume=known)
        ended = end_of(second, again)
        assert (ended.reasons, ended.completion_tokens) == (end.reasons, 36)
        for choice, cut in enumerate(cuts):
            said = second.deltas[again, choice]
            assert sum(len(delta.ids) for delta in said) == 12 - cut
            same(heard(tokens_of(first.deltas[number, choice], cut), said), whole[choice])
        lengths = [end.prompt_tokens + len(ids) for ids in {ids for ids in known if len(ids) < 12}]
        together = len(lengths) * (max(lengths, default=1) - 1)
        assert sum(prefilled) in (sum(lengths), together), "a shared past is written once"
    report = second.engine.report(time.monotonic())
    assert report.memory.reserved == 0
    assert (report.counts.returned_tokens, report.counts.recomputed_tokens) == (0, 0), "no row had joined before"


def test_what_the_prefix_cache_has_of_it_is_not_written_again(prefilled: list[int]):
    second = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)
    long = "word " * 150
    number = second.ask(long, GenerationParams(temperature=0.0, max_tokens=20, logit_bias=ENDLESS))
    end = end_of(second, number)
    ids = second.ids[number, 0]
    prefilled.clear()
    again = second.ask(
        long,
        GenerationParams(temperature=0.0, max_tokens=20, logit_bias=ENDLESS),
        resume=(tuple(ids[:10]),),
        request_id="r",
    )
    ended = end_of(second, again)
    assert second.ids[again, 0] == ids[10:]
    assert sum(prefilled) < 20
    assert 0 < ended.cached_tokens <= end.prompt_tokens
    first, admitted = second.said[number][0], second.said[again][0]
    assert isinstance(first, Admitted)
    assert isinstance(admitted, Admitted)
    assert admitted.prompt_hash == first.prompt_hash


def test_ids_that_are_no_tokens_are_refused(prefilled: list[int]):
    _, second = pair()
    for token in (-1, 10**9):
        end = second.end(second.ask("Hello!", resume=((token,),)))
        assert isinstance(end, Refusal)
        assert end.refused.code is RefusalCode.INVALID


def test_the_promise_covers_what_is_known():
    first, second = pair()
    params = GenerationParams(temperature=0.0, max_tokens=100, logit_bias=ENDLESS)
    ids = tuple(first.ids[number, 0]) if end_of(first, number := first.ask("Hello!", params)) else ()
    second.ask("Hello!", params, resume=(ids[:90],), expected=8)
    memory = second.engine.report(time.monotonic()).models[0]
    assert memory.groups[0].longest > len(ids[:90])


def test_a_node_that_writes_shorter_answers_ends_it_with_the_next_token():
    first = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256, max_tokens=30)
    second = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256, max_tokens=10)
    params = GenerationParams(temperature=0.0, logit_bias=ENDLESS)
    number = first.ask("Hello!", params)
    assert end_of(first, number).completion_tokens == 30
    ids = first.ids[number, 0]
    again = second.ask("Hello!", params, resume=(tuple(ids[:20]),))
    end = end_of(second, again)
    assert (end.completion_tokens, end.reasons, second.ids[again, 0]) == (21, ("length",), ids[20:21])


def test_a_resumed_answer_is_delivered_only_after_its_first_new_token():
    first, second = pair()
    params = GenerationParams(temperature=0.0, max_tokens=30, logit_bias=ENDLESS)
    number = first.ask("Hello!", params)
    end_of(first, number)
    again = second.ask("Hello!", params, resume=(tuple(first.ids[number, 0][:10]),))
    assert second.admitted(again)
    sequence = second.engine.parts.scheduler.live[again]
    assert not sequence.delivered
    second.until(lambda: second.ids[again, 0])
    assert sequence.delivered
