"""Embedding head: the steps of a loaded model from token ids to vectors or scores.

The steps are the layers of the model, the pooling, the Dense layers, the normalization and the scorer, in this order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from node.engine.embedding.encoders.encoder import Encoder
from node.engine.embedding.layer_states import choose_pauses, count_layers, record_layers
from node.engine.embedding.pooling import PooledTexts
from node.engine.embedding.scoring import Scorer, create_answer_scorer
from node.engine.embedding.vectors import normalize
from node.engine.kv.kv_cache import LayerCache, TextModel
from node.models.embedding_layout import Activation, EmbeddingLayout, Pooling
from wire.frames import MAX_VECTORS_BYTES, NUMBER_BYTES

HiddenStates = Callable[..., mx.array]
"""Function that returns the hidden states, shape (texts, tokens, features), of token ids, shape (texts, tokens). Its
argument `cache`, a list of layer caches, is optional."""
_ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    Activation.IDENTITY: lambda array: array,
    Activation.TANH: mx.tanh,
}


COPIES = 3
"""Copies of the hidden states in single precision during the pooling: converted, masked and weighted."""
_SINGLE = frozenset({Pooling.CLS, Pooling.LAST})
"""Poolings that read the state of one token."""


class EmbeddingHeadError(ValueError):
    """Error: a model cannot compute vectors. Its layers or Dense weights do not fit together, its vectors are too long,
    or its architecture gives no access to hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingHead:
    """Steps from token ids to vectors or scores of a loaded model (see the module's docstring)."""

    layout: EmbeddingLayout
    """Pooling and further steps, as the model's files define them."""
    run_layers: HiddenStates | Encoder
    """Encoder, or the layers of a decoder without its output layer, as a function that computes hidden states."""
    dense: tuple[dict[str, mx.array], ...]
    """Weights of each Dense layer by name in its file, in the order of the layers."""
    dimensions: int
    """Numbers of a vector; 1 if the model computes scores."""
    token_bytes: int = 0
    """Bytes of the hidden state of a token in single precision; 0 if no pooling reads the states of all tokens."""
    score: Scorer | None = None
    """Function that computes the logits of scores from pooled states; None if the model computes vectors."""

    @property
    def runs_whole_texts(self) -> bool:
        """Whether each text must run in a single forward, because the model is an encoder."""
        return isinstance(self.run_layers, Encoder)

    def estimate_bytes(self, tokens: int) -> int:
        """Return the transient bytes for pooling the states of `tokens` tokens, padding included."""
        return COPIES * self.token_bytes * tokens

    @property
    def arrays(self) -> list[mx.array]:
        """Weights of the Dense layers."""
        return [array for layer in self.dense for array in layer.values()]

    def start(self, lengths: Sequence[int]) -> PooledTexts:
        """Return a pooling for texts of these lengths in tokens, to which no states have been added yet."""
        return PooledTexts(self.layout.poolings, lengths)

    @property
    def layers(self) -> int:
        """Number of layers of the model, which is the maximum number of parts of a forward."""
        return self.run_layers.shape.layers if isinstance(self.run_layers, Encoder) else count_layers(self.run_layers)

    def build(
        self,
        rows: Sequence[Sequence[int]],
        pooled: PooledTexts,
        cache: list[LayerCache] | None = None,
        segments: Sequence[int] = (),
        parts: int = 1,
    ) -> list[mx.array]:
        """Build a forward over the next tokens of some texts, and add their lazy states to `pooled`. Evaluate nothing.

        `rows` has the token ids of the texts, padded to one length; without a `cache`, these must be whole texts.
        `segments` has for each row the position of the first token of the second text, or 0 for a row without a second
        text. It is empty if all rows are single texts. Return the lazy states, shape (texts, tokens, features), after
        each of the `parts` of the forward but the last. The list is empty if the architecture does not show the states
        between its layers.
        """
        pauses, between = choose_pauses(self.layers, parts), list[mx.array]()

        def record(layer: int, states: mx.array) -> None:
            if layer in pauses:
                between.append(states)

        if isinstance(self.run_layers, Encoder):
            pooled.add(self.run_layers.run(rows, pooled.lengths, segments, record))
        else:
            ids = mx.array([list(row) for row in rows])
            with record_layers(self.run_layers, record):
                pooled.add(self.run_layers(ids) if cache is None else self.run_layers(ids, cache=cache))
        return between

    def finish(self, pooled: PooledTexts) -> mx.array:
        """Return the vectors of texts whose tokens were all added: a lazy array in single precision, shape (texts,
        dimensions).

        If the model computes scores, each vector is one score from 0 to 1.
        """
        vectors = pooled.compute()
        for layer, weights in zip(self.layout.dense, self.dense, strict=True):
            vectors = vectors @ weights["linear.weight"].astype(mx.float32).T
            if layer.bias:
                vectors = vectors + weights["linear.bias"].astype(mx.float32)
            vectors = _ACTIVATIONS[layer.activation](vectors)
        vectors = normalize(vectors) if self.layout.normalize else vectors
        return vectors if self.score is None else mx.sigmoid(self.score(vectors))


def load_head(folder: Path, layout: EmbeddingLayout, model: TextModel | Encoder) -> EmbeddingHead:
    """Return the embedding head of the model in a folder, with lazy weights.

    Raise `EmbeddingHeadError` if the layers do not fit together, the vectors are too long, or the model gives no access
    to hidden states. Raise `ValueError` if an answer token of its scores is not in the vocabulary. Exceptions of MLX
    for faulty files propagate.
    """
    if isinstance(model, Encoder):
        layers, hidden = model, model.shape.hidden
    else:
        layers = find_layers(model)
        hidden = layers(mx.array([[0]])).shape[-1]  # lazy: only the shape is computed
    features = hidden * len(layout.poolings)
    dense: list[dict[str, mx.array]] = []
    for layer in layout.dense:
        if layer.inputs != features:
            raise EmbeddingHeadError(f"{layer.file} takes {layer.inputs} features, its input has {features}")
        weights = cast("dict[str, mx.array]", mx.load(str(folder / layer.file)))
        if layer.bias and "linear.bias" not in weights:
            raise EmbeddingHeadError(f"{layer.file} has no linear.bias")
        dense.append(weights)
        features = layer.outputs
    if features * NUMBER_BYTES > MAX_VECTORS_BYTES:
        raise EmbeddingHeadError(
            f"its vectors have {features} numbers, the limit is {MAX_VECTORS_BYTES // NUMBER_BYTES}"
        )
    score = _find_scorer(layout, model)
    features = features if score is None else 1
    reads_all = not _SINGLE.issuperset(layout.poolings)
    return EmbeddingHead(layout, layers, tuple(dense), features, hidden * NUMBER_BYTES if reads_all else 0, score)


def _find_scorer(layout: EmbeddingLayout, model: TextModel | Encoder) -> Scorer | None:
    """Return the function that computes the logits of scores; None if the model computes vectors."""
    if isinstance(model, Encoder):
        return model.classify if model.shape.has_classifier else None
    return None if layout.answers is None else create_answer_scorer(model, layout.answers)


def find_layers(model: TextModel) -> HiddenStates:
    """Return the part of an mlx-lm model that computes hidden states. Raise `EmbeddingHeadError` if it has none."""
    found: Any = model
    if not hasattr(found, "model"):
        found = getattr(found, "language_model", None)
    layers = getattr(found, "model", None)
    if not callable(layers):
        raise EmbeddingHeadError("its architecture gives no access to hidden states")
    return cast("HiddenStates", layers)
