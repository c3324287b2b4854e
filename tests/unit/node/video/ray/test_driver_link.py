import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.video.ray.driver_link import (
    MAX_MESSAGE_BYTES,
    ActorCreated,
    ActorNotCreated,
    ConnectDriver,
    CreateActor,
    DriverConnected,
    DriverLinkError,
    FromDriver,
    KillActor,
    MessageReader,
    ToDriver,
    encode_message,
)

WORDS = st.one_of(
    st.builds(ConnectDriver, st.text(max_size=20)),
    st.builds(
        CreateActor, st.text(max_size=20), st.integers(0, 9), st.text(max_size=20), st.floats(0, 100), st.floats(0, 100)
    ),
    st.builds(KillActor, st.text(max_size=20)),
)


@given(st.lists(WORDS, max_size=5), st.lists(st.integers(1, 30), max_size=20))
def test_messages_are_decoded_however_they_are_cut(words: list[ToDriver], cuts: list[int]):
    stream, reader, heard = b"".join(map(encode_message, words)), MessageReader(ToDriver), []
    for cut in cuts:
        heard += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert heard + reader.feed(stream) == words


@pytest.mark.parametrize(
    "data",
    [
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        encode_message(DriverConnected()),
        b"\x00\x00\x00\x01\xc1",
        len(pickle.dumps({"a": 1})).to_bytes(4, "big") + pickle.dumps({"a": 1}),
    ],
    ids=["too long", "not for a driver", "no msgpack", "a pickle"],
)
def test_an_unknown_message_is_an_error(data: bytes):
    with pytest.raises(DriverLinkError):
        MessageReader(ToDriver).feed(data)


def test_what_a_driver_sends():
    words = [DriverConnected(), ActorCreated("lease_1"), ActorNotCreated("lease_2", "why")]
    assert MessageReader(FromDriver).feed(b"".join(map(encode_message, words))) == words
