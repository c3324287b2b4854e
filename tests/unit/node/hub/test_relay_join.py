"""The start of a relayed connection: joined, refused, or answered by something else."""

import pytest

from node.hub.child_messages import ClusterFiles
from node.hub.relay_join import RELAY_JOINED, RelayAnswer, RelayRefusedError, build_join, split_address
from wire.codec import Splitter, decode, encode
from wire.frames import Denied, JoinRelay, RelayJoined, StopEngine
from wire.identity import PROTOCOL

CLUSTER = ClusterFiles(cluster="c1", node="n1", machine="m1")


def feed_until_refused(data: bytes) -> RelayRefusedError:
    """Feed bytes one at a time until the answer is refused, and return the error."""
    answer = RelayAnswer()
    for at in range(len(data)):
        try:
            assert answer.feed(data[at : at + 1]) is None
        except RelayRefusedError as error:
            return error
    raise AssertionError("the answer was not refused")


@pytest.mark.parametrize("rest", [b"", b"GET / HTTP/1.1\r\n\r\n", encode(Denied("no_server", "no", False))])
def test_bytes_after_the_joined_frame_come_from_the_other_node(rest: bytes):
    assert RelayAnswer().feed(RELAY_JOINED + rest) == rest
    answer = RelayAnswer()
    for at in range(len(RELAY_JOINED) - 1):
        assert answer.feed(RELAY_JOINED[at : at + 1]) is None
    assert answer.feed(RELAY_JOINED[-1:] + rest) == rest


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_has_the_text_of_the_coordinator_and_whether_it_is_final(final: bool):
    refused = feed_until_refused(encode(Denied("no_transfer", "the coordinator relays no such transfer", final)))
    assert (str(refused), refused.is_final) == ("the coordinator relays no such transfer", final)


def test_a_connection_that_is_lost_can_be_tried_again():
    assert not RelayRefusedError("the coordinator closed the connection").is_final


def test_any_other_answer_is_final():
    other = feed_until_refused(encode(StopEngine(1.0)))
    assert (str(other), other.is_final) == ("the coordinator answered StopEngine", True)
    damaged = feed_until_refused(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert (str(damaged).startswith("the coordinator sent a "), damaged.is_final) == (True, True)


@pytest.mark.parametrize("serves", [True, False])
def test_the_join_names_the_node_its_machine_and_the_transfer(serves: bool):
    ((tag, body),) = Splitter().feed(bytearray(build_join(CLUSTER, "token", serves=serves)))
    assert decode(tag, body) == JoinRelay(PROTOCOL, "n1", "m1", "token", serves)
    assert encode(RelayJoined()) == RELAY_JOINED


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("mac.local:8081", ("mac.local", 8081)),
        ("10.0.0.2:1", ("10.0.0.2", 1)),
        ("[fe80::1%en0]:8081", ("fe80::1%en0", 8081)),
    ],
)
def test_split_address_returns_host_and_port(address: str, found: tuple[str, int]):
    assert split_address(address) == found


@pytest.mark.parametrize("address", ["", "mac.local", ":8081", "mac.local:", "mac.local:http", "mac.local:-1"])
def test_split_address_refuses_other_texts(address: str):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)
