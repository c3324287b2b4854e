"""Counts in a scrape of a running coordinator, over its real cluster port, while nodes join, answer and leave."""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from coordinator.alerts.rules import WATCHED
from coordinator.metrics.metrics_source import MetricsSource, NodeUnreachable
from coordinator.models.wish_counters import WishSnapshot
from coordinator.video.metrics import VideoSnapshot
from router.admission.api_keys import KeyRing
from router.dispatch.dispatcher import Dispatcher
from router.settings import RouterSettings
from tests.support.cluster.cluster_port import Line, Port, a_report, hello, opened
from tests.support.cluster.loopback_cluster import a_memory
from tests.support.pictures import view
from wire.certificate import read_certificate
from wire.frames import (
    Admitted,
    Delta,
    Deltas,
    Denied,
    FetchChunk,
    FetchRequest,
    Finished,
    Frame,
    Generate,
    Refusal,
    Welcome,
)
from wire.histogram import GateMeasures, NodeMeasures
from wire.identity import NodeId
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.units import GIB

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


def numbers(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name.removeprefix("macpool_"): float(value) for name, _, value in lines}


async def scrape(port: Port) -> dict[str, float]:
    async with port.client("metrics") as client:
        return numbers((await client.get("/metrics")).raise_for_status().text)


async def linked(port: Port, name: str, **report: Any) -> Line:
    member = port.member(name)
    line = await port.link(member, a_report(**report))
    await port.until(lambda: port.state(member) == "ready")
    return line


def ask(client: httpx.AsyncClient, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | more))


async def chosen(port: Port) -> str:
    """Return the name of the node with the request."""
    dispatcher = port.application.dispatcher
    await port.until(lambda: [ticket for ticket in dispatcher.list_open_requests() if ticket.node])
    return dispatcher.list_open_requests()[0].node_name


async def admitted(line: Line) -> Generate:
    asked = await line.until(Generate)
    line.send(Admitted(asked.request, 7, 3), Deltas((Delta(asked.request, 0, (1, 2), ((0, "hi"),)),)))
    return asked


async def test_a_request_is_counted_once_from_its_arrival_to_its_end(port: Port):
    line = await linked(port, "a")
    async with port.client("infer") as client:
        running = ask(client)
        asked = await admitted(line)
        await port.until(lambda: port.application.dispatcher.counters.first_tokens)
        during = await scrape(port)
        assert during['router_in_flight_requests{node="a"}'] == 1
        reserved = during['router_reserved_bytes{node="a"}']
        assert reserved >= 57 * 64 * 1024, "seven prompt tokens and fifty of an answer, 64 KiB each"
        assert during['cluster_node_headroom_bytes{node="a"}'] == 8 * GIB - reserved
        assert during["router_queue_depth"] == 0
        assert during["router_attempts_total"] == during['router_placements_total{node="a"}'] == 1
        assert during['time_to_first_token_seconds_count{model="tiny"}'] == 1
        assert 'router_requests_total{model="tiny",outcome="ok"}' not in during
        line.send(Finished(asked.request, ("stop",), 7, 2, cached_tokens=3))
        assert (await running).status_code == 200
    after = await scrape(port)
    assert 0 < after["router_placement_seconds_sum"] < 1
    expected = {
        'router_in_flight_requests{node="a"}': 0,
        'router_reserved_bytes{node="a"}': 0,
        "router_attempts_total": 1,
        "router_retries_total": 0,
        "router_requests_resumed_total": 0,
        "router_requests_lost_total": 0,
        "router_queue_depth": 0,
        'router_requests_total{model="tiny",outcome="ok"}': 1,
        'router_http_responses_total{code="200"}': 1,
        'e2e_request_latency_seconds_count{model="tiny"}': 1,
        'prompt_tokens_total{model="tiny"}': 7,
        'cached_prompt_tokens_total{model="tiny"}': 3,
        'generation_tokens_total{model="tiny"}': 2,
        'cluster_node_prompt_tokens_total{node="a"}': 7,
        'cluster_node_generation_tokens_total{node="a"}': 2,
        'key_tokens_total{key="test",model="tiny"}': 9,
        "router_reservation_leaks": 0,
        "router_placement_seconds_count": 1,
        "request_queue_time_seconds_count": 0,
    }
    assert {name: after[name] for name in expected} == expected


async def test_a_waiting_request_is_in_the_depth_and_its_wait_in_the_histogram(port: Port):
    line = await linked(port, "a", memory=a_memory(1024))
    async with port.client("infer") as client:
        running = ask(client)
        await port.until(lambda: port.application.dispatcher.count_queued() == 1)
        began = port.application.dispatcher.get_time()
        during = await scrape(port)
        assert during["router_queue_depth"] == 1
        assert 0 < during["router_queue_oldest_seconds"] < 10
        assert during["router_queue_limit"] == port.application.dispatcher.queue.compute_limit(1) > 1
        assert during["request_queue_time_seconds_count"] == 0
        line.send(a_report(2))
        asked = await admitted(line)
        waited = port.application.dispatcher.get_time() - began
        line.send(Finished(asked.request, ("stop",), 7, 2))
        await running
    after = await scrape(port)
    assert (after["router_queue_depth"], after["router_queue_oldest_seconds"]) == (0, 0)
    assert after["request_queue_time_seconds_count"] == 1
    assert 0 < after["request_queue_time_seconds_sum"] < waited + 1
    assert after["router_attempts_total"] == 1


async def test_a_refusal_of_a_node_is_counted_by_its_reason_and_the_next_attempt_is_a_retry(port: Port):
    lines = {name: await linked(port, name) for name in ("a", "b")}
    async with port.client("infer") as client:
        running = ask(client)
        first = await chosen(port)
        asked = await lines[first].until(Generate)
        lines[first].send(Refusal(asked.request, Refused(RefusalCode.NO_ROOM, "a spike", MemoryNumbers(headroom=0)), 7))
        second = lines["b" if first == "a" else "a"]
        again = await admitted(second)
        second.send(Finished(again.request, ("stop",), 7, 2))
        assert (await running).status_code == 200
    found = await scrape(port)
    assert (found["router_attempts_total"], found["router_retries_total"]) == (2, 1)
    assert [found[f'router_placements_total{{node="{name}"}}'] for name in lines] == [1, 1]
    refusals = {name: value for name, value in found.items() if name.startswith("router_node_refusals") and value}
    assert refusals == {'router_node_refusals_total{reason="no_headroom"}': 1}
    assert found['router_requests_total{model="tiny",outcome="ok"}'] == 1


async def test_a_lost_node_is_counted_with_its_requests_and_its_link(port: Port):
    lines = {name: await linked(port, name) for name in ("a", "b")}
    assert (await scrape(port))["cluster_links"] == 2
    async with port.client("infer") as client:
        running = ask(client, stream=True)
        first = await chosen(port)
        await admitted(lines[first])
        await port.until(lambda: port.application.dispatcher.counters.first_tokens)
        lines[first].close()
        second = lines["b" if first == "a" else "a"]
        again = await admitted(second)
        second.send(Finished(again.request, ("stop",), 7, 4))
        assert (await running).status_code == 200
    found = await scrape(port)
    assert (
        found["router_requests_lost_total"],
        found["router_requests_resumed_total"],
        found["router_retries_total"],
    ) == (1, 1, 1)
    assert (found["cluster_links"], found["cluster_node_connections_total"]) == (1, 2)
    assert (found['cluster_nodes{state="ready"}'], found['cluster_nodes{state="lost"}']) == (1, 1)
    assert f'cluster_node_headroom_bytes{{node="{first}"}}' not in found


async def test_link_metrics_count_links_unlinked_and_denied_connections(port: Port):
    member = port.member("a")
    await port.link(member)
    (stranger, denied) = (await port.dial(), await port.dial(member))
    await port.until(lambda: port.application.nodes.server.count_unlinked() == 2)
    found = await scrape(port)
    assert (found["cluster_links"], found["cluster_unauthenticated_connections"]) == (1, 2)
    denied.send(hello(member, protocol=0))
    await denied.until(Denied)
    stranger.close()
    await port.until(lambda: port.application.nodes.server.count_unlinked() == 0)
    found = await scrape(port)
    counts = [
        found[f"cluster_{name}"]
        for name in ("links", "unauthenticated_connections", "node_connections_total", "node_connections_denied_total")
    ]
    assert counts == [1, 0, 1, 1]


async def test_certificates_are_shown_with_begin_and_end(port: Port):
    member = port.member("a")
    await port.link(member)
    found = await scrape(port)
    theirs, ours = read_certificate(member.certificate), port.application.authority
    for name, (issued, expires) in {
        'cluster_node_certificate_{}_timestamp_seconds{{node="a"}}': (theirs.issued, theirs.expires),
        'tls_{}_timestamp_seconds{{certificate="authority"}}': ours.ca_validity,
        'tls_{}_timestamp_seconds{{certificate="coordinator"}}': ours.validity,
    }.items():
        assert (found[name.format("issued")], found[name.format("expires")]) == (issued, expires)
        assert issued < time.time() < expires


async def test_the_process_shows_its_own_numbers(port: Port):
    found = await scrape(port)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert abs(found["process_peak_resident_bytes"] - kilobytes * (1 if os.uname().sysname == "Darwin" else 1024)) < (
        64 * 2**20
    )
    assert found["process_max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = len(os.listdir("/dev/fd"))
    assert abs(found["process_open_fds"] - files) <= 5
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert (await scrape(port))["process_open_fds"] >= found["process_open_fds"] + 15
    finally:
        for file in held:
            os.close(file)
    assert 0 < found["process_cpu_seconds_total"] <= time.process_time()
    assert time.time() - 60 < found["process_start_time_seconds"] < time.time()


async def test_render_node_fetches_metrics_and_fails_for_lost_nodes(port: Port):
    member = port.member("a")
    line = await port.link(member)
    await port.until(lambda: port.state(member) == "ready")
    measures = NodeMeasures(GateMeasures((("prefill", 5),), (("no_headroom", 2),)), 1.5, 77)
    async with port.client("metrics") as client:
        asking = asyncio.create_task(client.get("/prometheus/nodes/a"))
        asked = await line.until(FetchRequest)
        assert asked.source == "metrics"
        line.send(FetchChunk(asked.number, msgspec.msgpack.encode(measures), last=True))
        found = numbers((await asking).text)
        assert found['gate_checks_total{site="prefill"}'] == 5
        assert found['gate_refusals_total{reason="no_headroom"}'] == 2
        assert (found["node_agent_cpu_seconds_total"], found["node_agent_phys_bytes"]) == (1.5, 77)
        assert found['node_info{chip="M4 Max",engine="other",system="macOS 26",tier="other",version="0.1.0"}'] == 1
        (target,) = (await client.get("/prometheus/sd")).json()
        assert target["labels"] == {
            "__metrics_path__": f"/prometheus/nodes/{member.node}",
            "__scheme__": "http",
            "node": "a",
            "instance": "a",
        }
        assert target["targets"] == ["127.0.0.1"]
        line.close()
        await port.until(lambda: port.state(member) == "lost")
        gone = await client.get("/prometheus/nodes/a")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "node_unreachable")
        assert len((await client.get("/prometheus/sd")).json()) == 1, "a lost member stays a target: `up` is 0"


def metrics_of(port: Port, **more: Any) -> MetricsSource:
    made = port.application
    return MetricsSource(
        made.nodes,
        more.get("dispatcher", made.dispatcher),
        KeyRing(b"pepper"),
        "0",
        more.get("lives", dict),
        more.get("conditions", dict),
        more.get("video", VideoSnapshot),
        more.get("wishes", WishSnapshot),
        made.store.count_unwritten,
    )


async def test_node_snapshots_need_a_link_and_a_report(port: Port, monkeypatch: pytest.MonkeyPatch):
    metrics, nodes = metrics_of(port), port.application.nodes
    await linked(port, "silent")
    silent, joining, lost, left = (NodeId("node-1"), *(port.member(name) for name in ("joining", "lost", "left")))
    line = await port.dial(joining)
    line.send(hello(joining))
    await line.until(Welcome)
    gone = await port.link(lost)
    await port.until(lambda: port.state(lost) == "ready")
    gone.close()
    await port.until(lambda: port.state(lost) == "lost")
    nodes.administration.remove_node(left.node)
    monkeypatch.setattr("coordinator.metrics.metrics_source.MEASURES_TIMEOUT_SECONDS", 0.05)
    for node, why in (
        (NodeId("never"), "it is unknown"),
        (joining.node, "it is joining"),
        (lost.node, "it is lost"),
        (left.node, "it is left"),
        (silent, "it did not answer"),
    ):
        with pytest.raises(NodeUnreachable, match=f"^{why}$"):
            await metrics.render_node(node, "")
    assert [picture.view.name for picture in metrics.take_node_snapshots()] == ["silent"]
    targets = [target["labels"]["node"] for target in metrics.list_targets("127.0.0.1", "http")]
    assert targets == ["silent", "joining", "lost"], "a node that left is no target"


async def test_an_open_breaker_is_shown_while_it_is_open(port: Port):
    await linked(port, "a")
    dispatcher = port.application.dispatcher
    (node,) = port.application.registry.pool.members
    now = dispatcher.get_time()
    assert (await scrape(port))['router_breaker_open{node="a"}'] == 0
    for at in range(3):
        dispatcher.breakers.record_fault(node, at, now - 4.0 + 2.0 * at)
    found = await scrape(port)
    assert (found["router_breakers_opened_total"], found['router_breaker_open{node="a"}']) == (1, 1)
    dispatcher.breakers.remove_node(node)
    found = await scrape(port)
    assert (found["router_breakers_opened_total"], found['router_breaker_open{node="a"}']) == (1, 0)
    for at in range(3):
        dispatcher.breakers.record_fault(node, at, now - 1004.0 + 2.0 * at)
    found = await scrape(port)
    assert (found["router_breakers_opened_total"], found['router_breaker_open{node="a"}']) == (2, 0), "its time is over"


async def test_keys_that_open_nothing_are_counted(port: Port):
    before = (await scrape(port))["auth_failures_total"]
    async with port.client_of("mp_abcdefgh_" + "Q" * 43) as client:
        for _ in range(2):
            assert (await client.get("/v1/models")).status_code == 401
    assert (await scrape(port))["auth_failures_total"] == before + 2


async def test_a_node_that_joins_again_has_one_series_next_to_its_former_membership(port: Port):
    former = port.member("a")
    await port.link(former)
    await port.until(lambda: port.state(former) == "ready")
    port.application.nodes.administration.remove_node(former.node)
    again = port.member("a")
    await port.link(again)
    await port.until(lambda: port.state(again) == "ready")
    async with port.client("metrics") as client:
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if 'node="a"' in line]
    names = [line.rpartition(" ")[0] for line in lines]
    assert sorted(set(names)) == sorted(names)
    assert 'macpool_cluster_node_state{node="a",state="ready"} 1.0' in lines
    assert (await scrape(port))['cluster_nodes{state="left"}'] == 1


async def test_every_condition_has_a_series(port: Port):
    found = {name: value for name, value in (await scrape(port)).items() if name.startswith("condition_active")}
    assert found == {f'condition_active{{condition="{rule.name}"}}': 0 for rule in WATCHED}


async def test_metrics_show_a_suspected_failure_of_the_coordinator(port: Port):
    lines = [await linked(port, name) for name in ("a", "b", "c", "d")]
    assert (await scrape(port))["coordinator_self_suspect"] == 0
    for line in lines[:2]:
        line.close()
    await port.until(lambda: port.application.nodes.directory.count_states()["lost"] == 2)
    found = await scrape(port)
    assert (found["coordinator_self_suspect"], found['cluster_nodes{state="lost"}']) == (1, 2)


async def test_the_limit_of_the_queue_grows_with_the_members(port: Port):
    for number in range(40):
        port.member(f"n{number}")
    await port.until(lambda: len(port.application.dispatcher.view.nodes) == 40)
    assert (await scrape(port))["router_queue_limit"] == 4 * 40


async def test_snapshot_reads_certificates_again_after_a_minute(port: Port):
    now, lives = [100.0], {"endpoint": (1.0, 2.0)}
    sent = list[Frame]()
    dispatcher = Dispatcher(
        lambda _, frame: not sent.append(frame), RouterSettings(), numbers=lambda: (1, 1), clock=lambda: now[0]
    )
    metrics = metrics_of(
        port,
        dispatcher=dispatcher,
        lives=lambda: dict(lives),
        video=lambda: VideoSnapshot(used=True, stored_bytes=7),
    )
    picture = metrics.take_node_snapshot(view(port.member("a").node, reported_at=70.0), None)
    assert (round(picture.wall - picture.reported_at, 6), time.time() - picture.wall < 60) == (30.0, True)
    picture = metrics.take_node_snapshot(view(port.member("b").node, reported_at=130.0), None)
    assert picture.reported_at == picture.wall, "no report comes from the future"
    assert metrics.take_snapshot().certificates == {"endpoint": (1.0, 2.0)}
    assert metrics.take_snapshot().video.stored_bytes == 7
    lives["endpoint"] = (3.0, 4.0)
    now[0] += 60.0
    assert metrics.take_snapshot().certificates == {"endpoint": (1.0, 2.0)}
    now[0] += 2.0
    assert metrics.take_snapshot().certificates == {"endpoint": (3.0, 4.0)}


async def test_snapshot_has_memory_and_open_files_of_this_process(port: Port, monkeypatch: pytest.MonkeyPatch):
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    metrics, (soft, hard) = metrics_of(port), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        for platform, unit in (("linux", 1024), ("darwin", 1)):
            monkeypatch.setattr("sys.platform", platform)
            before, process, files = peak(), metrics.take_snapshot().process, len(os.listdir("/dev/fd"))
            assert before * unit <= process.peak_bytes <= peak() * unit
            assert (process.open_files, process.max_files) == (files - 1, soft - 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no file is free, not even for the count
        process = metrics.take_snapshot().process
        assert (process.open_files, process.max_files) == (3, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_snapshot_omits_tokens_of_deleted_keys(port: Port):
    counters = port.application.dispatcher.counters
    counters.get_model("tiny")
    counters.add_key_tokens("gone", "tiny", 5)
    assert counters.keys
    assert metrics_of(port).take_snapshot().counters.keys == {}


async def test_snapshot_has_leaked_reservations_and_the_cpu_time_of_all_threads(port: Port):
    await linked(port, "a")
    (node,) = port.application.registry.pool.members
    before, snapshot, after = time.process_time(), metrics_of(port).take_snapshot(), time.process_time()
    assert snapshot.leaks == 0
    assert before <= snapshot.process.cpu_seconds <= after
    port.application.dispatcher.ledger.reserve(node, 77, 77, 2**20, 1, 0, 0.0, 1)
    assert metrics_of(port).take_snapshot().leaks == 1
