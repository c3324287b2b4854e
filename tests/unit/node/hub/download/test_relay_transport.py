"""HTTP through the coordinator: connections are used again, or replaced, and no body is taken for complete."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.child_messages import ClusterFiles
from node.hub.download import relay_transport
from node.hub.download.relay_transport import RelayTransport
from node.hub.download.source_client import SourceClient
from node.hub.download.source_errors import SourceFault, SourceRefusal
from node.hub.relay_join import RELAY_JOINED, RelayRefusedError
from tests.support.cluster.model_node import get_files, make_identity
from wire.codec import Splitter, decode, encode
from wire.frames import Denied, JoinRelay
from wire.frames.model_files import ModelOrderCode
from wire.identity import PROTOCOL
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

TOKEN = "transfer-token"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
FILE = ModelFile("a b%.json", 5, "", "a" * 40)
MANIFEST = ModelManifest("tests/tiny", "c" * 40, (FILE,))


class Coordinator:
    """Scripted coordinator that answers for the node which serves. Change its answers at any time."""

    def __init__(self, folder: Path) -> None:
        authority = ClusterCa(folder / "authority", time.time)
        self._context = authority.get_server_context()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        files = get_files(make_identity(folder, authority, "n1"))
        self.cluster: ClusterFiles = replace(files, node="n1", machine="m1", coordinator=self.address)
        self.welcome = RELAY_JOINED
        """Answer to a join."""
        self.answer = WHOLE
        """Answer to a request."""
        self.ends = False
        """Whether a connection ends after an answer."""
        self.joins: list[JoinRelay] = []
        self.requests: list[bytes] = []
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), self._context.wrap_socket(plain, server_side=True) as connection:
            self.open.append(connection)
            try:
                splitter, frames = Splitter(), list[object]()
                while not frames:
                    frames += [decode(tag, body) for tag, body in splitter.feed(connection.recv(4096))]
                (join,) = frames
                assert isinstance(join, JoinRelay)
                self.joins.append(join)
                connection.sendall(self.welcome)
                received = b""
                while data := connection.recv(4096):
                    received += data
                    if received.endswith(b"\r\n\r\n"):
                        self.requests.append(received)
                        received = b""
                        connection.sendall(self.answer)
                        if self.ends:
                            return
            finally:
                self.open.remove(connection)

    def wait_open(self, wanted: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.open) != wanted:
            assert time.monotonic() < deadline, f"{len(self.open)} connections are open"
            time.sleep(0.01)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(coordinator: Coordinator) -> Iterator[httpx2.Client]:
    with httpx2.Client(transport=RelayTransport(coordinator.cluster, TOKEN), trust_env=False) as made:
        yield made


def get(client: httpx2.Client) -> bytes:
    return client.get("http://relay/a?b=c", headers={"x-mine": "1"}).content


def test_a_request_joins_the_transfer_and_is_sent_as_it_is(coordinator: Coordinator, client: httpx2.Client):
    assert get(client) == b"hello"
    assert coordinator.joins == [JoinRelay(PROTOCOL, "n1", "m1", TOKEN, False)]
    assert coordinator.requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"\r\nx-mine: 1\r\n" in coordinator.requests[0].lower()


def test_a_connection_is_used_again_after_a_whole_answer(coordinator: Coordinator, client: httpx2.Client):
    for _ in range(3):
        assert get(client) == b"hello"
    assert (len(coordinator.joins), len(coordinator.requests)) == (1, 3)


def test_answers_at_once_have_connections_of_their_own(coordinator: Coordinator, client: httpx2.Client):
    with client.stream("GET", "http://relay/1") as first, client.stream("GET", "http://relay/2") as second:
        assert (first.read(), second.read()) == (b"hello", b"hello")
    assert len(coordinator.joins) == 2
    assert get(client) == b"hello"
    assert len(coordinator.joins) == 2
    client.close()
    coordinator.wait_open(0)


def test_two_threads_that_take_the_last_idle_connection_are_both_answered(
    coordinator: Coordinator, client: httpx2.Client
):
    def delay_take(frame: FrameType, _: str, __: object) -> Any:
        """Run the lines that take an idle connection at the same time in both threads."""
        if frame.f_code.co_name != "_take":
            return None
        time.sleep(0.05)
        return delay_take

    get(client)
    answers = list[bytes]()
    threads = [threading.Thread(target=lambda: answers.append(get(client))) for _ in range(2)]
    before = threading.gettrace()
    threading.settrace(delay_take)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(before)
    assert answers == [b"hello", b"hello"]


def test_a_connection_with_a_rest_is_not_used_again(coordinator: Coordinator, client: httpx2.Client):
    with client.stream("GET", "http://relay/1"):
        pass
    coordinator.wait_open(0)
    assert get(client) == b"hello"
    assert len(coordinator.joins) == 2


def test_a_connection_that_the_node_will_close_is_not_used_again(coordinator: Coordinator, client: httpx2.Client):
    coordinator.answer = WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert [get(client), get(client)] == [b"hello", b"hello"]
    assert len(coordinator.joins) == 2


def test_a_connection_that_has_ended_is_replaced(coordinator: Coordinator, client: httpx2.Client):
    coordinator.ends = True
    assert get(client) == b"hello"
    coordinator.wait_open(0)
    assert get(client) == b"hello"
    assert len(coordinator.joins) == 2


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE.replace(b"length: 5", b"length: 7"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_a_body_that_ends_early_is_an_error(coordinator: Coordinator, client: httpx2.Client, answer: bytes):
    coordinator.ends, coordinator.answer = True, answer
    with pytest.raises(httpx2.ReadError):
        get(client)
    coordinator.ends, coordinator.answer = False, WHOLE
    assert get(client) == b"hello"


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
def test_an_answer_that_is_none_is_an_error(coordinator: Coordinator, client: httpx2.Client, answer: bytes):
    coordinator.ends, coordinator.answer = True, answer
    with pytest.raises(httpx2.ReadError):
        get(client)
    coordinator.wait_open(0)


def test_a_node_that_is_silent_is_an_error(
    coordinator: Coordinator, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(relay_transport, "READ_TIMEOUT_SECONDS", 0.05)
    coordinator.answer = b"HTTP/1.1 200 OK\r\n"
    with pytest.raises(httpx2.ReadError, match="timed out"):
        get(client)
    coordinator.answer = WHOLE[:-2]
    with pytest.raises(httpx2.ReadError, match="timed out"):
        get(client)
    coordinator.wait_open(0)


def test_a_refusal_of_the_coordinator_is_the_cause_of_the_error(coordinator: Coordinator, client: httpx2.Client):
    coordinator.welcome = encode(Denied("no_server", "the node does not serve yet"))
    with pytest.raises(httpx2.ConnectError, match="the node does not serve yet") as caught:
        get(client)
    assert isinstance(caught.value.__cause__, RelayRefusedError)
    coordinator.wait_open(0)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:1"])
def test_a_coordinator_that_cannot_be_reached_is_an_error(coordinator: Coordinator, address: str):
    transport = RelayTransport(replace(coordinator.cluster, coordinator=address), TOKEN)
    with httpx2.Client(transport=transport, trust_env=False) as client, pytest.raises(httpx2.ConnectError):
        get(client)


@pytest.mark.parametrize("final", [True, False])
def test_a_source_behind_the_relay_is_named_by_the_coordinator(coordinator: Coordinator, final: bool):
    source = SourceClient(ModelSource(SourceKind.RELAY, "", TOKEN, "n2"), coordinator.cluster, connections=1)
    assert source.url == f"relay://{coordinator.address}"
    with source.open_range(MANIFEST, FILE, 0, 5) as blocks:
        assert b"".join(blocks) == b"hello"
    assert coordinator.requests[0].startswith(b"GET /tests/tiny/resolve/%s/a%%20b%%25.json HTTP/1.1\r\n" % (b"c" * 40))
    head = coordinator.requests[0].lower()
    assert b"\r\nrange: bytes=0-4\r\n" in head
    assert b"\r\nauthorization: bearer transfer-token\r\n" in head
    source.close()
    coordinator.wait_open(0)
    coordinator.welcome = encode(Denied("no_transfer", "there is no such transfer", final))
    source = SourceClient(ModelSource(SourceKind.RELAY, "", TOKEN, "n2"), coordinator.cluster, connections=1)
    with pytest.raises(SourceRefusal if final else SourceFault) as caught, source.open_range(MANIFEST, FILE, 0, 5):
        pass
    if isinstance(caught.value, SourceRefusal):
        assert (caught.value.code, str(caught.value)) == (
            ModelOrderCode.SOURCE_LOST,
            f"relay://{coordinator.address}: there is no such transfer",
        )
    else:
        assert str(caught.value) == (
            f"the connection to relay://{coordinator.address} failed: there is no such transfer"
        )
    source.close()


def test_a_relay_that_does_not_answer_may_be_back_later(coordinator: Coordinator):
    """A mirror that refuses connections has ended, but the coordinator starts again."""
    cluster = replace(coordinator.cluster, coordinator="127.0.0.1:1")
    source = SourceClient(ModelSource(SourceKind.RELAY, "", TOKEN, "n2"), cluster, connections=1)
    with pytest.raises(SourceFault, match=r"relay://127\.0\.0\.1:1 failed: "), source.open_range(MANIFEST, FILE, 0, 5):
        pass
    source.close()


def test_a_node_behind_the_relay_never_redirects(coordinator: Coordinator):
    source = SourceClient(ModelSource(SourceKind.RELAY, "", TOKEN, "n2"), coordinator.cluster, connections=1)
    coordinator.answer = b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n"
    with pytest.raises(SourceRefusal, match="which is not allowed"), source.open_range(MANIFEST, FILE, 0, 5):
        pass
    assert len(coordinator.requests) == 1
    source.close()
