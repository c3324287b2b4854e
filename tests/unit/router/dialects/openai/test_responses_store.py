"""Limits of the stored answers of `/v1/responses`."""

import pytest

from router.dialects.openai.responses_store import (
    MAX_RESPONSES_PER_KEY,
    MESSAGE_BYTES,
    OutputItems,
    ResponseStore,
    build_stored_response,
)
from wire.frames import Message, ToolCall


def test_the_oldest_answers_of_any_key_leave_above_the_bytes_of_all_keys():
    store = ResponseStore(most=100, nbytes=2_500, of_key=100, key_bytes=2_000)
    for key, name in (("a", "first"), ("b", "second"), ("c", "third")):
        store.put(key, name, build_stored_response(b"x" * 1_000, ()))
    assert [store.get(key, name) is None for key, name in (("a", "first"), ("b", "second"), ("c", "third"))] == [
        True,
        False,
        False,
    ]
    assert (len(store), store.nbytes) == (2, 2_000)


def put(store: ResponseStore, *answers: tuple[str, str, int]) -> None:
    for key, name, size in answers:
        store.put(key, name, build_stored_response(b"x" * size, ()))


def list_stored(store: ResponseStore) -> list[str]:
    """Return the ids of the answers that `put` may have stored, by key and number."""
    return [key + name for key in "abc" for name in "1234" if store.get(key, name) is not None]


@pytest.mark.parametrize(("nbytes", "key_bytes"), [(100, 50), (50, 100)])
def test_an_answer_of_the_size_of_a_limit_is_stored_and_a_larger_one_is_not(nbytes: int, key_bytes: int):
    store = ResponseStore(most=10, nbytes=nbytes, of_key=10, key_bytes=key_bytes)
    put(store, ("a", "1", 50), ("a", "2", 51))
    assert (list_stored(store), len(store), store.nbytes) == (["a1"], 1, 50)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ([("a", "1", 1), ("b", "1", 1), ("a", "2", 1)], ["a1", "a2", "b1"]),
        ([("a", "1", 1), ("b", "1", 1), ("a", "2", 1), ("a", "3", 1)], ["a2", "a3", "b1"]),
        ([("a", "1", 25), ("b", "1", 1), ("a", "2", 25)], ["a1", "a2", "b1"]),
        ([("a", "1", 25), ("b", "1", 1), ("a", "2", 26)], ["a2", "b1"]),
    ],
    ids=["count", "one more", "bytes", "one byte more"],
)
def test_the_oldest_answers_of_a_key_leave_above_its_own_limits(answers: list[tuple[str, str, int]], left: list[str]):
    store = ResponseStore(most=10, nbytes=1000, of_key=2, key_bytes=50)
    put(store, *answers)
    assert list_stored(store) == left
    assert len(store) == len(left)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ([("a", "1", 1), ("b", "1", 1), ("c", "1", 1)], ["a1", "b1", "c1"]),
        ([("a", "1", 1), ("b", "1", 1), ("c", "1", 1), ("b", "2", 1)], ["b1", "b2", "c1"]),
        ([("a", "1", 25), ("b", "1", 25)], ["a1", "b1"]),
        ([("a", "1", 25), ("b", "1", 26)], ["b1"]),
    ],
    ids=["count", "one more", "bytes", "one byte more"],
)
def test_the_oldest_answers_leave_above_the_limits_of_all_keys(answers: list[tuple[str, str, int]], left: list[str]):
    store = ResponseStore(most=3, nbytes=50, of_key=3, key_bytes=50)
    put(store, *answers)
    assert list_stored(store) == left
    assert len(store) == len(left)


def test_an_answer_replaces_an_earlier_one_with_its_id():
    store = ResponseStore(most=10, nbytes=100, of_key=10, key_bytes=100)
    put(store, ("a", "1", 50), ("a", "1", 60))
    assert (list_stored(store), len(store), store.nbytes) == (["a1"], 1, 60)
    put(store, ("a", "1", 101))
    assert (list_stored(store), len(store), store.nbytes) == ([], 0, 0)


def test_the_items_of_more_answers_are_stored_than_answers():
    items = OutputItems()
    for number in range(MAX_RESPONSES_PER_KEY + 1):
        items.put("a", f"resp_{number}", b'{"tools":[{}],"output":[{"id":"msg_%d_0"}]}' % number)
    assert items.find("a", ["msg_0_0", f"msg_{MAX_RESPONSES_PER_KEY}_0", "msg_x_0", "", "_"]) == {
        "msg_0_0": {"id": "msg_0_0"},
        f"msg_{MAX_RESPONSES_PER_KEY}_0": {"id": f"msg_{MAX_RESPONSES_PER_KEY}_0"},
    }
    items.drop("a", "resp_0")
    items.drop("a", "resp_0")
    assert items.find("a", ["msg_0_0"]) == items.find("b", ["msg_1_0"]) == {}


def test_the_size_of_an_answer_counts_all_texts_of_its_conversation():
    call = ToolCall("c", "look", "x" * 5)
    messages = (Message("user", "x" * 30), Message("assistant", "x" * 20, tool_calls=(call, call), reasoning="x" * 10))
    assert build_stored_response(b"x" * 100, messages).nbytes == 100 + 2 * MESSAGE_BYTES + 30 + 20 + 2 * 5 + 10
