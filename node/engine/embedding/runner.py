"""Forwards of texts for embeddings, each part through the gate: several short texts at once, or one chunk of a long
text."""

import math
import time
from collections.abc import Sequence

from node.engine.embedding.forward import ChunkForward, EmbeddingForward, TextsForward, WaitingText
from node.engine.embedding.head import EmbeddingHead
from node.engine.embedding.request import BEGINNING, EmbeddingRequest, compute_cache_bytes
from node.engine.kv.kv_cache import copy_state_views, evaluate, grow_caches, measure_extent, repeat_row
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.rules.chunk_policy import generate_chunk_sizes
from wire.frames import Frame
from wire.refusals import Refused

PAD_TOKEN = 0
"""Token id of padding, whose states are not read."""


class EmbeddingRunner:
    """Runner of forwards for embeddings, part by part. `floor`: tokens of the smallest chunk.

    In all methods, `now` is in monotonic seconds, and `part_seconds` is the expected time of a part in seconds. If
    `part_seconds` is 0, the forward is one part.
    """

    def __init__(self, forwards: GatedForwards, floor: int) -> None:
        self._forwards = forwards
        self._floor = floor

    def select_fitting(self, texts: Sequence[WaitingText]) -> Sequence[WaitingText]:
        """Return the leading texts that pass the gate in one forward. After each refusal, try the first half of the
        refused texts.

        Return an empty sequence if the gate refuses even the first text alone. Each refusal is counted
        (`GatedForwards.count_shrink`).
        """
        while texts:
            if self._forwards.check_optional(GateSite.EMBED, estimate_batch_bytes(texts)):
                return texts
            self._forwards.count_shrink()
            texts = texts[: (len(texts) + 1) // 2] if len(texts) > 1 else ()
        return texts

    def begin_texts(self, texts: Sequence[WaitingText], part_seconds: float, now: float) -> EmbeddingForward:
        """Build the forward over whole texts of one model, which have passed the gate. Mark their requests as begun.

        Texts with a shared beginning are all of one request. They run over copies of the beginning's cache, which must
        be complete.
        """
        loaded_model, head = _get_model(texts[0].request)
        request = texts[0].request
        lengths = [len(text.own_ids) for text in texts]
        longest, past = max(lengths), len(request.beginning)
        for text in texts:
            text.request.mark_begun(now)
        rows = [(*text.own_ids, *(PAD_TOKEN,) * (longest - len(text.own_ids))) for text in texts]
        cache = repeat_row(request.beginning_cache, len(texts)) if past else None
        grow_caches(cache or (), longest, past + longest)
        pooled, count = head.start(lengths), len(texts) * longest
        states = head.build(
            rows,
            pooled,
            cache,
            [text.segment for text in texts],
            parts=_count_parts(loaded_model, count, past, part_seconds),
        )
        vectors = head.finish(pooled)
        written = head.estimate_bytes(count) + _estimate_copies_bytes(texts)
        parts = [*((array,) for array in states), (vectors,)]
        return TextsForward(texts, estimate_batch_bytes(texts), parts, vectors, written=written)

    def begin_chunk(
        self, request: EmbeddingRequest, wanted: int, part_seconds: float, now: float
    ) -> EmbeddingForward | Refused:
        """Build the forward over the next chunk of a shared beginning or of a long text, of at most `wanted` tokens.

        Mark the request as begun, and the beginning or text as in progress. If not even the smallest chunk has room,
        mark nothing and return the refusal. An encoder runs the whole text.
        """
        loaded_model, head = _get_model(request)
        if head.runs_whole_texts:
            text = WaitingText(request, request.waiting[-1])
            refused = self._forwards.check(GateSite.EMBED, estimate_batch_bytes([text]))
            return refused or self.begin_texts([text], part_seconds, now)
        text = request.partial or request.create_next()
        left, stored = text.left, text.stored_tokens

        def estimate(tokens: int) -> int:
            return loaded_model.estimator.estimate_chunk(tokens, stored) + head.estimate_bytes(tokens)

        sizes = generate_chunk_sizes(min(wanted, left), min(self._floor, left))
        count = self._forwards.check_shrinking(GateSite.EMBED, sizes, estimate)
        if isinstance(count, Refused):
            return count
        request.mark_begun(now)
        request.begin_partial(text)
        is_view = stored == len(request.beginning)  # of the shared beginning, or empty
        before = measure_extent(() if is_view else text.cache)
        grow_caches(text.cache, count, len(text.ids))
        piece = text.ids[stored : stored + count]
        number = _count_parts(loaded_model, count, stored, part_seconds)
        states = head.build([piece], text.pooled, text.cache, parts=number)
        copy_state_views(text.cache)
        after = measure_extent(text.cache)
        vectors = head.finish(text.pooled) if count == left and text.place != BEGINNING else None
        ends = (*text.pooled.arrays, *(layer.state for layer in text.cache), *([] if vectors is None else [vectors]))
        parts = [*((array,) for array in states), ends]
        need, results = estimate(count), head.estimate_bytes(count)
        return ChunkForward(request, count, need, parts, vectors, before=before, after=after, results=results)

    def run_part(self, forward: EmbeddingForward, *, rest: bool) -> list[Frame] | Refused:
        """Run the next part of a forward, or with `rest` all remaining parts. The first part has already passed the
        gate; each later part is checked here.

        Return the frames with vectors after the last part, otherwise an empty list. Return the refusal if a later part
        has no room; the part may be tried again. Raise `Halted` if the engine was halted, and `NotFiniteError` if a
        number of the vectors is not finite. Exceptions of MLX propagate.
        """
        if forward.has_begun:  # other work may have taken the room of this part
            refused = self._forwards.check(GateSite.EMBED, forward.need)
            if refused is not None:
                return refused
        loaded_model = forward.loaded_model
        expected = loaded_model.stats.estimate_prefill_seconds(forward.tokens)
        arrays = forward.take_arrays(rest=rest)
        tokens = forward.tokens if forward.has_ended else 0
        with self._forwards.run_native(
            NativeCallKind.EMBED, loaded_model.name, forward.number, expected, prefill_tokens=tokens
        ) as call:
            evaluate(*arrays)
        forward.record_part(time.monotonic() - call.since, self._forwards.peak_tracker)
        return forward.complete() if forward.has_ended else []


def _count_parts(loaded_model: LoadedModel, tokens: int, past: int, seconds: float) -> int:
    """Return the number of parts of a forward over `tokens` tokens after `past` cached ones, so that each part takes
    about `seconds`; 1 if `seconds` is 0. The smallest part is a layer."""
    head = loaded_model.head
    if not seconds or head is None:
        return 1
    expected = loaded_model.stats.pace.estimate_seconds(tokens, past)
    return max(1, min(head.layers, math.ceil(expected / seconds)))


def estimate_batch_bytes(texts: Sequence[WaitingText]) -> int:
    """Return the bytes that one forward over texts needs, including their copies of the shared beginning's cache.

    `texts` has at least one text. All texts have the same model and the same shared beginning, and are padded to the
    longest text.
    """
    loaded_model, head = _get_model(texts[0].request)
    longest = max(len(text.own_ids) for text in texts)
    packed = loaded_model.estimator.estimate_packed(len(texts), longest, len(texts[0].request.beginning))
    return packed + head.estimate_bytes(len(texts) * longest) + _estimate_copies_bytes(texts)


def _estimate_copies_bytes(texts: Sequence[WaitingText]) -> int:
    """Return the bytes of the caches of texts that run over copies of a shared beginning; 0 without a beginning."""
    request = texts[0].request
    if not request.beginning:
        return 0
    longest = max(len(text.ids) for text in texts)
    return len(texts) * compute_cache_bytes(request.loaded_model, longest, 0)


def _get_model(request: EmbeddingRequest) -> tuple[LoadedModel, EmbeddingHead]:
    head = request.loaded_model.head
    assert head is not None  # noqa: S101 only a model with a head admits such a request
    return request.loaded_model, head
