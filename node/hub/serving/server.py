"""Serve repositories by the protocol of the Hugging Face hub, as an ASGI application.

`snapshot_download` of `huggingface_hub` works with this server as with the hub. The server is the mirror of a node, and
the hub of the tests. If a file is still being downloaded, a response waits for the requested range. After
`wait_seconds`, the response is 503 with `Retry-After`, or its body ends early, and the client continues at the next
byte.

Rules
- If the server has a token, a request without the token gets only a 401.
- The server serves only repositories that `find` returns, and files of their manifests. Paths of requests are never
  used as paths of the file system.
"""

import asyncio
import contextlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec

from node.hub.serving.served_repository import ServedFile, ServedRepository
from wire.models.files import ModelFile

READ_BYTES = 2 * 1024 * 1024
"""Maximum bytes that a thread reads in one call, while the previous bytes are sent. A switch of threads takes 0.2 ms.
"""
SEND_BYTES = 1024 * 1024
"""Maximum bytes that are encrypted at once. Between two such parts, the loop serves other connections."""
READ_THREADS = 4
POLL_SECONDS = 0.05
"""Seconds between two checks for bytes of a file that is still being downloaded."""
WAIT_SECONDS = 5.0
"""Maximum seconds for which a response waits for a missing range; less than `MIRROR_TIMEOUT_SECONDS` of the client."""
RETRY_SECONDS = 1
"""Value of `Retry-After` for a range that cannot be sent yet."""
PENDING = "Pending"
"""Value of `X-Error-Code` for a range that is still being downloaded."""
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Find = Callable[[str, str], ServedRepository | None]
T = TypeVar("T")
_Headers = Mapping[str, str]


class _Refused(Exception):
    """Raised to answer a request with an HTTP status, headers and a JSON body."""

    def __init__(self, status: HTTPStatus, message: str, code: str = "", headers: _Headers | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {**(headers or {}), **({"x-error-code": code} if code else {}), "x-error-message": message}


@dataclass(frozen=True, slots=True)
class _Span:
    """Requested bytes of a file, `start` to `end` without `end`; `partial` is whether a range was requested."""

    start: int
    end: int
    partial: bool


class HubServer:
    """ASGI application that serves repositories.

    `find(repo, revision)` returns a served repository, or None, and is called in a thread. With a `token`, only
    requests with this bearer token are answered. `wait_seconds` is the maximum wait for bytes that are still being
    downloaded.
    """

    def __init__(self, find: Find, *, token: str = "", wait_seconds: float = WAIT_SECONDS) -> None:
        self._find = find
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._wait_seconds = wait_seconds
        self._threads = ThreadPoolExecutor(READ_THREADS, "hub-read")
        self._active = 0
        self._used_at = time.monotonic()
        self.sent_bytes = 0
        """Bytes of files that were sent."""

    def measure_idle(self) -> float:
        """Return the seconds since the end of the last authorized request, or since the start; 0 during a request."""
        return 0.0 if self._active else time.monotonic() - self._used_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; without the token with 401, after an `OSError` with 500. Ignore other protocols."""
        if scope["type"] != "http":
            return
        if not self._is_authorized(scope):
            await _send_error(send, _Refused(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong"))
            return
        self._active += 1
        try:
            await self._route(scope, receive, send)
        except _Refused as refused:
            await _send_error(send, refused)
        except OSError as error:
            await _send_error(send, _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, error.strerror or "read failed"))
        finally:
            self._active -= 1
            self._used_at = time.monotonic()

    def _is_authorized(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return not self._authorization or hmac.compare_digest(sent, self._authorization)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served")
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        parts = [unquote(part) for part in raw.decode("ascii", "replace").split("?")[0].strip("/").split("/")]
        match parts:
            case ["api", "models", publisher, name]:
                repository = await self._get_repository(f"{publisher}/{name}", "main")
                await _send_json(send, scope, describe_repository(repository, blobs=_needs_blobs(scope)))
            case ["api", "models", publisher, name, "revision", revision]:
                repository = await self._get_repository(f"{publisher}/{name}", revision)
                await _send_json(send, scope, describe_repository(repository, blobs=_needs_blobs(scope)))
            case ["api", "models", publisher, name, "tree", revision]:
                repository = await self._get_repository(f"{publisher}/{name}", revision)
                await _send_json(send, scope, list_tree(repository))
            case [publisher, name, "resolve", revision, *path] if path:
                repository = await self._get_repository(f"{publisher}/{name}", revision)
                await self._send_file(repository, "/".join(path), scope, receive, send)
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    async def _get_repository(self, repo: str, revision: str) -> ServedRepository:
        repository = await self._run(lambda: self._find(repo, revision))
        if repository is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"{repo} is not served at revision {revision}", "RepoNotFound")
        return repository

    async def _send_file(
        self, repository: ServedRepository, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        file = next((file for file in repository.manifest.files if file.path == path), None)
        if file is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"{path} does not exist in the repository", "EntryNotFound")
        span = _parse_range(scope, file.size)
        start = {
            "type": "http.response.start",
            "status": HTTPStatus.PARTIAL_CONTENT if span.partial else HTTPStatus.OK,
            "headers": _encode_headers(_build_file_headers(file, repository.manifest.commit, span)),
        }
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        opened = await self._run(lambda: repository.open(file))
        try:
            if span.start < span.end and not await self._wait_available(opened, span.start):
                raise self._refuse_pending(path, growing=await self._run(repository.is_growing))
            await send(start)
            await self._send_span(opened, span, receive, send)
        finally:
            await self._run(opened.close)

    def _refuse_pending(self, path: str, *, growing: bool) -> _Refused:
        code = PENDING if growing else ""
        state = "is still being downloaded" if growing else "is not complete, and no download is in progress"
        return _Refused(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{path} {state} here", code, {"retry-after": str(RETRY_SECONDS)}
        )

    async def _send_span(self, opened: ServedFile, span: _Span, receive: Receive, send: Send) -> None:
        """Send the bytes of a span. Return early, which closes the connection, if they cannot be read in time."""
        disconnected = asyncio.create_task(_wait_disconnect(receive))
        at, reading = span.start, self._start_read(opened, span.start, span.end)
        try:
            with contextlib.suppress(OSError):
                while at < span.end and not disconnected.done():
                    block = await reading
                    if not block and not await self._wait_available(opened, at):
                        return
                    at += len(block)
                    reading = self._start_read(opened, at, span.end)
                    await self._send_block(block, send)
                if at == span.end:
                    await send({"type": "http.response.body", "body": b""})
        finally:
            disconnected.cancel()
            await asyncio.gather(disconnected, reading, return_exceptions=True)

    async def _send_block(self, block: bytes, send: Send) -> None:
        for start in range(0, len(block), SEND_BYTES):
            part = block[start : start + SEND_BYTES]
            self.sent_bytes += len(part)
            await send({"type": "http.response.body", "body": part, "more_body": True})

    def _start_read(self, opened: ServedFile, start: int, end: int) -> asyncio.Future[bytes]:
        """Read in a thread at most `READ_BYTES` of `start` to `end`; none if none are available yet.

        The future raises `OSError` if the read fails.
        """

        def read() -> bytes:
            size = min(opened.count_available(start), READ_BYTES, end - start)
            if size <= 0:
                return b""
            data = opened.read(start, size)
            if not data:
                raise OSError(f"the file ends at byte {start}")
            return data

        return asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def _wait_available(self, opened: ServedFile, start: int) -> int:
        """Return the number of bytes that can be read from `start`; 0 if there are none after `wait_seconds`."""
        deadline = time.monotonic() + self._wait_seconds
        while not (available := await self._run(lambda: opened.count_available(start))):
            if time.monotonic() >= deadline:
                return 0
            await asyncio.sleep(POLL_SECONDS)
        return available

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def describe_repository(repository: ServedRepository, *, blobs: bool = False) -> dict[str, Any]:
    """Return the JSON document of the hub that describes a repository.

    `blobs` is whether the document has size and digest of each file.
    """
    manifest = repository.manifest
    return {
        "id": manifest.repo,
        "modelId": manifest.repo,
        "sha": manifest.commit,
        "private": False,
        "gated": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": [
            {"rfilename": file.path, **(_describe_digests(file, "blobId", "sha256") if blobs else {})}
            for file in manifest.files
        ],
    }


def list_tree(repository: ServedRepository) -> list[dict[str, Any]]:
    """Return the JSON document of the hub that lists all files of a repository with their sizes and digests."""
    return [
        {"type": "file", "path": file.path, **_describe_digests(file, "oid", "oid")}
        for file in repository.manifest.files
    ]


def _describe_digests(file: ModelFile, git: str, sha256: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"size": file.size, git: file.git_sha1 or "0" * 40}
    if file.sha256:
        facts["lfs"] = {sha256: file.sha256, "size": file.size, "pointerSize": 135}
    return facts


def _needs_blobs(scope: Scope) -> bool:
    query = parse_qs(bytes(scope.get("query_string", b"")).decode("ascii", "replace"))
    return query.get("blobs", [""])[0].lower() in ("true", "1")


def _parse_range(scope: Scope, size: int) -> _Span:
    """Return the requested bytes of a file. Any form but `bytes=A-B` and `bytes=A-` is ignored, as RFC 9110 allows."""
    sent = next((value for name, value in scope["headers"] if name == b"range"), b"").decode("ascii", "replace")
    match = _RANGE.fullmatch(sent)
    if match is None:
        return _Span(0, size, partial=False)
    start, last = int(match[1]), int(match[2]) if match[2] else size - 1
    if start >= size or last < start:
        raise _Refused(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"the file has {size} bytes",
            headers={"content-range": f"bytes */{size}"},
        )
    return _Span(start, min(last + 1, size), partial=True)


def _build_file_headers(file: ModelFile, commit: str, span: _Span) -> dict[str, str]:
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(span.end - span.start),
        "accept-ranges": "bytes",
        "etag": f'"{file.etag}"',
        "x-repo-commit": commit,
        "x-linked-size": str(file.size),
    }
    if file.sha256:
        headers["x-linked-etag"] = f'"{file.sha256}"'
    if span.partial:
        headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{file.size}"
    return headers


def _encode_headers(headers: _Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("ascii", "replace")) for name, value in headers.items()]


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, scope: Scope, content: object) -> None:
    body = msgspec.json.encode(content)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": 200, "headers": _encode_headers(headers)})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _send_error(send: Send, refused: _Refused) -> None:
    body = msgspec.json.encode({"error": str(refused)})
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    await send({"type": "http.response.start", "status": refused.status, "headers": _encode_headers(headers)})
    await send({"type": "http.response.body", "body": body})
