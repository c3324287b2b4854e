"""The next prefills of the scripted engine: free rows, waits, turns, packed prompts, and the sizes of chunks."""

from collections.abc import Mapping

import pytest

from node.engine.scheduling.rules.chunk_policy import (
    CHUNK_PER_STEP,
    IDLE_CHUNK_SECONDS,
    MAX_CACHED_SHARE,
    MIN_CHUNK_TOKENS,
    ChunkPace,
)
from node.engine.scheduling.rules.prefill_order import COALESCE_SECONDS
from node.engine.scripted.costs import DecodeLoad, FixedCosts
from node.engine.scripted.prefills import PrefillChunk, ScriptedPrefills
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from tests.unit.node.engine.scripted.test_sequence import make_sequence
from wire.capacity.fairness import CROWDED_PROMPTS

ROWS, CHUNK = 4, 512
EACH = 0.001
"""Seconds of a token of a prefill."""


class Costs:
    """Costs of hardware on which each token of a prefill takes `EACH` seconds."""

    free_prefill = False

    def get_pace(self, model: str) -> ChunkPace:
        return ChunkPace(each=EACH)

    def estimate_step_seconds(self, loads: Mapping[str, DecodeLoad]) -> float:
        return 0.05


class Pool:
    """A table of queued requests, and the choices of their prefills."""

    def __init__(self, costs: Costs | FixedCosts | None = None) -> None:
        self.table = ScriptedTable(ROWS)
        self.prefills = ScriptedPrefills(self.table, costs or Costs(), CHUNK)
        self._ledger = make_sequence().ledger
        self._ledger.release(self._ledger.commit(1, 1)[0])

    def add(
        self, tokens: int, *, arrived: float = 10.0, key: str = "home", rows: int = 1, model: str = "m"
    ) -> ScriptedSequence:
        """Queue a prompt of `tokens` tokens, in the batch of all prompts."""
        sequence = make_sequence(rows, arrived=arrived, key=key, model=model, prompt=tokens)
        for row in sequence.rows:
            sequence.ledger.release(row.commitment)
        sequence.ledger = self._ledger
        for row, commitment in zip(sequence.rows, self._ledger.commit(tokens, rows), strict=True):
            row.commit(commitment)
        self.table.enqueue(sequence)
        return sequence

    def decode(self, rows: int, *, key: str = "home") -> None:
        """Start the decode of a request with `rows` rows."""
        self.table.start_decode(self.add(10, rows=rows, key=key))

    def next_chunk(self, step: float = 0.0) -> PrefillChunk:
        """Return the prefill of the next turn, and count the turn."""
        (chunk,), turns = self.prefills.schedule(self.prefills.list_choices(100.0), step, leap=False)
        assert turns == 1
        self.prefills.count_turns(1)
        return chunk


def test_a_prefill_that_takes_no_time_starts_as_soon_as_a_row_is_free():
    pool = Pool(FixedCosts(0.05))
    assert pool.prefills.next_free(10.0) is None
    first = pool.add(10)
    assert pool.prefills.next_free(10.0) is first
    first.delay(20.0)
    assert pool.prefills.next_free(19.0) is None
    pool.add(10, rows=4)
    assert pool.prefills.next_free(19.0) is None, "it would overtake a request that needs more rows"
    assert pool.prefills.next_free(20.0) is first
    pool.decode(4)
    assert pool.prefills.next_free(20.0) is None, "no row is free"
    slow = Pool()
    slow.add(10)
    assert slow.prefills.next_free(10.0) is None, "prefills take time"


def test_the_next_unstarted_prompt_is_that_of_the_key_with_the_fewest_rows():
    pool = Pool()
    assert pool.prefills.next_unstarted() is None
    pool.decode(1)
    home, office = pool.add(10, arrived=1.0), pool.add(10, arrived=2.0, key="office")
    assert pool.prefills.next_unstarted() is office
    office.start()
    assert pool.prefills.next_unstarted() is home
    home.start()
    assert pool.prefills.next_unstarted() is None


def test_prompts_that_the_gate_refused_or_without_rows_are_no_choice():
    pool = Pool()
    assert pool.prefills.list_choices(1.0) == []
    first, second, third = pool.add(10), pool.add(10, rows=2), pool.add(10, rows=2)
    first.delay(5.0)
    assert pool.prefills.list_choices(4.9) == [second]
    assert pool.prefills.list_choices(5.0) == [first, second], "one row is left for a prompt with two"
    pool.decode(1)
    third.start()
    assert pool.prefills.list_choices(5.0) == [third, first]


def test_a_prompt_after_a_crowd_waits_for_another():
    pool = Pool()
    prompt = pool.add(10, arrived=10.0)
    assert pool.prefills.compute_packing_time([prompt]) == 0.0, "no other request was live"
    pool.table.crowded_at = 9.0
    assert pool.prefills.compute_packing_time([prompt]) == 10.0 + COALESCE_SECONDS
    wide = pool.add(10, rows=3)
    assert pool.prefills.compute_packing_time([prompt, wide]) == 0.0, "they fill the batch"
    prompt.start()
    assert pool.prefills.compute_packing_time([prompt]) == 0.0, "it has started"
    other = pool.add(10)
    assert pool.prefills.compute_packing_time([other]) > 0.0
    pool.decode(1)
    assert pool.prefills.compute_packing_time([other]) == 0.0, "a row decodes"


@pytest.mark.parametrize(
    ("tokens", "warm", "step", "count"),
    [
        (100, 0, 0.0, 100),
        (5000, 0, 0.0, CHUNK),
        (5000, 4900, 0.0, 100),
        (5000, 0, 0.05, round(CHUNK_PER_STEP * 0.05 / EACH)),
        (100, 0, 0.05, 100),
        (5000, 0, 0.001, MIN_CHUNK_TOKENS),
    ],
)
def test_a_chunk_has_the_tokens_for_which_there_is_time(tokens: int, warm: int, step: float, count: int):
    pool = Pool()
    prompt = pool.add(tokens)
    prompt.warm = warm
    chunk = pool.next_chunk(step)
    assert (chunk.members, chunk.tokens, chunk.packed) == ((prompt,), count, False)
    assert chunk.seconds == pytest.approx(count * EACH)
    assert chunk.seconds <= IDLE_CHUNK_SECONDS
    assert chunk.completes is (count == tokens - warm)
    chunk.start()
    assert prompt.started


def test_a_prompt_without_tokens_left_takes_no_time():
    pool = Pool()
    prompt = pool.add(100)
    prompt.warm = 100
    assert pool.next_chunk() == PrefillChunk((prompt,), 0, 0.0)


def test_short_prompts_of_a_batch_are_packed():
    pool = Pool()
    prompts = [pool.add(tokens, arrived=float(tokens)) for tokens in (98, 100, 97)]
    chunk = pool.next_chunk()
    assert (set(chunk.members), chunk.tokens, chunk.packed, chunk.completes) == (set(prompts), 0, True, True)
    assert chunk.seconds == pytest.approx(3 * 99 * EACH), "all have the length of the longest, but its last token"
    chunk.start()
    assert all(prompt.started for prompt in prompts)


def test_prompts_are_packed_only_if_that_saves_time():
    pool = Pool()
    first = pool.add(100, arrived=1.0)
    pool.add(100, arrived=2.0, model="other")
    pool.add(100, arrived=3.0, rows=2)
    assert pool.next_chunk().members == (first,), "another model, and several rows"
    pool = Pool()
    first, cached = pool.add(100, arrived=1.0), pool.add(200, arrived=2.0)
    cached.warm = round(MAX_CACHED_SHARE * 200)
    started = pool.add(150, arrived=3.0)
    started.start()
    pool.prefills.count_turns(1)
    assert pool.next_chunk().members == (first,), "half of a prompt is cached, or it has started"
    pool = Pool()
    first, cached = pool.add(200, arrived=1.0), pool.add(200, arrived=2.0)
    cached.warm = round(MAX_CACHED_SHARE * 200) - 1
    pool.prefills.count_turns(1)
    assert pool.next_chunk().members == (first, cached)


def test_packed_prompts_have_at_most_the_tokens_of_a_chunk():
    pool = Pool()
    for number in range(4):
        pool.add(200, arrived=float(number))
    assert len(pool.next_chunk().members) == CHUNK // 199 == 2


def test_turns_alternate_between_the_shortest_and_the_oldest_prompt():
    pool = Pool()
    oldest, short = pool.add(9000, arrived=1.0), pool.add(5000, arrived=2.0)
    assert [pool.next_chunk().members for _ in range(4)] == [(short,), (oldest,), (short,), (oldest,)]


def test_prefilled_tokens_count_for_their_key():
    pool = Pool()
    home = [pool.add(5000 + number, arrived=1.0 + number) for number in range(CROWDED_PROMPTS + 1)]
    office = pool.add(9000, arrived=90.0, key="office")
    for prompt in (*home, office):
        prompt.start()
    assert [pool.next_chunk().members for _ in range(2)] == [(home[0],), (home[0],)]
    pool.prefills.count_prefilled(home[0], 1000)
    assert [pool.next_chunk().members for _ in range(2)] == [(home[0],), (office,)]


@pytest.mark.parametrize(
    ("prompts", "step", "turns"),
    [
        ((5000,), 0.0, 9),
        ((5000,), 0.05, 60),
        ((5000, 9000), 0.0, 18),
        ((5000, 9000), 0.05, 120),
        ((5000, 5000), 0.05, 1),
        ((600,), 0.05, 5),
        ((260,), 0.05, 1),
        ((100, 90), 0.05, 1),
        ((100, 5000), 0.05, 1),
        ((5000, 6000, 7000), 0.05, 120),
    ],
)
def test_equal_turns_at_once_are_those_of_single_turns(prompts: tuple[int, ...], step: float, turns: int):
    pools = Pool(), Pool()
    for pool in pools:
        for number, tokens in enumerate(prompts):
            pool.add(tokens, arrived=float(len(prompts) - number))
    leaping, single = pools
    chunks, count = leaping.prefills.schedule(leaping.prefills.list_choices(100.0), step, leap=True)
    assert count == turns
    for turn in range(count):
        chunk = single.next_chunk(step)
        planned = chunks[turn % len(chunks)]
        assert [member.shape.prompt for member in chunk.members] == [member.shape.prompt for member in planned.members]
        assert (chunk.tokens, chunk.seconds) == (planned.tokens, pytest.approx(planned.seconds))
        assert turn == count - 1 or not chunk.completes
        chunk.start()
        if not chunk.packed:
            chunk.members[0].prefill(chunk.tokens)


def test_no_turns_are_planned_while_fairness_chooses():
    pool = Pool()
    for number in range(CROWDED_PROMPTS + 1):
        pool.add(5000 + number, arrived=float(number)).start()
    chunks, turns = pool.prefills.schedule(pool.prefills.list_choices(100.0), 0.05, leap=True)
    assert (len(chunks), turns) == (1, 1)
