"""Several prompts in one forward: answers are unchanged, the gate checks all bytes, and a fault ends only its
request."""

import json
import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from node.engine.kv.kv_cache import Layers, TextModel, create_cache, is_plain, sum_nbytes
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.memory.gate import GateSite
from node.engine.process.interface import NativeCallKind
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling import batch_recovery, packed_prefill, row_join
from node.engine.scheduling.decode_batch import DecodeBatch, JoiningRow, RowSampler
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.rules import prefill_order
from node.engine.scheduling.rules.chunk_policy import ChunkPace
from node.engine.scheduling.sampling import choose_greedily
from tests import models
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, Driver, decoded_alone
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import PrefillFairness, WeightedKey
from wire.frames import Channel, Failed, Finished, GenerationParams, GrammarSpec, Message

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
ENDLESS = ((EOS, -100.0),)
SHORT = [one for one in models.answers() if "system" not in one and "reasoning" not in one and len(one["answer"]) < 80][
    :6
]
JOIN_BYTES = 12_345
LIKE = "How are you today, number {}?"


class Steady(ChunkPace):
    """A constant pace, because a measured pace on a busy machine leaves no time for a second prompt."""

    def learn(self, tokens: int, back: float, seconds: float) -> None:
        """Ignore a measurement."""


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=512)
    driver.answer("Hello!", ONE_TOKEN)
    driver.resident().stats.pace = Steady(each=1e-6)
    return driver


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows of every forward over several prompts."""
    rows: list[int] = []
    write = packed_prefill.prefill_rows

    def counted(model: TextModel, pasts: list[list[int]], cache: Layers) -> None:
        rows.append(len(pasts))
        write(model, pasts, cache)

    monkeypatch.setattr(packed_prefill, "prefill_rows", counted)
    return rows


def ask(driver: Driver, count: int, params: GenerationParams = GREEDY) -> list[int]:
    return [driver.ask(one["prompt"], params) for one in SHORT[:count]]


def verbatim(driver: Driver, numbers: list[int]) -> None:
    for number, one in zip(numbers, SHORT, strict=False):
        end = driver.end(number)
        assert isinstance(end, Finished), end
        assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    report = driver.engine.report(0.0)
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)


def test_what_waits_is_read_at_once_and_answered_verbatim(
    driver: Driver, shared: list[int], monkeypatch: pytest.MonkeyPatch
):
    before, fair = driver.engine.report(0.0).counts, list[int]()
    monkeypatch.setattr(PrefillFairness, "count_prefilled", lambda _, key, tokens: fair.append(tokens))
    numbers = ask(driver, 6)
    verbatim(driver, numbers)
    ends = [driver.end(number) for number in numbers]
    prefilled = sum(end.prompt_tokens - end.cached_tokens for end in ends if isinstance(end, Finished))
    counts = driver.engine.report(0.0).counts
    assert counts.prefill_tokens - before.prefill_tokens == prefilled == sum(fair)
    assert max(shared) >= 3
    assert sum(shared) <= 6, "no prompt is prefilled twice"
    alone = 6 - sum(shared)
    assert counts.forwards - before.forwards == 2 * (len(shared) + alone), "a forward, a join"


@pytest.mark.parametrize("count", [1, 5])
def test_nothing_is_computed_behind_the_last_token(driver: Driver, count: int):
    forwards = list[tuple[int, ...]]()
    whole = driver.resident().model

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

        def __call__(self, tokens: mx.array, cache: Layers) -> mx.array:
            forwards.append(tuple(tokens.shape))
            return whole(tokens, cache=cache)

    driver.replace_model(cast("TextModel", Counted()))
    number = driver.ask(SHORT[0]["prompt"], GenerationParams(temperature=0.0, max_tokens=count, logit_bias=ENDLESS))
    assert isinstance(driver.end(number), Finished)
    assert len(driver.ids[number, 0]) == count
    assert len(forwards) == count, "the prompt's gives the first"


def test_newcomers_are_read_together_beside_those_who_decode(driver: Driver, shared: list[int]):
    numbers = ask(driver, 1)
    driver.until(lambda: driver.ids[numbers[0], 0])
    numbers += [driver.ask(one["prompt"]) for one in SHORT[1:6]]
    verbatim(driver, numbers)
    assert shared


def test_who_comes_alone_where_there_was_a_crowd_waits_for_company(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_order, "COALESCE_SECONDS", 3600.0)
    monkeypatch.setattr(prefill_order, "MAX_COALESCE_SECONDS", 3600.0)
    prompts = iter(one["prompt"] for one in SHORT)

    def waits(numbers: list[int]) -> bool:
        driver.turn()
        due = driver.engine.parts.scheduler.next_step_at(time.monotonic())
        return not any(driver.ids[number, 0] for number in numbers) and due is not None and due > time.monotonic() + 9

    def answered(numbers: list[int]) -> bool:
        return all(isinstance(driver.end(number), Finished) for number in numbers)

    assert answered([driver.ask(next(prompts))]), "no other request arrived recently"
    together = [driver.ask(next(prompts), GenerationParams(max_tokens=3, logit_bias=ENDLESS)) for _ in range(2)]
    assert answered(together), "both end in one turn"
    lone = driver.ask(next(prompts))
    assert waits([lone])
    both = [lone, driver.ask(next(prompts))]
    assert waits(both)
    monkeypatch.setattr(prefill_order, "COALESCE_SECONDS", 0.0)
    assert not waits(both), "no request arrived after them"
    assert answered(both)
    crowd_ended = time.monotonic()
    assert answered([driver.ask(LIKE.format(8))])
    monkeypatch.setattr(prefill_order, "COALESCE_SECONDS", 3600.0)
    with monkeypatch.context() as patched:
        patched.setattr(prefill_order, "AFTER_BURST_SECONDS", time.monotonic() - crowd_ended)
        lone = driver.ask(LIKE.format(9))
        assert not waits([lone]), "the request before was alone"
        assert answered([lone])
    assert not waits([driver.ask(LIKE.format(number)) for number in range(8)]), "no further row is free"


def test_first_tokens_of_a_packed_prefill_are_sent_before_the_next_prefill(
    driver: Driver, shared: list[int], monkeypatch: pytest.MonkeyPatch
):
    prefill, heard = driver.engine.parts.scheduler.prefill, list[bool]()

    def watched(now: float) -> None:
        heard[:] = [bool(driver.ids[number, 0]) for number in numbers]
        prefill(now)

    numbers = ask(driver, 6)
    driver.until(lambda: shared)
    joined = len(numbers) - driver.engine.parts.scheduler.measure_load()[1]
    monkeypatch.setattr(driver.engine.parts.scheduler, "prefill", watched)
    driver.turn()
    assert sum(heard) == joined >= shared[0]
    verbatim(driver, numbers)


def test_a_prompt_that_was_read_with_others_is_kept_for_the_next(driver: Driver, shared: list[int]):
    verbatim(driver, ask(driver, 4))
    assert shared
    numbers = ask(driver, 4)
    verbatim(driver, numbers)
    for number in numbers:
        end = driver.end(number)
        assert isinstance(end, Finished)
        assert end.cached_tokens == end.prompt_tokens - 1


def test_packed_prompts_are_cached_for_their_key_while_they_decode(driver: Driver, shared: list[int]):
    def start(word: str, key: str, tokens: int) -> int:
        params = GenerationParams(temperature=0.0, max_tokens=tokens, logit_bias=ENDLESS)
        messages = (Message("system", "word " * 8), Message("user", word * 30))
        return driver.ask("", params, messages=messages, weighted_key=WeightedKey(key), shared=True)

    numbers = [start(word, "ada", 90) for word in ("cat ", "sun ")]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    assert shared == [2]
    other, same = (driver.end(start("cat ", key, 2)) for key in ("bob", "ada"))
    assert not any(driver.ended(number) for number in numbers)
    assert isinstance(same, Finished)
    assert isinstance(other, Finished)
    assert same.cached_tokens == same.prompt_tokens - 1
    assert 16 < other.cached_tokens < other.prompt_tokens // 2, "the system prompt alone"


def test_equal_prompts_are_read_once_where_they_are_kept(driver: Driver, shared: list[int]):
    prompt = "word " * 40
    numbers = [driver.ask(prompt, GenerationParams(temperature=0.0, max_tokens=3)) for _ in range(3)]
    ends = [driver.end(number) for number in numbers]
    assert [isinstance(end, Finished) and end.cached_tokens > 0 for end in ends] == [False, True, True]
    assert shared == []


def test_a_packed_prompt_uses_no_cached_tokens_and_reports_none(driver: Driver, shared: list[int]):
    opening, brief = "word " * 20, GenerationParams(temperature=0.0, max_tokens=2)
    driver.answer(opening + "seven", brief)
    numbers = [driver.ask(opening + rest * 60, brief) for rest in ("cat ", "sun ")]
    assert all(driver.said[number][0].cached_tokens for number in numbers)  # type: ignore[attr-defined]
    prefills = driver.engine.parts.scheduler.prefills
    assert all(prefill.past.hit.entry for prefill in prefills)  # type: ignore[union-attr]
    ends = [driver.end(number) for number in numbers]
    assert shared == [2]
    assert [isinstance(end, Finished) and end.cached_tokens for end in ends] == [0, 0]
    assert not any(prefill.past.hit.entry for prefill in prefills), "held no longer"  # type: ignore[union-attr]


def test_prompts_of_two_models_are_not_packed(shared: list[int]):
    driver, names = Driver(models.path("llama"), models.path("qwen3"), max_batch_size=8), ("llama", "qwen3")
    for name in names:
        driver.answer("Hello!", GenerationParams(max_tokens=1), model=models.path(name).name)
        driver.resident(models.path(name).name).stats.pace = Steady(each=1e-6)
    brief, words = GenerationParams(max_tokens=2), ("cat " * 40, "sun " * 40)
    numbers = [driver.ask(word, brief, model=models.path(name).name) for word, name in zip(words, names, strict=True)]
    assert all(isinstance(driver.end(number), Finished) for number in numbers)
    assert shared == []


def test_prompts_whose_commitments_share_no_batch_are_not_packed(driver: Driver, shared: list[int]):
    """Only the longest committed row covers the padding of a packed forward."""
    driver.resident().ledger.set_waste(0)
    params = GenerationParams(max_tokens=900)
    numbers = [driver.ask(f"{word} there", params, expected=count) for word, count in (("who", 4), ("cat", 900))]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    assert (shared, len(driver.batches())) == ([], 2)


def test_a_packed_forward_has_ended_when_its_memory_is_measured(driver: Driver):
    model = driver.resident().model
    cache, before = create_cache(model), mx.get_active_memory()
    packed_prefill.prefill_rows(model, [[20] * 30, [21] * 30], cache)
    assert mx.get_active_memory() - before >= sum_nbytes(cache) > 0


def test_packed_prompts_whose_join_failed_count_as_not_stored(
    driver: Driver, shared: list[int], monkeypatch: pytest.MonkeyPatch
):
    brief, live = GenerationParams(max_tokens=2), driver.engine.parts.scheduler.live
    numbers = [driver.ask(word * 40, brief) for word in ("cat ", "sun ")]
    monkeypatch.setattr(DecodeBatch, "prepare_rows", lambda *_: 1 / 0)
    driver.until(lambda: shared)
    assert [live[number].holds_memory for number in numbers] == [False, False]
    assert all(isinstance(driver.end(number), Finished) for number in numbers), "each is prefilled alone"


def test_a_prompt_that_cannot_be_packed_does_not_wait_for_company(monkeypatch: pytest.MonkeyPatch):
    driver, brief = Driver(models.path("lfm2"), max_batch_size=8), GenerationParams(max_tokens=2)
    for number in [driver.ask("Hello!", brief), driver.ask("Who are you?", brief)]:
        driver.end(number)
    monkeypatch.setattr(prefill_order, "COALESCE_SECONDS", 3600.0)
    monkeypatch.setattr(prefill_order, "MAX_COALESCE_SECONDS", 3600.0)
    driver.ask("How are you?", brief)
    now = time.monotonic()
    assert driver.engine.parts.scheduler.next_step_at(now) == now


def draws(driver: Driver, *numbers: int) -> list[tuple[list[int], list[object]]]:
    return [(driver.ids[one, 0], [said.token for said in driver.logprobs[one, 0]]) for one in numbers]


def test_a_prompt_whose_request_fails_before_the_forward_is_left_out(shared: list[int]):
    driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=512, prefix_cache_size="off")
    driver.answer("Hello!")
    driver.resident().stats.pace = Steady(each=1e-6)
    scheduler, params = driver.engine.parts.scheduler, GenerationParams(n=2, max_tokens=60, logit_bias=ENDLESS)
    failing = driver.ask(SHORT[4]["prompt"], params, resume=((30,), (31,)))
    scheduler.prefills[1].delay(time.monotonic() + 3600.0)
    driver.until(lambda: driver.ids[failing, 0])
    (waiting,) = scheduler.prefills
    scheduler.live[failing].rows[0].rebuilt = batch_recovery.MAX_REBUILDS
    for batch in driver.batches().values():
        batch.wait = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    numbers = [driver.ask(one["prompt"]) for one in SHORT[1:3]]
    waiting.end_delay()
    assert isinstance(driver.end(failing), Failed)
    assert all(isinstance(driver.end(number), Finished) for number in numbers)
    assert shared == [2], "once, without the prompt of the failed request"


def test_draws_penalties_and_grammars_begin_behind_the_prompt(driver: Driver, shared: list[int]):
    """The prompt's last token is an input of the first step, and no token of the answer."""
    rules = GrammarSpec("regex", "[0-9]{3}-[0-9]{4}")
    params = [
        GenerationParams(
            seed=3, temperature=1.2, max_tokens=12, repetition_penalty=1.3, logprobs=True, logit_bias=ENDLESS
        ),
        GenerationParams(temperature=0.0, grammar=rules, max_tokens=20),
        GenerationParams(temperature=0.0, max_tokens=12, frequency_penalty=0.4),
    ]
    alone = Driver(models.path("llama"), max_batch_size=1, prefix_cache_size="off")
    numbers = [alone.ask(asked["prompt"], one) for asked, one in zip(SHORT, params, strict=False)]
    assert all(isinstance(alone.end(number), Finished) for number in numbers)
    assert shared == []
    theirs = [driver.ask(asked["prompt"], one) for asked, one in zip(SHORT, params, strict=False)]
    assert all(isinstance(driver.end(number), Finished) for number in theirs)
    assert shared
    assert draws(driver, *theirs) == draws(alone, *numbers)


def test_the_gate_is_checked_for_the_whole_forward_and_for_the_join(
    driver: Driver, shared: list[int], monkeypatch: pytest.MonkeyPatch
):
    write, asked, loaded = packed_prefill.prefill_rows, driver.gate.asked, driver.resident()
    charge, joined, least = loaded.estimator.estimate_charged_join, list[int](), dict[int, int]()
    asked.clear()

    def charged(size: int, layers: int, rows: int) -> int:
        joined.append(size)
        return charge(size, layers, rows)

    def judged(model: TextModel, pasts: list[list[int]], cache: Layers) -> None:
        site, estimate = asked[-1]
        assert site is GateSite.PREFILL
        assert estimate >= len(pasts) * driver.resident().estimator.estimate_chunk(len(pasts[0]), 0), (
            "all of them, padded"
        )
        least[len(joined)] = len(pasts) * compute_row_bytes(loaded.kv, len(pasts[0]) + 1)
        write(model, pasts, cache)

    monkeypatch.setattr(packed_prefill, "prefill_rows", judged)
    monkeypatch.setattr(loaded.estimator, "estimate_charged_join", charged)
    verbatim(driver, ask(driver, 6))
    assert shared
    joins = sum(site is GateSite.JOIN for site, _ in asked)
    assert joins == len(shared) + 6 - sum(shared)
    for number in [driver.ask(words, GenerationParams(max_tokens=2)) for words in ("cat " * 40, "sun " * 44)]:
        assert isinstance(driver.end(number), Finished)
    assert shared[-1] == 2
    assert all(joined[place] >= size for place, size in least.items()), "rows are padded to the longest"


def test_what_does_not_fit_at_once_is_read_by_fewer(driver: Driver, shared: list[int]):
    def tight(site: GateSite, estimate: int) -> bool:
        longest = max((len(one.ids) for one in driver.engine.parts.scheduler.prefills), default=0) - 1
        return site is GateSite.PREFILL and estimate > driver.resident().estimator.estimate_packed(2, longest)

    driver.gate.refuses = tight
    verbatim(driver, ask(driver, 6))
    assert set(shared) == {2}
    assert driver.engine.report(0.0).counts.shrinks
    shared.clear()
    longest = max(len(one["prompt"]) for one in SHORT)
    most = driver.resident().estimator.estimate_chunk(longest, 0, last=True)
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL and estimate > most
    verbatim(driver, ask(driver, 6))
    assert shared == [], "one by one"


def test_a_join_without_room_is_tried_again_one_by_one(driver: Driver, shared: list[int]):
    joins = driver.gate.checks[GateSite.JOIN]
    # cached prefixes are evicted first, then the gate is asked again
    driver.gate.refuses = lambda site, estimate: site is GateSite.JOIN and driver.gate.checks[site] <= joins + 2
    verbatim(driver, ask(driver, 6))
    assert len(shared) >= 1


def test_one_that_is_guilty_fails_alone(driver: Driver, shared: list[int], monkeypatch: pytest.MonkeyPatch):
    guard_of = row_join.create_row_sampler
    guilty = driver.number + 3

    def raising(sequence: Sequence, row: Row) -> RowSampler:
        if sequence.number == guilty:
            raise RuntimeError("its guard is broken")
        return guard_of(sequence, row)

    monkeypatch.setattr(row_join, "create_row_sampler", raising)
    numbers = ask(driver, 6)
    ends = {number: driver.end(number) for number in numbers}
    failed = ends.pop(guilty)
    assert isinstance(failed, Failed)
    assert "its guard is broken" in failed.message
    assert all(isinstance(end, Finished) for end in ends.values())
    for number, one in zip(numbers, SHORT, strict=True):
        if number != guilty:
            assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    assert driver.engine.report(0.0).memory.reserved == 0


@pytest.mark.parametrize("fault", ["prefill_rows", "prepare_rows", "add_prepared"])
def test_a_fault_of_a_shared_forward_costs_no_answer(driver: Driver, monkeypatch: pytest.MonkeyPatch, fault: str):
    """Neither the prefilled requests nor those that decode at the same time lose their answers."""
    driver.answer("word " * 60, ONE_TOKEN)
    (*_, entry) = driver.engine.parts.prefix_cache.entries
    (first,) = ask(driver, 1)
    driver.until(lambda: driver.ids[first, 0])
    whole: Any = packed_prefill if fault == "prefill_rows" else DecodeBatch
    plain_one, raised = getattr(whole, fault), list[int]()

    def broken(*past: Any) -> object:
        if not raised and (fault != "add_prepared" or len(past[1].rows) > 1):
            raised.append(1)
            raise RuntimeError("native fault")
        return plain_one(*past)

    monkeypatch.setattr(whole, fault, broken)
    (batch,) = driver.batches().values()
    numbers = [first, *(driver.ask(one["prompt"]) for one in SHORT[1:6])]
    driver.until(lambda: raised)
    assert (batch in driver.batches().values()) == (fault != "add_prepared"), "a batch that raised is discarded"
    assert not entry.is_stored, "the fault may be in a cached prefix"
    verbatim(driver, numbers)
    assert raised


def test_a_request_is_cancelled_in_every_phase_of_a_packed_prefill(driver: Driver, shared: list[int]):
    waiting, *numbers = ask(driver, 4, GenerationParams(temperature=0.0, max_tokens=60, logit_bias=ENDLESS))
    driver.cancel(waiting)
    driver.until(lambda: shared)
    joined, decoding, last = numbers
    driver.cancel(joined)  # before its first token
    driver.until(lambda: len(driver.ids[decoding, 0]) > 3)
    driver.cancel(decoding)
    assert isinstance(driver.end(last), Finished)
    assert (driver.ids[waiting, 0], driver.ids[joined, 0]) == ([], [])
    report = driver.engine.report(0.0)
    assert (report.running, report.memory.reserved) == (0, 0)


def test_in_the_record_it_serves_many(driver: Driver, shared: list[int]):
    """A crash in a shared forward is no single request's fault."""
    begun: list[tuple[NativeCallKind, int]] = []
    begin = driver.recorder.begin

    def heard(doing: NativeCallKind, model: str, request: int = 0) -> None:
        begun.append((doing, request))
        begin(doing, model, request)

    driver.recorder.begin = heard
    ask(driver, 4)
    driver.until(lambda: shared)
    assert (NativeCallKind.PREFILL, 0) in begun


def test_only_plain_caches_take_padding():
    assert is_plain([KVCache(), KVCache()])  # type: ignore[list-item]
    assert not is_plain([KVCache(), RotatingKVCache(64)])  # type: ignore[list-item, call-arg]
    assert not is_plain([ArraysCache(2), KVCache()])  # type: ignore[list-item, call-arg]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["lfm2", "gemma3_text"])
def test_hybrids_and_windows_are_read_one_by_one(arch: str, tiny_model: Callable[..., Any], shared: list[int]):
    driver = Driver(tiny_model(arch, trained=False), max_batch_size=8)
    numbers = [driver.ask(LIKE.format(number), GenerationParams(temperature=0.0, max_tokens=5)) for number in range(4)]
    assert all(isinstance(driver.end(number), Finished) for number in numbers)
    assert shared == []


@pytest.mark.parametrize(
    "arch", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3", "qwen3_moe"))]
)
def test_rows_read_together_decode_as_if_alone(arch: str, tiny_model: Callable[..., Any]):
    """Covers prompts of one length and of several, into an empty batch and into a decoding one."""
    model: TextModel = load_model(tiny_model(arch, trained=arch != "qwen3_moe"))[0]
    lengths = {"a": 40, "b": 37, "c": 40, "d": 3, "e": 300, "f": 300}
    prompts = {
        name: [(ord(name) * 31 + place * 7) % 400 + 20 for place in range(long)] for name, long in lengths.items()
    }
    got: dict[str, list[int]] = {name: [] for name in prompts}
    batch: DecodeBatch[str] = DecodeBatch(model)
    order = list(prompts)
    for names in (order[:3], order[3:]):
        cache, pasts = create_cache(model), [prompts[name] for name in names]
        longest = max(map(len, pasts))
        packed_prefill.prefill_rows(model, [past[:-1] + [0] * (longest - len(past)) for past in pasts], cache)
        newcomers = batch.prepare_rows(
            [JoiningRow(name, RowSampler(choose_greedily, ())) for name in names], pasts, cache
        )
        assert cache == []
        batch.add_prepared(newcomers)
        for _ in range(9):
            for token in batch.step():
                got[token.row].append(token.token)
    for name, ids in prompts.items():
        assert got[name] == decoded_alone(model, ids, len(got[name])), name
        assert batch.get_ids(name) == ids + got[name]
        assert len(got[name]) >= 8


def test_a_packed_prompt_is_cached_without_its_last_token_and_continued_the_same(driver: Driver, shared: list[int]):
    decoding = GenerationParams(temperature=0.0, max_tokens=200, logit_bias=ENDLESS)
    numbers = [driver.ask(one["prompt"], decoding) for one in SHORT[2:4]]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    assert shared == [2]
    live = driver.engine.parts.scheduler.live
    prompts = [live[number].prompt for number in numbers]
    brief = GenerationParams(temperature=0.0, max_tokens=8)
    fresh = Driver(models.path("llama"), prefix_cache_size="off")
    for prompt in prompts:
        ids = (*prompt, *prompt[-3:])
        found, alone = (one.ask("", brief, messages=(), ids=ids) for one in (driver, fresh))
        end = driver.end(found)
        assert isinstance(end, Finished)
        assert end.cached_tokens == len(prompt) - 1
        fresh.end(alone)
        assert driver.ids[found, 0] == fresh.ids[alone, 0]
    for number in numbers:
        driver.cancel(number)


# the join of rows


def test_a_prompt_is_stored_only_beside_the_room_for_its_join(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    transients, packed = list[int](), list[int]()
    make_room, store_packed = PrefixMemory.make_room, PrefixCacheManager.store_packed

    def recorded_room(memory: PrefixMemory, size: int, transient: int = 0) -> bool:
        transients.append(transient)
        return make_room(memory, size, transient)

    def recorded_store(manager: PrefixCacheManager, prefill, row, transient, view) -> None:
        packed.append(transient)
        store_packed(manager, prefill, row, transient, view)

    monkeypatch.setattr(driver.resident().estimator, "estimate_join", lambda *_: JOIN_BYTES)
    monkeypatch.setattr(PrefixMemory, "make_room", recorded_room)
    monkeypatch.setattr(PrefixCacheManager, "store_packed", recorded_store)
    numbers = [driver.ask(one["prompt"], GREEDY) for one in SHORT[:3]]
    for number, one in zip(numbers, SHORT, strict=False):
        driver.end(number)
        assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    assert len(packed) >= 2
    assert set(packed) == {JOIN_BYTES}
    assert transients.count(JOIN_BYTES) >= len(packed)


def test_a_join_that_raises_fails_its_request_and_others_answer_the_same(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    running = driver.ask(SHORT[0]["prompt"], GREEDY)
    driver.until(lambda: driver.ids[running, 0])
    with monkeypatch.context() as patch:

        def raise_error(*_: object) -> None:
            raise RuntimeError("broken")

        patch.setattr(DecodeBatch, "join", raise_error)
        failing = driver.ask("word " * 100, GREEDY)
        end = driver.end(failing)
    assert isinstance(end, Failed)
    assert end.message.startswith("the prefill of its prompt failed: ")
    assert "broken" in end.message
    assert isinstance(driver.end(running), Finished)
    assert driver.text[running, 0, Channel.CONTENT] == SHORT[0]["answer"]
    report = driver.engine.report(0.0)
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)
