import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.video.spoken import (
    LONGEST,
    Connect,
    Create,
    Created,
    Ear,
    FromBroker,
    Kill,
    NotCreated,
    SpeechError,
    ToBroker,
    Up,
    said,
)

WORDS = st.one_of(
    st.builds(Connect, st.text(max_size=20), st.text(max_size=20)),
    st.builds(Create, st.text(max_size=20), st.integers(0, 9), st.text(max_size=20), st.text(max_size=20),
              st.floats(0, 100), st.floats(0, 100)),
    st.builds(Kill, st.text(max_size=20)),
)  # fmt: skip


@given(st.lists(WORDS, max_size=5), st.lists(st.integers(1, 30), max_size=20))
def test_what_was_said_is_heard_however_it_is_cut(words: list[ToBroker], cuts: list[int]):
    stream, ear, heard = b"".join(map(said, words)), Ear(ToBroker), []
    for cut in cuts:
        heard += ear.feed(stream[:cut])
        stream = stream[cut:]
    assert heard + ear.feed(stream) == words


@pytest.mark.parametrize(
    "data",
    [
        (LONGEST + 1).to_bytes(4, "big"),
        said(Up()),
        b"\x00\x00\x00\x01\xc1",
        len(pickle.dumps({"a": 1})).to_bytes(4, "big") + pickle.dumps({"a": 1}),
    ],
    ids=["too long", "not for a broker", "no msgpack", "a pickle"],
)
def test_what_is_no_word_of_ours_is_not_heard(data: bytes):
    with pytest.raises(SpeechError):
        Ear(ToBroker).feed(data)


def test_what_a_broker_says():
    words = [Up(), Created("lease_1"), NotCreated("lease_2", "why")]
    assert Ear(FromBroker).feed(b"".join(map(said, words))) == words
