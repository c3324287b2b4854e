"""The server of repositories: ranges, tokens, and files that another process still downloads."""

import asyncio
import hashlib
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.download.part_file import PartFile
from node.hub.serving.served_repository import CacheRepository
from node.hub.serving.server import PENDING, READ_BYTES, SEND_BYTES, HubServer
from wire.models.files import ModelFile, ModelManifest

PIECE = 1000
CONTENT = random.Random(3).randbytes(3500)
FILE = ModelFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
SMALL = ModelFile("config.json", 2, "", "9e26dfeeb6e641a33dae4961196235bdb965b21b")
MANIFEST = ModelManifest("a/b", "c" * 40, (FILE, SMALL))
PATH = f"/a/b/resolve/{MANIFEST.commit}/model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    made = RepositoryFolder(tmp_path / "hub", "a/b")
    made.prepare()
    return made


@pytest.fixture
def server(folder: RepositoryFolder) -> HubServer:
    return make_server(folder)


def make_server(folder: RepositoryFolder, token: str = "", wait_seconds: float = 0.1) -> HubServer:
    return HubServer(CacheRepository(folder.hub, MANIFEST).find, token=token, wait_seconds=wait_seconds)


class Answer:
    """Collected answer of an ASGI application."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.body += message.get("body", b"")
        self.complete = not message.get("more_body", False)


def get(server: HubServer, path: str, method: str = "GET", answer: Answer | None = None, **headers: str) -> Answer:
    answer, received = answer or Answer(), [{"type": "http.request"}]

    async def run() -> Answer:
        path_only, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path_only,
            "raw_path": path_only.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        await server(scope, receive, answer.send)
        return answer

    return asyncio.run(run())


def put_blob(folder: RepositoryFolder) -> None:
    folder.get_blob(FILE.etag).write_bytes(CONTENT)


def test_a_file_is_sent_with_its_digests(server: HubServer, folder: RepositoryFolder):
    put_blob(folder)
    answer = get(server, PATH)
    assert (answer.status, answer.body, answer.complete) == (200, CONTENT, True)
    assert answer.headers["etag"] == answer.headers["x-linked-etag"] == f'"{FILE.sha256}"'
    assert answer.headers["x-linked-size"] == answer.headers["content-length"] == "3500"
    assert answer.headers["x-repo-commit"] == MANIFEST.commit
    head = get(server, PATH, "HEAD")
    assert (head.status, head.body, head.headers) == (200, b"", answer.headers)
    assert server.sent_bytes == 3500


@pytest.mark.parametrize(
    ("sent", "status", "start", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=1000-1999", 206, 1000, 2000),
        ("bytes=3000-", 206, 3000, 3500),
        ("bytes=3499-9999999", 206, 3499, 3500),
        ("bytes=-5", 200, 0, 3500),
        ("bytes=0-1,5-6", 200, 0, 3500),
        ("bytes=x", 200, 0, 3500),
    ],
)
def test_ranges(server: HubServer, folder: RepositoryFolder, sent: str, status: int, start: int, end: int):
    put_blob(folder)
    descriptors = psutil.Process().num_fds()
    answer, head = get(server, PATH, range=sent), get(server, PATH, "HEAD", range=sent)
    assert (answer.status, answer.body) == (status, CONTENT[start:end])
    assert (head.status, head.headers, head.body) == (status, answer.headers, b"")
    assert (answer.headers["x-linked-size"], answer.headers["content-length"]) == ("3500", str(end - start))
    assert psutil.Process().num_fds() == descriptors, "the file is closed"
    assert answer.headers.get("content-range") == (f"bytes {start}-{end - 1}/3500" if status == 206 else None)


@pytest.mark.parametrize("sent", ["bytes=3500-", "bytes=5-4", "bytes=999999999999999999-"])
def test_ranges_outside_of_the_file_get_416(server: HubServer, folder: RepositoryFolder, sent: str):
    put_blob(folder)
    answer = get(server, PATH, range=sent)
    assert (answer.status, answer.headers["content-range"]) == (416, "bytes */3500")


@pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer secre", "Bearer secret2", "secret"])
def test_a_request_without_the_token_gets_401(folder: RepositoryFolder, authorization: str):
    put_blob(folder)
    server = make_server(folder, token="secret")
    for path in (PATH, "/api/models/a/b/revision/main", "/x"):
        assert get(server, path, authorization=authorization).status == 401
    assert get(server, PATH, authorization="Bearer secret").body == CONTENT


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/a/b/resolve/main/none.json", 404, "EntryNotFound"),
        ("/a/b/resolve/main/../../../../etc/passwd", 404, "EntryNotFound"),
        ("/a/b/resolve/main/%2e%2e/%2e%2e/refs/main", 404, "EntryNotFound"),
        (f"/a/b/resolve/{'d' * 40}/config.json", 404, "RepoNotFound"),
        ("/a/c/resolve/main/config.json", 404, "RepoNotFound"),
        ("/api/models/a/c/revision/main", 404, "RepoNotFound"),
        ("/", 404, None),
        ("/a/b/resolve/main", 404, None),
    ],
)
def test_unknown_paths_get_404(server: HubServer, path: str, status: int, code: str | None):
    answer = get(server, path)
    assert (answer.status, answer.headers.get("x-error-code")) == (status, code)


def test_other_methods_get_405(server: HubServer):
    assert get(server, PATH, "POST").status == 405


def test_a_missing_file_gets_503_and_names_a_running_download(server: HubServer, folder: RepositoryFolder):
    answer = get(server, PATH)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "x-error-code" not in answer.headers
    with folder.lock():
        assert get(server, PATH).headers["x-error-code"] == PENDING


def test_pieces_are_served_while_the_file_grows(folder: RepositoryFolder):
    part = PartFile(folder, FILE, PIECE)
    part.open()
    server = make_server(folder, wait_seconds=20.0)
    answers = list[Answer]()
    reader = threading.Thread(target=lambda: answers.append(get(server, PATH, range="bytes=500-3499")))
    reader.start()
    for piece in (3, 1, 0, 2):
        start, end = part.get_extent(piece)
        part.write_piece(piece, CONTENT[start:end])
        reader.join(0.1)
    part.finish()
    reader.join(20)
    assert (answers[0].status, answers[0].body, answers[0].complete) == (206, CONTENT[500:], True)


def test_a_body_ends_early_if_the_next_piece_does_not_come(server: HubServer, folder: RepositoryFolder):
    part = PartFile(folder, FILE, PIECE)
    part.open()
    part.write_piece(0, CONTENT[:PIECE])
    answer = get(server, PATH)
    assert (answer.status, answer.body, answer.complete) == (200, CONTENT[:PIECE], False)


def test_a_download_that_begins_again_is_followed(server: HubServer, folder: RepositoryFolder):
    part = PartFile(folder, FILE, PIECE)
    part.open()
    part.write_piece(0, bytes(PIECE))
    repository = CacheRepository(folder.hub, MANIFEST)
    opened = repository.open(FILE)
    assert opened.count_available(0) == PIECE
    part.discard()
    assert opened.count_available(0) == 0
    part.write_piece(0, CONTENT[:PIECE])
    assert opened.read(0, opened.count_available(0)) == CONTENT[:PIECE]
    opened.close()


def test_measure_idle_is_zero_during_a_request(folder: RepositoryFolder):
    server = make_server(folder, wait_seconds=1.0)
    begun = time.monotonic()
    reader = threading.Thread(target=get, args=(server, PATH))
    reader.start()
    reader.join(0.3)
    assert server.measure_idle() == 0.0
    reader.join()
    assert 0 < server.measure_idle() <= time.monotonic() - begun - 1.0, "the request took a second"


def test_an_empty_file_is_sent(tmp_path: Path):
    folder = RepositoryFolder(tmp_path / "hub", "a/b")
    folder.prepare()
    empty = ModelFile("empty.txt", 0, hashlib.sha256(b"").hexdigest())
    manifest = ModelManifest("a/b", "c" * 40, (empty,))
    server = HubServer(CacheRepository(folder.hub, manifest).find, wait_seconds=0.1)
    folder.get_blob(empty.etag).touch()
    answer = get(server, "/a/b/resolve/main/empty.txt")
    assert (answer.status, answer.body, answer.complete) == (200, b"", True)
    assert answer.headers["content-length"] == "0"
    assert get(server, "/a/b/resolve/main/empty.txt", range="bytes=0-").status == 416


@pytest.mark.parametrize("start", [2000, 2500, 2999])
def test_a_range_that_begins_in_a_missing_piece_gets_503(server: HubServer, folder: RepositoryFolder, start: int):
    part = PartFile(folder, FILE, PIECE)
    part.open()
    for piece in (0, 1, 3):
        first, end = part.get_extent(piece)
        part.write_piece(piece, CONTENT[first:end])
    assert get(server, PATH, range=f"bytes={start}-3499").status == 503
    part.close()


def test_a_missing_file_is_named_with_its_state(server: HubServer, folder: RepositoryFolder):
    idle = "model.safetensors is not complete, and no download is in progress here"
    assert get(server, PATH).headers["x-error-message"] == idle
    with folder.lock():
        message = get(server, PATH).headers["x-error-message"]
    assert message == "model.safetensors is still being downloaded here"


def test_a_fault_of_the_disk_gets_500_with_its_name(server: HubServer, folder: RepositoryFolder, tmp_path: Path):
    folder.lock_file.parent.mkdir(parents=True)
    (tmp_path / "outside").touch()
    folder.lock_file.symlink_to(tmp_path / "outside")
    answer = get(server, PATH)
    assert (answer.status, answer.complete) == (500, True)
    assert "symbolic links" in answer.headers["x-error-message"]
    assert answer.body == b'{"error":"%s"}' % answer.headers["x-error-message"].encode()


def test_other_protocols_get_no_answer(server: HubServer):
    answer = Answer()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    for kind in ("lifespan", "websocket"):
        asyncio.run(server({"type": kind}, receive, answer.send))
    assert (answer.status, answer.body) == (0, b"")


def test_a_file_that_becomes_shorter_ends_its_body_early(server: HubServer, folder: RepositoryFolder):
    put_blob(folder)

    class Cutter(Answer):
        """Answer during which another program cuts the file."""

        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.start":
                os.truncate(folder.get_blob(FILE.etag), 1500)
            await super().send(message)

    began = time.monotonic()
    answer = get(server, PATH, answer=Cutter())
    assert time.monotonic() - began < 30, "before the client disconnects"
    assert (answer.status, answer.body, answer.complete) == (200, CONTENT[:1500], False)
    assert server.sent_bytes == 1500
    assert server.measure_idle() > 0


def test_bodies_longer_than_a_block_are_sent_whole(tmp_path: Path):
    folder = RepositoryFolder(tmp_path / "hub", "a/b")
    folder.prepare()
    content = random.Random(4).randbytes(2 * READ_BYTES + SEND_BYTES + 5)
    large = ModelFile("model.safetensors", len(content), hashlib.sha256(content).hexdigest())
    folder.get_blob(large.etag).write_bytes(content)
    server = HubServer(CacheRepository(folder.hub, ModelManifest("a/b", "c" * 40, (large,))).find)
    answer = get(server, PATH, range="bytes=7-")
    assert answer.body == content[7:]
    assert (answer.status, answer.complete, server.sent_bytes) == (206, True, len(content) - 7)


def test_a_body_ends_at_a_disconnect_of_the_client(folder: RepositoryFolder):
    content = bytes(8 * READ_BYTES)
    large = ModelFile("model.safetensors", len(content), hashlib.sha256(content).hexdigest())
    folder.get_blob(large.etag).write_bytes(content)
    server = HubServer(CacheRepository(folder.hub, ModelManifest("a/b", "c" * 40, (large,))).find)
    sent = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.set()
            await asyncio.sleep(0)

    path = "/a/b/resolve/main/model.safetensors"
    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    asyncio.run(asyncio.wait_for(server(scope, receive, send), 20))
    assert 0 < server.sent_bytes <= 2 * READ_BYTES


def test_the_api_describes_repository_and_tree(server: HubServer):
    plain = json.loads(get(server, "/api/models/a/b").body)
    assert (plain["id"], plain["sha"]) == ("a/b", MANIFEST.commit)
    assert plain["siblings"] == [{"rfilename": FILE.path}, {"rfilename": SMALL.path}]
    for value in ("true", "True", "1"):
        path = f"/api/models/a/b/revision/{MANIFEST.commit}?blobs={value}"
        assert json.loads(get(server, path).body)["siblings"] == [
            {
                "rfilename": FILE.path,
                "size": FILE.size,
                "blobId": "0" * 40,
                "lfs": {"sha256": FILE.sha256, "size": FILE.size, "pointerSize": 135},
            },
            {"rfilename": SMALL.path, "size": SMALL.size, "blobId": SMALL.git_sha1},
        ]
    assert json.loads(get(server, "/api/models/a/b/revision/main?blobs=false").body) == plain
    tree = json.loads(get(server, "/api/models/a/b/tree/main").body)
    assert [(one["type"], one["path"], one["size"]) for one in tree] == [
        ("file", file.path, file.size) for file in MANIFEST.files
    ]
    assert (tree[0]["lfs"]["oid"], tree[1]["oid"]) == (FILE.sha256, SMALL.git_sha1)
    whole, head = (get(server, "/api/models/a/b", method) for method in ("GET", "HEAD"))
    assert whole.headers["content-length"] == str(len(whole.body))
    assert (head.status, head.body, head.headers) == (200, b"", whole.headers)
