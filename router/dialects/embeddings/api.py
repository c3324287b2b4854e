"""`/v1/embeddings`, `/api/embed` and `/api/embeddings`: one request for all inputs, whose answer has their vectors."""

from collections.abc import Sequence
from typing import cast

import msgspec

from router.dialects.embeddings.response import (
    encode_embeddings,
    encode_ollama_embed,
    encode_ollama_embedding,
    encode_ollama_load,
)
from router.dialects.embeddings.schema import (
    EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
)
from router.dialects.ollama.api import check_unload, strip_latest_tag
from router.dialects.ollama.response import OLLAMA
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.interface import OPENAI, AnswerReader, Chunks
from router.dispatch.request import CompleteAnswer, EmbeddingInput, RequestSpec
from router.dispatch.resource_demand import compute_embedding_demand
from router.errors import Problem
from wire.frames import Finished, GenerationParams

PARAMS = GenerationParams(max_tokens=1)
"""Parameters of a request without an answer text."""
LOADING = EmbeddingInput(("Hello",), (), 0, True)
"""Input of a request of Ollama's routes that only loads a model. The answer does not have its vector."""


class ParsedEmbedding(msgspec.Struct, frozen=True, gc=False):
    """Parsed body of `/v1/embeddings`, and base of the parsed bodies of Ollama's routes."""

    model: str
    embed: EmbeddingInput
    ignored: tuple[str, ...] = ()
    """Names of the fields of the body that have no effect."""
    as_base64: bool = False
    """Whether the answer has each vector as the base64 of its bytes, instead of as a list of numbers."""

    def to_specs(self, key: str, request_id: str, created: int) -> Sequence[RequestSpec]:
        """Return the request for the dispatcher; see `router.dialects.shared.interface.ParsedRequest`."""
        demand = compute_embedding_demand(self.model, self.embed)
        return (
            RequestSpec(
                demand, key, request_id, (), PARAMS, created, stream=False, ignored=self.ignored, embed=self.embed
            ),
        )

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_embeddings(spec, answer, finished, as_base64=self.as_base64)

    def create_chunk_encoder(self, reader: AnswerReader) -> Chunks:
        """Raise `NotImplementedError`, because embeddings are never streamed."""
        raise NotImplementedError


class OllamaEmbedRequest(ParsedEmbedding, frozen=True, gc=False):
    """Parsed body of `/api/embed`."""

    loads: bool = False
    """Whether the body has no text, and only loads the model."""

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_ollama_load(spec) if self.loads else encode_ollama_embed(spec, answer, finished)


class OllamaEmbeddingsRequest(ParsedEmbedding, frozen=True, gc=False):
    """Parsed body of `/api/embeddings`."""

    loads: bool = False
    """Whether the body has no text, and only loads the model."""

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return b'{"embedding":[]}' if self.loads else encode_ollama_embedding(spec, answer, finished)


class EmbeddingsRoute:
    """Dialect of `/v1/embeddings`. `strict` refuses unknown fields."""

    style = OPENAI

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ParsedEmbedding | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = EMBEDDINGS.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        fields: EmbeddingsBody = parsed.body
        texts, ids = _split_input(fields.input)
        embed = EmbeddingInput(texts, ids, fields.dimensions or 0, bool(fields.truncate), fields.prompt_name or "")
        return ParsedEmbedding(
            fields.model, embed, sanitize_names(parsed.ignored), as_base64=fields.encoding_format == "base64"
        )


class OllamaEmbedRoute:
    """Dialect of `/api/embed`. `strict` refuses unknown fields."""

    style = OLLAMA

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ParsedEmbedding | Problem:
        """Parse a body, or return a problem; see `router.dialects.shared.interface.Dialect`.

        The problem has the status 501 for a body with `keep_alive: 0` and no text, and 400 for any other body.
        """
        parsed = OLLAMA_EMBED.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        fields: OllamaEmbedBody = parsed.body
        model, ignored = strip_latest_tag(fields.model), sanitize_names(parsed.ignored)
        if not fields.input:
            return check_unload(body) or OllamaEmbedRequest(model, LOADING, ignored, loads=True)
        texts = (fields.input,) if isinstance(fields.input, str) else tuple(text or " " for text in fields.input)
        embed = EmbeddingInput(texts, (), fields.dimensions or 0, fields.truncate is not False)
        return OllamaEmbedRequest(model, embed, ignored)


class OllamaEmbeddingsRoute:
    """Dialect of `/api/embeddings`, the older route for one text. `strict` refuses unknown fields."""

    style = OLLAMA

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ParsedEmbedding | Problem:
        """Parse a body, or return a problem; see `router.dialects.shared.interface.Dialect`.

        The problem has the status 501 for a body with `keep_alive: 0` and no text, and 400 for any other body.
        """
        parsed = OLLAMA_EMBEDDINGS.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        fields: OllamaEmbeddingsBody = parsed.body
        model, ignored = strip_latest_tag(fields.model), sanitize_names(parsed.ignored)
        if not fields.prompt:
            return check_unload(body) or OllamaEmbeddingsRequest(model, LOADING, ignored, loads=True)
        return OllamaEmbeddingsRequest(model, EmbeddingInput((fields.prompt,), (), 0, True), ignored)


def _split_input(value: object) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the texts of an input and its lists of token ids, one of which is empty."""
    if isinstance(value, str):
        return (value,), ()
    items = cast("list[object]", value)
    if isinstance(items[0], int):
        return (), (tuple(cast("list[int]", items)),)
    if isinstance(items[0], str):
        return tuple(cast("list[str]", items)), ()
    return (), tuple(tuple(ids) for ids in cast("list[list[int]]", items))
