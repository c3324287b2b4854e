"""Interface between the HTTP routes and a dialect.

    body ─ parse ─┬─► ParsedRequest ─ to_specs ─► dispatcher ─┬─ complete ─────► render_complete ─► one JSON answer
                  └─► Problem ─ style.error                   └─ streamed ─► create_chunk_encoder ─► encode_opening,
                                                                    encode_deltas …, encode_end or encode_failure

The HTTP side uses only this interface of a dialect, and a dialect does not use sockets or nodes. A `ParsedRequest`
belongs to one request, and may store state for its answer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from router.placement.candidate import ResourceDemand
from wire.frames import Delta, Finished

EVENTS = b"text/event-stream; charset=utf-8"
"""Content type of server-sent events."""


def encode_comment(why: str) -> bytes:
    """Encode a server-sent comment with the reason of a wait (`why`), or `waiting` if that is empty."""
    return f": {why or 'waiting'}\n\n".encode()


class DialectStyle(NamedTuple):
    """Format of the errors, streams and headers of a dialect."""

    error: Callable[[Problem, str], bytes] = Problem.encode_body
    """Function that encodes the body of an error, from a problem and the id of the request."""
    stream: bytes = EVENTS
    """Content type of streams."""
    names: tuple[bytes, ...] = (b"x-request-id",)
    """Names of the headers with the id of the request."""


OPENAI = DialectStyle()


class AnswerReader(Protocol):
    """Data of a request that an encoder reads when its stream begins."""

    @property
    def spec(self) -> RequestSpec:
        """Request of the client.

        For a body with several prompts, it is the request of the first prompt, but `params.n` is the number of choices
        of all prompts together.
        """
        ...

    @property
    def demand(self) -> ResourceDemand:
        """Demand on a node, with the exact prompt tokens once a node has counted them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's files; empty before the first attempt on a node."""
        ...


class Chunks(Protocol):
    """Encoder of one streamed answer into the bytes of a dialect."""

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a keep-alive, which clients do not treat as a part of the answer.

        `why` is the reason of the wait, which formats with comments send; empty for no special reason.
        """
        ...

    def encode_opening(self) -> bytes:
        """Encode the beginning of a stream, before its first delta; may be empty."""
        ...

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode deltas; empty if they have nothing for the client."""
        ...

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the end of a complete stream."""
        ...

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the end of a failed stream."""
        ...


class ParsedRequest(Protocol):
    """Valid request of a client, as parsed by a dialect.

    A parsed request creates the requests for the dispatcher, and encodes their answer.
    """

    def to_specs(self, key: str, request_id: str, created: int) -> Sequence[RequestSpec]:
        """Return the requests for the dispatcher, at least one. Choices of several are numbered consecutively.

        `key` is the id of the API key. `created` is the time of arrival in Unix seconds.
        """
        ...

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer to a request that does not stream.

        `spec` is the request, with all choices together, as in `AnswerReader.spec`.
        """
        ...

    def create_chunk_encoder(self, reader: AnswerReader) -> Chunks:
        """Return the encoder for the stream of this request.

        Raise `NotImplementedError` if the route has no streams.
        """
        ...


class Dialect(Protocol):
    """Format of one route on which models answer: a parser of its bodies, and the style of its answers."""

    @property
    def style(self) -> DialectStyle:
        """Format of errors, streams and headers of the route."""
        ...

    def parse(self, body: bytes, key: str) -> ParsedRequest | Problem:
        """Parse a body. Return the request, or a problem if it is refused. `key` is the id of the client's API key.

        No body makes this method raise an exception.
        """
        ...
