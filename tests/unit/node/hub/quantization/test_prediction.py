"""Predicted disk and memory of a quantization."""

import pytest

from node.hub.quantization.prediction import (
    BASE_BYTES,
    LAYER_FACTOR,
    SHARD_BYTES,
    SIZE_MARGIN,
    StoredTensor,
    predict_cost,
)
from wire.units import GIB, MIB

WIDE = StoredTensor("model.layers.0.mlp.up_proj.weight", (1024, 4096), 8 * MIB)
NARROW = StoredTensor("model.layers.1.conv.weight", (1024, 3), 6144)
NORM = StoredTensor("model.norm.weight", (4096,), 8192)


@pytest.mark.parametrize(("bits", "share"), [(2, 2.5), (3, 3.5), (4, 4.5), (5, 5.5), (6, 6.5), (8, 8.5)])
def test_a_weight_takes_its_bits_and_half_a_bit_of_scale_and_bias(bits: int, share: float):
    assert predict_cost([WIDE], bits).stored == int(1024 * 4096 * share / 8 * SIZE_MARGIN)


def test_vectors_and_narrow_layers_stay_as_they_are():
    assert predict_cost([NARROW, NORM], 4).stored == int((6144 + 8192) * SIZE_MARGIN)


def test_the_memory_is_that_of_the_largest_layer_and_one_file():
    layers = [StoredTensor(f"model.layers.{n}.mlp.{k}.weight", (64, 64), 5 * MIB) for n in range(9) for k in range(4)]
    cost = predict_cost([*layers, NORM], 4)
    assert cost.memory == BASE_BYTES + LAYER_FACTOR * 20 * MIB + cost.stored


def test_the_memory_of_a_large_model_is_bounded_by_one_file():
    layers = [StoredTensor(f"model.layers.{n}.up.weight", (8192, 65536), GIB) for n in range(100)]
    assert predict_cost(layers, 4).memory == BASE_BYTES + LAYER_FACTOR * GIB + SHARD_BYTES


def test_all_experts_of_a_layer_count_as_one_layer():
    experts = [StoredTensor(f"model.layers.3.mlp.experts.{n}.up.weight", (64, 64), MIB) for n in range(128)]
    assert predict_cost(experts, 4).memory >= BASE_BYTES + LAYER_FACTOR * 128 * MIB


def test_fp8_is_unpacked_before_it_is_quantized():
    stored = StoredTensor("model.layers.0.up.weight", (1024, 4096), 4 * MIB, is_fp8=True)
    assert predict_cost([stored], 4) == predict_cost([StoredTensor(stored.name, stored.shape, 8 * MIB)], 4)


def test_a_model_without_weights_costs_the_process_only():
    assert predict_cost([], 4).memory == BASE_BYTES
