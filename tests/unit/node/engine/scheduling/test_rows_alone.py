"""Models whose rows cannot be batched: each row decodes in a batch of its own, with the answers of mlx-lm."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from tests import models
from tests.support.engine.text_engine import Driver
from wire.capacity.batches import compute_row_bytes
from wire.frames import Channel, Finished, GenerationParams, MemoryLimits, Message
from wire.units import GIB

LIMIT = 60
END = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
BRIEF = GenerationParams(temperature=0.0, max_tokens=LIMIT, logit_bias=((END, -100.0),))
PROMPTS = ("Hello!", "word " * 40, "sun " * 150)


@pytest.fixture(scope="module")
def chunked() -> Path:
    """Return the folder of a model whose caches drop the tokens before the last 64."""
    return Path(models.path("llama4", trained=False))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return the engine with a trained model, whose rows decode alone as those of AFM do."""
    monkeypatch.setattr("node.engine.models.loaded_model.WRONG_TOGETHER", frozenset({"llama"}))
    return Driver(models.path("llama"))


def decode_with_mlx_lm(folder: Path, prompt: list[int]) -> list[int]:
    model = load_model(folder)[0]
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=LIMIT)]


def test_each_row_has_a_batch_of_its_own_and_the_answer_of_mlx_lm(chunked: Path):
    driver = Driver(chunked)
    numbers = [driver.ask(content, BRIEF) for content in PROMPTS]
    driver.until(lambda: all(driver.ids[number, 0] for number in numbers))
    assert [len(batch) for batch in driver.batches().values()] == [1, 1, 1]
    sequences = dict(driver.engine.parts.scheduler.live)
    for number in numbers:
        assert isinstance(driver.end(number), Finished)
    for number in numbers:
        assert driver.ids[number, 0] == decode_with_mlx_lm(chunked, list(sequences[number].prompt))
    assert len(sequences[numbers[2]].prompt) > 2 * 64, "the longest prompt exceeds the caches of three layers"
    assert driver.engine.report(0.0).memory.reserved == 0


def test_choices_of_a_request_decode_alone_as_well(chunked: Path):
    driver = Driver(chunked)
    driver.end(driver.ask(PROMPTS[1], BRIEF))
    number = driver.ask(PROMPTS[1], GenerationParams(temperature=0.0, max_tokens=LIMIT, n=3))
    driver.until(lambda: driver.ids[number, 2])
    assert [len(batch) for batch in driver.batches().values()] == [1, 1, 1]
    assert isinstance(driver.end(number), Finished)
    assert driver.ids[number, 0] == driver.ids[number, 1] == driver.ids[number, 2] == driver.ids[1, 0]


def test_a_request_reserves_its_rows_without_padding(alone: Driver):
    alone.take(MemoryLimits(8 * GIB, 8 * GIB, 0, "static"))
    numbers = [alone.ask(content, BRIEF) for content in PROMPTS]
    alone.until(lambda: all(alone.ids[number, 0] for number in numbers))
    loaded = alone.resident()
    rows = [alone.engine.parts.scheduler.live[number].rows[0].commitment.committed_tokens for number in numbers]
    assert loaded.ledger.compute_committed_bytes() == sum(compute_row_bytes(loaded.kv, tokens) for tokens in rows)
    assert loaded.kv.waste == 0
    assert not loaded.plain, "short prompts are not packed into one forward"


def test_the_next_turn_starts_at_the_cached_one(alone: Driver):
    messages = (Message("user", "word " * 300),)
    first = alone.ask(messages=messages, params=BRIEF)
    end = alone.end(first)
    assert isinstance(end, Finished)
    longest = max(entry.length for entry in alone.engine.parts.prefix_cache.entries)
    assert longest == end.prompt_tokens + LIMIT - 1, "the answer is cached as well, but its last token"
    again = alone.end(alone.ask(messages=messages, params=BRIEF))
    assert isinstance(again, Finished)
    assert again.cached_tokens == again.prompt_tokens - 1
    assert alone.ids[alone.number, 0] == alone.ids[first, 0]
    messages += (Message("assistant", alone.text[first, 0, Channel.CONTENT]), Message("user", "And then?"))
    second = alone.end(alone.ask(messages=messages, params=BRIEF))
    assert isinstance(second, Finished)
    assert second.cached_tokens >= end.prompt_tokens
    uncached = Driver(models.path("llama"), prefix_cache_size="off")
    other = uncached.ask(messages=messages, params=BRIEF)
    uncached.end(other)
    assert alone.ids[alone.number, 0] == uncached.ids[other, 0]


def test_the_memory_profile_measures_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("node.engine.models.loaded_model.WRONG_TOGETHER", frozenset({"llama"}))
    driver = Driver(models.path("llama"), profile="auto", profiles=tmp_path, prefill_step_size=256, max_batch_size=4)
    assert isinstance(driver.end(driver.ask("Hello!", BRIEF)), Finished)
    profile = driver.resident().stats.profile
    assert profile is not None
    assert profile.rows == 1
