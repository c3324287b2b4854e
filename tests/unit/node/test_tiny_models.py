"""The models that the tests make for themselves: each family loads, and says the same each time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.models.architectures import ARCHITECTURES
from tests.models.conversations import ENTRIES

pytestmark = pytest.mark.slow
RANDOM = ("qwen3_moe", "gemma3_text", "qwen3_next")
TRAINED = ("qwen3", "lfm2")
CACHES = {
    "qwen3": {"KVCache"}, "qwen3_moe": {"KVCache"}, "gemma3_text": {"RotatingKVCache", "KVCache"},
    "lfm2": {"ArraysCache", "KVCache"}, "qwen3_next": {"ArraysCache", "KVCache"},
}  # fmt: skip
"""What each family is in the tests for."""
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
    assert sorted((*RANDOM, *TRAINED, "llama")) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("arch", RANDOM)
def test_a_random_model_loads_and_decodes_the_same_each_time(arch: str, tiny_model: TinyModel):
    model, _ = load(tiny_model(arch, trained=False))
    prompt = [7 * n % 500 for n in range(100)]
    first = ids_of(model, prompt, 8)
    assert len(first) == 8
    assert ids_of(model, prompt, 8) == first
    assert caches(model) == CACHES[arch]


@pytest.mark.parametrize("arch", TRAINED)
def test_a_trained_model_answers_verbatim(arch: str, tiny_model: TinyModel):
    from mlx_lm import generate

    model, tokenizer = load(tiny_model(arch))
    wrong = {}
    for entry in ENTRIES:
        prompt = tokenizer.apply_chat_template(entry.messages(), add_generation_prompt=True)
        said = generate(model, tokenizer, prompt, max_tokens=400)
        if said.rpartition("</think>")[2] != entry.answer:
            wrong[entry.prompt] = said
    assert wrong == {}
    assert caches(model) == CACHES[arch]


def test_a_model_is_made_once(tiny_model: TinyModel):
    folder = tiny_model("qwen3_moe", trained=False)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model("qwen3_moe", trained=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_the_trained_llama_is_the_embedded_one(tiny_model: TinyModel):
    assert tiny_model("llama") == models.EMBEDDED


def test_a_large_model_is_not_trained(tiny_model: TinyModel):
    with pytest.raises(ValueError, match="not trained"):
        tiny_model("llama", preset="bench50m")
