"""Predict the disk space and the memory that a quantization takes, from the headers of the model's weights. Pure.

mlx-lm quantizes in groups of 64 weights along the last dimension. Each group has a scale and a bias of the type of the
unquantized weight. Layers of other widths stay unquantized.

The child quantizes one tensor after the other and writes a file when `SHARD_BYTES` are ready. Its peak is the sum of
`BASE_BYTES`, one file, and `LAYER_FACTOR` copies of the largest layer.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from wire.units import GIB, MIB

BITS = (2, 3, 4, 5, 6, 8)
"""Numbers of bits per weight to which MLX can quantize."""
GROUP_WEIGHTS = 64
"""Weights that share a scale and a bias."""
SHARD_BYTES = GIB
"""Bytes of quantized weights after which the child writes a file of the result."""
BASE_BYTES = 384 * MIB
"""Bytes of the process without weights: 81 MiB measured on Linux, and an allowance for Metal's libraries and buffers.
"""
LAYER_FACTOR = 3
"""Copies of the largest layer at the same time: as stored, stacked or unpacked, and in the type of the result."""
SIZE_MARGIN = 1.05
"""Factor on the predicted size, because some architectures keep single layers at more bits."""
FP8_FACTOR = 2
"""Bytes in bf16 for each byte in fp8."""
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a weight file, as the header of the file describes it."""

    name: str
    shape: tuple[int, ...]
    size: int
    """Bytes on the disk."""
    is_fp8: bool = False
    """Whether the weights are stored in fp8, which is converted first."""

    @property
    def unpacked(self) -> int:
        """Bytes of the tensor in memory: in bf16 if it is stored in fp8, else as on the disk."""
        return self.size * FP8_FACTOR if self.is_fp8 else self.size


@dataclass(frozen=True, slots=True)
class QuantizationCost:
    """Predicted cost of a quantization, in bytes."""

    stored: int
    """Size of the quantized weights."""
    memory: int
    """Highest footprint of the process."""


def predict_cost(tensors: Iterable[StoredTensor], bits: int) -> QuantizationCost:
    """Return the predicted cost of a quantization to `bits` bits per weight. `tensors` are all tensors of the model."""
    layers, stored = Counter[str](), 0
    for tensor in tensors:
        match = _LAYER.match(tensor.name)
        layers[match.group(1) if match else tensor.name] += tensor.unpacked
        stored += _predict_size(tensor, bits)
    stored = int(stored * SIZE_MARGIN)
    largest = max(layers.values(), default=0)
    return QuantizationCost(stored, BASE_BYTES + LAYER_FACTOR * largest + min(stored, SHARD_BYTES))


def _predict_size(tensor: StoredTensor, bits: int) -> int:
    """Return the bytes of a tensor in the result."""
    count = 1
    for dimension in tensor.shape:
        count *= dimension
    if len(tensor.shape) < 2 or tensor.shape[-1] % GROUP_WEIGHTS:
        return tensor.unpacked
    scales = 2 * tensor.unpacked // GROUP_WEIGHTS
    return count * bits // 8 + scales
