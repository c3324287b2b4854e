"""Answers of nodes to queries: accepted only from the queried node, and never with more than was requested."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from coordinator.video.artifacts import ArtifactFolder, compute_max_bytes
from coordinator.video.state.jobs import JobFault, RequestedClip, VideoJob
from tests.support.cluster.cluster_port import Line, Port, opened
from wire.frames import FetchChunk, FetchRequest
from wire.identity import NodeId
from wire.video import Artifact


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def _linked(port: Port, name: str) -> Line:
    line = await port.link(who := port.member(name))
    await port.until(lambda: port.state(who) == "ready")
    return line


async def _all(port: Port, node: str, limit: int) -> bytes:
    return b"".join(
        [piece async for piece in port.application.nodes.links.fetches.fetch_source(NodeId(node), "logs", limit)]
    )


async def test_no_node_answers_for_another(port: Port) -> None:
    """Before this check any node could forge the logs and metrics of another, with the number of the query alone."""
    honest, liar = await _linked(port, "honest"), await _linked(port, "liar")
    asking = asyncio.create_task(_all(port, "node-1", 1000))
    asked = await honest.until(FetchRequest)
    liar.send(FetchChunk(asked.number, b"forged", last=True))
    await asyncio.sleep(0.1)
    honest.send(FetchChunk(asked.number, b"true", last=True))
    assert await asking == b"true"


@pytest.mark.parametrize("piece", [b"x" * 2000, b"x", b""])
async def test_an_answer_that_never_ends_ends_its_link(port: Port, piece: bytes) -> None:
    async with port.undisturbed():
        line = await _linked(port, "liar")
        asking = asyncio.create_task(_all(port, "node-2", 10_000))
        asked = await line.until(FetchRequest)
        line.send(*(FetchChunk(asked.number, piece) for _ in range(20)))
        await line.ended()
        await port.until(lambda: port.said("longer answer than the 10000 bytes"))
        asking.cancel()


async def test_a_window_without_a_byte_is_the_last(port: Port) -> None:
    line = await _linked(port, "liar")
    asking = asyncio.create_task(_all(port, "node-1", 10_000))
    asked = await line.until(FetchRequest)
    line.send(FetchChunk(asked.number, b"", last=True, next=5))
    assert await asyncio.wait_for(asking, 30) == b""


WANTED = RequestedClip("wan", "a cat", 64, 64, 5, 16, 4, 100)
JOB = VideoJob("video_1", 1, "key", 0.0, WANTED, 2**30, node="n1", lease="l1")


async def test_an_artifact_is_no_larger_than_its_job_can_make(tmp_path: Path) -> None:
    async def endless(node: NodeId, what: str, limit: int) -> AsyncGenerator[bytes]:
        while True:
            yield b"x" * 4096

    artifacts = ArtifactFolder(tmp_path / "videos", endless)
    most = compute_max_bytes(JOB, "video")
    assert most == 64 * 64 * 3 * 5 + 16 * 2**20
    large = await artifacts.fetch_files(JOB, (Artifact("clip.mp4", most + 1, b"x" * 32),))
    assert isinstance(large, JobFault)
    assert (large.code, f"{most} at most" in large.message) == ("output_invalid", True)
    assert not (tmp_path / "videos").exists()
    lying = Artifact("clip.mp4", 4096, hashlib.sha256(b"x" * 4096).digest())
    grown = await asyncio.wait_for(artifacts.fetch_files(JOB, (lying,)), 30)
    assert isinstance(grown, JobFault)
    assert grown.code == "artifact_broken"
    assert not list((tmp_path / "videos").rglob("clip*"))
