"""One key guesses the prompts of another key through `cached_tokens`, with the prefix cache of a real engine as
oracle."""

from collections.abc import Callable
from pathlib import Path

import pytest

from node.engine.scheduling.rules import chunk_policy
from tests import models
from tests.support.engine.text_engine import Driver
from wire.capacity.fairness import WeightedKey
from wire.frames import SHARED_SCOPE, Finished, GenerationParams, Message

ALICE, MALLORY = WeightedKey("alice"), WeightedKey("mallory")
OPENING = "You are the private assistant of a physician. Answer shortly and never mention names. "
WORDS = ("fever", "cancer", "asthma", "measles")
SECRET = "asthma"
ONE = GenerationParams(temperature=0.0, max_tokens=1)


@pytest.fixture
def driver() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)


def cached(driver: Driver, key: WeightedKey, *messages: Message, shared: bool = False, scope: str = "") -> int:
    number = driver.ask(messages=messages, params=ONE, weighted_key=key, shared=shared, cache_scope=scope)
    end = driver.end(number)
    assert isinstance(end, Finished), end
    return end.cached_tokens


def letter(word: str) -> Message:
    return Message("user", f"{OPENING}My patient suffers from {word} since last week, what should I do about it?")


def guessed(driver: Driver, scope: str = "") -> str:
    """Return the word with the most cached prompt tokens: an attacker's guess of the other key's word."""
    found = {word: cached(driver, MALLORY, letter(word), scope=scope) for word in WORDS}
    assert len(set(found.values())) == 1 or scope, "no guess differs from another"
    return max(found, key=lambda word: found[word])


def test_cached_tokens_reveal_no_prompt_of_another_key(driver: Driver):
    """Each guess is the attacker's first with that word; the count reveals no part of the other key's prompt."""
    cached(driver, ALICE, letter(SECRET))
    assert cached(driver, MALLORY, letter(SECRET)) == 0
    assert cached(driver, ALICE, letter(SECRET)) > 20, "a key still finds its own prompts"


def test_prompt_cannot_be_guessed_by_cached_tokens(driver: Driver):
    cached(driver, ALICE, letter(SECRET))
    cached(driver, MALLORY, letter("nothing"))  # the attacker's own opening is cached from here on
    guessed(driver)


def test_the_oracle_exists_where_an_administrator_shares_the_cache_in_the_pool(driver: Driver):
    """The same attack with `cache.share = "pool"`. Without it the tests above would prove nothing."""
    cached(driver, ALICE, letter(SECRET), scope=SHARED_SCOPE)
    assert guessed(driver, SHARED_SCOPE) == SECRET


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_of_a_shared_system_prompt_nothing_behind_it_is_shared(name: str, tiny_model: Callable[..., Path]):
    """Covers caches that can be cut, and states that cannot."""
    driver = Driver(tiny_model(name))
    system = Message("system", OPENING * 3)
    assert cached(driver, ALICE, system, letter(SECRET), shared=True) == 0
    first = cached(driver, MALLORY, system, letter("cancer"), shared=True)
    assert first > 30, "the system prompt was read by the other key"
    same = cached(driver, WeightedKey("carol"), system, letter(SECRET), shared=True)
    assert same == first, "the other key's question makes no difference"
    assert cached(driver, WeightedKey("dave"), system, letter(SECRET)) == 0, (
        "the coordinator has not named it as shared"
    )
    assert cached(driver, ALICE, system, letter(SECRET), shared=True) > first, "a key finds its own behind it"


def test_tools_before_a_shared_system_prompt_end_the_sharing(driver: Driver):
    """Text of a client before or inside the system prompt is private to its key."""
    system = Message("system", OPENING * 3)
    tools = '[{"type":"function","function":{"name":"secret_tool","parameters":{"type":"object"}}}]'
    for key in (ALICE, MALLORY):
        number = driver.ask(messages=(system, letter(SECRET)), params=ONE, weighted_key=key, shared=True, tools=tools)
        end = driver.end(number)
        assert isinstance(end, Finished), end
        assert end.cached_tokens == 0


def test_prompts_of_two_keys_that_begin_alike_are_read_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """No key waits for the prefix of another key, because the wait would reveal that the prompts begin alike."""
    monkeypatch.setattr(chunk_policy, "PACKED_FORWARD_SECONDS", 60.0)  # on a busy machine two prompts take longer
    numbers = [driver.ask(messages=(letter(SECRET),), params=ONE, weighted_key=key) for key in (ALICE, MALLORY)]
    driver.until(lambda: any(driver.ids[number, 0] for number in numbers))
    assert all(driver.ids[number, 0] for number in numbers), "both had their first token in the same step"
