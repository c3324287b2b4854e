"""Relay of model files: rate, backpressure and order of the copied bytes, over recorded transports."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from coordinator.cluster.links import relay as relay_module
from coordinator.cluster.links.relay import (
    MAX_STREAMS,
    MAX_WAITING,
    RETRY_SECONDS,
    RelayPace,
    RelayServer,
    RelayStream,
    RelayTransfer,
    RelayTransfers,
)
from coordinator.cluster.member_authentication import MemberAuthentication
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.tls.cluster_ca import ClusterCa
from wire.codec import encode
from wire.frames import Denied, JoinRelay, RelayJoined
from wire.identity import PROTOCOL, NodeId, PeerIdentity
from wire.report import Hardware

JOINED = encode(RelayJoined())
RATE = 1_000_000.0


class RecordedTransport(asyncio.Transport):
    """Transport without a network. `reads` is set while the protocol accepts bytes, `closed` after a close."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ends: list[str] = []
        self.closed = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def lose(self) -> None:
        """End the connection, as its peer does."""
        cast("RelayStream", self.protocol).connection_lost(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()

    def is_closing(self) -> bool:
        return bool(self.ends)

    def close(self) -> None:
        self.ends.append("close")
        self.closed.set()

    def abort(self) -> None:
        self.ends.append("abort")


class Pair:
    """Two joined connections of one relay."""

    def __init__(self, pace: RelayPace) -> None:
        self.ended: list[RelayStream] = []
        self.serving, self.getting = RecordedTransport(), RecordedTransport()
        self.server = RelayStream(self.serving, pace, self.ended.append)
        self.client = RelayStream(self.getting, pace, self.ended.append)
        self.server.join(self.client)


async def test_bytes_are_copied_behind_the_answer_of_the_coordinator() -> None:
    pair = Pair(RelayPace(RATE))
    pair.client.data_received(b"GET /")
    pair.server.data_received(b"200 OK")
    assert (pair.serving.written, pair.getting.written) == (JOINED + b"GET /", JOINED + b"200 OK")


async def test_all_relays_share_one_rate() -> None:
    loop, pace = asyncio.get_running_loop(), RelayPace(RATE)
    first, second = Pair(pace), Pair(pace)
    begun = loop.time()
    first.server.data_received(bytes(100_000))
    second.server.data_received(bytes(100_000))
    assert (first.serving.reads.is_set(), second.serving.reads.is_set()) == (False, False)
    await asyncio.wait_for(first.serving.reads.wait(), 30)
    assert loop.time() - begun >= 0.099
    await asyncio.wait_for(second.serving.reads.wait(), 30)
    assert loop.time() - begun >= 0.199, "200 kB at 1 MB/s"


async def test_pieces_that_arrive_during_a_delay_prolong_it() -> None:
    loop, pair = asyncio.get_running_loop(), Pair(RelayPace(RATE))
    begun = loop.time()
    for _ in range(4):
        pair.server.data_received(bytes(10_000))
    await asyncio.wait_for(pair.serving.reads.wait(), 30)
    assert loop.time() - begun >= 0.039, "40 kB at 1 MB/s"


def test_a_pause_saves_no_rate_for_later() -> None:
    pace = RelayPace(RATE)
    assert pace.charge(500_000, 10.0) == 0.5
    assert pace.charge(100_000, 10.1) == 0.5
    assert pace.charge(100_000, 100.0) == pytest.approx(0.1)


async def test_relay_applies_backpressure_to_the_sender() -> None:
    pair = Pair(RelayPace(RATE))
    pair.client.pause_writing()
    assert (pair.serving.reads.is_set(), pair.getting.reads.is_set()) == (False, True)
    pair.server.data_received(b"12")
    await asyncio.sleep(0.01)  # longer than the delay of two bytes
    assert not pair.serving.reads.is_set(), "the end of the delay does not end the pause"
    pair.server.pause_writing()
    pair.client.resume_writing()
    assert (pair.serving.reads.is_set(), pair.getting.reads.is_set()) == (True, False), "each direction alone"


async def test_relay_closes_both_connections() -> None:
    pair = Pair(RelayPace(RATE))
    pair.client.connection_lost(None)
    assert (pair.serving.ends, pair.ended) == (["close"], [pair.client])
    pair.server.write(b"late")
    assert pair.serving.written == JOINED


async def test_a_refused_connection_gets_the_reason() -> None:
    transport = RecordedTransport()
    stream = RelayStream(transport, RelayPace(RATE), lambda ended: None)
    denied = Denied("no_server", "the node that serves has no connection")
    stream.refuse(denied)
    assert (transport.written, transport.ends) == (encode(denied), ["close"])


HOLDER, FOLLOWER = NodeId("holder"), NodeId("follower")


class Relay:
    """Relay server with one transfer, and members whose machines have the names of their nodes."""

    def __init__(self, folder: Path) -> None:
        self.store = Database(folder)
        authority = ClusterCa(folder / "authority", time.time)
        for node in (HOLDER, FOLLOWER):
            self.store.members.put(MemberRow(node, node, node, Hardware(), "1", 0.0))
        transfers = self.transfers = RelayTransfers()
        transfers.open("token", HOLDER, frozenset({FOLLOWER}))
        self.cluster = authority.cluster
        self.server = RelayServer(transfers, MemberAuthentication(self.store, authority, time.time))

    def admit(self, *, serves: bool) -> RelayTransfer | Denied:
        node = HOLDER if serves else FOLLOWER
        join = JoinRelay(PROTOCOL, node, node, "token", serves)
        return self.server.admit(PeerIdentity(self.cluster, node), "1", join)

    def connect(self, *, serves: bool) -> RecordedTransport:
        transfer = self.admit(serves=serves)
        assert isinstance(transfer, RelayTransfer), transfer
        transport = RecordedTransport()
        self.server.add(transfer, transport, serves=serves)
        return transport


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    made = Relay(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("serves", [True, False])
async def test_a_connection_that_ended_while_it_waited_is_joined_with_none(relay: Relay, serves: bool) -> None:
    gone = relay.connect(serves=serves)
    gone.lose()
    other = relay.connect(serves=not serves)
    assert (gone.written, other.written) == (b"", b"")
    again = relay.connect(serves=serves)
    assert again.written == other.written == JOINED
    again.lose()
    other.lose()


async def test_only_connections_that_still_wait_are_refused_after_the_timeout(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "JOIN_TIMEOUT_SECONDS", 0.01)
    joined = relay.connect(serves=False)
    relay.connect(serves=True)
    waiting = relay.connect(serves=False)
    await asyncio.wait_for(waiting.closed.wait(), 30)
    waiting.lose()
    serving = relay.connect(serves=True)
    await asyncio.sleep(0.02)  # twice the timeout
    assert (serving.written, serving.ends) == (b"", []), "the node that serves keeps connections for later"
    assert waiting.written == encode(
        Denied("no_server", "the node that serves has no connection within 0 s", retry_after=RETRY_SECONDS)
    )
    assert (joined.written, joined.ends) == (JOINED, [])


async def test_only_open_connections_count_for_the_limits_of_the_relay(relay: Relay) -> None:
    for _ in range(MAX_STREAMS + 1):
        relay.connect(serves=True).lose()
    waiting = [relay.connect(serves=True) for _ in range(MAX_WAITING)]
    refused = relay.admit(serves=True)
    assert isinstance(refused, Denied)
    assert (refused.reason, refused.final) == ("too_many", False)
    assert isinstance(relay.admit(serves=False), RelayTransfer), "the other side has a limit of its own"
    waiting[0].lose()
    assert isinstance(relay.admit(serves=True), RelayTransfer)


@pytest.mark.parametrize("end", ["transfer", "coordinator"])
async def test_waiting_connections_end_with_their_transfer_and_all_with_the_coordinator(relay: Relay, end: str) -> None:
    joined = [relay.connect(serves=serves) for serves in (True, False)]
    waiting = relay.connect(serves=True)
    if end == "transfer":
        relay.transfers.close("unknown")
        assert waiting.ends == []
        relay.transfers.close("token")
        refused = relay.admit(serves=True)
        assert isinstance(refused, Denied)
        assert (refused.reason, refused.final) == ("no_transfer", True)
    else:
        relay.server.close()
    assert waiting.ends == ["close"]
    assert [one.ends for one in joined] == [[] if end == "transfer" else ["close"]] * 2
