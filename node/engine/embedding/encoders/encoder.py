"""Encoder of a loaded model: hidden states of whole texts, and the logits of a cross-encoder."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from node.engine.embedding.encoders.bert import classify_bert, list_bert_names, list_bert_rows, run_bert
from node.engine.embedding.encoders.modernbert import (
    classify_modernbert,
    list_modernbert_names,
    list_modernbert_rows,
    run_modernbert,
)
from node.engine.embedding.encoders.weights import EncoderWeights, read_arrays, read_quantization
from node.engine.embedding.layer_states import StateRecorder
from node.models.embedding_layout import EncoderFamily, EncoderShape
from node.models.weight_files import parse_json_object


class Encoder:
    """Encoder with its weights. A text runs in one forward without a cache, because tokens attend to later ones."""

    def __init__(self, shape: EncoderShape, weights: EncoderWeights) -> None:
        self.shape = shape
        self._weights = weights
        self._is_modern = shape.family is EncoderFamily.MODERNBERT

    @property
    def arrays(self) -> list[mx.array]:
        """Weights that the encoder uses, as lazy arrays."""
        return list(self._weights.arrays.values())

    def run(
        self,
        rows: Sequence[Sequence[int]],
        lengths: Sequence[int],
        segments: Sequence[int] = (),
        record: StateRecorder = lambda layer, states: None,
    ) -> mx.array:
        """Return the hidden states of texts, a lazy array of the shape (texts, tokens, features).

        `rows` are the token ids of the texts, padded to one length, `lengths` the numbers of tokens without padding.
        `segments` has for each row the position of the first token of the second text, or 0 for a row without a second
        text. It is empty if all rows are single texts. `record` is called after each layer.
        """
        ids = mx.array([list(row) for row in rows])
        places, tokens = mx.arange(ids.shape[1])[None], ids.shape[1]
        mask = None
        if min(lengths) < tokens:
            mask = (places < mx.array(list(lengths))[:, None])[:, None, None]
        if self._is_modern:
            return run_modernbert(self._weights, self.shape, ids, mask, record)
        begins = mx.array([begin or tokens for begin in segments])[:, None] if any(segments) else None
        second = None if begins is None else (places >= begins).astype(ids.dtype)
        return run_bert(self._weights, self.shape, ids, mask, second, record)

    def classify(self, states: mx.array) -> mx.array:
        """Return the logits of the classifier, a lazy array of the shape (texts, 1). `states` are pooled hidden states,
        shape (texts, features)."""
        classify = classify_modernbert if self._is_modern else classify_bert
        return classify(self._weights, self.shape, states)


def load_encoder(folder: Path, shape: EncoderShape) -> Encoder:
    """Return the encoder in a model folder, with lazy weights.

    Raise `EncoderWeightsError` if a weight is missing or has too few rows. Raise `OSError` or `ValueError` for a
    `config.json` that cannot be read or parsed. Raise `KeyError`, `TypeError` or `ValueError` for quantized weights
    without bits or group size. Exceptions of MLX for faulty weight files propagate.
    """
    is_modern = shape.family is EncoderFamily.MODERNBERT
    names = list_modernbert_names(shape) if is_modern else list_bert_names(shape)
    config = parse_json_object((folder / "config.json").read_bytes())
    weights = EncoderWeights(read_arrays(folder), names, read_quantization(config))
    for name, rows in (list_modernbert_rows if is_modern else list_bert_rows)(shape).items():
        weights.check_rows(name, rows)
    return Encoder(shape, weights)
