"""The wired limit of the engine: the decision as a table, and the engine over a Metal that only records."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from node.engine.memory.footprint import MetalMemory, WiredLimit
from node.engine.memory.wired_limit import MAX_METAL_SHARE, MIN_WEIGHT_BYTES, WireMode, compute_wired_bytes
from node.engine.models.loaded_model import LoadStep, load
from node.models.catalogue import ModelCatalogue
from node.settings import ModelSettings
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import Finished, LoadModel, MemoryLimits, ReclaimMemory, Refusal, UnloadModel
from wire.refusals import RefusalCode
from wire.units import GIB, MIB

SIZES = st.integers(0, 2**41)
LIMIT = 80 * GIB
PAGE = 16 * 1024


@pytest.mark.parametrize(
    ("wire", "weights", "limit", "size"),
    [
        ("auto", 85, 107.52, 85),  # 106 billion parameters in 6 bits on a Mac with 128 GiB
        ("auto", 80, 107.52, 0),
        ("auto", 42, 51.84, 42),  # 80 billion in 4 bits on one with 64
        ("auto", 19, 24.96, 0),  # 35 billion in 4 bits on one with 32: the pair that panicked
        ("auto", 24, 24.96, 0),
        ("auto", 9, 11.84, 0),
        ("auto", 226, 384, 0),
        ("auto", 32, 42, 32),
        ("auto", 31.99, 40, 0),
        ("auto", 0, 107.52, 0),
        ("auto", 110, 107.52, 107.52),
        ("auto", 85, 0, 0),  # without Metal
        ("on", 1, 107.52, 1),
        ("on", 0, 107.52, 0),
        ("on", 110, 107.52, 107.52),
        ("on", 1, 0, 0),
        ("off", 85, 107.52, 0),
    ],
)
def test_what_is_wired(wire: str, weights: float, limit: float, size: float):
    weigh = int(weights * GIB)
    assert compute_wired_bytes(WireMode(wire), weigh, weigh, int(limit * GIB)) == int(size * GIB)


def test_all_that_the_weights_take_is_wired_in_whole_pages_and_no_more():
    assert compute_wired_bytes(WireMode.ON, 40 * GIB, 40 * GIB + 5 * MIB, LIMIT) == 40 * GIB + 5 * MIB


@given(st.sampled_from(WireMode), SIZES, SIZES, SIZES)
def test_it_is_never_above_metals_limit_and_auto_never_wires_what_is_small(
    wire: WireMode, weights: int, active: int, limit: int
):
    size = compute_wired_bytes(wire, weights, active, limit)
    assert 0 <= size <= min(active, limit)
    assert not size or wire is not WireMode.OFF
    assert not size or wire is WireMode.ON or (weights >= MIN_WEIGHT_BYTES and weights > MAX_METAL_SHARE * limit)


class Recording:
    """A stand-in for Metal: the limits that were set, and MLX's memory at those moments. `before`: leftovers of other
    tests."""

    def __init__(self) -> None:
        gc.collect()
        self.before = mx.get_active_memory()
        self.set: list[tuple[int, int]] = []
        self.free: list[int] = []
        self.metal = MetalMemory(LIMIT, self._record)

    def _record(self, size: int) -> None:
        self.set.append((size, mx.get_active_memory()))
        self.free.append(mx.get_cache_memory())

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.set]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Driver, Recording]]:
    """Return an engine over two models, a and b, that believes that it runs on Metal."""
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(models.path("llama"))

    def make(wire: str, folder: Path = tmp_path) -> tuple[Driver, Recording]:
        recording = Recording()
        return Driver(folder, wire=wire, metal=lambda: recording.metal, prefix_cache_size="off"), recording

    return make


def ordered(driver: Driver, kind: type[LoadModel | UnloadModel], model: str) -> Finished | Refusal:
    driver.number += 1
    driver.take(kind(driver.number, model))
    end = driver.end(driver.number)
    assert isinstance(end, Finished | Refusal)
    return end


def weights_of(driver: Driver, *names: str) -> int:
    return sum(model.weights for model in driver.engine.report(0.0).models if model.name in names)


def test_each_set_of_models_is_wired_once_and_a_lease_or_a_request_moves_nothing(
    made: Callable[..., tuple[Driver, Recording]],
):
    driver, seen = made("on")
    assert isinstance(ordered(driver, LoadModel, "a"), Finished)
    (one,) = seen.set
    weights = weights_of(driver, "a")
    assert one[0] == one[1], "all that is there"
    assert weights <= one[0] - seen.before < weights + MIB, "that is the weights in whole pages, and nothing else yet"
    report = driver.engine.report(0.0)
    assert (report.metal_limit, report.wired) == (LIMIT, one[0])
    for number, leases in enumerate((0, 2 * GIB, 7 * GIB, 0), 1):
        driver.take(MemoryLimits(8 * GIB, 8 * GIB - leases, 64 * MIB, "leases", leases=leases, number=number))
        driver.take(ReclaimMemory(number, GIB))
    numbers = [driver.ask("Hello!", model="a") for _ in range(2)]
    assert all(isinstance(driver.end(number), Finished) for number in numbers)
    assert len(seen.set) == 1
    assert isinstance(ordered(driver, LoadModel, "b"), Finished)
    assert len(seen.set) == 2
    assert seen.sizes[1] >= weights_of(driver, "a", "b")
    ordered(driver, UnloadModel, "a")
    assert len(seen.set) == 3
    assert weights_of(driver, "b") <= seen.sizes[2] < seen.sizes[1]
    ordered(driver, UnloadModel, "b")
    assert seen.sizes[3:] == [0]
    assert driver.engine.report(0.0).wired == 0


def test_the_wired_limit_ignores_buffers_and_caches():
    recording = Recording()
    wiring = WiredLimit(WireMode.ON, lambda: recording.metal)
    held = [mx.ones((PAGE,)), mx.ones((MIB,))]
    mx.eval(held)
    held.pop()
    assert mx.get_cache_memory() > 0
    wiring.apply(MIB)
    assert recording.free == [0], "free buffers would take the place of weights"
    held.append(mx.ones((4 * MIB,)))
    mx.eval(held)
    wiring.apply(MIB)
    assert len(recording.set) == 1
    wiring.apply(2 * MIB)
    assert len(recording.set) == 2
    assert recording.sizes[1] >= recording.sizes[0] + 4 * MIB
    del held


@pytest.mark.parametrize("wire", ["off", "auto"])
def test_without_wiring_mlx_gets_no_wired_limit(made: Callable[..., tuple[Driver, Recording]], wire: str):
    driver, seen = made(wire)
    for name in ("a", "b"):
        ordered(driver, LoadModel, name)
    driver.end(driver.ask("Hello!", model="b"))
    for name in ("a", "b"):
        ordered(driver, UnloadModel, name)
    assert seen.set == []
    assert (driver.engine.report(0.0).metal_limit, driver.engine.report(0.0).wired) == (LIMIT, 0)


def test_without_metal_nothing_is_known_and_nothing_set(made: Callable[..., tuple[Driver, Recording]], tmp_path: Path):
    driver = Driver(tmp_path, wire="on")
    ordered(driver, LoadModel, "a")
    if not mx.metal.is_available():
        assert (driver.engine.report(0.0).metal_limit, driver.engine.report(0.0).wired) == (0, 0)


def test_the_weights_are_wired_before_the_first_forward(tmp_path: Path):
    (tmp_path / "a").symlink_to(models.path("llama"))
    library = ModelCatalogue(ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False))
    library.scan()
    found = library.find("a")
    assert found is not None
    told: list[tuple[int, int]] = []
    mx.clear_cache()
    mx.reset_peak_memory()
    pieces = list(load(found, lambda weights: told.append((weights, mx.get_peak_memory()))))
    ((weights, peak),) = told
    assert weights == found.weights == max(piece.bytes_left for piece in pieces if isinstance(piece, LoadStep))
    assert mx.get_peak_memory() > peak, "what a forward takes came later"


def test_a_load_that_breaks_after_its_weights_were_wired_leaves_nothing_wired(
    made: Callable[..., tuple[Driver, Recording]], tmp_path: Path
):
    folder = tmp_path / "more"
    shutil.copytree(models.path("llama"), folder / "broken")
    config = json.loads((folder / "broken" / "config.json").read_text())
    (folder / "broken" / "config.json").write_text(json.dumps({**config, "rope_theta": "little"}))
    driver, seen = made("on", folder)
    refusal = ordered(driver, LoadModel, "broken")
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.LOAD_FAILED
    assert [bool(size) for size in seen.sizes] == [True, False]
    assert driver.engine.report(0.0).wired == 0


def test_a_limit_that_mlx_refuses_is_a_warning_and_the_next_set_is_tried_again():
    refused: list[int] = []

    def refuse(size: int) -> None:
        refused.append(size)
        raise ValueError("[metal::set_wired_limit] larger than the maximum working set size")

    with structlog.testing.capture_logs() as logs:
        wiring = WiredLimit(WireMode.ON, lambda: MetalMemory(1, refuse))
        held = mx.ones((PAGE,))
        mx.eval(held)
        for weights in (MIB, MIB, 2 * MIB):
            wiring.apply(weights)
    assert (wiring.wired, refused) == (0, [1, 1])
    assert [line["event"] for line in logs] == ["metal", "not wired", "not wired"]
    assert "larger than" in logs[1]["error"]
    del held
