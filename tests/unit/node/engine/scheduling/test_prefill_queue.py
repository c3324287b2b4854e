"""The choice of the next prefills without an engine: free rows, waits, turns, and the sizes of chunks."""

from types import SimpleNamespace
from typing import cast

import pytest

from node.engine.kv.kv_cache import Layers
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_stats import ModelStats
from node.engine.requests.sequence import Row
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefill_queue import PrefillQueue
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.chunk_policy import (
    CHUNK_PER_STEP,
    FULL_PROMPT_SECONDS,
    IDLE_CHUNK_SECONDS,
    PACKED_FORWARD_SECONDS,
    ChunkPace,
)
from node.engine.scheduling.rules.prefill_order import COALESCE_SECONDS
from tests.unit.node.engine.requests.test_sequence import make_sequence
from wire.capacity.fairness import CROWDED_PROMPTS, WeightedKey

ROWS, CHUNK, FLOOR = 4, 512, 32
HOME, OFFICE = WeightedKey("home"), WeightedKey("office")


class Batch(list[Row]):
    """The rows of a decode batch."""

    def list_rows(self) -> list[Row]:
        return self


class Packing:
    """The selection for one forward, which takes all choices and records the limit."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def select_batch(self, first: Prefill, waiting: list[Prefill], max_tokens: int) -> list[Prefill]:
        self.limits.append(max_tokens)
        return [first, *(prefill for prefill in waiting if prefill is not first)]


class Estimator:
    """The bytes of a chunk: 1000 for each of its tokens, and 1 for each token of the prompt."""

    def estimate_chunk(self, tokens: int, past: int) -> int:
        return 1000 * tokens + past


class Pool:
    """A queue of prefills of one model whose chunks take 1 ms for each token."""

    def __init__(self, *, plain: bool = True, tail: int = 64) -> None:
        stats = ModelStats(pace=ChunkPace(each=0.001))
        fields = SimpleNamespace(name="m", plain=plain, tail=tail, stats=stats, estimator=Estimator())
        self.model = cast("LoadedModel", fields)
        self.requests = RequestTable()
        self.batches = BatchTable(lambda: {"m": self.model})
        self.packing = Packing()
        packed = cast("PackedPrefill", self.packing)
        self.queue = PrefillQueue(self.requests, self.batches, packed, ROWS, CHUNK, FLOOR)

    def add(self, tokens: int, arrived: float = 10.0, key: WeightedKey = HOME, rows: int = 1) -> Prefill:
        """Queue a prompt."""
        sequence = make_sequence(arrived=arrived, weighted_key=key, rows=rows)
        prefill = Prefill(self.model, sequence, list(sequence.rows), list(range(tokens)))
        self.requests.enqueue(prefill)
        return prefill

    def decode(self, rows: int, key: WeightedKey = HOME, step_seconds: float = 0.05) -> None:
        """Put `rows` rows into a decode batch."""
        batch = Batch(make_sequence(rows=rows, weighted_key=key).rows)
        self.batches.put(self.model, 1, cast("DecodeBatch[Row]", batch))
        self.model.stats.step_seconds = step_seconds


def test_free_rows_are_those_that_neither_decode_nor_belong_to_a_started_prefill():
    pool = Pool()
    assert (pool.queue.count_free_rows(), pool.queue.count_unclaimed_rows()) == (4, 4)
    started = pool.add(10, rows=2)
    assert (pool.queue.count_free_rows(), pool.queue.count_unclaimed_rows()) == (4, 2)
    started.start(Layers())
    assert (pool.queue.count_free_rows(), pool.queue.count_unclaimed_rows()) == (2, 2)
    pool.add(10, rows=3)
    pool.decode(1)
    assert (pool.queue.count_free_rows(), pool.queue.count_unclaimed_rows()) == (1, -2)


def test_prefills_that_the_gate_refused_are_no_choice_before_their_next_try():
    pool = Pool()
    first, second = pool.add(10), pool.add(10)
    first.delay(20.0)
    assert pool.queue.list_choices(19.9) == [second]
    assert pool.queue.list_choices(20.0) == [first, second]
    pool.decode(4)
    assert pool.queue.list_choices(20.0) == [], "no row is free"
    second.start(Layers())
    assert pool.queue.list_choices(20.0) == [second], "it has its row"


def test_the_next_unstarted_prompt_is_that_of_the_key_with_the_fewest_rows():
    pool = Pool()
    assert pool.queue.find_next_unstarted() is None
    started, home, office = pool.add(10, 1.0, OFFICE), pool.add(10, 2.0), pool.add(10, 3.0, OFFICE)
    assert pool.queue.find_next_unstarted() is started
    started.start(Layers())
    assert pool.queue.find_next_unstarted() is home
    pool.decode(2)
    assert pool.queue.find_next_unstarted() is office
    for prefill in (home, office):
        prefill.start(Layers())
    assert pool.queue.find_next_unstarted() is None


def crowded(plain: bool = True) -> Pool:
    """Return a pool in which two requests have just been live."""
    pool = Pool(plain=plain)
    pool.requests.crowded_at = 9.0
    return pool


def test_a_prompt_after_a_crowd_waits_for_another():
    pool = crowded()
    prefill = pool.add(10, arrived=10.0)
    end = 10.0 + COALESCE_SECONDS
    assert pool.queue.compute_wait_end([prefill]) == end
    assert pool.queue.schedule_next(end - 0.001) == []
    assert pool.queue.schedule_next(end) == [prefill]


def test_prompts_do_not_wait_for_packing_without_need():
    pool = Pool()
    assert pool.queue.compute_wait_end([pool.add(10)]) == 0.0, "no other request was live"
    pool = crowded()
    choices = [pool.add(10), pool.add(10, rows=3)]
    assert pool.queue.compute_wait_end(choices) == 0.0, "they fill the batch"
    assert pool.queue.compute_wait_end(choices[1:]) > 0.0
    choices = [pool.add(10), pool.add(10)]
    choices[1].start(Layers())
    assert pool.queue.compute_wait_end(choices) == 0.0, "one of them has started"
    pool = crowded(plain=False)
    assert pool.queue.compute_wait_end([pool.add(10)]) == 0.0, "its model is not packed"
    pool = crowded()
    prefill = pool.add(10)
    pool.decode(1)
    assert pool.queue.compute_wait_end([prefill]) == 0.0, "a row decodes"


def test_turns_alternate_between_the_shortest_and_the_oldest_prompt():
    pool = Pool()
    oldest, short = pool.add(10_000, 1.0), pool.add(5000, 2.0)
    for prefill in (oldest, short):
        prefill.start(Layers())
    assert [pool.queue.schedule_next(10.0) for _ in range(4)] == [[short], [oldest], [short], [oldest]]
    assert Pool().queue.schedule_next(10.0) == []


def test_computed_tokens_count_for_their_key():
    pool = Pool()
    home = [pool.add(5000, 1.0 + number) for number in range(CROWDED_PROMPTS + 1)]
    office = pool.add(6000, 90.0, OFFICE)
    for prefill in (*home, office):
        prefill.start(Layers())
    assert [pool.queue.schedule_next(100.0) for _ in range(2)] == [[home[0]], [home[0]]]
    pool.queue.count_prefilled(home[0], 1000)
    assert [pool.queue.schedule_next(100.0) for _ in range(2)] == [[home[0]], [office]]
    pool.queue.count_prefilled(office, 1001)
    assert [pool.queue.schedule_next(100.0) for _ in range(2)] == [[home[0]], [home[0]]]


def test_a_prompt_is_packed_if_there_is_time_for_all_of_it():
    pool = Pool()
    short, long = pool.add(100, 1.0), pool.add(300, 2.0)
    assert pool.queue.schedule_next(10.0) == [short, long]
    assert pool.packing.limits == [min(CHUNK, int(PACKED_FORWARD_SECONDS / 0.001))]
    pool.requests.dequeue(short)
    long.ids += range(300)
    assert pool.queue.schedule_next(10.0) == [long]
    assert len(pool.packing.limits) == 1, "it is longer than a chunk"


def test_a_packed_forward_is_shorter_while_many_rows_decode():
    pool = Pool()
    pool.add(100)
    pool.decode(2)
    pool.queue.schedule_next(10.0)
    assert pool.packing.limits == [int(1000 * PACKED_FORWARD_SECONDS / 2)], "one prompt, two rows"


@pytest.mark.parametrize(
    ("tokens", "stored", "tail", "step", "count"),
    [
        (100, 0, 64, 0.0, 99),
        (64, 0, 64, 0.0, 64),
        (65, 0, 64, 0.0, 64),
        (100, 99, 64, 0.0, 1),
        (100, 36, 64, 0.0, 64),
        (100, 35, 64, 0.0, 64),
        (5000, 0, 64, 0.0, CHUNK),
        (5000, 0, 64, 0.05, int(1000 * CHUNK_PER_STEP * 0.05)),
        (200, 0, 256, 0.05, 200),
        (int(1000 * FULL_PROMPT_SECONDS) + 1, 0, 256, 0.05, int(1000 * CHUNK_PER_STEP * 0.05)),
    ],
)
def test_a_chunk_has_the_tokens_for_which_there_is_time(tokens: int, stored: int, tail: int, step: float, count: int):
    pool = Pool(tail=tail)
    prefill = pool.add(tokens)
    prefill.set_cached_tokens(stored)
    if step:
        pool.decode(1, step_seconds=step)
    assert pool.queue.compute_chunk_tokens(prefill) == count
    assert pool.queue.compute_affordable_tokens(prefill) >= count


def test_an_idle_chunk_has_a_time_limit():
    pool = Pool()
    pool.model.stats.pace = ChunkPace(each=0.01)
    assert pool.queue.compute_affordable_tokens(pool.add(5000)) == int(IDLE_CHUNK_SECONDS / 0.01)


def test_the_bytes_of_the_largest_smallest_chunk_that_waits_for_memory_are_required():
    pool = Pool()
    first, second, third = pool.add(100), pool.add(300), pool.add(900)
    assert pool.queue.compute_required_bytes() == 0
    for prefill in (first, second):
        prefill.delay(0.5)
    assert pool.queue.compute_required_bytes() == 1000 * FLOOR + 300
    second.end_delay()
    assert pool.queue.compute_required_bytes() == 1000 * FLOOR + 100
    third.delay(1e9)
    assert pool.queue.compute_required_bytes() == 1000 * FLOOR + 900
