"""Requests of a client of model files, to a hub on a thread: headers, redirects, ranges, and the kinds of errors."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.child_messages import ClusterFiles
from node.hub.download.source_client import USER_AGENT, SourceClient
from node.hub.download.source_errors import SourceError, SourceFault, SourcePending, SourceRefusal
from node.hub.serving.server import RETRY_SECONDS
from tests.support.cluster.model_node import get_files, make_identity
from tests.support.hub.downloads import hub_source
from tests.support.hub.hub import Answer, Hub, running_hub
from wire.codec import encode
from wire.frames import Denied
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelManifest, ModelSource, SourceKind

FILES = {"config.json": b"{}", "model.safetensors": random.Random(8).randbytes(3000)}
SIZE = len(FILES["model.safetensors"])


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no proxy."""
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


@pytest.fixture
def hub(running: Hub) -> Hub:
    running.reset()
    return running


def read(source: ModelSource, manifest: ModelManifest, start: int, end: int, cluster: ClusterFiles | None = None):
    """Return these bytes of the weights."""
    client = SourceClient(source, cluster or ClusterFiles(), connections=1)
    with closing(client), client.open_range(manifest, manifest.files[-1], start, end) as blocks:
        return b"".join(blocks)


def refuse(source: ModelSource, manifest: ModelManifest, cluster: ClusterFiles | None = None) -> SourceError:
    """Return the error of a request for bytes 10 to 20."""
    with pytest.raises(SourceError) as caught:
        read(source, manifest, 10, 20, cluster)
    return caught.value


def test_a_request_names_its_range_and_wants_the_bytes_as_they_are(hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    assert read(hub_source(hub.url), manifest, 10, 200) == FILES["model.safetensors"][10:200]
    (request,) = hub.requests
    assert (request.range, request.authorization) == ("bytes=10-199", "")
    assert (request.headers["accept-encoding"], request.headers["user-agent"]) == ("identity", USER_AGENT)


def test_the_token_goes_to_the_host_of_its_source_only(hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    with running_hub() as store:
        store.add("tests/tiny", FILES)
        path = f"/tests/tiny/resolve/{manifest.commit}/model.safetensors"
        hub.faults.answers = [Answer("model", 302, {"location": f"{store.url}{path}"})]
        assert read(hub_source(hub.url, "secret"), manifest, 0, 5) == FILES["model.safetensors"][:5]
        assert [request.authorization for request in store.requests] == [""]
        assert [request.authorization for request in hub.requests] == ["Bearer secret"]
        hub.faults.answers = [Answer("model", 302, {"location": path})]
        assert read(hub_source(hub.url, "secret"), manifest, 0, 5) == FILES["model.safetensors"][:5]
        assert [request.authorization for request in hub.requests[1:]] == ["Bearer secret"] * 2


def test_the_bytes_before_the_range_of_a_whole_answer_are_skipped(hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.ignores_ranges = True
    assert read(hub_source(hub.url), manifest, 10, 200) == FILES["model.safetensors"][10:200]
    hub.faults.answers = [Answer("model", 200, {"transfer-encoding": "chunked"}, body=FILES["model.safetensors"])]
    assert read(hub_source(hub.url), manifest, 10, SIZE) == FILES["model.safetensors"][10:], "its size is not named"


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (Answer("model", 206, {"content-range": f"bytes 0-9/{SIZE}"}), "content_mismatch", "bytes 0 to 9 came"),
        (Answer("model", 206), "content_mismatch", "is malformed"),
        (Answer("model", 200), "content_mismatch", f"has 2 bytes there, and {SIZE} in the manifest"),
        (Answer("model", 416), "content_mismatch", "is shorter there"),
        (Answer("model", 404, {"x-error-code": "EntryNotFound"}), "not_found", "does not exist"),
        (Answer("model", 302, {"location": "file:///etc/passwd"}), "failed", "redirects"),
    ],
)
def test_an_answer_with_another_range_size_or_status_is_refused(hub: Hub, answer: Answer, code: str, text: str):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [replace_body(answer)]
    error = refuse(hub_source(hub.url), manifest)
    assert isinstance(error, SourceRefusal)
    assert (error.code, text in str(error)) == (code, True), str(error)


def replace_body(answer: Answer) -> Answer:
    """Return an answer with the length of its body, unless it has a length already."""
    return Answer(answer.path, answer.status, {"content-length": str(len(answer.body)), **answer.headers})


@pytest.fixture
def authority(tmp_path: Path) -> ClusterCa:
    return ClusterCa(tmp_path / "authority", time.time)


def identify(folder: Path, authority: ClusterCa, node: str) -> ClusterFiles:
    return get_files(make_identity(folder, authority, node))


def serve_as(cluster: ClusterFiles) -> ssl.SSLContext:
    """Return the context of a server with the certificate of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.certificate)
    return context


class Peer:
    """A TLS server that sends bytes to each client and closes the connection."""

    def __init__(self, context: ssl.SSLContext, sent: bytes = b"") -> None:
        self._context, self._sent = context, sent
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                with self.listener.accept()[0] as client, self._context.wrap_socket(client, server_side=True) as line:
                    line.recv(4096)
                    line.sendall(self._sent)
        except OSError:
            pass


def test_a_hub_that_cannot_be_reached_is_a_fault_and_a_mirror_has_ended(hub: Hub, tmp_path: Path, authority: ClusterCa):
    manifest, cluster = hub.add("tests/tiny", FILES), identify(tmp_path, authority, "follower")
    error = refuse(hub_source("http://127.0.0.1:9"), manifest)
    assert isinstance(error, SourceFault)
    assert str(error) == "the connection to http://127.0.0.1:9 failed: Connection refused"
    error = refuse(ModelSource(SourceKind.MIRROR, "https://127.0.0.1:9", "token", "holder"), manifest, cluster)
    assert isinstance(error, SourceRefusal)
    assert (error.code, str(error)) == (ModelOrderCode.SOURCE_LOST, "the mirror at https://127.0.0.1:9 has ended")


def test_a_mirror_with_the_certificate_of_another_node_is_lost(hub: Hub, tmp_path: Path, authority: ClusterCa):
    manifest = hub.add("tests/tiny", FILES)
    follower, holder = (identify(tmp_path, authority, name) for name in ("follower", "holder"))
    peer = Peer(serve_as(follower))
    error = refuse(ModelSource(SourceKind.MIRROR, f"https://{peer.address}", "token", "holder"), manifest, follower)
    assert isinstance(error, SourceRefusal)
    assert (error.code, "does not prove its identity" in str(error)) == (ModelOrderCode.SOURCE_LOST, True)
    peer.listener.close()
    peer = Peer(serve_as(holder))
    error = refuse(ModelSource(SourceKind.MIRROR, f"https://{peer.address}", "token", "holder"), manifest, follower)
    assert isinstance(error, SourceFault), "a mirror that closes its connection may answer the next one"
    peer.listener.close()


def test_a_mirror_that_ends_a_body_after_a_part_of_it_still_downloads_the_file(
    hub: Hub, tmp_path: Path, authority: ClusterCa
):
    manifest = hub.add("tests/tiny", FILES)
    follower, holder = (identify(tmp_path, authority, name) for name in ("follower", "holder"))
    head = f"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 10-19/{SIZE}\r\ncontent-length: 10\r\n\r\n"
    for part, kind in ((b"12345", SourcePending), (b"", SourceFault)):
        peer = Peer(serve_as(holder), head.encode() + part)
        error = refuse(ModelSource(SourceKind.MIRROR, f"https://{peer.address}", "token", "holder"), manifest, follower)
        peer.listener.close()
        assert type(error) is kind, error
        if isinstance(error, SourcePending):
            text = f"https://{peer.address} still downloads model.safetensors of tests/tiny"
            assert (str(error), error.seconds) == (text, RETRY_SECONDS)


def test_an_address_with_an_invalid_character_is_refused(hub: Hub):
    manifest = structs.replace(hub.add("tests/tiny", FILES), repo="tests/ti\ny")
    error = refuse(hub_source(hub.url), manifest)
    assert isinstance(error, SourceRefusal)
    assert (error.code, str(error)) == (ModelOrderCode.INVALID, "the address of the source is invalid")


@pytest.mark.parametrize("final", [True, False])
def test_a_relay_that_the_coordinator_refuses_for_good_is_lost(
    hub: Hub, tmp_path: Path, authority: ClusterCa, final: bool
):
    manifest = hub.add("tests/tiny", FILES)
    peer = Peer(authority.get_server_context(), encode(Denied("no_transfer", "there is no such transfer", final)))
    cluster = structs.replace(identify(tmp_path, authority, "follower"), coordinator=peer.address)
    error = refuse(ModelSource(SourceKind.RELAY, "", "token", "holder"), manifest, cluster)
    peer.listener.close()
    assert isinstance(error, SourceRefusal if final else SourceFault)
    relay = f"relay://{peer.address}"
    if isinstance(error, SourceRefusal):
        assert (error.code, str(error)) == (ModelOrderCode.SOURCE_LOST, f"{relay}: there is no such transfer")
    else:
        assert str(error) == f"the connection to {relay} failed: there is no such transfer"
