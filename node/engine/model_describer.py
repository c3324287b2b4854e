"""Describer of models: collects the facts for `model_report` from the parts of the engine."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from node.engine.admission_rules import RequestLimits
from node.engine.memory.gate import MemoryGate
from node.engine.model_report import LoadFacts, ModelFacts, add_measurements, describe_loaded, describe_unloaded
from node.engine.models.load_times import LoadTimes
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_manager import ModelManager
from node.engine.models.model_table import ModelTable
from node.engine.models.profiler import Profiler
from node.models.catalogue import ModelCatalogue
from node.models.last_use import LastUse
from wire.capacity.batches import compute_waste_bytes
from wire.report import Memory, Model


class DescriberRules(NamedTuple):
    """Functions and settings of the describer."""

    limits: RequestLimits
    """Limits of requests."""
    features: Callable[[ModelDescriptor], tuple[str, ...]]
    """Function that returns the features that a model's requests may use (`wire.report.Model.features`)."""
    cause: Callable[[ModelDescriptor, float], str]
    """Function that returns why a model cannot be used at a monotonic time; empty if it can."""
    pinned: frozenset[str]
    """Names of preloaded models."""
    floor: int
    """Tokens of the smallest prefill chunk."""

    def collect_facts(self, descriptor: ModelDescriptor) -> ModelFacts:
        """Return the facts about a model that follow from the settings and from its tokenizer."""
        return ModelFacts(
            self.limits.get_max_row_tokens(descriptor),
            self.features(descriptor),
            descriptor.name in self.pinned,
            self.floor,
        )


class ModelDescriber:
    """Describer of models for reports and for admission. `now` is in monotonic seconds in all methods."""

    def __init__(
        self,
        table: ModelTable,
        manager: ModelManager,
        catalogue: ModelCatalogue,
        gate: MemoryGate,
        times: LoadTimes,
        profiler: Profiler,
        last_use: LastUse,
        rules: DescriberRules,
    ) -> None:
        self._table = table
        self._manager = manager
        self._catalogue = catalogue
        self._gate = gate
        self._times = times
        self._profiler = profiler
        self._last_use = last_use
        self._rules = rules

    def describe(self, descriptor: ModelDescriptor, now: float) -> Model:
        """Return the description of a model at the monotonic time `now`, without the fields that `describe_measured`
        adds."""
        facts = self._rules.collect_facts(descriptor)
        loaded_model = self._table.loaded.get(descriptor.name)
        if loaded_model is not None:
            return describe_loaded(loaded_model, descriptor, facts, self._gate.compute_narrowed_bytes, now)
        return describe_unloaded(descriptor, facts, self._collect_load_facts(descriptor, now))

    def _collect_load_facts(self, descriptor: ModelDescriptor, now: float) -> LoadFacts:
        manager, weights = self._manager, self._manager.get_size(descriptor)
        return LoadFacts(
            weights=weights,
            expected_seconds=self._times.estimate_seconds(
                descriptor.fingerprint, weights, self._profiler.estimate_seconds(descriptor)
            ),
            waste=compute_waste_bytes(self._gate.cap),
            loading=manager.is_loading(descriptor.name),
            progress=manager.get_progress(descriptor.name),
            cause=self._rules.cause(descriptor, now),
        )

    def describe_measured(self, descriptor: ModelDescriptor, memory: Memory, now: float) -> Model:
        """Return the description of a model for the report: with its last use (Unix seconds), and for a loaded model
        with the results of `add_measurements`.

        `memory` is the reading that determines the longest row and the largest batch. The last use of a loaded model is
        recorded, which can write a file (`LastUse.record`).
        """
        loaded_model, model = self._table.loaded.get(descriptor.name), self.describe(descriptor, now)
        if loaded_model is None:
            return replace(model, used=self._last_use.find(model.name))
        used = self._last_use.record(model.name, loaded_model.usage.compute_idle_seconds(now))
        return replace(add_measurements(model, loaded_model, memory, self._rules.limits.batch), used=used)

    def describe_all(self, memory: Memory, now: float) -> tuple[Model, ...]:
        """Return the descriptions of all models on disk for the report, including models that cannot be loaded.
        `memory` is the reading that determines their limits. Record the last use of loaded models
        (`describe_measured`)."""
        return tuple(self.describe_measured(found, memory, now) for found in self._catalogue.get_models().values())
