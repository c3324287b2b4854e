"""Preemption with several batches: two length groups of one model and a second model, any of which grows or is
preempted.

Growing a row may preempt the last row of another batch. That batch then disappears in the middle of a decode turn.
`Driver` checks the invariants of the engine's accounts after every turn.
"""

import json
import time

import mlx.core as mx
import pytest
from msgspec.structs import replace

from node.engine.kv.commitments import Commitment, CommitmentLedger
from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.requests.sequence import Row
from node.engine.scheduling import batch_recovery, preemptor
from node.engine.scheduling.decode_batch import DecodeBatch
from tests import models
from tests.effort import thin_cases
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import KV_GROWTH_TOKENS
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import Failed, Finished, GenerationParams, MemoryLimits
from wire.refusals import RefusalCode, Refused
from wire.report import EngineCounters
from wire.units import GIB, MIB

LLAMA, QWEN = models.path("llama").name, models.path("qwen3").name
EOS = {
    path.name: json.loads((path / "config.json").read_text())["eos_token_id"]
    for path in (models.path("llama"), models.path("qwen3"))
}
GROUPS = {"short": (LLAMA, "hello", 0), "long": (LLAMA, "word " * 200, 0), "other": (QWEN, "hello", 0)}
"""Model and prompt of each group. Rows with such different lengths share no batch if no padding is allowed."""
ANSWER, EXPECTED = 60, 30
NAMES = tuple(GROUPS)
SAME = [(name, name) for name in NAMES]
DIFFERENT = [(NAMES[place], NAMES[(place + shift) % 3]) for place in range(3) for shift in (1, 2)]
"""Groups of the row that grows and of the newest row. Every second pair has each group once in both places."""


def endless(model: str, tokens: int) -> GenerationParams:
    return GenerationParams(temperature=0.0, max_tokens=tokens, logit_bias=((EOS[model], -100.0),))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Return the tokens of each group's answer on an engine with room."""
    driver = Driver(
        models.path("llama"),
        models.path("qwen3"),
        max_batch_size=8,
        prefill_step_size=512,
        min_prefill_step=64,
        prefix_cache_size="off",
    )
    found: dict[str, list[int]] = {}
    for group, (model, prompt, _) in GROUPS.items():
        number = driver.ask(prompt, endless(model, ANSWER), model=model)
        assert isinstance(driver.end(number), Finished)
        found[group] = driver.ids[number, 0]
    return found


@pytest.fixture
def driver() -> Driver:
    made = Driver(
        models.path("llama"),
        models.path("qwen3"),
        max_batch_size=8,
        prefill_step_size=512,
        min_prefill_step=64,
        prefix_cache_size="off",
    )
    for model in (LLAMA, QWEN):
        made.answer("hello", endless(model, 2), model=model)
        made.resident(model).ledger.set_waste(0)
    return made


def counts(driver: Driver) -> EngineCounters:
    return driver.engine.report(time.monotonic()).counts


def squeeze(driver: Driver, room: int) -> None:
    """Leave `room` bytes above the current footprint and reservations."""
    release_free_memory()
    driver.take(ROOMY)
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current + memory.reserved + room, 0, "dynamic"))


def start(driver: Driver, group: str, expected: int) -> int:
    model, prompt, _ = GROUPS[group]
    number = driver.ask(prompt, endless(model, ANSWER), model=model, expected=expected)
    driver.until(lambda: len(driver.ids[number, 0]) > 2)
    return number


@pytest.mark.parametrize(("grower", "victim"), [*thin_cases(SAME, 3), *thin_cases(DIFFERENT, 2)])
def test_a_row_that_grows_preempts_a_row_of_any_batch_and_all_answers_are_word_for_word(
    driver: Driver, alone: dict[str, list[int]], grower: str, victim: str
):
    others = [group for group in GROUPS if group not in (grower, victim)]
    # Only the grower outgrows its reservation. The victim is the newest request, and therefore loses the least work.
    running = [(group, start(driver, group, ANSWER)) for group in others]
    running.append((grower, start(driver, grower, EXPECTED)))
    running.append((victim, start(driver, victim, ANSWER)))
    assert len(driver.ids[running[-2][1], 0]) < EXPECTED, "the grower has not grown yet"
    assert len(driver.batches(LLAMA)) == 2
    squeeze(driver, -8 * MIB)
    driver.until(lambda: counts(driver).preemptions)
    last = running[-1][1]
    assert driver.engine.parts.scheduler.preempted[0].number == last
    squeeze(driver, 64 * MIB)
    for group, number in running:
        assert isinstance(driver.end(number), Finished), driver.ended(number)
        assert driver.ids[number, 0] == alone[group]
    assert driver.engine.report(time.monotonic()).memory.reserved == 0


def test_a_forward_over_the_cap_preempts_the_last_row_of_the_batch_that_is_decoded_next(driver: Driver):
    numbers = [start(driver, group, ANSWER) for group in GROUPS]
    memory = driver.engine.report(time.monotonic()).memory
    driver.take(MemoryLimits(max(memory.active, memory.phys or 0) - 8 * MIB, 8 * GIB, 0, "static"))
    assert len(driver.batches(LLAMA)) == 2
    driver.turn()
    assert counts(driver).overs > 0
    driver.take(ROOMY)
    for number in numbers:
        assert isinstance(driver.end(number), Finished | Failed)


@pytest.mark.parametrize("prompt", ["hello", "word " * 400])
def test_a_request_that_the_engine_ends_above_its_cap_is_counted_as_evicted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, prompt: str
):
    """The short prompt decodes, the long one is still prefilled. A refused growth is no such end."""
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: None)
    number, scheduler = driver.ask(prompt, endless(LLAMA, ANSWER)), driver.engine.parts.scheduler
    driver.until(lambda: len(driver.ids[number, 0]) > 2 or any(one.started for one in scheduler.prefills))
    memory = driver.engine.report(time.monotonic()).memory
    driver.take(MemoryLimits(max(memory.active, memory.phys or 0) - 8 * MIB, 8 * GIB, 0, "static"))
    driver.turn()
    assert driver.ended(number) is not None
    assert (counts(driver).overs, counts(driver).sheds, counts(driver).preemptions) == (1, 1, 0)
    driver.take(ROOMY)
    other = start(driver, "short", ANSWER)
    scheduler.preemptor.release_memory(scheduler.live[other], Refused(RefusalCode.NO_ROOM, "no room by script"))
    assert isinstance(driver.end(other), Failed)
    assert counts(driver).sheds == 1


def test_a_batch_that_breaks_while_an_ended_row_is_dropped_ends_the_request_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    """The request's other row fails in the broken batch. The request is therefore gone before its ended row is
    handled."""
    first, second = endless(LLAMA, ANSWER), GenerationParams(temperature=0.0, max_tokens=ANSWER)
    number = driver.ask("hello", replace(first, n=2), expected=ANSWER)
    driver.until(lambda: all(len(driver.ids[number, choice]) > 2 for choice in range(2)))
    sequence = driver.engine.parts.scheduler.live[number]
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "drop_rows", lambda self, rows: 1 / 0)
        patch.setattr(batch_recovery, "MAX_REBUILDS", 0)
        sequence.rows[0].finish("stop")
        driver.turn()
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert "ZeroDivisionError" in end.message
    assert isinstance(driver.end(driver.ask("hello", second)), Finished)


def test_rows_of_one_request_of_which_one_was_rebuilt_before_end_with_it_when_their_batch_breaks(driver: Driver):
    number = driver.ask("hello", replace(endless(LLAMA, ANSWER), n=2), expected=ANSWER)
    driver.until(lambda: all(len(driver.ids[number, choice]) > 2 for choice in range(2)))
    for batch in driver.batches(LLAMA).values():
        batch.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    driver.engine.parts.scheduler.live[number].rows[0].rebuilt = batch_recovery.MAX_REBUILDS
    end = driver.end(number)
    assert isinstance(end, Failed)
    for _ in range(3):
        driver.turn()
    assert driver.engine.report(time.monotonic()).waiting == 0, "no prefill is left of a request that failed"


def test_a_row_that_fails_as_it_joins_takes_the_rows_without_room_with_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    joining, refused = CommitmentLedger.compute_joined_bytes, list[int]()

    def dear(ledger: CommitmentLedger, row: Commitment, rows: int) -> int:
        short = rows == 2
        refused.extend([rows] * short)
        return joining(ledger, row, rows) + short * 1024 * GIB

    other = start(driver, "short", ANSWER)
    monkeypatch.setattr(CommitmentLedger, "compute_joined_bytes", dear)
    monkeypatch.setattr(Row, "add_token_text", lambda self, token: 1 / 0)
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: None)
    number = driver.ask("hello", replace(endless(LLAMA, ANSWER), n=3), expected=ANSWER)
    driver.cancel(other)  # one of the three rows has its batch; no other request could release memory
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert refused, "two rows did not fit, the third joined"


def test_a_preempted_row_begins_with_what_the_prefix_cache_holds_and_its_usage_stays():
    driver = Driver(
        models.path("llama"), max_batch_size=8, prefill_step_size=512, min_prefill_step=64, prefix_cache_size="64MiB"
    )
    prompt = "word " * 200
    first = driver.ask(prompt, endless(LLAMA, ANSWER), expected=EXPECTED)
    driver.until(lambda: len(driver.ids[first, 0]) > 2)
    last = driver.ask(prompt + "and more", endless(LLAMA, ANSWER), expected=ANSWER)
    driver.until(lambda: len(driver.ids[last, 0]) > 2)
    sequence = driver.engine.parts.scheduler.live[last]
    cached = sequence.cached
    before = driver.engine.report(time.monotonic()).cache.hits
    driver.engine.parts.scheduler.preemptor.preempt(sequence)
    driver.until(lambda: sequence not in driver.engine.parts.scheduler.preempted)
    driver.until(lambda: all(one.sequence is not sequence for one in driver.engine.parts.scheduler.prefills))
    assert driver.engine.report(time.monotonic()).cache.hits == before + 1
    assert sequence.cached == cached
    assert isinstance(driver.end(last), Finished)
    driver.cancel(first)


def test_a_preempted_request_needs_the_bytes_of_all_its_rows_and_of_a_forward(driver: Driver):
    scheduler, loaded = driver.engine.parts.scheduler, driver.resident(LLAMA)
    number = driver.ask("hello", replace(endless(LLAMA, 900), n=2), resume=((30,), (30,) * 50))
    driver.until(lambda: all(len(driver.ids[number, choice]) > 2 for choice in range(2)))
    sequence = scheduler.live[number]
    scheduler.preemptor.preempt(sequence)
    short, long = (len(row.list_token_ids()) + KV_GROWTH_TOKENS for row in sequence.rows)
    needed = sum(loaded.ledger.compute_cost(length, 1) for length in (short, long))
    needed += loaded.estimator.estimate_chunk(64, long)
    assert scheduler.compute_required_bytes() == needed
    assert scheduler.next_step_at(time.monotonic()) == scheduler.preemptor.return_at
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL
    waiting = driver.ask("word " * 200, endless(LLAMA, ANSWER))
    scheduler.preemptor.return_at = time.monotonic() + 3600.0
    driver.until(lambda: any(prefill.retry_at for prefill in scheduler.prefills))
    (prefill,) = scheduler.prefills
    chunk = loaded.estimator.estimate_chunk(64, len(prefill.ids))
    assert scheduler.compute_required_bytes() == needed + chunk
    assert scheduler.next_step_at(time.monotonic()) == prefill.retry_at, "before the return"
    shorter = driver.ask("word " * 100, endless(LLAMA, ANSWER))
    driver.until(lambda: all(prefill.retry_at for prefill in scheduler.prefills))
    assert (len(scheduler.prefills), scheduler.compute_required_bytes()) == (2, needed + chunk), "of the longest"
    driver.cancel(shorter)
    driver.cancel(number)
    assert scheduler.compute_required_bytes() == chunk
    driver.cancel(waiting)


def test_a_row_that_grows_takes_the_memory_of_a_running_request(driver: Driver):
    numbers = [start(driver, "short", ANSWER) for _ in range(2)]
    numbers.append(driver.ask("hello", endless(LLAMA, ANSWER), model=LLAMA))
    scheduler = driver.engine.parts.scheduler
    first, second, third = (scheduler.live[number] for number in numbers)
    scheduler.preemptor.preempt(third)
    scheduler.preemptor.release_for(first.rows[0], Refused(RefusalCode.NO_ROOM, "no room by script"))
    assert scheduler.preempted == (third, second)
    for number in numbers:
        driver.cancel(number)


def test_a_request_that_fails_as_it_is_stored_is_not_preempted():
    driver = Driver(models.path("llama"), max_batch_size=2, min_prefill_step=64, prefix_cache_size="64MiB")
    numbers = [driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("ada")) for _ in range(2)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 9 for number in numbers))
    for number in numbers:
        driver.engine.parts.scheduler.live[number].rows[0].rebuilt = batch_recovery.MAX_REBUILDS
    (batch,) = driver.batches().values()
    batch.extract = lambda row: 1 / 0  # type: ignore[method-assign, assignment]
    other = driver.ask("hello", endless(LLAMA, 3), weighted_key=WeightedKey("bob"))
    assert isinstance(driver.end(other), Finished)
    assert all(isinstance(driver.ended(number), Failed) for number in numbers)
    assert counts(driver).preemptions == 0


def test_the_key_that_holds_most_memory_is_preempted_for_another_one():
    driver = Driver(models.path("llama"), max_batch_size=8, min_prefill_step=64, prefix_cache_size="64MiB")
    numbers = [
        driver.ask("hello", endless(LLAMA, tokens), model=LLAMA, weighted_key=WeightedKey(key), expected=tokens)
        for key, tokens in (("ada", ANSWER), ("bob", 900), ("bob", 2000), ("ada", ANSWER))
    ]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    scheduler = driver.engine.parts.scheduler
    row = scheduler.live[numbers[2]].rows[0]
    size = compute_row_bytes(driver.resident(LLAMA).kv, row.commitment.committed_tokens)
    assert not scheduler.preempt_for_key(WeightedKey("cid"), 1, size + 1), "not enough for the request"
    entries = driver.engine.parts.prefix_cache.entries
    assert scheduler.preempt_for_key(WeightedKey("cid"), 1, size)
    assert driver.engine.parts.prefix_cache.entries == entries, "no copy is stored, because memory was needed"
    assert [(each.number, each.yielded) for each in scheduler.preempted] == [(numbers[2], True)]
    assert mx.get_cache_memory() == 0, "free buffers are returned"
    driver.cancel(numbers[2])


def test_a_prompt_that_waits_for_memory_takes_no_row_of_another_key():
    driver = Driver(models.path("llama"), max_batch_size=2, min_prefill_step=64, prefix_cache_size="off")
    for _ in range(2):
        driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("ada"))
    driver.until(lambda: driver.engine.report(0.0).running == 2)
    driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("bob"))
    (prefill,) = driver.engine.parts.scheduler.prefills
    prefill.delay(time.monotonic() + 3600)
    driver.turn()
    assert counts(driver).preemptions == 0
    prefill.end_delay()
    driver.turn()
    assert counts(driver).preemptions == 1


def test_no_more_rows_are_taken_from_another_key_than_are_missing():
    driver = Driver(models.path("llama"), max_batch_size=4, min_prefill_step=64, prefix_cache_size="off")

    def ask(key: str, running: int) -> int:
        driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey(key))
        driver.until(lambda: driver.engine.report(0.0).running == running)
        return counts(driver).preemptions

    assert [ask("ada", running) for running in (1, 2, 3)] == [0, 0, 0]
    assert ask("bob", 4) == 0, "a row is free"
    driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("bob"))
    driver.turn()
    assert counts(driver).preemptions == 1


def test_a_request_that_gave_its_row_to_another_key_returns_after_the_prompts_that_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(preemptor, "GATE_RETRY_SECONDS", 0.0)
    driver = Driver(models.path("llama"), max_batch_size=2, min_prefill_step=64, prefix_cache_size="off")
    scheduler, brief = driver.engine.parts.scheduler, endless(LLAMA, 8)
    numbers = [driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("ada")) for _ in range(2)]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    first, second = (driver.ask("hello", brief, weighted_key=WeightedKey("bob")) for _ in range(2))
    driver.until(lambda: driver.ids[second, 0])
    assert driver.ended(first)
    assert [sequence.number for sequence in scheduler.preempted] == numbers[1:]
    assert all(isinstance(driver.end(number), Finished) for number in (*numbers, second))


def test_the_tokens_of_a_row_that_is_taken_for_another_key_are_stored_for_its_return():
    driver = Driver(models.path("llama"), max_batch_size=2, min_prefill_step=64, prefix_cache_size="64MiB")
    numbers = [driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("ada")) for _ in range(2)]
    driver.until(lambda: all(len(driver.ids[number, 0]) > 9 for number in numbers))
    driver.ask("hello", endless(LLAMA, ANSWER), weighted_key=WeightedKey("bob"))
    driver.turn()
    (preempted,) = driver.engine.parts.scheduler.preempted
    longest = max(entry.length for entry in driver.engine.parts.prefix_cache.entries)
    assert longest >= len(preempted.rows[0].list_token_ids()) - 1


def test_rows_that_decode_and_rows_that_are_prefilled_count_together_for_their_key():
    driver = Driver(
        models.path("llama"), max_batch_size=4, prefill_step_size=64, min_prefill_step=64, prefix_cache_size="off"
    )
    params, scheduler = replace(endless(LLAMA, 900), n=2), driver.engine.parts.scheduler
    driver.ask("hello", params, weighted_key=WeightedKey("greedy"))
    newest = driver.ask("hello", params, weighted_key=WeightedKey("greedy"), resume=((30,), (30,) * 800))
    driver.until(lambda: driver.ids[newest, 0] and any(prefill.started for prefill in scheduler.prefills))
    driver.ask("hello", params, weighted_key=WeightedKey("ada"))
    driver.turn()
    assert [sequence.number for sequence in scheduler.preempted] == [newest]


@pytest.mark.parametrize(("rows", "preempted"), [(1, 1), (2, 0)])
def test_rows_that_are_prefilled_count_for_their_own_request_only(rows: int, preempted: int):
    """A request for two rows would leave less to the key that holds one row with each of two prompts."""
    driver = Driver(
        models.path("llama"), max_batch_size=2, prefill_step_size=64, min_prefill_step=64, prefix_cache_size="off"
    )
    scheduler, params = driver.engine.parts.scheduler, endless(LLAMA, ANSWER)
    for words in (200, 150):
        newest = driver.ask("word " * words, params, weighted_key=WeightedKey("greedy"))
    driver.until(lambda: [prefill.started for prefill in scheduler.prefills] == [True, True])
    driver.ask("hello", replace(params, n=rows), weighted_key=WeightedKey("ada"))
    driver.turn()
    assert [sequence.number for sequence in scheduler.preempted] == [newest] * preempted


@pytest.mark.parametrize("others", [0, 1])
def test_an_answer_without_room_is_preempted_only_where_another_request_could_free_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, others: int
):
    peak = [time.monotonic()] if others else []
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: peak.pop() if peak else None)
    if others:
        lone = start(driver, "short", ANSWER)
        sequence = driver.engine.parts.scheduler.live[lone]
        driver.engine.parts.scheduler.preemptor.release_memory(sequence, Refused(RefusalCode.NO_ROOM, "no room"))
        assert (driver.engine.parts.scheduler.preempted, peak) == ((sequence,), []), "the recent peak falls"
        driver.cancel(lone)
    before = counts(driver).preemptions
    started = [start(driver, "short", ANSWER) for _ in range(others + 1)]
    scheduler, newest = driver.engine.parts.scheduler, started[-1]
    refused = Refused(RefusalCode.NO_ROOM, "no room by script")
    scheduler.preemptor.release_memory(scheduler.live[newest], refused)
    assert len(scheduler.live) == others + (1 if others else 0)
    assert (counts(driver).preemptions - before, mx.get_cache_memory()) == (others, 0)
    end = driver.end(newest)
    assert isinstance(end, Finished if others else Failed)
    if isinstance(end, Failed):
        assert (end.code, end.message) == ("no_headroom", "no room by script")


@pytest.mark.parametrize("count", [1, 2])
def test_preempted_answers_that_will_never_fit_end_with_the_numbers(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, count: int
):
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: None)
    number, *others = [start(driver, "short", ANSWER) for _ in range(count)]
    scheduler = driver.engine.parts.scheduler
    for preempted in (number, *others):
        scheduler.preemptor.preempt(scheduler.live[preempted])
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current // 2, 0, "dynamic"))
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert end.code == "no_headroom"
    assert "headroom is" in end.message


def test_a_preempted_answer_waits_for_room_while_another_request_could_free_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda self: None)
    waits, other = start(driver, "short", ANSWER), start(driver, "short", ANSWER)
    scheduler = driver.engine.parts.scheduler
    scheduler.preemptor.preempt(scheduler.live[waits])
    memory = driver.engine.report(time.monotonic()).memory
    assert memory.current is not None
    driver.take(MemoryLimits(8 * GIB, memory.current // 2, 0, "dynamic"))
    checks, begun = driver.gate.checks[GateSite.PREFLIGHT], time.monotonic()
    for _ in range(5):
        driver.turn()
    tries = driver.gate.checks[GateSite.PREFLIGHT] - checks
    assert 1 <= tries <= 1 + (time.monotonic() - begun) / preemptor.GATE_RETRY_SECONDS
    assert driver.ended(waits) is None
    assert not scheduler.prefills
    driver.take(ROOMY)
    for number in (waits, other):
        assert isinstance(driver.end(number), Finished)
