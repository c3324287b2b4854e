"""The pool on isolated hosts: a coordinator on the first host, nodes on two further ones, clients on the last one."""

import json
import ssl
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.hosts import Hosts, unsupported
from tests.support.processes import Pool, Process, pool, until

WINDOW = 10.0
"""Seconds of silence after which a node is lost."""
WORK = 3.0
"""Additional seconds on a loaded machine."""
CLIENT: dict[str, Any] = {"trust_env": False, "timeout": 60, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
"""Settings of HTTP clients. They use no TLS; one context for all saves reading the authorities of this machine each
time."""


@dataclass
class Chat:
    """One streamed chat as its client saw it: the node, the words, the end, the seconds of `monotonic`."""

    status: int = 0
    node: str = ""
    words: int = 0
    end: str = ""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0


class Lab:
    """The coordinator is on the first host, nodes are on the second and third, clients on the fourth."""

    def __init__(self, hosts: Hosts, made: Pool, stack: ExitStack) -> None:
        self.hosts = hosts
        self.pool = made
        self._stack = stack
        self.newest: Process | None = None
        self._client = stack.enter_context(hosts[4].threads(40))
        local = stack.enter_context(hosts[1].threads(2))
        made.call = lambda ask: local.submit(ask).result()

    def up(self, *settings: str) -> None:
        self.pool.up(
            "http.tls=off",
            *settings,
            listen="0.0.0.0:8080",
            cluster_listen="0.0.0.0:8081",
            bonjour=True,
            wrap=self.hosts[1].enter(),
        )

    def move(self, number: int) -> None:
        """Send all requests to the coordinator from this host, and use the state folder of this host."""
        local = self._stack.enter_context(self.hosts[number].threads(2))
        self.pool.home = "coordinator" if number == 1 else f"coordinator-{number}"
        self.pool.wrap = self.hosts[number].enter()
        self.pool.call = lambda ask: local.submit(ask).result()

    def up_on(self, number: int, *settings: str) -> None:
        self.pool.up(
            "http.tls=off",
            *settings,
            listen="0.0.0.0:8080",
            cluster_listen="0.0.0.0:8081",
            bonjour=True,
            wrap=self.hosts[number].enter(),
        )
        self.newest = self.pool.coordinator

    def join(self, name: str, number: int, *settings: str, **how: Any) -> Process:
        options: dict[str, Any] = {"url": False, **how}
        return self.pool.join(name, *settings, wrap=self.hosts[number].enter(), **options)

    def join_all(self, *settings: str) -> None:
        """Start studio and macbook at once, by Bonjour with tokens."""
        for name, number in (("studio", 2), ("macbook", 3)):
            self.join(name, number, *settings, wait=False)
        self.both_serve()

    def both_serve(self, seconds: float = 30.0) -> None:
        until(lambda: self.pool.serves("studio") and self.pool.serves("macbook"), seconds, "both nodes serve")

    def state(self, name: str) -> str:
        return self.pool.node(name)["state"]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the coordinator's log lines of one event."""
        lines = (self.pool.state / "logs" / "coordinator.log").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def on_client(self, ask: Any) -> Future[Any]:
        """Run a function in the client's network."""
        return self._client.submit(ask)

    def chat(self, prompt: int = 5, tokens: int = 10) -> Future[Chat]:
        return self._client.submit(self._chat, prompt, tokens)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send one request from the host of the calling thread."""
        headers = {"Authorization": f"Bearer {self.pool.key}"}
        return httpx.request(method, self.pool.base + path, headers=headers, **CLIENT, **more)

    def _chat(self, prompt: int, tokens: int) -> Chat:
        chat = Chat()
        body = {
            "model": "scripted-1",
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": "word " * prompt}],
        }
        headers = {"Authorization": f"Bearer {self.pool.key}"}
        with (
            httpx.Client(**CLIENT) as client,
            client.stream("POST", f"{self.pool.base}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            chat.status, chat.node = answer.status_code, answer.headers.get("x-macpool-node", "")
            for line in answer.iter_lines():
                chat.words += '"content":"' in line and '"content":""' not in line
                chat.end = line or chat.end
        chat.ended = time.monotonic()
        return chat


@contextmanager
def opened_hosts() -> Iterator[tuple[Path, Hosts, Pool, ExitStack]]:
    """Yield a folder, four hosts, an empty pool, and the stack that ends them.

    Skip the test with the reason where hosts cannot be made.
    """
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mp-") as name, ExitStack() as stack:
        folder = Path(name)
        hosts = stack.enter_context(Hosts(folder, 4))
        yield folder, hosts, stack.enter_context(pool(folder)), stack


@contextmanager
def opened_lab() -> Iterator[Lab]:
    """Yield a lab of four hosts; skip the test as `opened_hosts` does."""
    with opened_hosts() as (_, hosts, made, stack):
        yield Lab(hosts, made, stack)
