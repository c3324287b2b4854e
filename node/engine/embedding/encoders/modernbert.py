"""ModernBERT: rotary positions, a normalization before each part of a layer, and layers with a window.

The computation is that of `modeling_modernbert.py` of transformers.
"""

from collections.abc import Iterator

import mlx.core as mx

from node.engine.embedding.encoders.weights import (
    EncoderWeights,
    apply_gelu,
    compute_attention,
    list_layer_names,
    split_heads,
)
from node.engine.embedding.layer_states import StateRecorder
from node.models.embedding_layout import EncoderShape

_WORDS = "embeddings.tok_embeddings"


def list_modernbert_names(shape: EncoderShape) -> Iterator[str]:
    """Yield the names of the weights of an encoder of this shape. An optional name ends with a question mark."""
    yield from list_layer_names(_WORDS, bias=False)
    for name in ("embeddings.norm", "final_norm"):
        yield from list_layer_names(name, bias=None)
    for layer in range(shape.layers):
        parts = ("attn.Wqkv", "attn.Wo", "mlp_norm", "mlp.Wi", "mlp.Wo")
        for part in parts if layer == 0 else ("attn_norm", *parts):  # the first layer reads normalized embeddings
            yield from list_layer_names(f"layers.{layer}.{part}", bias=None)
    if shape.has_classifier:
        for name in ("head.dense", "head.norm", "classifier"):
            yield from list_layer_names(name, bias=None)


def list_modernbert_rows(shape: EncoderShape) -> dict[str, int]:
    """Return the minimum number of rows of each embedding matrix, by the name of the matrix."""
    return {_WORDS: shape.vocabulary}


def run_modernbert(
    weights: EncoderWeights, shape: EncoderShape, ids: mx.array, mask: mx.array | None, record: StateRecorder
) -> mx.array:
    """Return the hidden states of texts, a lazy array of the shape (texts, tokens, features).

    `ids` are token ids, shape (texts, tokens). `mask`, shape (texts, 1, 1, tokens), is False for padding; None without
    padding. `record` is called after each layer.
    """
    states = weights.take_rows(_WORDS, ids)
    states = weights.normalize("embeddings.norm", states, shape.epsilon)
    near = _build_window(ids.shape[1], shape.window, mask)
    for layer in range(shape.layers):
        is_global = layer % shape.global_interval == 0
        states = _run_layer(weights, shape, layer, states, mask if is_global else near)
        record(layer + 1, states)
    return weights.normalize("final_norm", states, shape.epsilon)


def _build_window(tokens: int, window: int, mask: mx.array | None) -> mx.array | None:
    """Return the mask of layers with a window: True for tokens at most `window` positions away that are not padding.
    Return `mask` if the window covers all tokens."""
    if tokens <= window + 1:
        return mask
    places = mx.arange(tokens)
    near = (mx.abs(places[:, None] - places[None]) <= window)[None, None]
    return near if mask is None else near & mask


def _run_layer(
    weights: EncoderWeights, shape: EncoderShape, layer: int, states: mx.array, mask: mx.array | None
) -> mx.array:
    name = f"layers.{layer}"
    before = weights.normalize(f"{name}.attn_norm", states, shape.epsilon) if layer else states
    query, key, value = (
        split_heads(part, shape.heads)
        for part in mx.split(weights.apply_linear(f"{name}.attn.Wqkv", before), 3, axis=-1)
    )
    theta = shape.global_theta if layer % shape.global_interval == 0 else shape.local_theta
    size = shape.hidden // shape.heads
    query, key = (
        mx.fast.rope(projected, size, traditional=False, base=theta, scale=1.0, offset=0) for projected in (query, key)
    )
    states = states + weights.apply_linear(f"{name}.attn.Wo", compute_attention(query, key, value, mask))
    inner = weights.apply_linear(f"{name}.mlp.Wi", weights.normalize(f"{name}.mlp_norm", states, shape.epsilon))
    passed, gate = mx.split(inner, 2, axis=-1)
    return states + weights.apply_linear(f"{name}.mlp.Wo", apply_gelu(passed) * gate)


def classify_modernbert(weights: EncoderWeights, shape: EncoderShape, states: mx.array) -> mx.array:
    """Return the logits of the classifier, a lazy array of the shape (texts, 1). `states` are pooled hidden states,
    shape (texts, features)."""
    inner = apply_gelu(weights.apply_linear("head.dense", states))
    return weights.apply_linear("classifier", weights.normalize("head.norm", inner, shape.epsilon))
