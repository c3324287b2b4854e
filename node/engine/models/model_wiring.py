"""Wiring of the weights in memory: the wired limit follows the loaded models and the load in progress."""

from collections.abc import Callable

from node.engine.memory.footprint import WiredLimit
from node.engine.models.model_table import ModelTable


class ModelWiring:
    """Setter of the wired limit for the models in memory. `forget_peak()` resets the recent peak of the memory."""

    def __init__(self, limit: WiredLimit, table: ModelTable, forget_peak: Callable[[], None]) -> None:
        self.limit = limit
        self._table = table
        self._forget_peak = forget_peak
        self._loading_bytes = 0

    def rewire(self) -> None:
        """Set the wired limit for the weights in memory, including those of a load. Do nothing if their size has not
        changed.

        With Metal, free MLX's free buffers first. A limit that MLX refuses is logged (`WiredLimit.apply`).
        """
        self.limit.apply(self._loading_bytes + self._table.sum_weights())

    def wire_loading_model(self, weights: int) -> None:
        """Add `weights` bytes of the load in progress to the wired limit. Must be called when all its weights are in
        memory, before its first forward."""
        self._loading_bytes = weights
        self.rewire()

    def end_loading(self) -> None:
        """Stop counting the weights of a load that has ended: the model is loaded or released. The wired limit changes
        at the next `rewire`."""
        self._loading_bytes = 0

    def on_released(self) -> None:
        """Reset the recent peak, because memory was freed, and set the wired limit for the models that are still
        loaded."""
        self._forget_peak()
        self.rewire()
