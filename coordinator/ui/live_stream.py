"""Live updates of open pages: sections of the pool's state, at most twice a second and only when they change.

One task checks the pool for all viewers, and only while there are viewers. Each viewer receives the newest state when
its last write has completed. A slow viewer misses intermediate states, but never the newest one, and has no queue.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec
import structlog

log = structlog.get_logger("coordinator.ui")

POLL_INTERVAL_SECONDS = 0.5
"""Seconds between two checks of the pool for changes."""
KEEPALIVE_SECONDS = 15.0
"""Seconds without changes after which a comment is sent. Proxies and the page check the connection by it."""
MAX_VIEWERS = 32
"""Maximum number of concurrent streams to open pages."""


class LiveStream:
    """Source of server-sent events for open pages, shared by all viewers.

    `sections()` returns the current state: complete sections that can be encoded as JSON, by the name of their event.
    """

    def __init__(self, sections: Callable[[], Mapping[str, object]]) -> None:
        self._sections = sections
        self._encoded: dict[str, bytes] = {}
        self._changed: dict[str, int] = {}
        self._checks = 0
        self._checked = asyncio.Event()
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        """Whether the maximum number of viewers is reached."""
        return self._viewers >= MAX_VIEWERS

    async def wait_stopped(self) -> None:
        """Wait until the task that checks the pool has ended. The task ends after the last viewer has disconnected."""
        if self._task is not None:
            await self._task

    async def stream_events(self, is_authorized: Callable[[], bool], *, follow: bool = True) -> AsyncGenerator[bytes]:
        """Yield server-sent events for one viewer while `is_authorized()` is true: all sections, then changed ones.

        Without `follow`, yield only the current state. The caller must check `full` first.
        """
        self._viewers += 1
        try:
            if self._task is None or self._task.done():
                self._check_sections()
                self._task = asyncio.create_task(self._poll_sections())
            known, silent = 0, 0.0
            while is_authorized():
                changes, known = self._render_changes(known), self._checks
                silent = 0.0 if changes else silent + POLL_INTERVAL_SECONDS
                if silent >= KEEPALIVE_SECONDS:
                    changes, silent = b": still here\n\n", 0.0
                if changes:
                    yield changes
                if not follow:
                    return
                await self._checked.wait()
        finally:
            self._viewers -= 1

    def _render_changes(self, known: int) -> bytes:
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (name.encode(), self._encoded[name])
            for name, changed in self._changed.items()
            if changed > known
        )

    async def _poll_sections(self) -> None:
        while self._viewers:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            self._check_sections()

    def _check_sections(self) -> None:
        self._checks += 1
        for name, encoded in self._encode_sections().items():
            if encoded != self._encoded.get(name):
                self._encoded[name], self._changed[name] = encoded, self._checks
        looked, self._checked = self._checked, asyncio.Event()
        looked.set()

    def _encode_sections(self) -> Mapping[str, bytes]:
        try:
            return {name: msgspec.json.encode(section) for name, section in self._sections().items()}
        except Exception:  # keep the stream open, because the next check may succeed
            log.exception("page not updated")
            return {}
