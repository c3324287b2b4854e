"""Data classes for the steps from the hidden states of a model to its vectors or scores. Pure.

`embedding_files` and `rerank_files` read these steps from the files of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Pooling(StrEnum):
    """Method that reduces the hidden states of a text to one vector. A model can concatenate several poolings."""

    CLS = "cls"
    """State of the first token."""
    MAX = "max"
    """Maximum of each feature over all tokens."""
    MEAN = "mean"
    """Mean of the states."""
    MEAN_SQRT_LENGTH = "mean_sqrt_len"
    """Sum of the states divided by the square root of their number."""
    WEIGHTED_MEAN = "weightedmean"
    """Mean with the position of each token, from 1, as its weight."""
    LAST = "lasttoken"
    """State of the last token."""


class Activation(StrEnum):
    """Activation function after a Dense layer."""

    IDENTITY = "Identity"
    TANH = "Tanh"


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Dense layer after the pooling."""

    file: str
    """Path of the layer's weights, relative to the folder of the model."""
    inputs: int
    """Length of a vector before the layer."""
    outputs: int
    """Length of a vector after the layer."""
    bias: bool
    """Whether the layer has a bias."""
    activation: Activation
    """Activation function after the layer."""
    nbytes: int
    """Bytes of the layer's weights."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens of a decoder, such as `yes` and `no`, whose logits after a query and a document define its score."""

    true: int
    """Id of the token for a relevant document."""
    false: int | None
    """Id of the token for any other document; None if only the logit of `true` decides the score."""
    has_template: bool
    """Whether the chat template of the model has the roles `query` and `document`.

    Otherwise the prompt of Qwen3-Reranker is used.
    """


class EncoderFamily(StrEnum):
    """Architecture of an encoder, of those that Macpool runs."""

    BERT = "bert"
    """Learned positions and segments, a normalization after each block."""
    ROBERTA = "roberta"
    """BERT whose positions begin after the id of the padding token, without segments; also XLM-RoBERTa."""
    MODERNBERT = "modernbert"
    """Rotary positions, and layers whose attention has a window."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Shape of an encoder, by its config."""

    family: EncoderFamily
    layers: int
    """Number of layers."""
    heads: int
    """Attention heads of a layer."""
    hidden: int
    """Number of features of a hidden state."""
    epsilon: float
    """Small number in the divisor of a normalization."""
    vocabulary: int
    """Number of token ids."""
    context: int
    """Maximum tokens of a text."""
    first_position: int
    """Position id of the first token: the id of the padding token + 1 for ROBERTA, otherwise 0."""
    window: int
    """Tokens on each side to which a token attends in a layer with a window; 0 if all layers attend to all tokens."""
    global_interval: int
    """Interval n of the layers 0, n, 2n, … that attend to all tokens. All other layers attend within the window.

    With an interval of 1, every layer attends to all tokens.
    """
    global_theta: float
    """Base of the rotary positions of layers that attend to all tokens."""
    local_theta: float
    """Base of the rotary positions of layers with a window."""
    has_classifier: bool
    """Whether a classifier of one label follows: the model scores pairs of texts."""


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """Steps from the hidden states of a model to its vectors or scores."""

    poolings: tuple[Pooling, ...] = (Pooling.LAST,)
    """Poolings, whose vectors are concatenated in this order."""
    dense: tuple[DenseLayer, ...] = ()
    """Layers after the pooling, in this order."""
    normalize: bool = True
    """Whether vectors get the length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that may precede an input, by name."""
    default_prompt: str = ""
    """Name of the prompt of requests that name none; empty for none."""
    max_tokens: int = 0
    """Maximum tokens of an input; 0 for the context of the model."""
    can_shorten: bool = False
    """Whether vectors may be shortened to their first numbers."""
    lengths: tuple[int, ...] = ()
    """Lengths to which vectors may be shortened; empty for any length, if `can_shorten`."""
    answers: AnswerTokens | None = None
    """Tokens that define a score, for a decoder that scores documents; None for other models."""
    encoder: EncoderShape | None = None
    """Shape of an encoder; None for a decoder."""
