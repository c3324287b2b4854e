"""The OpenAPI description of the routes that are plain ASGI, for the control app to merge into its own."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.dialects.anthropic_body import CountBody, MessagesBody
from router.dialects.chat_body import ChatBody
from router.dialects.completion_body import CompletionBody
from router.dialects.ollama_body import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router.dialects.ollama_models import REFUSED
from router.dialects.responses_body import ResponsesBody

_REF = "#/components/schemas/{model}"
_KEYS: list[dict[str, list[str]]] = [{"key": []}]
_NAMED = (401, 403, 404, 405)
_ERROR: dict[str, Any] = {
    "type": "object",
    "description": "An error in OpenAI's shape; `memory` holds the numbers of a memory verdict in bytes.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "request_id": {"type": "string"},
                "memory": {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}},
            },
        }
    },
}
_REASONS = {
    400: "the request cannot be answered as it is",
    401: "no key, or one that is not known",
    403: "the key has no scope for this",
    404: "no such model",
    405: "another method",
    413: "the body is too large",
    429: "this key's share of the queue is used up",
    503: "no node has room now",
}


NDJSON = "application/x-ndjson"
_BODIES: dict[str, tuple[type[BaseModel], str, str, str]] = {
    "/v1/chat/completions": (ChatBody, "chat_completions", "Answer a conversation, whole or as a stream",
                             "text/event-stream"),
    "/v1/completions": (CompletionBody, "completions", "Go on with prompts, whole or as a stream", "text/event-stream"),
    "/v1/messages": (MessagesBody, "messages", "Answer a conversation in Anthropic's shape, whole or as a stream",
                     "text/event-stream"),
    "/v1/messages/count_tokens": (CountBody, "count_tokens", "Count the tokens of a conversation's prompt", ""),
    "/v1/responses": (ResponsesBody, "responses", "Answer items, whole or as a stream; the answer may be kept",
                      "text/event-stream"),
    "/api/chat": (OllamaChatBody, "ollama_chat", "Answer a conversation in Ollama's shape, whole or in lines", NDJSON),
    "/api/generate": (OllamaGenerateBody, "ollama_generate", "Answer a prompt in Ollama's shape, whole or in lines",
                      NDJSON),
    "/api/show": (OllamaShowBody, "ollama_show", "Show one model in Ollama's shape", ""),
}  # fmt: skip
"""Routes that take a body: its model, the operation, what it does, and the content type of its stream, if any."""


def openapi_paths() -> dict[str, Any]:
    """Give the path items; they refer to the schemas of `openapi_schemas`."""
    return {
        **{path: {"post": _posted(*about)} for path, about in _BODIES.items()},
        "/v1/models": {"get": _operation("list_models", "List the models that the cluster serves", "the models")},
        "/v1/models/{model}": {
            "get": _operation("get_model", "Show one model", "the model", _NAMED) | {"parameters": [_named("model")]},
        },
        "/v1/responses/{response}": {
            "get": _operation("get_response", "Show an answer that was kept for this key", "the answer", _NAMED)
            | {"parameters": [_named("response")]},
            "delete": _operation("delete_response", "Forget an answer that was kept for this key", "it is gone", _NAMED)
            | {"parameters": [_named("response")]},
        },
        "/api/tags": {"get": _operation("ollama_tags", "List the models in Ollama's shape", "the models")},
        "/api/ps": {"get": _operation("ollama_ps", "List the loaded models in Ollama's shape", "the models")},
        "/api/version": {"get": _operation("ollama_version", "Say like which Ollama it is spoken here", "a version")},
        **{path: {"delete" if path == "/api/delete" else "post": _refused(path)} for path in sorted(REFUSED)},
        "/api/blobs/{digest}": {"post": _refused("/api/blobs") | {"parameters": [_named("digest")]}},
        "/health": {"get": _open("health", "Say whether a request could be served now", (503,))},
        "/livez": {"get": _open("livez", "Say that the coordinator runs", ())},
    }


def _posted(body: type[BaseModel], name: str, summary: str, stream: str) -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        answer[stream] = {"schema": {"type": "string"}}
    operation = _operation(name, summary, "the answer", tuple(_REASONS), answer)
    return operation | {"requestBody": {"required": True, "content": schema}}


def openapi_schemas() -> dict[str, Any]:
    """Give the component schemas that the path items refer to."""
    _, found = models_json_schema([(about[0], "validation") for about in _BODIES.values()], ref_template=_REF)
    return {**found.get("$defs", {}), "Error": _ERROR}


def _operation(
    name: str,
    summary: str,
    good: str,
    bad: tuple[int, ...] = (401, 403, 405),
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {"description": good, "content": content or {"application/json": {"schema": {"type": "object"}}}}
    }
    for status in bad:
        error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
        answers[str(status)] = {"description": _REASONS[status], "content": error}
    return {"operationId": name, "summary": summary, "tags": ["inference"], "security": _KEYS, "responses": answers,
            "x-scope": "infer"}  # fmt: skip


def _refused(path: str) -> dict[str, Any]:
    name = "ollama_" + path.rpartition("/")[2]
    operation = _operation(name, "Refused: models are not changed, and nothing is embedded, over Ollama's API", "never")
    del operation["responses"]["200"]
    operation["responses"]["501"] = {"description": "not offered, and what to do instead"}
    return operation


def _named(what: str) -> dict[str, Any]:
    return {"name": what, "in": "path", "required": True, "schema": {"type": "string"}}


def _open(name: str, summary: str, bad: tuple[int, ...]) -> dict[str, Any]:
    answers = {"200": {"description": "yes"}} | {str(status): {"description": "no, and why"} for status in bad}
    return {"operationId": name, "summary": summary, "tags": ["health"], "security": [], "responses": answers}
