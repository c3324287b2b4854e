"""Requests for embeddings: whether a text that is too long may be cut."""

from typing import Any

import pytest

from router.dialects.embeddings.api import EmbeddingsRoute, OllamaEmbeddingsRoute, OllamaEmbedRoute
from router.dialects.shared.interface import Dialect
from tests.support.answers import asked


@pytest.mark.parametrize(
    ("dialect", "body", "cuts"),
    [
        (EmbeddingsRoute(), {"input": "hi"}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": None}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": False}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": True}, True),
        (OllamaEmbedRoute(), {"input": "hi"}, True),
        (OllamaEmbedRoute(), {"input": "hi", "truncate": None}, True),
        (OllamaEmbedRoute(), {"input": "hi", "truncate": False}, False),
        (OllamaEmbeddingsRoute(), {"prompt": "hi"}, True),
    ],
)
def test_a_long_text_is_cut_by_default_for_ollama_only(dialect: Dialect, body: dict[str, Any], cuts: bool) -> None:
    _, job = asked(dialect, **body)
    assert job.embed is not None
    assert job.embed.truncate is cuts
