"""Every parser of a body, with generated bodies: it never raises, and accepted requests are bounded."""

import json
import math
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dialects.anthropic import api
from router.dialects.anthropic.api import MessagesRoute
from router.dialects.anthropic.schema import MessagesBody
from router.dialects.ollama import models
from router.dialects.ollama.api import OllamaChatRoute, OllamaGenerateRoute
from router.dialects.ollama.schema import OllamaChatBody, OllamaGenerateBody
from router.dialects.openai.chat import ChatRoute
from router.dialects.openai.chat_schema import ChatBody
from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.completion_schema import CompletionBody
from router.dialects.openai.responses import ResponsesRoute
from router.dialects.openai.responses_schema import ResponsesBody
from router.dialects.shared.interface import ParsedRequest
from router.dialects.shared.strict_json import read_object
from router.errors import Problem
from router.placement.cluster_view import ClusterView
from tests.effort import scale_examples
from tests.support.requests import list_visible
from wire.codec import encode
from wire.frames import Generate

PARSERS: dict[str, tuple[Callable[[bytes, str], object], type]] = {
    "chat": (ChatRoute().parse, ChatBody),
    "completions": (CompletionRoute().parse, CompletionBody),
    "messages": (MessagesRoute().parse, MessagesBody),
    "responses": (ResponsesRoute().parse, ResponsesBody),
    "ollama chat": (OllamaChatRoute().parse, OllamaChatBody),
    "ollama generate": (OllamaGenerateRoute().parse, OllamaGenerateBody),
    "count": (lambda body, _: api.parse_count(body, 0), MessagesBody),
    "show": (lambda body, _: models.show_model(list_visible(ClusterView()), body, 0), OllamaChatBody),
}
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "text", "tiny", "auto", "function", "", "\0", "x" * 300]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS | st.text(max_size=8)
INNER = [
    "role",
    "content",
    "type",
    "text",
    "name",
    "function",
    "parameters",
    "arguments",
    "tool_calls",
    "id",
    "input",
    "thinking",
    "source",
    "url",
    "data",
    "image_url",
    "schema",
    "stop",
    "seed",
    "num_predict",
]
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=12,
)


GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 5}


def bodies(name: str) -> st.SearchStrategy[bytes]:
    known = sorted(PARSERS[name][1].model_fields)
    fields = st.dictionaries(st.sampled_from(known) | st.text(max_size=6), VALUES, max_size=6)
    good = {field: value for field, value in GOOD.items() if field in known}
    mixed = st.tuples(fields, st.booleans()).map(lambda two: {**two[0], **good} if two[1] else two[0])
    texts = mixed.map(lambda body: json.dumps(body).encode())
    return (
        texts | texts.flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[:at])) | st.binary(max_size=60)
    )


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=scale_examples(300))
@given(data=st.data())
def test_no_body_makes_a_parser_raise(name: str, data: st.DataObject):
    found = PARSERS[name][0](data.draw(bodies(name)), "k")
    if isinstance(found, Problem):
        assert 400 <= found.status < 500
        json.loads(found.encode_body("r"))
    elif hasattr(found, "to_specs"):
        for job in cast("ParsedRequest", found).to_specs("k", "r", 0):
            frame = Generate(
                1,
                1,
                "r",
                job.demand.model,
                job.messages,
                job.params,
                0,
                1,
                job.stream,
                job.tools,
                job.template,
                (),
                job.text,
                job.ids,
            )
            assert encode(frame)
            assert 1 <= job.params.n <= 128


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_text_makes_the_reader_raise(body: bytes):
    found = read_object(body)
    assert isinstance(found, dict) or found.status == 400


def odd(value: object) -> bool:
    """Return whether a value has a number that JSON lacks, or half a surrogate pair."""
    if isinstance(value, dict):
        return any(odd(part) for item in value.items() for part in item)
    if isinstance(value, list):
        return any(odd(item) for item in value)
    if isinstance(value, str):
        return any("\ud800" <= letter <= "\udfff" for letter in value)
    return isinstance(value, float) and not math.isfinite(value)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_read_object_agrees_with_json_for_any_body(body: dict[str, object]):
    text = json.dumps(body)
    found = read_object(text.encode())
    if odd(body):
        assert isinstance(found, Problem)
    else:
        assert found == json.loads(text)
