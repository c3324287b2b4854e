"""Scan folders for models in daemon threads, because a lost network disk blocks every access to its folder."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from node.daemon_threads import start_call
from node.engine.models.model_descriptor import ModelDescriptor

UNREADABLE_SECONDS = 25.0
"""Duration of a scan in seconds after which the models of its folder are reported as unreadable."""


class FolderScan:
    """Scanner of the folder `place`, which calls `read` in a daemon thread.

    `read()` returns the models in the folder by name, and may block. `clock()` returns monotonic seconds.
    """

    def __init__(
        self,
        place: str,
        read: Callable[[], Mapping[str, ModelDescriptor]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._read = read
        self._clock = clock
        self._latest: Mapping[str, ModelDescriptor] = {}
        self._begun_at = 0.0
        self._call: Future[Mapping[str, ModelDescriptor]] | None = None

    def begin(self) -> Future[Mapping[str, ModelDescriptor]] | None:
        """Start a scan and return its future. Do nothing and return None while an earlier scan runs."""
        if self._call is not None and not self._call.done():
            return None
        self._begun_at = self._clock()
        self._call = start_call(self._read, "folder-scan")
        return self._call

    def get_models(self) -> Mapping[str, ModelDescriptor]:
        """Return the models of the latest complete scan by name; none before the first.

        If a newer scan has run for `UNREADABLE_SECONDS`, each model has a `cause` that names the folder. Raise the
        exception of `read` if the last scan failed.
        """
        if self._call is not None and self._call.done():
            self._latest = self._call.result()
        elif self._clock() - self._begun_at >= UNREADABLE_SECONDS:
            cause = f"{self._place} does not answer: check its disk, or its network mount"
            return {name: replace(model, cause=cause) for name, model in self._latest.items()}
        return self._latest


def scan_places(scans: Sequence[FolderScan], timeout_seconds: float) -> dict[str, ModelDescriptor]:
    """Scan all folders in parallel, and return their models by name. Of equal names, the first folder's model counts.

    The call blocks for at most `timeout_seconds`, and does not wait for scans that have begun earlier. A folder whose
    scan has not ended contributes the models of its last scan (`FolderScan.get_models`).
    """
    wait([call for call in [scan.begin() for scan in scans] if call is not None], timeout_seconds)
    models: dict[str, ModelDescriptor] = {}
    for scan in scans:
        models |= {name: model for name, model in scan.get_models().items() if name not in models}
    return models
