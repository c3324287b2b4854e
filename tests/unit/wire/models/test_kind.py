"""Kinds of models: their features in a report, and the route that serves them."""

import pytest

from wire.models.kind import ModelKind, explain_other_kind, get_kind


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ModelKind.CHAT, "computes no embeddings and no scores: use /v1/chat/completions, or another model"),
        (ModelKind.EMBED, "computes embeddings only: use /v1/embeddings, or another model"),
        (ModelKind.RERANK, "computes the scores of documents only: use /v1/rerank, or another model"),
    ],
)
def test_a_request_of_another_kind_is_told_the_route(kind: ModelKind, text: str):
    assert explain_other_kind("tiny", kind) == f"the model tiny {text}"


def test_a_model_without_a_kind_among_its_features_is_for_chats():
    assert get_kind(("sampling", "tools")) is ModelKind.CHAT
    assert [get_kind(("sampling", kind)) for kind in ("embed", "rerank")] == [ModelKind.EMBED, ModelKind.RERANK]
