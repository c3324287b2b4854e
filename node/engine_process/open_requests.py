"""Track the requests that were sent to the engine process and have not ended."""

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress

import structlog

from node.engine.process.crash_recorder import CrashRecord
from node.engine.process.interface import NativeCallKind
from wire.codec import decode_request_number, encode
from wire.frames import Failed, Finished, Frame, Refusal
from wire.refusals import FailureCode, Refused

MAX_REQUESTS_LOGGED = 20
"""Maximum number of requests named in one log line."""
ENDS = (Finished, Refusal, Failed)
"""Frames that end a request."""

log = structlog.get_logger("supervise")
_HEADER = struct.Struct(">IB")


class OpenRequests:
    """Set of the engine's open requests, and forwarder of the frames about them to the coordinator.

    `on_frame(tag, encoded, request)` is called for each frame, with its encoded bytes including the header. `request`
    is 0 for Deltas, which concern many requests.
    """

    def __init__(self, on_frame: Callable[[int, bytes, int], None]) -> None:
        self._on_frame = on_frame
        self._open: set[int] = set()
        self._added = asyncio.Event()

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the requests that were sent to the engine and have neither ended nor been cancelled."""
        return frozenset(self._open)

    def __bool__(self) -> bool:
        """Return whether a request is open."""
        return bool(self._open)

    def add(self, request: int) -> None:
        """Add a request that is sent to the engine now."""
        self._open.add(request)
        self._added.set()

    def remove(self, request: int) -> None:
        """Remove a request that was cancelled."""
        self._open.discard(request)

    async def wait_added(self, seconds: float) -> None:
        """Wait at most `seconds` for the next `add`."""
        self._added.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._added.wait(), seconds)

    def refuse(self, request: int, refused: Refused) -> None:
        """Call `on_frame` with the refusal `refused` of a request that is not sent to the engine."""
        self._deliver(Refusal(request, refused), request)

    def forward_deltas(self, tag: int, body: bytes) -> None:
        """Forward a `Deltas` frame of the engine, which holds the tokens of one decode step."""
        self._on_frame(tag, _HEADER.pack(len(body) + 1, tag) + body, 0)

    def forward_answer(self, kind: type[Frame], tag: int, body: bytes) -> None:
        """Forward a frame of type `kind` about one request. A frame of `ENDS` removes the request from `numbers`.

        Raise `WireError` if the body does not begin with the number of a request.
        """
        request = decode_request_number(body)
        if kind in ENDS:
            self._open.discard(request)
        self._on_frame(tag, _HEADER.pack(len(body) + 1, tag) + body, request)

    def fail_all(self, cause: str, record: CrashRecord | None, *, stopping: bool) -> None:
        """End every open request by a `Failed` frame, because the engine has ended. Log the numbers of the requests.

        `record` is the native call in which the engine died; None for no call. The request of that call may be the
        cause and gets `ENGINE_CRASHED`, except for a decode step, which has rows of many requests. Every other request
        gets `ENGINE_LOST`. If the agent stops (`stopping`), every request gets `NODE_STOPPING`. `cause` is the message.
        """
        numbers, self._open = sorted(self._open), set()
        failing = record.request if record is not None and record.doing is not NativeCallKind.DECODE else 0
        if numbers:
            log.warning("requests lost", requests=numbers[:MAX_REQUESTS_LOGGED], count=len(numbers), guilty=failing)
        for request in numbers:
            code = (
                FailureCode.NODE_STOPPING
                if stopping
                else FailureCode.ENGINE_CRASHED
                if request == failing
                else FailureCode.ENGINE_LOST
            )
            self._deliver(Failed(request, code, cause), request)

    def _deliver(self, frame: Frame, request: int) -> None:
        encoded = encode(frame)
        self._on_frame(encoded[4], encoded, request)
