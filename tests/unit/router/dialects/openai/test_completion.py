"""Conversion of `/v1/completions` bodies to the frames of a node, value by value."""

import json
from typing import Any

import pytest

from router.admission.request_limits import MAX_CHOICES
from router.dialects.openai.completion import CompletionRequest, CompletionRoute
from router.dispatch.request import RequestSpec
from router.errors import Problem
from tests.support.answers import CREATED, Reading
from wire.frames import Channel, Delta, GenerationParams, Logprob


def parse(**body: Any) -> CompletionRequest:
    found = CompletionRoute().parse(json.dumps({"model": "tiny", **body}).encode(), "k1")
    assert isinstance(found, CompletionRequest), found
    return found


def specs(**body: Any) -> list[RequestSpec]:
    return list(parse(**body).to_specs("k1", "r1", CREATED))


def refused(**body: Any) -> Problem:
    found = CompletionRoute().parse(json.dumps({"model": "tiny", **body}).encode(), "k1")
    assert isinstance(found, Problem)
    return found


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", [("hi", ())]),
        (["hi", "you"], [("hi", ()), ("you", ())]),
        ([0, 7], [("", (0, 7))]),
        ([[7], [8, 0]], [("", (7,)), ("", (8, 0))]),
    ],
)
def test_a_prompt_is_texts_or_token_ids(prompt: object, prompts: list[tuple[str, tuple[int, ...]]]):
    jobs = specs(prompt=prompt)
    assert [(job.text, job.ids) for job in jobs] == prompts
    assert [job.demand.prompt_tokens for job in jobs] == [len(ids) or None for _, ids in prompts]


def test_the_limit_of_an_answer_is_sixteen_tokens_unless_it_is_set():
    (job,) = specs(prompt="hi")
    assert (job.params, job.default_limit) == (GenerationParams(max_tokens=16), True)
    (job,) = specs(prompt="hi", max_tokens=-1, seed=-1)
    assert (job.params, job.default_limit) == (GenerationParams(), False)
    (job,) = specs(prompt="hi", max_tokens=7, stream=True, stream_options={"include_usage": True})
    assert (job.params, job.default_limit) == (GenerationParams(max_tokens=7), False)
    assert (job.stream, job.include_usage) == (True, True)


def test_all_requests_of_a_body_have_its_session_and_its_ignored_fields():
    jobs = specs(prompt=["a", "b"], user="u", metadata={"a": "b"}, presence_penalty=0)
    expected = ("u", ("metadata",), {"presence_penalty"})
    assert [(job.session, job.ignored, job.set_penalties) for job in jobs] == [expected] * 2


def test_fields_that_exclude_each_other_name_the_field():
    assert refused(prompt="hi", best_of=2, n=1).param == "best_of"
    assert parse(prompt="hi", best_of=2, n=2).params.n == 2
    assert refused(prompt="hi", echo=True, logprobs=1).param == "echo"
    assert refused(prompt=[7], echo=True).param == "echo"


def test_the_number_of_answers_of_all_prompts_is_bounded():
    most = ["x"] * MAX_CHOICES
    assert len(specs(prompt=most, n=MAX_CHOICES)) == MAX_CHOICES
    problem = refused(prompt=[*most, "x"], n=MAX_CHOICES)
    assert (problem.status, problem.param) == (400, "n")


def test_a_stream_with_echo_begins_with_each_prompt():
    request = parse(prompt=["once", "twice"], n=2, echo=True, stream=True)
    job = request.to_specs("k1", "r1", CREATED)[0]
    opening = request.create_chunk_encoder(Reading(job, job.demand)).encode_opening().decode()
    choices = [json.loads(line[6:])["choices"][0] for line in opening.splitlines() if line]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "once"),
        (1, "once"),
        (2, "twice"),
        (3, "twice"),
    ]
    plain = parse(prompt="once", stream=True)
    (job,) = plain.to_specs("k1", "r1", CREATED)
    assert plain.create_chunk_encoder(Reading(job, job.demand)).encode_opening() == b""


def test_logprobs_are_streamed_if_they_are_wanted_and_a_part_of_a_character_is_its_bytes():
    said = [Delta(7, 0, (1,), ((int(Channel.CONTENT), "x"),), (Logprob(b"x\xe2", -0.5, ((b"x\xe2", -0.5),)),))]
    found: list[Any] = []
    for fields in ({}, {"logprobs": 1}):
        request = parse(prompt="hi", stream=True, **fields)
        (job,) = request.to_specs("k1", "r1", CREATED)
        chunk = request.create_chunk_encoder(Reading(job, job.demand)).encode_deltas(said).decode()
        found.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["logprobs"])
    text = "bytes:\\x78\\xe2"
    assert found == [
        None,
        {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}], "text_offset": [0]},
    ]


def test_max_completion_tokens_overrides_max_tokens():
    assert parse(prompt="hi").params.max_tokens == 16
    found = parse(prompt="hi", max_tokens=3, max_completion_tokens=40)
    assert (found.params.max_tokens, found.ignored) == (40, ())
    assert not found.default_limit
    assert parse(prompt="hi", max_completion_tokens=-1).params.max_tokens is None
