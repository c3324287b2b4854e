"""Interface between the HTTP routes and a dialect.

    body ─ parse ─► Asked ─ jobs ─► dispatcher ─┬─ whole answer ─► whole ─► one JSON answer
                      └ Problem ─ style.error   └─ streamed ─► chunks ─► opening, deltas …, closing or failing

The HTTP side knows only this interface of a dialect, and a dialect knows no sockets and nodes. An `ParsedRequest`
belongs to one request and may store state for its answer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from router.placement.place import ResourceDemand
from wire.frames import Delta, Finished

EVENTS = b"text/event-stream; charset=utf-8"


def comment(why: str) -> bytes:
    """Render a server-sent comment with the reason of a wait."""
    return f": {why or 'waiting'}\n\n".encode()


class DialectStyle(NamedTuple):
    """Common format of a dialect's answers."""

    error: Callable[[Problem, str], bytes] = Problem.body
    """Renders the body of an error from a problem and the request's id."""
    stream: bytes = EVENTS
    """Content type of streams."""
    names: tuple[bytes, ...] = (b"x-request-id",)
    """Headers that carry the request's id."""


OPENAI = DialectStyle()


class AnswerReader(Protocol):
    """State of a request during its answer."""

    @property
    def job(self) -> RequestSpec:
        """Request with all choices together."""
        ...

    @property
    def demand(self) -> ResourceDemand:
        """Demand on a node; holds the exact prompt tokens once a node has counted them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's files; empty while no node has the request."""
        ...


class Chunks(Protocol):
    """Encoder of one stream."""

    def keepalive(self, why: str) -> bytes:
        """Render bytes that no client takes for an answer.

        Where the format has comments they carry `why`, the reason of the wait; it is empty without a special reason.
        """
        ...

    def opening(self) -> bytes:
        """Render the bytes before the first delta."""
        ...

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Render some deltas; the result may be empty."""
        ...

    def closing(self, finished: Finished) -> bytes:
        """Render the end of a complete stream."""
        ...

    def failing(self, problem: Problem) -> bytes:
        """Render the end of a failed stream."""
        ...


class ParsedRequest(Protocol):
    """Parsed body."""

    def jobs(self, key: str, request_id: str, created: int) -> Sequence[RequestSpec]:
        """Return the jobs for the dispatcher: one, or several with consecutive choices. `created` is in seconds since
        1970."""
        ...

    def whole(self, job: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Render the answer to a request without a stream."""
        ...

    def chunks(self, reader: AnswerReader) -> Chunks:
        """Return the encoder for the stream of a request."""
        ...


class Dialect(Protocol):
    """One route on which models answer."""

    @property
    def style(self) -> DialectStyle:
        """Format of the dialect's answers."""
        ...

    def parse(self, body: bytes, key: str) -> ParsedRequest | Problem:
        """Parse a body, or return the problem. Never raises. `key` is the id of the client's key."""
        ...
