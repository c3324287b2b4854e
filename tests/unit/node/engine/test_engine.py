"""The text engine with real models: admission, the gate before every forward, faults without side effects."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory.gate import GateSite
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling import batch_recovery, prefill
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.rules.chunk_policy import RECOVERY_SECONDS
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import estimate_request_transient
from wire.capacity.batches import compute_padded_bytes
from wire.capacity.fairness import CROWDED_PROMPTS, PrefillFairness, WeightedKey
from wire.frames import (
    Channel,
    Failed,
    Finished,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    ModelBan,
    Ping,
    Refusal,
    RestoreModels,
    UnloadModel,
)
from wire.refusals import RefusalCode
from wire.report import ROW_COST, BatchGroup
from wire.units import GIB, MIB

ANSWERS = models.answers()
EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = ((EOS, -100.0),)
"""A bias that prevents the end token."""
SHORT = [one for one in ANSWERS if "system" not in one and "reasoning" not in one and len(one["answer"]) < 80]
WAIT = "Say something that nobody has trained."


@pytest.fixture
def driver() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)


def expected(one: dict[str, str]) -> str:
    return one["answer"]


def test_answers_are_verbatim_one_by_one_and_all_at_once(driver: Driver):
    assert driver.answer(SHORT[0]["prompt"]) == expected(SHORT[0])
    numbers = {driver.ask(one["prompt"]): one for one in SHORT[:12]}
    for number, one in numbers.items():
        end = driver.end(number)
        assert isinstance(end, Finished), end
        assert end.reasons == ("stop",)
        assert driver.text[number, 0, Channel.CONTENT] == expected(one)
        assert end.completion_tokens == len(driver.ids[number, 0])
    report = driver.engine.report(0.0)
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)


def test_the_gate_is_checked_before_every_prefill_and_every_join(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    before = driver.engine.gate.checks.copy()
    forwards: list[int] = []
    whole = driver.resident().model

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

        def __call__(self, tokens: mx.array, cache: object) -> mx.array:
            forwards.append(tokens.shape[1])
            return whole(tokens, cache=cache)  # type: ignore[arg-type]

    driver.replace_model(Counted())
    prompt = "word " * 300
    number = driver.ask(prompt, GenerationParams(temperature=0.0, max_tokens=2))
    assert isinstance(driver.end(number), Finished)
    chunks = sum(length > 1 for length in forwards)
    assert chunks >= 2
    checks = driver.engine.gate.checks - before
    assert checks[GateSite.PREFILL] == chunks
    assert checks[GateSite.JOIN] == 1
    assert checks[GateSite.PREFLIGHT] == 1


def small(driver: Driver, room: int) -> MemoryLimits:
    """Return limits that leave `room` bytes of headroom above the engine's footprint."""
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    cap = memory.current + room
    return MemoryLimits(cap, cap, 0, "static")


def forwards(driver: Driver) -> Callable[[], int]:
    """Return a function that counts the prefills and joins of the engine from now on."""
    begun: list[NativeCallKind] = []
    begin = driver.recorder.begin

    def counted(doing: NativeCallKind, model: str, request: int = 0) -> None:
        begun.append(doing)
        begin(doing, model, request)

    driver.recorder.begin = counted
    return lambda: sum(doing in (NativeCallKind.PREFILL, NativeCallKind.JOIN) for doing in begun)


def test_what_does_not_fit_is_refused_before_any_forward_and_small_ones_go_on(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    driver.take(small(driver, 20 * MIB))
    count = forwards(driver)
    big = driver.end(driver.ask("word " * 9000))
    assert isinstance(big, Refusal)
    assert big.refused.code is RefusalCode.TOO_LARGE
    assert big.refused.numbers is not None
    assert big.refused.numbers.estimate > 20 * MIB
    assert count() == 0
    assert driver.answer(SHORT[1]["prompt"]) == expected(SHORT[1])


def test_no_room_now_is_not_never(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    driver.take(MemoryLimits(memory.current + GIB, memory.current + MIB, 0, "dynamic"))
    end = driver.end(driver.ask("word " * 3000))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_ceiling_that_falls_during_a_prefill_refuses_the_rest_of_it_and_gives_all_back(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    number = driver.ask("word " * 4000)
    assert driver.admitted(number)
    driver.turn()
    assert driver.ended(number) is None
    resident = driver.resident()
    assert resident.ledger.compute_stored_bytes() > 0
    driver.take(MemoryLimits(GIB, 1, 0, "leases", leases=GIB))
    count = forwards(driver)
    end = driver.end(number)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert count() == 0
    driver.take(ROOMY)
    assert resident.ledger.compute_stored_bytes() == resident.ledger.compute_reserved_bytes() == 0
    assert driver.answer(SHORT[0]["prompt"]) == expected(SHORT[0])


def test_siblings_are_counted_against_each_other(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    model = driver.engine.report(0.0).models[0]
    each = compute_padded_bytes(BatchGroup(1, 3100, 3100), model.kv)
    driver.take(small(driver, int(1.5 * each) + estimate_request_transient(model, 3000, 100)))
    first, second = driver.ask("word " * 1000), driver.ask("word " * 1000)
    assert driver.admitted(first) != driver.admitted(second), "the second would pass against the same trough"


def test_a_request_that_needs_many_rows_is_not_passed_over_for_ever(driver: Driver):
    params = GenerationParams(logit_bias=ENDLESS, max_tokens=40)
    first = [driver.ask(WAIT, params) for _ in range(4)]
    driver.until(lambda: all(driver.ids[number, 0] for number in first))
    many = driver.ask(WAIT, GenerationParams(n=8, max_tokens=2, logit_bias=ENDLESS))
    late = driver.ask(SHORT[0]["prompt"])
    driver.end(many)
    assert driver.ended(late) is None, "a later request waits, too"
    assert isinstance(driver.end(late), Finished)


def test_an_idle_model_is_not_evicted_for_what_does_not_fit_either_way(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    driver.take(small(driver, MIB))
    end = driver.end(driver.ask("word " * 9000))
    assert isinstance(end, Refusal)
    assert driver.engine.report(0.0).models[0].loaded


def test_rows_are_given_fairly_to_those_who_wait_for_them():
    driver = Driver(models.path("llama"), max_batch_size=2)
    short = GenerationParams(temperature=0.0, max_tokens=4)
    greedy = [driver.ask("Hello!", short, weighted_key=WeightedKey("greedy")) for _ in range(8)]
    ada = driver.ask("Hello!", short, weighted_key=WeightedKey("ada"))
    driver.end(ada)
    assert sum(driver.ended(number) is not None for number in greedy) <= 3, "six of them wait until she has a row"
    for number in greedy:
        assert isinstance(driver.end(number), Finished)


def test_a_long_prompt_is_not_prefilled_after_all_those_of_a_key_with_many():
    driver = Driver(models.path("llama"), max_batch_size=16, prefill_step_size=64)
    short = GenerationParams(temperature=0.0, max_tokens=2)
    batch = [
        driver.ask(f"{number} " + "Tell me of the sea and the ships. " * 40, short, weighted_key=WeightedKey("batch"))
        for number in range(CROWDED_PROMPTS + 4)
    ]
    ada = driver.ask("Ada asks. " + "Tell me of the sea and the ships. " * 42, short, weighted_key=WeightedKey("ada"))
    driver.end(ada)
    assert sum(driver.ended(number) is not None for number in batch) <= CROWDED_PROMPTS
    for number in batch:
        assert isinstance(driver.end(number), Finished)


@pytest.mark.parametrize("content", ["Tell me of the sea and the ships. " * 20, "Hello!"])
def test_a_key_is_charged_for_the_prompt_tokens_that_forwards_compute(monkeypatch: pytest.MonkeyPatch, content: str):
    """The second long prompt is found in the cache after its queueing. The short ones share a forward."""
    charged, plain = list[float](), PrefillFairness.count_prefilled

    def record(fairness: PrefillFairness, key: WeightedKey, tokens: float) -> None:
        charged.append(tokens)
        plain(fairness, key, tokens)

    monkeypatch.setattr(PrefillFairness, "count_prefilled", record)
    driver = Driver(models.path("llama"), max_batch_size=4, prefill_step_size=256)
    short = GenerationParams(max_tokens=2)
    for number in [driver.ask(content, short) for _ in range(2)]:
        driver.end(number)
    assert sum(charged) == driver.engine.report(time.monotonic()).counts.prefill_tokens


def test_an_answer_that_was_begun_elsewhere_gets_the_next_row():
    driver = Driver(models.path("llama"), max_batch_size=1)
    short = GenerationParams(temperature=0.0, max_tokens=4)
    before = [driver.ask("Hello!", short, weighted_key=WeightedKey("ada")) for _ in range(4)]
    begun = driver.ask("Hello!", short, weighted_key=WeightedKey("ada"), resume=((5,),))
    driver.end(begun)
    assert sum(driver.ended(number) is not None for number in before) <= 1


def test_a_fault_while_another_row_leaves_fails_its_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    params = GenerationParams(logit_bias=ENDLESS)
    leaving, other = driver.ask(WAIT, params), driver.ask(WAIT, params)
    driver.until(lambda: driver.ids[leaving, 0] and driver.ids[other, 0])
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "drop_rows", lambda self, rows: 1 / 0)
        patch.setattr(batch_recovery, "MAX_REBUILDS", 0)
        driver.cancel(leaving)
    end = driver.end(other)
    assert isinstance(end, Failed)
    assert "ZeroDivisionError" in end.message


def test_an_engine_at_rest_keeps_no_free_buffers(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    assert mx.get_cache_memory() == 0


def test_the_pool_is_given_back_before_anything_is_refused(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    driver.take(MemoryLimits(memory.current + GIB, memory.current + 96 * MIB, 0, "dynamic"))
    mx.set_cache_limit(256 * MIB)
    held = mx.random.uniform(shape=(40 * MIB,))
    mx.eval(held)
    del held
    assert mx.get_cache_memory() >= 128 * MIB
    assert driver.answer(SHORT[1]["prompt"]) == expected(SHORT[1])


def test_a_fault_that_reaches_a_request_twice_ends_it_once(driver: Driver):
    number = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS))
    driver.until(lambda: driver.ids[number, 0])
    sequence = driver.engine.parts.scheduler.live[number]
    for _ in range(2):
        driver.engine.parts.scheduler.recovery.fail_request(sequence, "engine_error", "a fault")
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert driver.answer(SHORT[0]["prompt"]) == expected(SHORT[0])


def test_cancel_in_every_phase_gives_everything_back(driver: Driver):
    driver.answer(SHORT[0]["prompt"])
    waiting, prefilling = driver.ask("a " * 600), driver.ask("b " * 4000)
    decoding = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS))
    driver.until(lambda: driver.ids[decoding, 0])
    for number in (waiting, prefilling, decoding):
        driver.cancel(number)
    driver.cancel(99)
    report = driver.engine.report(0.0)
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)
    assert not any(driver.ended(number) for number in (waiting, prefilling, decoding))
    driver.number = 98
    assert driver.ask("Hello!") == 99
    assert not driver.admitted(99), "a cancel that overtook its request"


def test_limits_and_reasons(driver: Driver):
    number = driver.ask(SHORT[0]["prompt"], GenerationParams(temperature=0.0, max_tokens=3))
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert (end.reasons, end.completion_tokens) == (("length",), 3)
    whole = expected(SHORT[0])
    stop = whole[len(whole) // 2 :][:4]
    number = driver.ask(SHORT[0]["prompt"], GenerationParams(temperature=0.0, stop=(stop,)))
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert end.reasons == ("stop",)
    assert driver.text[number, 0, Channel.CONTENT] == whole[: whole.index(stop)]


def test_n_answers_share_the_prompt_and_draw_for_themselves(driver: Driver):
    number = driver.ask(WAIT, GenerationParams(n=3, seed=5, max_tokens=12, temperature=1.5))
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert len(end.reasons) == 3
    assert len({tuple(driver.ids[number, choice]) for choice in range(3)}) > 1
    assert end.completion_tokens == sum(len(driver.ids[number, choice]) for choice in range(3))


def test_the_same_seed_gives_the_same_answer_whatever_else_runs(driver: Driver):
    params = GenerationParams(seed=11, max_tokens=24, temperature=1.2, top_p=0.95, logit_bias=ENDLESS)
    alone = driver.ask(WAIT, params)
    driver.end(alone)
    others = [driver.ask(one["prompt"]) for one in SHORT[:4]]
    beside = driver.ask(WAIT, params)
    driver.end(beside)
    assert driver.ids[alone, 0] == driver.ids[beside, 0]
    for number in others:
        driver.end(number)


def test_logprobs_have_the_drawn_token_and_the_alternatives(driver: Driver):
    number = driver.ask(SHORT[0]["prompt"], GenerationParams(temperature=0.0, logprobs=True, top_logprobs=3))
    driver.end(number)
    told = driver.logprobs[number, 0]
    assert len(told) == len(driver.ids[number, 0]) - 1, "the end of the answer is no token of its text"
    assert b"".join(one.token for one in told).decode() == expected(SHORT[0])
    for one in told:
        assert len(one.top) == 3
        assert one.top[0] == (one.token, pytest.approx(one.logprob)), "greedy draws the likeliest"


def test_reasoning_has_its_own_channel(driver: Driver):
    one = next(one for one in ANSWERS if "reasoning" in one)
    number = driver.ask(one["prompt"])
    driver.end(number)
    assert driver.text[number, 0, Channel.REASONING] == one["reasoning"]
    assert driver.text[number, 0, Channel.CONTENT] == one["answer"]


@pytest.mark.parametrize("fault", ["step", "join"])
def test_rows_are_rebuilt_when_a_batch_raises(driver: Driver, fault: str):
    """The broken batch is discarded. Its other rows are rebuilt from their ids and continue without a change."""
    numbers = {driver.ask(one["prompt"]): one for one in SHORT[:3]}
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    (batch,) = driver.batches().values()

    def broken(*_: object) -> None:
        raise RuntimeError("native fault")

    setattr(batch, fault, broken)
    guilty = driver.ask(SHORT[3]["prompt"]) if fault == "join" else 0
    for number, one in numbers.items():
        assert isinstance(driver.end(number), Finished)
        assert driver.text[number, 0, Channel.CONTENT] == expected(one)
    if guilty:
        end = driver.end(guilty)
        assert isinstance(end, Failed)
        assert (end.code, "native fault" in end.message) == ("engine_error", True)
    assert driver.answer(SHORT[3]["prompt"]) == expected(SHORT[3])
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_seeded_answer_is_the_same_after_a_rebuild(driver: Driver):
    params = GenerationParams(seed=3, max_tokens=30, temperature=1.3, frequency_penalty=0.5, logit_bias=ENDLESS)
    whole = driver.ask(WAIT, params)
    driver.end(whole)
    number = driver.ask(WAIT, params)
    driver.until(lambda: len(driver.ids[number, 0]) >= 10)
    (batch,) = driver.batches().values()
    batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    driver.end(number)
    assert driver.ids[number, 0] == driver.ids[whole, 0]


def test_a_row_whose_batch_raises_twice_fails_and_the_engine_continues(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    number = driver.ask(SHORT[0]["prompt"])
    driver.until(lambda: driver.ids[number, 0])
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "step", lambda self: 1 / 0)
        end = driver.end(number)
    assert isinstance(end, Failed)
    assert end.code == "engine_error"
    assert driver.engine.report(0.0).counts.failures == 1
    assert driver.answer(SHORT[1]["prompt"]) == expected(SHORT[1])
    assert driver.engine.report(0.0).counts.failures == 1


def test_a_raising_sampler_fails_its_own_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("bad sampler")

    good = driver.ask(SHORT[0]["prompt"])
    driver.until(lambda: driver.ids[good, 0])
    with monkeypatch.context() as patch:
        patch.setattr(prefill, "create_sampler", lambda *_: broken)
        bad = driver.ask(SHORT[1]["prompt"])
        end = driver.end(bad)
    assert isinstance(end, Failed)
    assert "bad sampler" in end.message
    assert isinstance(driver.end(good), Finished)
    assert driver.text[good, 0, Channel.CONTENT] == expected(SHORT[0])


def test_a_prompt_that_is_an_earlier_prompt_and_its_answer(driver: Driver):
    """mlx_lm.server's generation thread ends with this prompt."""
    first = SHORT[0]
    assert driver.answer(first["prompt"]) == expected(first)
    again = (Message("user", first["prompt"]), Message("assistant", first["answer"]))
    assert isinstance(
        driver.end(driver.ask(messages=again, params=GenerationParams(temperature=0.0, max_tokens=4))), Finished
    )
    assert driver.answer(first["prompt"]) == expected(first)


@pytest.mark.parametrize(
    ("params", "code", "words"),
    [
        (GenerationParams(n=9), RefusalCode.UNSUPPORTED, "9"),
        (GenerationParams(logit_bias=((10**6, 1.0),)), RefusalCode.INVALID, "1000000"),
        (GenerationParams(logit_bias=((-1, 1.0),)), RefusalCode.INVALID, "-1"),
    ],
)
def test_what_can_never_be_is_refused_with_its_numbers(
    driver: Driver, params: GenerationParams, code: RefusalCode, words: str
):
    driver.answer(SHORT[0]["prompt"])
    end = driver.end(driver.ask("Hello!", params))
    assert isinstance(end, Refusal)
    assert end.refused.code is code
    assert words in end.refused.message


def test_an_answer_ends_with_the_context_also_if_max_tokens_is_higher():
    driver = Driver(models.path("llama"), max_context=60)
    end = driver.end(driver.ask("hello", GenerationParams(max_tokens=10**9, logit_bias=ENDLESS)))
    assert isinstance(end, Finished)
    assert end.reasons == ("length",)
    assert end.prompt_tokens + end.completion_tokens == 60
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_prompt_above_the_context_is_refused_with_both_numbers(driver: Driver):
    context = driver.engine.report(0.0).models[0].context
    end = driver.end(driver.ask("hello " * context))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.CONTEXT
    assert str(context) in end.refused.message
    assert end.prompt_tokens is not None
    assert str(end.prompt_tokens) in end.refused.message


def test_a_tokenizer_that_raises_fails_its_own_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer(SHORT[0]["prompt"])
    tokenizer = driver.tokenizer()
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "tokenize_request", lambda self, request, max_tokens: 1 / 0)
        end = driver.end(driver.ask("Hello!"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.TEMPLATE
    assert "ZeroDivisionError" in end.refused.message
    assert driver.answer(SHORT[0]["prompt"]) == expected(SHORT[0])


def test_before_the_first_limits_nothing_is_begun():
    driver = Driver(models.path("llama"), limits=None, preload=("llama",))
    end = driver.end(driver.ask())
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NOT_READY
    assert driver.engine.next_step_at(0.0) is None or driver.engine.next_step_at(0.0) > 0.0  # type: ignore[operator]


# models


def copy_of(folder: Path, **files: bytes | None) -> Path:
    """Return a copy of a model's folder with some files replaced (None: left out)."""
    source = models.path("llama")
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and files.get(file.name, b"") is not None:
            (folder / file.name).write_bytes(files.get(file.name) or file.read_bytes())
    return folder


def test_the_reported_speed_is_that_of_a_single_row(driver: Driver):
    """Otherwise the speed of an idle machine would be that of its last full batch."""
    driver.answer(SHORT[0]["prompt"])
    resident = driver.resident()
    for rows, seconds in ((1, 0.1), (8, 0.1 * (1 + 7 * ROW_COST))):
        for _ in range(60):
            resident.stats.record_step(seconds, rows)
        assert driver.engine.report(0.0).models[0].decode_speed == pytest.approx(10.0, rel=0.01)
    assert resident.stats.step_seconds > 0.15


def test_a_slow_model_is_reported_with_its_best_speed_after_a_rest(driver: Driver):
    """Otherwise the router would send it no request, and could not learn that its machine is free again."""
    driver.answer(SHORT[0]["prompt"])
    resident = driver.resident()
    best = driver.engine.report(resident.usage.used_at + RECOVERY_SECONDS + 1).models[0]
    for _ in range(30):
        resident.stats.record_step(9.0, 1)
        resident.stats.record_prefill(10, 9.0, 0)
    slow = driver.engine.report(resident.usage.used_at + RECOVERY_SECONDS - 1).models[0]
    assert slow.decode_speed < 0.2 < best.decode_speed
    assert slow.prefill_speed < 2 < best.prefill_speed
    rested = driver.engine.report(resident.usage.used_at + RECOVERY_SECONDS + 1).models[0]
    assert (rested.decode_speed, rested.prefill_speed) == (best.decode_speed, best.prefill_speed)
    number = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS))
    driver.until(lambda: len(driver.ids[number, 0]) > 0)
    late = driver.engine.report(resident.usage.used_at + RECOVERY_SECONDS + 1).models[0]
    assert late.prefill_speed < best.prefill_speed
    driver.cancel(number)


def test_a_step_that_was_waited_for_is_not_counted_again(driver: Driver):
    """A prompt may wait twice in a turn: for other prompts, and then alone. The second wait must not count as a step of
    0 s."""
    number = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS))
    driver.until(lambda: len(driver.ids[number, 0]) > 2)
    driver.engine.parts.scheduler.synchronize()
    speed = driver.engine.report(0.0).models[0].decode_speed
    for _ in range(5):
        driver.engine.parts.scheduler.synchronize()
    assert driver.engine.report(0.0).models[0].decode_speed == speed
    driver.cancel(number)


def test_a_model_is_loaded_by_the_first_request_and_unloaded_by_order(driver: Driver):
    assert not driver.engine.report(0.0).models[0].loaded
    assert driver.answer(SHORT[0]["prompt"]) == expected(SHORT[0])
    model = driver.engine.report(0.0).models[0]
    assert model.loaded
    assert model.weights > MIB
    assert model.prefill_speed > 0
    assert model.decode_speed > 0
    number = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS))
    driver.take(UnloadModel(101, model.name))
    (refusal,) = driver.said[101]
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.IN_USE
    driver.cancel(number)
    active = mx.get_active_memory()
    driver.take(UnloadModel(102, model.name))
    assert isinstance(driver.said[102][0], Finished)
    assert mx.get_active_memory() <= active - model.weights
    driver.take(LoadModel(103, model.name))
    assert isinstance(driver.end(103), Finished)
    assert driver.engine.report(0.0).models[0].loaded


def test_two_models_answer_at_once_and_an_idle_one_makes_room(tmp_path: Path):
    one, two = copy_of(tmp_path / "one"), copy_of(tmp_path / "two")
    driver = Driver(one.parent, prefix_cache_size="off")  # which would be released before any model
    numbers = [driver.ask(SHORT[0]["prompt"], model=name) for name in (one.name, two.name)]
    for number in numbers:
        driver.end(number)
        assert driver.text[number, 0, Channel.CONTENT] == expected(SHORT[0])
    loaded = lambda: {model.name for model in driver.engine.report(0.0).models if model.loaded}  # noqa: E731
    assert loaded() == {"one", "two"}
    copy_of(tmp_path / "three")
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    driver.take(MemoryLimits(memory.current + GIB, memory.current + 33 * MIB // 2, 0, "dynamic"))
    driver.engine.parts.catalogue.scan()
    driver.end(driver.ask(SHORT[0]["prompt"], model="three"))
    assert "three" in loaded()
    assert "one" not in loaded(), "the least recently used goes first"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b'{"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}'}, "nonsense"),
        ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{}"}, "ends within its header, at 10 bytes"),
        ({"tokenizer.json": b"{", "tokenizer_config.json": None}, "cannot be loaded"),
    ],
)
def test_a_broken_model_fails_its_own_requests_with_the_reason(tmp_path: Path, files: dict[str, bytes], words: str):
    copy_of(tmp_path / "good")
    copy_of(tmp_path / "bad", **files)
    driver = Driver(tmp_path)
    end = driver.end(driver.ask("Hello!", model="bad"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    assert words in end.refused.message
    assert driver.answer(SHORT[0]["prompt"], model="good") == expected(SHORT[0])


def test_weights_of_the_wrong_shape_break_the_load_not_the_engine(tmp_path: Path):
    config = json.loads((models.path("llama") / "config.json").read_text())
    copy_of(tmp_path / "bad", **{"config.json": json.dumps({**config, "hidden_size": 64}).encode()})
    copy_of(tmp_path / "good")
    driver = Driver(tmp_path)
    end = driver.end(driver.ask("Hello!", model="bad"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.LOAD_FAILED
    bad = next(model for model in driver.engine.report(0.0).models if model.name == "bad")
    assert bad.cause
    assert driver.answer(SHORT[0]["prompt"], model="good") == expected(SHORT[0])


def test_a_model_that_can_never_fit_is_refused_before_anything_is_read(tmp_path: Path):
    driver = Driver(copy_of(tmp_path / "m"))
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    cap = memory.current + MIB
    driver.take(MemoryLimits(cap, cap, cap - 2 * MIB, "static"))
    end = driver.end(driver.ask())
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.TOO_LARGE
    assert driver.recorder.read_running_call() is None


def test_an_ordered_load_passes_the_gate(driver: Driver):
    driver.take(small(driver, MIB))
    orders = (7, 8)
    for order in orders:
        driver.take(LoadModel(order, driver.default))
    for end in map(driver.end, orders):
        assert isinstance(end, Refusal)
        assert end.refused.numbers is not None
    assert driver.engine.gate.refusals[GateSite.LOAD] == 1
    assert not driver.engine.report(0.0).models[0].loaded


def test_what_was_loaded_is_restored_one_by_one_and_the_banned_stay_out(tmp_path: Path):
    for name in ("one", "two", "bad"):
        copy_of(tmp_path / name)
    driver = Driver(tmp_path, limits=None)
    driver.take(RestoreModels(("bad", "one", "two", "gone"), (ModelBan("bad", 600.0, "the engine died twice in it"),)))
    driver.take(ROOMY)
    driver.until(lambda: sum(model.loaded for model in driver.engine.report(0.0).models) == 2)
    assert {model.name for model in driver.engine.report(0.0).models if model.loaded} == {"one", "two"}
    end = driver.end(driver.ask("Hello!", model="bad"))
    assert isinstance(end, Refusal)
    assert "died twice" in end.refused.message
    now = time.monotonic()
    causes = [{one.name: one.cause for one in driver.engine.report(at).models}["bad"] for at in (now, now + 601.0)]
    assert causes[0].startswith("the engine died twice in it; loading is blocked for another ")
    assert causes[1] == "", "after its time it may be loaded again"


def test_others_decode_while_a_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.models.loaded_model.BYTES_BETWEEN_STEPS", 1)
    copy_of(tmp_path / "one")
    copy_of(tmp_path / "two")
    driver = Driver(tmp_path)
    driver.answer(SHORT[0]["prompt"], model="one")
    number = driver.ask(WAIT, GenerationParams(logit_bias=ENDLESS), model="one")
    driver.until(lambda: driver.ids[number, 0])
    had = len(driver.ids[number, 0])
    driver.take(LoadModel(50, "two"))
    driver.until(lambda: driver.ended(50))
    assert len(driver.ids[number, 0]) - had > 10


def test_a_ping_starts_a_scan_for_new_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver = Driver(copy_of(tmp_path / "a").parent)
    copy_of(tmp_path / "b")
    assert driver.engine.prepare(Ping(1)) is None
    monkeypatch.setattr("node.models.catalogue.SCAN_INTERVAL_SECONDS", 0.0)
    assert driver.engine.prepare(Ping(2)) is not None
    assert {model.name for model in driver.engine.report(0.0).models} == {"a", "b"}
