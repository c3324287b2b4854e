"""Connections of a mirror that wait at the coordinator: retries after lost connections and after refusals."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.serving import relay_listener
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
        self._context = context

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        if number == JOINED:
            await writer.start_tls(self._context)
            writer.write(encode(RelayJoined()))
            await reader.read()
        elif number > FAILURES + JOINED:
            await writer.start_tls(self._context)
            denied = Denied("too_many", "too many connections", final=number > FAILURES + JOINED + REFUSALS)
            writer.write(encode(denied))
            await writer.drain()
        writer.close()


async def test_a_joined_connection_or_a_refusal_for_now_ends_the_long_waits_of_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_listener, "WAITING_CONNECTIONS", 1)
    monkeypatch.setattr(relay_listener, "FIRST_RETRY_SECONDS", 0.002)
    authority = ClusterCa(tmp_path / "authority", time.time)
    coordinator = Coordinator(authority.get_server_context())
    server = await asyncio.start_server(coordinator.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    cluster = replace(get_files(make_identity(tmp_path, authority, "n1")), node="n1", machine="m1", coordinator=address)
    try:
        # With the wait of the last failure, 0.5 s, the refusals would take 20 s, and the failures after the joined
        # connection twice that.
        await asyncio.wait_for(RelayListener(cluster, "token", asyncio.Protocol).run(), 15)
    finally:
        server.close()
    assert coordinator.connections == FAILURES + JOINED + REFUSALS + 1
