"""Accuracy of the fitted estimate of a forward's peak, on six architectures: `python -m tests.bench.engine.estimate`.

Each model is loaded as on a node, with its probe. Then chunks run in sizes and at positions that the probe did not use.
The predicted value is the sum of the active memory before, the KV of the chunk, and the estimate. The measured value is
MLX's peak. The output is one JSON object: architecture → ratios of predicted to measured, and of the transients alone.
"""

import json
import sys
from itertools import cycle, islice
from random import Random

import mlx.core as mx

from node.engine.kv.kv_cache import create_cache, measure_extent
from node.engine.models.loaded_model import LoadedModel, run_forward
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import LoadModel

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "lfm2", "qwen3_next", "qwen3_moe")
UNSEEN = (
    (48, 100),
    (96, 0),
    (96, 2000),
    (200, 700),
    (384, 0),
    (384, 3000),
    (700, 500),
    (768, 0),
    (180, 1200),
    (480, 4000),
    (640, 2600),
    (24, 300),
)
FILL = 500


def ratios(resident: LoadedModel, tokens: int, past: int, random: Random) -> tuple[float, float]:
    """Run one chunk; return predicted peak over measured peak, and estimate over transient."""
    ids = [random.randrange(resident.vocabulary) for _ in range(past + tokens)]
    cache = create_cache(resident.model)
    for begin in range(0, past, FILL):
        run_forward(resident.model, ids[begin : min(begin + FILL, past)], cache, last=False)
    before = measure_extent(cache)
    mx.clear_cache()
    mx.reset_peak_memory()
    ground = mx.get_active_memory()
    run_forward(resident.model, ids[past:], cache, last=False)
    after = measure_extent(cache)
    wrote = after.size - before.size
    peak = max(mx.get_peak_memory(), mx.get_active_memory())
    estimate = resident.estimator.estimate_chunk(tokens, past, grows=after.capacity > before.capacity)
    return (ground + wrote + estimate) / peak, estimate / max(1, peak - ground - wrote)


def main() -> None:
    """Load each model and measure its chunks."""
    found: dict[str, list[tuple[float, float]]] = {}
    for arch in sys.argv[1:] or ARCHITECTURES:
        driver = Driver(models.path(arch, trained=False, preset="deep"), profile="auto", prefill_step_size=512)
        driver.take(LoadModel(1, driver.default))
        driver.until(lambda driver=driver: driver.said[1])
        resident, random = driver.resident(), Random(1)
        found[arch] = [ratios(resident, tokens, past, random) for tokens, past in islice(cycle(UNSEEN), len(UNSEEN))]
        del driver, resident
    print(json.dumps(found))


if __name__ == "__main__":
    main()
