"""Pulls: speed of a mirror against nginx, three nodes against one, and chats on a node that serves a mirror."""

import asyncio
import os
import random
import shutil
import socket
import ssl
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildProgress, MirrorOrder
from node.hub.serving.node_tls import NodeClientContext
from tests.bench.router import load
from tests.bench.router.peers import NGINX, free_port
from tests.bench.row import Row, at_least, at_most, in_turn, p99, ratio_of, spread
from tests.support.cluster.model_node import get_files, make_identity
from tests.support.hub.downloads import Child, download, hub_source
from tests.support.hub.hub import Hub, make_manifest, running_hub
from tests.support.hub.pull_lab import NODE_SETTINGS, PADDING, TINY
from tests.support.processes import Pool, environment, pool, until
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelManifest, ModelSource, SourceKind

MIB = 1024 * 1024
MIRROR_BYTES, PULL_BYTES, CHAT_BYTES = 256 * MIB, 48 * MIB, 320 * MIB
ROUNDS = 5
TOKEN = "transfer-token"
CHUNK_SECONDS = 0.01
"""Wait of the hub before each 64 KiB of each of four connections: about 20 MB/s, as a line of 160 Mbit/s."""
STEP_MS, STREAMS, TOKENS, STREAM_STARTS = 20.0, 8, 50, 5
NGINX_CONFIG = """
daemon off; master_process on; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; root {folder}/www; }}
}}
"""


def bench_pull(folder: Path) -> list[Row]:
    """Measure the mirror, then pulls of a pool, then chats during a mirror transfer."""
    return [*_bench_mirror(folder / "mirror"), *_bench_pools(folder / "pool")]


def _make_content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(MIB) * (size // MIB)


# mirror and nginx


def _bench_mirror(folder: Path) -> list[Row]:
    files = {"model.safetensors": _make_content(27, MIRROR_BYTES)}
    manifest = make_manifest("bench/mirror", files)
    path = f"bench/mirror/resolve/{manifest.commit}/model.safetensors"
    hub = RepositoryFolder(folder / "holder" / "hub", manifest.repo)
    hub.prepare()
    blob = hub.get_blob(manifest.files[0].etag)
    blob.write_bytes(files["model.safetensors"])
    served = folder / "www" / path
    served.parent.mkdir(parents=True)
    served.hardlink_to(blob)
    authority = ClusterCa(folder / "authority", time.time)
    holder, follower = (get_files(make_identity(folder, authority, name)) for name in ("holder", "follower"))
    order = MirrorOrder(
        manifest=manifest,
        hub=str(folder / "holder" / "hub"),
        token=TOKEN,
        cluster=holder,
        hosts=("127.0.0.1",),
        idle_seconds=600.0,
    )
    with _running_mirror(order, folder / "mirror.log") as mirror, _running_nginx(folder) as nginx:
        context = NodeClientContext.create(follower, "holder")
        reads = in_turn(lambda _: _read(mirror, path, context), lambda _: _read(nginx, path, None), ROUNDS)
        sources = (ModelSource(SourceKind.MIRROR, mirror, TOKEN, "holder"), hub_source(nginx))
        pulls = in_turn(
            lambda number: _pull_once(folder / f"ours{number}", manifest, sources[0], cluster=follower),
            lambda number: _pull_once(folder / f"theirs{number}", manifest, sources[1]),
            ROUNDS,
        )
    return [
        _compare_speeds("mirror with TLS, one connection", reads),
        _compare_speeds("mirror with TLS, the whole download with verification", pulls),
    ]


def _compare_speeds(name: str, pairs: list[tuple[float, float]]) -> Row:
    ours, theirs, ratio, ratios = ratio_of(pairs)
    words = f"({ours / 1e6:.0f} and {theirs / 1e6:.0f} MB/s; {spread(ratios)})"
    return at_least(name, 0.25, ratio, words, "nginx without TLS")


@contextmanager
def _running_mirror(order: MirrorOrder, log: Path) -> Iterator[str]:
    child = Child("node.hub.serving.mirror", order, log)
    try:
        message = child.read()
        assert isinstance(message, ChildProgress), log.read_text()
        yield message.addresses[0]
    finally:
        child.close()


@contextmanager
def _running_nginx(folder: Path) -> Iterator[str]:
    """Run nginx over the folder `www`; raise RuntimeError if it is not installed."""
    program = shutil.which(NGINX) or "/usr/sbin/nginx"
    if not os.path.exists(program):
        raise RuntimeError("nginx is not installed (Debian: apt-get install nginx-light)")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # its worker runs as another user
    port, config = free_port(), folder / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(folder=folder, port=port))
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder)], env=environment())
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(port), 10, NGINX)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _read(url: str, path: str, context: ssl.SSLContext | None) -> float:
    """Read a file over one connection and return the bytes per second."""
    where = urlsplit(url)
    with ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((where.hostname or "", where.port or 0), 30))
        client = plain if context is None else stack.enter_context(context.wrap_socket(plain))
        buffer, size, began = bytearray(MIB), 0, time.monotonic()
        client.sendall(
            f"GET /{path} HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {TOKEN}\r\n"
            f"range: bytes=0-{MIRROR_BYTES - 1}\r\n\r\n".encode()
        )
        while size < MIRROR_BYTES and (read := client.recv_into(buffer)):
            size += read
    assert size >= MIRROR_BYTES, f"{url} sent {size} bytes: {bytes(buffer[:200])}"
    return MIRROR_BYTES / (time.monotonic() - began)


def _pull_once(folder: Path, manifest: ModelManifest, source: ModelSource, **fields: object) -> float:
    """Download a manifest and return the bytes per second."""
    folder.mkdir()
    began = time.monotonic()
    end = download(folder, manifest, [source], source_timeout_seconds=60.0, piece_bytes=2 * MIB, **fields)
    seconds = time.monotonic() - began
    assert end.code == ModelOrderCode.COMPLETED, end
    shutil.rmtree(folder)
    return manifest.size / seconds


# pools


def _bench_pools(folder: Path) -> list[Row]:
    folder.mkdir()
    with running_hub() as hub, pool(folder) as made:
        made.up(f"hub.endpoint={hub.url}")
        for name in ("one", "two", "three"):
            env = environment(HF_HOME=str(folder / f"{name}-huggingface"))
            made.join(name, f"engine.scripted.step_ms={STEP_MS}", *NODE_SETTINGS, env=env)
        lab = _PullPool(hub, made)
        return [_compare_counts(lab), _measure_gaps(lab)]


class _PullPool:
    """A hub and a pool whose nodes pull from that hub."""

    def __init__(self, hub: Hub, made: Pool) -> None:
        self.hub = hub
        self.pool = made
        self._api = httpx.Client(
            base_url=made.base, headers={"Authorization": f"Bearer {made.secret}"}, trust_env=False, timeout=60
        )
        self._number = 0

    def add(self, size: int) -> str:
        """Add a repository of a size to the hub, and return its name."""
        self._number += 1
        repo = f"bench/round{self._number}"
        self.hub.add(repo, {**TINY, PADDING: _make_content(self._number, size)})
        return repo

    def start(self, repo: str, *nodes: str) -> str:
        """Start a pull and return its id."""
        answer = self._api.post("/api/v1/pulls", json={"repo": repo, "nodes": nodes}).raise_for_status()
        return answer.json()["pull"]["id"]

    def wait(self, pull: str) -> None:
        """Wait until a pull is completed."""
        state = until(lambda: self._find_end(pull), 120, "the end of the pull")
        assert state == "completed", state

    def _find_end(self, pull: str) -> str:
        state = self._api.get(f"/api/v1/pulls/{pull}").raise_for_status().json()["pull"]["state"]
        return "" if state == "pulling" else state

    def is_complete(self, pull: str) -> bool:
        """Return whether a pull has ended."""
        return bool(self._find_end(pull))

    def cordon(self, *nodes: str) -> None:
        """Keep chats away from nodes."""
        for node in nodes:
            self._api.post(f"/api/v1/nodes/{node}/cordon").raise_for_status()

    def measure(self, *nodes: str) -> float:
        """Return the seconds of a pull of a new repository to nodes."""
        repo = self.add(PULL_BYTES)
        began = time.monotonic()
        self.wait(self.start(repo, *nodes))
        self.hub.remove(repo)
        return time.monotonic() - began


def _compare_counts(lab: _PullPool) -> Row:
    lab.hub.faults.chunk_seconds = CHUNK_SECONDS
    pairs = in_turn(lambda _: lab.measure("one", "two", "three"), lambda _: lab.measure("one"), 3)
    lab.hub.faults.chunk_seconds = 0.0
    three, one, ratio, ratios = ratio_of(pairs)
    words = f"({three:.1f} and {one:.1f} s, {PULL_BYTES / MIB:.0f} MiB, hub below 26 MB/s; {spread(ratios)})"
    return at_most("pull of three nodes", 2.0, ratio, words, "the time of one node")


def _measure_gaps(lab: _PullPool) -> Row:
    """Compare the gaps between tokens of chats on the holder, during a mirror transfer and without."""
    lab.cordon("two", "three")
    rates = list[float]()

    def measure_during(_: int) -> float:
        repo = lab.add(CHAT_BYTES)
        lab.wait(lab.start(repo, "one"))
        gaps, rate = asyncio.run(_stream_during(lab, repo))
        rates.append(rate)
        lab.hub.remove(repo)
        return gaps

    pairs = in_turn(measure_during, lambda _: asyncio.run(_stream(lab)), ROUNDS)
    during, alone, ratio, ratios = ratio_of(pairs)
    speed = f"mirror at {statistics.median(rates) / 1e6:.0f} MB/s to a node on the same cores"
    words = f"({during * 1e3:.1f} and {alone * 1e3:.1f} ms, {STREAMS} streams, {speed}; {spread(ratios)})"
    return at_most("ITL p99 of chats on the holder of a mirror", 1.5, ratio, words, "without a transfer")


async def _stream(lab: _PullPool) -> float:
    """Stream chats without a transfer, as long as those during one. Return the p99 of the gaps in seconds."""
    gaps = list[float]()
    for _ in range(STREAM_STARTS):
        gaps += await _stream_once(lab)
    return p99(gaps)


async def _stream_during(lab: _PullPool, repo: str) -> tuple[float, float]:
    """Stream chats while a node gets a repository from the mirror. Return the p99 of the gaps, and bytes per second."""
    gaps = list[float]()
    began = time.monotonic()
    pull = await asyncio.to_thread(lab.start, repo, "one", "two")
    while not await asyncio.to_thread(lab.is_complete, pull):
        gaps += await _stream_once(lab)
    return p99(gaps), CHAT_BYTES / (time.monotonic() - began)


async def _stream_once(lab: _PullPool) -> list[float]:
    return (await load.streams(lab.pool.base, lab.pool.key, STREAMS, TOKENS)).gaps
