"""Client of one source of model files: ranges, redirects, tokens, and the error for every refusal."""

import random
import socket
from collections.abc import Iterator
from dataclasses import fields

import httpx2
import psutil
import pytest

from node.hub.child_messages import ClusterFiles
from node.hub.download.source_client import MAX_REDIRECTS, SourceClient, is_allowed_redirect
from node.hub.download.source_errors import SourceError, SourceFault, SourceLimited, SourcePending, SourceRefusal
from node.hub.serving.server import PENDING
from tests.support.hub.downloads import hub_source
from tests.support.hub.hub import Answer, Faults, Hub, running_hub
from tests.support.processes import until
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

WEIGHTS = "model.safetensors"
ODD = "größe 100%25 #1?.txt"
CONTENT = random.Random(7).randbytes(300_000)
TOKEN = "hf_secretsecretsecretsecret"


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("https", "https", True),
        ("http", "https", True),
        ("http", "http", True),
        ("https", "http", False),
        ("http", "file", False),
        ("https", "ftp", False),
    ],
)
def test_is_allowed_redirect_never_leaves_https(source: str, target: str, allowed: bool):
    urls = (httpx2.URL(f"{scheme}://hub.example/x") for scheme in (source, target))
    assert is_allowed_redirect(*urls) == allowed


class Place:
    """A hub with one repository, and a client of that hub with a token."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.manifest: ModelManifest = hub.add("tests/tiny", {WEIGHTS: CONTENT, ODD: b"odd"})
        self.client = SourceClient(hub_source(hub.url, TOKEN), ClusterFiles(), connections=2)
        self.path = f"/tests/tiny/resolve/{self.manifest.commit}/{WEIGHTS}"

    def get_file(self, name: str) -> ModelFile:
        return next(file for file in self.manifest.files if file.path == name)

    def read(self, start: int, end: int, name: str = WEIGHTS) -> bytes:
        with self.client.open_range(self.manifest, self.get_file(name), start, end) as blocks:
            return b"".join(blocks)

    def fail(self, start: int = 0, end: int = 100) -> SourceError:
        with pytest.raises(SourceError) as caught:
            self.read(start, end)
        assert "secret" not in str(caught.value)
        return caught.value

    def refuse(self, start: int = 0, end: int = 100) -> tuple[str, str]:
        """Return code and text of a refusal."""
        error = self.fail(start, end)
        assert isinstance(error, SourceRefusal)
        return error.code, str(error)


@pytest.fixture(scope="module")
def shared() -> Iterator[Place]:
    """Yield one hub and one client for all tests, because a client reads the authorities of the system."""
    with pytest.MonkeyPatch.context() as patch, running_hub() as hub:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        made = Place(hub)
        yield made
        made.client.close()


@pytest.fixture
def place(shared: Place) -> Place:
    faults = shared.hub.faults
    for field in fields(faults):
        setattr(faults, field.name, getattr(Faults(), field.name))
    shared.hub.requests.clear()
    return shared


def test_a_range_is_requested_with_the_token_and_without_compression(place: Place):
    assert place.client.url == place.hub.url
    assert place.read(5, 70_005) == CONTENT[5:70_005]
    (request,) = place.hub.requests
    assert (request.method, request.path, request.range) == ("GET", place.path, "bytes=5-70004")
    assert request.authorization == f"Bearer {TOKEN}"


def test_names_of_files_are_quoted(place: Place):
    assert place.read(0, 3, ODD) == b"odd"


@pytest.mark.parametrize(("start", "end"), [(0, 300_000), (0, 10), (100_000, 100_001), (299_999, 300_000)])
def test_a_range_is_cut_out_of_a_whole_answer(place: Place, start: int, end: int):
    place.hub.faults.ignores_ranges = True
    assert place.read(start, end) == CONTENT[start:end]


def test_a_whole_answer_of_another_size_is_refused(place: Place):
    place.hub.faults.ignores_ranges = True
    place.hub.faults.headers = {WEIGHTS: {"content-length": "299999"}}
    code, text = place.refuse()
    assert code == ModelOrderCode.CONTENT_MISMATCH
    assert text == f"{place.hub.url}: {WEIGHTS} of tests/tiny has 299999 bytes there, and 300000 in the manifest"


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("", "the range '' is malformed"),
        ("bytes 0-99/300001", "the file has 300001 bytes there, and 300000 in the manifest"),
        ("bytes 1-99/300000", "bytes 1 to 99 came instead of 0 to 99"),
    ],
)
def test_an_answer_with_another_range_is_refused(place: Place, sent: str, text: str):
    place.hub.faults.headers = {WEIGHTS: {"content-range": sent}}
    assert place.refuse() == (
        ModelOrderCode.CONTENT_MISMATCH,
        f"{place.hub.url}: {WEIGHTS} of tests/tiny: {text}",
    )


def test_a_range_beyond_a_shorter_file_is_refused_with_its_size(place: Place):
    place.hub.faults.answers = [Answer(WEIGHTS, 416)]
    assert place.refuse() == (
        ModelOrderCode.CONTENT_MISMATCH,
        f"{place.hub.url}: {WEIGHTS} of tests/tiny is shorter there than its 300000 bytes in the manifest",
    )


def test_rate_limits_and_unfinished_downloads_have_their_seconds(place: Place):
    place.hub.faults.answers = [
        Answer(WEIGHTS, 429, {"retry-after": "7"}),
        Answer(WEIGHTS, 503, {"retry-after": "3", "x-error-code": PENDING}),
    ]
    limited, pending = place.fail(), place.fail()
    assert isinstance(limited, SourceLimited)
    assert (limited.seconds, str(limited)) == (7.0, f"{place.hub.url} limits the rate of requests for 7 s")
    assert isinstance(pending, SourcePending)
    assert (pending.seconds, str(pending)) == (3.0, f"{place.hub.url} still downloads {WEIGHTS} of tests/tiny")


@pytest.mark.parametrize(("status", "code"), [(503, ""), (500, PENDING), (502, ""), (204, "")])
def test_other_statuses_are_faults_that_can_pass(place: Place, status: int, code: str):
    place.hub.faults.answers = [Answer(WEIGHTS, status, {"x-error-code": code}, body=b"")]
    error = place.fail()
    assert type(error) is SourceFault
    assert str(error) == f"{place.hub.url} answered {status} for {WEIGHTS} of tests/tiny"


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_a_refusal_says_whether_a_token_was_sent(place: Place, token: str):
    client = SourceClient(hub_source(place.hub.url, token), ClusterFiles(), connections=1)
    place.hub.faults.answers = [Answer(WEIGHTS, 401, {"x-error-code": "GatedRepo"})]
    hint = "accept its terms on its page with the account of the token" if token else "it needs a token"
    with pytest.raises(SourceRefusal) as caught, client.open_range(place.manifest, place.get_file(WEIGHTS), 0, 1):
        pass
    client.close()
    assert caught.value.code == ModelOrderCode.GATED
    assert str(caught.value) == f"{WEIGHTS} of tests/tiny is gated: {hint}"
    assert place.hub.requests[0].authorization == (f"Bearer {token}" if token else "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("times", [1, MAX_REDIRECTS])
def test_redirects_at_the_same_host_keep_range_and_token(place: Place, status: int, times: int):
    place.hub.faults.answers = [Answer(WEIGHTS, status, {"location": place.path}, times=times)]
    assert place.read(10, 20) == CONTENT[10:20]
    assert len(place.hub.requests) == times + 1
    assert {(one.range, one.authorization) for one in place.hub.requests} == {("bytes=10-19", f"Bearer {TOKEN}")}


def test_more_redirects_are_refused_with_their_number(place: Place):
    place.hub.faults.answers = [Answer(WEIGHTS, 302, {"location": place.path}, times=99)]
    assert place.refuse() == (
        ModelOrderCode.FAILED,
        f"{place.hub.url} redirects {WEIGHTS} of tests/tiny more than {MAX_REDIRECTS} times",
    )
    assert len(place.hub.requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize("status", [304, 309])
def test_other_statuses_are_no_redirects(place: Place, status: int):
    place.hub.faults.answers = [Answer(WEIGHTS, status, {"location": place.path}, body=b"")]
    assert type(place.fail()) is SourceFault
    assert len(place.hub.requests) == 1


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("", "to http://127.0.0.1, which is not allowed"),
        ("file:///etc/passwd", "to file://, which is not allowed"),
        ("ftp://hub.example/x?token=secret", "to ftp://hub.example, which is not allowed"),
        ("http://[::1", "to an invalid address"),
    ],
)
def test_redirects_that_are_not_followed_are_named_without_their_query(place: Place, location: str, text: str):
    place.hub.faults.answers = [Answer(WEIGHTS, 302, {"location": location})]
    assert place.refuse() == (ModelOrderCode.FAILED, f"{place.hub.url} redirects {WEIGHTS} of tests/tiny {text}")
    assert len(place.hub.requests) == 1


def test_another_port_of_the_same_host_gets_no_token(place: Place):
    with running_hub() as store:
        store.add("tests/tiny", {WEIGHTS: CONTENT, ODD: b"odd"})
        place.hub.faults.answers = [Answer(WEIGHTS, 302, {"location": store.url + place.path}, times=9)]
        assert place.read(10, 20) == CONTENT[10:20]
        store.faults.answers = [Answer(WEIGHTS, 403)]
        error = place.fail()
        assert [one.authorization for one in store.requests] == ["", ""]
    assert type(error) is SourceFault, "the signature of an address can expire"


def test_a_connection_that_is_refused_or_broken_is_a_fault_without_its_text(place: Place):
    place.hub.faults.cut = {WEIGHTS: 1}
    with (
        pytest.raises(SourceFault) as broken,
        place.client.open_range(place.manifest, place.get_file(WEIGHTS), 0, 300_000) as blocks,
    ):
        for _ in blocks:
            pass
    assert str(broken.value).startswith(f"the connection to {place.hub.url} failed: ")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    client = SourceClient(hub_source(url), ClusterFiles(), connections=1)
    with pytest.raises(SourceFault) as caught, client.open_range(place.manifest, place.get_file(WEIGHTS), 0, 1):
        pass
    assert str(caught.value) == f"the connection to {url} failed: Connection refused"
    client.close()


def test_a_body_that_is_not_read_to_its_end_releases_its_connection(place: Place):
    port = int(place.hub.url.rpartition(":")[2])
    place.hub.faults.chunk_seconds = 0.1

    def count_connections() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port == port and one.status == "ESTABLISHED" for one in found)

    client = SourceClient(hub_source(place.hub.url), ClusterFiles(), connections=1)
    before = count_connections()
    with client.open_range(place.manifest, place.get_file(WEIGHTS), 0, 300_000) as blocks:
        next(blocks)
        assert count_connections() == before + 1
    until(lambda: count_connections() == before, what="the end of the connection")
    place.hub.faults.chunk_seconds = 0.0
    for _ in range(2):
        with client.open_range(place.manifest, place.get_file(WEIGHTS), 0, 10) as blocks:
            assert b"".join(blocks) == CONTENT[:10]
    assert count_connections() == before + 1, "the connection is used again"
    client.close()
    until(lambda: count_connections() == before, what="the end of the kept connection")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hub.example/", "https://hub.example"),
        ("https://hub.example:8443/mirror/", "https://hub.example:8443"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_the_address_for_people_is_scheme_host_and_port(url: str, shown: str):
    client = SourceClient(hub_source(url, TOKEN), ClusterFiles(), connections=1)
    assert client.url == shown
    client.close()


@pytest.mark.parametrize(
    ("kind", "url", "text"),
    [
        (SourceKind.HUB, "ftp://hub.example", "its address must begin with https or http"),
        (SourceKind.HUB, "hub.example", "its address must begin with https or http"),
        (SourceKind.HUB, "https://", "its address must begin with https or http"),
        (SourceKind.MIRROR, "http://10.0.0.2:1", "its address must begin with https"),
        (SourceKind.HUB, "http://[::1", "its address is invalid"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(kind: SourceKind, url: str, text: str):
    with pytest.raises(ValueError, match=f"^{text}$"):
        SourceClient(ModelSource(kind, url, TOKEN, "n1"), ClusterFiles(), connections=1)
