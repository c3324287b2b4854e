"""`/v1/rerank` and `/v2/rerank`: one request for the scores of all documents, whose answer lists the best first."""

from collections.abc import Sequence

import msgspec

from router.dialects.embeddings.api import PARAMS
from router.dialects.rerank.response import COHERE, encode_cohere_rerank, encode_rerank
from router.dialects.rerank.schema import (
    COHERE_RERANK,
    DEFAULT_MAX_TOKENS,
    RERANK,
    CohereRerankBody,
    RerankBody,
)
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.interface import OPENAI, AnswerReader, Chunks
from router.dispatch.request import CompleteAnswer, EmbeddingInput, RequestSpec
from router.dispatch.resource_demand import compute_embedding_demand
from router.errors import Problem
from wire.frames import Finished


class ParsedRerank(msgspec.Struct, frozen=True, gc=False):
    """Parsed body of `/v1/rerank`, and base of the parsed body of `/v2/rerank`."""

    model: str
    documents: EmbeddingInput
    ignored: tuple[str, ...] = ()
    """Names of the fields of the body that have no effect."""
    top_n: int | None = None
    """Maximum number of results; None for all documents."""
    with_documents: bool = False
    """Whether a result of `/v1/rerank` has the text of its document. A result of `/v2/rerank` never has it."""

    def to_specs(self, key: str, request_id: str, created: int) -> Sequence[RequestSpec]:
        """Return the request for the dispatcher; see `router.dialects.shared.interface.ParsedRequest`."""
        demand = compute_embedding_demand(self.model, self.documents)
        return (
            RequestSpec(
                demand,
                key,
                request_id,
                (),
                PARAMS,
                created,
                stream=False,
                ignored=self.ignored,
                embed=self.documents,
            ),
        )

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_rerank(spec, answer, finished, self.top_n, with_documents=self.with_documents)

    def create_chunk_encoder(self, reader: AnswerReader) -> Chunks:
        """Raise `NotImplementedError`, because scores are never streamed."""
        raise NotImplementedError


class ParsedCohereRerank(ParsedRerank, frozen=True, gc=False):
    """Parsed body of `/v2/rerank`."""

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_cohere_rerank(spec, answer, finished, self.top_n)


class RerankRoute:
    """Dialect of `/v1/rerank`. `strict` refuses unknown fields."""

    style = OPENAI

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ParsedRerank | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = RERANK.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        fields: RerankBody = parsed.body
        documents = EmbeddingInput(
            fields.list_texts(),
            truncate=bool(fields.truncate),
            query=fields.query,
            max_tokens=fields.max_tokens_per_doc or 0,
        )
        return ParsedRerank(
            fields.model,
            documents,
            sanitize_names(parsed.ignored),
            fields.top_n,
            with_documents=fields.return_documents is not False,
        )


class CohereRerankRoute:
    """Dialect of `/v2/rerank`. `strict` refuses unknown fields."""

    style = COHERE

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ParsedCohereRerank | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = COHERE_RERANK.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        fields: CohereRerankBody = parsed.body
        most = fields.max_tokens_per_doc or DEFAULT_MAX_TOKENS
        documents = EmbeddingInput(fields.list_texts(), truncate=True, query=fields.query, max_tokens=most)
        return ParsedCohereRerank(fields.model, documents, sanitize_names(parsed.ignored), fields.top_n)
