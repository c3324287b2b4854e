"""Frames of requests for embeddings and for the scores of documents (rerank).

They end with Finished, Refusal or Failed, as all requests do.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from wire.bounds import Ids, Long, Natural, Number, Tokens, Word
from wire.capacity.fairness import WeightedKey
from wire.frames.frame import Frame

MAX_INPUTS = 2048
"""Maximum number of texts in one Embed."""
MAX_VECTORS_BYTES = 48 * 1024
"""Maximum bytes of the vectors of one frame, and of one vector: 12,288 numbers.

The frame is below `wire.codec.MAX_PLAIN_BYTES`, because a fragmented frame could be overtaken by the Finished of its
request.
"""
NUMBER_BYTES = 4
"""Bytes of a number in single precision."""


class Embed(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: compute a vector for each text. The texts are `texts` or `ids`.

    With a `query`, the texts are documents, and the vector of each is a single number: its score, from 0 to 1.
    """

    request: Number
    seq: Number
    """Sequence number, which grows with every Generate and Embed."""
    request_id: Word
    """Request id for logs, as the client knows it."""
    model: Word
    texts: Annotated[tuple[Long, ...], Meta(max_length=MAX_INPUTS)] = ()
    ids: Annotated[tuple[Ids, ...], Meta(max_length=MAX_INPUTS)] = ()
    """Texts as token ids of the model; no special token is added to them."""
    dimensions: Tokens = 0
    """Length of each vector; 0 for the full length of the model."""
    truncate: bool = False
    """Whether a text longer than the context is truncated. Otherwise the request is refused."""
    prompt: Word = ""
    """Name of the model's prompt that precedes each text; empty for the default of the model."""
    weighted_key: WeightedKey = WeightedKey()
    """API key of the request, for the shares of the node's rows and memory (`wire.capacity.fairness`)."""
    query: Long = ""
    """Query for which the documents are scored; empty for embeddings."""
    max_tokens: Tokens = 0
    """Maximum tokens of each document, which is truncated there; 0 for no maximum besides the context."""
    cache_scope: Word = ""
    """Scope of cached prefixes, as in Generate."""

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self.texts) or len(self.ids)


class Vectors(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: vectors of some texts of a request. Finished follows after the last of them."""

    request: Number
    places: Annotated[tuple[Natural, ...], Meta(max_length=MAX_INPUTS)]
    """Position of each text in the request, from 0."""
    data: Annotated[bytes, Meta(max_length=MAX_VECTORS_BYTES)]
    """Numbers of all vectors in the order of `places`, in single precision, little endian.

    All vectors have the same length.
    """


def split_vectors(request: int, places: Sequence[int], data: bytes) -> Iterator[Vectors]:
    """Yield the frames with the vectors of a request, each with at most MAX_VECTORS_BYTES of data.

    `places` are the positions of the texts in the request, from 0. `data` has the numbers of their vectors in this
    order, in single precision, little endian. The caller must pass at least one vector, and all vectors with the same
    length of 1 to MAX_VECTORS_BYTES bytes.
    """
    size = len(data) // len(places)
    most = MAX_VECTORS_BYTES // size
    for at in range(0, len(places), most):
        yield Vectors(request, tuple(places[at : at + most]), data[at * size : (at + most) * size])
