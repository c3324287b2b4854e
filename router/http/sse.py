"""The seam where server-sent events leave the router, and the pump that fills it.

A token's way: `Dispatcher.receive` → `StreamTicket.flush` → `Pump.pump` → `EventStream.push` → the transport, in one
synchronous call. When the transport is full, `push` leaves the rest to a callback and deltas wait in the ticket, whose
bound ends a stream that is not read.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol, cast

from router.dialects.shared.interface import EVENTS, Chunks
from router.dispatch.request import CANCELLED, SLOW, Outcome
from router.errors import Header, Problem, failed, from_refused
from router.http.coroutine_driver import Step, Stepper
from wire.frames import Delta, Finished
from wire.refusals import Refused

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
_HEADERS: list[Header] = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Events(Protocol):
    """Where a pump sends its events."""

    busy: bool

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` whenever a push that waited has left."""
        ...

    def push(self, events: bytes, *, last: bool = False) -> bool:
        """Send whole events now; False when they wait for the transport. Not while `busy`."""
        ...

    def abandon(self) -> None:
        """Give up a push that waits, and the stream with it."""
        ...


class Flow(Protocol):
    """What a pump empties: a `StreamTicket`, or several that are read as one."""

    sink: Callable[[], None] | None
    blocked: bool

    @property
    def waits_for(self) -> str:
        """Return what a client is shown of a wait; empty when there is nothing to show."""
        ...

    @property
    def nudged(self) -> bool:
        """Whether a sign of life is due."""
        ...

    @property
    def pending(self) -> Sequence[Delta] | bool:
        """True when there are deltas to take."""
        ...

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None before."""
        ...

    def take(self) -> list[Delta]:
        """Give what has come, in order. Clears a nudge."""
        ...


class EventStream:
    """A 200 answer of events. `busy` while a push waits for the transport."""

    __slots__ = ("_last", "_ready", "_send", "_stepper", "busy", "done")

    def __init__(self, send: Send) -> None:
        self._send = cast("Callable[[Message], Step]", send)
        self._stepper = Stepper(self._left)
        self._last = False
        self.busy = False
        self._ready: Callable[[], None] = _nothing
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, headers: list[Header], kind: bytes = EVENTS) -> None:
        """Send status 200 and the headers; `kind` is the content type."""
        head = [(b"content-type", kind), *_HEADERS, *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    def push(self, events: bytes, *, last: bool = False) -> bool:
        """Send whole events now; False when they wait for the transport. Not while `busy`."""
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

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` whenever a push that waited has left."""
        self._ready = then

    def abandon(self) -> None:
        """Give up a push that waits, and the stream with it."""
        self._finish()

    def _left(self, _value: object) -> None:
        self.busy = False
        if self._last:
            self._finish()
        else:
            self._ready()

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _finish(self) -> None:
        self._ready = _nothing
        self._stepper.close()
        if not self.done.done():
            self.done.set_result(None)


class Pump:
    """Turns what a ticket holds into events of its stream, whenever there is something and the stream takes it."""

    __slots__ = ("_chunks", "_greeted", "_greeting", "_stream", "_ticket")

    def __init__(self, ticket: Flow, chunks: Chunks, stream: Events) -> None:
        self._ticket = ticket
        self._chunks = chunks
        self._stream = stream
        self._greeted = False
        self._greeting = b""
        stream.when_ready(self.pump)
        ticket.sink = self.pump
        ticket.blocked = False
        self.pump()

    def pump(self) -> None:
        """Send what there is: deltas, the end, or a sign of life. Every token of a stream passes here."""
        if not self._stream.busy:
            self._send()
            while self._ticket.pending and not self._stream.busy:
                self._send()
        elif self._ticket.outcome is SLOW:
            self._stream.abandon()

    def _send(self) -> None:
        ticket, stream = self._ticket, self._stream
        nudged = ticket.nudged
        taken = ticket.take()
        if not self._greeted and (taken or ticket.outcome is not None):
            self._greeted = True
            self._greeting = self._chunks.opening()
        events = self._chunks.deltas(taken)
        if ticket.outcome is not None and not ticket.pending:
            stream.push(self._greeting + events + self._ending(ticket.outcome), last=True)
            ticket.sink = None
            return
        if events and self._greeting:
            events = self._greeting + events
            self._greeting = b""
        if not events and nudged:
            events = self._chunks.keepalive(ticket.waits_for)
        if events:
            ticket.blocked = not stream.push(events)

    def _ending(self, outcome: Outcome) -> bytes:
        if isinstance(outcome, Finished):
            return self._chunks.closing(outcome)
        problem = problem_of(outcome)
        return b"" if problem is None else self._chunks.failing(problem)


def problem_of(outcome: Outcome) -> Problem | None:
    """Give what to tell the client of an end that is no answer; None when nobody is there to be told."""
    if outcome is CANCELLED or outcome is SLOW or isinstance(outcome, Finished):
        return None
    return from_refused(outcome) if isinstance(outcome, Refused) else failed(outcome.code, outcome.message)


def _nothing() -> None:
    return
