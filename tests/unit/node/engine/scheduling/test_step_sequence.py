"""The sequence of checks, native calls, forwards and measurements of requests, compared with written lists."""

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import pytest
from msgspec.structs import replace

from node.engine.kv.kv_cache import Layers, TextModel
from node.engine.memory.footprint import MlxPeakTracker
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_stats import ModelStats
from node.engine.process.interface import NativeCall, NativeCallKind
from node.engine.scheduling.row_join import FIRST_JOIN_SECONDS
from node.engine.scheduling.rules.chunk_policy import FULL_PROMPT_SECONDS, ChunkPace
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS
from tests import models
from tests.support.engine.text_engine import ONE_TOKEN, Driver, decoded_alone
from tests.support.readings import Later
from wire.capacity.batches import compute_row_bytes
from wire.frames import Failed, Finished, GenerationParams, Refusal, Timings
from wire.units import MIB

CONFIG = json.loads((models.path("llama") / "config.json").read_text())
EOS, LAYERS = CONFIG["eos_token_id"], CONFIG["num_hidden_layers"]
TOKENS = 3
ENDLESS = GenerationParams(temperature=0.0, max_tokens=TOKENS, logit_bias=((EOS, -100.0),))
CHUNK, FLOOR, PEAK = 64, 16, 64 * MIB
"""Tokens of the largest and of the smallest chunk, and the bytes that each native call takes, by script."""
STEP = 1024
"""Bytes by which each native call raises the active memory, by script."""
BLOCK = 256
"""Tokens by which mlx-lm extends a cache."""
LONG = "word " * 120
TESTED = (GateSite.PREFILL, GateSite.JOIN, GateSite.GROW)


class Steady(ChunkPace):
    """A constant pace."""

    def learn(self, tokens: int, back: float, seconds: float) -> None:
        """Ignore a measurement."""


class Journal:
    """Events of an engine in order. Estimates learn nothing, and the clock stands still."""

    def __init__(self, driver: Driver, patch: pytest.MonkeyPatch) -> None:
        self.events = list[object]()
        self.clock = Later()
        loaded, add, run_native = driver.resident(), self.events.append, GatedForwards.run_native
        self.model, self.estimator, self.kv = loaded.model, loaded.estimator, loaded.kv
        self.decode = (NativeCallKind.DECODE, 0, loaded.stats.step_seconds)
        begun, self._active = time.monotonic(), 0

        class Recorded:
            def __getattr__(self, name: str) -> object:
                return getattr(loaded.model, name)

            def __call__(self, tokens: mx.array, cache: Layers) -> mx.array:
                add(tokens.tolist())
                return loaded.model(tokens, cache=cache)

        @contextmanager
        def run(
            forwards: GatedForwards, kind: NativeCallKind, model: str, request: int, expected: float, **tokens: int
        ) -> Generator[NativeCall]:
            add((kind, request, expected, *tokens.values()))
            with run_native(forwards, kind, model, request, expected, **tokens) as call:
                yield call
                self.clock.by += 1.0
                self._active += STEP

        self.clock.by = 0.0
        loaded.stats.pace = Steady(each=1e-6)
        self.estimator.transient = replace(self.estimator.transient, logits=1e5)
        driver.replace_model(cast("TextModel", Recorded()))
        driver.gate.refuses = self.check
        patch.setattr(GatedForwards, "run_native", run)
        patch.setattr(MlxPeakTracker, "measure_peak_above_mark", lambda _: PEAK)
        patch.setattr(mx, "get_active_memory", lambda: self._active)
        patch.setattr(time, "monotonic", lambda: begun + self.clock.by)
        # a charge by which the sizes are visible that the profile has to cover
        patch.setattr(self.estimator, "compute_uncovered_bytes", lambda kind, size: size)
        patch.setattr(ModelStats, "record_prefill", lambda _, *measured: add(("speed", *measured)))
        patch.setattr(ModelStats, "record_step", lambda _, *measured: add(("step", *measured)))
        for name in ("observe_prefill", "observe_packed", "observe_join", "observe_step"):
            patch.setattr(
                self.estimator, name, lambda *shape, _name=name, **flags: add((_name, *shape, *flags.values()))
            )

    def check(self, site: GateSite, estimate: int) -> bool:
        """Record a check of the gate, except at admission; refuse nothing."""
        if site is not GateSite.PREFLIGHT:
            self.events.append((site, estimate))
        return False

    def list_join(self, number: int, rows: int, longest: int) -> list[object]:
        """Return the events of a join, after which a batch has `rows` rows, padded to `longest` tokens."""
        copied = rows * compute_row_bytes(self.kv, longest) // LAYERS
        return [
            (GateSite.JOIN, copied + rows),
            (NativeCallKind.JOIN, number, FIRST_JOIN_SECONDS),
            *[("observe_join", rows, PEAK - STEP - copied)] * (number > 0),
        ]


def create_driver(prefix_cache_size: str, chunk: int = CHUNK) -> Driver:
    driver = Driver(
        models.path("llama"),
        max_batch_size=4,
        prefill_step_size=chunk,
        min_prefill_step=FLOOR,
        prefix_cache_size=prefix_cache_size,
    )
    driver.answer("hello", ONE_TOKEN)
    return driver


@pytest.fixture
def driver() -> Driver:
    return create_driver("off")


def test_a_long_prompt_is_prefilled_in_chunks_and_its_rows_join_and_decode(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal, stats = Journal(driver, monkeypatch), driver.resident().stats
    number = driver.ask(LONG, replace(ENDLESS, n=2))
    (prefill,) = driver.engine.parts.scheduler.prefills
    ids, tokens = prefill.ids, len(prefill.ids)
    answer, room = decoded_alone(journal.model, ids, TOKENS), {0: BLOCK, BLOCK: tokens - BLOCK}
    assert driver.end(number) == Finished(
        number, ("length", "length"), tokens, 2 * TOKENS, 0, Timings(0.0, -(-tokens // CHUNK) + 1, TOKENS)
    )
    assert [driver.ids[number, choice] for choice in range(2)] == [answer, answer]
    expected = list[object]()
    for start in range(0, tokens, CHUNK):
        piece = ids[start : start + CHUNK]
        size, last, grown = len(piece), start + CHUNK >= tokens, room.get(start, 0)
        expected += [
            (GateSite.PREFILL, journal.estimator.estimate_chunk(size, start, last=last)),
            (NativeCallKind.PREFILL, number, stats.estimate_prefill_seconds(size), size),
            [piece],
            ("speed", size, 1.0, start + size / 2),
            ("observe_prefill", size, start, PEAK - grown * journal.kv.per_token, last, grown > 0),
        ]
    expected += journal.list_join(number, 2, tokens)
    for place, token in enumerate(answer):
        forward = [[[token], [token]]] if place < TOKENS - 1 else []
        expected += [journal.decode, *forward, *[("step", 1.0, 2)] * (place > 0)]
    assert journal.events == expected


def test_short_prompts_are_packed_and_another_one_joins_their_batch(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    journal, stats = Journal(driver, monkeypatch), driver.resident().stats
    numbers = [driver.ask(f"{word} there", ENDLESS) for word in ("hello", "good evening to you", "who")]
    first, long, second = (prefill.ids for prefill in driver.engine.parts.scheduler.prefills)
    answers = [decoded_alone(journal.model, ids, TOKENS) for ids in (first, second, long)]
    ends = [driver.end(number) for number in numbers]
    assert [driver.ids[number, 0] for number in numbers] == [answers[0], answers[2], answers[1]]
    assert [end.timings for end in ends if isinstance(end, Finished)] == [
        Timings(0.0, 2.0, TOKENS + 3.0),
        Timings(2.0, 3.0, TOKENS),
        Timings(0.0, 2.0, TOKENS + 3.0),
    ]
    size, padding = len(first) - 1, len(first) - len(second)
    assert padding > 0
    expected = [
        (GateSite.PREFILL, journal.estimator.estimate_packed(2, size)),
        (NativeCallKind.PREFILL, 0, stats.estimate_prefill_seconds(2 * size), len(first) + len(second)),
        [first[:-1], second[:-1] + [0] * padding],
        ("speed", 2 * size, 1.0, size / 2),
        ("observe_packed", 2, size, PEAK - 2 * BLOCK * journal.kv.per_token),
        *journal.list_join(0, 2, len(first)),
        journal.decode,
        [first[-1:], second[-1:]],
        ("step", 1.0, 2),
        (GateSite.PREFILL, journal.estimator.estimate_chunk(len(long), 0, last=True)),
        (NativeCallKind.PREFILL, numbers[1], stats.estimate_prefill_seconds(len(long)), len(long)),
        [long],
        ("speed", len(long), 1.0, len(long) / 2),
        ("observe_prefill", len(long), 0, PEAK - BLOCK * journal.kv.per_token, True, True),
        *journal.list_join(numbers[1], 3, len(long)),
    ]
    assert journal.events[: len(expected)] == expected
    steps = [event for event in journal.events[len(expected) :] if isinstance(event, list)]
    assert steps == [[[answer[place]] for answer in answers] for place in range(TOKENS - 1)]


def test_a_prompt_that_begins_like_a_cached_one_is_computed_from_there(monkeypatch: pytest.MonkeyPatch):
    """The first chunk writes into a copy of the cached prefix, and its memory is no measurement of a chunk."""
    driver = create_driver("64MiB")
    driver.end(driver.ask(LONG, ENDLESS))
    journal, stats = Journal(driver, monkeypatch), driver.resident().stats
    number = driver.ask(LONG + LONG, ENDLESS)
    (prefill,) = driver.engine.parts.scheduler.prefills
    ids, tokens, known = prefill.ids, len(prefill.ids), prefill.stored_tokens
    assert tokens // 3 < known < tokens - CHUNK
    found = driver.end(number)
    chunks = -(-(tokens - known) // CHUNK)
    assert found == Finished(number, ("length",), tokens, TOKENS, known, Timings(0.0, chunks + 1, TOKENS))
    assert driver.ids[number, 0] == decoded_alone(journal.model, ids, TOKENS)
    expected = list[object]()
    for start in range(known, tokens, CHUNK):
        piece = ids[start : start + CHUNK]
        size, last = len(piece), start + CHUNK >= tokens
        expected += [
            (GateSite.PREFILL, journal.estimator.estimate_chunk(size, start, last=last)),
            (NativeCallKind.PREFILL, number, stats.estimate_prefill_seconds(size), size),
            [piece],
            ("speed", size, 1.0, start + size / 2),
            *[("observe_prefill", size, start, PEAK, last, False)] * (start > known),
        ]
    expected += journal.list_join(number, 1, tokens)
    assert journal.events[: len(expected)] == expected
    assert [entry.length for entry in driver.engine.parts.prefix_cache.entries][-1] == tokens + TOKENS - 1
    assert driver.engine.report(0.0).cache.hits == 1


def test_a_refused_chunk_is_made_smaller_and_tried_again_after_the_delay(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal, most = Journal(driver, monkeypatch), 0
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda _: 0.0)
    chunks = {size: journal.estimator.estimate_chunk(size, 0) for size in (CHUNK, CHUNK // 2, FLOOR)}
    driver.gate.refuses = lambda site, estimate: journal.check(site, estimate) or (site in TESTED and estimate > most)
    shrinks, begun = driver.engine.report(0.0).counts.shrinks, time.monotonic()
    number = driver.ask(LONG, ENDLESS)
    (prefill,), scheduler = driver.engine.parts.scheduler.prefills, driver.engine.parts.scheduler
    for later in (0.0, 0.0, 0.9 * GATE_RETRY_SECONDS):
        journal.clock.by = later
        driver.turn()
        assert journal.events == [(GateSite.PREFILL, size) for size in chunks.values() for _ in range(2)]
        assert scheduler.next_step_at(time.monotonic()) == begun + GATE_RETRY_SECONDS
        assert scheduler.compute_required_bytes() == journal.estimator.estimate_chunk(FLOOR, len(prefill.ids))
    assert driver.engine.report(0.0).counts.shrinks - shrinks == 2
    journal.clock.by, most = GATE_RETRY_SECONDS, chunks[CHUNK // 2]
    journal.events.clear()
    driver.turn()
    assert journal.events[3:4] == [(NativeCallKind.PREFILL, number, journal.events[3][2], CHUNK // 2)]  # type: ignore[index]
    assert (prefill.stored_tokens, prefill.retry_at, scheduler.compute_required_bytes()) == (CHUNK // 2, 0.0, 0)
    assert driver.engine.report(0.0).counts.shrinks - shrinks == 3


def test_a_row_that_reaches_its_commitment_grows_by_the_bytes_of_the_rest(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal = Journal(driver, monkeypatch)
    number = driver.ask("hello", replace(ENDLESS, max_tokens=40), expected=10)
    driver.until(lambda: driver.ids[number, 0])
    (row,) = driver.engine.parts.scheduler.live[number].rows
    assert isinstance(driver.end(number), Finished)
    first, last = len(row.sequence.prompt) + 10, len(row.sequence.prompt) + 40
    bytes_of = [compute_row_bytes(journal.kv, tokens) for tokens in (first, last)]
    grown = (GateSite.GROW, bytes_of[1] - bytes_of[0] + journal.estimator.estimate_charged_step(1, last))
    assert [event for event in journal.events if isinstance(event, tuple) and event[0] is GateSite.GROW] == [grown]
    steps = [event for event in journal.events if event in (grown, journal.decode)]
    assert steps == [*[journal.decode] * 10, grown, *[journal.decode] * 30]
    assert row.commitment.committed_tokens == last


def list_calls(journal: Journal, kind: NativeCallKind) -> list[tuple[int, int]]:
    """Return the request and the tokens of each prefill, or the request and 0 of each other call of a kind."""
    calls = [event for event in journal.events if isinstance(event, tuple) and event[0] is kind]
    return [(call[1], call[3] if len(call) > 3 else 0) for call in cast("list[tuple[Any, ...]]", calls)]


def test_the_oldest_and_the_shortest_of_two_long_prompts_are_prefilled_in_turn(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal, brief = Journal(driver, monkeypatch), replace(ENDLESS, max_tokens=1)
    numbers = [driver.ask("word " * count, brief) for count in (100, 60)]
    older, shorter = numbers
    lengths = [len(prefill.ids) for prefill in driver.engine.parts.scheduler.prefills]
    assert all(prefill.past is None for prefill in driver.engine.parts.scheduler.prefills), "the prefix cache is off"
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
    assert [-(-length // CHUNK) for length in lengths] == [5, 4]
    rest = [length % CHUNK for length in lengths]
    assert list_calls(journal, NativeCallKind.PREFILL) == [
        *[(older, CHUNK), (shorter, CHUNK)] * 3,
        (older, CHUNK),
        (shorter, rest[1]),
        (older, rest[0]),
    ]
    assert list_calls(journal, NativeCallKind.JOIN) == [(shorter, 0), (older, 0)]


def test_the_logits_of_a_last_chunk_above_the_limit_are_computed_for_its_last_token_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal, brief = Journal(driver, monkeypatch), replace(ENDLESS, max_tokens=1)
    number = driver.ask("hello", brief)
    (tokens,) = (len(prefill.ids) for prefill in driver.engine.parts.scheduler.prefills)
    for limit, sizes in ((tokens - 1, [tokens - 1, 1]), (tokens, [tokens])):
        monkeypatch.setattr(LoadedModel, "tail", limit)
        journal.events.clear()
        assert isinstance(driver.end(number), Finished)
        assert list_calls(journal, NativeCallKind.PREFILL) == [(number, size) for size in sizes]
        assert [event[4] for event in journal.events if isinstance(event, tuple) and event[0] == "observe_prefill"] == [
            size == sizes[-1] for size in sizes
        ]
        number = driver.ask("hello", brief)


def test_a_prompt_without_room_waits_while_another_request_decodes(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(driver, monkeypatch)
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda _: None)
    decoding = driver.ask("hello", replace(ENDLESS, max_tokens=9))
    driver.until(lambda: driver.ids[decoding, 0])
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL
    waiting = driver.ask(LONG, ENDLESS)
    while driver.ended(decoding) is None:
        assert driver.ended(waiting) is None
        driver.turn()
    assert list_calls(journal, NativeCallKind.PREFILL)[1:] == []
    driver.until(lambda: driver.ended(waiting))
    assert isinstance(driver.end(waiting), Refusal), "no other request frees memory"


def test_rows_join_two_batches_each_with_a_copy_of_the_prompt(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """The first row joins the batch of another request. Its other rows form a batch of their own."""
    journal = Journal(driver, monkeypatch)
    other = driver.ask("hello", replace(ENDLESS, max_tokens=40))
    driver.until(lambda: driver.ids[other, 0])
    number, scheduler = driver.ask(LONG, replace(ENDLESS, n=3)), driver.engine.parts.scheduler
    (prefill,) = scheduler.prefills
    ids = prefill.ids
    driver.gate.refuses = lambda site, _: site is GateSite.JOIN
    driver.until(lambda: prefill.retry_at)
    assert (prefill.width, scheduler.live[number].joined) == (3, 0.0)
    journal.events.clear()
    driver.gate.refuses = lambda site, size: journal.check(site, size) or (site is GateSite.JOIN and prefill.width < 3)
    journal.clock.by += GATE_RETRY_SECONDS
    driver.turn()
    assert (prefill.width, len(driver.batches())) == (2, 1)
    journal.clock.by += GATE_RETRY_SECONDS
    driver.gate.refuses = journal.check
    assert isinstance(driver.end(number), Finished)
    copied, *_, observed = journal.list_join(number, 2, len(ids))
    joins = [event for event in journal.events if isinstance(event, tuple) and event[0] in (*TESTED, "observe_join")]
    assert joins == [copied, observed, copied, copied, copied, observed], "the refused copy is checked twice"
    answer = decoded_alone(journal.model, ids, TOKENS)
    assert [driver.ids[number, choice] for choice in range(3)] == [answer] * 3


def test_packed_prompts_are_fewer_if_they_do_not_fit_and_join_rows_that_decode(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    journal = Journal(driver, monkeypatch)
    other = driver.ask("hello", replace(ENDLESS, max_tokens=40))
    driver.until(lambda: driver.ids[other, 0])
    numbers = [driver.ask("who there", ENDLESS) for _ in range(3)]
    size = len(driver.engine.parts.scheduler.prefills[0].ids) - 1
    estimates = {rows: journal.estimator.estimate_packed(rows, size) for rows in (3, 2)}
    driver.gate.refuses = lambda site, estimate: journal.check(site, estimate) or estimate == estimates[3]
    shrinks = driver.engine.report(0.0).counts.shrinks
    journal.events.clear()
    driver.until(lambda: len(driver.engine.parts.scheduler.prefills) < 3)
    assert [event for event in journal.events if isinstance(event, tuple) and event[0] in TESTED] == [
        *[(GateSite.PREFILL, estimates[3])] * 2,
        (GateSite.PREFILL, estimates[2]),
        (
            GateSite.JOIN,
            3 * compute_row_bytes(journal.kv, max(size + 1, len(driver.ids[other, 0]) + size)) // LAYERS + 3,
        ),
    ]
    assert driver.engine.report(0.0).counts.shrinks == shrinks + 1
    driver.gate.refuses = lambda site, estimate: journal.check(site, estimate) or estimate == estimates[2]
    numbers += [driver.ask("who there", ENDLESS) for _ in range(2)]
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
        assert driver.ids[number, 0] == driver.ids[numbers[0], 0]


def test_a_lone_row_without_room_to_grow_fails_with_the_numbers(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GatedForwards, "find_peak_expiry", lambda _: None)
    driver.gate.refuses = lambda site, _: site is GateSite.GROW
    number = driver.ask("hello", replace(ENDLESS, max_tokens=40), expected=10)
    found = driver.end(number)
    assert isinstance(found, Failed)
    assert (found.code, len(driver.ids[number, 0])) == ("no_headroom", 10)
    assert found.message == "an answer became longer than expected: no room by script"


def test_no_more_prompts_are_started_than_rows_may_decode(driver: Driver):
    """The driver checks the limit after each turn."""
    decoding = driver.ask("hello", replace(ENDLESS, n=3, max_tokens=25))
    driver.until(lambda: len(driver.batches()) == 1)
    numbers = [driver.ask("word " * count, ENDLESS) for count in (100, 60, 30)]
    assert all(isinstance(driver.end(number), Finished) for number in (decoding, *numbers))


@pytest.mark.parametrize(("chunk", "rows"), [(34, 2), (33, 1)])
def test_packed_prompts_have_at_most_the_tokens_of_a_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int, rows: int):
    """The last token of each prompt is not part of the packed forward."""
    driver = create_driver("off", chunk)
    journal = Journal(driver, monkeypatch)
    for _ in range(2):
        driver.ask("who there", ENDLESS)
    assert [len(prefill.ids) for prefill in driver.engine.parts.scheduler.prefills] == [18, 18]
    driver.turn()
    forward, *_ = (event for event in journal.events if isinstance(event, list))
    assert len(forward) == rows


def test_prompts_whose_packed_join_has_no_room_are_prefilled_whole(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(driver, monkeypatch)
    numbers = [driver.ask("who there", ENDLESS) for _ in range(2)]
    ids, size = driver.engine.parts.scheduler.prefills[0].ids, len(driver.engine.parts.scheduler.prefills[0].ids)
    packed = 2 * compute_row_bytes(journal.kv, size) // LAYERS + 2
    checks = list[GateSite]()

    def refuse(site: GateSite, estimate: int) -> bool:
        checks.extend([site] * (site is GateSite.JOIN))
        return site is GateSite.JOIN and estimate == packed and len(checks) < 3

    driver.gate.refuses = refuse
    ends = [driver.end(number) for number in numbers]
    assert all(isinstance(found, Finished) for found in ends)
    assert [driver.ids[number, 0] for number in numbers] == [decoded_alone(journal.model, ids, TOKENS)] * 2
    calls = list_calls(journal, NativeCallKind.PREFILL)
    assert calls == [(0, 2 * size), *[(number, size) for number in numbers]]


def test_a_started_prompt_is_not_packed(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(driver, monkeypatch)
    floor = journal.estimator.estimate_chunk(FLOOR, 0)
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFILL and estimate > floor
    first = driver.ask("who there", ENDLESS)
    driver.turn()
    (prefill,) = driver.engine.parts.scheduler.prefills
    assert prefill.stored_tokens == FLOOR < len(prefill.ids)
    driver.gate.refuses = journal.check
    second = driver.ask("who there", ENDLESS)
    for number in (first, second):
        assert isinstance(driver.end(number), Finished)
        assert driver.ids[number, 0] == decoded_alone(journal.model, prefill.ids, TOKENS)
    sizes = dict(list_calls(journal, NativeCallKind.PREFILL)[1:])
    assert sizes == {first: len(prefill.ids) - FLOOR, second: len(prefill.ids)}


def test_prompts_without_time_for_the_first_of_them_are_not_packed(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """A row that decodes would wait for the whole packed forward."""
    journal = Journal(driver, monkeypatch)
    decoding = driver.ask("hello", replace(ENDLESS, max_tokens=25))
    driver.until(lambda: driver.ids[decoding, 0])
    numbers = [driver.ask("who there", ENDLESS) for _ in range(2)]
    length = len(driver.engine.parts.scheduler.prefills[0].ids)
    driver.resident().stats.pace = Steady(each=1.1 * FULL_PROMPT_SECONDS / length)
    journal.events.clear()
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
    assert {request for request, _ in list_calls(journal, NativeCallKind.PREFILL)} == set(numbers), "each alone"
