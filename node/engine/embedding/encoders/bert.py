"""BERT, RoBERTa and XLM-RoBERTa: absolute positions, and a normalization after each part of a layer.

The computation is that of `modeling_bert.py` and `modeling_roberta.py` of transformers.
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
from node.models.embedding_layout import EncoderFamily, EncoderShape

_ATTENTION = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
_WORDS = "embeddings.word_embeddings"
_PLACES = "embeddings.position_embeddings"
_SEGMENTS = "embeddings.token_type_embeddings"


def list_bert_names(shape: EncoderShape) -> Iterator[str]:
    """Yield the names of the weights of an encoder of this shape. An optional name ends with a question mark."""
    for name in (_WORDS, _PLACES, _SEGMENTS):
        yield from list_layer_names(name, bias=False)
    yield from list_layer_names("embeddings.LayerNorm")
    for layer in range(shape.layers):
        for part in (
            *_ATTENTION,
            "attention.output.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        ):
            yield from list_layer_names(f"encoder.layer.{layer}.{part}")
    if shape.has_classifier:
        is_bert = shape.family is EncoderFamily.BERT
        for name in ("pooler.dense", "classifier") if is_bert else ("classifier.dense", "classifier.out_proj"):
            yield from list_layer_names(name)


def list_bert_rows(shape: EncoderShape) -> dict[str, int]:
    """Return the minimum number of rows of each embedding matrix, by the name of the matrix."""
    pairs = shape.has_classifier and shape.family is EncoderFamily.BERT
    return {_WORDS: shape.vocabulary, _PLACES: shape.first_position + shape.context, _SEGMENTS: 2 if pairs else 1}


def run_bert(
    weights: EncoderWeights,
    shape: EncoderShape,
    ids: mx.array,
    mask: mx.array | None,
    segments: mx.array | None,
    record: StateRecorder,
) -> mx.array:
    """Return the hidden states of texts, a lazy array of the shape (texts, tokens, features).

    `ids` are token ids, shape (texts, tokens). `mask`, shape (texts, 1, 1, tokens), is False for padding; None without
    padding. `segments`, shape (texts, tokens), is 1 for tokens of the second text of a pair; None without second texts.
    RoBERTa ignores `segments`. `record` is called after each layer.
    """
    places = mx.arange(ids.shape[1]) + shape.first_position
    states = weights.take_rows(_WORDS, ids)
    states = states + weights.take_rows(_PLACES, places)[None]
    if segments is None or shape.family is EncoderFamily.ROBERTA:
        segments = mx.zeros_like(ids)
    states = states + weights.take_rows(_SEGMENTS, segments)
    states = weights.normalize("embeddings.LayerNorm", states, shape.epsilon)
    for layer in range(shape.layers):
        states = _run_layer(weights, shape, f"encoder.layer.{layer}", states, mask)
        record(layer + 1, states)
    return states


def _run_layer(
    weights: EncoderWeights, shape: EncoderShape, name: str, states: mx.array, mask: mx.array | None
) -> mx.array:
    query, key, value = (
        split_heads(weights.apply_linear(f"{name}.{part}", states), shape.heads) for part in _ATTENTION[:3]
    )
    mixed = weights.apply_linear(f"{name}.{_ATTENTION[3]}", compute_attention(query, key, value, mask))
    states = weights.normalize(f"{name}.attention.output.LayerNorm", mixed + states, shape.epsilon)
    inner = apply_gelu(weights.apply_linear(f"{name}.intermediate.dense", states))
    inner = weights.apply_linear(f"{name}.output.dense", inner)
    return weights.normalize(f"{name}.output.LayerNorm", inner + states, shape.epsilon)


def classify_bert(weights: EncoderWeights, shape: EncoderShape, states: mx.array) -> mx.array:
    """Return the logits of the classifier, a lazy array of the shape (texts, 1). `states` are pooled hidden states,
    shape (texts, features)."""
    is_bert = shape.family is EncoderFamily.BERT
    inner, last = ("pooler.dense", "classifier") if is_bert else ("classifier.dense", "classifier.out_proj")
    return weights.apply_linear(last, mx.tanh(weights.apply_linear(inner, states)))
