"""OpenAPI description of the plain ASGI routes, which the control app merges into its own description."""

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.dialects.anthropic.schema import CountBody, MessagesBody
from router.dialects.embeddings.schema import EmbeddingsBody, OllamaEmbedBody, OllamaEmbeddingsBody
from router.dialects.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router.dialects.ollama.unsupported_routes import UNSUPPORTED_ROUTES
from router.dialects.openai.chat_schema import ChatBody
from router.dialects.openai.completion_schema import CompletionBody
from router.dialects.openai.responses_schema import ResponsesBody
from router.dialects.openai.video_schema import VideoBody
from router.dialects.rerank.schema import CohereRerankBody, RerankBody

_KEPT = "/v1/responses"
_REF = "#/components/schemas/{model}"
_KEYS: list[dict[str, list[str]]] = [{"key": []}]
_EARLY = frozenset({400, 403, 415, 417, 421, 431, 501})
"""Error statuses that may be sent before the route is known, and then in OpenAI's format for every dialect."""
ALWAYS = (400, 401, 403, 405, 415, 417, 421, 431, 501)
"""Error statuses that every route that requires a key may send."""
_NAMED = (*ALWAYS, 404)
_POSTED = (*ALWAYS, 404, 408, 413, 429, 500, 502, 503, 504)
_ERROR: dict[str, Any] = {
    "type": "object",
    "description": "An error in OpenAI's format; `memory` has the numbers of a memory refusal, in bytes.",
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
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "description": "An error in Anthropic's format.",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code", "param"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "code": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_OLLAMA_ERROR: dict[str, Any] = {
    "type": "object",
    "description": "An error in Ollama's format.",
    "required": ["error", "code", "param", "request_id"],
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}, "request_id": {"type": "string"}},
}
_COHERE_ERROR: dict[str, Any] = {
    "type": "object",
    "description": "An error in Cohere's format.",
    "required": ["id", "message", "code", "param"],
    "properties": {"id": {"type": "string"}, "message": {"type": "string"}, "code": {"type": "string"}},
}
REASONS = {
    400: "the request is invalid or can never fit: change it",
    401: "the API key is missing, unknown, expired or revoked",
    403: "the API key lacks the permission, or the request comes from a page of another site",
    404: "not found",
    405: "method not allowed; Allow lists the allowed methods",
    408: "the body did not arrive in time, or the client did not read its stream",
    409: "the object is in use or not finished",
    413: "the body is too large, or the video needs more memory than any node can lease",
    415: "the body has a Content-Encoding: send it without",
    416: "the range is outside of the file",
    417: "the only supported value of Expect is 100-continue",
    421: "the Host header names another server",
    429: "a limit of this API key; retry after Retry-After",
    431: "the request headers are too large",
    500: "the request failed on its node, or no node can load the model",
    501: "not supported; the message names the alternative",
    502: "the node was lost, and no other node could resume the answer",
    503: "no capacity now; retry after Retry-After",
    504: "the node did not answer in time",
    507: "no disk or no node has the room that is needed",
}
"""Description of each error status in the OpenAPI document."""


NDJSON = "application/x-ndjson"
_BODIES: dict[str, tuple[type[BaseModel], str, str, str]] = {
    "/v1/chat/completions": (
        ChatBody,
        "chat_completions",
        "Generate the next message of a conversation, in one response or as a stream",
        "text/event-stream",
    ),
    "/v1/completions": (
        CompletionBody,
        "completions",
        "Complete prompts, in one response or as a stream",
        "text/event-stream",
    ),
    "/v1/messages": (
        MessagesBody,
        "messages",
        "Generate the next message, in Anthropic's format, in one response or as a stream",
        "text/event-stream",
    ),
    "/v1/messages/count_tokens": (CountBody, "count_tokens", "Count the prompt tokens of a conversation", ""),
    "/v1/responses": (
        ResponsesBody,
        "responses",
        "Generate a response to items, in one response or as a stream; optionally store it",
        "text/event-stream",
    ),
    "/api/chat": (
        OllamaChatBody,
        "ollama_chat",
        "Generate the next message, in Ollama's format, in one response or in lines",
        NDJSON,
    ),
    "/api/generate": (
        OllamaGenerateBody,
        "ollama_generate",
        "Complete a prompt, in Ollama's format, in one response or in lines",
        NDJSON,
    ),
    "/v1/embeddings": (EmbeddingsBody, "embeddings", "Compute a vector for each text, in one response", ""),
    "/api/embed": (OllamaEmbedBody, "ollama_embed", "Compute a vector for each text, in Ollama's format", ""),
    "/api/embeddings": (
        OllamaEmbeddingsBody,
        "ollama_embeddings",
        "Compute the vector of a text, in the format of Ollama's older route",
        "",
    ),
    "/v1/rerank": (RerankBody, "rerank", "Score documents for a query, in one response", ""),
    "/v2/rerank": (CohereRerankBody, "cohere_rerank", "Score documents for a query, in Cohere's format", ""),
    "/api/show": (OllamaShowBody, "ollama_show", "Return one model, in Ollama's format", ""),
}
"""Routes with a body: its model, the id and the summary of the operation, and the content type of its stream, if any.
"""


_FORM = "multipart/form-data"
_FILES = ("video/mp4", "image/webp", "image/jpeg", "image/png")
_NO_VIDEOS = ("/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/characters")


def describe_error(path: str, status: int) -> dict[str, Any]:
    """Return the OpenAPI response object of an error: its reason, and its schema in the dialect of the route `path`.

    For a status that may be sent before the route is known, the schema of OpenAI's errors is an alternative. Raise
    `KeyError` if `REASONS` has no text for the status.
    """
    own = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    if path.startswith("/api/") and not path.startswith("/api/v1/"):
        own = "OllamaError"
    if path.startswith("/v2/"):
        own = "CohereError"
    refs = [{"$ref": _REF.format(model=name)} for name in dict.fromkeys((own, "Error"))]
    schema = {"anyOf": refs} if status in _EARLY and len(refs) > 1 else refs[0]
    return {"description": REASONS[status], "content": {"application/json": {"schema": schema}}}


def build_openapi_paths() -> dict[str, Any]:
    """Return the OpenAPI path items, by path. They refer to the schemas of `build_openapi_schemas`."""
    return {
        **{path: {"post": _build_post_operation(path, *about)} for path, about in _BODIES.items()},
        "/v1/models": {
            "get": _build_operation(
                "/v1/models", "list_models", "List the models that the cluster serves", "the models"
            )
        },
        "/v1/models/{model}": {
            "get": _build_operation("/v1/models", "get_model", "Return one model", "the model", _NAMED)
            | {"parameters": [_build_path_parameter("model")]},
        },
        "/v1/responses/{response}": {
            "get": _build_operation(_KEPT, "get_response", "Return a stored response of this key", "the answer", _NAMED)
            | {"parameters": [_build_path_parameter("response")]},
            "delete": _build_operation(
                _KEPT, "delete_response", "Delete a stored response of this key", "deleted", _NAMED
            )
            | {"parameters": [_build_path_parameter("response")]},
        },
        "/api/tags": {
            "get": _build_operation("/api/tags", "ollama_tags", "List the models, in Ollama's format", "the models")
        },
        "/api/ps": {
            "get": _build_operation("/api/ps", "ollama_ps", "List the loaded models, in Ollama's format", "the models")
        },
        "/api/version": {
            "get": _build_operation(
                "/api/version",
                "ollama_version",
                "Return the version of Ollama that this API is compatible with",
                "the version",
            )
        },
        **{
            path: {"delete" if path == "/api/delete" else "post": _build_unsupported(path)}
            for path in sorted(UNSUPPORTED_ROUTES)
        },
        "/api/blobs/{digest}": {
            "post": _build_unsupported("/api/blobs") | {"parameters": [_build_path_parameter("digest")]}
        },
        **_build_video_paths(),
        "/health": {
            "get": _build_health_operation(
                "health", "Return 200 if a request could be served now, else 503 with the reason", (503,)
            )
        },
        "/livez": {"get": _build_health_operation("livez", "Return 200 while the coordinator runs", ())},
    }


def _build_video_paths() -> dict[str, Any]:
    video, parameters = "/v1/videos", {"parameters": [_build_path_parameter("video")]}
    schema = {"schema": {"$ref": _REF.format(model=VideoBody.__name__)}}
    files = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _FILES}

    def build_operation(
        name: str, summary: str, good: str, bad: tuple[int, ...] = _NAMED, **more: Any
    ) -> dict[str, Any]:
        return _build_operation(video, name, summary, good, bad, more.get("content"))

    content = build_operation(
        "get_video_content",
        "Download a video, or its thumbnail with `variant=thumbnail`; supports Range",
        "the file",
        (*_NAMED, 409, 416),
        content=files,
    )
    content["responses"]["206"] = {"description": "the requested range", "content": files}
    created = build_operation(
        "create_video",
        "Create a video job; it runs when a node grants a memory lease",
        "the job",
        (*_NAMED, 408, 409, 413, 429, 503),
    )
    created["requestBody"] = {"required": True, "content": dict.fromkeys(("application/json", _FORM), schema)}
    return {
        video: {
            "post": created,
            "get": build_operation(
                "list_videos", "List the video jobs of this key, newest first, in pages", "a page", ALWAYS
            )
            | {
                "parameters": [
                    _build_query_parameter("after"),
                    _build_query_parameter("limit"),
                    _build_query_parameter("order"),
                ]
            },
        },
        video + "/{video}": {
            "get": build_operation("get_video", "Return a video job: state, progress, phase, error", "the job")
            | parameters,
            "delete": build_operation(
                "delete_video", "Delete a video; a running job is cancelled", "deleted", (*_NAMED, 503)
            )
            | parameters,
        },
        video + "/{video}/cancel": {
            "post": build_operation("cancel_video", "Cancel a queued or running video job", "the job", (*_NAMED, 503))
            | parameters
        },
        video + "/{video}/content": {
            "get": content | {"parameters": [_build_path_parameter("video"), _build_query_parameter("variant")]}
        },
        **{path: {"post": _build_unsupported_video(path)} for path in _NO_VIDEOS},
        "/v1/videos/{video}/remix": {"post": _build_unsupported_video("/remix") | parameters},
        "/v1/videos/characters/{character}": {
            "get": _build_unsupported_video("/get_character") | {"parameters": [_build_path_parameter("character")]}
        },
    }


def _build_unsupported_video(path: str) -> dict[str, Any]:
    name = "videos_" + path.rpartition("/")[2]
    operation = _build_operation("/v1/videos", name, "Not supported: videos cannot be changed", "never", ALWAYS)
    del operation["responses"]["200"]
    return operation


def _build_query_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


def _build_post_operation(path: str, body: type[BaseModel], name: str, summary: str, stream: str) -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        answer[stream] = {"schema": {"type": "string"}}
    operation = _build_operation(path, name, summary, "the answer", _POSTED, answer)
    return operation | {"requestBody": {"required": True, "content": schema}}


def build_openapi_schemas() -> dict[str, Any]:
    """Return the OpenAPI component schemas, by name, to which the path items refer."""
    _, schemas = models_json_schema([(body, "validation") for body in _list_bodies()], ref_template=_REF)
    return {
        **schemas.get("$defs", {}),
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "CohereError": _COHERE_ERROR,
        "OllamaError": _OLLAMA_ERROR,
    }


def _list_bodies() -> list[type[BaseModel]]:
    return [*(about[0] for about in _BODIES.values()), VideoBody]


def _build_operation(
    path: str,
    name: str,
    summary: str,
    good: str,
    bad: tuple[int, ...] = ALWAYS,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {"description": good, "content": content or {"application/json": {"schema": {"type": "object"}}}}
    }
    answers |= {str(status): describe_error(path, status) for status in sorted(bad)}
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["inference"],
        "security": _KEYS,
        "responses": answers,
        "x-scope": "infer",
    }


def _build_unsupported(path: str) -> dict[str, Any]:
    name = "ollama_" + path.rpartition("/")[2]
    why = "Not supported; the response names the command to use"
    operation = _build_operation(path, name, why, "never")
    del operation["responses"]["200"]
    return operation


def _build_path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _build_health_operation(name: str, summary: str, bad: tuple[int, ...]) -> dict[str, Any]:
    state: dict[str, Any] = {"application/json": {"schema": {"type": "object", "required": ["status"]}}}
    answers = {"200": {"description": "yes", "content": state}}
    answers |= {str(status): {"description": "no, with the reason", "content": state} for status in bad}
    answers |= {str(status): describe_error("/", status) for status in ALWAYS if status != HTTPStatus.UNAUTHORIZED}
    return {"operationId": name, "summary": summary, "tags": ["health"], "security": [], "responses": answers}
