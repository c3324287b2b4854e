"""Models of a simulated node, with their states: in the catalogue, loading (one at a time), or in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from node.engine.kv.commitments import CommitmentLedger
from simulation.mac.hardware import Chip, compute_prefill_speed, estimate_step_seconds
from simulation.scenario import ModelSpec
from wire.capacity.batches import compute_waste_bytes
from wire.report import Model
from wire.units import parse_size

MIN_LOAD_SECONDS = 1e-6
"""Minimum duration of a load, in virtual seconds."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedModel:
    """Model in the catalogue of a simulated node, and its state there. Times are virtual, in seconds."""

    spec: ModelSpec
    model: Model
    """Constant part of the model in reports."""
    ledger: CommitmentLedger
    """Commitments of the model's requests."""
    chip: Chip
    """Chip of the node."""
    loaded: bool = False
    """Whether the model is in memory."""
    used: float = 0.0
    """Virtual time in seconds at which a request for this model was last admitted or ended; 0 before the first."""
    ready_at: float = 0.0
    """Virtual time in seconds at which the running load of this model ends; 0 if its load does not run."""
    loading: bool = False
    """Whether the model is being loaded, or waits until other loads have ended."""
    holds: int = 0
    """Number of requests for this model that have not ended."""

    @property
    def idle(self) -> bool:
        """Whether the model may be unloaded: it is loaded, and all of its requests have ended."""
        return self.loaded and not self.holds

    def add_request(self, now: float) -> None:
        """Count a request that was admitted at `now` (virtual seconds). The model is not unloaded before its end."""
        self.holds, self.used = self.holds + 1, now

    def remove_request(self, now: float) -> None:
        """Count the end of a request at `now` (virtual seconds)."""
        self.holds, self.used = self.holds - 1, now

    def request_load(self) -> None:
        """Mark the model as loading. `NodeModels.load` decides when its load starts."""
        self.loading = True

    def start_load(self, now: float) -> None:
        """Start the load at `now` (virtual seconds), and compute `ready_at`."""
        self.ready_at = now + max(MIN_LOAD_SECONDS, self.model.load_seconds)

    def end_load(self) -> None:
        """Record that the load has ended and the model is in memory."""
        self.loading, self.loaded, self.ready_at = False, True, 0.0

    def unload(self) -> None:
        """Remove the model from memory."""
        self.loaded = False

    def compute_progress(self, now: float) -> float:
        """Return the share of the weights, 0 to 1, that the load has read at `now` (virtual seconds).

        The result is 0 for a load that waits for another load.
        """
        if not self.ready_at:
            return 0.0
        total = self.model.load_seconds
        return 1.0 if total <= 0 else min(1.0, max(0.0, 1 - (self.ready_at - now) / total))

    def to_report(self, now: float) -> Model:
        """Return the model as a node reports it at `now` (virtual seconds). Only a loaded model has speeds."""
        groups = self.ledger.list_groups()
        if not self.loaded:
            progress = self.compute_progress(now) if self.loading else 0.0
            return replace(self.model, loading=self.loading, progress=progress, groups=groups)
        return replace(
            self.model,
            loaded=True,
            prefill_speed=compute_prefill_speed(self.chip, self.spec.active),
            decode_speed=1 / estimate_step_seconds(self.chip, self.spec.active, 1, 0.0),
            groups=groups,
        )


class NodeModels:
    """Models of one simulated node with a disk of `disk` bytes per second. `cap` is the node's cap in bytes.

    `now` is in virtual seconds in all methods.
    """

    def __init__(self, chip: Chip, disk: int, cap: int) -> None:
        self._chip = chip
        self._disk = disk
        self._cap = cap
        self._models: dict[str, SimulatedModel] = {}
        self._loading: list[SimulatedModel] = []
        self.loads = 0
        """Number of loads that were requested."""

    def __iter__(self) -> Iterator[SimulatedModel]:
        return iter(self._models.values())

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __getitem__(self, name: str) -> SimulatedModel:
        return self._models[name]

    def get(self, name: str) -> SimulatedModel | None:
        """Return the model with this name; None if the node does not have it."""
        return self._models.get(name)

    def add(self, spec: ModelSpec, *, loaded: bool) -> None:
        """Add a model to the catalogue. `loaded` is whether it is in memory from the start.

        Raise ValueError for an invalid size in `spec`.
        """
        weights = parse_size(spec.weights)
        model = Model(
            spec.name,
            f"sim:{spec.name}",
            weights=weights,
            kv_per_token=parse_size(spec.kv_per_token),
            transient=parse_size(spec.transient),
            context=spec.context,
            load_seconds=weights / self._disk,
            expected_output=spec.usual,
            kv_waste=compute_waste_bytes(self._cap),
        )
        ledger = CommitmentLedger(model.kv)
        self._models[spec.name] = SimulatedModel(spec=spec, model=model, ledger=ledger, chip=self._chip, loaded=loaded)

    def list_costs(self) -> dict[str, tuple[float, int]]:
        """Return the active parameters in billions and the KV bytes of a token, by model."""
        return {name: (model.spec.active, model.model.kv_per_token) for name, model in self._models.items()}

    def load(self, model: SimulatedModel, now: float) -> None:
        """Request the load of a model, which starts after all loads that were requested before.

        The model must not be in memory. Room for its weights is not checked. Do nothing if the model is loading.
        """
        if model.loading:
            return
        model.request_load()
        self._loading.append(model)
        self.loads += 1
        if len(self._loading) == 1:
            model.start_load(now)

    def estimate_load_seconds(self, model: SimulatedModel, now: float) -> float:
        """Return the virtual seconds from `now` until a model would be in memory if its load were requested now.

        Loads that were requested before are included. Return 0 for a model in memory.
        """
        if model.loaded:
            return 0.0
        loads = self._loading if model.loading else [*self._loading, model]
        return sum(
            load.ready_at - now if load.ready_at else load.model.load_seconds
            for load in loads[: loads.index(model) + 1]
        )

    def next_loaded_at(self) -> float | None:
        """Return the time at which the running load ends, in virtual seconds; None if no load runs."""
        return self._loading[0].ready_at if self._loading else None

    def end_load(self, now: float) -> SimulatedModel | None:
        """Mark the model whose load has ended at `now` as loaded, start the next load, and return the model.

        Return None if no load has ended.
        """
        if not self._loading or self._loading[0].ready_at > now:
            return None
        model = self._loading.pop(0)
        model.end_load()
        if self._loading:
            self._loading[0].start_load(now)
        return model

    def list_idle(self, keep: SimulatedModel | None) -> list[SimulatedModel]:
        """Return the models other than `keep` that may be unloaded (`idle`), least recently used first."""
        return sorted((one for one in self if one.idle and one is not keep), key=lambda one: one.used)

    def sum_loaded_bytes(self) -> int:
        """Return the bytes of the weights in memory."""
        return sum(one.model.weights for one in self if one.loaded)


def sum_weights(models: Iterable[SimulatedModel]) -> int:
    """Return the bytes of the weights of these models."""
    return sum(model.model.weights for model in models)
