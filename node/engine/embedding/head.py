"""Embedding head: the steps of a loaded model from token ids to vectors or scores.

The steps are the layers of the model, the pooling, the Dense layers, the normalization and the scorer.
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
"""Function from token ids (texts, tokens), and an optional `cache`, to hidden states (texts, tokens, features)."""
_ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    Activation.IDENTITY: lambda array: array,
    Activation.TANH: mx.tanh,
}


COPIES = 3
"""Copies of the states in single precision while they are pooled: the states, masked, and weighted."""
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
    """Function that computes hidden states, the layers of a decoder without its output layer; or an encoder."""
    dense: tuple[dict[str, mx.array], ...]
    """Weights of its Dense layers by their names in the file, in the order of the layers."""
    dimensions: int
    """Numbers of a vector; 1 if the model computes scores."""
    token_bytes: int = 0
    """Bytes of a token's state in single precision while it is pooled; 0 if no pooling reads all states."""
    score: Scorer | None = None
    """Function that computes the logits of scores from pooled states; None if the model computes vectors."""

    @property
    def runs_whole_texts(self) -> bool:
        """Whether a text runs in one forward only, because the model is an encoder."""
        return isinstance(self.run_layers, Encoder)

    def estimate_bytes(self, tokens: int) -> int:
        """Return the bytes for pooling the states of `tokens` tokens, padding included."""
        return COPIES * self.token_bytes * tokens

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays of the Dense layers."""
        return [array for layer in self.dense for array in layer.values()]

    def start(self, lengths: Sequence[int]) -> PooledTexts:
        """Return the empty pooling of texts with these lengths in tokens."""
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
        """Build a forward over the next tokens of some texts, padded to one length, and add their states to `pooled`,
        lazily.

        Return the states after each of its `parts` but the last, shape (texts, tokens, features), lazily; none if the
        architecture does not show them. Without a `cache`, `rows` must have whole texts. `segments` has the position of
        the first token of each second text of a pair, 0 without a second text; empty if no text has one.
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
        """Return the vectors of texts whose tokens were all added, shape (texts, dimensions), in single precision,
        lazily.

        A model that computes scores returns the scores as its vectors, from 0 to 1.
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
    """Return the lazy head of a model.

    Raise `EmbeddingHeadError` if its parts do not fit together, its vectors are too long, or the model gives no access
    to hidden states. Raise `ValueError` if a token of its scores is not in the vocabulary. Exceptions of faulty files
    propagate.
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
