import json

from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.dialects.chat_answer import DONE, ChatChunks, completion
from wire.frames import Delta, Finished

FINISHED = Finished(1, ("stop", "length"), 7, 9, 3)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def events(raw: bytes) -> list[dict[str, object]]:
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]


def chunks(raw: bytes) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(event, strict=True) for event in events(raw)]


def test_a_stream_has_the_shape_that_clients_expect():
    maker = ChatChunks("r1", 'a "model"', 42, 2, include_usage=True)
    raw = maker.opening() + maker.deltas([Delta(1, 0, (5,), ((0, "hi"),)), Delta(1, 1, (6,), ((1, "hm"), (0, "")))])
    raw += maker.closing(FINISHED)
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


def test_usage_is_not_told_unasked():
    maker = ChatChunks("r1", "m", 42, 1, include_usage=False)
    raw = maker.deltas([Delta(1, 0, (5,), ((0, "hi"),))]) + maker.closing(FINISHED)
    assert all("usage" not in event for event in events(raw))
    assert len(events(raw)) == 2


@given(st.lists(texts, max_size=5))
def test_every_text_arrives_as_it_was(said: list[str]):
    maker = ChatChunks("r1", "m", 42, 1, include_usage=False)
    raw = maker.deltas([Delta(1, 0, (), ((0, text),)) for text in said])
    assert [chunk.choices[0].delta.content for chunk in chunks(raw)] == said


def test_what_no_client_asked_for_is_not_sent():
    maker = ChatChunks("r1", "m", 42, 1, include_usage=False)
    assert (
        maker.deltas([Delta(1, 5, (), ((0, "x"),)), Delta(1, -1, (), ((0, "x"),)), Delta(1, 0, (), ((9, "x"),))]) == b""
    )


def test_reasons_that_a_node_forgot_are_filled():
    maker = ChatChunks("r1", "m", 42, 3, include_usage=False)
    assert [chunk.choices[0].finish_reason for chunk in chunks(maker.closing(Finished(1, (), 0, 0)))] == ["stop"] * 3


def test_a_whole_answer_has_the_shape_that_clients_expect():
    raw = completion("r1", "m", 42, 2, {(0, 0): "hello", (1, 0): "ä", (1, 1): "hm"}, FINISHED)
    answer = ChatCompletion.model_validate(json.loads(raw), strict=True)
    assert [choice.message.content for choice in answer.choices] == ["hello", "ä"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[1].message.model_extra == {"reasoning_content": "hm"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
