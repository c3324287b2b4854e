"""Answers with the scores of documents, in the API formats of Jina and Cohere."""

import struct
from collections.abc import Sequence

import msgspec

from router.dialects.shared.interface import DialectStyle
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from wire.frames import Finished

DOCUMENTS_PER_UNIT = 100
"""Maximum documents of one search unit, the unit in which Cohere counts requests."""


def encode_cohere_error(problem: Problem, request_id: str) -> bytes:
    """Encode an error as JSON in Cohere's format, with `id` and `message`.

    Macpool adds the fields `code`, `param` and, if known, `memory`.
    """
    error: dict[str, object] = {"id": request_id, "message": problem.message}
    error |= {"code": problem.code, "param": problem.param}
    if problem.memory is not None:
        error["memory"] = msgspec.structs.asdict(problem.memory)
    return msgspec.json.encode(error)


COHERE = DialectStyle(encode_cohere_error)


def encode_rerank(
    spec: RequestSpec, answer: CompleteAnswer, finished: Finished, top_n: int | None, *, with_documents: bool
) -> bytes:
    """Encode the answer of `/v1/rerank` with the `top_n` best results, highest score first; None for all results.

    `with_documents` adds the text of its document to each result.
    """
    documents = spec.embed.texts if with_documents and spec.embed is not None else ()
    tokens = finished.prompt_tokens
    body = {
        "id": spec.request_id,
        "object": "list",
        "model": spec.demand.model,
        "results": rank_documents(answer.vectors, top_n, documents),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return msgspec.json.encode(body)


def encode_cohere_rerank(spec: RequestSpec, answer: CompleteAnswer, finished: Finished, top_n: int | None) -> bytes:
    """Encode the answer of `/v2/rerank` with the `top_n` best results, highest score first; None for all results."""
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": -(-len(answer.vectors) // DOCUMENTS_PER_UNIT)},
        "tokens": {"input_tokens": finished.prompt_tokens},
    }
    return msgspec.json.encode({"id": spec.request_id, "results": rank_documents(answer.vectors, top_n), "meta": meta})


def rank_documents(
    vectors: Sequence[bytes], top_n: int | None, documents: Sequence[str] = ()
) -> list[dict[str, object]]:
    """Return the `top_n` best results of a request as JSON objects, highest score first; None for all results.

    Equal scores keep the order of their documents. `vectors` has the score of each document, in single precision and
    little endian. `documents` are the texts of the documents; empty for results without texts.
    """
    scores: list[float] = [struct.unpack_from("<f", vector)[0] for vector in vectors]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    results: list[dict[str, object]] = [{"index": place, "relevance_score": scores[place]} for place in order[:top_n]]
    for result, place in zip(results if documents else (), order, strict=False):
        result["document"] = {"text": documents[place]}
    return results
