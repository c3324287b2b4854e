"""Keys and values beyond sliding windows, so that a cached prompt can be cut where another prompt differs.

A layer with a sliding window keeps only its last `max_size` tokens. A prompt that shares only the first half of a
stored prompt could not reuse its cache. The tokens of every prefill chunk are therefore copied out of the windows.
Right after a chunk, a window holds at least the tokens of that chunk.

    chunk ─► record ─► … ─► store (`StoredWindow` in place of each window) ─► restore at any length in `cuts`

A length can be restored if the `max_size` tokens before it are recorded. Tokens of an answer are not recorded; only the
last window of them is known. All windows of a model record the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from node.engine.kv.kv_cache import LayerCache, Layers, copy_prefix, create_window, evaluate, materialize
from node.engine.kv.prefix_store import Cuts


class WindowPiece(NamedTuple):
    """Keys and values of some tokens of a window, shape (1, heads, tokens, features).

    A recorded piece has evaluated arrays that contain no other tokens. A piece from `view_part` has views of the arrays
    of another piece.
    """

    start: int
    """Position of the first token."""
    keys: mx.array
    values: mx.array

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.keys.nbytes + self.values.nbytes

    def view_part(self, start: int, end: int) -> "WindowPiece":
        """Return the tokens of this piece from position `start` up to but not including `end`, as views. Positions
        outside the piece are left out."""
        first, last = max(start, self.start), min(end, self.end)
        keys, values = (array[..., first - self.start : last - self.start, :] for array in (self.keys, self.values))
        return WindowPiece(first, keys, values)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWindow:
    """Sliding window of a stored sequence, with its history."""

    max_size: int
    """Tokens of the window."""
    pieces: tuple[WindowPiece, ...]
    """Recorded tokens in order. They may have gaps."""

    @property
    def state(self) -> object:
        """Keys and values of each piece, as pairs of arrays."""
        return [(piece.keys, piece.values) for piece in self.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def restore(self, length: int) -> LayerCache:
        """Return the cache of the layer after the first `length` tokens. `length` must be in a range of
        `compute_cuts`."""
        start = max(0, length - self.max_size)
        parts = [piece.view_part(start, length) for piece in self.pieces if piece.end > start and piece.start < length]
        keys = mx.concatenate([part.keys for part in parts], axis=2)
        values = mx.concatenate([part.values for part in parts], axis=2)
        evaluate(keys, values)
        return create_window(self.max_size, keys, values, length)


class WindowHistory:
    """History of all windows of a row during its prefill. `windows` has the pieces recorded so far, by window."""

    def __init__(self, windows: Sequence[Sequence[WindowPiece]] = ()) -> None:
        self._windows = [list(pieces) for pieces in windows]
        self.is_lost = False
        """Whether the history was released, because memory was short."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for pieces in self._windows for piece in pieces)

    def estimate_bytes(self, cache: Layers, count: int) -> int:
        """Return the bytes that `record` would take for `count` tokens, as the sum over all windows of `cache`."""
        windows = cast("list[Any]", _list_windows(cache))
        return sum(window.nbytes // window.keys.shape[2] * count for window in windows)

    def record(self, cache: Layers, count: int) -> None:
        """Copy the last `count` tokens out of the windows of a row's cache. Must be called right after the chunk that
        wrote them."""
        found = [_copy_last(layer, count) for layer in _list_windows(cache)]
        evaluate([(piece.keys, piece.values) for piece in found])
        self._windows = self._windows or [[] for _ in found]
        for pieces, piece in zip(self._windows, found, strict=True):
            pieces.append(piece)

    def build_layers(self, cache: Layers, length: int) -> Layers:
        """Return the layers of a row's cache for the prefix store. The history up to `length` tokens replaces each
        window. All other layers are returned unchanged, not cut to `length`."""
        pieces = iter(self._windows)
        return [
            cast("LayerCache", StoredWindow(cast("Any", layer).max_size, _cut_pieces(next(pieces), length)))
            if type(cast("object", layer)) is RotatingKVCache
            else layer
            for layer in cache
        ]

    def clear(self) -> None:
        """Release all pieces and set `is_lost`, because memory is short. After this, `record` must not be called
        again."""
        self._windows, self.is_lost = [], True


class WindowHistories:
    """Histories of the prefills in progress, whose bytes no stored entry counts yet."""

    def __init__(self) -> None:
        self._open: WeakSet[WindowHistory] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of all histories in progress."""
        return sum(history.nbytes for history in self._open)

    def add(self, history: WindowHistory) -> WindowHistory:
        """Count a history until it is removed, or until its prefill has ended and nothing else refers to it. Return the
        history."""
        self._open.add(history)
        return history

    def remove(self, history: WindowHistory) -> None:
        """Stop counting a history, because its arrays are in an entry."""
        self._open.discard(history)

    def clear(self) -> int:
        """Release all histories in progress; return their bytes."""
        released = self.nbytes
        for history in self._open:
            history.clear()
        self._open.clear()
        return released


def begin_history(layers: Layers, length: int) -> WindowHistory:
    """Return the history of a row that starts with the first `length` tokens of a stored cache."""
    windows: list[tuple[WindowPiece, ...]] = []
    for layer in cast("list[object]", layers):
        if isinstance(layer, StoredWindow):
            windows.append(_cut_pieces(layer.pieces, length))
        elif type(layer) is RotatingKVCache:
            windows.append((_copy_last(layer, min(length, layer.max_size)),))
    return WindowHistory(windows)


def extend_history(layers: Layers, earlier: Layers) -> Layers:
    """Return the cache of an ended row for the prefix store, with the history of `earlier`, a stored cache of its first
    tokens.

    A sliding window in `layers` has only its last tokens. Layers without a window are returned unchanged. `earlier`
    does not change; the result shares the arrays of its history.
    """
    return [
        _extend_window(layer, before) if isinstance(before, StoredWindow) else layer
        for layer, before in zip(layers, cast("list[object]", earlier), strict=True)
    ]


def _extend_window(layer: LayerCache, before: StoredWindow) -> LayerCache:
    window = cast("Any", layer)
    last = _copy_last(window, min(window.offset, window.max_size))
    fresh = last.view_part(before.pieces[-1].end, last.end)
    fresh = WindowPiece(fresh.start, mx.contiguous(fresh.keys), mx.contiguous(fresh.values))
    evaluate(fresh.keys, fresh.values)
    return cast("LayerCache", StoredWindow(before.max_size, (*before.pieces, fresh)))


def restore_layers(layers: Layers, length: int, *, copy: bool) -> Layers:
    """Return a row's cache with the first `length` tokens of a stored cache. Without `copy`, the stored cache is
    consumed and must hold exactly these tokens."""
    return [
        layer.restore(length)
        if isinstance(layer, StoredWindow)
        else copy_prefix([cast("LayerCache", layer)], length)[0]
        if copy
        else cast("LayerCache", layer)
        for layer in cast("list[object]", layers)
    ]


def cut_layers(layers: Layers, length: int) -> Layers:
    """Return views of the first `length` tokens of a cache. Stored windows are returned unchanged, because they already
    end at `length`."""
    return [
        cast("LayerCache", layer)
        if isinstance(layer, StoredWindow)
        else copy_prefix([cast("LayerCache", layer)], length)[0]
        for layer in cast("list[object]", layers)
    ]


def materialize_layers(layers: Layers) -> Layers:
    """Return the layers of a row with evaluated arrays of their own, so that the row's arrays can be freed.

    Stored windows are returned unchanged, because their arrays are already copies.
    """
    return [
        cast("LayerCache", layer) if isinstance(layer, StoredWindow) else materialize([cast("LayerCache", layer)])[0]
        for layer in cast("list[object]", layers)
    ]


def compute_cuts(layers: Layers) -> Cuts:
    """Return the ranges of lengths in tokens to which a stored cache with windows can be cut; empty without a
    history."""
    windows = [layer for layer in cast("list[object]", layers) if isinstance(layer, StoredWindow)]
    if not windows:
        return ()
    size, spans = max(window.max_size for window in windows), list[tuple[int, int]]()
    for piece in windows[0].pieces:
        if spans and spans[-1][1] == piece.start:
            spans[-1] = spans[-1][0], piece.end
        else:
            spans.append((piece.start, piece.end))
    reach = [(start + size if start else 0, end) for start, end in spans]
    return tuple((first, last) for first, last in reach if first <= last)


def _list_windows(cache: Iterable[LayerCache]) -> list[object]:
    return [layer for layer in cast("Iterable[object]", cache) if type(layer) is RotatingKVCache]


def _copy_last(layer: Any, count: int) -> WindowPiece:
    """Return the last `count` tokens of a window. Its copies are lazy."""
    keys, values = (mx.contiguous(layer._temporal_order(a)[..., -count:, :]) for a in (layer.keys, layer.values))
    return WindowPiece(layer.offset - count, keys, values)


def _cut_pieces(pieces: Iterable[WindowPiece], length: int) -> tuple[WindowPiece, ...]:
    """Return the pieces up to `length` tokens. A piece that ends later is cut and copied, which drops its other
    tokens."""
    kept = list[WindowPiece]()
    for piece in pieces:
        if piece.end <= length:
            kept.append(piece)
        elif piece.start < length:
            part = piece.view_part(piece.start, length)
            kept.append(WindowPiece(part.start, mx.contiguous(part.keys), mx.contiguous(part.values)))
    evaluate([(piece.keys, piece.values) for piece in kept])
    return tuple(kept)
