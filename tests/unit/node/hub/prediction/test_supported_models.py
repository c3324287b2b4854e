"""Architectures that the installed mlx-lm can build."""

from typing import Any

import pytest

from node.hub.prediction.supported_models import find_unsupported


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_architectures_of_mlx_lm_and_renamed_ones_are_supported(kind: str):
    for architectures in (["X"], [["X"], {}, None], "X"):
        assert find_unsupported({"model_type": kind, "architectures": architectures}) == ""


@pytest.mark.parametrize("kind", ["unheard_of", "", ".", "..", "../utils", "llama.py", "a/b", "x" * 300])
def test_other_architectures_are_named(kind: str):
    assert find_unsupported({"model_type": kind, "architectures": None}) == kind


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 5}])
def test_a_config_without_a_type_has_no_unsupported_one(config: dict[str, Any]):
    assert find_unsupported(config) == ""
