"""Reaction to a node's proof that another coordinator of the cluster is newer."""

import asyncio
import contextlib
from pathlib import Path

import structlog

from coordinator.backup import generation_fence
from coordinator.backup.generation_fence import SupersededError, SupersededMark, build_moved_message

log = structlog.get_logger("coordinator.run")


class SupersededHandler:
    """Handler of a node's proof that another coordinator is newer: records the proof and stops this coordinator.

    `state` is the state folder. The handler sets `stop` to stop the coordinator.
    """

    def __init__(self, state: Path, stop: asyncio.Event) -> None:
        self._state = state
        self._stop = stop
        self.mark: SupersededMark | None = None
        """First proof of a node; None before it."""

    def handle(self, mark: SupersededMark) -> None:
        """Record the first proof in the state folder and stop the coordinator. Ignore further proofs.

        The coordinator also stops if the record cannot be written.
        """
        if self.mark is not None:
            return
        self.mark = mark
        log.error("superseded", generation=mark.generation, node=mark.node)
        with contextlib.suppress(OSError):  # the next start then detects it again
            generation_fence.record_superseded(self._state, mark)
        self._stop.set()

    def check(self) -> None:
        """Raise `SupersededError` if a node has proved that another coordinator is newer."""
        if self.mark is not None:
            raise SupersededError(build_moved_message(self.mark, self._state))
