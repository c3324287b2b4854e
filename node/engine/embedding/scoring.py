"""Scores of a decoder: the logits of two tokens after the last token of a prompt."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from node.models.embedding_layout import AnswerTokens

Scorer = Callable[[mx.array], mx.array]
"""Function that returns the logits, shape (texts, 1), of pooled states of texts, shape (texts, features)."""


def create_answer_scorer(model: object, answers: AnswerTokens) -> Scorer:
    """Return the scorer of an mlx-lm decoder. Its score is the logit of the token `answers.true`, minus the logit of
    `answers.false` unless that is None.

    Only the rows of the output layer for these tokens are used. Raise `ValueError` for a token without a row.
    """
    tokens = [answers.true] if answers.false is None else [answers.true, answers.false]
    rows = _read_output_rows(cast("Any", model), tokens).astype(mx.float32)
    direction = rows[0] if answers.false is None else rows[0] - rows[1]
    return lambda states: states @ direction[:, None]


def _read_output_rows(model: Any, tokens: list[int]) -> mx.array:
    """Return the rows of the output layer for some tokens, lazily and dequantized, shape (tokens, features).

    Raise `ValueError` for a token that the layer does not have.
    """
    layer, ids = getattr(model, "lm_head", None), mx.array(tokens)
    tied = layer is None
    layer = model.model.embed_tokens if tied else layer
    if max(tokens) >= layer.weight.shape[0]:
        raise ValueError(f"its tokens of a score are {tokens}, its vocabulary has {layer.weight.shape[0]}")
    if tied:
        return layer(ids)
    if hasattr(layer, "scales"):
        return mx.dequantize(
            layer.weight[ids],
            layer.scales[ids],
            None if layer.biases is None else layer.biases[ids],
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    return layer.weight[ids]
