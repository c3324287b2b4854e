"""The router without a control app: connections that are no HTTP requests."""

import asyncio

from router.http.sse import Message
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode


async def test_websocket_is_closed_before_it_is_accepted():
    events = asyncio.Queue[Message]()
    events.put_nowait({"type": "websocket.connect"})
    sent: list[Message] = []

    async def send(event: Message) -> None:
        sent.append(event)

    cluster = LoopbackCluster(LoopbackNode("studio"))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await cluster.app(scope, events.get, send)
    assert sent == [{"type": "websocket.close"}]
    assert events.empty(), "the connect event was received first"
