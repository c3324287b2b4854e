"""The mirror as a process: other nodes take files from it, also while it still downloads, and strangers get nothing."""

import asyncio
import random
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildProgress, ClusterFiles, MirrorOrder
from node.hub.serving.node_tls import NodeClientContext
from tests.support.cluster.model_node import get_files, make_identity
from tests.support.hub.downloads import PIECE, Child, download, download_order, hub_source
from tests.support.hub.hub import Hub, running_hub
from tests.support.processes import until
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.models.files import ModelManifest, ModelSource, SourceKind

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
FILES = {"config.json": b"{}", WEIGHTS: random.Random(8).randbytes(40 * PIECE + 5)}
TOTAL = sum(map(len, FILES.values()))
TOKEN = "transfer-token"


class Place:
    """A hub, the identities of two nodes, and the mirrors of the test."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub
        self.manifest = hub.add("tests/tiny", FILES)
        self.authority = ClusterCa(folder / "authority", time.time)
        self.holder, self.follower = (self.identify(name) for name in ("holder", "follower"))
        self.children: list[Child] = []

    def identify(self, node: str) -> ClusterFiles:
        return get_files(make_identity(self.folder, self.authority, node))

    def start(self, module: str, order: Any) -> Child:
        self.children.append(Child(module, order, self.folder / f"{len(self.children)}.log"))
        return self.children[-1]

    def mirror(self, idle_seconds: float = 60.0) -> tuple[Child, str]:
        """Start the mirror of the holder; return it with its URL."""
        order = MirrorOrder(
            manifest=self.manifest,
            hub=str(self.folder / "holder" / "hub"),
            token=TOKEN,
            cluster=self.holder,
            hosts=("127.0.0.1",),
            idle_seconds=idle_seconds,
        )
        child = self.start("node.hub.serving.mirror", order)
        message = child.read()
        assert isinstance(message, ChildProgress)
        assert message.phase == ModelOrderPhase.SERVING
        return child, message.addresses[0]

    def source(self, url: str, token: str = TOKEN, node: str = "holder") -> ModelSource:
        return ModelSource(SourceKind.MIRROR, url, token, node)

    def follow(self, *sources: ModelSource, **fields: Any) -> Any:
        """Run the download of the follower."""
        folder = self.folder / "follower"
        return download(folder, self.manifest, sources, **{"cluster": self.follower, **fields})


def is_complete(folder: Path, manifest: ModelManifest) -> bool:
    root = RepositoryFolder(folder / "hub", manifest.repo).get_snapshot(manifest.commit)
    return {file.path: (root / file.path).read_bytes() for file in manifest.files} == FILES


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running_hub() as hub:
        made = Place(tmp_path, hub)
        yield made
        for child in made.children:
            child.close()


def fill(place: Place) -> None:
    """Download all files to the holder."""
    end = download(place.folder / "holder", place.manifest, [hub_source(place.hub.url)])
    assert end.code == ModelOrderCode.COMPLETED
    place.hub.requests.clear()


def test_a_node_takes_all_files_from_the_mirror(place: Place):
    fill(place)
    _, url = place.mirror()
    end = place.follow(place.source(url), hub_source(place.hub.url))
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL)
    assert is_complete(place.folder / "follower", place.manifest)
    assert place.hub.requests == []


def test_a_node_follows_a_mirror_that_still_downloads(place: Place):
    place.hub.faults.chunk_seconds = 0.05
    order = download_order(place.folder / "holder", place.manifest, [hub_source(place.hub.url)])
    leader = place.start("node.hub.downloader", order)
    _, url = place.mirror()
    end = place.follow(place.source(url))
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL)
    assert is_complete(place.folder / "follower", place.manifest)
    assert leader.wait_end().code == ModelOrderCode.COMPLETED
    assert place.hub.count_bytes() == TOTAL


def test_a_follower_continues_at_the_hub_when_the_mirror_is_killed(place: Place):
    fill(place)
    mirror, url = place.mirror()
    sources = [place.source(url), hub_source(place.hub.url)]
    follower = place.start(
        "node.hub.downloader",
        download_order(place.folder / "follower", place.manifest, sources, cluster=place.follower, connections=1),
    )
    part = RepositoryFolder(place.folder / "follower" / "hub", "tests/tiny").get_journal(place.manifest.files[1].etag)
    until(part.exists, what="the first pieces")
    mirror.close()
    assert follower.wait_end().code == ModelOrderCode.COMPLETED
    assert is_complete(place.folder / "follower", place.manifest)


def test_a_flipped_bit_of_the_mirror_is_not_taken(place: Place):
    fill(place)
    blob = RepositoryFolder(place.folder / "holder" / "hub", "tests/tiny").get_blob(place.manifest.files[1].etag)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 4
    blob.write_bytes(content)
    _, url = place.mirror()
    assert place.follow(place.source(url)).code == ModelOrderCode.CONTENT_MISMATCH
    end = place.follow(place.source(url), hub_source(place.hub.url))
    assert end.code == ModelOrderCode.COMPLETED
    assert is_complete(place.folder / "follower", place.manifest)


def test_hub_token_is_sent_to_the_named_node_only(place: Place):
    """The holder serves, but the order names another node: its certificate is refused before the token is sent."""
    fill(place)
    _, url = place.mirror()
    end = place.follow(place.source(url, node="studio"))
    assert end.code == ModelOrderCode.SOURCE_LOST
    assert "does not prove its identity" in end.message
    assert end.fetched == 0


def test_a_mirror_of_another_cluster_is_refused(place: Place):
    fill(place)
    other = ClusterCa(place.folder / "other", time.time)
    _, url = place.mirror()
    stranger = get_files(make_identity(place.folder / "stranger", other, "follower"))
    end = place.follow(place.source(url), cluster=stranger)
    assert (end.code, end.fetched) == (ModelOrderCode.SOURCE_LOST, 0)


def test_a_wrong_token_gets_nothing(place: Place):
    fill(place)
    _, url = place.mirror()
    end = place.follow(place.source(url, token="guessed-token"))
    assert (end.code, end.fetched) == (ModelOrderCode.GATED, 0)
    assert "guessed" not in end.message


def test_a_client_without_a_certificate_gets_no_answer(place: Place):
    fill(place)
    _, url = place.mirror()
    path = f"{url}/tests/tiny/resolve/main/config.json"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with httpx2.Client(verify=context, trust_env=False) as client, pytest.raises(httpx2.TransportError):
        client.get(path, headers={"authorization": f"Bearer {TOKEN}"})
    known = NodeClientContext.create(place.follower, "holder")
    with httpx2.Client(verify=known, trust_env=False) as client:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).content == b"{}"


def test_a_mirror_ends_when_idle_and_on_sigterm(place: Place):
    fill(place)
    idle, _ = place.mirror(idle_seconds=0.2)
    assert (idle.wait_end().code, idle.popen.wait(10)) == (ModelOrderCode.COMPLETED, 0)
    stopped, _ = place.mirror()
    stopped.popen.send_signal(signal.SIGTERM)
    assert (stopped.wait_end().code, stopped.popen.wait(10)) == (ModelOrderCode.CANCELLED, 0)


def test_a_mirror_ends_with_its_agent(place: Place):
    mirror, _ = place.mirror()
    mirror.end_agent()
    assert mirror.popen.wait(10) == 0


def test_a_mirror_without_files_is_lost(place: Place):
    _, url = place.mirror()
    end = place.follow(place.source(url))
    assert end.code == ModelOrderCode.SOURCE_LOST


def test_a_mirror_that_has_ended_is_lost_at_once(place: Place):
    fill(place)
    mirror, url = place.mirror()
    mirror.close()
    began = time.monotonic()
    end = place.follow(place.source(url), source_timeout_seconds=600.0)
    assert (end.code, end.message) == (ModelOrderCode.SOURCE_LOST, f"the mirror at {url} has ended")
    assert time.monotonic() - began < 30


async def test_many_idle_connections_do_not_stop_the_mirror(place: Place):
    fill(place)
    _, url = place.mirror()
    port = int(url.rpartition(":")[2])
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    end = await asyncio.to_thread(place.follow, place.source(url))
    assert end.code == ModelOrderCode.COMPLETED
    for _, writer in held:
        writer.close()
