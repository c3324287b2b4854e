"""Routes of the coordinator's log, its events, and the audit log."""

from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from coordinator.api.auth import end_with_key
from coordinator.api.errors import ProblemError
from coordinator.api.log_stream import FOLLOW_INTERVAL_SECONDS, LogBytes, stream_log
from coordinator.api.route import EVENT_STREAM, EVENT_STREAM_TYPE, TEXT, Route
from coordinator.observe import log_reader
from coordinator.observe.event_log import MAX_EVENTS, MAX_READERS, EventLog
from coordinator.state.access_admin import AccessAdmin
from coordinator.state.tables import MAX_AUDIT_ENTRIES
from router.errors import Problem


class LogRoutes:
    """Routes of `cluster logs`, `events` and `audit`."""

    def __init__(self, log_file: Path, events: EventLog, admin: AccessAdmin) -> None:
        self._log_file = log_file
        self._events = events
        self._admin = admin

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of logs, events and the audit log."""
        return (
            Route("GET", "/api/v1/logs", "admin", self.own_logs, (503,), TEXT),
            Route("GET", "/api/v1/events", "admin", self.events, (503,), EVENT_STREAM),
            Route("GET", "/api/v1/audit", "admin", self.audit),
        )

    async def own_logs(self, size: LogBytes = 65536, follow: bool = False) -> Response:
        """Return the last `bytes` bytes of the coordinator's log as text. With `follow`, stream new lines.

        `bytes` is 65536 by default. The text begins with a complete line. Once the key is revoked, rotated or expired,
        the stream ends before its next piece. Raise `ProblemError` 503 if the log cannot be read. After a later
        failure, the text ends with a log line that has the reason.
        """
        return await stream_log(
            log_reader.read_log(self._log_file, size, interval_seconds=FOLLOW_INTERVAL_SECONDS if follow else None)
        )

    async def events(
        self, request: Request, last: Annotated[int, Query(ge=0, le=MAX_EVENTS)] = 50, follow: bool = False
    ) -> Response:
        """Return the newest `last` events (default 50) as server-sent events, oldest first. With `follow`, stream more.

        The newest 500 events are stored. After an interruption, a client that sends `Last-Event-ID` gets all missed
        events instead. A client that does not read in time loses events, and gets a comment with their number. Once the
        key is revoked, rotated or expired, the stream ends before its next piece. Raise `ProblemError` 503 if too many
        clients read events.
        """
        if self._events.full:
            text = f"{MAX_READERS} clients read the events, which is the limit: end one, or try again later"
            raise ProblemError(Problem(503, "too_many_readers", text, retry_after=10.0))
        missed = request.headers.get("last-event-id", "")
        number = int(missed) if missed.isascii() and missed.isdigit() and len(missed) < 16 else None
        lines = end_with_key(self._events.stream_events(number, last, follow=follow))
        return StreamingResponse(lines, media_type=EVENT_STREAM_TYPE, headers={"cache-control": "no-cache"})

    async def audit(self, last: Annotated[int, Query(ge=1, le=MAX_AUDIT_ENTRIES)] = 100) -> dict[str, Any]:
        """List the newest `last` joins, key changes and administrative actions (default 100), oldest first.

        Times are in Unix seconds. The newest 10,000 are stored. `actor_name` is empty for a revoked key.
        """
        return self._admin.list_audit_entries(last)
