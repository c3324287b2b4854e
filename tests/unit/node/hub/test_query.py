"""Queries of the hub in this process: the manifest, retries, and the ranges of large files."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from node.hub.query import FIRST_HEADER_BYTES, answer_query
from tests.models import EMBEDDED
from tests.support.hub.hub import Answer, Hub, running_hub
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelManifest
from wire.models.hub_query import HubAnswer, HubQuery, HubRefusal

REPO = "tests/tiny"
WEIGHTS = "model.safetensors"
FILES = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file() and path.suffix != ".md"}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach loopback addresses directly, also where the environment has a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        made.add(REPO, FILES)
        yield made


def make_query(hub: Hub, **fields: Any) -> HubQuery:
    return replace(HubQuery(endpoint=hub.url, repo=REPO), **fields)


def ask(hub: Hub, **fields: Any) -> HubAnswer:
    answer = answer_query(make_query(hub, **fields))
    assert isinstance(answer, HubAnswer), answer
    return answer


def refuse(hub: Hub, **fields: Any) -> HubRefusal:
    answer = answer_query(make_query(hub, **fields))
    assert isinstance(answer, HubRefusal)
    return answer


def list_sizes(hub: Hub, name: str) -> list[int]:
    """Return the sizes of the requested ranges of a file."""
    return [request.size for request in hub.requests if request.path.endswith(f"/{name}")]


def make_weights(header_bytes: int) -> bytes:
    """Return weights with one tensor, whose header has this size."""
    tensor = {"w": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}}
    header = json.dumps(tensor).encode().ljust(header_bytes)
    return len(header).to_bytes(8, "little") + header + bytes(16)


def test_the_manifest_has_commit_revision_and_digests(hub: Hub):
    expected: ModelManifest = hub.add(REPO, {**FILES, "README.md": b"# Tiny"})
    answer = ask(hub, revision=expected.commit, token="secret")
    manifest = answer.manifest
    assert (manifest.repo, manifest.commit, manifest.revision) == (REPO, expected.commit, expected.commit)
    assert {(file.path, file.size, file.sha256, file.etag) for file in manifest.files} == {
        (file.path, file.size, file.sha256, file.etag) for file in expected.files if file.path != "README.md"
    }
    assert [(file.path, file.size) for file in answer.skipped] == [("README.md", 6)]
    assert {request.authorization for request in hub.requests} == {"Bearer secret"}


@pytest.mark.parametrize("revision", ["", "main"])
def test_a_query_without_revision_and_token_asks_for_the_default_without_the_token_of_a_user(
    hub: Hub, revision: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_owner_of_this_machine")
    assert ask(hub, revision=revision).manifest.revision == revision
    assert {request.authorization for request in hub.requests} == {""}


@pytest.mark.parametrize(
    ("header", "sizes"),
    [
        (200, [224]),
        (FIRST_HEADER_BYTES - 24, [FIRST_HEADER_BYTES]),
        (FIRST_HEADER_BYTES - 8, [FIRST_HEADER_BYTES]),
        (FIRST_HEADER_BYTES, [FIRST_HEADER_BYTES, FIRST_HEADER_BYTES + 8]),
        (3 * FIRST_HEADER_BYTES, [FIRST_HEADER_BYTES, 3 * FIRST_HEADER_BYTES + 8]),
    ],
)
def test_only_the_header_of_weights_is_read_in_one_or_two_requests(hub: Hub, header: int, sizes: list[int]):
    hub.add(REPO, {**FILES, WEIGHTS: make_weights(header)})
    assert "header" not in ask(hub).model.cause
    assert list_sizes(hub, WEIGHTS) == sizes


@pytest.mark.parametrize("length", [1 << 20, 1 << 62])
def test_a_header_that_cannot_be_whole_is_not_requested(hub: Hub, length: int):
    hub.add(REPO, {**FILES, WEIGHTS: length.to_bytes(8, "little") + bytes(2 * FIRST_HEADER_BYTES)})
    assert ask(hub).model.cause != ""
    assert list_sizes(hub, WEIGHTS) == [FIRST_HEADER_BYTES]


def test_an_empty_file_is_not_requested(hub: Hub):
    hub.add(REPO, {**FILES, "tokenizer_config.json": b"", WEIGHTS: b""})
    assert ask(hub).model.cause != ""
    assert list_sizes(hub, "tokenizer_config.json") == list_sizes(hub, WEIGHTS) == []


def test_files_that_decide_nothing_are_not_read(hub: Hub):
    ask(hub)
    read = {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}
    assert {"config.json", "tokenizer_config.json", WEIGHTS} <= read
    assert "tokenizer.json" not in read


@pytest.mark.parametrize("place", ["/api/", "resolve"])
@pytest.mark.parametrize("status", [500, 503])
def test_faults_that_can_pass_are_retried(hub: Hub, place: str, status: int):
    hub.faults.answers = [Answer(place, status, times=2)]
    began = time.monotonic()
    assert ask(hub).model.cause == ""
    assert time.monotonic() - began >= 0.25, "the hub is given time"


def test_a_body_that_ends_early_is_read_again(hub: Hub):
    hub.faults.cut = {"config.json": 2, WEIGHTS: 1}
    assert ask(hub).model.cause == ""


def test_a_hub_that_stays_away_is_named_after_the_last_try(hub: Hub):
    hub.faults.answers = [Answer("/api/", 500, times=99)]
    refusal = refuse(hub, timeout_seconds=60.0)
    assert (refusal.code, refusal.retry_after) == (ModelOrderCode.SOURCE_LOST, 0.0)
    assert refusal.message == f"the hub cannot be reached for {REPO}: the hub answered 500"
    assert len(hub.requests) == 5


def test_a_hub_that_cannot_be_reached_is_named_with_the_error_of_the_system(hub: Hub):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    refusal = refuse(hub, endpoint=endpoint, timeout_seconds=3.0)
    assert refusal.message == f"the hub cannot be reached for {REPO}: Connection refused"


def test_no_wait_extends_beyond_the_time_of_the_query(hub: Hub):
    hub.faults.answers = [Answer("/api/", 500, times=99)]
    began = time.monotonic()
    refusal = refuse(hub, revision="v9", timeout_seconds=3.0)
    assert time.monotonic() - began < 3.0
    assert len(hub.requests) <= 4
    assert refusal.message == f"the hub cannot be reached for {REPO} at revision v9: the hub answered 500"


def test_a_revision_that_the_repository_does_not_have_is_refused(hub: Hub):
    refusal = refuse(hub, revision="e" * 40)
    assert refusal.code == ModelOrderCode.NOT_FOUND
    assert f"{REPO} at revision {'e' * 40} does not exist" in refusal.message


def test_a_refusal_of_a_file_is_not_retried(hub: Hub):
    hub.faults.answers = [Answer("/config.json", 403, {"x-error-code": "GatedRepo"}, times=9)]
    refusal = refuse(hub)
    assert (refusal.code, refusal.message) == (
        ModelOrderCode.GATED,
        f"config.json of {REPO} is gated: it needs a token",
    )
    assert len(list_sizes(hub, "config.json")) == 1


def test_a_config_above_the_limit_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.hub.query.MAX_SMALL_FILE_BYTES", len(FILES["config.json"]))
    assert ask(hub).model.cause == ""
    hub.add(REPO, {**FILES, "config.json": FILES["config.json"] + b" "})
    hub.requests.clear()
    assert ask(hub).model.cause == "its config.json is too large to be read"
    assert list_sizes(hub, "config.json") == []


@pytest.mark.parametrize(("place", "limit"), [("/api/", '"api";r=0;t=250'), ("resolve", '"resolvers";r=0;t=250')])
def test_a_rate_limit_beyond_the_time_of_the_query_is_passed_on(hub: Hub, place: str, limit: str):
    hub.faults.answers = [Answer(place, 429, {"ratelimit": limit}, times=99)]
    refusal = refuse(hub)
    assert (refusal.code, refusal.retry_after) == (ModelOrderCode.RATE_LIMITED, 250.0)
    assert refusal.message.endswith(" for 250 s: try again after that time, or set a token")


def test_a_short_rate_limit_is_waited_for(hub: Hub):
    hub.faults.answers = [Answer("/api/", 429, {"retry-after": "1"}), Answer("resolve", 429, {"retry-after": "1"})]
    began = time.monotonic()
    assert ask(hub).model.cause == ""
    assert 2.0 <= time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("status", "code", "token", "wanted", "text"),
    [
        (404, "RevisionNotFound", "", ModelOrderCode.NOT_FOUND, "tests/tiny at revision v9 does not exist: check its"),
        (
            401,
            "RepoNotFound",
            "",
            ModelOrderCode.NOT_FOUND,
            "tests/tiny at revision v9 does not exist, or it is private",
        ),
        (404, "RepoNotFound", "x", ModelOrderCode.NOT_FOUND, "tests/tiny at revision v9 does not exist, or the token"),
        (403, "GatedRepo", "x", ModelOrderCode.GATED, "tests/tiny at revision v9 is gated: accept its terms"),
    ],
)
def test_refusals_of_the_hub_are_not_retried(
    hub: Hub, status: int, code: str, token: str, wanted: ModelOrderCode, text: str
):
    hub.faults.answers = [Answer("/api/", status, {"x-error-code": code}, times=9)]
    refusal = refuse(hub, revision="v9", token=token)
    assert refusal.code == wanted
    assert refusal.message.startswith(text)
    assert len(hub.requests) == 1


@pytest.mark.parametrize("repo", ["no-publisher", "a/../b", "", "a/b/c"])
def test_names_that_are_none_are_refused_without_a_request(hub: Hub, repo: str):
    refusal = refuse(hub, repo=repo)
    assert (refusal.code, "use publisher/name" in refusal.message) == (ModelOrderCode.INVALID, True)
    assert hub.requests == []


def test_a_hub_that_does_not_answer_in_time_is_named_with_the_time(hub: Hub):
    hub.faults.chunk_seconds = 3.0
    began = time.monotonic()
    refusal = refuse(hub, timeout_seconds=1.0)
    assert time.monotonic() - began < 2.5
    assert (refusal.code, refusal.message) == (
        ModelOrderCode.SOURCE_LOST,
        f"{REPO}: the hub did not answer within 1 s: try again",
    )


def test_a_repository_with_names_that_leave_its_folder_is_refused(hub: Hub):
    hub.add(REPO, {**FILES, "model..\\x.safetensors": b"x"})
    refusal = refuse(hub)
    assert refusal.code == ModelOrderCode.INVALID
    assert {"/resolve/" in request.path for request in hub.requests} == {False}
