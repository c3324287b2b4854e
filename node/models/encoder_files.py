"""Read the config of an encoder, a model whose tokens attend in both directions, such as BERT.

An encoder for sequence classification with one label is a cross-encoder: it scores a query and a document together.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from msgspec.structs import replace

from node.models.embedding_files import EmbeddingFilesError
from node.models.embedding_layout import EncoderFamily, EncoderShape, Pooling
from node.models.memory_prediction import get_context_tokens
from node.models.weight_files import Config
from wire.report import TransientModel

FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": EncoderFamily.BERT,
    "roberta": EncoderFamily.ROBERTA,
    "xlm-roberta": EncoderFamily.ROBERTA,
    "modernbert": EncoderFamily.MODERNBERT,
}
"""Families of encoders that Macpool runs, by `model_type`."""
ENCODERS = frozenset({*FAMILIES, "distilbert", "mpnet", "nomic_bert", "new", "deberta-v2", "electra", "albert"})
"""Values of `model_type` of encoders. Those outside of `FAMILIES` cannot be served."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "classifier_activation")
_CLASSIFIER = "ForSequenceClassification"
MASK_BYTES = 4.0
"""Bytes of the attention mask for each pair of tokens. Windows and batches of texts of several lengths need a mask."""


def is_encoder(config: Config) -> bool:
    """Return whether a config belongs to an encoder, including encoders that Macpool cannot serve."""
    return str(config.get("model_type")) in ENCODERS


def is_cross_encoder(config: Config) -> bool:
    """Return whether a config belongs to an encoder with a classifier, of any number of labels."""
    named = config.get("architectures")
    names = cast("Sequence[object]", named) if isinstance(named, list) else ()
    return is_encoder(config) and any(str(name).endswith(_CLASSIFIER) for name in names)


def read_encoder_shape(config: Config) -> EncoderShape:
    """Read the shape of an encoder from its config. Raise `EmbeddingFilesError` if Macpool cannot run the encoder."""
    kind = str(config.get("model_type"))[:80]
    family = FAMILIES.get(kind)
    if family is None:
        raise EmbeddingFilesError(f"are those of an encoder of the type {kind}: known are {', '.join(FAMILIES)}")
    for name in _ACTIVATIONS:
        if config.get(name, "gelu") != "gelu":
            raise EmbeddingFilesError(f"name the activation {str(config[name])[:80]}, known is gelu")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise EmbeddingFilesError(
            f"name the positions {str(config['position_embedding_type'])[:80]}, known is absolute"
        )
    layers, heads, hidden = (
        _read_count(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if hidden % heads:
        raise EmbeddingFilesError(f"have {heads} attention heads for {hidden} features, which is no multiple")
    first = _read_count(config, "pad_token_id", 1, least=0) + 1 if family is EncoderFamily.ROBERTA else 0
    context = get_context_tokens(config) - first
    if context < 1:
        raise EmbeddingFilesError(f"have {context + first} positions, the first token has position {first}")
    modern = family is EncoderFamily.MODERNBERT
    return EncoderShape(
        family=family,
        layers=layers,
        heads=heads,
        hidden=hidden,
        epsilon=_read_number(config, "norm_eps", 1e-5) if modern else _read_number(config, "layer_norm_eps", 1e-12),
        vocabulary=_read_count(config, "vocab_size"),
        context=context,
        first_position=first,
        window=_read_count(config, "local_attention", 128) // 2 if modern else 0,
        global_interval=_read_count(config, "global_attn_every_n_layers", 3) if modern else 1,
        global_theta=_read_theta(config, "full_attention", "global_rope_theta", 160_000.0),
        local_theta=_read_theta(config, "sliding_attention", "local_rope_theta", 10_000.0),
        has_classifier=_has_classifier(config),
    )


def read_classifier_pooling(config: Config) -> Pooling:
    """Return the pooling before the classifier of a cross-encoder."""
    if config.get("model_type") != "modernbert":
        return Pooling.CLS
    return Pooling.MEAN if config.get("classifier_pooling") == "mean" else Pooling.CLS


def predict_encoder_transient(forward: TransientModel) -> TransientModel:
    """Return the model of the transient bytes of an encoder's forward, which computes no logits and caches nothing.

    `forward` is the prediction for a decoder of this size. `pair` is doubled, because attention scores that are not
    fused exist twice: before and after their softmax.
    """
    return replace(forward, pair=2 * forward.pair + MASK_BYTES, seen=0.0, logits=0.0, window=0)


def _has_classifier(config: Config) -> bool:
    """Return whether an encoder has a classifier of one label. Raise `EmbeddingFilesError` for several labels."""
    if not is_cross_encoder(config):
        return False
    labels: object = config.get("id2label")
    count = len(cast("Config", labels)) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise EmbeddingFilesError(f"have a classifier of {str(count)[:20]} labels, a score needs 1")
    return True


def _read_count(config: Config, name: str, default: int = 0, *, least: int = 1) -> int:
    """Return a natural number of a config, or `default` if the config does not have it.

    Raise `EmbeddingFilesError` if the number is below `least`.
    """
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EmbeddingFilesError(f"have the {name} {str(value)[:40]}, which is no whole number of at least {least}")
    return value


def _read_number(config: Config, name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or value <= 0:
        raise EmbeddingFilesError(f"have the {name} {str(value)[:40]}, which is no number above 0")
    return float(value)


def _read_theta(config: Config, kind: str, older: str, default: float) -> float:
    """Return the base of the rotary positions of one kind of layers, by its current or its older name."""
    rope: object = config.get("rope_parameters")
    parts: Config = cast("Config", rope) if isinstance(rope, dict) else {}
    part = parts.get(kind)
    if isinstance(part, dict) and "rope_theta" in part:
        return _read_number(cast("Config", part), "rope_theta", default)
    return _read_number(config, older, default)
