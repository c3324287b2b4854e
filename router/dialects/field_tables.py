"""Field tables of request bodies, for the manual and for the tests."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from router.dialects.anthropic import schema
from router.dialects.embeddings import schema as embeddings_body
from router.dialects.ollama import schema as ollama_body
from router.dialects.openai.chat_schema import CHAT
from router.dialects.openai.completion_schema import COMPLETION
from router.dialects.openai.responses_schema import RESPONSES
from router.dialects.openai.video_schema import VIDEO
from router.dialects.rerank import schema as rerank_body
from router.dialects.shared.field_table import FieldTable

TABLES: Mapping[str, FieldTable[Any]] = MappingProxyType(
    {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": RESPONSES,
        "/v1/messages": schema.MESSAGES,
        "/v1/messages/count_tokens": schema.COUNT,
        "/api/chat": ollama_body.CHAT,
        "/api/generate": ollama_body.GENERATE,
        "/v1/embeddings": embeddings_body.EMBEDDINGS,
        "/api/embed": embeddings_body.OLLAMA_EMBED,
        "/api/embeddings": embeddings_body.OLLAMA_EMBEDDINGS,
        "/v1/rerank": rerank_body.RERANK,
        "/v2/rerank": rerank_body.COHERE_RERANK,
        "/v1/videos": VIDEO,
        "options of /api/chat and /api/generate": ollama_body.OPTIONS,
    }
)
"""Field table of each body by its route, and of the object `options` in Ollama's bodies."""
