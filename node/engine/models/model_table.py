"""Table of the models in memory: the loaded models by name, and the load in progress, with their known and reserved
bytes."""

from collections.abc import Iterable, Mapping

from node.engine.models.load_state import ModelLoad
from node.engine.models.loaded_model import LoadedModel


class ModelTable:
    """Models in memory. The model manager writes the load in progress; `ModelUnloader` removes models."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedModel] = {}
        self._load: ModelLoad | None = None

    @property
    def loaded(self) -> Mapping[str, LoadedModel]:
        """Loaded models by name."""
        return self._loaded

    @property
    def load(self) -> ModelLoad | None:
        """Load in progress; None if there is none."""
        return self._load

    def put(self, loaded_model: LoadedModel) -> None:
        """Add a loaded model, in place of a loaded model with the same name."""
        self._loaded[loaded_model.name] = loaded_model

    def remove(self, name: str) -> LoadedModel:
        """Remove and return a loaded model. Raise `KeyError` if it is not loaded."""
        return self._loaded.pop(name)

    def set_load(self, load: ModelLoad | None) -> None:
        """Replace the load in progress by its next state; None at its end."""
        self._load = load

    # bytes

    def sum_weights(self) -> int:
        """Return the bytes of the weights of all loaded models."""
        return sum(loaded_model.weights for loaded_model in self._loaded.values())

    def get_weights(self, name: str) -> int:
        """Return the bytes of a model's weights that are in memory, even during its load; 0 if there are none."""
        loaded_model = self._loaded.get(name)
        if loaded_model is not None:
            return loaded_model.weights
        return self._load.loaded_bytes if self._load is not None and self._load.name == name else 0

    def compute_known_bytes(self) -> int:
        """Return the known bytes in memory: the loaded bytes of weights, and the stored KV bytes of all rows."""
        rows = sum(
            loaded_model.weights + loaded_model.ledger.compute_stored_bytes() for loaded_model in self._loaded.values()
        )
        return rows + (0 if self._load is None else self._load.loaded_bytes)

    def compute_reserved_bytes(self) -> int:
        """Return the sum of the committed bytes of all rows that are not stored yet, and of the weights still to
        load."""
        reserved = sum(loaded_model.ledger.compute_reserved_bytes() for loaded_model in self._loaded.values())
        return reserved + (0 if self._load is None else self._load.bytes_left)

    # measurements

    def compute_residual(self, floor: int) -> int | None:
        """Return the worst residual of all loaded models in bytes (`compute_worst_residual`).

        `floor` is the smallest prefill chunk of this engine in tokens. Return None if no model is loaded, or if a model
        was not measured up to that chunk.
        """
        return compute_worst_residual(self._loaded.values(), floor)


def compute_worst_residual(loaded_models: Iterable[LoadedModel], floor: int) -> int | None:
    """Return the worst residual of these models in bytes, in their profiles or since then. A residual is the largest
    number of bytes by which a forward exceeded its estimate.

    `floor` is the smallest prefill chunk in tokens. Return None without models, or if a model has no profile that
    covers a chunk of `floor` tokens. If the context of a model is shorter, its profile must cover the whole context.
    """
    models = list(loaded_models)
    profiles = [(loaded_model.stats.profile, loaded_model.descriptor.context) for loaded_model in models]
    measured = [
        profile.residual
        for profile, context in profiles
        if profile is not None and profile.chunk >= min(floor, context)
    ]
    if not profiles or len(measured) < len(profiles):
        return None
    return max(*measured, *(loaded_model.estimator.residual for loaded_model in models))
