"""Connections of a mirror that wait at the coordinator: retries after lost connections and after refusals."""

import asyncio
import gc
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.relay_join import RelayRefusedError
from node.hub.serving import relay_listener
from node.hub.serving.node_tls import NodeServerContext
from node.hub.serving.relay_listener import RelayListener
from tests.support.cluster.model_node import get_files, make_identity
from wire.codec import encode
from wire.frames import Denied, RelayJoined

FAILURES, REFUSALS = 8, 40
JOINED = FAILURES + 1


class Coordinator:
    """Server that closes `FAILURES` connections, joins one, and closes as many again. Then it refuses `REFUSALS`
    further ones for now, and the next one for good."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.connections = 0
        self.joined_at = 0.0
        self._context = context

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        if number == JOINED:
            await writer.start_tls(self._context)
            self.joined_at = time.monotonic()
            writer.write(encode(RelayJoined()) + b"request")
            await reader.read()
        elif number > FAILURES + JOINED:
            await writer.start_tls(self._context)
            denied = Denied("too_many", "too many connections", final=number > FAILURES + JOINED + REFUSALS)
            writer.write(encode(denied))
            await reader.read()  # until the mirror closes the connection
        writer.close()


class Recorder(asyncio.Protocol):
    """Protocol that stores the received bytes and then closes the connection."""

    def __init__(self, received: list[bytes]) -> None:
        self._received = received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._transport.close()


async def test_the_token_is_sent_to_the_coordinator_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_listener, "FIRST_RETRY_SECONDS", 0.002)
    authority, received = ClusterCa(tmp_path / "authority", time.time), asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        with suppress(OSError):  # the mirror aborts the connection
            await writer.start_tls(context)
            data = await reader.read()
        received.put_nowait(data)
        writer.close()

    context = NodeServerContext.create(get_files(make_identity(tmp_path, authority, "n2")))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    cluster = replace(get_files(make_identity(tmp_path, authority, "n1")), node="n1", machine="m1", coordinator=address)
    logged: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, event: logged.append(event))
    listener = asyncio.create_task(RelayListener(cluster, "token", asyncio.Protocol).run())
    try:
        assert [await asyncio.wait_for(received.get(), 10) for _ in range(3)] == [b""] * 3
    finally:
        listener.cancel()
        server.close()
    gc.collect()
    ours = [event for event in logged if isinstance(event.get("exception"), RelayRefusedError)]
    assert ours == [], "asyncio logs a failed future that was never read"


async def test_a_joined_connection_or_a_refusal_for_now_ends_the_long_waits_of_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_listener, "WAITING_CONNECTIONS", 1)
    monkeypatch.setattr(relay_listener, "FIRST_RETRY_SECONDS", 0.002)
    authority = ClusterCa(tmp_path / "authority", time.time)
    coordinator, received = Coordinator(authority.get_server_context()), list[bytes]()
    server = await asyncio.start_server(coordinator.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    cluster = replace(get_files(make_identity(tmp_path, authority, "n1")), node="n1", machine="m1", coordinator=address)
    try:
        # With the wait of the last failure, 0.5 s, the refusals would take 20 s, and the failures after the joined
        # connection twice that.
        began = time.monotonic()
        await asyncio.wait_for(RelayListener(cluster, "token", lambda: Recorder(received)).run(), 15)
    finally:
        server.close()
    assert coordinator.joined_at - began > 0.002 * (2**FAILURES - 1), "each wait after a failure is longer"
    assert received == [b"request"]
    assert coordinator.connections == FAILURES + JOINED + REFUSALS + 1
