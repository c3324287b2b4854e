"""Vectors of texts after the forward: length 1, fewer dimensions, numbers that are not finite."""

from typing import Any, cast

import mlx.core as mx


class NotFiniteError(ValueError):
    """Error of vectors with a number that is not finite, for example because the weights of the model are damaged."""


def normalize(vectors: mx.array) -> mx.array:
    """Return `vectors`, shape (texts, numbers), each scaled to the length 1; a vector of zeros stays."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def cut_vectors(vectors: mx.array, dimensions: int, *, normalized: bool) -> bytes:
    """Return `vectors`, shape (texts, numbers), cut to `dimensions` numbers each (0: all), as bytes, text after text.

    The numbers are in single precision, as in `vectors`. Cut vectors are normalized again if `normalized`.
    """
    if dimensions and dimensions < vectors.shape[1]:
        vectors = vectors[:, :dimensions]
        vectors = normalize(vectors) if normalized else vectors
    return memoryview(cast("Any", mx.contiguous(vectors))).tobytes()


def check_finite(vectors: mx.array) -> None:
    """Raise `NotFiniteError` if a number of the vectors is infinite or not a number."""
    if not mx.isfinite(vectors).all().item():
        raise NotFiniteError("the model computed numbers that are not finite: its weights may be damaged")
