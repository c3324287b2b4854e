"""The models of the tests: each family loads and answers the same each time; stored models know their trained
answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.effort import thin_cases
from tests.models.architectures import ARCHITECTURES, config
from tests.models.conversations import ENTRIES, topics

pytestmark = pytest.mark.slow
RANDOM = ("qwen3_moe", "gemma3_text", "qwen3_next", "llama4")
CACHES = {
    "qwen3": {"KVCache"},
    "qwen3_moe": {"KVCache"},
    "gemma3_text": {"RotatingKVCache", "KVCache"},
    "lfm2": {"ArraysCache", "KVCache"},
    "qwen3_next": {"ArraysCache", "KVCache"},
    "llama4": {"ChunkedKVCache", "KVCache"},
}
"""The cache types for which each family is in the tests."""
TinyModel = Callable[..., Path]


def ids_of(model: Any, prompt: list[int], count: int) -> list[int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in steps]


def load(folder: Path) -> tuple[Any, Any]:
    import mlx_lm

    return mlx_lm.load(str(folder))[:2]


def caches(model: Any) -> set[str]:
    from mlx_lm.models.cache import make_prompt_cache

    return {type(part).__name__ for part in make_prompt_cache(model)}


def test_every_family_is_tested_here_or_embedded():
    assert {*RANDOM, *models.TRAINED, "llama"} == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", RANDOM)
def test_a_random_model_loads_and_decodes_the_same_each_time(arch: str, tiny_model: TinyModel):
    model, _ = load(tiny_model(arch, trained=False))
    prompt = [7 * n % 500 for n in range(100)]
    first = ids_of(model, prompt, 8)
    assert len(first) == 8
    assert ids_of(model, prompt, 8) == first
    assert caches(model) == CACHES[arch]


@pytest.mark.parametrize("arch", models.TRAINED)
def test_a_stored_model_is_of_today_s_shape_and_conversations(arch: str):
    """`make models` stores the models again."""
    folder = models.path(arch)
    settings = json.loads((folder / "config.json").read_text())
    assert settings == config(arch, "tiny", settings["eos_token_id"])
    assert models.answers(folder) == [entry.as_json() for entry in ENTRIES]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (models.EMBEDDED / name).read_bytes()


@pytest.mark.parametrize("arch", thin_cases(models.TRAINED, 2))
def test_a_stored_model_prefers_each_token_that_it_was_taught(arch: str):
    from tests.models.make import lesson
    from tests.models.training import unsure

    model, tokenizer = load(models.path(arch))
    lessons = [lesson(tokenizer, conversation) for topic in topics() for conversation in topic]
    assert len(lessons) >= len(ENTRIES)
    drawn = thin_cases(lessons, 3)
    assert unsure(model, drawn, 0.5, at_once=1) == [], "one at a time, because a batch is padded to its longest"
    assert caches(model) == CACHES[arch]


def test_a_model_is_made_once(tiny_model: TinyModel):
    folder = tiny_model("qwen3_moe", trained=False)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model("qwen3_moe", trained=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_the_trained_llama_is_the_embedded_one(tiny_model: TinyModel):
    assert tiny_model("llama") == models.EMBEDDED


@pytest.mark.parametrize(("arch", "preset"), [("llama", "bench50m"), ("qwen3_moe", "tiny")])
def test_a_model_that_is_not_stored_is_refused(arch: str, preset: str, tiny_model: TinyModel):
    with pytest.raises(ValueError, match=f"no trained {preset} model of {arch}"):
        tiny_model(arch, preset=preset)


def test_training_ends_when_each_reply_leads_by_the_margin():
    import mlx.core as mx
    import mlx.nn as nn

    from tests.models.training import Lesson, Plan, train, unsure

    mx.random.seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16))
    topics = [[Lesson([1, 2, 3], [4, 5])], [Lesson([6, 7], [8, 9, 10])]]
    lessons = [lesson for topic in topics for lesson in topic]
    assert unsure(model, lessons, 1.0) == lessons
    seen = list[str]()
    outcome = train(model, topics, Plan(steps=600, margin=1.0), seen.append)
    assert (outcome.wrong, unsure(model, lessons, 1.0)) == (0, [])
    assert outcome.steps < 600
    assert seen[-1].endswith("0 of 2 not known")
    assert train(model, topics, Plan(steps=40, margin=1e6), seen.append).wrong == 2
