"""The relay of the cluster port: a mirror and a download as processes, which reach each other only through it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.agent.identity import NodeIdentity
from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildEnd, ChildProgress, ClusterFiles, MirrorOrder
from tests.support.cluster.cluster_port import Ended, Line, Port, opened
from tests.support.hub.downloads import PIECE, Child, download, hub_source
from tests.support.hub.hub import Hub, running_hub
from wire.frames import Denied, JoinRelay, RelayJoined
from wire.frames.model_files import ModelOrderCode
from wire.identity import PROTOCOL
from wire.models.files import ModelManifest, ModelSource, SourceKind

pytestmark = pytest.mark.slow

FILES = {"config.json": b"{}", "model.safetensors": random.Random(8).randbytes(40 * PIECE + 5)}
TOTAL = sum(map(len, FILES.values()))
TOKEN = "transfer-token"


@dataclass
class Place:
    """The cluster port with two members, and a hub with one repository, which the holder has."""

    folder: Path
    port: Port
    holder: NodeIdentity
    follower: NodeIdentity
    hub: Hub
    manifest: ModelManifest

    @property
    def address(self) -> str:
        """Address of the cluster port."""
        return f"127.0.0.1:{self.port.number}"

    def get_files(self, who: NodeIdentity) -> ClusterFiles:
        return ClusterFiles(
            cluster=who.cluster,
            ca=who.ca,
            certificate=str(who.folder / "node.pem"),
            node=who.node,
            machine=who.machine,
            coordinator=self.address,
        )

    def open_transfer(self) -> None:
        """Permit the transfer from the holder to the follower."""
        transfers = self.port.application.nodes.links.transfers
        transfers.open(TOKEN, self.holder.node, frozenset({self.holder.node, self.follower.node}))

    @contextmanager
    def mirror(self) -> Iterator[Child]:
        """Run the mirror of the holder. Its own port is never used."""
        order = MirrorOrder(
            manifest=self.manifest,
            hub=str(self.folder / "holder" / "hub"),
            token=TOKEN,
            cluster=self.get_files(self.holder),
            hosts=("127.0.0.1",),
            idle_seconds=60.0,
            relay=True,
        )
        child = Child("node.hub.serving.mirror", order, self.folder / "mirror.log")
        try:
            assert isinstance(child.read(), ChildProgress)
            yield child
        finally:
            child.close()

    async def follow(self, *others: ModelSource, token: str = TOKEN, seconds: float = 30.0) -> ChildEnd:
        """Run the download of the follower through the relay, then from other sources."""
        sources = (ModelSource(SourceKind.RELAY, "", token, self.holder.node), *others)
        cluster = self.get_files(self.follower)
        folder = self.folder / "follower"
        return await asyncio.to_thread(
            download, folder, self.manifest, sources, cluster=cluster, source_timeout_seconds=seconds
        )

    def has_files(self) -> bool:
        root = RepositoryFolder(self.folder / "follower" / "hub", self.manifest.repo)
        snapshot = root.get_snapshot(self.manifest.commit)
        return all((snapshot / name).read_bytes() == content for name, content in FILES.items())


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    with running_hub() as hub:
        async with opened(tmp_path / "coordinator") as port:
            manifest = hub.add("tests/tiny", FILES)
            made = Place(tmp_path, port, port.member("holder"), port.member("follower"), hub, manifest)
            for name in ("holder", "follower"):
                (tmp_path / name).mkdir()
            end = await asyncio.to_thread(download, tmp_path / "holder", manifest, [hub_source(hub.url)])
            assert end.code == ModelOrderCode.COMPLETED
            hub.requests.clear()
            yield made


async def join(place: Place, who: NodeIdentity, *, serves: bool, token: str = TOKEN, node: str = "") -> Line:
    """Open a connection and ask for the relay."""
    line = await place.port.dial(who)
    line.send(JoinRelay(PROTOCOL, node or who.node, who.machine, token, serves))
    return line


async def ask(place: Place, who: NodeIdentity, *, serves: bool, token: str = TOKEN, node: str = "") -> str:
    """Ask for the relay, and return the reason of the refusal."""
    denied = await (await join(place, who, serves=serves, token=token, node=node)).next()
    assert isinstance(denied, Denied)
    return denied.reason


async def test_a_node_gets_all_files_through_the_coordinator(place: Place):
    place.open_transfer()
    with place.mirror():
        end = await place.follow(hub_source(place.hub.url))
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL), end.message
    assert place.has_files()
    assert place.hub.requests == [], "nothing came from the hub"
    assert place.port.application.nodes.server.count_unlinked() == 0


async def test_the_hub_is_next_when_the_coordinator_relays_nothing(place: Place):
    with place.mirror():
        end = await place.follow(hub_source(place.hub.url))
    assert (end.code, place.has_files()) == (ModelOrderCode.COMPLETED, True)
    assert place.hub.count_bytes() == TOTAL


async def test_a_wrong_token_is_refused_for_good_and_named(place: Place):
    place.open_transfer()
    with place.mirror():
        begun = time.monotonic()
        end = await place.follow(token="guessed-token", seconds=600.0)
    assert (end.code, end.fetched) == (ModelOrderCode.SOURCE_LOST, 0)
    assert end.message == f"relay://{place.address}: the coordinator relays no such transfer for this node"
    assert time.monotonic() - begun < 30


async def test_only_the_nodes_of_the_transfer_join(place: Place):
    place.open_transfer()
    studio = place.port.member("studio")
    assert await ask(place, studio, serves=False) == "no_transfer"
    assert await ask(place, studio, serves=True) == "no_transfer"
    assert await ask(place, place.follower, serves=True) == "no_transfer", "a node of the pull that does not serve"
    assert await ask(place, studio, serves=False, node=place.follower.node) == "identity"
    place.port.application.nodes.administration.remove_node(place.follower.node)
    assert await ask(place, place.follower, serves=False) == "removed"


async def test_relay_forwards_both_ways_and_closes_both_connections(place: Place):
    place.open_transfer()
    serving = await join(place, place.holder, serves=True)
    getting = await join(place, place.follower, serves=False)
    assert [type(await line.next()) for line in (serving, getting)] == [RelayJoined, RelayJoined]
    request, answer = b"GET /", random.Random(1).randbytes(3_000_000)
    getting.writer.write(request)
    assert await serving.reader.readexactly(len(request)) == request
    serving.writer.write(answer)
    assert await getting.reader.readexactly(len(answer)) == answer
    getting.writer.close()
    assert await serving.reader.read() == b""


async def test_a_node_that_sends_before_it_is_joined_is_cut_off(place: Place):
    place.open_transfer()
    getting = await join(place, place.follower, serves=False)
    await place.port.until(lambda: place.port.application.nodes.server.count_unlinked() == 0)
    getting.writer.write(b"GET /")
    with pytest.raises(Ended):
        await getting.next()


async def test_waiting_connections_are_limited_and_end_with_their_transfer(place: Place):
    place.open_transfer()
    waiting = [await join(place, place.holder, serves=True) for _ in range(8)]
    assert await ask(place, place.holder, serves=True) == "too_many"
    place.port.application.nodes.links.transfers.close(TOKEN)
    for line in waiting:
        with pytest.raises(Ended):
            await line.next()
    assert await ask(place, place.holder, serves=True) == "no_transfer"


async def test_a_mirror_that_found_the_relay_full_tries_again(place: Place):
    place.open_transfer()
    waiting = [await join(place, place.holder, serves=True) for _ in range(8)]
    with place.mirror():
        await place.port.until(lambda: sum(entry.get("reason") == "too_many" for entry in place.port.logs) >= 4)
        for line in waiting:
            line.close()
        end = await place.follow(hub_source(place.hub.url))
    assert (end.code, place.has_files()) == (ModelOrderCode.COMPLETED, True), end.message
    assert place.hub.requests == [], "nothing came from the hub"


async def test_a_node_waits_for_the_mirror_for_a_limited_time(place: Place):
    place.open_transfer()
    begun = time.monotonic()
    assert await ask(place, place.follower, serves=False) == "no_server"
    assert 4.0 < time.monotonic() - begun < 20.0
