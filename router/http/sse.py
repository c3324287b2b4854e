"""Server-sent events: the output of a stream, and the pump that fills it with the deltas of a request.

A token passes through `Dispatcher.receive` → `StreamedAnswer.flush` → `StreamPump.pump` → `EventStream.push` → the
transport, in one synchronous call. If the write buffer of the transport is full, a callback later completes the `push`.
Deltas then wait in the answer. Its limit ends a stream that is not read.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol, cast

from router.dialects.shared.interface import EVENTS, Chunks
from router.dispatch.request import CANCELLED, SLOW, Outcome
from router.errors import Header, Problem, from_failure, from_refused
from router.http.coroutine_driver import CoroutineDriver, Step
from wire.frames import Delta, Finished
from wire.refusals import Refused

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
_HEADERS: list[Header] = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LEFT = from_failure(CANCELLED.code, CANCELLED.message)


class EventSink(Protocol):
    """Output of a `StreamPump`, which accepts complete server-sent events. `EventStream` implements it."""

    busy: bool
    """Whether a push waits for the transport."""

    def call_when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` after each push that had to wait for the transport, except the last push."""
        ...

    def push(self, events: bytes, *, last: bool = False) -> bool:
        """Send complete events. Return False if they wait for the transport. Do not call this method while `busy`.

        `last` ends the stream after these events.
        """
        ...

    def abandon(self) -> None:
        """End the stream, and abort a push that waits for the transport."""
        ...


class EventSource(Protocol):
    """Input of a `StreamPump`: a `StreamedAnswer`, or a `MergedStream` of several."""

    def attach(self, sink: Callable[[], None]) -> None:
        """Call `sink` from now on whenever there are new deltas, an outcome, or a keep-alive that is due."""
        ...

    def detach(self) -> None:
        """Remove the sink, which is then not called any more."""
        ...

    def set_blocked(self, blocked: bool) -> None:
        """Record whether the write buffer of the client's transport is full (`blocked`)."""
        ...

    @property
    def waits_for(self) -> str:
        """Reason why the request waits, as shown to the client; empty if it does not wait."""
        ...

    @property
    def keepalive_due(self) -> bool:
        """Whether a keep-alive is due, because nothing was sent for some time. `take_deltas` sets it to False."""
        ...

    @property
    def pending(self) -> Sequence[Delta] | bool:
        """Value that is true while there are deltas that `take_deltas` has not returned."""
        ...

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the request; None before its end."""
        ...

    def take_deltas(self) -> list[Delta]:
        """Return pending deltas in order, and reset `keepalive_due`.

        The list may have only the first of them. `pending` is then still true.
        """
        ...


class EventStream:
    """Streamed answer of an exchange, with status 200.

    `busy` is True while a push waits for the transport. `done` is a Future that is done when the stream has ended. If a
    push raises an exception at once, `done` gets the exception. The loop's exception handler gets a later exception.
    """

    __slots__ = ("_last", "_ready", "_send", "_stepper", "busy", "done")

    def __init__(self, send: Send) -> None:
        self._send = cast("Callable[[Message], Step]", send)
        self._stepper = CoroutineDriver(self._finish_push)
        self._last = False
        self.busy = False
        self._ready: Callable[[], None] = _do_nothing
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, headers: list[Header], kind: bytes = EVENTS) -> None:
        """Send status 200, the headers of a stream, and `headers`. `kind` is the content type."""
        head = [(b"content-type", kind), *_HEADERS, *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    def push(self, events: bytes, *, last: bool = False) -> bool:
        """Send complete events. Return False if they wait for the transport. Do not call this method while `busy`.

        `last` ends the stream after these events. If the transport raises an exception at once, `done` gets it.
        """
        self._last = last
        step = self._send({"type": "http.response.body", "body": events, "more_body": not last})
        try:
            future = step.send(None)
        except StopIteration:
            if last:
                self._finish()
            return True
        except Exception as error:
            self._fail(error)
            return True
        self.busy = True
        self._stepper.wait_for(step, future)
        return False

    def call_when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` after each push that had to wait for the transport, except the last push."""
        self._ready = then

    def abandon(self) -> None:
        """End the stream, and abort a push that waits for the transport."""
        self._finish()

    def _finish_push(self, _value: object) -> None:
        self.busy = False
        if self._last:
            self._finish()
        else:
            self._ready()

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _finish(self) -> None:
        self._ready = _do_nothing
        self._stepper.close()
        if not self.done.done():
            self.done.set_result(None)


class StreamPump:
    """Pump that takes the deltas of `source`, encodes them with `chunks`, and pushes the events to `stream`.

    The constructor attaches the pump to its source and its stream, and sends the pending deltas.
    """

    __slots__ = ("_beginning", "_blocked", "_chunks", "_opening", "_source", "_stream")

    def __init__(self, source: EventSource, chunks: Chunks, stream: EventSink) -> None:
        self._source = source
        self._chunks = chunks
        self._stream = stream
        self._beginning = True
        self._opening: bytes | None = None
        self._blocked = False
        stream.call_when_ready(self.pump)
        source.attach(self.pump)
        source.set_blocked(False)
        self.pump()

    def pump(self) -> None:
        """Send the pending deltas, the end, or a keep-alive. Called for every token of a stream.

        While a push waits for the transport, nothing is sent. The stream is abandoned then if the outcome is `SLOW`.
        """
        source, stream = self._source, self._stream
        if stream.busy:
            if source.outcome is SLOW:
                self._encode_end(SLOW)
                stream.abandon()
            return
        while True:
            keepalive_due = source.keepalive_due
            taken = source.take_deltas()
            events = self._encode_beginning(taken) if self._beginning else self._chunks.encode_deltas(taken)
            outcome = source.outcome
            if outcome is not None and not source.pending:
                stream.push(events + self._encode_end(outcome), last=True)
                source.detach()
                return
            if not events and keepalive_due:
                events = self._chunks.encode_keepalive(source.waits_for)
            if events:
                blocked = not stream.push(events)
                if blocked or self._blocked:
                    self._blocked = blocked
                    source.set_blocked(blocked)
            if not source.pending or stream.busy:
                return

    def _encode_beginning(self, taken: list[Delta]) -> bytes:
        """Return the events of deltas, which begin with the opening of the stream if there are events or it ends."""
        source = self._source
        if self._opening is None and (taken or source.outcome is not None):
            self._opening = self._chunks.encode_opening()  # first, because some dialects number their events
        events = self._chunks.encode_deltas(taken)
        if not events and (source.outcome is None or source.pending):
            return b""
        self._beginning = False
        return (self._opening or b"") + events

    def _encode_end(self, outcome: Outcome) -> bytes:
        if isinstance(outcome, Finished):
            return self._chunks.encode_end(outcome)
        if outcome is CANCELLED or outcome is SLOW:
            self._chunks.encode_failure(_LEFT)  # some routes store the answer so far; no client reads this event
            return b""
        problem = build_problem(outcome)
        return b"" if problem is None else self._chunks.encode_failure(problem)


def build_problem(outcome: Outcome) -> Problem | None:
    """Return the problem to send for an outcome; None for a complete answer, `CANCELLED` and `SLOW`."""
    if outcome is CANCELLED or outcome is SLOW or isinstance(outcome, Finished):
        return None
    return from_refused(outcome) if isinstance(outcome, Refused) else from_failure(outcome.code, outcome.message)


def _do_nothing() -> None:
    return
