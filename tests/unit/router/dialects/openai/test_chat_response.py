import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.dialects.openai.chat import ChatRoute
from router.dialects.openai.chat_response import DONE, ChatChunks, compute_system_fingerprint, encode_completion
from router.dialects.shared.tool_calls import MAX_CALLS_SENT, MAX_TOKEN_BYTES
from router.dispatch.answer import CollectedAnswer
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.placement.candidate import ResourceDemand
from tests.support import answers
from wire.frames import Channel, Delta, Finished, GenerationParams, Logprob

FINISHED = Finished(1, ("stop", "length"), 7, 9, 3)
CALL = '{"index":0,"id":"call_r1_0","name":"weather","arguments":"{\\"city\\":\\"Ulm\\"}"}'
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def a_job(choices: int = 1, *, model: str = "m", include_usage: bool = False, **params: object) -> RequestSpec:
    asked = GenerationParams(n=choices, **params)  # pyright: ignore[reportArgumentType]
    return RequestSpec(ResourceDemand(model), "k", "r1", (), asked, 42, stream=True, include_usage=include_usage)


def events(raw: bytes) -> list[dict[str, object]]:
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]


def chunks(raw: bytes) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(event, strict=True) for event in events(raw)]


def test_a_stream_has_the_shape_that_clients_expect():
    maker = ChatChunks(a_job(2, model='a "model"', include_usage=True))
    raw = maker.encode_opening() + maker.encode_deltas(
        [Delta(1, 0, (5,), ((0, "hi"),)), Delta(1, 1, (6,), ((1, "hm"), (0, "")))]
    )
    raw += maker.encode_end(FINISHED)
    assert raw.endswith(DONE)
    role0, role1, text, thought, end0, end1, usage = chunks(raw)
    assert [one.choices[0].delta.role for one in (role0, role1)] == ["assistant", "assistant"]
    assert (text.choices[0].index, text.choices[0].delta.content) == (0, "hi")
    assert (thought.choices[0].index, thought.choices[0].delta.model_extra) == (1, {"reasoning_content": "hm"})
    assert [one.choices[0].finish_reason for one in (end0, end1)] == ["stop", "length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens, usage.usage.total_tokens) == (7, 9, 16)
    assert {(one.id, one.model, one.created, one.object) for one in chunks(raw)} == {
        ("chatcmpl-r1", 'a "model"', 42, "chat.completion.chunk")
    }


def test_usage_is_streamed_only_on_request():
    maker = ChatChunks(a_job())
    raw = maker.encode_deltas([Delta(1, 0, (5,), ((0, "hi"),))]) + maker.encode_end(FINISHED)
    assert all("usage" not in event for event in events(raw))
    assert len(events(raw)) == 2


@given(st.lists(texts, max_size=5))
def test_every_text_arrives_as_it_was(said: list[str]):
    maker = ChatChunks(a_job())
    raw = maker.encode_deltas([Delta(1, 0, (), ((0, text),)) for text in said])
    assert [chunk.choices[0].delta.content for chunk in chunks(raw)] == said


def test_deltas_of_unknown_choices_and_channels_are_not_sent():
    maker = ChatChunks(a_job())
    assert (
        maker.encode_deltas([Delta(1, 5, (), ((0, "x"),)), Delta(1, -1, (), ((0, "x"),)), Delta(1, 0, (), ((9, "x"),))])
        == b""
    )


def test_missing_finish_reasons_are_filled():
    maker = ChatChunks(a_job(3))
    assert [chunk.choices[0].finish_reason for chunk in chunks(maker.encode_end(Finished(1, (), 0, 0)))] == ["stop"] * 3


def test_a_whole_answer_has_the_shape_that_clients_expect():
    raw = encode_completion(a_job(2), CompleteAnswer({(0, 0): "hello", (1, 0): "ä", (1, 1): "hm"}, {}, {}), FINISHED)
    answer = ChatCompletion.model_validate(json.loads(raw), strict=True)
    assert [choice.message.content for choice in answer.choices] == ["hello", "ä"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[1].message.model_extra == {"reasoning_content": "hm"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_usage_of_the_node_is_exact_whole_and_streamed():
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 12},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    answer = answers.whole(ChatRoute(), **asked)
    assert answer["usage"] == usage
    assert (answer["id"], answer["object"], answer["created"]) == ("chatcmpl-r1", "chat.completion", answers.CREATED)
    raw = answers.streamed(ChatRoute(), *answers.SAID, **asked, stream_options={"include_usage": True})
    *before, last = [data for _, data in answers.events(raw)]
    assert last["usage"] == usage
    assert all(one["usage"] is None for one in before), "clients read it in every chunk once they have asked for it"
    assert {one["system_fingerprint"] for one in (*before, last)} == {answer["system_fingerprint"]}


def test_the_fingerprint_changes_with_the_files_of_the_model():
    assert compute_system_fingerprint("") is None
    known = [compute_system_fingerprint(name) for name in ("tiny-1", "tiny-2")]
    assert len(set(known)) == 2
    assert all(one is not None and one.startswith("fp_") and len(one) == 15 for one in known)
    assert "tiny" not in str(known), "the fingerprint has no part of the node's name for the model"


# tool calls


def test_a_call_is_one_chunk_with_its_place_in_its_choice():
    maker = ChatChunks(a_job(2))
    raw = maker.encode_deltas(
        [Delta(1, 0, (), ((0, "see"), (2, CALL))), Delta(1, 0, (), ((2, CALL),)), Delta(1, 1, (), ((2, CALL),))]
    )
    raw += maker.encode_end(Finished(1, ("tool_calls", "tool_calls"), 1, 1))
    text, *called, end0, end1 = chunks(raw)
    assert text.choices[0].delta.content == "see"
    found = [(one.choices[0].index, (one.choices[0].delta.tool_calls or [])[0]) for one in called]
    assert [(choice, call.index) for choice, call in found] == [(0, 0), (0, 1), (1, 0)]
    assert {(call.id, call.type) for _, call in found} == {("call_r1_0", "function")}
    assert all(call.function is not None and call.function.arguments == '{"city":"Ulm"}' for _, call in found)
    assert [one.choices[0].finish_reason for one in (end0, end1)] == ["tool_calls", "tool_calls"]


BROKEN = [
    "",
    "{",
    "null",
    "[]",
    "{}",
    CALL[:-1],
    CALL.replace('"weather"', "7"),
    CALL.replace("weather", ""),
    CALL.replace("call_r1_0", "x" * 300),
    '{"id":"a","name":"b","arguments":{}}',
    CALL.replace("Ulm", "x" * 2**20),
    "[" * 100_000,
]


@pytest.mark.parametrize("piece", BROKEN)
def test_incomplete_tool_call_is_omitted_and_the_stream_continues(piece: str):
    maker = ChatChunks(a_job())
    raw = maker.encode_deltas([Delta(1, 0, (), ((2, piece), (0, "x")))]) + maker.encode_end(
        Finished(1, ("tool_calls",), 1, 1)
    )
    text, end = chunks(raw)
    assert text.choices[0].delta.content == "x"
    assert end.choices[0].finish_reason == "stop", "a client would look for calls"
    answer = CompleteAnswer({(0, 0): "x"}, {0: [piece]}, {})
    whole = json.loads(encode_completion(a_job(), answer, Finished(1, ("tool_calls",), 1, 1)))["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("x", "stop")
    assert "tool_calls" not in whole["message"]


def test_calls_of_choices_that_are_not_there_are_left_out():
    maker = ChatChunks(a_job())
    assert maker.encode_deltas([Delta(1, choice, (), ((2, CALL),)) for choice in (-1, 1, 2**40)]) == b""


def test_a_choice_makes_a_bounded_number_of_calls():
    maker = ChatChunks(a_job())
    raw = maker.encode_deltas([Delta(1, 0, (), ((2, CALL),) * (MAX_CALLS_SENT + 5))])
    assert len(events(raw)) == MAX_CALLS_SENT
    whole = json.loads(encode_completion(a_job(), CompleteAnswer({}, {0: [CALL] * (MAX_CALLS_SENT + 5)}, {}), FINISHED))
    assert len(whole["choices"][0]["message"]["tool_calls"]) == MAX_CALLS_SENT


def test_unknown_finish_reason_becomes_stop():
    maker = ChatChunks(a_job(2))
    ends = chunks(maker.encode_end(Finished(1, ('"} bad', "length"), 1, 1)))
    assert [one.choices[0].finish_reason for one in ends] == ["stop", "length"]


def test_a_whole_answer_holds_its_calls_and_no_empty_content():
    answer = CompleteAnswer({(1, 0): "see", (1, 1): "hm"}, {0: [CALL, "broken", CALL], 1: [CALL]}, {})
    raw = encode_completion(a_job(2), answer, Finished(1, ("tool_calls", "tool_calls"), 1, 1))
    first, second = ChatCompletion.model_validate(json.loads(raw), strict=True).choices
    assert (first.message.content, second.message.content) == (None, "see")
    assert len(first.message.tool_calls or []) == 2
    assert second.message.tool_calls is not None
    assert second.message.tool_calls[0].model_dump() == {
        "id": "call_r1_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
    }
    assert second.message.model_extra == {"reasoning_content": "hm"}
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "tool_calls")


@pytest.mark.parametrize("calls", [{}, {0: ["broken"]}], ids=["no call", "broken call"])
def test_a_whole_answer_without_calls_has_an_empty_text_and_not_null(calls: dict[int, list[str]]):
    raw = encode_completion(a_job(), CompleteAnswer({(0, 1): "hm"}, calls, {}), Finished(1, ("stop",), 1, 1))
    (choice,) = json.loads(raw)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "hm"}


# log probabilities

LOGPROB = Logprob(b"hi", -0.25, ((b"hi", -0.25), (b"ho", -1.5), (b"he", -3.0)))


def list_logprob_tokens(chunk: ChatCompletionChunk) -> list[str]:
    logprobs = chunk.choices[0].logprobs
    return [one.token for one in logprobs.content or []] if logprobs is not None else []


def test_log_probabilities_are_sent_with_their_tokens():
    maker = ChatChunks(a_job(logprobs=True, top_logprobs=2))
    (chunk,) = chunks(maker.encode_deltas([Delta(1, 0, (5,), ((0, "hi"),), (LOGPROB,))]))
    assert chunk.choices[0].delta.content == "hi"
    assert chunk.choices[0].logprobs is not None
    (one,) = chunk.choices[0].logprobs.content or []
    assert (one.token, one.logprob, one.bytes) == ("hi", -0.25, [104, 105])
    assert [(each.token, each.logprob) for each in one.top_logprobs] == [("hi", -0.25), ("ho", -1.5)]


@pytest.mark.parametrize(
    ("pieces", "carriers"),
    [
        ((), ["content="]),
        (((0, ""),), ["content="]),
        (((1, "hm"),), ["reasoning_content=hm"]),
        (((1, "hm"), (0, "hi")), ["content=hi"]),
        (((0, "hi"), (1, "hm"), (0, "ho")), ["content=hi"]),
        (((2, CALL),), ["content="]),
        (((9, "x"),), ["content="]),
    ],
)
def test_log_probabilities_are_sent_once_for_any_delta(pieces: tuple[tuple[int, str], ...], carriers: list[str]):
    maker = ChatChunks(a_job(logprobs=True))
    found = chunks(maker.encode_deltas([Delta(1, 0, (5,), pieces, (LOGPROB,))]))
    fields = [one.choices[0].delta.model_dump(exclude_unset=True) for one in found if list_logprob_tokens(one)]
    assert [f"{name}={text}" for field in fields for name, text in field.items()] == carriers
    said = "".join((one.choices[0].delta.content or "") for one in found)
    assert said == "".join(text for channel, text in pieces if channel == Channel.CONTENT)
    assert sum(len(one.choices[0].delta.tool_calls or []) for one in found) == sum(piece[0] == 2 for piece in pieces)


def test_log_probabilities_that_were_not_requested_are_not_sent():
    maker = ChatChunks(a_job())
    (chunk,) = chunks(
        maker.encode_deltas([Delta(1, 0, (5,), ((0, "hi"),), (LOGPROB,)), Delta(1, 0, (5,), (), (LOGPROB,))])
    )
    assert (chunk.choices[0].delta.content, chunk.choices[0].logprobs) == ("hi", None)
    answer = CompleteAnswer({(0, 0): "hi"}, {}, {0: [LOGPROB]})
    assert json.loads(encode_completion(a_job(), answer, FINISHED))["choices"][0]["logprobs"] is None
    assert ChatChunks(a_job(logprobs=True)).encode_deltas([Delta(1, 3, (5,), (), (LOGPROB,))]) == b""


def test_non_finite_log_probabilities_and_partial_characters_are_encoded():
    odd = (Logprob(b"\xf0\x9f", float("-inf"), ((b"", float("nan")),)), Logprob(b"x" * 10_000, -1.0))
    maker = ChatChunks(a_job(logprobs=True, top_logprobs=20))
    (chunk,) = chunks(maker.encode_deltas([Delta(1, 0, (5,), ((0, "hi"),), odd)]))
    assert chunk.choices[0].logprobs is not None
    half, long = chunk.choices[0].logprobs.content or []
    assert (half.token, half.bytes, half.logprob) == ("\ufffd", [0xF0, 0x9F], -9999.0)
    assert half.top_logprobs[0].logprob == -9999.0
    assert len(long.bytes or []) == MAX_TOKEN_BYTES


def test_a_whole_answer_has_the_log_probabilities_of_each_choice():
    answer = CompleteAnswer({(0, 0): "hihi", (1, 0): "x"}, {}, {0: [LOGPROB, LOGPROB]})
    raw = encode_completion(a_job(2, logprobs=True, top_logprobs=1), answer, FINISHED)
    first, second = ChatCompletion.model_validate(json.loads(raw), strict=True).choices
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert [len(one.top_logprobs) for one in first.logprobs.content or []] == [1, 1]
    assert second.logprobs.content == []


pieces = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, -1]), st.just(CALL) | texts | st.just("")), max_size=4)
deltas = st.lists(
    st.builds(
        Delta,
        st.just(1),
        st.sampled_from([0, 1, 2, -1]),
        st.just(()),
        pieces.map(tuple),
        st.sampled_from([(), (LOGPROB,)]),
    ),
    max_size=6,
)


@given(deltas, st.booleans())
def test_streamed_and_whole_answers_are_equal(said: list[Delta], logprobs: bool):
    job = a_job(2, logprobs=logprobs, top_logprobs=1)
    ticket, maker = CollectedAnswer(2, logprobs), ChatChunks(job)
    for delta in said:
        ticket.add(delta)
    whole = ChatCompletion.model_validate(
        json.loads(encode_completion(job, ticket.build_answer(), FINISHED)), strict=True
    )
    streamed = chunks(maker.encode_deltas(said))
    for choice in whole.choices:
        mine = [one for one in streamed if one.choices[0].index == choice.index]
        assert (choice.message.content or "") == "".join(one.choices[0].delta.content or "" for one in mine)
        assert len(choice.message.tool_calls or []) == sum(len(one.choices[0].delta.tool_calls or []) for one in mine)
        known = [one.token for one in choice.logprobs.content or []] if choice.logprobs else []
        assert known == [token for one in mine for token in list_logprob_tokens(one)]
