"""Hashing of models while a node is idle, by real child processes."""

import asyncio
from pathlib import Path

import pytest

from node.hub.digests import STORE_NAME, DigestStore, find_content
from node.hub.idle_hasher import MIN_IDLE_CHECKS, IdleHasher
from node.settings import ModelSettings
from tests.support.hub.downloads import list_children

pytestmark = pytest.mark.slow


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    return folder


class Node:
    """A node with two models whose work the test sets."""

    def __init__(self, folder: Path) -> None:
        self.models = [make_model(folder / "models" / name) for name in ("a", "b")]
        self.busy = False
        self.checks = self.children = 0
        self.checked_often = asyncio.Event()
        self.hashed = asyncio.Event()
        self.count = 0
        self.store = DigestStore(folder / "state" / STORE_NAME)
        settings = ModelSettings(folders=(str(folder / "models"),), use_huggingface_cache=False)
        self.hasher = IdleHasher(settings, folder / "state", self.is_busy, self.on_change, {}, interval=0.01)

    def is_busy(self) -> bool:
        self.checks += 1
        self.children = max(self.children, len(list_children("node.hub.verifier")))
        if self.checks >= 3 * MIN_IDLE_CHECKS:
            self.checked_often.set()
        return self.busy

    def on_change(self) -> None:
        self.count += 1
        self.hashed.set()


async def test_an_idle_node_hashes_each_model_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.hasher.start()
    while node.count < 2:
        node.hashed.clear()
        await asyncio.wait_for(node.hashed.wait(), 60)
    assert all(find_content(folder, node.store) for folder in node.models)
    assert node.hasher.find_unhashed() is None
    (node.models[0] / "model.safetensors").write_bytes(bytes(100_001))
    assert node.hasher.find_unhashed() == node.models[0], "a changed file is hashed again"
    await node.hasher.stop()


async def test_a_busy_node_hashes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.busy = True
    node.hasher.start()
    await asyncio.wait_for(node.checked_often.wait(), 60)
    await node.hasher.stop()
    assert (node.count, node.children) == (0, 0)
    assert not any(find_content(folder, node.store) for folder in node.models)


async def test_a_model_that_cannot_be_read_is_tried_once_and_the_next_one_is_hashed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    broken, good = node.models
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").mkdir()
    assert node.hasher.find_unhashed() == broken
    node.hasher.start()
    await asyncio.wait_for(node.hashed.wait(), 60)
    assert find_content(good, node.store)
    assert node.hasher.find_unhashed() is None
    await node.hasher.stop()
