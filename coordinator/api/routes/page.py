"""Routes of the web page: sign-in and live updates."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from coordinator.api.auth import KEY
from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.api.route import EVENT_STREAM, EVENT_STREAM_TYPE, PUBLIC_SCOPE, Route
from coordinator.http.listen import ListenerAddress
from coordinator.state.access_admin import PAGE_KEY_NAME
from coordinator.state.database import Database
from coordinator.ui.browser_sessions import CODE_SECONDS, BrowserSessions
from coordinator.ui.live_stream import MAX_VIEWERS, LiveStream
from router.admission.api_keys import KeyRing, extract_key
from router.errors import Problem


class LoginCodeBody(Body):
    """Body with the code of a sign-in link from `cluster open`."""

    code: Annotated[str, Field(min_length=1, max_length=100)]


class PageRoutes:
    """Routes of `cluster open` and of the web page.

    `address` is the address of the endpoint. `sections` returns the current content of the page, by section.
    """

    def __init__(
        self,
        address: ListenerAddress,
        sessions: BrowserSessions,
        ring: KeyRing,
        store: Database,
        sections: Callable[[], Mapping[str, object]],
    ) -> None:
        self._address = address
        self._sessions = sessions
        self._ring = ring
        self._store = store
        self._live = LiveStream(sections)

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of the web page: sign-in links, sessions and live updates."""
        return (
            Route("POST", "/api/v1/page/links", "admin", self.invite),
            Route("POST", "/api/v1/page/visits", PUBLIC_SCOPE, self.enter, (401, 503)),
            Route("DELETE", "/api/v1/page/visit", "admin", self.leave, (404,)),
            Route("GET", "/api/v1/live", "metrics", self.live, (503,), EVENT_STREAM),
        )

    async def invite(self) -> dict[str, Any]:
        """Create a link that signs in to the page as an administrator, once, within 2 minutes.

        Return its URL, and the seconds for which it is valid. At most 16 unused links are valid: another link
        invalidates the oldest.
        """
        return {
            "schema": 1,
            "url": f"{self._address.build_url()}/#in={self._sessions.create_code()}",
            "seconds": CODE_SECONDS,
        }

    async def enter(self, body: LoginCodeBody) -> dict[str, Any]:
        """Exchange the code of a sign-in link for a session key.

        A code works once, within 2 minutes. The key has administrator scope, for 12 hours or until the coordinator
        stops. `expires` is in Unix seconds. If 64 sessions are open, the oldest ends. Raise `ProblemError` 401 for a
        code that is unknown, used or expired. Raise `StoreError` (503) if the audit log cannot be written; the code is
        then used up.
        """
        entered = self._sessions.redeem_code(body.code)
        if entered is None:
            raise ProblemError(Problem(401, "link_used_up", "this link was used, or is too old: run `cluster open`"))
        self._store.audit.add(time.time(), PAGE_KEY_NAME, "entered", "")
        return {"schema": 1, "key": entered[0], "expires": entered[1]}

    async def leave(self) -> dict[str, Any]:
        """End the page's session that uses the calling key.

        Raise `ProblemError` 404 if the key belongs to no session of the page.
        """
        if not self._sessions.end_session(KEY.get()):
            raise ProblemError(
                Problem(404, "no_session", "this key belongs to no session of the page: no session was ended")
            )
        return {"schema": 1}

    async def live(self, request: Request, follow: bool = False) -> Response:
        """Return the data of the page as server-sent events, one per section. With `follow`, stream changes.

        Changes are sent at most twice per second. After 15 s without changes, a comment is sent. The stream ends when
        the key is revoked, rotated or expired. Raise `ProblemError` 503 if 32 pages are open.
        """
        if self._live.full:
            raise ProblemError(
                Problem(
                    503,
                    "too_many_viewers",
                    f"{MAX_VIEWERS} pages are open, which is the limit: close one",
                    retry_after=5,
                )
            )
        presented = extract_key(request.scope["headers"]) or b""

        def is_authorized() -> bool:
            key = self._ring.check(presented)
            return key is not None and key.allows("metrics")

        return StreamingResponse(
            self._live.stream_events(is_authorized, follow=follow),
            media_type=EVENT_STREAM_TYPE,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
