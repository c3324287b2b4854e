"""Report of a model: its description for the agent and for admission, from its state in memory. Pure."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from msgspec.structs import replace

from node.engine.models.model_descriptor import ModelDescriptor
from wire.capacity.arithmetic import compute_max_batch, compute_max_context, estimate_prefill_transient
from wire.report import Memory, Model, TransientModel

if TYPE_CHECKING:
    from node.engine.models.loaded_model import LoadedModel

ASSUMED_BYTES_PER_TOKEN = 4.0
"""Bytes of text per prompt token that are reported before a measurement."""


class ReportedTransients(TypedDict):
    """Fields of `wire.report.Model` about the transient memory of a model's forwards."""

    transient: int
    """Transient bytes of a forward over the engine's smallest prefill chunk, at the start of a prompt."""
    forward: TransientModel
    """Coefficients of the transient bytes of every forward; `floor` is the engine's smallest chunk in tokens."""


class ModelFacts(NamedTuple):
    """Facts about a model that its report takes from other parts of the engine."""

    context: int
    """Maximum tokens of a row, prompt and answer together."""
    features: tuple[str, ...]
    """Names of the features that requests for the model may use."""
    pinned: bool
    """Whether the model is preloaded."""
    floor: int
    """Tokens of the engine's smallest prefill chunk."""


class LoadFacts(NamedTuple):
    """Facts about the load of a model that is not loaded."""

    weights: int = 0
    """Bytes of the weights after the load."""
    expected_seconds: float = 0.0
    """Expected duration of the load, in seconds."""
    waste: int = 0
    """Bytes of padding that a decode batch may have under the cap in force."""
    loading: bool = False
    """Whether the load is in progress or queued."""
    progress: float = 0.0
    """Loaded share of the weights, 0 to 1."""
    cause: str = ""
    """Why the model cannot be loaded; empty if it can."""


def compute_transients(transient: TransientModel, floor: int) -> ReportedTransients:
    """Return the reported transients of a model: those of a chunk of `floor` tokens, and the coefficients `transient`.

    `floor` is the smallest prefill chunk of this engine.
    """
    return {"forward": replace(transient, floor=floor), "transient": estimate_prefill_transient(transient, floor, 0)}


def describe_unloaded(descriptor: ModelDescriptor, facts: ModelFacts, load: LoadFacts) -> Model:
    """Return the report of a model that is not loaded."""
    return Model(
        name=descriptor.name,
        fingerprint=descriptor.fingerprint,
        content=descriptor.content,
        quantization=descriptor.quantization,
        stored=descriptor.stored,
        removable=descriptor.removable,
        written=descriptor.written,
        loaded=False,
        weights=load.weights,
        kv_per_token=descriptor.kv.per_token,
        context=facts.context,
        load_seconds=load.expected_seconds,
        features=facts.features,
        kv_step=descriptor.kv.step,
        kv_fixed=descriptor.kv.fixed,
        kv_window=descriptor.kv.window,
        kv_window_per_token=descriptor.kv.window_per_token,
        kv_waste=load.waste,
        loading=load.loading,
        cause=load.cause,
        progress=load.progress,
        pinned=facts.pinned,
        **compute_transients(descriptor.forward, facts.floor),
    )


def describe_loaded(
    loaded_model: "LoadedModel", descriptor: ModelDescriptor, facts: ModelFacts, narrowed: Callable[[], int], now: float
) -> Model:
    """Return the report of a loaded model at the monotonic time `now`, with its measured speeds.

    `add_measurements` adds the results of memory measurements. `narrowed()` returns the bytes by which profiles narrow
    the margin.
    """
    kv, stats, rows = loaded_model.kv, loaded_model.stats, loaded_model.estimator.rows
    rested = loaded_model.usage.compute_idle_seconds(now)
    return Model(
        name=descriptor.name,
        fingerprint=descriptor.fingerprint,
        content=descriptor.content,
        quantization=descriptor.quantization,
        stored=descriptor.stored,
        removable=descriptor.removable,
        written=descriptor.written,
        loaded=True,
        weights=loaded_model.weights,
        kv_per_token=kv.per_token,
        context=facts.context,
        load_seconds=stats.load_seconds,
        prefill_speed=stats.prefill_speed.predict_speed(rested),
        decode_speed=stats.decode_speed.predict_speed(rested),
        bytes_per_token=stats.bytes_per_token or ASSUMED_BYTES_PER_TOKEN,
        features=facts.features,
        groups=loaded_model.ledger.list_groups(),
        kv_step=kv.step,
        kv_fixed=kv.fixed,
        kv_window=kv.window,
        kv_window_per_token=kv.window_per_token,
        kv_waste=kv.waste,
        covered_rows=rows,
        uncovered=narrowed() if rows else 0,
        pinned=facts.pinned,
        **compute_transients(loaded_model.estimator.transient, facts.floor),
    )


def add_measurements(model: Model, loaded_model: "LoadedModel", memory: Memory, batch: int) -> Model:
    """Return the report `model` of a loaded model with the results of memory measurements. The reading `memory`
    determines its longest row and largest batch. `batch` is the maximum number of rows that decode at once."""
    profile, estimator = loaded_model.stats.profile, loaded_model.estimator
    return replace(
        model,
        profiled=profile is not None,
        observed=estimator.highest,
        max_context=int(compute_max_context(memory, model) * (1.0 if profile is None else profile.share)),
        max_batch=compute_max_batch(memory, model, batch),
        residual=0 if profile is None else max(profile.residual, estimator.residual),
        covered=0 if profile is None else profile.chunk,
    )


def compute_longest_row(model: Model, loaded_model: "LoadedModel", memory: Memory, floor: int) -> int:
    """Return the longest row that the measured costs of a model allow under the reading `memory`, in tokens.

    `model` is the report of the model, which may still be loading. The current rows of the model do not count. `floor`
    is the smallest prefill chunk of the engine, in tokens.
    """
    transients = compute_transients(loaded_model.estimator.transient, floor)
    return compute_max_context(memory, replace(model, weights=loaded_model.weights, **transients))
