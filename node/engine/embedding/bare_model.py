"""Loader of the layers of a decoder without its output layer.

A checkpoint of an embedding model names its weights as the complete model does, or as the layers alone do
(`MistralModel`). A checkpoint of the second kind has no output layer. Vectors do not need an output layer. It is
therefore left out, unless mlx-lm's class of the model requires it.
"""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.utils import load_model

from node.engine.kv.kv_cache import TextModel

Weights = dict[str, mx.array]
_PREFIX, _OUTPUT, _TIED = "model.", "lm_head.", "tie_word_embeddings"
_get_classes = cast(
    "Callable[..., tuple[Any, Any]]", inspect.signature(load_model).parameters["get_model_classes"].default
)


def load_bare_model(folder: Path) -> tuple[TextModel, dict[str, Any]]:
    """Return the model in a folder, with lazy weights, and its config. Leave out the output layer if the architecture
    allows that. Exceptions of mlx-lm for a faulty checkpoint propagate."""
    model, config = load_model(folder, lazy=True, model_config={_TIED: True}, get_model_classes=_get_bare_classes)
    return cast("TextModel", model), config


def _get_bare_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model class of an architecture, changed to rename its weights, and the class of its arguments."""
    model_class, arguments_class = _get_classes(config=config)
    can_tie = any(field.name == _TIED for field in dataclasses.fields(arguments_class))

    class BareModel(model_class):
        """Model whose checkpoint may lack the output layer and the prefix of its layers."""

        def sanitize(self, weights: Weights) -> Weights:
            """Rename the weights of the checkpoint (`rename_weights`), pass them through the `sanitize` of the original
            class if it has one, and return the result."""
            named = rename_weights(weights, without_output=can_tie)
            if not hasattr(model_class, "sanitize"):
                return named
            complete: Any = super()
            return complete.sanitize(named)

    return BareModel, arguments_class


def rename_weights(weights: Weights, *, without_output: bool) -> Weights:
    """Return weights by the names of the complete model: names of layers alone get the prefix `model.`.

    With `without_output`, leave out the weights of the output layer.
    """
    kept = {name: array for name, array in weights.items() if not (without_output and name.startswith(_OUTPUT))}
    if any(name.startswith((_PREFIX, _OUTPUT)) for name in kept):
        return kept
    return {_PREFIX + name: array for name, array in kept.items()}
