"""A hub for tests: `node.hub.serving.server` over repositories in memory, with faults, on a loopback port."""

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from node.hub.serving.server import HubServer, Receive, Scope, Send
from wire.models.files import ModelFile, ModelManifest


@dataclass
class Request:
    """One request that the hub received."""

    method: str
    path: str
    range: str
    authorization: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the requested range; 0 without one."""
        first, _, last = self.range.removeprefix("bytes=").partition("-")
        return int(last) - int(first) + 1 if last else 0


@dataclass
class Answer:
    """Answer that replaces the next `times` answers to paths that contain `path`."""

    path: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    body: bytes = b"{}"


@dataclass
class Faults:
    """Faults of a hub, by names of files."""

    flipped: set[str] = field(default_factory=set)
    """Files with one flipped bit."""
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bodies of a file that end after a third of their bytes."""
    answers: list[Answer] = field(default_factory=list)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Headers of the bodies of a file that are replaced."""
    ignores_ranges: bool = False
    chunk_seconds: float = 0.0
    """Seconds before each chunk of a body."""
    link: str = ""
    """Address of the next page of a tree."""


class MemoryFile:
    """Served file whose content is in memory."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def count_available(self, start: int) -> int:
        return max(0, len(self._content) - start)

    def read(self, start: int, size: int) -> bytes:
        return self._content[start : start + min(size, 64 * 1024)]

    def close(self) -> None:
        pass


@dataclass
class MemoryRepository:
    """Repository at one commit, whose files are in memory."""

    manifest: ModelManifest
    files: Mapping[str, bytes]
    faults: Faults

    def open(self, file: ModelFile) -> MemoryFile:
        content = self.files[file.path]
        if file.path in self.faults.flipped:
            middle = len(content) // 2
            content = content[:middle] + bytes((content[middle] ^ 1,)) + content[middle + 1 :]
        return MemoryFile(content)

    def is_growing(self) -> bool:
        return False


def git_sha1(content: bytes) -> str:
    """Return the SHA-1 of a git blob."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def make_manifest(repo: str, files: Mapping[str, bytes]) -> ModelManifest:
    """Return the manifest of a repository: large files by SHA-256 as in LFS, JSON by git."""
    commit = hashlib.sha1(repr([(name, hashlib.sha1(body).digest()) for name, body in files.items()]).encode())
    return ModelManifest(
        repo,
        commit.hexdigest(),
        tuple(
            ModelFile(
                name,
                len(body),
                "" if name.endswith((".json", ".md", ".py")) else hashlib.sha256(body).hexdigest(),
                git_sha1(body),
            )
            for name, body in files.items()
        ),
    )


class Hub:
    """A hub with repositories. Change `faults` at any time."""

    def __init__(self, token: str = "") -> None:
        self.faults = Faults()
        self.requests: list[Request] = []
        self.sent_bytes = 0
        """Bytes of files that were sent."""
        self.url = ""
        self._repositories: dict[tuple[str, str], MemoryRepository] = {}
        self._server = HubServer(self._find, token=token, wait_seconds=0.2)

    def add(self, repo: str, files: Mapping[str, bytes]) -> ModelManifest:
        """Add a repository, or a new commit of a repository, and return its manifest."""
        manifest = make_manifest(repo, files)
        repository = MemoryRepository(manifest, dict(files), self.faults)
        self._repositories[repo, manifest.commit] = self._repositories[repo, "main"] = repository
        return manifest

    def remove(self, repo: str) -> None:
        """Remove all commits of a repository."""
        for key in [key for key in self._repositories if key[0] == repo]:
            del self._repositories[key]

    def reset(self) -> None:
        """Forget all repositories, faults and requests."""
        self._repositories.clear()
        self.faults, self.sent_bytes = Faults(), 0
        self.requests.clear()

    def count_bytes(self) -> int:
        """Return the bytes of all requested ranges."""
        return sum(request.size for request in self.requests)

    def _find(self, repo: str, revision: str) -> MemoryRepository | None:
        return self._repositories.get((repo, revision))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        own = (headers.get("range", ""), headers.get("authorization", ""))
        self.requests.append(Request(scope["method"], path, *own, headers))
        answer = next((one for one in self.faults.answers if one.times > 0 and one.path in path), None)
        if answer is not None:
            answer.times -= 1
            sent = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
            await send({"type": "http.response.start", "status": answer.status, "headers": sent})
            await send({"type": "http.response.body", "body": answer.body})
            return
        if self.faults.ignores_ranges:
            scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}
        await self._server(scope, receive, _FaultySend(self.faults, path, scope["method"], self._count(path, send)))

    def _count(self, path: str, send: Send) -> Send:
        """Return `send` with a count of the bytes of files."""

        async def count(message: Any) -> None:
            await send(message)
            if "/resolve/" in path:
                self.sent_bytes += len(message.get("body", b""))

        return count


class _FaultySend:
    """Sends the messages of an answer, with the faults of its file."""

    def __init__(self, faults: Faults, path: str, method: str, send: Send) -> None:
        self._faults = faults
        self._path = path
        self._file = path.rpartition("/")[2]
        self._method = method
        self._send = send
        self._left = -1
        self._over = False

    async def __call__(self, message: Any) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            await self._send({**message, "headers": self._change_headers(message["headers"])})
            return
        await asyncio.sleep(self._faults.chunk_seconds)
        body = message.get("body", b"")
        if self._left >= 0:
            body, self._left = body[: self._left], self._left - len(body)
            if self._left <= 0:
                self._over = True
        await self._send({**message, "body": body})

    def _change_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        found = dict(headers)
        if self._method == "GET" and self._faults.cut.get(self._file, 0) > 0:
            self._faults.cut[self._file] -= 1
            self._left = int(found[b"content-length"]) // 3
        if self._faults.link and "/tree/" in self._path:
            found[b"link"] = f'<{self._faults.link}>; rel="next"'.encode()
        found |= {name.encode(): value.encode() for name, value in self._faults.headers.get(self._file, {}).items()}
        return list(found.items())


@contextmanager
def running_hub(token: str = "", port: int = 0) -> Iterator[Hub]:
    """Run a hub on a thread; yield it with its URL."""
    hub = Hub(token)
    with serve_hub(hub, socket.create_server(("127.0.0.1", port))):
        yield hub


@contextmanager
def serve_hub(hub: Hub, listener: socket.socket) -> Iterator[None]:
    """Serve a hub at a listening socket, on a thread. Close the socket and all connections at the end."""
    host, port = listener.getsockname()
    hub.url = f"http://{host}:{port}"
    with listener:
        config = uvicorn.Config(hub, log_config=None, log_level="critical", lifespan="off", http="h11")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
