"""Every body that is read by a table of its fields, for the manual and for the tests."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from router.dialects import anthropic_body, ollama_body
from router.dialects.chat_body import CHAT
from router.dialects.completion_body import COMPLETION
from router.dialects.parameters import Parameters
from router.dialects.responses_body import RESPONSES
from router.dialects.video_body import VIDEO

TABLES: Mapping[str, Parameters[Any]] = MappingProxyType(
    {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": RESPONSES,
        "/v1/messages": anthropic_body.MESSAGES,
        "/v1/messages/count_tokens": anthropic_body.COUNT,
        "/api/chat": ollama_body.CHAT,
        "/api/generate": ollama_body.GENERATE,
        "/v1/videos": VIDEO,
        "options of /api/chat and /api/generate": ollama_body.OPTIONS,
    }
)
