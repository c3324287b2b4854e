"""Table of the decode batches of all models. It also records whether the memory of the last step can be measured."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from node.engine.kv.kv_cache import Layers
from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row
from node.engine.scheduling.decode_batch import DecodeBatch

NO_BATCHES: Mapping[int, DecodeBatch[Row]] = {}


class BatchTable:
    """Decode batches by model and batch number (`CommitmentLedger.get_batch_number`).

    `loaded_models()` returns the loaded models by name. Iteration yields batches in the order of these models.
    """

    def __init__(self, loaded_models: Callable[[], Mapping[str, LoadedModel]]) -> None:
        self._loaded_models = loaded_models
        self._batches: dict[str, dict[int, DecodeBatch[Row]]] = {}
        self._sample, self._grew = 0, False

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __len__(self) -> int:
        return sum(map(len, self._batches.values()))

    def __iter__(self) -> Iterator[tuple[LoadedModel, int, DecodeBatch[Row]]]:
        """Yield all batches with their models and numbers. Batches that are removed during the iteration are
        skipped."""
        if not self._batches:
            return
        for loaded_model in list(self._loaded_models().values()):
            for number in list(self.get_batches(loaded_model)):
                batch = self.get(loaded_model, number)
                if batch is not None:
                    yield loaded_model, number, batch

    def get_batches(self, loaded_model: LoadedModel) -> Mapping[int, DecodeBatch[Row]]:
        """Return the decode batches of a model by batch number; an empty mapping if no row of the model decodes."""
        return self._batches.get(loaded_model.name, NO_BATCHES)

    def get(self, loaded_model: LoadedModel, number: int) -> DecodeBatch[Row] | None:
        """Return the decode batch `number` of a model; None if the model has no such batch."""
        return self.get_batches(loaded_model).get(number)

    def put(self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row]) -> None:
        """Set the batch of a model under this number, in place of an earlier batch."""
        self._batches.setdefault(loaded_model.name, {})[number] = batch

    def pop(self, loaded_model: LoadedModel, number: int) -> DecodeBatch[Row] | None:
        """Remove and return the decode batch `number` of a model; None if the model has no such batch."""
        batches = self._batches.get(loaded_model.name, {})
        batch = batches.pop(number, None)
        if not batches:
            self._batches.pop(loaded_model.name, None)
        return batch

    def view_row(self, model: str, row: Row) -> Layers | None:
        """Return a view of the cache of a row of the model with this name (`DecodeBatch.view`). Return None if the row
        does not decode, or if its layers cannot be viewed."""
        views = (batch.view(row) for batch in self._batches.get(model, NO_BATCHES).values())
        return next((view for view in views if view is not None), None)

    def count_rows(self) -> int:
        """Return the number of decoding rows of all models."""
        return sum(len(batch) for batches in self._batches.values() for batch in batches.values())

    def count_rows_by_key(self) -> Counter[str]:
        """Return the number of decoding rows of each API key."""
        return Counter(row.sequence.request.weighted_key.name for _, _, batch in self for row in batch.list_rows())

    def sum_step_seconds(self) -> float:
        """Return the expected seconds of one step of every batch in total; 0 while no row decodes."""
        return sum(
            loaded_model.stats.step_seconds * len(self.get_batches(loaded_model))
            for loaded_model in self._loaded_models().values()
        )

    def clear(self) -> None:
        """Release all batches, because the process ends."""
        self._batches.clear()

    # memory of a step

    def mark_step(self, mark: int, *, grew: bool) -> None:
        """Record the mark (`MlxPeakTracker.marks`) of the last decode step, and whether its caches grew."""
        self._sample, self._grew = mark, grew

    def invalidate_step(self) -> None:
        """Mark the memory of the last decode step as not measurable, because another call has allocated or freed memory
        since."""
        self._sample = 0

    def is_measurable(self, marks: int) -> bool:
        """Return whether the memory of the last step can be measured. `marks` is the current `MlxPeakTracker.marks`.

        Return False if another call has allocated or freed memory since that step. Return False as well if the caches
        grew in the step, because the bytes of their copies follow from the batch size."""
        return self._sample == marks and not self._grew
