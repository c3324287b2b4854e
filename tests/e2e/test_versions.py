"""N and N-1 side by side: peers that speak protocol 1 as it was frozen first, and a pool that is upgraded in turns."""

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.cluster_port import a_report, hello, opened
from tests.support.older import FIELDS, OldCoordinator, old_bytes, old_coordinator
from tests.support.processes import Pool, Process, until
from wire.codec import encode
from wire.frames import (
    Admitted,
    Cancel,
    Count,
    Delta,
    Deltas,
    Finished,
    Generate,
    Goodbye,
    Hello,
    Message,
    Params,
    Report,
    Welcome,
)
from wire.report import EngineState, Model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
HI = (Message("user", "hi"),)


def test_the_frozen_peers_know_less_than_we_do() -> None:
    assert FIELDS[Report] == 7
    assert FIELDS[Hello] == 8
    assert FIELDS[Welcome] == 6
    assert FIELDS[Model] < 20
    assert FIELDS[EngineState] < 10
    assert len(old_bytes(a_report())) < len(encode(a_report()))


async def test_a_node_of_the_version_before_serves_under_a_new_coordinator(tmp_path: Path) -> None:
    async with opened(tmp_path) as port:
        who = port.member("studio")
        line = await port.dial(who)
        line.send(old_bytes(hello(who, version="0.0.9")))
        await line.until(Welcome)
        line.send(old_bytes(a_report()))
        await port.until(lambda: port.state(who) == "ready")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        async with port.client("infer") as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            asked = await line.until(Generate)
            for frame in (
                Admitted(asked.request, 3),
                *(Deltas((Delta(asked.request, 0, (1,), ((0, f"w{number} "),)),)) for number in range(3)),
                Finished(asked.request, ("length",), 3, 3),
            ):
                line.send(old_bytes(frame))
            answer = await asyncio.wait_for(asking, 20)
        assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 "
        (node,) = (await port.get("/api/v1/nodes"))["nodes"]
        assert (node["version"], node["protocol"], node["sharing"]["when"]) == ("0.0.9", 1, "")
        async with port.client("admin") as client:
            paused = await client.post(f"/api/v1/nodes/{who.node}/pause", json={})
            assert paused.status_code == 503
            assert "cannot be paused from here" in paused.json()["error"]["message"]
        line.send(old_bytes(Goodbye("stopping")))
        await port.until(lambda: port.state(who) == "lost")


async def test_a_new_node_serves_under_a_coordinator_of_the_version_before(tmp_path: Path) -> None:
    async with old_coordinator(tmp_path) as before:
        state = before.node("studio")
        command = [sys.executable, "-P", "-m", "node.run", "--state", str(state)]
        settings = ("engine.kind=scripted", "engine.scripted.step_ms=5", "node.machine=studio")
        words = [word for one in settings for word in ("--set", one)]
        node = Process([*command, *words], tmp_path / "node.err")
        try:
            await before.ready()
            await _served(before)
        finally:
            node.close()
        assert before.unknown == [], "nothing is said that was not understood then"


async def _served(before: OldCoordinator) -> None:
    before.send(Generate(7, 7, "r", "scripted-1", HI, Params(max_tokens=4), int(time.time())))
    assert (await before.until(Admitted)).request == 7
    assert (await before.until(Finished)).completion_tokens == 4
    before.send(Count(8, "scripted-1", HI, 0))
    assert (await before.until(Finished)).request == 8
    before.send(Generate(9, 9, "r", "scripted-1", HI, Params(max_tokens=30_000), int(time.time())))
    await before.until(Deltas)
    before.send(Cancel(9))
    await before.until(Report, lambda one: one.engine.running == 0 and one.acked_seq >= 9)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_a_pool_is_upgraded_in_turns_and_no_request_fails(cluster_pool: Pool, threads: ThreadPoolExecutor) -> None:
    pool = cluster_pool
    pool.up()
    for name in ("studio", "mini"):
        pool.join(name, "engine.scripted.step_ms=20")
    stop = list[bool]()

    def load() -> list[tuple[int, int, str]]:
        """Ask again and again, streamed; give status, words and the last line of each answer."""
        found = list[tuple[int, int, str]]()
        headers = {"Authorization": f"Bearer {pool.key}"}
        body = {
            "model": "scripted-1",
            "stream": True,
            "max_tokens": 40,
            "messages": [{"role": "user", "content": "hi"}],
        }
        with httpx.Client(trust_env=False, timeout=60, headers=headers) as client:
            while not stop:
                answer = client.post(f"{pool.base}/v1/chat/completions", json=body)
                words = answer.text.count('"content":"') - answer.text.count('"content":""')
                found.append((answer.status_code, words, answer.text.rstrip()[-12:]))
        return found

    asking: list[Future[list[tuple[int, int, str]]]] = [threads.submit(load) for _ in range(3)]
    try:
        for name in ("studio", "mini"):
            until(lambda: pool.node(name)["in_flight"], what=f"{name} at work")  # noqa: B023  asked at once
            assert pool.cli("nodes", "drain", name, "--wait", "30s")["left"] == 0
            assert pool.nodes[name].stop() == 0
            pool.join(name, "engine.scripted.step_ms=20", token=False)
            pool.cli("nodes", "uncordon", name)
    finally:
        stop.append(True)
    answers = [one for each in asking for one in each.result(60)]
    assert set(answers) == {(200, 40, "data: [DONE]")}
    assert len(answers) > 4
    told = pool.cli("version", "--cluster")
    assert [(one["name"], one["ok"], one["protocol"]) for one in told["members"]] == [
        ("studio", True, 1), ("mini", True, 1),
    ]  # fmt: skip
    assert "WHAT TO DO" in pool.run("version", "--cluster", "--state", str(pool.state)).stdout
