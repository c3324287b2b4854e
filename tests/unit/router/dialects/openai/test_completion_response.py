"""Answers of `/v1/completions`, value by value."""

import json

from msgspec.structs import replace

from router.dialects.openai.completion import CompletionRoute
from router.dialects.openai.completion_response import convert_logprobs
from router.dispatch.request import CompleteAnswer
from router.errors import Problem
from tests.support.answers import CREATED, CROWDED, FINISHED, Reading, asked, events
from wire.frames import Channel, Delta, Logprob

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 12},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
ENDS = replace(FINISHED, reasons=("length", "stop"))
TWO = CompleteAnswer({(0, Channel.CONTENT): " one", (1, Channel.CONTENT): " two"}, {}, {})
TOKENS = [Logprob(b" on", -0.5, ((b" on", -0.5), (b" tw", -1.5))), Logprob(b"e", -0.25, ((b"e", -0.25), (b"x", -2.0)))]


def test_a_whole_completion_has_every_choice_and_the_exact_usage():
    request, job = asked(CompletionRoute(), prompt="once", n=2, echo=True)
    assert json.loads(request.render_complete(job, TWO, ENDS)) == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": CREATED,
        "model": "tiny",
        "usage": USAGE,
        "choices": [
            {"index": 0, "text": "once one", "logprobs": None, "finish_reason": "length"},
            {"index": 1, "text": "once two", "logprobs": None, "finish_reason": "stop"},
        ],
    }


def test_a_completion_has_no_other_finish_reasons_than_stop_and_length():
    request, job = asked(CompletionRoute(), prompt="once", n=3)
    ends = replace(FINISHED, reasons=("tool_calls", "length"))
    three = CompleteAnswer({(choice, Channel.CONTENT): "x" for choice in range(3)}, {}, {})
    choices = json.loads(request.render_complete(job, three, ends))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]


def test_legacy_log_probabilities_have_text_offsets():
    request, job = asked(CompletionRoute(), prompt="once", logprobs=1)
    answer = CompleteAnswer({(0, Channel.CONTENT): " one"}, {}, {0: TOKENS})
    (choice,) = json.loads(request.render_complete(job, answer, FINISHED))["choices"]
    assert choice["logprobs"] == {
        "tokens": [" on", "e"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{" on": -0.5}, {"e": -0.25}],
        "text_offset": [0, 3],
    }
    chunks = request.create_chunk_encoder(Reading(job, job.demand))
    raw = b"".join(chunks.encode_deltas([Delta(7, 0, (1,), ((0, "x"),), (token,))]) for token in TOKENS).decode()
    assert [data["choices"][0]["logprobs"]["text_offset"] for _, data in events(raw)] == [[0], [3]]


def test_text_offsets_count_the_characters_of_the_tokens_as_they_are_sent():
    said = (b"a", "ä€".encode(), "😀".encode(), b"\xe2\x82", b"b")
    found = convert_logprobs([Logprob(token, -0.5, ()) for token in said], 0, 3)
    assert found.tokens == ["a", "ä€", "😀", "bytes:\\xe2\\x82", "b"]
    assert found.text_offset == [3 + sum(map(len, found.tokens[:place])) for place in range(len(said))]


def test_completion_stream_has_usage_only_at_its_end():
    request, job = asked(CompletionRoute(), prompt="once", n=2, stream=True, stream_options={"include_usage": True})
    chunks = request.create_chunk_encoder(Reading(job, job.demand))
    raw = chunks.encode_opening() + chunks.encode_deltas([Delta(7, 1, (1,), ((0, " two"),))]) + chunks.encode_end(ENDS)
    assert raw.endswith(b"data: [DONE]\n\n")
    text, first, second, last = [data for _, data in events(raw.decode())]
    assert [one["usage"] for one in (text, first, second, last)] == [None, None, None, USAGE]
    assert (text["choices"][0]["index"], text["choices"][0]["text"]) == (1, " two")
    assert [one["choices"][0]["finish_reason"] for one in (first, second)] == ["length", "stop"]
    assert last["choices"] == []
    assert {(one["id"], one["created"], one["model"]) for one in (text, last)} == {("cmpl-r1", CREATED, "tiny")}


def test_a_chunk_has_the_content_of_its_delta_and_log_probabilities_also_without_content():
    request, job = asked(CompletionRoute(), prompt="once", stream=True, logprobs=0)
    chunks = request.create_chunk_encoder(Reading(job, job.demand))

    def encode(*pieces: tuple[Channel, str], choice: int = 0, tokens: tuple[Logprob, ...] = ()) -> list[object]:
        delta = Delta(7, choice, (1,), tuple((int(channel), text) for channel, text in pieces), tokens)
        return [
            (data["choices"][0]["text"], (data["choices"][0]["logprobs"] or {}).get("tokens"))
            for _, data in events(chunks.encode_deltas([delta]).decode())
        ]

    assert encode((Channel.CONTENT, "on"), (Channel.REASONING, "hm"), (Channel.CONTENT, "e")) == [("one", None)]
    assert encode((Channel.REASONING, "hm")) == encode() == encode((Channel.CONTENT, "x"), choice=1) == []
    assert encode(tokens=(TOKENS[0],)) == [("", [" on"])]


def test_a_stream_that_breaks_has_no_done():
    request, job = asked(CompletionRoute(), prompt="once", stream=True)
    raw = request.create_chunk_encoder(Reading(job, job.demand)).encode_failure(CROWDED).decode()
    assert "[DONE]" not in raw
    ((_, data),) = events(raw)
    assert data["error"]["code"] == "no_headroom"
    assert data["error"]["type"] == "server_error"
    assert data["error"]["memory"]["headroom"] == 2
    assert json.loads(Problem(429, "x", "y").encode_body("r"))["error"]["type"] == "rate_limit_error"
