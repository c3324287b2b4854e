"""Output of `cluster cache`, against a server with the answer of a coordinator."""

import json

from msgspec.structs import asdict

from coordinator.client.errors import NOT_FOUND
from tests.support.coordinator.answering_server import Server
from wire.report import CacheState, ModelCache
from wire.units import GIB


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
    server.answer = answer(CacheState(store="a", disk_bytes=GIB))
    text = server.run("cache", "status").output
    assert "studio: 1.0 GiB on the disk; without quota or lock, nothing is written" in text


def test_cached_prompts_are_selected_by_node_and_model(server: Server):
    entries = [asdict(ModelCache(model, nbytes=GIB, entries=3, hits=5)) for model in ("big", "small")]
    nodes = [
        {"id": name[0], "name": name, "state": state, "engine": {"cache": asdict(CacheState()) | {"models": entries}}}
        for name, state in (("studio", "ready"), ("mini", "lost"), ("gone", "left"))
    ]
    server.answer = {"nodes": nodes}

    def select(*words: str) -> list[tuple[str, str]]:
        found = json.loads(server.run("cache", "status", *words, "-o", "json").stdout)
        assert found["schema"] == 1
        return [(node["name"], entry["model"]) for node in found["nodes"] for entry in node["cache"]["models"]]

    assert select() == [(node, model) for node in ("studio", "mini") for model in ("big", "small")]
    assert select("--node", "mini", "--model", "big") == select("--node", "m", "--model", "big") == [("mini", "big")]
    assert select("--model", "nothing") == []
    lines = [" ".join(line.split()) for line in server.run("cache", "status", "--model", "small").stdout.splitlines()]
    assert lines[1].startswith("studio small 1.0 GiB 3 5 ")
    assert "no cached prompts" in server.run("cache", "status", "--model", "nothing").stdout
    assert server.run("cache", "status", "--node", "gone").exit_code == NOT_FOUND


def test_cached_prompts_are_deleted_only_after_a_confirmation(server: Server):
    server.answer = {"model": None, "nodes": [{"name": "studio"}, {"name": "mini"}]}
    assert server.run("cache", "clear").exit_code == 2
    assert server.asked == []
    done = server.run("cache", "clear", "--yes", "--model", "big", "--node", "studio")
    assert done.stdout.splitlines() == [
        f"cached prompts of all models deleted on {name}" for name in ("studio", "mini")
    ]
    assert server.asked == [("/api/v1/cache/clear", {"model": "big", "node": "studio"})]
