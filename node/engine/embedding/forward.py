"""Forwards for embeddings: each is built as a whole, and evaluated in parts, some layers at a time.

A forward over one short text already takes nearly as long as a decode step, because it reads all weights. Forwards
therefore have many texts. While rows decode, a decode step follows each part of a forward, which keeps the gaps between
the tokens of these rows short.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from node.engine.embedding.request import EmbeddingRequest, PartialText
from node.engine.embedding.vectors import check_finite, cut_vectors
from node.engine.kv.kv_cache import CacheExtent
from node.engine.memory.footprint import MlxPeakTracker
from node.engine.models.loaded_model import LoadedModel
from wire.frames import Frame, split_vectors


class WaitingText(NamedTuple):
    """Text of a request that has no vector yet."""

    request: EmbeddingRequest
    place: int
    """Position of the text in its request, from 0."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the text."""
        return self.request.prepared.inputs[self.place]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Token ids of the text after the shared beginning of its request."""
        return self.ids[len(self.request.beginning) :]

    @property
    def segment(self) -> int:
        """Position of the first token of the second text, if the text is a pair and the model has segments; else 0."""
        segments = self.request.prepared.segments
        return segments[self.place] if segments else 0


class EmbeddingForward(ABC):
    """Forward over texts of some requests for one model.

    `need`: bytes that the whole forward needs. `parts` has the lazy arrays to evaluate for each part, in order.
    """

    def __init__(
        self, requests: Sequence[EmbeddingRequest], tokens: int, need: int, parts: Sequence[Sequence[Any]]
    ) -> None:
        self.requests = list(requests)
        """Requests with texts in the forward, without those that have ended since it began."""
        self.tokens = tokens
        """Tokens that run in the forward, without padding."""
        self.number = requests[0].number if len(requests) == 1 else 0
        """Number of the request; 0 if the forward began with several requests."""
        self.seconds = 0.0
        """Seconds that the completed parts took."""
        self._need = need
        self._count = len(parts)
        self._parts = list(reversed(parts))
        self._highest = self._held = 0

    @property
    def loaded_model(self) -> LoadedModel:
        """Loaded model that the forward runs."""
        return self.requests[0].loaded_model

    @property
    def need(self) -> int:
        """Bytes for the remaining parts: the need of the whole forward, minus the bytes that it already takes."""
        return max(0, self._need - self._held)

    @property
    def has_begun(self) -> bool:
        """Whether a part has run."""
        return len(self._parts) < self._count

    @property
    def has_ended(self) -> bool:
        """Whether all parts have run."""
        return not self._parts

    def take_arrays(self, *, rest: bool) -> Sequence[Any]:
        """Remove the next part and return its arrays, which the caller evaluates. With `rest`, remove all remaining
        parts and return the arrays whose evaluation runs them all."""
        if rest:
            del self._parts[1:]  # its arrays depend on those of all other parts
        return self._parts.pop()

    def record_part(self, seconds: float, peak: MlxPeakTracker) -> None:
        """Record the duration and the memory of a part. `peak` must have been marked at the start of the part."""
        above = peak.measure_peak_above_mark()
        self.seconds += seconds
        self._highest = max(self._highest, self._held + above)
        self._held += above - peak.measure_peak_drop()

    def remove_request(self, request: EmbeddingRequest) -> None:
        """Remove a request that has ended. The forward still computes the texts of the request, and discards them."""
        if request in self.requests:
            self.requests.remove(request)

    @abstractmethod
    def complete(self) -> list[Frame]:
        """Record the measurements of a forward whose parts have all run, and mark its texts as done in their requests.
        Return the frames with the vectors of live requests. Raise `NotFiniteError` if a number of the vectors is not
        finite."""


class TextsForward(EmbeddingForward):
    """Forward over whole texts, padded to the longest one.

    `vectors` are the lazy vectors in the order of `texts`. `written`: bytes of the results and caches of the forward.
    `need` and `parts` are described at `EmbeddingForward`.
    """

    def __init__(
        self,
        texts: Sequence[WaitingText],
        need: int,
        parts: Sequence[Sequence[Any]],
        vectors: mx.array,
        *,
        written: int,
    ) -> None:
        requests = list(dict.fromkeys(text.request for text in texts))
        super().__init__(requests, sum(len(text.own_ids) for text in texts), need, parts)
        self._texts = texts
        self._vectors = vectors
        self._written = written

    def complete(self) -> list[Frame]:
        """Record the measurements of the forward, and mark its texts as done in their requests. Return the frames with
        the vectors of live requests. Raise `NotFiniteError` if a number of the vectors is not finite; no text is then
        done."""
        loaded_model, rows = self.loaded_model, len(self._texts)
        longest = max(len(text.own_ids) for text in self._texts)
        past = len(self._texts[0].request.beginning)
        loaded_model.stats.record_prefill(rows * longest, self.seconds, past + longest / 2)
        loaded_model.estimator.observe_packed(rows, longest, self._highest - self._written, past)
        check_finite(self._vectors)
        frames: list[Frame] = []
        for request in self.requests:
            own = [row for row, text in enumerate(self._texts) if text.request is request]
            places = [self._texts[row].place for row in own]
            frames += _build_frames(request, places, self._vectors[mx.array(own)])
            request.take(places)
        return frames


class ChunkForward(EmbeddingForward):
    """Forward over the next `tokens` of a long text or of a shared beginning.

    `vectors` is the lazy vector of a text that ends with this chunk, shape (1, dimensions); else None. `before` and
    `after` are the extents of the cache before and after the chunk, `results` the bytes of the pooled states. `need`
    and `parts` are described at `EmbeddingForward`.
    """

    def __init__(
        self,
        request: EmbeddingRequest,
        tokens: int,
        need: int,
        parts: Sequence[Sequence[Any]],
        vectors: mx.array | None,
        *,
        before: CacheExtent,
        after: CacheExtent,
        results: int,
    ) -> None:
        super().__init__([request], tokens, need, parts)
        self._vectors = vectors
        self._written = after.size - before.size + results
        self._grew = after.capacity > before.capacity

    def complete(self) -> list[Frame]:
        """Record the measurements of the chunk. If it completes the text or shared beginning, record that in the
        request. Return the frames with the vector of a complete text, else an empty list. Raise `NotFiniteError` if a
        number of the vector is not finite; the text counts as complete then."""
        request, loaded_model = self.requests[0], self.loaded_model
        text = _get_partial(request)
        stored = text.stored_tokens
        text.record_chunk(self.tokens)
        loaded_model.stats.record_prefill(self.tokens, self.seconds, stored + self.tokens / 2)
        taken = self._highest - self._written
        loaded_model.estimator.observe_prefill(self.tokens, stored, taken, grew=self._grew)
        if text.left:
            return []
        if self._vectors is None:
            request.end_beginning()
            return []
        request.end_partial()
        check_finite(self._vectors)
        return _build_frames(request, [text.place], self._vectors)


def _get_partial(request: EmbeddingRequest) -> PartialText:
    assert request.partial is not None  # noqa: S101 it is in progress
    return request.partial


def _build_frames(request: EmbeddingRequest, places: Sequence[int], vectors: mx.array) -> list[Frame]:
    head = request.loaded_model.head
    normalized = head is not None and head.layout.normalize
    data = cut_vectors(vectors, request.prepared.request.dimensions, normalized=normalized)
    return list(split_vectors(request.number, places, data))
