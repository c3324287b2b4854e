"""Kinds of models by the requests that they serve. A report names the kind among the features of a model."""

from collections.abc import Collection
from enum import StrEnum


class ModelKind(StrEnum):
    """Kind of a model. Each kind but CHAT is a feature in the report of the model, by its value."""

    CHAT = "chat"
    """Generates text."""
    EMBED = "embed"
    """Computes a vector for each text."""
    RERANK = "rerank"
    """Computes scores of documents for a query."""


_CHAT, *_NAMED_KINDS = ModelKind
ROUTES = {
    ModelKind.CHAT: "/v1/chat/completions",
    ModelKind.EMBED: "/v1/embeddings",
    ModelKind.RERANK: "/v1/rerank",
}
"""Route that serves models of a kind, for messages."""
_PURPOSES = {
    ModelKind.CHAT: "computes no embeddings and no scores",
    ModelKind.EMBED: "computes embeddings only",
    ModelKind.RERANK: "computes the scores of documents only",
}


def get_kind(features: Collection[str]) -> ModelKind:
    """Return the kind of a model from the features in its report; CHAT if the features name no kind."""
    for kind in _NAMED_KINDS:
        if kind in features:
            return kind
    return _CHAT


def explain_other_kind(model: str, kind: ModelKind) -> str:
    """Return the error text for a request that models of this kind do not serve, with the route to use instead.

    `model` is the name of the model, `kind` its kind.
    """
    return f"the model {model} {_PURPOSES[kind]}: use {ROUTES[kind]}, or another model"
