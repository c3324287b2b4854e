"""A request to the router's ASGI app without a server."""

import asyncio
import json
from typing import Any

from router.http.sse import Message
from tests.support.cluster.loopback_cluster import LoopbackCluster

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
"""Body of a chat with one message."""


class Call:
    """One request to an ASGI app, whose client can leave. `body` is sent as JSON; bytes are sent as they are.

    With `more`, the body continues: see `send_part`.
    """

    def __init__(
        self,
        cluster: LoopbackCluster,
        body: object = b"",
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        headers: dict[str, str] | None = None,
        more: bool = False,
    ) -> None:
        given = {"authorization": f"Bearer {cluster.key}"} | (headers or {})
        self._cluster = cluster
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        self._received = asyncio.Queue[Message]()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_part(data, more=more)
        self.sent: list[Message] = []
        self.begun = asyncio.Event()
        self.reading = asyncio.Event()
        """Set while the client reads. Otherwise a send waits, as with a full buffer of the transport."""
        self.reading.set()

    def send_part(self, data: bytes, *, more: bool = False) -> None:
        """Send a part of the body."""
        self._received.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        """Disconnect the client."""
        self._received.put_nowait({"type": "http.disconnect"})

    async def run(self) -> "Call":
        """Serve the request to its end."""
        await self._cluster.app(self._scope, self._received.get, self._send)
        return self

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.begun.set()
        await self.reading.wait()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]
