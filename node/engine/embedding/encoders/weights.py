"""Weights of an encoder by their names in the checkpoint, and the layers that use them."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

PREFIXES = ("", "bert.", "roberta.", "model.")
"""Prefixes of the names of an encoder within a larger model."""
_OLDER = {".gamma": ".weight", ".beta": ".bias"}
"""Suffixes of normalization weights in older checkpoints, and the suffixes that replace them."""


class EncoderWeightsError(ValueError):
    """Error: a checkpoint lacks a weight of its encoder, or has too few rows of an embedding matrix."""


class EncoderWeights:
    """Weights of an encoder, chosen from the weights of a checkpoint, and the layers that use them.

    `arrays` are the weights of the checkpoint by name. `names` are the names that the encoder uses; an optional name
    ends with a question mark. `quantization` has the bits and the group size of quantized weights; None if none are
    quantized. Raise `EncoderWeightsError` for a missing weight.
    """

    def __init__(
        self, arrays: Mapping[str, mx.array], names: Iterable[str], quantization: tuple[int, int] | None
    ) -> None:
        self._quantization = quantization
        found: dict[str, mx.array] = {}
        for name in names:
            bare = name.removesuffix("?")
            array = next((arrays[prefix + bare] for prefix in PREFIXES if prefix + bare in arrays), None)
            if array is None and bare == name:
                raise EncoderWeightsError(f"its checkpoint has no weight {name}")
            found |= {} if array is None else {bare: array}
        self.arrays = found
        """Weights that the encoder uses, by name without a prefix of `PREFIXES`."""

    def check_rows(self, name: str, rows: int) -> None:
        """Raise `EncoderWeightsError` if the embedding matrix `name` has fewer than `rows` rows, because MLX does not
        check indices."""
        found = self.arrays[f"{name}.weight"].shape[0]
        if found < rows:
            raise EncoderWeightsError(f"its checkpoint has {found} rows of {name}, its config needs {rows}")

    def take_rows(self, name: str, ids: mx.array) -> mx.array:
        """Return the rows of the embedding matrix `name` with the indices `ids`, dequantized. The result has the shape
        of `ids` and one more dimension, the features."""
        weight = self.arrays[f"{name}.weight"]
        if f"{name}.scales" not in self.arrays or self._quantization is None:
            return weight[ids]
        bits, group = self._quantization
        scales, biases = self.arrays[f"{name}.scales"][ids], self.arrays[f"{name}.biases"][ids]
        return mx.dequantize(weight[ids], scales, biases, group_size=group, bits=bits)

    def apply_linear(self, name: str, states: mx.array) -> mx.array:
        """Return the output, shape (…, outputs), of the linear layer `name` for `states`, shape (…, inputs).

        The weights of a quantized layer stay quantized in memory.
        """
        weight, bias = self.arrays[f"{name}.weight"], self.arrays.get(f"{name}.bias")
        if f"{name}.scales" in self.arrays and self._quantization is not None:
            bits, group = self._quantization
            scales, biases = self.arrays[f"{name}.scales"], self.arrays[f"{name}.biases"]
            states = mx.quantized_matmul(states, weight, scales, biases, transpose=True, group_size=group, bits=bits)
        else:
            states = states @ weight.T
        return states if bias is None else states + bias

    def normalize(self, name: str, states: mx.array, epsilon: float) -> mx.array:
        """Return `states`, shape (…, features), normalized over their features by the layer `name`.

        `epsilon` is added to the variance.
        """
        return mx.fast.layer_norm(states, self.arrays[f"{name}.weight"], self.arrays.get(f"{name}.bias"), epsilon)


def list_layer_names(name: str, *, bias: bool | None = True) -> list[str]:
    """Return the names of the weights of a layer, including the optional weights of its quantization.

    An optional name ends with a question mark. `bias`: whether the layer has a bias; None: the bias is optional.
    """
    names = [f"{name}.weight", f"{name}.scales?", f"{name}.biases?"]
    return names if bias is False else [*names, f"{name}.bias" if bias else f"{name}.bias?"]


def read_arrays(folder: Path) -> dict[str, mx.array]:
    """Return the lazy weights of all files `model*.safetensors` in a folder, by name. Older names of normalization
    weights are replaced. Exceptions of MLX for faulty files propagate."""
    arrays: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        arrays |= cast("dict[str, mx.array]", mx.load(str(file)))
    return {_rename(name): array for name, array in arrays.items()}


def read_quantization(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bits and the group size of quantized weights from a parsed `config.json`; None if it has no entry.

    Raise `KeyError`, `TypeError` or `ValueError` for an entry without these numbers.
    """
    found: object = config.get("quantization")
    if not isinstance(found, dict):
        return None
    parts = cast("dict[str, Any]", found)
    return int(parts["bits"]), int(parts["group_size"])


def _rename(name: str) -> str:
    end = next((end for end in _OLDER if name.endswith(end)), "")
    return name.removesuffix(end) + _OLDER[end] if end else name


def apply_gelu(states: mx.array) -> mx.array:
    """Apply the Gaussian error linear unit (GELU, exact form with the error function) to each number in `states`."""
    return states * (1 + mx.erf(states / math.sqrt(2))) / 2


def compute_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """Return the attention output of all heads, shape (texts, tokens, features). The inputs have the shape (texts,
    heads, tokens, size). `mask` is True where a token may attend to another; None: everywhere."""
    texts, heads, tokens, size = queries.shape
    mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=size**-0.5, mask=mask)
    return mx.reshape(mx.transpose(mixed, (0, 2, 1, 3)), (texts, tokens, heads * size))


def split_heads(states: mx.array, heads: int) -> mx.array:
    """Split the features by head: reshape (texts, tokens, features) to (texts, heads, tokens, size)."""
    texts, tokens, features = states.shape
    return mx.transpose(mx.reshape(states, (texts, tokens, heads, features // heads)), (0, 2, 1, 3))
