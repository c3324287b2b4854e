"""Steps from the hidden states of a model to its vectors, as values. `embedding_files` reads them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Pooling(StrEnum):
    """Way in which the hidden states of a text become one vector. Several are joined in this order."""

    CLS = "cls"
    """State of the first token."""
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LENGTH = "mean_sqrt_len"
    """Sum of the states divided by the square root of their number."""
    WEIGHTED_MEAN = "weightedmean"
    """Mean with the position of each token, from 1, as its weight."""
    LAST = "lasttoken"


class Activation(StrEnum):
    """Function after a Dense layer."""

    IDENTITY = "Identity"
    TANH = "Tanh"


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Dense layer after the pooling."""

    file: str
    """Its weights, relative to the folder of the model."""
    inputs: int
    outputs: int
    bias: bool
    activation: Activation
    nbytes: int
    """Bytes of its weights."""


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """Steps from the hidden states of a model to its vectors."""

    poolings: tuple[Pooling, ...] = (Pooling.LAST,)
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    """Whether vectors get the length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that may precede an input, by name."""
    default_prompt: str = ""
    """Name of the prompt of requests that name none; empty for none."""
    max_tokens: int = 0
    """Maximum tokens of an input; 0: the context of the model."""
    can_shorten: bool = False
    """Whether vectors may be cut to fewer numbers."""
    lengths: tuple[int, ...] = ()
    """Lengths to which vectors may be cut, in numbers; empty for any, if `can_shorten`."""
