"""Loads of a simulated node run one at a time: progress, remaining time and memory of a queued load."""

import pytest

from simulation.mac.ended_chats import EndedChat, EndedChats, make_chat_key
from simulation.mac.hardware import BASE, CHIPS, compute_default_cap
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels
from simulation.scenario import ModelSpec
from wire.units import GIB


def make_models() -> NodeModels:
    """Return three models of 4 GiB, of which `c` is in memory, on a disk that reads 1 GiB per second."""
    models = NodeModels(CHIPS["M4"], GIB, 48 * GIB)
    for name in "abc":
        models.add(ModelSpec(name=name, weights="4GiB", kv_per_token="1MiB", active=8.0), loaded=name == "c")
    return models


def test_a_queued_load_has_read_nothing_and_waits_for_the_load_before():
    models = make_models()
    models.load(models["a"], 0.0)
    models.load(models["b"], 0.0)
    assert [models[name].to_report(1.0).progress for name in "ab"] == [pytest.approx(0.25), 0.0]
    assert [models.estimate_load_seconds(models[name], 1.0) for name in "abc"] == [
        pytest.approx(3),
        pytest.approx(7),
        0,
    ]


def test_a_load_that_was_not_requested_waits_for_all_others():
    models = make_models()
    assert models.estimate_load_seconds(models["a"], 1.0) == pytest.approx(4)
    models.load(models["a"], 1.0)
    assert models.estimate_load_seconds(models["b"], 2.0) == pytest.approx(7)


def test_a_load_without_weights_takes_time_and_ends():
    models = NodeModels(CHIPS["M4"], GIB, 48 * GIB)
    models.add(ModelSpec(name="a", weights="0", kv_per_token="1MiB", active=8.0), loaded=False)
    models.load(models["a"], 0.0)
    ready_at = models.next_loaded_at()
    assert ready_at is not None
    assert 0.0 < ready_at < 0.001
    assert models.end_load(0.0) is None
    assert models.end_load(ready_at) is models["a"]


def test_weights_of_a_queued_load_are_reserved_but_not_in_memory():
    models = make_models()
    models.load(models["a"], 0.0)
    models.load(models["b"], 0.0)
    memory = NodeMemory(64 * GIB, models, EndedChats()).read(1.0)
    assert memory.phys == pytest.approx(BASE + 5 * GIB)
    assert memory.reserved == pytest.approx(7 * GIB)


def test_each_requested_load_is_counted_once_and_idle_models_are_unloaded_least_recently_used_first():
    models = make_models()
    for name in "aab":
        models.load(models[name], 0.0)
    assert models.loads == 2
    assert [models.end_load(at) for at in (4.0, 7.9, 8.0)] == [models["a"], None, models["b"]]
    for now, name in enumerate("abc", 10):
        models[name].add_request(now)
    for now, name in enumerate("bca", 20):
        models[name].remove_request(now)
    assert models.list_idle(None) == [models[name] for name in "bca"]
    models["c"].add_request(20.0)
    assert models.list_idle(models["b"]) == [models["a"]], "neither the kept model nor one in use"


def test_the_oldest_chat_is_evicted_first_and_a_prompt_is_never_cached_completely():
    chats = EndedChats()
    for name in ("old", "used", "new"):
        chats.put(name, EndedChat("chat", 100, 10))
    chats.use("old")
    assert [chats.find("old", model, prompt) for model, prompt in (("chat", 300), ("chat", 100), ("other", 300))] == [
        100,
        99,
        0,
    ]
    chats.evict_oldest()
    assert (chats.find("used", "chat", 300), chats.find("old", "chat", 300), chats.nbytes) == (0, 100, 20)
    assert chats.to_report().evicted == (make_chat_key("used"),)


@pytest.mark.parametrize(("memory", "share"), [(24, 2 / 3), (36, 2 / 3), (48, 0.75), (192, 0.75)])
def test_a_small_mac_has_a_smaller_share_for_metal(memory: int, share: float):
    assert compute_default_cap(memory * GIB) == int(memory * GIB * share)
