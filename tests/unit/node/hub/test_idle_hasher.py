"""Hashing of models while a node is idle: the folders that are searched, and the time between two searches."""

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import VerifyOrder
from node.hub.digests import STORE_NAME, DigestStore, find_content
from node.hub.idle_hasher import MAX_BYTES_PER_SECOND, MIN_IDLE_CHECKS, NEXT_SEARCH_CHECKS, IdleHasher
from node.settings import ModelSettings
from tests.support.hub.downloads import list_children
from tests.support.processes import until
from tests.unit.node.models.test_catalogue import lock


class Node:
    """A node without work, with a model folder and a cache."""

    def __init__(self, folder: Path, *, hash_when_idle: bool = True, cache: bool = True) -> None:
        self.models, self.cache = folder / "models", folder / "hub"
        self.models.mkdir()
        self.busy = False
        self.checks = 0
        self.checked = asyncio.Event()
        """Set after twice as many checks as a search needs."""
        self.hashed = asyncio.Event()
        self.store = DigestStore(folder / "state" / STORE_NAME)
        settings = ModelSettings(
            folders=(str(self.models),), use_huggingface_cache=cache, hash_when_idle=hash_when_idle
        )
        environment = {"HF_HUB_CACHE": str(self.cache)}
        self.hasher = IdleHasher(settings, folder / "state", self.is_busy, self.hashed.set, environment, interval=0.005)

    def is_busy(self) -> bool:
        self.checks += 1
        if self.checks >= 2 * MIN_IDLE_CHECKS:
            self.checked.set()
        return self.busy

    def add_model(self) -> Path:
        folder = self.models / "tiny"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model.safetensors").write_bytes(bytes(1000))
        return folder

    def add_cached(self) -> Path:
        repository = RepositoryFolder(self.cache, "tests/cached")
        repository.prepare()
        snapshot = repository.get_snapshot("c" * 40)
        snapshot.mkdir()
        repository.write_references("c" * 40, ("main",))
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
        (snapshot / "model.safetensors").write_bytes(bytes(1000))
        return snapshot


@pytest.mark.parametrize("cache", [True, False])
def test_models_of_the_cache_are_found_if_the_node_serves_it(tmp_path: Path, cache: bool):
    node = Node(tmp_path, cache=cache)
    assert node.hasher.find_unhashed() is None
    cached = node.add_cached()
    assert node.hasher.find_unhashed() == (cached if cache else None)
    assert node.add_model() == node.hasher.find_unhashed(), "model folders come first"


def test_a_folder_that_may_not_be_searched_does_not_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Node(tmp_path, cache=False)
    folder = node.add_model()
    (node.models / "shelf" / "locked").mkdir(parents=True)
    lock(monkeypatch, node.models / "shelf", folder)
    assert node.hasher.find_unhashed() == folder, "its hashing ends with the reason"


def test_a_folder_without_weights_is_left_out(tmp_path: Path):
    node = Node(tmp_path)
    folder = node.add_model()
    assert node.hasher.find_unhashed() == folder
    (folder / "model.safetensors").unlink()
    assert node.hasher.find_unhashed() is None


async def test_the_next_search_waits_after_one_without_a_result(tmp_path: Path):
    node = Node(tmp_path)
    node.hasher.start()
    await asyncio.wait_for(node.checked.wait(), 20)
    folder = node.add_model()
    await asyncio.wait_for(node.hashed.wait(), 60)
    assert find_content(folder, node.store)
    assert node.checks >= MIN_IDLE_CHECKS + NEXT_SEARCH_CHECKS + MIN_IDLE_CHECKS
    await node.hasher.stop()
    checks = node.checks
    await asyncio.sleep(0.05)
    assert node.checks == checks, "a stopped hasher checks nothing"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("embedded null byte")], ids=str)
async def test_an_error_of_a_search_does_not_end_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    node = Node(tmp_path)
    folder, list_folder, lost = node.add_model(), os.scandir, list[object]()

    def scandir(path: Any = ".") -> Any:
        if Path(str(path)) == folder and not lost:
            lost.append(path)
            raise error
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    node.hasher.start()
    await asyncio.wait_for(node.hashed.wait(), 30)
    assert find_content(folder, node.store)
    assert lost or sys.version_info >= (3, 13), "later versions of pathlib ignore the error"
    await node.hasher.stop()


async def test_a_model_that_could_not_be_hashed_is_found_again_when_its_files_change(tmp_path: Path):
    node = Node(tmp_path)
    folder = node.add_model()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "missing")
    node.hasher.start()
    await asyncio.to_thread(until, lambda: node.hasher.find_unhashed() is None, 60)
    await node.hasher.stop()
    (tmp_path / "missing").write_bytes(bytes(1000))
    assert node.hasher.find_unhashed() == folder


async def test_a_model_whose_child_was_killed_is_found_again(tmp_path: Path):
    node = Node(tmp_path)
    folder = node.add_model()
    os.truncate(folder / "model.safetensors", 2**36)  # its hashing takes two minutes
    with capture_logs() as events:
        node.hasher.start()
        await asyncio.to_thread(until, lambda: bool(list_children("node.hub.verifier")), 60)
        for child in list_children("node.hub.verifier"):
            child.kill()
        await asyncio.to_thread(until, lambda: any(event["event"] == "model not hashed" for event in events), 60)
        assert node.hasher.find_unhashed() == folder
        await node.hasher.stop()


async def test_a_child_ends_when_the_node_has_work_and_at_the_stop(tmp_path: Path):
    node = Node(tmp_path)
    folder = node.add_model()
    os.truncate(folder / "model.safetensors", 2**36)  # its hashing takes two minutes
    node.hasher.start()
    for _ in range(2):
        await asyncio.to_thread(until, lambda: bool(list_children("node.hub.verifier")), 60)
        node.busy = True
        await asyncio.to_thread(until, lambda: not list_children("node.hub.verifier"), 20)
        assert node.hasher.find_unhashed() == folder, "a cancelled child is no failure"
        node.busy = False
    await asyncio.to_thread(until, lambda: bool(list_children("node.hub.verifier")), 60)
    stopping = asyncio.create_task(node.hasher.stop())
    done, _ = await asyncio.wait((stopping,), timeout=20)
    assert done == {stopping}, "the stop does not wait for the files"
    assert list_children("node.hub.verifier") == []


async def test_a_child_reads_at_the_limited_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, order = tmp_path / "program", tmp_path / "order.json"
    program.write_text(f'#!/bin/sh\nhead -n 1 > {order}\necho \'{{"type": "end", "code": "completed"}}\'\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    node = Node(tmp_path)
    folder = node.add_model()
    node.hasher.start()
    await asyncio.wait_for(node.hashed.wait(), 30)
    await node.hasher.stop()
    assert msgspec.json.decode(order.read_bytes(), type=VerifyOrder) == VerifyOrder(
        folder=str(folder), digests=str(tmp_path / "state" / STORE_NAME), max_bytes_per_second=MAX_BYTES_PER_SECOND
    )


async def test_the_setting_ends_all_checks(tmp_path: Path):
    node = Node(tmp_path, hash_when_idle=False)
    node.add_model()
    node.hasher.start()
    await asyncio.sleep(0.1)
    await node.hasher.stop()
    assert node.checks == 0
