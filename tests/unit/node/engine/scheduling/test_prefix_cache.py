"""The prefix cache with real models: hits of a second turn, unchanged answers, and accounting of its memory."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from node.engine.kv.kv_cache import Layers, sum_nbytes
from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS, CachedPrefix
from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from tests import models
from tests.effort import scale_examples, thin_cases
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, ROOMY, Driver
from tests.support.readings import trailing
from wire.capacity.arithmetic import estimate_request_need
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    SHARED_SCOPE,
    Admitted,
    Channel,
    Finished,
    GenerationParams,
    MemoryLimits,
    Message,
    Ping,
    Refusal,
    UnloadModel,
)
from wire.units import GIB, KIB, MIB

ANSWERS = models.answers()
SHORT = [one for one in ANSWERS if "system" not in one and "reasoning" not in one and len(one["answer"]) < 80]
THOUGHT = next(one for one in ANSWERS if "reasoning" in one)
SEEDED = GenerationParams(seed=4, temperature=0.8, max_tokens=16)
COLONS = ((28, 100.0),)
"""Bias of the token ":". The text of such an answer has the same tokens as the answer, also in the prompt of a later
turn."""
OTHERS = "qwen3", "gemma3_text", "lfm2", "qwen3_next"


@pytest.fixture
def driver() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)


def entries(driver: Driver) -> list[CachedPrefix[Layers]]:
    return list(driver.engine.parts.prefix_cache.entries)


def ended(driver: Driver, number: int) -> Finished:
    end = driver.end(number)
    assert isinstance(end, Finished), end
    return end


def turns(
    driver: Driver, first: str, second: str, params: GenerationParams, *, repeats: int
) -> tuple[list[list[int]], list[int]]:
    """Run a conversation of two turns, the second of them `repeats` times; return the ids of the answers and the cached
    tokens."""
    messages = (Message("user", first),)
    numbers = [driver.ask(messages=messages, params=params)]
    cached = [ended(driver, numbers[0]).cached_tokens]
    answer = driver.text[numbers[0], 0, Channel.CONTENT]
    messages += (Message("assistant", answer), Message("user", second))
    for _ in range(repeats):
        numbers.append(driver.ask(messages=messages, params=params))
        cached.append(ended(driver, numbers[-1]).cached_tokens)
    return [driver.ids[number, 0] for number in numbers], cached


@pytest.mark.parametrize(
    ("params", "name"),
    [
        pytest.param(GREEDY, "llama", id="greedy-llama"),
        pytest.param(SEEDED, "llama", id="seeded-llama"),
        *(
            pytest.param(GREEDY, name, id=f"greedy-{name}", marks=pytest.mark.slow)
            for name in ("lfm2", *thin_cases([name for name in OTHERS if name != "lfm2"], 3))
        ),
        *(pytest.param(SEEDED, name, id=f"seeded-{name}", marks=pytest.mark.slow) for name in thin_cases(OTHERS, 4)),
    ],
)
def test_a_second_turn_begins_where_the_first_ended_and_answers_the_same(
    params: GenerationParams, name: str, tiny_model: Callable[..., Path]
):
    """Also with windows and states that cannot be cut: a window of 64 tokens, and prompts beyond it."""
    folder = tiny_model(name, trained=name != "qwen3_next")
    driver, fresh = Driver(folder), Driver(folder, prefix_cache_size="off")
    params = GenerationParams(temperature=0.0, max_tokens=16) if params is GREEDY else params
    for first in (SHORT[0]["prompt"], SHORT[1]["prompt"] + " " + "Go on. " * 30, THOUGHT["prompt"]):
        ours, cached = turns(driver, first, SHORT[2]["prompt"], params, repeats=2)
        theirs, none = turns(fresh, first, SHORT[2]["prompt"], params, repeats=1)
        assert ours == [*theirs, theirs[1]]
        assert none == [0, 0]
        prompt = ended(driver, driver.number).prompt_tokens
        if name != "qwen3_next" or len(first) > 100:  # the text of an untrained model does not tokenize to the same ids
            assert cached[1] >= 19, "the first user's message at least"
        assert prompt - 12 <= cached[2] < prompt, "all but the opening of the answer"


def test_the_very_same_prompt_is_answered_the_same(driver: Driver):
    """An exact hit leaves an empty prompt, which ends mlx_lm.server."""
    numbers = [driver.ask(SHORT[0]["prompt"]) for _ in range(3)]
    numbers += [driver.ask(SHORT[0]["prompt"]) for _ in range(2) if ended(driver, numbers[0])]
    ends = [ended(driver, number) for number in numbers]
    assert {driver.text[number, 0, Channel.CONTENT] for number in numbers} == {SHORT[0]["answer"]}
    assert ends[-1].cached_tokens == ends[-1].prompt_tokens - 1


def test_an_answer_with_its_prompt_can_be_a_prompt(driver: Driver):
    """Generated tokens are found for any sampling, and reported at admission and at the end."""
    first = driver.ask(SHORT[0]["prompt"], GenerationParams(temperature=1.5, seed=1, max_tokens=20))
    ended(driver, first)
    second = driver.ask(SHORT[0]["prompt"], GREEDY)
    end = ended(driver, second)
    admitted = driver.said[second][0]
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == end.cached_tokens == end.prompt_tokens - 1
    assert admitted.prompt_hash == driver.said[first][0].prompt_hash != b""  # type: ignore[attr-defined]
    state = driver.engine.report(0.0).cache
    assert (state.hits, state.hit_tokens) == (1, end.cached_tokens)
    assert state.nbytes == sum(one.nbytes for one in entries(driver)) > 0


def test_the_same_prompt_of_two_keys_has_two_hashes(driver: Driver):
    """A key must not learn from another key's evictions which prompts it has sent."""
    numbers = [driver.ask("Hello!", GREEDY, cache_scope=scope) for scope in ("ada", "bob", "ada")]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    ada, bob, again = (driver.said[number][0].prompt_hash for number in numbers)  # type: ignore[attr-defined]
    assert ada == again != bob


def test_the_tokens_of_an_answer_are_found_in_the_scope_of_its_key_only(driver: Driver):
    ada, bob = WeightedKey("ada"), WeightedKey("bob")
    prompt = ended(driver, driver.ask(SHORT[0]["prompt"], weighted_key=ada)).prompt_tokens
    (entry,) = entries(driver)
    ids = (*memoryview(entry.key).cast("I"), 5, 6)
    assert len(ids) > prompt + 2, "the answer is cached with its prompt"
    for key, scope, cached in ((bob, "", 0), (ada, "all", 0), (bob, "ada", len(ids) - 2), (ada, "", len(ids) - 1)):
        number = driver.ask("", ONE_TOKEN, messages=(), ids=ids, weighted_key=key, cache_scope=scope)
        assert ended(driver, number).cached_tokens == cached


@pytest.mark.slow
def test_a_beginning_that_several_share_is_found_by_the_third(tiny_model: Callable[..., Path]):
    """Applies to a system prompt where states cannot be cut. The second request with that beginning stores a
    snapshot."""
    driver, fresh = (Driver(tiny_model("lfm2"), prefix_cache_size=size) for size in ("auto", "off"))
    system = Message("system", "You are a careful clerk. " * 20)
    cached: list[int] = []
    for one in SHORT[:3]:
        messages = (system, Message("user", one["prompt"]))
        brief = GenerationParams(temperature=0.0, max_tokens=24)
        number, other = (made.ask(messages=messages, params=brief) for made in (driver, fresh))
        cached.append(ended(driver, number).cached_tokens)
        ended(fresh, other)
        assert driver.ids[number, 0] == fresh.ids[other, 0]
    assert cached[0] == cached[1] == 0
    assert cached[2] > 100


def test_prompts_that_part_anywhere_share_all_before_with_windows(tiny_model: Callable[..., Path]):
    """Windows can be cut where a prompt parts from a stored one, unless memory was short during its prefill."""
    folder = tiny_model("gemma3_text")
    driver, fresh = (
        Driver(folder, prefill_step_size=128, min_prefill_step=128, prefix_cache_size=size) for size in ("auto", "off")
    )
    brief, shares = GenerationParams(temperature=0.0, max_tokens=24), list[int]()
    for number, words in enumerate((120, 80, 30, 110, 100)):
        prompt = "sun word " * words + f"Number {number}. " * 4
        asked = driver.ask(prompt, brief)
        if number == 3:
            driver.until(lambda: driver.engine.parts.scheduler.prefills[0].started)
            driver.engine.parts.prefix_cache.evict_until(lambda: False)
        end = ended(driver, asked)
        shares.append(end.prompt_tokens - end.cached_tokens)
        other = fresh.ask(prompt, brief)
        ended(fresh, other)
        assert driver.ids[asked, 0] == fresh.ids[other, 0]
    assert max(shares[1:3]) < 60 < min(shares[0], shares[4]), "only the new words"
    assert all(one.nbytes == sum_nbytes(one.value or []) for one in entries(driver))


def test_a_cancelled_turn_puts_its_windows_back_with_their_history(tiny_model: Callable[..., Path]):
    driver = Driver(tiny_model("gemma3_text"), prefill_step_size=128)
    brief = GenerationParams(temperature=0.0, max_tokens=4, logit_bias=COLONS)
    first = driver.ask("sun word " * 60, brief)
    ended(driver, first)
    (one,) = entries(driver)
    messages = (
        Message("user", "sun word " * 60),
        Message("assistant", driver.text[first, 0, Channel.CONTENT]),
        Message("user", "word " * 600),
    )
    second = driver.ask(messages=messages)
    driver.until(lambda: not one.is_stored)
    driver.cancel(second)
    end = ended(driver, driver.ask("sun word " * 30 + "Why?", brief))
    assert end.prompt_tokens - end.cached_tokens < 20, "it parts within the first turn"


def test_prompts_that_decode_lend_their_beginning(driver: Driver):
    """The second request reuses the beginning of the first, which still decodes."""
    system = Message("system", "You are a careful clerk. " * 60)
    first = driver.ask(
        messages=(system, Message("user", "Hello!")), params=GenerationParams(max_tokens=200, temperature=1.0)
    )
    driver.until(lambda: driver.ids[first, 0])
    second = driver.ask(messages=(system, Message("user", "Who are you?")), params=GenerationParams(max_tokens=2))
    end = ended(driver, second)
    assert end.cached_tokens > end.prompt_tokens - 40
    assert driver.ended(first) is None


def test_n_answers_share_what_was_found(driver: Driver):
    prompt = "word " * 100
    ended(driver, driver.ask(prompt, GenerationParams(max_tokens=2, temperature=0.0)))
    number = driver.ask(prompt, GenerationParams(n=3, seed=5, max_tokens=6, temperature=1.5))
    end = ended(driver, number)
    assert end.cached_tokens == end.prompt_tokens - 1
    fresh = Driver(models.path("llama"), prefix_cache_size="off")
    other = fresh.ask(prompt, GenerationParams(n=3, seed=5, max_tokens=6, temperature=1.5))
    ended(fresh, other)
    assert [driver.ids[number, choice] for choice in range(3)] == [fresh.ids[other, choice] for choice in range(3)]
    whole = [one.length for one in entries(driver) if one.length > end.prompt_tokens + 2]
    assert len(whole) == 1, "only the first answer is stored"


def test_a_prompt_is_stored_only_if_the_join_of_its_row_still_fits(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.answer("Hello!", GenerationParams(max_tokens=2))
    monkeypatch.setattr(PrefixMemory, "make_room", lambda _, size, transient=0: transient == 0)
    before = entries(driver)
    number = driver.ask("word " * 100, GREEDY)
    driver.until(lambda: driver.ids[number, 0])
    assert entries(driver) == before


# memory


def test_what_is_kept_is_evaluated_and_holds_nothing_else(driver: Driver):
    """A short row ends during a long one. An entry that is not evaluated would keep the whole padded batch."""
    long = driver.ask(
        "word " * 600, GenerationParams(temperature=0.0, max_tokens=400, stop=("\0",), logit_bias=endless())
    )
    driver.until(lambda: driver.ids[long, 0])
    short = driver.ask(SHORT[0]["prompt"])
    ended(driver, short)
    kept = entries(driver)
    driver.cancel(long)
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    size = sum(one.nbytes for one in kept)
    assert all(one.nbytes == sum_nbytes(one.value or []) for one in kept)
    short_row = min(kept, key=lambda one: one.length)
    assert short_row.nbytes < 256 * KIB, "its own tokens, without the padding"
    driver.engine.parts.prefix_cache.evict_model(driver.default)
    kept.clear()
    mx.clear_cache()
    assert held - mx.get_active_memory() == pytest.approx(size, abs=64 * KIB)


def endless() -> tuple[tuple[int, float], ...]:
    """Return a bias that prevents the end token."""
    return ((json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"], -100.0),)


def test_after_all_is_given_back_the_engine_is_as_it_was(driver: Driver):
    ended(driver, driver.ask("warm", GenerationParams(max_tokens=2)))
    driver.engine.parts.prefix_cache.evict_model(driver.default)
    mx.clear_cache()
    base = mx.get_active_memory()
    for number in range(20):
        ended(driver, driver.ask(f"{number} " + "word " * 60, GenerationParams(temperature=0.0, max_tokens=2)))
        assert driver.engine.parts.prefix_cache.nbytes == sum(sum_nbytes(one.value or []) for one in entries(driver))
    assert len(entries(driver)) == 20
    mx.clear_cache()
    assert mx.get_active_memory() >= base + driver.engine.parts.prefix_cache.nbytes - 256 * KIB
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    mx.clear_cache()
    assert mx.get_active_memory() <= 1.01 * base


def room(driver: Driver, size: int) -> None:
    """Leave `size` bytes of headroom above the engine's footprint, which includes its prefix cache."""
    memory = driver.engine.report(0.0).memory
    assert memory.current is not None
    driver.take(MemoryLimits(memory.current + GIB, memory.current + memory.reserved + size, 0, "dynamic"))


def fill(driver: Driver, size: int) -> None:
    """Fill the prefix cache with `size` bytes, after other memory that could be freed meanwhile has been released."""
    release_free_memory()
    number = 0
    while driver.engine.parts.prefix_cache.nbytes < size:
        number += 1
        ended(driver, driver.ask(f"{number} " + "word " * 100, GenerationParams(temperature=0.0, max_tokens=1)))


def test_only_the_needed_part_of_the_cache_is_evicted_before_a_refusal(driver: Driver):
    fill(driver, 10 * MIB)
    release_free_memory()
    room(driver, MIB)
    before = driver.engine.report(0.0).cache
    number = driver.ask("fresh " * 150, GenerationParams(temperature=0.0, max_tokens=1))
    assert driver.admitted(number), driver.ended(number)
    after = driver.engine.report(0.0).cache
    assert 0 < after.evictions - before.evictions < before.entries
    assert len(after.evicted) == after.evictions


def test_no_more_is_evicted_if_the_footprint_falls_late(driver: Driver):
    fill(driver, 10 * MIB)
    release_free_memory()
    sensor = driver.engine.parts.footprint.sensor
    source = sensor.source
    try:
        trailing(sensor, 0.2)
        room(driver, MIB)
        before = driver.engine.report(0.0).cache
        number = driver.ask("fresh " * 150, GenerationParams(temperature=0.0, max_tokens=1))
        assert driver.admitted(number), driver.ended(number)
        ended(driver, number)
        room(driver, MIB)
        assert driver.engine.parts.forwards.check(GateSite.GROW, 2 * MIB) is None, "else a request would be preempted"
    finally:
        sensor.source = source
    after = driver.engine.report(0.0).cache
    assert 0 < after.evictions - before.evictions < before.entries


@pytest.mark.parametrize("arch", ["llama", "lfm2", "gemma3_text"])
def test_the_eviction_of_a_shared_system_prompt_reports_no_prompt(arch: str):
    """The prompt itself stays cached: the router must not forget it."""
    driver = Driver(models.path(arch), max_batch_size=8, prefill_step_size=256)
    system, user = Message("system", "Answer as a captain. " * 8), Message("user", "Hello!")
    ended(driver, driver.ask(messages=(system, user), params=GenerationParams(max_tokens=1), shared=True))
    shared = [one for one in entries(driver) if one.scope == SHARED_SCOPE]
    assert [one.prompt_hash for one in shared] == [b""]


def test_nothing_is_given_up_for_what_does_not_fit_either_way(driver: Driver):
    fill(driver, 4 * MIB)
    before = driver.engine.report(0.0).cache
    room(driver, MIB)
    assert isinstance(driver.end(driver.ask("word " * 9000)), Refusal)
    assert driver.engine.report(0.0).cache.entries == before.entries


def test_a_ceiling_that_falls_takes_the_cache_first(driver: Driver):
    fill(driver, 4 * MIB)
    room(driver, -2 * MIB)
    memory = driver.engine.report(0.0).memory
    assert memory.headroom is not None
    assert memory.headroom >= 0
    assert 0 < driver.engine.parts.prefix_cache.nbytes < 4 * MIB


def test_the_cache_is_no_larger_than_it_was_set_and_off_is_off():
    driver = Driver(models.path("llama"), prefix_cache_size="1MiB")
    for number in range(6):
        ended(driver, driver.ask(f"{number} " + "word " * 130, GenerationParams(temperature=0.0, max_tokens=1)))
        assert driver.engine.parts.prefix_cache.nbytes <= MIB
    assert driver.engine.report(0.0).cache.evictions > 0
    ended(driver, driver.ask("9 " + "word " * 560, GenerationParams(temperature=0.0, max_tokens=1)))
    assert driver.engine.parts.prefix_cache.nbytes <= MIB, "an entry larger than the cache is not stored"
    off = Driver(models.path("llama"), prefix_cache_size=0)
    for _ in range(2):
        assert ended(off, off.ask("Hello!")).cached_tokens == 0
    assert off.said[1][0].prompt_hash == b""  # type: ignore[attr-defined]
    assert off.engine.report(0.0).cache.stores == 0


def test_a_model_that_is_unloaded_takes_its_cache_with_it(driver: Driver):
    fill(driver, MIB)
    assert driver.engine.report(0.0).memory.reusable > 0
    driver.take(UnloadModel(100, driver.default))
    assert (driver.engine.parts.prefix_cache.nbytes, entries(driver)) == (0, [])
    assert driver.engine.report(0.0).memory.reusable == 0
    assert ended(driver, driver.ask("1 " + "word " * 100, GenerationParams(max_tokens=1))).cached_tokens == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_caches_of_a_model_with_another_architecture_under_the_same_name_are_cut_as_its_own_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.models.catalogue.SCAN_INTERVAL_SECONDS", 0.0)
    shutil.copytree(models.path("llama"), tmp_path / "m", copy_function=shutil.copyfile)
    driver, brief, prompt = Driver(tmp_path), GenerationParams(temperature=0.0, max_tokens=4), "word " * 100
    driver.answer(prompt, brief)
    driver.take(UnloadModel(900, "m"))
    assert isinstance(driver.end(900), Finished)
    shutil.rmtree(tmp_path / "m")
    shutil.copytree(models.path("lfm2"), tmp_path / "m", copy_function=shutil.copyfile)
    driver.take(Ping(1))
    alone = Driver(models.path("lfm2"), prefix_cache_size="off")
    for end in ("sun", "sun", "Mac"):
        assert driver.answer(prompt + end, brief) == alone.answer(prompt + end, brief)


def test_near_the_trip_point_nothing_that_fits_is_refused(driver: Driver):
    """Send new prompts while the cache is always full, with room for one further request."""
    random, count = Random(3), scale_examples(150)
    fill(driver, 6 * MIB)
    release_free_memory()
    driver.engine.parts.footprint.reset_peak()
    need = estimate_request_need(driver.engine.report(0.0).models[0], 500, 2)
    room(driver, need + MIB // 2 - driver.engine.parts.prefix_cache.nbytes)
    for number in range(count):
        words = " ".join(
            random.choice(["cat", "word", "sun", "Mac", "seven"]) for _ in range(random.randrange(15, 150))
        )
        asked = driver.ask(f"{number} {words}", GenerationParams(temperature=0.0, max_tokens=2))
        assert isinstance(driver.end(asked), Finished), (number, driver.ended(asked))
    cache = driver.engine.report(0.0).cache
    assert cache.evictions > count // 2
    assert cache.nbytes > MIB, "it stayed in use"


# Entries that must not be cached


def test_what_a_broken_batch_held_is_neither_kept_nor_used(driver: Driver):
    params = GenerationParams(temperature=0.0, max_tokens=12, logit_bias=endless())
    wanted = driver.ask(SHORT[0]["prompt"], params)
    ended(driver, wanted)
    number = driver.ask(SHORT[0]["prompt"], params)
    driver.until(lambda: len(driver.ids[number, 0]) >= 3)
    (batch,) = driver.batches().values()
    before = entries(driver)
    assert before
    batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    driver.turn()
    assert not any(one.is_stored for one in before)
    assert not any(one in before for one in entries(driver)), "only what the rebuilt row has written since"
    assert isinstance(driver.end(number), Finished)
    assert driver.ids[number, 0] == driver.ids[wanted, 0]


def test_a_row_that_cannot_be_copied_out_is_not_kept_and_its_neighbours_are_rebuilt(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    numbers = {driver.ask(one["prompt"]): one for one in SHORT[:4]}
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    monkeypatch.setattr("node.engine.scheduling.decode_batch.DecodeBatch.extract", lambda self, row: 1 / 0)
    monkeypatch.setattr("node.engine.scheduling.batch_recovery.MAX_REBUILDS", 9)
    for number, one in numbers.items():
        assert isinstance(driver.end(number), Finished)
        assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    assert all(not one.is_stored or one.length < 40 for one in entries(driver))


def test_the_hash_of_a_prompt_depends_on_the_files_of_its_model_and_not_on_its_name(tmp_path: Path):
    """Nodes report it, and may have the same model under other names."""
    for name, folder in (("a", "llama"), ("b", "llama"), ("c", "qwen3")):
        (tmp_path / name).symlink_to(models.path(folder))
    driver, hashes = Driver(tmp_path), list[bytes]()
    for name in ("a", "b", "c"):
        number = driver.ask("word " * 60, ONE_TOKEN, model=name)
        ended(driver, number)
        admitted = driver.said[number][0]
        assert isinstance(admitted, Admitted)
        hashes.append(admitted.prompt_hash)
    first, second, other = hashes
    assert first == second != other
    assert len(first) == 16


def test_a_fault_in_a_prefill_removes_cached_prefixes(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    fill(driver, MIB)
    with monkeypatch.context() as patch:
        patch.setattr("node.engine.scheduling.prefill_runner.run_forward", lambda *_, **__: 1 / 0)
        driver.end(driver.ask("1 " + "word " * 100, GREEDY))
    assert entries(driver) == []


def test_what_a_cancelled_turn_took_is_put_back(driver: Driver):
    prompt = "word " * 300
    messages = (Message("user", prompt),)
    brief = GenerationParams(temperature=0.0, max_tokens=4, logit_bias=COLONS)
    first = driver.ask(messages=messages, params=brief)
    ended(driver, first)
    (one,) = entries(driver)
    answer = driver.text[first, 0, Channel.CONTENT]
    messages += (Message("assistant", answer), Message("user", "word " * 2000))
    second = driver.ask(messages=messages)
    driver.until(lambda: not one.is_stored)
    driver.cancel(second)
    (back,) = entries(driver)
    assert back.length == driver.said[second][0].cached_tokens  # type: ignore[attr-defined]
    assert back.key == one.key[: len(back.key)]
    assert back.nbytes <= one.nbytes, "without the tokens of the cancelled turn"
    end = ended(driver, driver.ask(messages=(Message("user", prompt),), params=brief))
    assert end.cached_tokens == end.prompt_tokens - 1
    assert driver.ids[driver.number, 0] == driver.ids[first, 0]


def test_a_fault_while_a_prefix_is_put_back_ends_the_cancelled_request_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    messages = (Message("user", "word " * 300),)
    brief = GenerationParams(temperature=0.0, max_tokens=4, logit_bias=COLONS)
    other = driver.ask("Hello!", GREEDY)
    first = driver.ask(messages=messages, params=brief)
    ended(driver, first)
    messages += (Message("assistant", driver.text[first, 0, Channel.CONTENT]), Message("user", "word " * 2000))
    second = driver.ask(messages=messages)
    scheduler = driver.engine.parts.scheduler
    driver.until(lambda: any(prefill.past and prefill.past.removed_tokens for prefill in scheduler.prefills))
    with monkeypatch.context() as patch:
        patch.setattr("node.engine.scheduling.prefix_cache.materialize_layers", lambda *_: 1 / 0)
        driver.cancel(second)
    assert second not in scheduler.live
    assert driver.engine.check() == []
    assert isinstance(ended(driver, other), Finished)


def test_a_prefill_that_has_started_holds_no_entry_of_the_cache(driver: Driver):
    """The memory of an entry that is evicted meanwhile must become free."""
    ended(driver, driver.ask("word " * 300, GenerationParams(max_tokens=1)))
    number = driver.ask("word " * 1200, GREEDY)
    (prefill,) = driver.engine.parts.scheduler.prefills
    assert prefill.past is not None
    assert prefill.past.hit.entry is not None
    driver.until(lambda: prefill.started)
    assert prefill.left
    assert prefill.past.hit.entry is None
    driver.cancel(number)


def test_a_beginning_of_one_key_is_wanted_beyond_a_shared_system_prompt():
    driver = Driver(models.path("lfm2"), max_batch_size=8, prefill_step_size=256)
    system, opening = Message("system", "Answer as a captain. " * 8), "sun word " * 80
    for user in ("Hello!", opening + "one"):
        brief = GenerationParams(max_tokens=1)
        ended(driver, driver.ask(messages=(system, Message("user", user)), params=brief, shared=True))
    number = driver.ask(messages=(system, Message("user", opening + "two " * 20)), shared=True)
    (prefill,) = driver.engine.parts.scheduler.prefills
    assert prefill.past is not None
    assert prefill.stored_tokens == prefill.past.shared, "only the system prompt is cached"
    assert prefill.past.stops[0] == prefill.past.hit.shared > prefill.past.shared + 150
    driver.cancel(number)


def test_what_was_found_may_be_gone_when_it_is_wanted(driver: Driver):
    """The prefix is evicted between admission and the first chunk, and during the check of the gate itself."""
    wanted = ended(driver, driver.ask(SHORT[0]["prompt"]))
    number = driver.ask(SHORT[0]["prompt"])
    assert driver.said[number][0].cached_tokens == wanted.prompt_tokens - 1  # type: ignore[attr-defined]
    driver.engine.parts.prefix_cache.evict_until(lambda: False)
    assert ended(driver, number).cached_tokens == 0
    assert driver.text[number, 0, Channel.CONTENT] == SHORT[0]["answer"]
    number = driver.ask(SHORT[0]["prompt"])
    driver.gate.refuses = lambda site, estimate: driver.engine.parts.prefix_cache.evict_until(lambda: False)
    assert ended(driver, number).cached_tokens == 0
    assert driver.text[number, 0, Channel.CONTENT] == SHORT[0]["answer"]


def test_roomy_limits_keep_the_cache(driver: Driver):
    fill(driver, MIB)
    driver.take(ROOMY)
    assert driver.engine.parts.prefix_cache.nbytes >= MIB


def test_a_prefix_of_the_own_key_is_used_where_no_shared_system_prompt_is_longer(driver: Driver):
    """The shared system prompt of the second request is new. Its beginning is cached for the request's key alone."""
    brief, cached = GenerationParams(temperature=0.0, max_tokens=2), list[int]()
    for words, shared in (("word " * 60, False), ("word " * 90, True)):
        messages = (Message("system", words), Message("user", "hello"))
        found = driver.end(driver.ask("", brief, messages=messages, weighted_key=WeightedKey("ada"), shared=shared))
        assert isinstance(found, Finished)
        cached.append(found.cached_tokens)
    assert cached[0] == 0 < 120 < cached[1]


@pytest.mark.parametrize(("tokens", "stored"), [(MIN_PREFIX_TOKENS - 2, []), (MIN_PREFIX_TOKENS, [MIN_PREFIX_TOKENS])])
def test_sequences_below_the_minimum_are_not_stored(driver: Driver, tokens: int, stored: list[int]):
    ended(driver, driver.ask("", ONE_TOKEN, messages=(), ids=tuple(range(5, 5 + tokens))))
    assert [entry.length for entry in entries(driver)] == stored
