"""Readings of the load at intervals."""

import asyncio
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from coordinator.observe import load_sampler
from coordinator.observe.load_history import LoadHistory, LoadReading, NodeLoad
from coordinator.observe.load_sampler import read_load, sample_load
from tests.support.cluster.cluster_port import a_report, opened
from tests.support.cluster.loopback_cluster import a_memory
from wire.frames import Admitted, Generate
from wire.units import GIB


async def test_a_reading_has_requests_and_memory_of_each_member(tmp_path: Path):
    async with opened(tmp_path) as port:
        who = port.member("studio")
        memory = replace(a_memory(3 * GIB, 24 * GIB), ceiling=20 * GIB, phys=1)
        line = await port.link(who, a_report(memory=memory))
        await port.until(lambda: port.state(who) == "ready")
        async with port.client("infer") as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            generate = await line.until(Generate)
            line.send(Admitted(generate.request, 10))
            load = read_load(port.application.registry, port.application.dispatcher, 7.0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    assert (load.at, load.queued, load.requests) == (7.0, 0, 0)
    expected = NodeLoad(in_flight=1, memory=memory.current, cap=24 * GIB)
    assert load.nodes == {who.node: expected}


async def test_readings_continue_after_failures_of_which_the_first_in_a_row_is_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_sampler, "INTERVAL_SECONDS", 0.0)
    history = LoadHistory()
    works = iter((False, False, True, True, False))

    def read(at: float) -> LoadReading:
        if not next(works, None):
            raise OSError("no reading")
        return LoadReading(at, {})

    with structlog.testing.capture_logs() as logs:
        sampling = asyncio.create_task(sample_load(history, read))
        async with asyncio.timeout(5):
            while len(logs) < 2:  # noqa: ASYNC110  the sampler has no event
                await asyncio.sleep(0)
        sampling.cancel()
    assert [entry["event"] for entry in logs] == ["load not read"] * 2
    assert history.to_row()["number"] == 0, "two readings make one point"
