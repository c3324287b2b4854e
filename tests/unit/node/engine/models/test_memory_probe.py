"""Meter of the peak memory of a measured forward."""

import os

import mlx.core as mx
import pytest

from node.engine.kv.kv_cache import evaluate
from node.engine.memory.footprint import MlxPeakTracker, release_free_memory
from node.engine.models.memory_probe import ForwardPeak
from node.memory.sensor import open_sensor
from wire.units import MIB


def held(size: int) -> mx.array:
    array = mx.zeros((size // 4,)) + 1
    evaluate(array)
    return array


def test_memory_of_the_forward_before_hides_no_part_of_a_peak():
    release_free_memory()
    late = [held(64 * MIB)]

    def fall() -> None:
        late.clear()
        release_free_memory()

    sensor = open_sensor(os.getpid())
    peak = ForwardPeak(MlxPeakTracker(), sensor, fall)
    peak.mark()
    fall()
    array = held(64 * MIB)
    assert peak.measure_charged_bytes() == pytest.approx(array.nbytes, abs=16 * MIB)
