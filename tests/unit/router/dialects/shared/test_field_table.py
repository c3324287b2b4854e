"""The manual's tables of fields, compared with the official libraries and with the real behaviour."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as older
from openai.types.chat import completion_create_params as chats
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params as responses
from openai.types.video_create_params import VideoCreateParams

from router.admission.request_limits import MAX_IGNORED
from router.dialects.anthropic import api
from router.dialects.anthropic.api import MessagesRoute
from router.dialects.embeddings.api import EmbeddingsRoute, OllamaEmbeddingsRoute, OllamaEmbedRoute
from router.dialects.field_tables import TABLES
from router.dialects.ollama.api import OllamaChatRoute, OllamaGenerateRoute
from router.dialects.openai.chat import ChatRoute
from router.dialects.openai.chat_schema import CHAT
from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.responses import ResponsesRoute
from router.dialects.openai.responses_store import build_stored_response
from router.dialects.openai.video_schema import VIDEO
from router.dialects.rerank.api import CohereRerankRoute, RerankRoute
from router.dialects.shared.field_table import FieldRow, FieldTable, sanitize_names
from router.errors import Problem
from tests.effort import scale_examples
from wire.frames import Message


class Clip(msgspec.Struct):
    """The fields of a video's body."""

    fields: dict[str, Any]


def counted(body: bytes) -> object:
    found = api.parse_count(body, 0)
    return found if isinstance(found, Problem) else found.tokens


KEPT = ResponsesRoute()
KEPT.store.put("key", "resp_1", build_stored_response(b"{}", (Message("user", "before"),)))
OPTIONS = "options of /api/chat and /api/generate"
HELLO = [{"role": "user", "content": "hello"}]
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": HELLO},
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/messages": {"model": "m", "messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "m", "messages": HELLO},
    "/api/chat": {"model": "m", "messages": HELLO},
    "/api/generate": {"model": "m", "prompt": "x"},
    "/v1/videos": {"model": "m", "prompt": "x"},
    "/v1/embeddings": {"model": "m", "input": "x"},
    "/api/embed": {"model": "m", "input": "x"},
    "/api/embeddings": {"model": "m", "prompt": "x"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": ["x"]},
    "/v2/rerank": {"model": "m", "query": "q", "documents": ["x"]},
    OPTIONS: {},
}
PARSE: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": lambda body: ChatRoute().parse(body, "key"),
    "/v1/completions": lambda body: CompletionRoute().parse(body, "key"),
    "/v1/responses": lambda body: KEPT.parse(body, "key"),
    "/v1/messages": lambda body: MessagesRoute().parse(body, "key"),
    "/v1/messages/count_tokens": counted,
    "/api/chat": lambda body: OllamaChatRoute().parse(body, "key"),
    "/api/generate": lambda body: OllamaGenerateRoute().parse(body, "key"),
    "/v1/videos": lambda body: found if isinstance(found := VIDEO.read(body), Problem) else Clip(found[0].model_dump()),
    "/v1/embeddings": lambda body: EmbeddingsRoute().parse(body, "key"),
    "/api/embed": lambda body: OllamaEmbedRoute().parse(body, "key"),
    "/api/embeddings": lambda body: OllamaEmbeddingsRoute().parse(body, "key"),
    "/v1/rerank": lambda body: RerankRoute().parse(body, "key"),
    "/v2/rerank": lambda body: CohereRerankRoute().parse(body, "key"),
    OPTIONS: lambda body: OllamaChatRoute().parse(
        json.dumps({"model": "m", "messages": HELLO, "options": json.loads(body)}).encode(), "key"
    ),
}
SDK: dict[str, set[str]] = {
    "/v1/chat/completions": {
        *chats.CompletionCreateParamsNonStreaming.__annotations__,
        *chats.CompletionCreateParamsStreaming.__annotations__,
    },
    "/v1/completions": {
        *older.CompletionCreateParamsNonStreaming.__annotations__,
        *older.CompletionCreateParamsStreaming.__annotations__,
    },
    "/v1/responses": {
        *responses.ResponseCreateParamsNonStreaming.__annotations__,
        *responses.ResponseCreateParamsStreaming.__annotations__,
    },
    "/api/chat": {
        "model",
        "messages",
        "tools",
        "stream",
        "format",
        "options",
        "keep_alive",
        "think",
        "logprobs",
        "top_logprobs",
    },
    "/api/generate": {
        "model",
        "prompt",
        "suffix",
        "images",
        "format",
        "options",
        "system",
        "template",
        "stream",
        "raw",
        "keep_alive",
        "context",
        "think",
        "logprobs",
        "top_logprobs",
        "width",
        "height",
        "steps",
    },
    "/v1/videos": set(VideoCreateParams.__annotations__),
    "/v1/embeddings": set(EmbeddingCreateParams.__annotations__),
    "/api/embed": {"model", "input", "truncate", "options", "keep_alive", "dimensions"},
    "/api/embeddings": {"model", "prompt", "options", "keep_alive"},
    "/v1/rerank": {"model", "query", "documents", "top_n", "return_documents"},
    "/v2/rerank": {"model", "query", "documents", "top_n", "max_tokens_per_doc", "priority"},
    OPTIONS: {
        "numa",
        "num_ctx",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "use_mmap",
        "use_mlock",
        "embedding_only",
        "num_thread",
        "num_keep",
        "seed",
        "num_predict",
        "top_k",
        "top_p",
        "tfs_z",
        "typical_p",
        "repeat_last_n",
        "temperature",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "penalize_newline",
        "stop",
    },
}
"""Ollama's library has pydantic models with these fields. The fields of the other libraries come from their types."""


def read_library_fields() -> dict[str, set[str]]:
    """Return `SDK` with the fields of Anthropic's library, whose import takes 2 s of CPU in every worker."""
    from anthropic.types import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming

    create = (MessageCreateParamsNonStreaming, MessageCreateParamsStreaming)
    fields = {name for params in create for name in params.__annotations__}
    return SDK | {
        "/v1/messages": {*fields, "temperature", "top_k", "top_p"},
        "/v1/messages/count_tokens": set(MessageCountTokensParams.__annotations__),
    }


TOOLS = {"tools": [FUNCTION]}
FLAT = {"tools": [FUNCTION["function"] | {"type": "function"}]}
THEIRS = {"tools": [{"name": "look", "input_schema": {}}]}
STREAM = {"stream": True}
WITH: dict[str, dict[str, Any]] = {
    "model": {"model": "other"},
    "messages": {"messages": [*HELLO, *HELLO]},
    "prompt": {"prompt": "y"},
    "input": {"input": "y"},
    "stream": STREAM,
    "max_tokens": {"max_tokens": 5},
    "n": {"n": 2},
    "seed": {"seed": 1},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "max_output_tokens": {"max_output_tokens": 5},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.5},
    "stop": {"stop": ["x"]},
    "stop_sequences": {"stop_sequences": ["x"]},
    "logit_bias": {"logit_bias": {"5": 1}},
    "presence_penalty": {"presence_penalty": 1},
    "frequency_penalty": {"frequency_penalty": 1},
    "repetition_penalty": {"repetition_penalty": 2},
    "repeat_penalty": {"repeat_penalty": 2},
    "num_predict": {"num_predict": 5},
    "stream_options": STREAM | {"stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "echo": {"echo": True},
    "instructions": {"instructions": "x"},
    "response_format": {"response_format": {"type": "json_object"}},
    "json_schema": {"json_schema": {"type": "integer"}},
    "grammar": {"grammar": "start: /a+/"},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_json": {"guided_json": {}},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "format": {"format": "json"},
    "guided_grammar": {"guided_grammar": "start: A"},
    "guided_whitespace_pattern": {"guided_json": {}, "guided_whitespace_pattern": "_"},
    "user": {"user": "x"},
    "prompt_cache_key": {"prompt_cache_key": "x"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "low"},
    "chat_template_kwargs": {"chat_template_kwargs": {"task": "x"}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "system": {"system": "x"},
    "thinking": {"thinking": {"type": "disabled"}},
    "think": {"think": True},
    "output_config": {"output_config": {"effort": "low"}},
    "output_format": {"output_format": {"type": "json_schema", "schema": {"type": "boolean"}}},
    "options": {"options": {"seed": 5}},
    "raw": {"raw": True},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "store": {"store": False},
    "metadata": {"metadata": {}},
    "seconds": {"seconds": "5"},
    "size": {"size": "640x368"},
    "frames": {"frames": 49},
    "fps": {"fps": 8},
    "steps": {"steps": 9},
    "guidance": {"guidance": 4},
    "guidance_2": {"guidance_2": "4.5"},
    "negative_prompt": {"negative_prompt": "blur"},
    "text": {"text": {"format": {"type": "json_object"}}},
    "session_id": {"session_id": "x"},
    "chat_id": {"chat_id": "x"},
    "dimensions": {"dimensions": 5},
    "encoding_format": {"encoding_format": "base64"},
    "prompt_name": {"prompt_name": "query"},
    "query": {"query": "another"},
    "documents": {"documents": ["x", {"text": "y"}]},
    "top_n": {"top_n": 1},
    "max_tokens_per_doc": {"max_tokens_per_doc": 9},
    "return_documents": {"return_documents": False},
    "usage": STREAM | {"usage": {"include": True}},
    "enable_thinking": {"enable_thinking": False},
}
"""A value of each field that changes the request to a node, with the other fields that it needs."""
EVEN: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "logprobs"): {"logprobs": True},
    ("/v1/completions", "logprobs"): {"logprobs": 0},
    ("/v1/chat/completions", "tools"): TOOLS,
    ("/api/chat", "tools"): TOOLS,
    ("/v1/responses", "tools"): FLAT,
    ("/v1/messages", "tools"): THEIRS,
    ("/v1/messages/count_tokens", "tools"): THEIRS,
    ("/api/chat", "stream"): {"stream": False},
    ("/api/generate", "stream"): {"stream": False},
    ("/v1/messages", "metadata"): {"metadata": {"user_id": "mine"}},
    ("/v1/embeddings", "truncate"): {"truncate": True},
    ("/api/embed", "truncate"): {"truncate": False},
    ("/v1/rerank", "truncate"): {"truncate": True},
}
CHOICE: dict[str, tuple[dict[str, Any], object]] = {
    "/v1/chat/completions": (TOOLS, "none"),
    "/v1/responses": (FLAT, "none"),
    "/v1/messages": (THEIRS, {"type": "none"}),
    "/v1/messages/count_tokens": (THEIRS, {"type": "none"}),
}
TOLD = {
    ("/v1/chat/completions", "guided_decoding_backend"): {"guided_decoding_backend": "guidance"},
    ("/v1/completions", "guided_decoding_backend"): {"guided_decoding_backend": "guidance"},
    ("/v1/completions", "best_of"): {"best_of": 1},
    ("/v1/responses", "include"): {"include": []},
    ("/v1/responses", "stream_options"): STREAM | {"stream_options": {"include_obfuscation": False}},
    ("/v1/responses", "metadata"): {"metadata": {"a": "b"}},
    ("/v1/messages/count_tokens", "output_format"): {"output_format": {"type": "json_schema", "schema": {}}},
}
"""Fields that count as supported because their only value is accepted, or because the answer repeats them.

The format of an answer has no part in its counted prompt.
"""
PROBES: dict[str, object] = {"background": True, "store": True, "truncation": "auto", "speed": "fast", "stream": 5}


def rows(verdict: str) -> list[tuple[str, FieldRow]]:
    return [(route, row) for route, table in TABLES.items() for row in table.list_rows() if row.verdict == verdict]


def ask(route: str, /, **fields: object) -> object:
    return PARSE[route](json.dumps(BASE[route] | fields).encode())


def essence(found: object) -> object:
    """Return the parts of a request that a node gets, without the outline, which differs in every response."""
    assert not isinstance(found, Problem), found
    names = [name for name in found.__struct_fields__ if name not in ("outline", "kept", "ignored")]  # pyright: ignore
    kept = getattr(found, "kept", None) is not None
    return [getattr(found, name) for name in names] + [kept]


@pytest.mark.parametrize("route", TABLES)
def test_field_tables_have_every_field_of_the_client_libraries(route: str):
    fields = read_library_fields()
    assert fields[route] - TABLES[route].known == set()
    assert set(BASE) == set(PARSE) == set(fields) == set(TABLES)


@pytest.mark.parametrize(("route", "row"), rows("refused"), ids=str)
def test_refused_field_is_named(route: str, row: FieldRow):
    for probe in (PROBES.get(row.name, {"a": 1}), [1], "strange"):
        found = ask(route, **{row.name: probe})
        assert isinstance(found, Problem)
        code = "thread_unsupported_request" if row.name == "thread" else "unsupported_parameter"
        assert (found.status, found.code) == (400, code)
        assert (found.param or "").removeprefix("options.") == row.name
        assert row.name in found.message
    assert row.note


@pytest.mark.parametrize(("route", "row"), rows("refused"), ids=str)
def test_neutral_value_is_accepted(route: str, row: FieldRow):
    for value in TABLES[route].neutral[row.name]:
        assert essence(ask(route, **{row.name: value})) == essence(ask(route))


@pytest.mark.parametrize(("route", "row"), rows("ignored"), ids=str)
def test_ignored_field_has_no_effect_and_a_reason(route: str, row: FieldRow):
    for probe in ("x", 5, {"a": [1]}):
        assert essence(ask(route, **{row.name: probe})) == essence(ask(route))
    assert row.note


@pytest.mark.parametrize(("route", "row"), rows("honoured"), ids=str)
def test_supported_field_changes_the_request_to_the_node(route: str, row: FieldRow):
    if (route, row.name) in TOLD:
        essence(ask(route, **TOLD[route, row.name]))
        return
    if row.name == "tool_choice":
        tools, choice = CHOICE[route]
        assert essence(ask(route, **tools, tool_choice=choice)) != essence(ask(route, **tools))
        return
    assert row.name in WITH or (route, row.name) in EVEN, "add a body with the field to WITH"
    fields = EVEN.get((route, row.name)) or WITH[row.name]
    before = {name: value for name, value in fields.items() if name != row.name}
    assert essence(ask(route, **fields)) != essence(ask(route, **before))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["user", "text", "function", "message", "tool", "auto", "none", "tool_result", "reasoning"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "input", "id", "function", "output", "call_id"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def bodies(route: str) -> st.SearchStrategy[bytes]:
    table: FieldTable[Any] = TABLES[route]
    fields = st.dictionaries(st.sampled_from(sorted(table.known)), JSON, max_size=4)
    return fields.map(lambda found: json.dumps(BASE[route] | found).encode())


@pytest.mark.parametrize("route", TABLES)
@settings(max_examples=scale_examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_body_makes_a_parser_raise(route: str, data: st.DataObject):
    found = PARSE[route](data.draw(bodies(route)))
    if isinstance(found, Problem):
        assert 400 <= found.status < 500
        assert found.message


@pytest.mark.parametrize("route", [route for route in TABLES if route != OPTIONS])
@settings(deadline=None)
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_garbage_is_a_400(route: str, raw: bytes):
    found = PARSE[route](raw)
    assert isinstance(found, Problem)
    assert found.status == 400


@pytest.mark.parametrize("route", [route for route in TABLES if route != OPTIONS])
@pytest.mark.parametrize("depth", [70, 5_000, 100_000])
def test_deep_bodies_are_a_400(route: str, depth: int):
    deep = b"[" * depth + b"]" * depth
    for name in (b"messages", b"input", b"prompt", b"tools", b"metadata2"):
        found = PARSE[route](b'{"model":"m","stream":"no","%s":%s}' % (name, deep))
        assert isinstance(found, Problem)
        assert found.status == 400


def test_fields_without_effect_are_named_with_their_path_and_only_if_they_are_set():
    part = {"type": "text", "text": "hi", "cache": True}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [part, part], "ui": 1}],
        "stream_options": {"pace": 1},
        "metadata": {"a": "b"},
        "store": False,
        "made_up": 1,
        "made_up_too": None,
    }
    found = CHAT.read(json.dumps(body).encode())
    assert not isinstance(found, Problem)
    assert sorted(found.ignored) == [
        "made_up",
        "messages[].content[].cache",
        "messages[].ui",
        "metadata",
        "stream_options.pace",
    ]
    strict = CHAT.read(json.dumps(body).encode(), strict=True)
    assert isinstance(strict, Problem)
    assert strict.code == "invalid_request"


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        ("/v1/chat/completions", "functions", []),
        ("/v1/chat/completions", "function_call", "auto"),
        ("/v1/chat/completions", "modalities", ["text"]),
        ("/api/generate", "context", []),
        ("/api/generate", "suffix", ""),
        ("/api/chat", "logprobs", False),
        ("/v1/rerank", "rank_fields", ["text"]),
    ],
)
def test_values_that_clients_always_send_are_accepted(route: str, field: str, value: object):
    assert essence(ask(route, **{field: value})) == essence(ask(route))


def test_more_names_than_a_header_has_are_counted():
    names = [f"field_{number}" for number in range(MAX_IGNORED + 3)]
    assert sanitize_names([*names, names[0]]) == (*names[:MAX_IGNORED], "and-3-more")
    assert sanitize_names([*names[:MAX_IGNORED], "a b"]) == (*names[:MAX_IGNORED], "and-1-more")
    assert sanitize_names(["a", "b c", "d\n", "a"]) == ("a", "(unprintable)")
