"""Reports of a node: their content, and their times on a virtual clock."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node.agent import reporter
from node.agent.disk_meter import measure_disk
from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.agent.reporter import MIN_REPORT_GAP_SECONDS, Reporter, shorten_report
from node.assembly import assemble
from node.illegal_events import IllegalEvents
from node.memory.limits import LeaseHolder, Limiter
from node.memory.sensor import open_machine
from node.models.folders import get_hub_folder
from node.settings import NodeSettings
from node.settings.agent import AgentSettings
from simulation.clock import VirtualLoop
from tests.support.cluster.enrolment import HARDWARE
from tests.support.cluster.model_node import make_identity
from tests.support.cluster.recorded_link import open_recorded_link
from wire.codec import encode
from wire.frames import EngineReport, Report
from wire.report import EngineState, Memory, Model
from wire.units import GIB

BUSY, IDLE = 0.5, 4.0
"""Settings of the node: seconds between two reports."""
TINY = Model("tiny", loaded=True)
ARMED = Memory(cap=20 * GIB, ceiling=20 * GIB, margin=GIB, guard=True)


def build_report(count: int, *loaded: int) -> Report:
    models = tuple(Model(f"model-{number:03}", loaded=number in loaded) for number in range(count))
    return Report(1, Memory(), EngineState("x", "ready"), models)


def list_models(report: Report) -> list[int]:
    return [int(model.name.removeprefix("model-")) for model in report.models]


def test_a_report_has_at_most_so_many_models_and_the_loaded_ones_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reporter, "MAX_MODELS", 4)
    whole = build_report(4, 3)
    assert shorten_report(whole) is whole
    assert list_models(shorten_report(build_report(5, 4, 2))) == [2, 4, 0, 1]


def test_a_report_loses_a_quarter_of_its_models_until_its_bytes_fit(monkeypatch: pytest.MonkeyPatch):
    whole = build_report(16, 15)
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(whole)))
    assert shorten_report(whole) is whole
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(whole)) - 1)
    assert list_models(shorten_report(whole)) == [15, *range(11)]
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(build_report(9, 0))))
    assert list_models(shorten_report(whole)) == [15, *range(8)]
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", 1)
    assert shorten_report(whole).models == ()


class Mac:
    """A node without engine and agent, whose reporter sends to a link that records the frames."""

    def __init__(self, folder: Path, identity: NodeIdentity) -> None:
        settings = NodeSettings(node=AgentSettings(report_busy_seconds=BUSY, report_idle_seconds=IDLE))
        machine = open_machine(settings)
        self.limiter = Limiter(settings, machine, {})
        node = assemble(identity, settings, folder, machine, self.limiter, HARDWARE, version="0")
        self.reports, self.ray = node.supervisor.reports, node.video.ray
        self.links = CoordinatorLinks()
        self.reporter = Reporter(
            settings,
            HARDWARE,
            self.links,
            supervisor=node.supervisor,
            limiter=self.limiter,
            poll=node.poll,
            lease_manager=node.video.lease_manager,
            ray=node.video.ray,
            sharing=node.sharing,
            illegal_events=IllegalEvents(),
        )
        self.link, self.transport = open_recorded_link(self.links)

    def store(self, running: int = 0, waiting: int = 0, *, age: float = 0.0, **fields: Any) -> None:
        """Store a report of the engine that arrived `age` seconds ago."""
        known: dict[str, Any] = {"memory": ARMED, "models": (TINY,), **fields}
        self.reports.store(EngineReport(running=running, waiting=waiting, **known), time.monotonic() - age)

    def take(self) -> Report:
        """Return the next report. There must be one."""
        report = self.transport.frames.get_nowait()
        assert isinstance(report, Report)
        return report


Script = Callable[[Mac], Coroutine[object, object, None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Script], None]:
    """Return a function that runs a script with a node in virtual time."""

    def run_script(script: Script) -> None:
        async def run_all() -> None:
            await script(Mac(tmp_path / "state", make_identity(tmp_path, authority, "n1")))

        authority = ClusterCa(tmp_path / "authority", time.time)

        loop = VirtualLoop()
        try:
            loop.run_until_complete(run_all())
        finally:
            loop.close()

    return run_script


def test_an_idle_node_reports_late_and_a_busy_one_often(run: Callable[[Script], None]):
    """Pings of the coordinator cause the reports of an idle node, which are late here."""

    async def script(mac: Mac) -> None:
        mac.reporter.send()
        await asyncio.sleep(2 * 1.5 * IDLE + 1)
        assert mac.transport.times == pytest.approx([0, 1.5 * IDLE, 3 * IDLE], abs=0.01)
        assert [mac.take().sequence for _ in range(3)] == [1, 2, 3]
        for begin, end in (
            (lambda: mac.store(running=1), mac.store),
            (lambda: mac.store(waiting=1), mac.store),
            (lambda: mac.limiter.begin_lease(GIB, LeaseHolder.VIDEO), mac.limiter.end_lease),
        ):
            begin()
            assert mac.reporter.is_busy()
            began, known = asyncio.get_running_loop().time(), len(mac.transport.times)
            mac.reporter.send()
            await asyncio.sleep(2 * BUSY + 0.1)
            expected = [began, began + BUSY, began + 2 * BUSY]
            assert mac.transport.times[known:] == pytest.approx(expected, abs=0.01)
            end()
            assert not mac.reporter.is_busy()

    run(script)


def test_a_ping_is_repeated_and_answered_at_once_only_after_half_of_the_idle_time(run: Callable[[Script], None]):
    async def script(mac: Mac) -> None:
        mac.reporter.send()
        await asyncio.sleep(IDLE / 2 - 0.1)
        mac.reporter.answer_ping(7)
        await asyncio.sleep(0.2)
        assert len(mac.transport.times) == 1, "the last report is recent"
        mac.reporter.answer_ping(8)
        await asyncio.sleep(0.1)
        assert mac.transport.times[1:] == pytest.approx([IDLE / 2 + 0.1], abs=0.01)
        assert [mac.take().ping for _ in range(2)] == [0, 8]
        await asyncio.sleep(1.5 * IDLE)
        assert mac.take().ping == 8

    run(script)


def test_a_change_is_reported_soon_and_a_change_of_the_models_at_once(run: Callable[[Script], None]):
    async def script(mac: Mac) -> None:
        loop = asyncio.get_running_loop()
        mac.store()
        mac.reporter.send()
        mac.reporter.send_soon()
        await asyncio.sleep(1)
        assert len(mac.transport.times) == 1, "nothing has changed"
        for change, is_seen, gap in (
            (lambda: mac.store(running=1), lambda report: report.engine.running == 1, MIN_REPORT_GAP_SECONDS),
            (lambda: mac.store(waiting=1), lambda report: report.engine.waiting == 1, MIN_REPORT_GAP_SECONDS),
            (lambda: mac.store(acked_seq=9), lambda report: report.acked_seq == 9, MIN_REPORT_GAP_SECONDS),
            (
                lambda: mac.store(memory=replace(ARMED, ceiling=9 * GIB)),
                lambda report: report.memory.ceiling == 9 * GIB,
                MIN_REPORT_GAP_SECONDS,
            ),
            (lambda: mac.ray.set_allowed(on=True), lambda report: report.video.allowed, MIN_REPORT_GAP_SECONDS),
            (lambda: mac.store(models=()), lambda report: report.models == (), 0.0),
            (
                lambda: mac.store(models=(replace(TINY, loaded=False, loading=True),)),
                lambda report: report.models[0].loading,
                0.0,
            ),
            (
                lambda: mac.store(models=(replace(TINY, cause="damaged"),)),
                lambda report: report.models[0].cause == "damaged",
                0.0,
            ),
        ):
            mac.store()
            mac.reporter.send()
            await asyncio.sleep(0.05)
            while not mac.transport.frames.empty():
                mac.take()
            began = loop.time() - 0.05
            change()
            mac.reporter.send_soon()
            await asyncio.sleep(0.3)
            assert mac.transport.times[-1] == pytest.approx(began + (gap or 0.05), abs=0.01)
            assert is_seen(mac.take())
            change()
            mac.reporter.send_soon()
            await asyncio.sleep(0.15)
            assert mac.transport.frames.empty(), "the change is reported once"
        mac.store(running=3)
        await asyncio.sleep(0.2)
        began = loop.time()
        mac.reporter.send_soon()
        await asyncio.sleep(0.05)
        assert mac.transport.times[-1] == pytest.approx(began, abs=0.01), "the last report is older than the gap"

    run(script)


def test_the_memory_is_that_of_the_gate_once_it_has_limits(run: Callable[[Script], None]):
    async def script(mac: Mac) -> None:
        mac.limiter.begin_lease(GIB, LeaseHolder.VIDEO)
        limits = mac.limiter.compute_limits(0)
        without_gate = Memory(
            cap=limits.cap,
            ceiling=limits.ceiling,
            margin=limits.margin,
            bound_by=limits.bound_by,
            guard=limits.guard,
            leases=GIB,
            total=HARDWARE.memory,
        )
        mac.reporter.send()
        mac.store(memory=Memory(total=5))
        mac.reporter.send()
        mac.store(memory=ARMED, age=100.0)
        mac.reporter.send()
        await asyncio.sleep(0.1)
        assert [mac.take().memory for _ in range(2)] == [without_gate, without_gate]
        last = mac.take().memory
        assert replace(last, age=0.0) == ARMED
        assert last.age == pytest.approx(100.0, abs=10.0)

    run(script)


def test_a_node_that_drains_says_so_in_each_report_and_none_is_sent_without_a_link(run: Callable[[Script], None]):
    async def script(mac: Mac) -> None:
        mac.reporter.send()
        mac.reporter.report_draining()
        mac.reporter.send()
        await asyncio.sleep(0.1)
        reports = [mac.take() for _ in range(3)]
        assert [report.draining for report in reports] == [False, True, True]
        assert {report.disk.total for report in reports} == {measure_disk(get_hub_folder(os.environ)).total} != {0}
        mac.links.remove(mac.link)
        mac.reporter.send()
        mac.store(running=1)
        mac.reporter.send_soon()
        await asyncio.sleep(2 * IDLE)
        assert mac.transport.frames.empty()
        _, mac.transport = open_recorded_link(mac.links)
        mac.reporter.send()
        await asyncio.sleep(0.1)
        assert (mac.take().sequence, mac.transport.frames.empty()) == (4, True)

    run(script)
