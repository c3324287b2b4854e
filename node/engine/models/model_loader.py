"""Loader of a model and its memory profile, piece by piece, which records the seconds of each part."""

import time
from collections.abc import Generator

from node.engine.models.load_state import LoadStep
from node.engine.models.load_times import LoadTimes
from node.engine.models.loaded_model import LoadedModel, load
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_manager import FilesChangedError
from node.engine.models.model_table import ModelTable
from node.engine.models.model_wiring import ModelWiring
from node.engine.models.profiler import Profiler
from node.models.catalogue import ModelCatalogue


class ModelLoader:
    """Loader of one model at a time, with its profile. `ModelManager` decides which model and when."""

    def __init__(
        self,
        table: ModelTable,
        catalogue: ModelCatalogue,
        wiring: ModelWiring,
        profiler: Profiler,
        times: LoadTimes,
    ) -> None:
        self._table = table
        self._catalogue = catalogue
        self._wiring = wiring
        self._profiler = profiler
        self._times = times

    def load_pieces(self, descriptor: ModelDescriptor) -> Generator[LoadStep | LoadedModel]:
        """Load a model, set its profile and record the seconds of each part.

        Yield the cost of each step before that step runs, and finally the model. Raise `FilesChangedError` if its files
        changed during the load. Exceptions of `loaded_model.load` propagate, as does `DeviceLost`. Any other failure
        of the profile is logged. To abort the load, close the generator.
        """
        begun = read = time.monotonic()
        try:
            for piece in load(descriptor, self._wiring.wire_loading_model):
                if isinstance(piece, LoadStep):
                    read = time.monotonic()
                else:
                    warm, first = time.monotonic(), self._profiler.estimate_seconds(descriptor) > 0
                    if not self._catalogue.is_unchanged(descriptor):
                        raise FilesChangedError(f"the files of {descriptor.name} changed during the load: retry")
                    yield from (LoadStep() for _ in self._profiler.probe(piece, alone=not self._table.loaded))
                    probe = time.monotonic() - warm if first else 0.0
                    self._times.record(descriptor.fingerprint, piece.weights, read - begun, warm - read, probe)
                yield piece
        finally:
            self._wiring.end_loading()
