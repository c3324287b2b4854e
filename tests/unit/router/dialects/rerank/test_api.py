"""Requests for scores: whether a document that is too long may be cut, and at how many tokens."""

from typing import Any

import pytest

from router.dialects.rerank.api import CohereRerankRoute, RerankRoute
from router.dialects.shared.interface import Dialect
from tests.support.answers import asked


@pytest.mark.parametrize(
    ("dialect", "fields", "cuts", "tokens"),
    [
        (RerankRoute(), {}, False, 0),
        (RerankRoute(), {"truncate": None}, False, 0),
        (RerankRoute(), {"truncate": False}, False, 0),
        (RerankRoute(), {"truncate": True, "max_tokens_per_doc": 7}, True, 7),
        (CohereRerankRoute(), {}, True, 4096),
        (CohereRerankRoute(), {"max_tokens_per_doc": 7}, True, 7),
    ],
)
def test_a_long_document_is_cut_by_default_at_v2_only(
    dialect: Dialect, fields: dict[str, Any], cuts: bool, tokens: int
) -> None:
    _, job = asked(dialect, query="q", documents=["hi"], **fields)
    assert job.embed is not None
    assert (job.embed.truncate, job.embed.max_tokens) == (cuts, tokens)


@pytest.mark.parametrize("dialect", [RerankRoute(), CohereRerankRoute()])
def test_ignored_fields_are_named(dialect: Dialect) -> None:
    _, job = asked(dialect, query="q", documents=["hi"], other=1)
    assert job.ignored == ("other",)
