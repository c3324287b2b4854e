"""Answers with scores, value by value."""

import json
import struct

import pytest

from router.dialects.rerank.api import CohereRerankRoute, RerankRoute
from router.dialects.rerank.response import encode_cohere_error, encode_cohere_rerank
from router.dispatch.request import CompleteAnswer
from router.errors import Problem
from tests.support.answers import CROWDED, FINISHED, asked

SPEC = asked(CohereRerankRoute(), query="q", documents=["hi"])[1]
"""Only the id of the request is read."""


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (99, 1), (100, 1), (101, 2), (200, 2), (201, 3)])
def test_each_hundred_documents_that_begin_are_a_search_unit(documents: int, units: int) -> None:
    answer = CompleteAnswer({}, {}, {}, "rerank-1", (struct.pack("<f", 0.5),) * documents)
    meta = json.loads(encode_cohere_rerank(SPEC, answer, FINISHED, top_n=1))["meta"]
    assert meta["billed_units"] == {"search_units": units}


def scored(*scores: float) -> CompleteAnswer:
    return CompleteAnswer({}, {}, {}, "rerank-1", tuple(struct.pack("<f", score) for score in scores))


def test_results_have_their_documents_in_the_order_of_the_scores() -> None:
    documents = ["a", {"text": "b"}, "c"]
    request, job = asked(RerankRoute(), query="q", documents=documents)
    assert json.loads(request.render_complete(job, scored(0.25, 0.75, 0.25), FINISHED)) == {
        "id": "r1",
        "object": "list",
        "model": "tiny",
        "results": [
            {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
            {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
            {"index": 2, "relevance_score": 0.25, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 20, "total_tokens": 20},
    }
    request, job = asked(RerankRoute(), query="q", documents=documents, return_documents=False, top_n=2)
    results = json.loads(request.render_complete(job, scored(0.25, 0.75, 0.25), FINISHED))["results"]
    assert results == [{"index": 1, "relevance_score": 0.75}, {"index": 0, "relevance_score": 0.25}]
    assert not job.stream


def test_cohere_s_answer_never_has_documents() -> None:
    request, job = asked(CohereRerankRoute(), query="q", documents=["a", "b"], top_n=1)
    assert json.loads(request.render_complete(job, scored(0.25, 0.75), FINISHED)) == {
        "id": "r1",
        "results": [{"index": 1, "relevance_score": 0.75}],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": 20},
        },
    }


def test_cohere_s_error_has_an_id_a_message_and_the_memory() -> None:
    problem = Problem(400, "invalid", "wrong", "query")
    plain = {"id": "r1", "message": "wrong", "code": "invalid", "param": "query"}
    assert json.loads(encode_cohere_error(problem, "r1")) == plain
    crowded = json.loads(encode_cohere_error(CROWDED, "r1"))
    assert (crowded["message"], crowded["memory"]["headroom"]) == ("no room", 2)
