"""Forwards of texts for embeddings, each through the gate: several short texts at once, or one chunk of a long text."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from node.engine.embedding.head import EmbeddingHead
from node.engine.embedding.request import BEGINNING, EmbeddingRequest, PartialText, compute_cache_bytes
from node.engine.embedding.vectors import check_finite, cut_vectors
from node.engine.kv.kv_cache import grow_caches, measure_extent, repeat_row
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.rules.chunk_policy import generate_chunk_sizes
from wire.frames import Frame, split_vectors
from wire.refusals import Refused

PAD_TOKEN = 0
"""Token id of padding, whose states are not read."""


class WaitingText(NamedTuple):
    """Text of a request that has no vector."""

    request: EmbeddingRequest
    place: int
    """Place of the text in its request."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the text."""
        return self.request.prepared.inputs[self.place]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Tokens of the text after the shared beginning of its request."""
        return self.ids[len(self.request.beginning) :]

    @property
    def segment(self) -> int:
        """Place of the first token of the second text of a pair; 0 without one."""
        segments = self.request.prepared.segments
        return segments[self.place] if segments else 0


class EmbeddingRunner:
    """Runner of forwards for embeddings. `floor`: tokens of the smallest chunk. `now` is in monotonic seconds."""

    def __init__(self, forwards: GatedForwards, floor: int) -> None:
        self._forwards = forwards
        self._floor = floor

    def select_fitting(self, texts: Sequence[WaitingText]) -> Sequence[WaitingText]:
        """Return the texts that pass the gate in one forward: all, or the first half, halved as often as necessary.
        Return an empty sequence if not even the first one passes."""
        while texts:
            if self._forwards.check_optional(GateSite.EMBED, estimate_batch_bytes(texts)):
                return texts
            self._forwards.count_shrink()
            texts = texts[: (len(texts) + 1) // 2] if len(texts) > 1 else ()
        return texts

    def run_texts(self, texts: Sequence[WaitingText], now: float) -> list[Frame]:
        """Run whole texts of one model in one forward. Return the frames with their vectors, and remove them from
        their requests.
        Raise `Halted` if the engine was halted, `NotFiniteError` if a number of the vectors is not finite. Exceptions
        of MLX propagate.

        Texts with a shared beginning are those of one request. They run after it, over copies of its cache.
        """
        loaded_model, head = _get_model(texts[0].request)
        lengths = [len(text.own_ids) for text in texts]
        longest, requests = max(lengths), list(dict.fromkeys(text.request for text in texts))
        rows = [(*text.own_ids, *(PAD_TOKEN,) * (longest - len(text.own_ids))) for text in texts]
        for request in requests:
            request.mark_begun(now)
        pooled, count, past = head.start(lengths), len(texts) * longest, len(requests[0].beginning)
        segments = [text.segment for text in texts]
        number = requests[0].number if len(requests) == 1 else 0
        cache = repeat_row(requests[0].beginning_cache, len(texts)) if past else None
        grow_caches(cache or (), longest, past + longest)
        expected = loaded_model.stats.estimate_prefill_seconds(count)
        with self._forwards.run_native(
            NativeCallKind.EMBED, loaded_model.name, number, expected, prefill_tokens=sum(lengths)
        ) as call:
            head.run(rows, pooled, cache, segments)
            vectors = head.finish(pooled)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, past + longest / 2)
        written = head.estimate_bytes(count) + _estimate_copies_bytes(texts)
        taken = self._forwards.peak_tracker.measure_peak_above_mark() - written
        loaded_model.estimator.observe_packed(len(texts), longest, taken, past)
        check_finite(vectors)
        frames: list[Frame] = []
        for request in requests:
            rows_of = [row for row, text in enumerate(texts) if text.request is request]
            places = [texts[row].place for row in rows_of]
            frames += _build_frames(request, places, vectors[mx.array(rows_of)])
            request.take(places)
        return frames

    def run_chunk(self, request: EmbeddingRequest, wanted: int, now: float) -> list[Frame] | Refused:
        """Run the next chunk of a shared beginning or of a long text, of at most `wanted` tokens.

        Return the frames with the text's vector after its last chunk, an empty list before. Return the refusal if not
        even the smallest chunk has room. An encoder runs the whole text. Errors are those of `run_texts`.
        """
        loaded_model, head = _get_model(request)
        if head.runs_whole_texts:
            return self._run_whole(WaitingText(request, request.waiting[-1]), now)
        text = request.partial or request.create_next()
        left, stored = text.left, text.stored_tokens
        count = self._forwards.check_shrinking(
            GateSite.EMBED,
            generate_chunk_sizes(min(wanted, left), min(self._floor, left)),
            lambda tokens: loaded_model.estimator.estimate_chunk(tokens, stored) + head.estimate_bytes(tokens),
        )
        if isinstance(count, Refused):
            return count
        request.mark_begun(now)
        request.begin_partial(text)
        self._run_forward(request, text, count)
        if text.left:
            return []
        if text.place == BEGINNING:
            request.end_beginning()
            return []
        vectors = head.finish(text.pooled)
        request.end_partial()
        check_finite(vectors)
        return _build_frames(request, [text.place], vectors)

    def _run_whole(self, text: WaitingText, now: float) -> list[Frame] | Refused:
        """Run a text in one forward, however long it takes; or return the refusal if it has no room."""
        loaded_model, head = _get_model(text.request)
        tokens = len(text.ids)
        need = loaded_model.estimator.estimate_packed(1, tokens) + head.estimate_bytes(tokens)
        refused = self._forwards.check(GateSite.EMBED, need)
        return self.run_texts([text], now) if refused is None else refused

    def _run_forward(self, request: EmbeddingRequest, text: PartialText, count: int) -> None:
        loaded_model, head = _get_model(request)
        piece = text.ids[text.stored_tokens : text.stored_tokens + count]
        is_view = text.stored_tokens == len(request.beginning)  # of the shared beginning, or empty
        before = measure_extent(() if is_view else text.cache)
        grow_caches(text.cache, count, len(text.ids))
        expected = loaded_model.stats.estimate_prefill_seconds(count)
        with self._forwards.run_native(
            NativeCallKind.EMBED, loaded_model.name, request.number, expected, prefill_tokens=count
        ) as call:
            head.run([piece], text.pooled, text.cache)
        stored = text.stored_tokens
        text.record_chunk(count)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, stored + count / 2)
        after = measure_extent(text.cache)
        written = after.size - before.size + head.estimate_bytes(count)
        taken = self._forwards.peak_tracker.measure_peak_above_mark() - written
        loaded_model.estimator.observe_prefill(count, stored, taken, grew=after.capacity > before.capacity)


def estimate_batch_bytes(texts: Sequence[WaitingText]) -> int:
    """Return the bytes that one forward over texts needs, with their copies of the shared beginning's cache."""
    loaded_model, head = _get_model(texts[0].request)
    longest = max(len(text.own_ids) for text in texts)
    packed = loaded_model.estimator.estimate_packed(len(texts), longest, len(texts[0].request.beginning))
    return packed + head.estimate_bytes(len(texts) * longest) + _estimate_copies_bytes(texts)


def _estimate_copies_bytes(texts: Sequence[WaitingText]) -> int:
    """Return the bytes of the caches of texts that run over copies of a shared beginning; 0 without one."""
    request = texts[0].request
    if not request.beginning:
        return 0
    longest = max(len(text.ids) for text in texts)
    return len(texts) * compute_cache_bytes(request.loaded_model, longest, 0)


def _get_model(request: EmbeddingRequest) -> tuple[LoadedModel, EmbeddingHead]:
    head = request.loaded_model.head
    assert head is not None  # noqa: S101 only a model with a head admits such a request
    return request.loaded_model, head


def _build_frames(request: EmbeddingRequest, places: Sequence[int], vectors: mx.array) -> list[Frame]:
    head = request.loaded_model.head
    normalized = head is not None and head.layout.normalize
    data = cut_vectors(vectors, request.prepared.request.dimensions, normalized=normalized)
    return list(split_vectors(request.number, places, data))
