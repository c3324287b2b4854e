"""Output of `cluster cache status`, against a server with the answer of a coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import asdict

from tests.support.cluster.answering_server import Server
from wire.report import CacheState
from wire.units import GIB


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()


def answer(cache: CacheState) -> dict[str, object]:
    node = {"id": "n1", "name": "studio", "state": "ready", "engine": {"cache": asdict(cache)}}
    return {"nodes": [node]}


def test_without_a_disk_cache_the_prompts_that_it_would_keep_are_counted(server: Server):
    server.answer = answer(CacheState(evictions=7))
    text = " ".join(server.run("cache", "status").output.split())
    assert "studio: no disk cache; 7 prompts were evicted since its engine started" in text
    assert "engine.mlx.disk_cache_size=auto" in text
    assert "recovered" in text, "what it costs"


def test_a_disk_cache_has_its_size_quota_and_write_budget(server: Server):
    server.answer = answer(CacheState(evictions=7, store="a", disk_bytes=GIB, disk_quota=4 * GIB, disk_budget=2 * GIB))
    text = server.run("cache", "status").output
    assert "studio: 1.0 GiB of 4.0 GiB on the disk; 2.0 GiB may be written now, 0 wait" in text
    assert "no disk cache" not in text
