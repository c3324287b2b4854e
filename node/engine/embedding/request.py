"""Admitted requests for embeddings or scores: the texts still to process, and the memory that they reserve."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from node.engine.embedding.pooling import PooledTexts
from node.engine.embedding.shared_beginning import find_shared_beginning
from node.engine.kv.kv_cache import LayerCache, create_cache, repeat_row, sum_nbytes
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_stats import ModelHold
from node.engine.requests.prepared import PreparedEmbedding
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import NUMBER_BYTES, Finished, Timings

BEGINNING = -1
"""Value of `PartialText.place` for the shared beginning of a request's texts, which has no vector."""


@dataclass(slots=True, eq=False)
class PartialText:
    """Text or shared beginning that runs chunk by chunk over a KV cache. A text is split if a forward over the whole
    text has no room or takes too long."""

    place: int
    """Position of the text in its request; `BEGINNING` for the shared beginning of the request's texts."""
    ids: Sequence[int]
    """Token ids of the whole text, or of the shared beginning."""
    cache: list[LayerCache]
    """Keys and values of the tokens that have run, and of the shared beginning before them."""
    pooled: PooledTexts
    """Pooled states of the tokens that have run."""
    stored_tokens: int = 0
    """Number of tokens in the cache, including the tokens of the shared beginning."""

    @property
    def left(self) -> int:
        """Number of tokens that have not run."""
        return len(self.ids) - self.stored_tokens

    def record_chunk(self, tokens: int) -> None:
        """Record a forward over the next `tokens` tokens."""
        self.stored_tokens += tokens


@dataclass(slots=True, eq=False)
class EmbeddingRequest:
    """Admitted request for embeddings or scores. Times are monotonic seconds."""

    prepared: PreparedEmbedding
    """The tokenized request."""
    loaded_model: LoadedModel
    """Model of the request."""
    hold: ModelHold
    """Hold that keeps the model in memory until the request ends."""
    arrived: float
    """Time of arrival."""
    floor: int
    """Tokens of the smallest chunk. Without a shared beginning, a text of at most `floor` tokens needs no cache."""
    cached: int = 0
    """Number of tokens at the start of the first text that the prefix cache had at admission."""
    begun: float = 0.0
    """Start of the first forward; 0.0 before."""
    retry_at: float = 0.0
    """Time of the next attempt after a refusal by the gate. 0.0 or a past time: the request does not wait."""
    alone: bool = False
    """Whether the texts run in forwards without texts of other requests, because a shared forward failed."""
    partial: PartialText | None = None
    """Text or shared beginning in progress over a cache; None without one."""
    waiting: list[int] = field(default_factory=list[int])
    """Positions of the texts that have no vector and are not `partial`, the longest first. Texts of a forward in
    progress are included until it is complete."""
    beginning: tuple[int, ...] = ()
    """Shared beginning of the texts; empty if each text runs from its first token (`find_shared_beginning`)."""
    beginning_cache: list[LayerCache] = field(default_factory=list[LayerCache])
    """Keys and values of `beginning`; empty until they are computed or restored."""
    restored_tokens: int = 0
    """Tokens of `beginning` that came from the prefix cache."""

    def __post_init__(self) -> None:
        inputs = self.prepared.inputs
        self.waiting = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
        self.beginning = find_shared_beginning(self.loaded_model, inputs, self.cached)

    @property
    def number(self) -> int:
        """The coordinator's number of the request."""
        return self.prepared.request.request

    @property
    def weighted_key(self) -> WeightedKey:
        """API key of the request."""
        return self.prepared.request.weighted_key

    @property
    def dimensions(self) -> int:
        """Length of each vector to send: the requested length, or the length that the embedding head computes."""
        head = self.loaded_model.head
        return self.prepared.request.dimensions or (0 if head is None else head.dimensions)

    @property
    def left(self) -> int:
        """Number of tokens of all texts that no complete forward has processed. The shared beginning counts once."""
        texts = sum(self.count_own_tokens(place) for place in self.waiting)
        return (
            texts
            + (len(self.beginning) if self.needs_beginning else 0)
            + (0 if self.partial is None else self.partial.left)
        )

    @property
    def needs_beginning(self) -> bool:
        """Whether the cache of the shared beginning has to be computed and is not in progress."""
        return bool(self.beginning) and not self.beginning_cache and self.partial is None

    @property
    def has_ended(self) -> bool:
        """Whether all texts of the request have vectors or scores."""
        return not self.waiting and self.partial is None

    def count_beginning(self) -> int:
        """Return the number of tokens of the shared beginning; 0 until its cache is complete."""
        return len(self.beginning) if self.beginning_cache else 0

    def count_own_tokens(self, place: int) -> int:
        """Return the number of tokens of a text after the shared beginning. `place` is the position of the text."""
        return len(self.prepared.inputs[place]) - len(self.beginning)

    def compute_reserved_bytes(self) -> int:
        """Return the bytes that the request still needs: vectors of its remaining texts, and caches of its longest text
        and shared beginning. The bytes of existing caches are subtracted."""
        texts = len(self.waiting) + (self.partial is not None)
        vectors = texts * self.dimensions * NUMBER_BYTES
        beginning = compute_cache_bytes(self.loaded_model, len(self.beginning), 0)
        longest = compute_cache_bytes(self.loaded_model, self._find_longest(), 0 if self.beginning else self.floor)
        held = min(beginning, sum_nbytes(self.beginning_cache))
        return vectors + beginning + longest - held - self._count_stored()

    def _find_longest(self) -> int:
        partial = 0 if self.partial is None else len(self.partial.ids)
        return max(partial, len(self.prepared.inputs[self.waiting[0]]) if self.waiting else 0)

    def _count_stored(self) -> int:
        if self.partial is None:
            return 0
        most = compute_cache_bytes(self.loaded_model, len(self.partial.ids), 0)
        return min(most, sum_nbytes(self.partial.cache))

    def mark_begun(self, now: float) -> None:
        """Record the start of a forward at the monotonic time `now`. Only the first forward sets `begun`. Clear
        `retry_at`."""
        self.begun = self.begun or now
        self.retry_at = 0.0

    def delay(self, until: float) -> None:
        """Record that the request waits until the monotonic time `until`, because a part of a forward has no room."""
        self.retry_at = until

    def run_alone(self) -> None:
        """Set `alone`: from now on, the texts of this request run in forwards without texts of other requests."""
        self.alone = True

    def take(self, places: Sequence[int]) -> None:
        """Remove the texts at these positions from `waiting`, because their vectors are computed."""
        done = set(places)
        self.waiting = [place for place in self.waiting if place not in done]

    def create_next(self) -> PartialText:
        """Return the shared beginning if it is needed, else the shortest waiting text, with a new cache. The cache of a
        text starts as a copy of the shared beginning's cache, if there is one. The request does not change."""
        head = self.loaded_model.head
        assert head is not None  # noqa: S101 only a model with a head admits such a request
        if self.needs_beginning:
            pooled = head.start([len(self.beginning)])  # it is not read
            return PartialText(BEGINNING, self.beginning, create_cache(self.loaded_model.model), pooled)
        place, start = self.waiting[-1], len(self.beginning)
        cache = repeat_row(self.beginning_cache, 1) if start else create_cache(self.loaded_model.model)
        pooled = head.start([self.count_own_tokens(place)])
        return PartialText(place, self.prepared.inputs[place], cache, pooled, start)

    def begin_partial(self, text: PartialText) -> None:
        """Make `text`, a result of `create_next`, the text in progress (`partial`). Remove it from `waiting`, unless it
        is the shared beginning. Do nothing if it is already in progress."""
        if self.partial is None and text.place != BEGINNING:
            self.waiting.remove(text.place)
        self.partial = text

    def restore_beginning(self, layers: list[LayerCache], tokens: int) -> None:
        """Use `layers`, a copy from the prefix cache, as the keys and values of the first `tokens` tokens of the shared
        beginning.

        If the beginning has more tokens, it becomes `partial`, and its other tokens still have to run.
        """
        head = self.loaded_model.head
        assert head is not None  # noqa: S101 only a model with a head admits such a request
        self.restored_tokens = tokens
        if tokens == len(self.beginning):
            self.beginning_cache = layers
        else:
            pooled = head.start([len(self.beginning) - tokens])  # it is not read
            self.partial = PartialText(BEGINNING, self.beginning, layers, pooled, tokens)

    def end_beginning(self) -> None:
        """Record that the shared beginning, which is `partial`, is complete. Keep its cache for the texts."""
        assert self.partial is not None  # noqa: S101 it is in progress
        self.beginning_cache, self.partial = self.partial.cache, None

    def end_partial(self) -> None:
        """End the text in progress and release its cache."""
        if self.partial is not None:
            self.partial.cache.clear()
        self.partial = None

    def release(self) -> None:
        """Release all caches, because the request ends."""
        self.end_partial()
        self.beginning_cache.clear()

    def build_finished(self, now: float) -> Finished:
        """Return the `Finished` frame of a request that ends at the monotonic time `now`, with its numbers of tokens
        and restored tokens. Its timings are the seconds before the first forward and those since then."""
        timings = Timings(self.begun - self.arrived, now - self.begun)
        return Finished(self.number, (), self.prepared.tokens, 0, self.restored_tokens, timings=timings)


def compute_cache_bytes(loaded_model: LoadedModel, tokens: int, floor: int) -> int:
    """Return the KV bytes of a text of `tokens` tokens. A text of at most `floor` tokens needs no cache: 0."""
    return compute_row_bytes(loaded_model.kv, tokens) if tokens > floor else 0


class EmbeddingTable:
    """Live requests for embeddings or scores, by number. Their memory counts as reserved."""

    def __init__(self) -> None:
        self._live: dict[int, EmbeddingRequest] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[EmbeddingRequest]:
        return iter(tuple(self._live.values()))

    def find(self, number: int) -> EmbeddingRequest | None:
        """Return the request with this number; None if it has ended or is unknown."""
        return self._live.get(number)

    def add(self, request: EmbeddingRequest) -> None:
        """Add an admitted request."""
        self._live[request.number] = request

    def remove(self, request: EmbeddingRequest, now: float) -> None:
        """Remove a request that ends at the monotonic time `now`. Release its memory, and the hold on its model.
        The model counts as used at `now`."""
        del self._live[request.number]
        request.release()
        request.hold.release()
        request.loaded_model.usage.mark_used(now)

    def count_tokens(self) -> int:
        """Return the number of tokens that are not processed yet, over all requests (`EmbeddingRequest.left`)."""
        return sum(request.left for request in self._live.values())

    def compute_reserved_bytes(self) -> int:
        """Return the sum of the bytes that the requests reserve (`EmbeddingRequest.compute_reserved_bytes`)."""
        return sum(request.compute_reserved_bytes() for request in self._live.values())
