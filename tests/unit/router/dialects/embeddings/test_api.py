"""Requests for embeddings: their texts, token ids and options, and whether a text that is too long may be cut."""

import json
from typing import Any

import pytest

from router.dialects.embeddings.api import EmbeddingsRoute, OllamaEmbeddingsRoute, OllamaEmbedRoute, ParsedEmbedding
from router.dialects.shared.interface import Dialect
from router.dispatch.request import CompleteAnswer
from router.errors import Problem
from tests.support.answers import FINISHED, asked


@pytest.mark.parametrize(
    ("dialect", "body", "cuts"),
    [
        (EmbeddingsRoute(), {"input": "hi"}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": None}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": False}, False),
        (EmbeddingsRoute(), {"input": "hi", "truncate": True}, True),
        (OllamaEmbedRoute(), {"input": "hi"}, True),
        (OllamaEmbedRoute(), {"input": "hi", "truncate": None}, True),
        (OllamaEmbedRoute(), {"input": "hi", "truncate": False}, False),
        (OllamaEmbeddingsRoute(), {"prompt": "hi"}, True),
    ],
)
def test_a_long_text_is_cut_by_default_for_ollama_only(dialect: Dialect, body: dict[str, Any], cuts: bool) -> None:
    _, job = asked(dialect, **body)
    assert job.embed is not None
    assert job.embed.truncate is cuts


@pytest.mark.parametrize(
    ("value", "texts", "ids"),
    [
        ("hi", ("hi",), ()),
        (["hi", "you"], ("hi", "you"), ()),
        ([0, 7], (), ((0, 7),)),
        ([[7], [8, 0]], (), ((7,), (8, 0))),
    ],
)
def test_an_input_is_texts_or_token_ids(
    value: object, texts: tuple[str, ...], ids: tuple[tuple[int, ...], ...]
) -> None:
    for dialect in (EmbeddingsRoute(), OllamaEmbedRoute()):
        if ids and isinstance(dialect, OllamaEmbedRoute):
            continue
        _, job = asked(dialect, input=value)
        assert job.embed is not None
        assert (job.embed.texts, job.embed.ids) == (texts, ids)


@pytest.mark.parametrize("dialect", [EmbeddingsRoute(), OllamaEmbedRoute()])
def test_dimensions_arrive_and_are_those_of_the_model_by_default(dialect: Dialect) -> None:
    for fields, dimensions in (({}, 0), ({"dimensions": None}, 0), ({"dimensions": 7}, 7)):
        _, job = asked(dialect, input="hi", **fields)
        assert job.embed is not None
        assert (job.embed.dimensions, job.stream) == (dimensions, False)


def test_the_prompt_name_and_the_encoding_arrive() -> None:
    request, job = asked(EmbeddingsRoute(), input="hi", prompt_name="query", encoding_format="base64")
    assert isinstance(request, ParsedEmbedding)
    assert job.embed is not None
    assert (job.embed.prompt, request.as_base64) == ("query", True)
    request, job = asked(EmbeddingsRoute(), input="hi", encoding_format="float")
    assert isinstance(request, ParsedEmbedding)
    assert not request.as_base64


@pytest.mark.parametrize(
    ("dialect", "body", "answer"),
    [
        (OllamaEmbedRoute(), {"input": ""}, {"model": "tiny", "embeddings": []}),
        (OllamaEmbedRoute(), {"input": []}, {"model": "tiny", "embeddings": []}),
        (OllamaEmbedRoute(), {"input": [], "keep_alive": -1}, {"model": "tiny", "embeddings": []}),
        (OllamaEmbeddingsRoute(), {"prompt": ""}, {"embedding": []}),
    ],
)
def test_ollama_s_routes_load_the_model_without_a_text(
    dialect: Dialect, body: dict[str, Any], answer: dict[str, Any]
) -> None:
    request, job = asked(dialect, model="tiny:latest", **body)
    assert job.embed is not None
    assert job.embed.count == 1
    found = request.render_complete(job, CompleteAnswer({}, {}, {}, vectors=(bytes(4),)), FINISHED)
    assert json.loads(found) == answer
    unload = dialect.parse(json.dumps({"model": "tiny", **body, "keep_alive": 0}).encode(), "k")
    assert isinstance(unload, Problem)
    assert (unload.status, unload.param) == (501, "keep_alive")


def test_an_empty_text_among_others_is_a_space_on_ollama_s_route() -> None:
    """One empty part of a document would otherwise fail the whole request."""
    _, job = asked(OllamaEmbedRoute(), input=["hi", "", "you"])
    assert job.embed is not None
    assert job.embed.texts == ("hi", " ", "you")


def test_ollama_s_older_route_has_one_text_and_no_dimensions() -> None:
    _, job = asked(OllamaEmbeddingsRoute(), model="tiny:latest", prompt="hi")
    assert job.embed is not None
    assert (job.embed.texts, job.embed.dimensions, job.demand.model) == (("hi",), 0, "tiny")
