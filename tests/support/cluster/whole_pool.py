"""The complete application, served over loopback nodes on a loop of its own, for tests with plain sockets."""

import asyncio
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator import api
from router.dialects.openapi import build_openapi_paths
from router.settings import RouterSettings
from tests.support.cluster.application import Application, application
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode
from wire.frames import Delta, Deltas, Generate

OPERATIONS = sorted(
    [f"{method.upper()} {path}" for path, item in build_openapi_paths().items() for method in item]
    + [
        " ".join(row)
        for file in Path(api.__file__).parent.rglob("*.py")
        for row in re.findall(r'Route\("([A-Z]+)", "(/\S*)", ', file.read_text())
    ]
)
"""Every operation of the API, read from its source. `test_every_operation_is_tried` compares them with the document."""


@dataclass
class Served:
    """A complete application at a URL, its OpenAPI document, and keys by scope."""

    url: str
    document: dict[str, Any]
    keys: dict[str, str]
    cluster: LoopbackCluster
    built: Application
    call: Callable[[Callable[[], object]], object]
    folder: Path
    """State folder, with the log."""

    @property
    def address(self) -> tuple[str, int]:
        where = urlsplit(self.url)
        assert where.hostname
        assert where.port
        return where.hostname, where.port

    def about(self, operation: str) -> dict[str, Any]:
        method, path = operation.split(" ")
        return self.document["paths"][path][method.lower()]

    def ask(self, raw: bytes, seconds: float = 20.0) -> list[bytes]:
        """Send only these bytes; return every answer until the server closes or has answered once."""
        with socket.create_connection(self.address, timeout=seconds) as dialed:
            with suppress(OSError):
                dialed.sendall(raw)
            return answers(dialed)


def answers(dialed: socket.socket) -> list[bytes]:
    """Read until the server closes or one complete answer has arrived."""
    got = b""
    with suppress(ConnectionError):
        while not whole(got) and (data := dialed.recv(65536)):
            got += data
    return [b"HTTP/1.1 " + one for one in got.split(b"HTTP/1.1 ")[1:]]


def whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    if length.isdigit():
        return bool(end) and len(body) >= int(length)
    return bool(end) and answer.endswith(b"0\r\n\r\n")


def word(asked: Generate) -> Deltas:
    """Make the first word of an answer."""
    return Deltas((Delta(asked.request, 0, (1,), ((0, "a"),)),))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@contextmanager
def served(*nodes: LoopbackNode, front: bool = True, **settings: object) -> Iterator[Served]:
    """Serve for the time of the block. `front`: by the product's own protocol class."""
    begun, made, stop = threading.Event(), list[Served](), list[Callable[[], object]]()
    before, LoopbackCluster.front = LoopbackCluster.front, front
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:

        async def serve() -> None:
            cluster = LoopbackCluster(*(nodes or (LoopbackNode("a"),)), settings=RouterSettings(**settings))  # pyright: ignore
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            async with application(Path(folder), over=cluster) as built:
                keys = {
                    scope: built.admin.create_key(scope, [scope], None)["key"]
                    for scope in ("infer", "metrics", "admin")
                }
                async with cluster.serving() as url:

                    def call(what: Callable[[], object]) -> object:
                        async def done() -> object:
                            return what()

                        return asyncio.run_coroutine_threadsafe(done(), loop).result(20)

                    made.append(Served(url, built.document(), keys, cluster, built, call, Path(folder)))
                    stop.append(lambda: loop.call_soon_threadsafe(ended.set))
                    begun.set()
                    await ended.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            assert begun.wait(30), "it does not begin"
            yield made[0]
        finally:
            LoopbackCluster.front = before
            for one in stop:
                one()
            thread.join(30)
    made[0].cluster.dispatcher.ledger.check()
    assert made[0].cluster.dispatcher.ledger.empty
    assert made[0].cluster.dispatcher.idle
