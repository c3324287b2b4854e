"""The pool on isolated hosts: a coordinator, two nodes and a client, each with a network of its own.

Cables are cut and hosts lose power here, without a goodbye. Discovery uses multicast.
"""

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from tests.support.cluster.hosts import NET
from tests.support.cluster.lab import WINDOW, WORK, Lab, opened_lab
from tests.support.processes import CLI, environment, pool, until
from tests.support.video.chain import until_ray
from tests.support.video.standin import CLIP, standin
from tests.support.video.studio import words
from wire.identity import SERVICE_TYPE

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

VIDEO = ("video.max_steps=1000",)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with opened_lab() as made:
        yield made


def test_nodes_found_by_bonjour_serve_and_one_loses_power(lab: Lab) -> None:
    lab.up()
    lab.join_all("engine.scripted.step_ms=50", "engine.scripted.max_batch_size=16")
    lengths = [10 + number * 29 % 170 for number in range(32)]
    chats = [lab.chat(1 + number * 53 % 700, tokens) for number, tokens in enumerate(lengths)]
    until(lambda: all(lab.pool.node(name)["running"] for name in ("studio", "macbook")), what="both at work")
    time.sleep(1)
    cut = time.monotonic()
    lab.hosts.power_off(lab.hosts[3])
    early = [lab.chat(5, 5) for _ in range(8)]
    until(lambda: lab.state("macbook") == "suspect", 5, "suspect")
    late = [lab.chat(5, 5) for _ in range(8)]
    assert {chat.result().node for chat in late} == {"studio"}
    until(lambda: lab.state("macbook") == "lost", WINDOW + WORK, "lost")
    assert time.monotonic() - cut < WINDOW + WORK
    answers = [chat.result() for chat in chats]
    for chat, tokens in zip(answers, lengths, strict=True):
        assert (chat.words, chat.end) == (tokens, "data: [DONE]"), "requests of the lost Mac were resumed on the other"
    assert sum(chat.node == "macbook" for chat in answers) >= 8
    for chat in [*answers, *(each.result() for each in early)]:
        # Streams of the lost node have moved by then. A moved stream may wait for a row, and then decodes from the
        # start.
        working = (max(lengths) + chat.words) * 0.05 + 1
        assert chat.node == "studio" or chat.ended < cut + WINDOW + WORK + working, chat
    assert {lab.chat(5, 2).result().node for _ in range(4)} == {"studio"}

    lab.hosts.boot(lab.hosts[3])
    lab.join("macbook", 3, "engine.scripted.step_ms=50", token=False)
    again = [each.result() for each in [lab.chat(5, 20) for _ in range(16)]]
    assert "macbook" in {chat.node for chat in again}
    assert all(chat.words == 20 for chat in again)


def test_of_two_clusters_on_one_network_a_token_joins_its_own(lab: Lab, tmp_path: Path) -> None:
    lab.up()
    with pool(tmp_path) as other, lab.hosts[2].threads(1) as there:
        other.call = lambda ask: there.submit(ask).result()
        other.up(
            "http.tls=off",
            "cluster.name=second",
            listen="0.0.0.0:8080",
            cluster_listen="0.0.0.0:8081",
            bonjour=True,
            wrap=lab.hosts[2].enter(),
        )
        refused = lab.join("macbook", 3, token=False, wait=False)
        assert refused.popen.wait(30) == 2
        error = (lab.pool.folder / "macbook.err").read_text()
        assert "Bonjour found several clusters" in error
        assert {f"{NET}.1:8081", f"{NET}.2:8081"} <= set(error.replace(",", " ").split())
        other.join("mini", wrap=lab.hosts[3].enter(), url=False)
        assert [node["name"] for node in other.nodes_now()] == ["mini"]
        lab.join("macbook", 4)
        assert [node["name"] for node in lab.pool.nodes_now()] == ["macbook"]


@pytest.mark.nightly
def test_short_silence_moves_nothing_and_a_longer_one_only_new_work(lab: Lab) -> None:
    """CI has these tests:

    - `tests/unit/router/placement/test_recovery.py::test_streams_of_a_silent_node_resume_before_it_is_lost`
    - `tests/sim/test_membership.py::test_the_story_ends_as_written`
    """
    lab.up()
    lab.join("studio", 2, "engine.scripted.step_ms=50")
    streams = [lab.chat(5, 240) for _ in range(4)]
    until(lambda: lab.pool.node("studio")["running"] == 4, what="at work")
    assert _states_during_a_cut(lab, 2.0, 3.0) == {"ready"}
    assert "suspect" in _states_during_a_cut(lab, 4.0, 4.0)
    until(lambda: lab.state("studio") == "ready", 5, "back")
    for stream in streams:
        chat = stream.result()
        assert (chat.words, chat.end) == (240, "data: [DONE]")
    assert len(lab.events("node linked")) == 1
    assert lab.pool.node("studio")["engine"]["restarts"] == 0


def _states_during_a_cut(lab: Lab, seconds: float, watch: float) -> set[str]:
    """Cut studio's cable for `seconds`, just after a report, to make its silence as long as the cut.

    Return the states of studio in the `watch` seconds after the cut began.
    """
    until(lambda: lab.pool.node("studio")["heard_seconds"] < 0.1, what="a report")
    lab.hosts.cut(lab.hosts[2])
    mend = threading.Timer(seconds, lab.hosts.restore, [lab.hosts[2]])
    mend.start()
    seen, deadline = set[str](), time.monotonic() + watch
    while time.monotonic() < deadline:
        seen.add(lab.state("studio"))
        time.sleep(0.05)
    mend.join()
    return seen


def test_without_multicast_only_the_address_joins(lab: Lab) -> None:
    lab.up()
    lab.hosts.block_multicast()
    alone = lab.join("studio", 2, wait=False)
    assert alone.popen.wait(20) == 3
    assert "Bonjour found no cluster" in alone.log.read_text()
    assert "cluster join HOST:8081 --token-file" in alone.log.read_text()
    lab.join("studio", 2, url=True)
    chat = lab.chat(5, 3).result()
    assert (chat.node, chat.words) == ("studio", 3)


@pytest.mark.nightly
def test_coordinator_moves_to_another_address_and_nodes_find_it(lab: Lab) -> None:
    """CI has test_the_coordinator_moves_to_another_host_and_the_old_one_is_left_behind, and for the search:

    - `tests/unit/node/agent/test_discovery.py::test_addresses_are_tried_side_by_side`
    - `tests/unit/node/agent/test_enrollment.py::test_addresses_are_remembered_latest_first`
    """
    lab.up()
    lab.join_all()
    lab.hosts.address(lab.hosts[1], f"{NET}.101")
    until(lambda: lab.state("studio") == lab.state("macbook") == "lost", WINDOW + WORK, "both lost")
    lab.both_serve()

    assert lab.pool.coordinator is not None
    assert lab.pool.coordinator.stop() == 0
    lab.hosts.address(lab.hosts[1], f"{NET}.102")
    lab.up()
    assert f"{NET}.102" in lab.pool.facts["cluster_url"]
    lab.both_serve()

    assert lab.pool.nodes["macbook"].stop() == 0
    kept = lab.pool.folder / "macbook" / "node" / "identity" / "identity.json"
    identity = json.loads(kept.read_text())
    kept.write_text(json.dumps({**identity, "addresses": [f"{NET}.{200 + last}:8081" for last in range(16)]}))
    began = time.monotonic()
    lab.join("macbook", 3)
    assert time.monotonic() - began < 20


@pytest.mark.timeout(300)
def test_the_coordinator_moves_to_another_host_and_the_old_one_is_left_behind(lab: Lab, tmp_path: Path) -> None:
    lab.up()
    lab.join_all("engine.scripted.step_ms=50")
    ident = lab.pool.get("/api/v1/status")["cluster"]["id"]
    file = tmp_path / "home.backup"
    assert lab.pool.cli("backup", str(file))["cluster"] == ident
    busy = lab.pool.run("restore", str(file), "--replace", "--state", str(lab.pool.state))
    assert (busy.returncode, "in use by process" in busy.stderr) == (6, True)
    assert lab.pool.coordinator is not None
    assert lab.pool.coordinator.stop() == 0

    lab.move(4)
    told = lab.pool.run("restore", str(file), "--state", str(lab.pool.state))
    assert "cluster up" in told.stdout, told.stderr
    lab.up_on(4)
    lab.both_serve()
    status = lab.pool.get("/api/v1/status")
    assert status["cluster"]["id"] == ident
    chats = [lab.chat(5, 20) for _ in range(4)]
    assert {(one.result().status, one.result().words) for one in chats} == {(200, 20)}, "with the key of before"
    links = [len(lab.events("node linked")), len(lab.events("denied"))]
    assert links == [2, 0]

    lab.move(1)
    lab.up()
    old = lab.pool.coordinator
    assert lab.pool.nodes_now(), "it starts, and has members that are not there"
    lab.move(4)
    assert lab.newest is not None
    assert lab.newest.stop() == 0
    assert old.popen.wait(40) == 6, "a node that searched for its coordinator reached the old one"
    assert "this cluster has moved" in old.log.read_text()
    command = [*lab.hosts[1].enter(), *CLI, "up", "--state", str(lab.pool.folder / "coordinator"), "--no-local-node"]
    again = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=40)
    assert again.returncode == 6
    assert "this cluster has moved" in again.stderr
    lab.up_on(4)
    lab.both_serve(60)
    assert all(node.popen.poll() is None for node in lab.pool.nodes.values())


def test_a_code_is_approved_and_the_bonjour_record_ends_with_the_coordinator(lab: Lab) -> None:
    lab.hosts.add_unreachable(lab.hosts[1], "10.5.0.1")
    lab.up()
    assert lab.pool.facts["cluster_url"] == f"macpool://{NET}.1:8081", "the address of the default route"
    seen = lab.on_client(lambda: asyncio.run(_watch_records()))
    node = lab.join("studio", 2, token=False, wait=False)
    text = until(lambda: "code " in node.log.read_text() and node.log.read_text(), what="a code")
    lab.pool.cli("approve", text.partition("code ")[2][:6])
    until(lambda: lab.pool.serves("studio"), what="studio serves")
    assert lab.pool.coordinator is not None
    lab.pool.coordinator.signal(signal.SIGTERM)
    gone = {name for name, change in seen.result(30) if change is ServiceStateChange.Removed}
    assert any(name.startswith("home-") for name in gone)
    assert lab.pool.coordinator.popen.wait(20) == 0


async def _watch_records() -> list[tuple[str, ServiceStateChange]]:
    """Return the changes of Bonjour records until the coordinator's record is removed. Raise `TimeoutError` after 60 s,
    because a record without a removal notice expires only after minutes."""
    events: list[tuple[str, ServiceStateChange]] = []
    gone = asyncio.Event()

    def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        events.append((name, state_change))
        if name.startswith("home-") and state_change is ServiceStateChange.Removed:
            gone.set()

    zeroconf = AsyncZeroconf()
    browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[heard])
    try:
        async with asyncio.timeout(60):
            await gone.wait()
    finally:
        await browser.async_cancel()
        await zeroconf.async_close()
    return events


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_video_continues_while_the_coordinator_moves_to_another_host(lab: Lab, tmp_path: Path) -> None:
    """CI has these tests, and the move of a pool without a video:

    - `tests/contract/test_video_controller.py::test_this_process_begins_again_and_finds_its_jobs`
    - `tests/unit/coordinator/video/state/test_job_table.py::test_this_process_began_again`
    """
    gate = standin(tmp_path)
    worker = {"worker__environments": str(gate.environments), "worker__ray_ports": 6480}
    lab.up(*VIDEO)
    for name, number in (("studio", 2), ("macbook", 3)):
        lab.join(name, number, *words(**worker, node__report_busy_seconds=0.2))
    for name in ("studio", "macbook"):
        until_ray(lab.pool, name)
    body = {"model": "tiny-wan", "prompt": "hold=denoising", "size": "64x48", "frames": 9, "fps": 8, "seed": 1}
    job = lab.on_client(lambda: lab.ask("POST", "/v1/videos", json=body)).result().json()["id"]

    def phase() -> str:
        return lab.on_client(lambda: lab.ask("GET", f"/v1/videos/{job}")).result().json()["phase"]

    until(lambda: phase() == "denoising", 90, "it is being made")
    (held,) = lab.pool.get("/api/v1/leases")["leases"]
    file = tmp_path / "home.backup"
    lab.pool.cli("backup", str(file))
    assert lab.pool.coordinator is not None
    lab.pool.coordinator.stop()
    lab.move(4)
    assert lab.pool.run("restore", str(file), "--state", str(lab.pool.state)).returncode == 0
    lab.up_on(4, *VIDEO)
    lab.both_serve()
    assert [one["job"] for one in lab.pool.get("/api/v1/leases")["leases"]] == [job]
    gate.open(1)
    seen: list[dict[str, Any]] = []

    def ended() -> bool:
        seen.append(lab.on_client(lambda: lab.ask("GET", f"/v1/videos/{job}")).result().json())
        return seen[-1]["status"] in ("completed", "failed")

    until(ended, 250, "its end")
    found = seen[-1]
    assert found["status"] == "completed", json.dumps(found)
    clip = lab.on_client(lambda: lab.ask("GET", f"/v1/videos/{job}/content")).result()
    assert clip.content == CLIP
    assert lab.pool.node(held["name"])["state"] == "ready"
