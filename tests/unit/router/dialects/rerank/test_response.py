"""Answers with scores, value by value."""

import json
import struct

import pytest

from router.dialects.rerank.api import CohereRerankRoute
from router.dialects.rerank.response import encode_cohere_rerank
from router.dispatch.request import CompleteAnswer
from tests.support.answers import FINISHED, asked

SPEC = asked(CohereRerankRoute(), query="q", documents=["hi"])[1]
"""Only the id of the request is read."""


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (99, 1), (100, 1), (101, 2), (200, 2), (201, 3)])
def test_each_hundred_documents_that_begin_are_a_search_unit(documents: int, units: int) -> None:
    answer = CompleteAnswer({}, {}, {}, "rerank-1", (struct.pack("<f", 0.5),) * documents)
    meta = json.loads(encode_cohere_rerank(SPEC, answer, FINISHED, top_n=1))["meta"]
    assert meta["billed_units"] == {"search_units": units}
