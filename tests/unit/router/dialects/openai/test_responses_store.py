"""Limits of the stored answers of `/v1/responses`."""

from router.dialects.openai.responses_store import ResponseStore, build_stored_response


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
