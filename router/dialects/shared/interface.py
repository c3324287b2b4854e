"""The seam between the front door and a dialect: what a route that generates must be able to do.

    body ─ parse ─► Asked ─ jobs ─► dispatcher ─┬─ all of it ─► whole ─► one JSON answer
                      └ Problem ─ style.error   └─ as it comes ─► chunks ─► opening, deltas …, closing or failing

The door knows nothing of a dialect but this, and a dialect nothing of sockets and nodes. An `Asked` belongs to one
request and may remember of it what its answer needs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from router.dispatch.request import Answer, Job
from router.errors import Problem
from router.placement.place import Demand
from wire.frames import Delta, Finished

EVENTS = b"text/event-stream; charset=utf-8"


def comment(why: str) -> bytes:
    """Return a server-sent comment: what a stream waits for, or only that it waits."""
    return f": {why or 'waiting'}\n\n".encode()


class Style(NamedTuple):
    """How a dialect speaks whatever it says: the body of an error (of a problem and the request's id), the content type
    of its streams, and the headers that carry the request's id."""

    error: Callable[[Problem, str], bytes] = Problem.body
    stream: bytes = EVENTS
    names: tuple[bytes, ...] = (b"x-request-id",)


OPENAI = Style()


class Reader(Protocol):
    """What is known of a request that is being answered; `demand` holds the exact count of its prompt's tokens once a
    node has told it."""

    @property
    def job(self) -> Job:
        """What was asked for, all choices together."""
        ...

    @property
    def demand(self) -> Demand:
        """What it needs of a node."""
        ...

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model's files; empty while no node has the request."""
        ...


class Chunks(Protocol):
    """Makes the bytes of one stream."""

    def keepalive(self, why: str) -> bytes:
        """Return bytes that no client takes for an answer, with what the request waits for where the format has
        comments; `why` is empty if that is nothing special."""
        ...

    def opening(self) -> bytes:
        """Give what stands before the first delta."""
        ...

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Give what some deltas say to a client; perhaps nothing."""
        ...

    def closing(self, finished: Finished) -> bytes:
        """Give the end of a stream that came to its end."""
        ...

    def failing(self, problem: Problem) -> bytes:
        """Give the end of a stream that broke."""
        ...


class Asked(Protocol):
    """A body that was understood."""

    def jobs(self, key: str, request_id: str, created: int) -> Sequence[Job]:
        """Give what the dispatcher takes: one job, or several whose choices are counted through. `created` in seconds
        since 1970."""
        ...

    def whole(self, job: Job, answer: Answer, finished: Finished) -> bytes:
        """Give the answer to a request that did not ask for a stream."""
        ...

    def chunks(self, reader: Reader) -> Chunks:
        """Begin the stream of a request that did."""
        ...


class Dialect(Protocol):
    """One route on which models answer."""

    @property
    def style(self) -> Style:
        """How it speaks."""
        ...

    def parse(self, body: bytes, key: str) -> Asked | Problem:
        """Understand a body, or say what is wrong with it. Never raises. `key` is the id of the client's key."""
        ...
