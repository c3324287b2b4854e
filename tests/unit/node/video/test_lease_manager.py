"""Leases from grant to end with a real engine process, without a worker or with its stand-in.

Checked are the released memory, the frames to the coordinator, and the files.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from node.memory.limits import LeaseHolder, Limiter
from node.memory.sensor import list_group_members, read_process_identity
from node.video import lease_granter, lease_manager
from node.video.lease_rules import LeaseLedger, LeasePhase, LeaseRecord, WorkerGroup
from node.video.worker.lease_files import CLAIM, GRANT, LeaseGrant, read_grant
from tests.support.readings import failing
from tests.support.video.standin import standin
from tests.support.video.studio import JOB, LEASE, Node
from tests.unit.node.video.test_packages import package
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused
from wire.units import GIB
from wire.video import Artifact

Make = Callable[..., Awaitable[Node]]
MODEL = "wan"


def settings(folder: Path, **more: object) -> dict[str, Any]:
    """Return the settings of a node with one video package, the stand-in's environment and a pretended Mac of 128
    GiB."""
    environments = folder / "environments"
    return {
        "engine.kind": "scripted",
        "memory.cap": "90GiB",
        "memory.margin": "1GiB",
        "models.use_huggingface_cache": False,
        "models.folders": str(folder / "packages"),
        "worker.environments": str(environments),
        "worker.start_timeout_seconds": 20,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Node] = []
    package(tmp_path / "packages" / MODEL)
    standin(tmp_path)

    async def start(*, attends: bool = False, **more: object) -> Node:
        made.append(Node(tmp_path / "node", settings(tmp_path, **more), attends=attends, model=MODEL))
        return await made[-1].start()

    yield start
    for one in made:
        await one.stop()


def kinds(node: Node, lease: str = "l-1") -> list[type]:
    """Return the kinds of the frames about a lease in their order."""
    return [type(frame) for frame in node.frames if getattr(frame, "lease", "") == lease]


def place(node: Node, lease: str = "l-1.1") -> Path:
    return node.folder / "node" / "video" / "leases" / lease


async def test_a_grant_lowers_the_ceiling_by_the_lease_and_its_end_gives_it_back_once(make: Make, tmp_path: Path):
    node = await make()
    before = node.ceiling
    node.ask()
    granted = await node.frame(LeaseGranted)
    assert (granted.generation, granted.folder) == (1, str(place(node)))
    assert node.ceiling == before - LEASE
    assert node.lender.holding
    (state,) = node.lender.list_states()
    assert (state.lease, state.job, state.size, state.phase, state.progress) == (
        "l-1",
        "video_l-1",
        LEASE,
        LeasePhase.GRANTED,
        0,
    )
    report = node.supervisor.reports.latest
    assert report is not None
    assert (report.memory.leases, report.memory.ceiling) == (LEASE, before - LEASE), "the engine judges by it already"
    grant = read_grant(place(node))
    assert isinstance(grant, LeaseGrant)
    assert (grant.lease, grant.generation, grant.size) == ("l-1", 1, LEASE)
    assert (grant.job["out"], grant.job["wire"]) == (str(place(node) / "out"), True)
    assert grant.job["package"] == str(tmp_path / "packages" / MODEL)
    assert {grant.environment[name] for name in ("HOME", "TMPDIR")} == {str(place(node) / "scratch")}
    told = node.supervisor.orders.limits_number
    node.release("cancelled")
    await node.until(lambda: not node.limiter.leases)
    (state,) = node.lender.list_states()
    assert (state.size, state.phase) == (0, LeasePhase.ENDING), "its memory is returned before its folder is cleaned"
    ended = await node.ended()
    assert node.supervisor.orders.limits_number == told + 1, (
        "the engine has its ceiling back before the end is reported"
    )
    assert (ended.code, ended.message, ended.peak, ended.artifacts) == (
        "cancelled",
        "the coordinator ended the lease",
        0,
        (),
    )
    assert (node.ceiling, node.limiter.leases, node.limiter.worker) == (before, 0, None)
    (state,) = node.lender.list_states()
    assert (state.size, state.phase, state.progress) == (0, LeasePhase.ENDED, 100)
    assert not (place(node) / GRANT).exists(), "no worker may start the job"
    node.release("acknowledged")
    assert node.lender.list_states() == ()
    assert not place(node).exists()
    assert kinds(node) == [LeaseGranted, LeaseEnded]


async def test_a_worker_wires_no_memory_if_the_settings_forbid_it_and_may_lease_most_of_the_memory(make: Make):
    node = await make(memory__wire="off")
    node.ask(size=60 * GIB)
    assert isinstance(await node.answer(), LeaseGranted)
    grant = read_grant(place(node))
    assert grant is not None
    assert grant.job["wire"] is False


async def test_a_repeated_lease_request_is_answered_again_and_granted_once(make: Make):
    node = await make()
    node.ask()
    await node.frame(LeaseGranted)
    node.ask()
    assert kinds(node) == [LeaseGranted, LeaseGranted]
    assert node.limiter.leases == LEASE
    node.release("cancelled")
    await node.ended()
    node.ask()
    node.release("cancelled")
    node.lender.resend_ends()
    assert kinds(node)[2:] == [LeaseEnded] * 4, "an end is sent until it is acknowledged, on a new link too"
    assert node.limiter.leases == 0


async def test_a_second_lease_is_refused_while_one_is_held_and_granted_afterwards(make: Make):
    node = await make()
    node.ask()
    await node.frame(LeaseGranted)
    node.ask(lease="l-2")
    refused = await node.frame(LeaseRefused, "l-2")
    assert (refused.code, refused.retry_after, refused.need) == ("lease_held", 30.0, LEASE)
    assert "video_l-1" in refused.message
    assert node.limiter.leases == LEASE
    node.release("cancelled")
    await node.ended()
    node.ask(size=GIB, lease="l-2")
    await node.frame(LeaseGranted, "l-2")
    assert node.limiter.leases == GIB
    node.release("", "l-2")
    assert (await node.ended("l-2")).code == "released", "an order without a cause"


async def test_a_release_of_an_unknown_lease_is_answered_and_an_acknowledgement_is_not(make: Make):
    node = await make()
    node.release("cancelled")
    ended = await node.ended()
    assert (ended.code, ended.generation) == ("worker_lost", 1)
    node.release("acknowledged", "l-2")
    assert kinds(node, "l-2") == []


@pytest.mark.parametrize(
    ("ask", "code", "words"),
    [
        ({"size": 90 * GIB}, "lease_too_large", "the cap of 90.0 GiB leaves"),
        ({"size": 0}, "invalid_request", "0 bytes"),
        ({"lease": "../l"}, "invalid_request", "1 to 96 letters"),
        ({"model": "absent", "size": 88 * GIB}, "video_not_ready", "this node has no such package"),
    ],
)
async def test_a_refused_lease_takes_nothing(make: Make, ask: dict[str, Any], code: str, words: str):
    """A reason that the end of requests cannot change is named even if the lease does not fit now."""
    node = await make()
    before = node.ceiling
    node.ask(**ask)
    refused = await node.answer(ask.get("lease", "l-1"))
    assert isinstance(refused, LeaseRefused)
    assert refused.code == code
    assert words in refused.message
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())


@pytest.mark.parametrize(("preload", "use"), [("", "in use"), ("scripted-1", "preloaded")])
async def test_a_refused_lease_names_what_it_waits_for_and_restores_the_ceiling(
    make: Make, preload: str, use: str, monkeypatch: pytest.MonkeyPatch
):
    node = await make(engine__scripted__weights="80GiB", models__preload=preload)
    ordered, free = list[int](), node.supervisor.orders.free_memory
    monkeypatch.setattr(node.supervisor.orders, "free_memory", lambda size: ordered.append(size) or free(size))
    node.chat(1)
    await node.until(
        lambda: node.supervisor.reports.latest and any(one.loaded for one in node.supervisor.reports.latest.models)
    )
    before = node.ceiling
    node.ask(size=20 * GIB)
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("no_headroom", 5.0)
    assert refused.headroom is not None
    assert 0 < refused.headroom < 20 * GIB
    assert f"scripted-1 ({use})" in refused.waiting_for
    assert node.supervisor.reports.freed_order == 1, "the engine was asked once to free memory"
    assert ordered == [20 * GIB], "the engine counts its free memory itself"
    assert (node.ceiling, node.limiter.leases) == (before, 0)
    node.limiter.begin_lease(GIB, LeaseHolder.QUANTIZATION)
    node.ask(size=20 * GIB, lease="l-2")
    refused = await node.answer("l-2")
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "lease_held", "the end of the other lease is awaited first"


async def test_a_lease_is_refused_at_once_while_the_engine_cannot_be_read(make: Make):
    node = await make()
    assert node.supervisor.child is not None
    failing(node.supervisor.child.sensor).fails = True
    node.ask()
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.headroom, refused.waiting_for) == (
        "memory_unreadable",
        None,
        "a reading of the engine's footprint",
    )
    assert node.supervisor.reports.freed_order == 0, "free memory would not help"


async def test_memory_that_is_leased_to_a_quantization_is_not_leased_to_a_video(make: Make):
    node = await make()
    node.limiter.begin_lease(3 * GIB, LeaseHolder.QUANTIZATION)
    before = node.ceiling
    node.ask()
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("lease_held", 30.0)
    assert refused.message == "this node has leased 3.0 GiB to a quantization: one lease at a time"
    assert (node.ceiling, node.limiter.leases, node.limiter.holder) == (before, 3 * GIB, LeaseHolder.QUANTIZATION)
    node.limiter.end_lease()
    node.ask(lease="l-2")
    assert isinstance(await node.answer("l-2"), LeaseGranted)


async def test_a_lease_whose_folder_cannot_be_created_is_refused_and_takes_nothing(make: Make):
    node = await make()
    before = node.ceiling
    place(node).write_text("a file in its place")
    node.ask()
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("disk_full", 60.0)
    assert refused.message.startswith("the folder of the job cannot be created: ")
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())
    node.ask(lease="l-2")
    assert isinstance(await node.answer("l-2"), LeaseGranted)


@pytest.mark.parametrize(
    ("happen", "code", "message"),
    [
        (
            lambda node: node.studio.offer.set_unready("the environment is gone"),
            "video_not_ready",
            "wan cannot be used on this node: this node has no such package",
        ),
        (
            lambda node: node.studio.pause("its owner uses it"),
            "node_paused",
            "this node accepts no leases: its owner uses it",
        ),
    ],
    ids=["package", "pause"],
)
async def test_an_obstacle_that_arises_while_the_ceiling_is_lowered_refuses_the_lease(
    make: Make, monkeypatch: pytest.MonkeyPatch, happen: Callable[[Node], None], code: str, message: str
):
    node, begin = await make(), Limiter.begin_lease
    before = node.ceiling

    def begin_lease(limiter: Limiter, size: int, holder: LeaseHolder) -> None:
        begin(limiter, size, holder)
        happen(node)

    monkeypatch.setattr(Limiter, "begin_lease", begin_lease)
    node.ask()
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.message) == (code, message)
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())


async def test_an_unexpected_error_refuses_the_lease_and_takes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch):
    node = await make()
    before = node.ceiling
    with monkeypatch.context() as patch:
        patch.setattr(lease_granter, "build_worker_environment", lambda *_: {}[""])
        node.ask()
        refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("video_not_ready", 60.0)
    assert refused.message == "the node could not grant the lease (KeyError): see its log"
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())
    node.ask(lease="l-2")
    assert isinstance(await node.answer("l-2"), LeaseGranted)


async def test_a_lease_that_cannot_be_stored_is_refused_and_takes_nothing(make: Make):
    """A restarted agent would not know such a lease, and would give its memory away while its worker runs."""
    node = await make()
    before, file = node.ceiling, place(node).parent / "leases.json"
    file.unlink(missing_ok=True)
    file.mkdir()
    node.ask()
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("disk_full", 60.0)
    assert refused.message == "the lease cannot be stored on this node"
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())
    file.rmdir()
    node.ask(lease="l-2")
    assert isinstance(await node.answer("l-2"), LeaseGranted)


async def test_an_engine_that_does_not_confirm_the_lower_ceiling_gets_it_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.memory.lessor.CONFIRM_TIMEOUT_SECONDS", 0.3)
    node = await make()
    before, engine = node.ceiling, psutil.Process(node.supervisor.pid)
    engine.suspend()
    node.ask()
    refused = await node.answer()
    engine.resume()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.retry_after) == ("engine_silent", 5.0)
    assert refused.message.startswith("the engine did not confirm the lower ceiling within ")
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())


async def test_a_paused_node_grants_no_lease_and_keeps_the_one_it_has(make: Make, monkeypatch: pytest.MonkeyPatch):
    node, offers = await make(), list[bool]()
    monkeypatch.setattr(node.studio.ray, "set_offered", lambda *, wanted: offers.append(wanted))
    node.ask()
    await node.frame(LeaseGranted)
    node.studio.pause("its owner uses it")
    assert node.limiter.leases == LEASE
    assert offers[-1], "Ray must start the worker of the lease"
    node.ask(lease="l-2")
    refused = await node.frame(LeaseRefused, "l-2")
    assert (refused.code, refused.message) == ("node_paused", "this node accepts no leases: its owner uses it")
    node.lender.end("its owner uses it")
    ended = await node.ended()
    assert (ended.code, ended.message) == ("node_paused", "its node stopped sharing: its owner uses it")
    assert not offers[-1]
    node.studio.pause("")
    assert offers[-1]
    node.ask(lease="l-3")
    assert isinstance(await node.answer("l-3"), LeaseGranted)


async def test_an_actor_that_cannot_start_ends_its_lease_and_no_other(make: Make):
    node = await make()
    node.ask()
    await node.frame(LeaseGranted)
    node.lender.handle_failed_start("l-9", "another one")
    assert node.lender.holding
    node.lender.handle_failed_start("l-1", "ray has no room")
    ended = await node.ended()
    assert (ended.code, ended.message) == ("start_failed", "ray has no room")
    assert node.limiter.leases == 0


async def test_a_lease_that_no_worker_takes_up_ends_at_its_start_timeout(make: Make):
    node = await make(worker__start_timeout_seconds=1, worker__terminate_grace_seconds=0)
    node.ask()
    ended = await node.ended()
    assert ended.code == "start_failed"
    assert "no worker was started within 1 s" in ended.message
    assert node.limiter.leases == 0


async def test_a_node_that_stops_ends_its_lease_first_and_grants_no_other(make: Make):
    node = await make()
    node.ask()
    await node.frame(LeaseGranted)
    await node.lender.stop()
    ended = await node.ended()
    assert (ended.code, ended.message) == ("node_stopping", "this node is stopping")
    node.ask(lease="l-2")
    refused = await node.frame(LeaseRefused, "l-2")
    assert refused.code == "node_stopping"
    assert node.limiter.leases == 0


async def test_a_restarted_agent_ends_the_lease_that_it_finds_and_grants_others(make: Make, tmp_path: Path):
    leases = tmp_path / "node" / "node" / "video" / "leases"
    for name in ("l-1.1", "forgotten.1"):
        (leases / name / "scratch").mkdir(parents=True)
    (leases / "l-1.1" / GRANT).write_text("{}")
    done = LeaseEnded("l-0", 4, "completed", peak=7)
    ledger = LeaseLedger().put(
        LeaseRecord(lease="l-0", generation=4, job="video_l-0", model=MODEL, size=LEASE, ended=done)
    )
    held = LeaseRecord(lease="l-1", generation=1, job="video_l-1", model=MODEL, size=LEASE)
    (leases / "leases.json").write_bytes(msgspec.json.encode(ledger.put(held)))
    node = await make()
    ended = await node.ended()
    assert (ended.code, ended.message) == ("worker_lost", "the node was restarted while the job ran")
    assert node.limiter.leases == 0
    assert not (leases / "l-1.1" / GRANT).exists()
    assert not (leases / "l-1.1" / "scratch").exists()
    assert not (leases / "forgotten.1").exists(), "what nothing names is removed"
    node.frames.clear()
    node.lender.resend_ends()
    assert [frame for frame in node.frames if isinstance(frame, LeaseEnded)] == [done, ended]
    node.ask(lease="l-0", generation=3)
    refused = await node.frame(LeaseRefused, "l-0")
    assert refused.code == "lease_superseded", "the newest generation of a job outlives the agent"
    node.ask(lease="l-2")
    assert isinstance(await node.answer("l-2"), LeaseGranted)


@asynccontextmanager
async def leave_worker(folder: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Start a process as the worker of a lease that an earlier agent has left in `folder`; end it with the context."""
    worker = await asyncio.create_subprocess_exec("/bin/sleep", "600", start_new_session=True)
    group = WorkerGroup(pid=worker.pid, born=read_process_identity(worker.pid) or "")
    held = LeaseRecord(lease="l-1", generation=1, job="video_l-1", model=MODEL, size=LEASE, worker=group)
    leases = folder / "node" / "node" / "video" / "leases"
    leases.mkdir(parents=True)
    (leases / "leases.json").write_bytes(msgspec.json.encode(LeaseLedger().put(held)))
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_a_restarted_agent_ends_the_worker_before_it_returns_the_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps: list[str] = []
    begin, kill, end = Limiter.begin_lease, lease_manager.kill_worker_group, Limiter.end_lease

    def begin_lease(limiter: Limiter, size: int, holder: LeaseHolder) -> None:
        steps.append(f"{holder} takes {size}")
        begin(limiter, size, holder)

    async def kill_worker_group(group: WorkerGroup, grace: float) -> None:
        await kill(group, grace)
        steps.append("its worker has ended")

    def end_lease(limiter: Limiter) -> None:
        steps.append("it returns its memory")
        end(limiter)

    monkeypatch.setattr(Limiter, "begin_lease", begin_lease)
    monkeypatch.setattr(lease_manager, "kill_worker_group", kill_worker_group)
    monkeypatch.setattr(Limiter, "end_lease", end_lease)
    async with leave_worker(tmp_path) as worker:
        node = await make()
        ended = await node.ended()
        assert (ended.code, node.limiter.leases) == ("worker_lost", 0)
        assert steps == [f"{LeaseHolder.VIDEO} takes {LEASE}", "its worker has ended", "it returns its memory"]
        async with asyncio.timeout(20):
            assert await worker.wait() < 0


async def test_a_worker_that_survives_sigkill_keeps_its_lease_and_delays_no_start(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that hangs in the driver of the GPU does not end."""
    monkeypatch.setattr(lease_manager, "RECOVERY_SECONDS", 0.05)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    async with leave_worker(tmp_path) as worker:
        node = await make()
        assert node.limiter.leases == LEASE
        node.ask(lease="l-2")
        refused = await node.frame(LeaseRefused, "l-2")
        assert refused.code == "lease_held"
        worker.kill()
        await worker.wait()
        ended = await node.ended()
        assert (ended.code, node.limiter.leases) == ("worker_lost", 0)
        node.ask(lease="l-3")
        assert isinstance(await node.answer("l-3"), LeaseGranted)


async def test_a_worker_counts_on_its_lease_and_its_clip_is_measured_and_served(make: Make):
    node = await make(attends=True)
    before = node.ceiling
    node.ask(job={**JOB, "prompt": "hold=denoising take=50000000"})
    worker = await node.working()
    await node.until(lambda: node.lender.list_states()[0].footprint > 50_000_000)
    (state,) = node.lender.list_states()
    assert (state.step, state.steps, state.phase) == (1, 4, LeasePhase.DENOISING)
    assert node.lender.compute_report_key() == (("l-1", LeasePhase.DENOISING, 5 + 90 // 4, LEASE),)
    assert state.peak >= state.footprint
    stored = msgspec.json.decode((place(node).parent / "leases.json").read_bytes(), type=LeaseLedger).holding
    assert stored is not None
    assert stored.worker == WorkerGroup(pid=worker, born=read_process_identity(worker)), "a restarted agent ends it"
    assert node.poll.build_system_memory().worker >= 50_000_000
    assert node.limiter.worker == worker
    assert node.ceiling == before - LEASE
    (node.folder.parent / "gates" / str(JOB["seed"])).touch()
    ended = await node.ended()
    assert ended.code == "completed"
    assert ended.peak >= 50_000_000
    (clip,) = ended.artifacts
    file = node.lender.find_artifact(f"artifact:l-1/{clip.name}")
    assert file is not None
    assert (clip.name, clip.size) == ("video.mp4", file.stat().st_size)
    assert node.lender.find_artifact("artifact:l-1/events.jsonl") is None, "only declared artifacts can be fetched"
    assert (node.ceiling, node.limiter.worker) == (before, None)
    assert (place(node) / CLAIM).exists()
    node.release("acknowledged")
    assert node.lender.find_artifact(f"artifact:l-1/{clip.name}") is None


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("worker.job_timeout_seconds", "job_timeout", "the job was not finished after 1 s"),
        ("worker.stall_timeout_seconds", "worker_stalled", "no progress for 1 s"),
    ],
)
async def test_a_worker_has_the_time_of_the_settings(make: Make, setting: str, code: str, words: str):
    node = await make(attends=True, **{setting.replace(".", "__"): 1})
    node.ask(job={**JOB, "prompt": "hold=denoising"})
    ended = await node.ended()
    assert (ended.code, ended.message) == (code, words)
    assert node.limiter.leases == 0


@pytest.mark.parametrize(
    ("limit", "code", "words"),
    [
        ("timeout", "job_timeout", "the job was not finished after 1 s"),
        ("stall", "worker_stalled", "no progress for 1 s"),
    ],
)
async def test_a_job_may_have_less_time_than_the_settings_allow(
    make: Make, limit: str, code: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    living, end = list[tuple[int, ...]](), Limiter.end_lease

    def end_lease(limiter: Limiter) -> None:
        assert limiter.worker is not None
        living.append(list_group_members(limiter.worker))
        end(limiter)

    monkeypatch.setattr(Limiter, "end_lease", end_lease)
    node = await make(attends=True)
    node.ask(job={**JOB, "prompt": "hold=denoising", limit: 1.0})
    ended = await node.ended()
    assert (ended.code, ended.message) == (code, words)
    assert living == [()], "its memory is returned after the end of its processes"


async def test_a_job_that_is_done_without_a_clip_has_failed(make: Make):
    node = await make(attends=True)
    node.ask(job={**JOB, "prompt": "clip=none"})
    ended = await node.ended()
    assert (ended.code, ended.artifacts, ended.made) == ("output_invalid", (), b"")
    assert ended.message == "the worker reported success without a clip"
    assert node.limiter.leases == 0


async def test_a_clip_that_cannot_be_read_ends_its_lease_with_the_reason(make: Make, monkeypatch: pytest.MonkeyPatch):
    def refuse(folder: Path, names: object) -> tuple[Artifact, ...]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(lease_manager, "hash_artifacts", refuse)
    node = await make(attends=True)
    for lease in ("l-1", "l-2"):
        node.ask(lease=lease)
        ended = await node.ended(lease)
        assert (ended.code, ended.artifacts) == ("output_invalid", ())
        assert ended.message == "the clip cannot be read: [Errno 5] Input/output error"
    assert (node.limiter.leases, node.lender.holding) == (0, False)


@pytest.mark.parametrize("killed", ["worker", "parent"])
async def test_a_worker_that_crashes_on_a_full_disk_names_the_disk(
    make: Make, monkeypatch: pytest.MonkeyPatch, killed: str
):
    monkeypatch.setattr("node.video.lease_store.MIN_FREE_DISK_BYTES", 2**62)
    node = await make(attends=True)
    node.ask(job={**JOB, "prompt": "hold=denoising"})
    worker = await node.working()
    if killed == "worker":
        os.killpg(worker, signal.SIGKILL)
    else:
        node.attendants[0].kill()
    ended = await node.ended()
    assert (ended.code, ended.message.partition(": ")[0]) == ("disk_full", "the disk of this node is full")


async def test_a_folder_of_leases_that_cannot_be_used_is_the_reason_why_no_videos_are_made(make: Make, tmp_path: Path):
    folder = tmp_path / "node" / "node" / "video"
    folder.mkdir(parents=True)
    (folder / "leases").write_text("no folder")
    node = await asyncio.wait_for(make(), 20)
    assert "the folder of the leases cannot be used: " in node.studio.offer.unready
    assert node.studio.offer.unready.endswith("; correct that and restart the node")
    assert node.lender.build_video_state().cause == node.studio.offer.unready


async def test_work_that_comes_in_while_the_ceiling_is_lowered_keeps_its_memory(make: Make):
    """The engine reads the request before the lower ceiling. Only the second check of the memory can detect it.

    Two other orders are possible. The first check sees the request, or the engine reads both at once and refuses it.
    """
    for attempt in range(20):
        node = await make(memory__cap="20GiB", engine__scripted__kv_per_token=1024**2)
        before = node.ceiling
        node.chat(1, tokens=10_000)
        node.ask(size=14 * GIB, lease=f"l-{attempt}")
        answer = await node.answer(f"l-{attempt}")
        if isinstance(answer, LeaseGranted):
            await node.until(lambda node=node: node.supervisor.live == set())
        elif answer.message == "requests arrived while the ceiling was lowered":
            break
        else:
            assert (answer.code, node.supervisor.live) == ("no_headroom", {1})
        await node.stop()
    else:
        pytest.fail("the request was never read between the two checks")
    assert (answer.code, answer.need, answer.retry_after) == ("no_headroom", 14 * GIB, 5.0)
    assert answer.waiting_for == "the end of the new requests"
    assert answer.headroom is not None
    assert 0 < answer.headroom < 14 * GIB
    assert (node.ceiling, node.limiter.leases) == (before, 0)
    assert node.supervisor.live == {1}
