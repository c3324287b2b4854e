"""Order and amount of the memory that the engine frees, under readings of its models, prefixes and reserve."""

import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.memory import reserve
from node.engine.memory.footprint import release_free_memory
from node.engine.models.model_unloader import ModelUnloader
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import GenerationParams
from wire.report import Memory
from wire.units import GIB, MIB

BUFFERS = 32 * MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(models.path("llama"))
    return tmp_path


class Engine:
    """An engine with two idle models, cached prefixes and a reserve. Its unloader counts these bytes alone, under a
    ceiling of exactly the bytes held."""

    def __init__(self, folder: Path) -> None:
        self.driver = Driver(folder, max_batch_size=4, prefill_step_size=256, canary="1MiB")
        for name in ("a", "b"):
            self.driver.answer("hello", GenerationParams(temperature=0.0, max_tokens=2), model=name)
        for seconds in (2 * reserve.HEADROOM_BEFORE_REFILL_SECONDS, 3 * reserve.HEADROOM_BEFORE_REFILL_SECONDS):
            self.driver.engine.parts.emergency_reserve.maintain(time.monotonic() + seconds)
        release_free_memory()
        parts = self.driver.engine.parts
        self.table, self.prefixes, self.reserve = parts.models, parts.prefix_cache, parts.emergency_reserve
        assert self.prefixes.nbytes
        assert self.reserve.nbytes
        self.ceiling = self.cap = self.held
        self.releases = 0
        self.unloader = ModelUnloader(
            table=self.table,
            prefix_cache=self.prefixes,
            catalogue=parts.catalogue,
            spares=(self.reserve,),
            memory=lambda: Memory(self.cap, self.ceiling, 0, self.held, self.held),
            on_released=self.count_release,
            pinned=frozenset(),
            max_idle_seconds=0.0,
        )

    def count_release(self) -> None:
        self.releases += 1

    @property
    def held(self) -> int:
        """Return the bytes of models, cached prefixes and the reserve."""
        return sum(one.weights for one in self.table.loaded.values()) + self.prefixes.nbytes + self.reserve.nbytes

    def list_held(self) -> set[str]:
        """Return the names of all parts that take memory."""
        held = {"buffers": mx.get_cache_memory(), "reserve": self.reserve.nbytes, "prefixes": self.prefixes.nbytes}
        return {name for name, size in held.items() if size} | self.table.loaded.keys()


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(folder)


def fill_buffers() -> None:
    mx.set_cache_limit(2 * BUFFERS)
    held = mx.zeros((BUFFERS // 4,))
    mx.eval(held)
    del held
    assert mx.get_cache_memory() >= BUFFERS


def test_what_could_be_freed_counts_to_the_byte_and_is_not_freed(engine: Engine):
    fill_buffers()
    before, most = engine.list_held(), engine.held
    assert engine.unloader.can_free(most)
    assert not engine.unloader.can_free(most + 1)
    assert engine.unloader.can_free(most + 5, further=5)
    assert not engine.unloader.can_free(most + 6, further=5)
    assert engine.list_held() == before - {"buffers"}
    with engine.table.loaded["a"].usage.hold(), engine.table.loaded["b"].usage.hold():
        engine.ceiling += 10
        spare = engine.prefixes.nbytes + engine.reserve.nbytes
        assert engine.unloader.can_free(spare + 10), "models in use are not counted"
        assert not engine.unloader.can_free(spare + 11)


ALL = {"buffers", "reserve", "prefixes", "a", "b"}


@pytest.mark.parametrize(
    ("enough", "left"),
    [
        (lambda engine: True, ALL),
        (lambda engine: not mx.get_cache_memory(), ALL - {"buffers"}),
        (lambda engine: not engine.reserve.nbytes, {"prefixes", "a", "b"}),
        (lambda engine: not engine.prefixes.nbytes, {"a", "b"}),
        (lambda engine: len(engine.table.loaded) < 2, {"b"}),
    ],
)
def test_memory_is_reclaimed_in_order_until_it_is_enough(
    engine: Engine, enough: Callable[[Engine], bool], left: set[str]
):
    fill_buffers()
    engine.unloader.reclaim_memory(lambda: enough(engine))
    assert engine.list_held() == left
    assert engine.unloader.evictions == len({"a", "b"} - left)


def test_of_all_models_the_last_one_stays_where_only_the_margin_is_missing(engine: Engine):
    engine.unloader.reclaim_memory(lambda: False)
    assert engine.list_held() == {"b"}
    engine.cap = engine.ceiling + GIB  # other applications take memory of the cap
    engine.unloader.reclaim_memory(lambda: False)
    assert engine.list_held() == set()


def test_an_unloaded_model_takes_its_cached_prefixes_along_and_its_memory_is_looked_for(engine: Engine, folder: Path):
    weights = engine.table.loaded["a"].weights
    assert {entry.model for entry in engine.prefixes.entries} == {"a", "b"}
    engine.unloader.unload("a")
    assert {entry.model for entry in engine.prefixes.entries} == {"b"}
    assert engine.list_held() == {"reserve", "prefixes", "b"}
    assert engine.releases == 1
    assert engine.unloader.leak_check.weights == weights
    assert engine.unloader.leak_check.next_check_at is not None
    with pytest.raises(KeyError):
        engine.unloader.unload("a")
    for name in ("a", "b"):
        (folder / name).unlink()
    catalogue = engine.driver.engine.parts.catalogue
    catalogue.scan()
    assert [name in catalogue.get_models() for name in ("a", "b")] == [False, True], "a loaded model stays"


def test_at_the_end_models_in_use_are_unloaded_too(engine: Engine):
    with engine.table.loaded["a"].usage.hold():
        engine.unloader.close()
    assert engine.list_held() == set()
