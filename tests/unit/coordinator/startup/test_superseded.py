"""A coordinator that a newer one of its cluster has superseded stops, and does not start again."""

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.backup.generation_fence import GenerationFence, SupersededError, SupersededMark
from coordinator.startup.superseded import SupersededHandler
from coordinator.tls.cluster_ca import ClusterCa


def test_the_first_proof_stops_the_coordinator_and_forbids_its_next_start(tmp_path: Path):
    authority, stop = ClusterCa(tmp_path / "authority", time.time), asyncio.Event()
    fence = GenerationFence(authority, 1)
    fence.check(tmp_path)
    handler = SupersededHandler(tmp_path, stop)
    handler.check()
    assert not stop.is_set()
    handler.handle(SupersededMark(3, authority.seal_generation(3), "n1"))
    handler.handle(SupersededMark(2, authority.seal_generation(2), "n2"))
    assert stop.is_set()
    for check in (handler.check, lambda: fence.check(tmp_path)):
        with pytest.raises(SupersededError, match=r"this cluster has moved.*reported by node n1"):
            check()
    GenerationFence(authority, 3).check(tmp_path)  # a restore into this folder has the same generation


def test_the_coordinator_stops_even_if_the_proof_cannot_be_written(tmp_path: Path):
    stop, state = asyncio.Event(), tmp_path / "file"
    state.write_text("no folder")
    handler = SupersededHandler(state, stop)
    handler.handle(SupersededMark(3, b"", "n1"))
    assert stop.is_set()
    with pytest.raises(SupersededError):
        handler.check()
