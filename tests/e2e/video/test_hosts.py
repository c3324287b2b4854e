"""Videos on isolated hosts: coordinator, two Macs with different caps and a client, each with a network of its own."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.cluster.hosts import Hosts
from tests.support.cluster.lab import opened_hosts
from tests.support.processes import NO_TLS, Pool, until
from tests.support.video.chain import until_ray
from tests.support.video.standin import CLIP, Gate, standin
from tests.support.video.studio import tiny_wan

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(240)]
LEASE = 36 * 2**30
CAPS = {"studio": 90, "macbook": 60}
WORDS = 20


@dataclass
class Chats:
    """A client that chats, ten times a second at most; `wrong` has the incomplete answers."""

    base: str
    key: str
    whole: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"model": "scripted-1", "max_tokens": WORDS, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"authorization": f"Bearer {self.key}"}
        with httpx.Client(trust_env=False, verify=NO_TLS, timeout=60) as client:
            while not self.stop.wait(0.1):
                answer = client.post(f"{self.base}/v1/chat/completions", json=body, headers=headers)
                if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == WORDS:
                    self.whole += 1
                else:
                    self.wrong.append(answer.text[:300])


@dataclass
class Lab:
    """The coordinator is on the first host, Macs are on the second and third, clients on the fourth."""

    hosts: Hosts
    pool: Pool
    gate: Gate
    stack: ExitStack

    def up(self, **settings: object) -> None:
        local = self.stack.enter_context(self.hosts[1].threads(2))
        self.pool.call = lambda ask: local.submit(ask).result()
        self._local = local
        self.pool.up(
            "http.tls=off",
            *(f"video.{name}={value}" for name, value in settings.items()),
            listen="0.0.0.0:8080",
            cluster_listen="0.0.0.0:8081",
            wrap=self.hosts[1].enter(),
        )
        for number, (name, cap) in enumerate(CAPS.items(), 2):
            self.pool.join(
                name,
                f"memory.cap={cap}GiB",
                "memory.margin=1GiB",
                "models.use_huggingface_cache=false",
                f"models.folders={tiny_wan()}",
                f"worker.environments={self.gate.environments}",
                "engine.scripted.step_ms=10",
                wrap=self.hosts[number].enter(),
                wait=False,
            )
        for name in CAPS:
            until_ray(self.pool, name)

    def video(self, method: str, path: str, **more: Any) -> Any:
        """Send a request about videos from the coordinator's own host, and return the answer."""

        def ask() -> Any:
            headers = {"authorization": f"Bearer {self.pool.key}"}
            with httpx.Client(trust_env=False, verify=NO_TLS, timeout=60) as client:
                return client.request(method, f"{self.pool.base}/v1/videos{path}", headers=headers, **more)

        return self._local.submit(ask).result()

    def begin(self, seed: int) -> str:
        """Start a job that stays in denoising, and wait for that phase."""
        body = {"prompt": "hold=denoising", "size": "64x48", "frames": 9, "fps": 8, "seed": seed}
        name = self.video("POST", "", json=body).json()["id"]
        until(lambda: self.job(name)["phase"] == "denoising", 90, "a job that denoises")
        return name

    def job(self, name: str) -> dict[str, Any]:
        return self.video("GET", f"/{name}").json()

    def lenders(self) -> dict[str, str]:
        """Return the jobs that hold leases, by the name of the node."""
        return {one["name"]: one["job"] for one in self.pool.get("/api/v1/leases")["leases"]}

    def chatting(self) -> Chats:
        """Chat from the client's host until the end of the block."""
        client = self.stack.enter_context(self.hosts[4].threads(1))
        chats = Chats(self.pool.base, self.pool.key)
        self.stack.callback(chats.stop.set)
        self._chatting = client.submit(chats.run)
        until(lambda: chats.whole, what="a chat")
        return chats

    def chatted(self, chats: Chats) -> None:
        chats.stop.set()
        self._chatting.result(60)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with opened_hosts() as (folder, hosts, made, stack):
        yield Lab(hosts, made, standin(folder), stack)


@pytest.mark.nightly
def test_caps_place_two_jobs_and_one_whose_mac_loses_power_is_made_again_on_the_other(lab: Lab) -> None:
    """CI has a host that loses power in tests/e2e/test_hosts.py, and the rules of placement and loss:

    - `tests/unit/coordinator/video/state/test_lease_placement.py::test_choose_node_takes_the_node_with_most_headroom`
    - `tests/unit/coordinator/video/state/test_job_table.py::test_absent_node_ends_its_job_after_the_configured_time`
    """
    lab.up(on_node_loss="requeue", node_loss_timeout_seconds=2)
    chats = lab.chatting()
    first, second = lab.begin(1), lab.begin(2)
    assert lab.lenders() == {"studio": first, "macbook": second}, "the larger cap first"
    for name, cap in CAPS.items():
        assert lab.pool.node(name)["ceiling"] <= cap * 2**30 - LEASE
    before = chats.whole
    lab.hosts.power_off(lab.hosts[3])
    until(lambda: lab.job(second)["status"] == "queued", 40, "the job of the dead Mac in the line again")
    assert lab.lenders() == {"studio": first}, "the memory of the ended lease counts as free"
    lab.gate.open(2)
    lab.gate.open(1)
    for name in (first, second):
        found = until(lambda: done if (done := lab.job(name))["status"] in ("completed", "failed") else None, 60)  # noqa: B023
        assert found["status"] == "completed", json.dumps(found)
        assert lab.video("GET", f"/{name}/content").content == CLIP
    until(lambda: lab.lenders() == {}, 10, "all memory back")
    until(lambda: lab.pool.node("studio")["leases"] == 0, 10, "the node says so as well")
    assert lab.pool.node("studio")["engine"]["restarts"] == 0
    lab.chatted(chats)
    assert chats.wrong == []
    assert chats.whole > before
