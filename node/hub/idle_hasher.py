"""Hash model files while the node is idle, so that copies of a model can be compared by content.

The downloader hashes pulled models as they arrive. This module hashes every other copy once, in a child process of low
priority that ends as soon as the node has work.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from host.private_files import resolve_home
from node.hub.child_messages import ChildProgress, VerifyOrder
from node.hub.digests import STORE_NAME, DigestStore, find_content, list_content_files
from node.hub.order_child import OrderChild
from node.models.folders import find_model_folders, find_snapshots, get_hub_folder
from node.settings import ModelSettings
from wire.frames.model_files import ModelOrderCode
from wire.units import MIB

CHECK_INTERVAL_SECONDS = 5.0
MIN_IDLE_CHECKS = 12
"""Consecutive checks that must find the node idle before a child starts: one minute at `CHECK_INTERVAL_SECONDS`."""
NEXT_SEARCH_CHECKS = 108
"""Idle checks before the next `MIN_IDLE_CHECKS` begin, after a failure or if no model is left to hash: nine minutes.

A check that finds the node busy ends this wait.
"""
MAX_BYTES_PER_SECOND = 500 * MIB
_OTHER_CAUSES = frozenset({ModelOrderCode.DISK_FULL, ModelOrderCode.INTERRUPTED})
"""Ends that say nothing about the files: the disk of the digests is full, or a signal ended the child."""

_FilesState = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of change (Unix nanoseconds) of each file."""

log = structlog.get_logger("node.hub.idle_hasher")


class IdleHasher:
    """Hasher of the models of this node whose content hash is unknown, one at a time, while the node is idle.

    `state` is the folder of the node's state, which has the digest store. `is_busy()` returns whether the node has
    work. `on_change()` is called when a model was hashed. `environment` are the variables that locate the Hugging Face
    cache. `interval` is the time between two checks in seconds.
    """

    def __init__(
        self,
        settings: ModelSettings,
        state: Path,
        is_busy: Callable[[], bool],
        on_change: Callable[[], None],
        environment: Mapping[str, str] = os.environ,
        interval: float = CHECK_INTERVAL_SECONDS,
    ) -> None:
        self._settings = settings
        self._store_file = state / STORE_NAME
        self._store = DigestStore(self._store_file)
        self._is_busy = is_busy
        self._on_change = on_change
        self._environment = environment
        self._interval = interval
        self._failed: dict[Path, _FilesState] = {}
        """State of the files of each folder whose files could not be hashed."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to check periodically whether the node is idle, unless `models.hash_when_idle` is off."""
        if self._settings.hash_when_idle:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop the checks.

        Cancel the child, and wait for its end, which takes at most about `order_child.TERMINATE_TIMEOUT_SECONDS`.
        """
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        idle_checks = 0
        while True:
            await asyncio.sleep(self._interval)
            idle_checks = 0 if self._is_busy() else idle_checks + 1
            if idle_checks < MIN_IDLE_CHECKS:
                continue
            try:
                folder = await asyncio.to_thread(self.find_unhashed)
                has_hashed = folder is not None and await self._hash(folder)
            except Exception as error:  # a lost network disk, or unknown files, which may raise any error
                log.warning("models not searched", why=f"{type(error).__name__}: {error}")
                has_hashed = False
            if not has_hashed:
                idle_checks = -NEXT_SEARCH_CHECKS

    def find_unhashed(self) -> Path | None:
        """Return the folder of a model whose files are not all hashed; None if there is none.

        The search skips folders without safetensors files, and folders whose files could not be hashed before and have
        not changed since. Such files may still be in the process of being copied. Raise `OSError` if a folder becomes
        unreadable during the search.
        """
        return next((folder for folder in self._list_folders() if self._is_unhashed(folder)), None)

    def _list_folders(self) -> Iterator[Path]:
        for top in self._settings.folders:
            yield from (folder for _, folder in find_model_folders(resolve_home(top)))
        if self._settings.use_huggingface_cache:
            yield from (folder for _, folder in find_snapshots(get_hub_folder(self._environment)))

    def _is_unhashed(self, folder: Path) -> bool:
        if not any(name.endswith(".safetensors") for name in list_content_files(folder)):
            return False
        return not find_content(folder, self._store) and self._failed.get(folder) != _read_state(folder)

    async def _hash(self, folder: Path) -> bool:
        """Hash a model, and cancel the hashing when the node has work. Return False only if the hashing failed."""
        order = VerifyOrder(
            folder=str(folder), digests=str(self._store_file), max_bytes_per_second=MAX_BYTES_PER_SECOND
        )
        state = await asyncio.to_thread(_read_state, folder)
        child = OrderChild("node.hub.verifier", order, _ignore_progress)
        run = asyncio.create_task(child.run())
        try:
            while not run.done():
                await asyncio.wait((run,), timeout=self._interval)
                if self._is_busy():
                    child.cancel()
        finally:
            child.cancel()
            end = await run
        if end.code == ModelOrderCode.COMPLETED:
            log.info("model hashed", folder=str(folder), content=end.content)
            self._on_change()
        elif end.code != ModelOrderCode.CANCELLED:
            log.warning("model not hashed", folder=str(folder), why=end.message)
            if end.code not in _OTHER_CAUSES:
                self._failed[folder] = state
            return False
        return True


def _read_state(folder: Path) -> _FilesState:
    """Return a value that changes when a file changes on which the content hash depends."""
    state: list[tuple[str, int, int]] = []
    for name in list_content_files(folder):
        with suppress(OSError):
            stat = (folder / name).stat()
            state.append((name, stat.st_size, stat.st_mtime_ns))
    return tuple(state)


def _ignore_progress(progress: ChildProgress) -> None:
    """Ignore the progress of the child."""
