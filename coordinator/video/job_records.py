"""Records of jobs and of measured memory on disk.

While changes cannot be written, `flush` fails, and open jobs continue.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from coordinator.state.store_errors import StoreError
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.lease_placement import get_profile
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey, get_profile_key
from coordinator.video.store import VideoStore
from router.placement.cluster_view import ClusterView

log = structlog.get_logger("coordinator.video")


class JobRecords:
    """Records in `store`, with the memory profiles that have been measured."""

    def __init__(self, store: VideoStore) -> None:
        self._store = store
        self._profiles = dict(store.profiles)

    @property
    def profiles(self) -> Mapping[VideoProfileKey, VideoMemoryProfile]:
        """Measured memory profiles, by package, version of the engine, and bits of the quantization."""
        return self._profiles

    def put_job(self, job: VideoJob) -> None:
        """Store a job in the background. `flush` reports a failed write."""
        with suppress(StoreError):
            self._store.put_job(job)

    def delete_job(self, job: str) -> None:
        """Delete the record of a job (id) in the background. `flush` reports a failed write."""
        with suppress(StoreError):
            self._store.delete_job(job)

    def add_peak(self, job: VideoJob, peak: int, view: ClusterView) -> None:
        """Add the measured peak of a job, in bytes, to the profile of its package, engine and bits.

        The profile is stored in the background. Do nothing if the peak is not above 0, or if the job's node in `view`
        does not have a usable package of the model.
        """
        package = next(
            (
                offered
                for node in view.nodes
                if node.id == job.node
                for offered in node.video.packages
                if offered.name == job.wanted.model and not offered.cause
            ),
            None,
        )
        if package is None or peak <= 0:
            return
        key = get_profile_key(package)
        profile = self._profiles[key] = get_profile(package, self._profiles).add_measurement(job.wanted.tokens, peak)
        log.info("video measured", package=key.package, engine=key.engine, peak=peak, base=profile.base)
        with suppress(StoreError):
            self._store.put_profile(key, profile)

    def raise_failure(self) -> None:
        """Raise `StoreError` if changes cannot be written (`VideoStore.raise_failure`)."""
        self._store.raise_failure()

    def count_unwritten(self) -> int:
        """Return the number of changes that wait for the disk: 0 while changes are written, 1 if writing has ended."""
        return self._store.count_unwritten()

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all changes before this call are on disk (`VideoStore.flush`).

        The future fails with `StoreError` if the changes cannot be written now. Raise `StoreError` at once if the
        database could not be opened for a change.
        """
        return self._store.flush()

    def call_when_stored(self, callback: Callable[[], object]) -> None:
        """Call `callback` once all earlier changes are on disk. If they cannot be written now, never call it."""

        def call(stored: asyncio.Future[None]) -> None:
            if stored.exception() is None:
                callback()

        with suppress(StoreError):
            self.flush().add_done_callback(call)

    def close(self) -> None:
        """Write pending changes and close the database. A failed write is only logged: call `flush` first."""
        self._store.close()
