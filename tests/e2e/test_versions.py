"""Versions N and N-1 together: peers with protocol 1 as it was first frozen, and a pool that is upgraded node by
node."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import pytest

from tests.support.cluster.cluster_port import a_report, hello, opened
from tests.support.cluster.older_protocol import FIELDS, OldCoordinator, old_bytes, old_coordinator
from tests.support.processes import NO_TLS, Pool, Process, until
from wire.codec import encode
from wire.frames import (
    Admitted,
    Cancel,
    CountTokens,
    Delta,
    Deltas,
    Finished,
    Generate,
    GenerationParams,
    Goodbye,
    Hello,
    Message,
    Report,
    Welcome,
)
from wire.report import EngineState, Model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
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
        assert before.unknown == [], "no frame is sent that the older version does not know"


async def _served(before: OldCoordinator) -> None:
    before.send(Generate(7, 7, "r", "scripted-1", HI, GenerationParams(max_tokens=4), int(time.time())))
    assert (await before.until(Admitted)).request == 7
    assert (await before.until(Finished)).completion_tokens == 4
    before.send(CountTokens(8, "scripted-1", HI, 0))
    assert (await before.until(Finished)).request == 8
    before.send(Generate(9, 9, "r", "scripted-1", HI, GenerationParams(max_tokens=30_000), int(time.time())))
    await before.until(Deltas)
    before.send(Cancel(9))
    await before.until(Report, lambda one: one.engine.running == 0 and one.acked_seq >= 9)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@dataclass
class Load:
    """Clients that send streams repeatedly, and record how each answer ended."""

    pool: Pool
    ends: list[str] = field(default_factory=list)
    over: bool = False

    def ask(self, tokens: int = 40, begun: Callable[[], object] = lambda: None) -> str:
        """Send one request and return how it ended. `begun` is called at the first bytes.

        `whole`: A complete answer.
        `told`: An error event and no [DONE].
        `refused`: 503 with the seconds to wait.
        `nobody`: No connection and no byte of an answer.
        Any other text describes an unexpected end.
        """
        body = {
            "model": "scripted-1",
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": "hi"}],
        }
        headers = {"Authorization": f"Bearer {self.pool.key}"}
        text, heard = "", False
        try:
            with httpx.stream(
                "POST",
                f"{self.pool.base}/v1/chat/completions",
                json=body,
                headers=headers,
                timeout=60,
                trust_env=False,
                verify=NO_TLS,
            ) as answer:
                heard = True
                for piece in answer.iter_text():
                    text += piece
                    begun()
        except httpx.TransportError as error:
            return f"cut off: {error!r}" if heard else "nobody"
        words = text.count('"content":"') - text.count('"content":""')
        if answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1:
            return "refused"
        if answer.status_code == 200 and words == tokens and text.endswith("data: [DONE]\n\n"):
            return "whole"
        told = answer.status_code == 200 and '"code":"shutting_down"' in text and "[DONE]" not in text
        return "told" if told else f"{answer.status_code} with {words} words: {text[-300:]}"

    def run(self) -> None:
        while not self.over:
            self.ends.append(self.ask())
            if self.ends[-1] != "whole":
                time.sleep(0.05)

    def since(self, first: int) -> set[str]:
        """Return how the answers from this one on ended."""
        return set(self.ends[first:])


def test_a_pool_is_upgraded_in_turns(cluster_pool: Pool, threads: ThreadPoolExecutor) -> None:
    """Upgrades the coordinator first, then each node, under load, as in docs/operations.md."""
    pool = cluster_pool
    pool.up("http.drain_seconds=1")
    for name in ("studio", "mini"):
        pool.join(name, "engine.scripted.step_ms=20")
    load = Load(pool)
    asking = [threads.submit(load.run) for _ in range(3)]
    try:
        until(lambda: len(load.ends) >= 3, what="answers")
        begun = Event()
        long = threads.submit(load.ask, 3000, begun.set)
        assert begun.wait(30)
        restart_the_coordinator(pool, load, long)
        first = len(load.ends) + 3
        for name in ("studio", "mini"):
            until(lambda: pool.node(name)["in_flight"], what=f"{name} at work")  # noqa: B023  asked at once
            assert pool.cli("node", "drain", name, "--wait", "30s")["left"] == 0
            assert pool.nodes[name].stop() == 0
            pool.join(name, "engine.scripted.step_ms=20", token=False)
            pool.cli("node", "uncordon", name)
    finally:
        load.over = True
    for one in asking:
        one.result(60)
    assert load.since(first) == {"whole"}, "while nodes are upgraded no request fails"
    told = pool.cli("version", "--cluster")
    assert [(one["name"], one["ok"], one["protocol"]) for one in told["members"]] == [
        ("studio", True, 1),
        ("mini", True, 1),
    ]
    assert "NEXT STEP" in pool.run("version", "--cluster", "--state", str(pool.state)).stdout


def restart_the_coordinator(pool: Pool, load: Load, long: Future[str]) -> None:
    """Stop the coordinator during requests and start it again.

    A cut answer must end with an error event. Members and engines must be the same afterwards.
    """
    until(lambda: sum(node["running"] for node in pool.nodes_now()) > 1, what="at work")
    members = {node["name"]: node["id"] for node in pool.nodes_now()}
    engines = {name: pool.nodes[name].children() for name in members}
    begun = len(load.ends)
    assert pool.coordinator is not None
    assert pool.coordinator.stop() == 0
    assert long.result(10) == "told", "what is longer than http.drain_seconds ends with an error event"
    pool.up(
        "http.drain_seconds=1",
        listen=pool.base.partition("//")[2],
        cluster_listen=pool.facts["cluster_url"].removeprefix("macpool://"),
    )
    until(lambda: all(pool.serves(name) for name in members), what="nodes back by themselves")
    assert {node["name"]: node["id"] for node in pool.nodes_now()} == members
    assert {name: pool.nodes[name].children() for name in members} == engines, "no engine noticed"
    back = len(load.ends)
    until(lambda: "whole" in load.since(back), what="requests work again")
    assert load.since(begun) <= {"whole", "told", "refused", "nobody"}
