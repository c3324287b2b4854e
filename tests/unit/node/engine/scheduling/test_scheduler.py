"""Counts and reports of the text engine about its requests: usage, timings, reasons, and the gate of forwards."""

import json
import time
from random import Random

import mlx.core as mx
import pytest
from msgspec.structs import replace

from node.engine.kv.commitments import Commitment
from node.engine.memory.footprint import MlxPeakTracker
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.model_stats import ModelStats
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS
from node.engine.requests.preflight import RequestShape
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.sequence import Row, Sequence
from node.engine.requests.tokenize_admission import UntokenizedPrompt
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.decode_loop import OUTLIER_FACTOR
from node.engine.scheduling.sampling import SamplingParameters
from node.engine.scheduling.step_output import build_finished
from tests import models
from tests.effort import SEED, scale_examples
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, Driver
from tests.support.readings import Later
from wire.capacity.batches import compute_row_bytes, compute_waste_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    Admitted,
    Channel,
    Failed,
    Finished,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    Refusal,
    Timings,
    UnloadModel,
)
from wire.refusals import RefusalCode, Refused
from wire.report import EngineCounters
from wire.units import GIB, MIB

CONFIG = json.loads((models.path("llama") / "config.json").read_text())
ENDLESS = ((CONFIG["eos_token_id"], -100.0),)
ANSWERS = models.answers()
PLAIN = next(one for one in ANSWERS if "system" not in one and "reasoning" not in one and len(one["answer"]) > 20)
THOUGHTFUL = next(one for one in ANSWERS if "reasoning" in one)
LONG = "word " * 120


@pytest.fixture
def driver() -> Driver:
    return Driver(
        models.path("llama"), max_batch_size=8, prefill_step_size=64, min_prefill_step=64, prefix_cache_size="off"
    )


def prepared(driver: Driver, content: str) -> PreparedRequest:
    """Tokenize a prompt as the engine does."""
    asked = Generate(10**6, 0, "r", driver.default, (Message("user", content),), GenerationParams(), 0)
    work = driver.engine.prepare(asked)
    if isinstance(work, UntokenizedPrompt):
        work = work.tokenize().work
    assert isinstance(work, PreparedRequest)
    return work


def counts(driver: Driver) -> EngineCounters:
    return driver.engine.report(time.monotonic()).counts


def end(driver: Driver, number: int) -> Finished:
    found = driver.end(number)
    assert isinstance(found, Finished), found
    return found


# usage


def test_usage_is_the_tokens_of_the_prompt_and_of_every_answer(driver: Driver):
    number = driver.ask(LONG, GenerationParams(n=2, seed=1, max_tokens=7, logit_bias=ENDLESS))
    done = end(driver, number)
    assert done.prompt_tokens == prepared(driver, LONG).tokens
    assert done.completion_tokens == 14
    assert done.cached_tokens == 0
    assert done.reasons == ("length", "length")
    assert driver.said[number][0] == Admitted(number, done.prompt_tokens)


def test_reasoning_tokens_are_counted_up_to_the_mark_that_ends_the_thought(driver: Driver):
    number = driver.ask(THOUGHTFUL["prompt"])
    done = end(driver, number)
    assert driver.text[number, 0, Channel.REASONING] == THOUGHTFUL["reasoning"]
    spelled = [prepared(driver, "a").token_bytes(token) for token in driver.ids[number, 0]]
    closes = next(at for at, _ in enumerate(spelled) if b"</think>" in b"".join(spelled[: at + 1]))
    assert done.reasoning_tokens == closes
    assert 0 < done.reasoning_tokens < done.completion_tokens
    plain = driver.ask(PLAIN["prompt"])
    assert end(driver, plain).reasoning_tokens == 0


def test_reasoning_tokens_of_all_answers_are_added_up(driver: Driver):
    one = end(driver, driver.ask(THOUGHTFUL["prompt"]))
    two = end(driver, driver.ask(THOUGHTFUL["prompt"], GenerationParams(temperature=0.0, n=2)))
    assert two.reasoning_tokens == 2 * one.reasoning_tokens
    assert two.completion_tokens == 2 * one.completion_tokens
    assert two.prompt_tokens == one.prompt_tokens, "the prompt counts once"


def test_an_answer_reports_the_stop_string_that_ended_it(driver: Driver):
    whole = PLAIN["answer"]
    stop = whole[8:12]
    stopped = end(driver, driver.ask(PLAIN["prompt"], GenerationParams(temperature=0.0, stop=("\0", stop))))
    assert (stopped.reasons, stopped.stops) == (("stop",), (stop,))
    ended = end(driver, driver.ask(PLAIN["prompt"], GenerationParams(temperature=0.0, stop=("\0",))))
    assert (ended.reasons, ended.stops) == (("stop",), ())


def test_an_answer_that_ends_at_the_model_s_own_end_within_its_limit_is_no_length(driver: Driver):
    whole = end(driver, driver.ask(PLAIN["prompt"])).completion_tokens
    exact = end(driver, driver.ask(PLAIN["prompt"], GenerationParams(temperature=0.0, max_tokens=whole)))
    assert (exact.reasons, exact.completion_tokens) == (("stop",), whole)
    short = end(driver, driver.ask(PLAIN["prompt"], GenerationParams(temperature=0.0, max_tokens=whole - 1)))
    assert (short.reasons, short.completion_tokens) == (("length",), whole - 1)


def test_timings_are_the_wait_the_prefill_and_the_decode_in_this_order(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    number = driver.ask(LONG, GenerationParams(temperature=0.0, max_tokens=8, logit_bias=ENDLESS))
    clock.by += 100.0
    driver.turn()
    assert not driver.ids[number, 0], "the prompt takes more than one turn"
    clock.by += 1000.0
    driver.until(lambda: driver.ids[number, 0])
    clock.by += 10_000.0
    timings = end(driver, number).timings
    assert [round(seconds, -2) for seconds in (timings.waiting, timings.prefill, timings.decode)] == [100, 1000, 10_000]


def test_the_wait_for_a_load_is_a_wait_of_the_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    number = driver.ask("hello", GenerationParams(temperature=0.0, max_tokens=2, logit_bias=ENDLESS))
    assert not driver.admitted(number)
    clock.by += 1000.0
    assert end(driver, number).timings.waiting == pytest.approx(1000.0, abs=100.0)


def test_the_end_of_a_request_has_its_times_and_rows():
    request = Generate(4, 1, "r", "m", (Message("user", "a"),), GREEDY, 0)
    sequence = Sequence(
        request, PreparedRequest(request, (1, 2, 3)), RequestShape(3, 8, 8, 2), SamplingParameters(), 0, 10.0
    )
    sequence.begun, sequence.joined, sequence.cached = 12.0, 15.0, 2
    for choice, ids in enumerate(([1, 2], [3])):
        row = Row(sequence, choice, Commitment(0), _Silent())  # pyright: ignore[reportArgumentType]
        row.ids, row.reason = ids, ("stop", "length")[choice]
        sequence.rows.append(row)
    assert build_finished(sequence, 22.0) == Finished(
        4, ("stop", "length"), 3, 3, sequence.prompt_cached, Timings(2.0, 3.0, 7.0), stops=(), reasoning_tokens=2
    )


class _Silent:
    stop, reasoning_tokens = "", 1


def test_tokens_of_a_stream_are_sent_one_by_one_and_those_of_a_whole_answer_together(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    driver.answer(PLAIN["prompt"])
    clock = Later()
    clock.by, begun = 0.0, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + clock.by)  # time stands still even on a slow machine
    params = GenerationParams(temperature=0.0, max_tokens=6, logit_bias=ENDLESS)
    streamed, whole = driver.ask("hello", params, stream=True), driver.ask("hello", params, stream=False)
    for number in (streamed, whole):
        end(driver, number)
    assert [len(delta.ids) for delta in driver.deltas[streamed, 0]] == [1] * 6
    assert [len(delta.ids) for delta in driver.deltas[whole, 0]] == [6]
    assert driver.ids[streamed, 0] == driver.ids[whole, 0]
    slow = driver.ask("hello", params, stream=False)
    while driver.ended(slow) is None:
        clock.by += 0.6 * FLUSH_INTERVAL_SECONDS
        driver.turn()
    assert [len(delta.ids) for delta in driver.deltas[slow, 0]] == [2, 2, 2], "at most once in the interval"


def test_an_answer_beyond_its_expected_length_grows_by_more_than_a_token(driver: Driver):
    driver.answer(PLAIN["prompt"])
    del driver.gate.asked[:]
    end(driver, driver.ask("hello", GenerationParams(temperature=0.0, max_tokens=12, logit_bias=ENDLESS), expected=2))
    assert [site for site, _ in driver.gate.asked].count(GateSite.GROW) == 1


def test_a_prompt_without_room_keeps_the_bytes_of_its_next_chunk_free(driver: Driver):
    driver.answer(PLAIN["prompt"])
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL
    driver.ask(LONG)
    scheduler = driver.engine.parts.scheduler
    assert scheduler.compute_required_bytes() == 0
    driver.until(lambda: scheduler.prefills[0].retry_at)
    past = len(scheduler.prefills[0].ids)
    assert scheduler.compute_required_bytes() == driver.resident().estimator.estimate_chunk(64, past)
    driver.gate.refuses = lambda site, estimate: False
    driver.until(lambda: scheduler.prefills[0].stored_tokens)
    assert scheduler.prefills[0].left
    assert scheduler.compute_required_bytes() == 0, "the chunk had room"


def test_the_estimate_of_a_join_counts_all_rows_that_decode_after_it(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    params, widths = GenerationParams(n=3, max_tokens=40, logit_bias=ENDLESS), list[int]()

    def estimate(size: int, layers: int, rows: int) -> int:
        widths.append(rows)
        return 0

    monkeypatch.setattr(driver.resident().estimator, "estimate_charged_join", estimate)
    number = driver.ask("hello", params)
    driver.until(lambda: driver.ids[number, 2])
    assert widths == [3]


def test_a_chunk_for_which_a_cache_was_grown_beside_decoding_rows_teaches_no_estimate(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    driver.answer(PLAIN["prompt"])
    number = driver.ask("hello", GenerationParams(max_tokens=60, logit_bias=ENDLESS))
    driver.until(lambda: driver.ids[number, 0])
    learned = list[int]()
    monkeypatch.setattr(driver.resident().estimator, "observe_prefill", lambda tokens, *_, **__: learned.append(tokens))
    done = end(driver, driver.ask(LONG * 2, GenerationParams(max_tokens=1)))
    assert len(driver.ids[number, 0]) < 60, "it decodes all the time"
    assert 0 < sum(learned) < done.prompt_tokens, (learned, done.prompt_tokens)


def test_a_step_far_above_its_estimate_is_recorded_if_the_next_one_is_too(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    driver.answer(PLAIN["prompt"])
    number = driver.ask("hello", GenerationParams(temperature=0.0, max_tokens=40, logit_bias=ENDLESS))
    driver.until(lambda: len(driver.ids[number, 0]) > 2)
    limit = 4000
    estimator, taken = driver.resident().estimator, iter([limit + 1, limit, limit + 1, limit + 2])
    monkeypatch.setattr(estimator, "estimate_step", lambda rows, longest, *, grows: limit // OUTLIER_FACTOR)
    recorded: list[int] = []
    monkeypatch.setattr(MlxPeakTracker, "measure_peak_drop", lambda _: next(taken))
    monkeypatch.setattr(estimator, "observe_step", lambda rows, longest, size: recorded.append(size))
    for _ in range(4):
        driver.turn()
        driver.engine.parts.scheduler.synchronize()
    assert recorded == [limit, limit + 2]


def test_the_memory_of_a_step_is_recorded_for_the_longest_row(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    params = GenerationParams(temperature=0.0, max_tokens=40, logit_bias=ENDLESS)
    numbers = [driver.ask(prompt, params) for prompt in ("hello", "hello " * 20)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 2 for number in numbers))
    (batch,), recorded = driver.batches().values(), list[tuple[int, int]]()
    monkeypatch.setattr(MlxPeakTracker, "measure_peak_drop", lambda _: 1)
    monkeypatch.setattr(
        driver.resident().estimator, "observe_step", lambda rows, longest, size: recorded.append((rows, longest))
    )
    driver.turn()
    driver.engine.parts.scheduler.synchronize()
    short, long = sorted(row.commitment.stored_tokens for row in batch.list_rows())
    assert short < long
    assert recorded == [(2, long)]
    driver.turn()
    driver.cancel(numbers[0])
    driver.engine.parts.scheduler.synchronize()
    assert len(recorded) == 1, "the removed row has freed memory"


def test_a_step_takes_the_seconds_of_its_launch_and_of_the_wait_for_it(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    number = driver.ask("hello", GenerationParams(temperature=0.0, max_tokens=40, logit_bias=ENDLESS))
    driver.until(lambda: len(driver.ids[number, 0]) > 2)
    clock, recorded = Later(), list[tuple[float, int]]()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(
        ModelStats, "record_step", lambda stats, seconds, rows: recorded.append((round(seconds, -2), rows))
    )

    def wait(batch: object) -> None:
        clock.by += 1000.0

    monkeypatch.setattr(DecodeBatch, "wait", wait)
    driver.turn()
    recorded.clear()
    for _ in range(2):
        driver.engine.parts.scheduler.synchronize()
    assert recorded == [(1000.0, 1)], "once, although it is awaited twice"


def test_the_next_step_is_the_retry_while_a_prompt_without_rows_waits_behind_one_without_memory():
    driver = Driver(models.path("llama"), max_batch_size=1)
    driver.answer("hello", ONE_TOKEN)
    scheduler = driver.engine.parts.scheduler
    for _ in range(2):
        driver.ask("hello", ONE_TOKEN)
    now = time.monotonic()
    scheduler.prefills[0].delay(now + 60.0)
    assert scheduler.next_step_at(now) == now + 60.0


def test_of_prompts_that_all_wait_for_memory_the_newest_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: None)
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL
    oldest, newer, newest = (driver.ask(LONG, GenerationParams(max_tokens=2)) for _ in range(3))
    driver.until(lambda: len(driver.engine.parts.scheduler.live) < 3)
    driver.gate.refuses = lambda site, estimate: False
    ends = [driver.end(number) for number in (oldest, newer, newest)]
    assert [type(each) for each in ends] == [Finished, Finished, Refusal]


def test_the_end_of_a_lone_request_without_a_batch_is_sent_in_the_next_turn(driver: Driver):
    driver.answer(PLAIN["prompt"])
    number, scheduler = driver.ask(LONG), driver.engine.parts.scheduler
    driver.until(lambda: scheduler.prefills[0].started)
    now = time.monotonic()
    assert scheduler.end_newest(Refused(RefusalCode.NO_ROOM, "no room by script"), now)
    assert (scheduler.live, scheduler.next_step_at(now)) == ({}, now)
    assert driver.resident().usage.used_at == now
    assert not scheduler.end_newest(Refused(RefusalCode.NO_ROOM, "no room by script"), now)
    assert counts(driver).sheds == 1
    assert isinstance(driver.end(number), Refusal)


def test_a_closed_engine_holds_no_request_and_no_memory_of_one(driver: Driver):
    driver.answer(PLAIN["prompt"])
    scheduler, usage = driver.engine.parts.scheduler, driver.resident().usage
    numbers = [driver.ask("hello", GenerationParams(max_tokens=99, logit_bias=ENDLESS)) for _ in range(2)]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    scheduler.preemptor.preempt(scheduler.live[numbers[1]])
    driver.ask(LONG)
    driver.until(lambda: any(prefill.started for prefill in scheduler.prefills))
    scheduler.preemptor.preempt(scheduler.live[numbers[1]])
    (started,) = scheduler.prefills
    driver.engine.close()
    assert (scheduler.live, scheduler.prefills, scheduler.preempted, scheduler.measure_load()) == (
        {},
        (),
        (),
        (0, 0, 0),
    )
    assert (started.cache, started.logits, usage.users) == (None, None, 0)


def test_a_request_whose_draw_fails_gets_no_further_token(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    draws = iter([7, 8, 9])
    monkeypatch.setattr("node.engine.scheduling.prefill.create_sampler", lambda *_: lambda _: mx.array([next(draws)]))
    number = driver.ask("hello", GenerationParams(max_tokens=9, logit_bias=ENDLESS), stream=True)
    found = driver.end(number)
    assert isinstance(found, Failed)
    assert "StopIteration" in found.message
    assert driver.ids[number, 0] == [7, 8], "not the token of the step whose successor failed"


def test_a_last_token_above_the_cap_ends_its_request_as_finished(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(PLAIN["prompt"])
    live, over = driver.engine.parts.scheduler.live, Refused(RefusalCode.NO_ROOM, "over the cap by script")
    monkeypatch.setattr(GatedForwards, "check_cap", lambda _: None if live else over)
    for tokens in (1, 3):
        assert isinstance(driver.end(driver.ask("hello", GenerationParams(max_tokens=tokens))), Finished)


def test_an_answer_has_a_log_probability_for_each_token_but_its_end(driver: Driver):
    number = driver.ask(PLAIN["prompt"], GenerationParams(temperature=0.0, logprobs=True))
    assert end(driver, number).reasons == ("stop",)
    spelled = b"".join(each.token for each in driver.logprobs[number, 0])
    assert (spelled.decode(), len(driver.logprobs[number, 0])) == (PLAIN["answer"], len(driver.ids[number, 0]) - 1)


def test_a_request_ends_with_its_last_row(driver: Driver):
    driver.answer(PLAIN["prompt"])
    params = GenerationParams(temperature=0.0, n=2, max_tokens=6, logit_bias=ENDLESS)
    whole = driver.ask("hello", params)
    end(driver, whole)
    ids = driver.ids[whole, 0]
    number = driver.ask("hello", params, resume=(tuple(ids[:1]), tuple(ids[:4])))
    driver.until(lambda: driver.batches() and not driver.engine.parts.scheduler.live[number].rows[1].reason)
    driver.until(lambda: driver.engine.parts.scheduler.live[number].rows[1].reason)
    assert len(driver.ids[number, 0]) < 5
    assert (driver.ended(number), len(driver.batches())) == (None, 1)
    assert end(driver, number).completion_tokens == 12
    assert [driver.ids[number, choice] for choice in range(2)] == [ids[1:], ids[4:]]


# any order of events


class Load:
    """Random events of an engine with two keys, and the answers that it gives without them."""

    PROMPTS = ("hello", LONG, LONG + "sun")
    SITES = (GateSite.PREFILL, GateSite.JOIN, GateSite.GROW, GateSite.PREFLIGHT)
    TOKENS = 8
    PARAMS = (
        GenerationParams(temperature=0.0, n=2, max_tokens=TOKENS, logit_bias=ENDLESS),
        GenerationParams(
            seed=3, n=2, max_tokens=TOKENS, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=ENDLESS
        ),
    )

    def __init__(self, seed: str) -> None:
        self.chance = Random(seed)
        self.alone = self._answer_alone()
        size = self.chance.choice(("off", "64MiB"))
        self.driver = Driver(models.path("llama"), max_batch_size=4, prefill_step_size=64, prefix_cache_size=size)
        self.driver.answer("Hello!")
        self.expected: dict[int, list[list[int]]] = {}
        """Tokens that each request gets, by choice."""
        self.cancelled = set[int]()
        self.broken = 0

    def _answer_alone(self) -> dict[tuple[str, int], list[list[int]]]:
        driver = Driver(models.path("llama"), prefix_cache_size="off")
        numbers = {
            (prompt, kind): driver.ask(prompt, params)
            for kind, params in enumerate(self.PARAMS)
            for prompt in self.PROMPTS
        }
        for number in numbers.values():
            end(driver, number)
        return {key: [driver.ids[number, choice] for choice in range(2)] for key, number in numbers.items()}

    def ask(self) -> None:
        """Send a request. One of four is resumed, each choice after other tokens."""
        chance, prompt, kind = self.chance, self.chance.choice(self.PROMPTS), self.chance.randrange(2)
        tokens, count = chance.randint(3, self.TOKENS), chance.choice((1, 1, 2))
        whole = [ids[:tokens] for ids in self.alone[prompt, kind][:count]]
        known = [chance.randint(1, tokens - 1) for _ in whole] if chance.random() < 0.25 else []
        number = self.driver.ask(
            prompt,
            replace(self.PARAMS[kind], n=count, max_tokens=tokens),
            weighted_key=WeightedKey(chance.choice(("ada", "bob"))),
            expected=chance.choice((1, self.TOKENS)),
            stream=chance.random() < 0.5,
            resume=tuple(tuple(ids[:size]) for ids, size in zip(whole, known, strict=False)),
        )
        self.expected[number] = [ids[size:] for ids, size in zip(whole, known or [0] * count, strict=True)]

    def cancel(self) -> None:
        number = self.chance.choice(list(self.expected))
        if self.driver.ended(number) is None:
            self.cancelled.add(number)
            self.driver.cancel(number)

    def preempt(self) -> None:
        scheduler = self.driver.engine.parts.scheduler
        running = [each for each in scheduler.live.values() if each not in scheduler.preempted]
        if running:
            scheduler.preemptor.preempt(self.chance.choice(running))

    def refuse(self) -> None:
        site, least = self.chance.choice(self.SITES), self.chance.choice((0, MIB))
        self.driver.gate.refuses = lambda at, estimate: at is site and estimate >= least
        for _ in range(self.chance.randint(1, 3)):
            self.driver.turn()
        self.driver.gate.refuses = lambda at, estimate: False

    def break_batch(self) -> None:
        batches = list(self.driver.batches().values())
        if batches:
            self.broken += 1
            batch, name = self.chance.choice(batches), self.chance.choice(("step", "wait", "drop_rows"))
            setattr(batch, name, lambda *_: 1 / 0)

    def check_answers(self) -> None:
        """Wait until each request has one end or was cancelled, with the tokens of the answer that it has alone."""
        for number, wanted in self.expected.items():
            found = None if number in self.cancelled else self.driver.end(number)
            sent = [self.driver.ids[number, choice] for choice in range(len(wanted))]
            assert [ids[: len(got)] for ids, got in zip(wanted, sent, strict=True)] == sent, number
            if isinstance(found, Finished):
                assert sent == wanted
            elif isinstance(found, Refusal):
                assert not any(sent), "only a request without delivered tokens is placed again"
            elif isinstance(found, Failed):
                assert found.code == "no_headroom" or self.broken > 1, found


@pytest.mark.parametrize("case", range(scale_examples(10)))
def test_every_request_gets_its_answer_or_one_end_in_any_order_of_shortages_and_faults(case: int):
    load = Load(f"{SEED}/{case}")
    events = (load.ask, load.ask, load.ask, load.cancel, load.preempt, load.refuse, load.break_batch)
    load.ask()
    for _ in range(25):
        load.chance.choice(events)()
        for _ in range(load.chance.randint(0, 3)):
            load.driver.turn()
    load.check_answers()
    driver, scheduler = load.driver, load.driver.engine.parts.scheduler
    driver.turn()
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.queued_tokens, report.memory.reserved) == (0, 0, 0, 0)
    assert (scheduler.compute_required_bytes(), scheduler.next_step_at(time.monotonic())) == (0, None)
    assert driver.resident().usage.users == 0
    assert report.counts.recomputed_tokens <= report.counts.returned_tokens
    failed = [found.code for number in load.expected if isinstance(found := driver.ended(number), Failed)]
    assert report.counts.failures == failed.count("engine_error")


# counts


def test_every_forward_step_and_check_is_counted_once(driver: Driver):
    driver.answer(PLAIN["prompt"])
    before, checks = counts(driver), driver.engine.gate.checks.total()
    number = driver.ask(LONG, GenerationParams(temperature=0.0, max_tokens=9, logit_bias=ENDLESS))
    end(driver, number)
    after, asked = counts(driver), driver.engine.gate.checks.total() - checks
    assert after.checks - before.checks == asked
    assert after.refusals == before.refusals
    tokens = prepared(driver, LONG).tokens
    assert after.forwards - before.forwards == -(-tokens // 64) + 1, "chunks of 64 tokens, and a join"
    assert after.steps - before.steps == 9, "one for each token"


def test_a_refusal_of_the_gate_is_counted(driver: Driver):
    driver.answer(PLAIN["prompt"])
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(memory.current + GIB, memory.current + MIB, 0, "dynamic"))
    before = counts(driver)
    assert isinstance(driver.end(driver.ask("word " * 3000)), Refusal)
    after = counts(driver)
    assert after.refusals - before.refusals >= 1
    assert after.refusals == driver.engine.gate.refusals.total()
    assert (after.failures, after.sheds, after.overs, after.forwards) == (0, 0, 0, before.forwards)


# the report


def test_requests_that_wait_for_their_model_are_reported_with_their_tokens_and_reserved(driver: Driver):
    tokens = prepared(driver, LONG).tokens
    numbers = [driver.ask(LONG, GenerationParams(temperature=0.0, max_tokens=4, n=n), expected=4) for n in (1, 2)]
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.queued_tokens) == (0, 2, 2 * tokens)
    (model,) = report.models
    assert (model.loaded, model.loading) == (False, True)
    assert report.memory.reserved == 3 * compute_row_bytes(model.kv, tokens + 4), "one row, and two"
    assert report.acked_seq == numbers[-1]
    driver.until(lambda: driver.engine.report(time.monotonic()).models[0].loaded)
    report = driver.engine.report(time.monotonic())
    assert report.waiting == 2, "their prompts are not written yet"
    assert tokens < report.queued_tokens <= 2 * tokens
    for number in numbers:
        end(driver, number)
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting, report.queued_tokens, report.memory.reserved) == (0, 0, 0, 0)


def test_a_waiting_request_that_is_cancelled_is_reserved_no_longer(driver: Driver):
    first, second = driver.ask(LONG), driver.ask(LONG)
    both = driver.engine.report(time.monotonic()).memory.reserved
    driver.cancel(first)
    report = driver.engine.report(time.monotonic())
    assert (report.waiting, report.memory.reserved) == (1, both // 2)
    driver.cancel(second)
    assert driver.engine.report(time.monotonic()).memory.reserved == 0


def test_every_answer_decodes_in_a_row_of_its_own(driver: Driver):
    number = driver.ask("hello", GenerationParams(n=3, seed=1, max_tokens=60, logit_bias=ENDLESS))
    driver.until(lambda: all(driver.ids[number, choice] for choice in range(3)))
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.waiting) == (3, 0)
    assert sum(group.rows for group in report.models[0].groups) == 3
    driver.cancel(number)
    report = driver.engine.report(time.monotonic())
    assert (report.running, report.models[0].groups) == (0, ())


@pytest.mark.parametrize("refused", [False, True])
def test_the_last_request_that_was_judged_is_acknowledged(driver: Driver, refused: bool):
    end(driver, driver.ask("hello", GenerationParams(max_tokens=1)))
    number = driver.ask("hello", GenerationParams(max_tokens=1, n=100 if refused else 1))
    assert isinstance(driver.end(number), Refusal if refused else Finished)
    assert driver.engine.report(time.monotonic()).acked_seq == number


def test_bytes_of_text_for_each_prompt_token_are_learnt_from_long_prompts_only(driver: Driver):
    def told() -> float:
        return driver.engine.report(time.monotonic()).models[0].bytes_per_token

    end(driver, driver.ask("hello", GenerationParams(max_tokens=1)))
    assert told() == 4.0, "until a prompt is long enough for a measurement"
    end(driver, driver.ask(LONG, GenerationParams(max_tokens=1)))
    assert told() == pytest.approx(len(LONG.encode()) / prepared(driver, LONG).tokens)


def test_a_load_of_a_loaded_model_is_done_and_of_an_unknown_model_is_refused(driver: Driver):
    driver.answer(PLAIN["prompt"])
    before = counts(driver)
    driver.take(LoadModel(700, driver.default))
    assert driver.said[700] == [Finished(700, (), 0, 0)]
    driver.take(LoadModel(701, "nothing"))
    driver.take(UnloadModel(702, "nothing"))
    for number in (701, 702):
        (refusal,) = driver.said[number]
        assert isinstance(refusal, Refusal)
        assert (refusal.refused.code, "nothing" in refusal.refused.message) == (RefusalCode.NO_MODEL, True)
    assert counts(driver) == before


def test_padding_may_waste_what_the_cap_in_force_allows(driver: Driver):
    driver.answer(PLAIN["prompt"])
    for cap in (4 * GIB, 64 * GIB, 2 * GIB):
        driver.take(MemoryLimits(cap, cap, 64 * MIB, "static"))
        (model,) = driver.engine.report(time.monotonic()).models
        assert model.kv.waste == compute_waste_bytes(cap)


# checks after a forward


def test_prompts_that_are_read_together_are_looked_at_after_their_forward(driver: Driver):
    """The ceiling lets everything pass. Only the check of the cap after the forward can refuse."""
    driver.answer(PLAIN["prompt"])
    memory = driver.engine.report(time.monotonic()).memory
    driver.take(MemoryLimits(max(memory.active, memory.phys or 0) - MIB, 8 * GIB, 0, "static"))
    numbers = [driver.ask(f"{word} there", GenerationParams(max_tokens=4)) for word in ("hello", "good", "who")]
    driver.until(lambda: any(driver.ended(number) for number in numbers))
    newest = driver.ended(numbers[-1])
    assert isinstance(newest, Refusal), newest
    assert "over its cap" in newest.refused.message
    assert counts(driver).overs == 1
    assert [driver.ended(number) for number in numbers[:-1]] == [None, None]
