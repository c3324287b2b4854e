"""Values that the schema of the rerank routes accepts or refuses."""

import json

import pytest

from router.dialects.rerank.api import CohereRerankRoute, ParsedRerank, RerankRoute
from router.errors import Problem


@pytest.mark.parametrize("route", [RerankRoute(), CohereRerankRoute()])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": "x" * 16_384}, None),
        ({"query": "x" * 16_385}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", {"text": "b"}]}, None),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"top_n": 1}, None),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_refused_by_its_path(
    route: RerankRoute | CohereRerankRoute, fields: dict[str, object], param: str | None
):
    body: dict[str, object] = {"model": "tiny", "query": "hi", "documents": ["a"]}
    found = route.parse(json.dumps(body | fields).encode(), "k")
    assert (found.param if isinstance(found, Problem) else None) == param


@pytest.mark.parametrize(("route", "most"), [(RerankRoute(), 0), (CohereRerankRoute(), 4096)])
def test_only_cohere_cuts_documents_by_default(route: RerankRoute | CohereRerankRoute, most: int):
    found = route.parse(b'{"model":"tiny","query":"hi","documents":["a"]}', "k")
    assert isinstance(found, ParsedRerank)
    assert (found.documents.max_tokens, found.documents.truncate) == (most, most > 0)
