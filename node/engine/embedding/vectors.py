"""Steps after the forward: scale vectors to length 1, shorten them, and check that their numbers are finite."""

from typing import Any, cast

import mlx.core as mx


class NotFiniteError(ValueError):
    """Error: vectors have a number that is not finite, for example because the weights of the model are damaged."""


def normalize(vectors: mx.array) -> mx.array:
    """Return `vectors`, shape (texts, numbers), each scaled to the length 1. A vector of zeros does not change."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def cut_vectors(vectors: mx.array, dimensions: int, *, normalized: bool) -> bytes:
    """Return `vectors`, shape (texts, numbers), cut to the first `dimensions` numbers each (0: all), as bytes.

    The numbers are in single precision, as in `vectors`, text after text. With `normalized`, shortened vectors are
    scaled to the length 1 again.
    """
    if dimensions and dimensions < vectors.shape[1]:
        vectors = vectors[:, :dimensions]
        vectors = normalize(vectors) if normalized else vectors
    return memoryview(cast("Any", mx.contiguous(vectors))).tobytes()


def check_finite(vectors: mx.array) -> None:
    """Raise `NotFiniteError` if a number of the vectors is infinite or not a number."""
    if not mx.isfinite(vectors).all().item():
        raise NotFiniteError("the model computed numbers that are not finite: its weights may be damaged")
