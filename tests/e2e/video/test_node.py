"""Video on one node: leases, workers, ends of every kind.

The real engine makes the clips from a very small package. Tests of processes and leases use its stand-in.
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from node.memory.sensor import list_group_members, read_process_identity
from node.video.lease_rules import LeaseLedger, LeasePhase, LeaseRecord
from node.video.worker import worker_monitor as watch
from node.video.worker.lease_files import WorkerClaim
from node.video.worker.watchdog_policy import WorkerBounds
from tests import models
from tests.effort import thin_cases
from tests.support.processes import ROOT, environment, until
from tests.support.video import studio
from tests.support.video.standin import standin
from tests.support.video.studio import JOB, LEASE, LONG, Node, flat, spoiled
from wire.capacity.arithmetic import compute_headroom, compute_level
from wire.codec import encode
from wire.frames import LeaseEnded, LeaseGranted, LeaseRefused, LoadModel
from wire.report import MemoryLevel
from wire.units import GIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
Make = Callable[..., Awaitable[Node]]
BACK = 2.0
"""Seconds after the end of a worker within which its lease is back."""


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Node] = []

    async def start(*, attends: bool = True, real: bool = False, **settings: object) -> Node:
        engine = {} if real else {"worker__environments": str(standin(tmp_path).environments)}
        made.append(Node(tmp_path / "node", flat(**(engine | settings)), attends=attends))
        return await made[-1].start()

    yield start
    for one in made:
        await one.stop()


def events(node: Node, lease: str = "l-1.1") -> list[dict[str, object]]:
    """Return the events of a lease's worker."""
    file = node.folder / "node" / "video" / "leases" / lease / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def given_back(node: Node, before: int) -> None:
    """Check that only the end of a lease is left."""
    assert node.ceiling == before
    assert (node.limiter.leases, node.limiter.worker) == (0, None)
    (state,) = node.lender.list_states()
    assert (state.phase, state.size) == (LeasePhase.ENDED, 0)
    assert not (node.folder / "node" / "video" / "leases" / "l-1.1" / "scratch").exists()


# a job


async def test_a_job_is_done_and_its_clip_is_kept_until_it_is_acknowledged(make: Make):
    node = await make(real=True)
    before = node.ceiling
    node.ask()
    assert isinstance(await node.answer(), LeaseGranted)
    assert before - node.ceiling == LEASE
    memory = node.poll.read_memory()
    assert compute_level(memory) is MemoryLevel.OK
    assert (compute_headroom(memory.ceiling, memory.margin, memory.phys, memory.reserved) or -1) >= 0
    ended = await node.ended()
    assert (ended.code, ended.message) == ("completed", "")
    given_back(node, before)
    made = json.loads(ended.made)
    assert (made["width"], made["height"], made["frames"], made["fps"]) == (64, 48, 9, 8.0)
    assert [one.name for one in ended.artifacts] == ["video.mp4", "thumbnail.webp"]
    for one in ended.artifacts:
        file = node.lender.find_artifact(f"artifact:l-1/{one.name}")
        assert file is not None
        assert (file.stat().st_size, hashlib.sha256(file.read_bytes()).digest()) == (one.size, one.sha256)
    for name in ("l-1/../lease.json", "l-1/", "../l-1.1/video.mp4", "l-2/video.mp4"):
        assert node.lender.find_artifact(f"artifact:{name}") is None
    assert 100 * MIB < ended.peak < LEASE
    said = events(node)
    order = [one["event"] for one in said if one["event"] != "beat"]
    assert order[:3] == ["start", "loading", "loaded"], "the wired limit is set before anything is loaded"
    assert said[0]["wired"] == LEASE // 2
    assert said[0]["isolated"] == 1
    known = set(watch.build_worker_environment(dict.fromkeys(watch.KEPT, ""), Path())) | {"LC_CTYPE"}
    assert set(said[0]["names"]) <= known, "a worker gets no environment variable of Macpool"  # type: ignore[arg-type]
    node.lender.resend_ends()
    assert [one for one in node.frames if isinstance(one, LeaseEnded)] == [ended, ended]
    node.release("acknowledged")
    node.release("acknowledged")
    assert [one for one in node.frames if isinstance(one, LeaseEnded)] == [ended, ended], (
        "an acknowledgement has no answer"
    )
    assert node.lender.find_artifact("artifact:l-1/video.mp4") is None
    assert node.lender.list_states() == ()
    leases = node.folder / "node" / "video" / "leases"
    assert list(leases.iterdir()) == [leases / "leases.json"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "code", "word"),
    [("black", "output_invalid", "black"), ("nan", "output_invalid", "Non-finite")],
)
async def test_what_is_no_picture_is_a_failure_and_leaves_no_clip(
    make: Make, tmp_path: Path, how: str, code: str, word: str
):
    """CI has these tests:

    - `tests/unit/node/video/worker/test_worker.py::test_failures_have_names`
    - `tests/e2e/video/test_disk.py::test_a_clip_that_finds_no_room_fails_by_name_and_the_next_one_does`
    """
    node = await make(real=True, models__folders=str(spoiled(tmp_path / "packages", how)))
    before = node.ceiling
    node.ask()
    ended = await node.ended()
    assert (ended.code, ended.artifacts, ended.made) == (code, (), b"")
    assert word in ended.message
    given_back(node, before)
    assert not (node.folder / "node" / "video" / "leases" / "l-1.1" / "out").exists()


@pytest.mark.nightly
async def test_weights_that_are_cut_off_are_refused_or_fail_by_name(make: Make, tmp_path: Path):
    """CI has these tests:

    - `tests/unit/node/video/test_packages.py::test_weights_that_are_not_whole_are_named`
    - `tests/unit/node/video/worker/test_worker.py::test_failures_have_names`
    """
    shutil.copytree(studio.tiny_wan(), tmp_path / "packages")
    node = await make(real=True, models__folders=str(tmp_path / "packages"))
    shutil.rmtree(tmp_path / "packages")
    spoiled(tmp_path / "packages", "cut")
    node.ask()
    ended = await node.ended()
    assert ended.code == "model_invalid"
    assert "SafetensorError" in ended.message
    await node.studio.offer.stop()
    node.studio.offer.start()
    await node.studio.offer.checked.wait()
    node.ask(lease="l-2")
    refused = await node.answer("l-2")
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "video_not_ready"
    (package,) = node.lender.build_video_state().packages
    assert "the file is incomplete: it has" in package.cause


# the watchdog


async def test_a_worker_that_takes_more_than_its_lease_is_killed_within_a_second(make: Make):
    node = await make()
    before = node.ceiling
    node.ask(size=300 * MIB, job={**JOB, "prompt": f"take={400 * MIB} hold=loading"})
    ended = await node.ended()
    assert ended.code == "memory_lease_exceeded"
    assert "of a lease of 300.0 MiB" in ended.message
    assert ended.peak > 300 * MIB
    given_back(node, before)


async def test_a_stalled_worker_that_ignores_sigterm_is_killed(make: Make):
    node = await make(worker__terminate_grace_seconds=0.5)
    before = node.ceiling
    node.ask(job=LONG)
    worker = await node.working()
    os.killpg(worker, signal.SIGSTOP)
    monitor: Any = node.lender._monitor  # pyright: ignore[reportPrivateUsage]  a start may take longer than this limit
    monitor._bounds = WorkerBounds(LEASE, 2.0, 1000.0)
    ended = await node.ended()
    assert ended.code == "worker_stalled"
    assert list_group_members(worker) == ()
    given_back(node, before)


async def test_a_job_ends_at_its_timeout(make: Make):
    node = await make()
    node.ask(job={**LONG, "timeout": 1.0})
    assert (await node.ended()).code == "job_timeout"


async def test_a_worker_whose_footprint_cannot_be_read_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch):
    node = await make()
    node.ask(job=LONG)
    worker = await node.working()
    monkeypatch.setattr(watch, "measure_footprint", lambda pids: None)
    assert (await node.ended()).code == "monitor_failed"
    assert list_group_members(worker) == ()


# ends of every kind, at every phase

PHASES = (LeasePhase.STARTING, LeasePhase.LOADING, LeasePhase.DENOISING, LeasePhase.DECODING, LeasePhase.SAVING)


def held(phase: LeasePhase) -> dict[str, object]:
    """Return a job that stays in a phase."""
    return {**JOB, "prompt": f"hold={phase}"}


KILLS = (
    ("attendant", LeasePhase.DENOISING, "worker_lost", False),
    ("order", LeasePhase.SAVING, "cancelled", False),
    *(("worker", phase, "worker_crashed", False) for phase in PHASES),
    *(("attendant", phase, "worker_lost", False) for phase in PHASES if phase is not LeasePhase.DENOISING),
    ("order", LeasePhase.STARTING, "cancelled", False),
    ("attendant", LeasePhase.DECODING, "worker_lost", True),
    ("worker", LeasePhase.DENOISING, "worker_crashed", True),
)
"""A killed process or an order, the phase, the code, and whether the real engine makes the clip."""


@pytest.mark.parametrize(("victim", "phase", "code", "real"), thin_cases(KILLS, 6, kept=2))
async def test_the_lease_is_released_for_any_killed_process_at_any_time(
    make: Make, phase: LeasePhase, victim: str, code: str, real: bool, capsys: pytest.CaptureFixture[str]
):
    node = await make(real=real)
    before = node.ceiling
    decoded = {**JOB, "frames": 33, "steps": 1}  # takes the engine a while to decode
    node.ask(job=held(phase) if not real else decoded if phase is LeasePhase.DECODING else LONG)
    worker = await node.working(phase)
    began = time.monotonic()
    if victim == "worker":
        os.killpg(worker, signal.SIGKILL)
    elif victim == "attendant":
        node.attendants[0].kill()
    else:
        node.release("cancelled")
    await node.until(lambda: node.limiter.leases == 0)
    seconds = time.monotonic() - began
    assert list_group_members(worker) == ()
    assert (await node.ended()).code == code
    given_back(node, before)
    with capsys.disabled():
        print(f"\n{victim:10} killed while {phase:10} lease back after {seconds:.2f} s", end="")
    assert seconds < BACK + 3, "on a busy machine; at rest it is below 2 s"


@pytest.mark.parametrize("phase", [LeasePhase.DENOISING, *thin_cases([LeasePhase.STARTING, LeasePhase.SAVING], 2)])
async def test_a_killed_agent_takes_the_worker_along_and_its_successor_gives_the_lease_back(
    tmp_path: Path, phase: LeasePhase, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "node"
    settings = flat(worker__environments=str(standin(tmp_path).environments))
    command = [
        sys.executable,
        "-m",
        "tests.support.video.studio_process",
        str(folder),
        json.dumps(settings),
        json.dumps(held(phase)),
    ]
    with subprocess.Popen(  # noqa: ASYNC220  nothing else runs on this loop meanwhile
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        worker = 0
        for line in agent.stdout:
            said = json.loads(line)
            if said["phase"] == phase:
                worker = said["worker"]
                break
        assert list_group_members(worker)
        below = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        began = time.monotonic()
        until(lambda: not list_group_members(worker), what="the end of the worker")
        seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\nagent      killed while {phase:10} worker dead after {seconds:.2f} s", end="")
    assert list_group_members(worker) == ()
    psutil.wait_procs(below, 10)
    node = Node(folder, settings)
    try:
        await node.start()
        ended = await node.ended()
        assert (ended.code, node.limiter.leases) == ("worker_lost", 0)
        assert "restarted" in ended.message
        node.ask(lease="l-2")
        assert isinstance(await node.answer("l-2"), LeaseGranted), "and the next is served"
    finally:
        await node.stop()


async def test_a_worker_that_only_its_claim_knows_of_is_ended_by_the_next_agent(tmp_path: Path):
    """Agent and worker parent were killed at once, before the agent recorded the worker, and the worker hangs."""
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220  it is started at once
    settings = flat(worker__environments=str(standin(tmp_path).environments))
    place = tmp_path / "node" / "node" / "video" / "leases"
    (place / "l-1.1" / "scratch").mkdir(parents=True)
    held = LeaseRecord(lease="l-1", generation=1, job="video_l-1", model="tiny-wan", size=LEASE)
    (place / "leases.json").write_bytes(msgspec.json.encode(LeaseLedger().put(held)))
    claim = WorkerClaim(attendant=1, worker=sleeper.pid, born=read_process_identity(sleeper.pid))
    (place / "l-1.1" / "claim.json").write_bytes(msgspec.json.encode(claim))
    (place / "l-1.1" / "lease.json").write_text("{}")
    node = Node(tmp_path / "node", settings)
    try:
        await node.start()
        assert sleeper.wait(10) == -signal.SIGKILL
        assert (await node.ended()).code == "worker_lost"
        assert sorted(one.name for one in (place / "l-1.1").iterdir()) == ["claim.json"]
        assert node.limiter.leases == 0
    finally:
        await node.stop()


async def test_a_lease_that_no_worker_takes_is_released(make: Make):
    node = await make(attends=False, worker__start_timeout_seconds=1)
    before = node.ceiling
    node.ask()
    ended = await node.ended()
    assert (ended.code, ended.message) == ("start_failed", "no worker was started within 1 s")
    given_back(node, before)


async def test_the_end_of_the_node_ends_the_job_first(make: Make):
    node = await make()
    node.ask(job=LONG)
    worker = await node.working()
    await node.stop()
    assert list_group_members(worker) == ()
    assert (await node.ended()).code == "node_stopping"


# Permissions


async def attend(node: Node, *words: str) -> tuple[int, str]:
    """Start a worker parent with these arguments; return its exit code and its error output."""
    place = node.folder / "node" / "video" / "leases" / "l-1.1"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "node.video.worker.worker_parent",
        str(place),
        *words,
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_a_paused_node_lends_nothing_new_and_ends_what_it_lends_when_its_grace_is_over(make: Make):
    node = await make()
    before = node.ceiling
    node.ask(job=LONG)
    assert isinstance(await node.answer(), LeaseGranted)
    await node.working()
    node.studio.pause("paused by ann")
    node.ask(lease="l-2")
    refused = await node.answer("l-2")
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "node_paused"
    assert "paused by ann" in refused.message
    assert node.lender.holding, "a granted lease continues"
    node.lender.end("paused by ann")
    ended = await node.ended()
    assert ended.code == "node_paused"
    assert "paused by ann" in ended.message
    given_back(node, before)
    node.studio.pause("")
    node.ask(lease="l-3")
    assert isinstance(await node.answer("l-3"), LeaseGranted)


async def test_only_the_granted_generation_gets_a_worker_and_only_once(make: Make):
    node = await make()
    node.ask(generation=1, job=LONG)
    await node.working()
    for words in (("l-1", "0"), ("l-1", "2"), ("l-2", "1")):
        code, said = await attend(node, *words)
        assert (code, "is not granted on this node" in said) == (1, True)
    code, said = await attend(node, "l-1", "1")
    assert (code, "l-1 already has a parent process" in said) == (1, True)
    node.ask(generation=1, job=LONG)
    assert len([one for one in node.frames if isinstance(one, LeaseGranted)]) == 2, "asked again, answered again"
    node.ask(lease="l-2")
    refused = await node.answer("l-2")
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "lease_held"
    node.release("cancelled", generation=7)
    assert node.limiter.leases == LEASE, "an order for another generation ends nothing"
    node.release("cancelled")
    await node.frame(LeaseEnded)
    await node.until(lambda: node.limiter.leases == 0)
    code, said = await attend(node, "l-1", "1")
    assert (code, "is not granted on this node" in said) == (1, True), "a late worker finds no grant"
    node.frames.clear()
    node.ask(generation=0)
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "lease_superseded"


REFUSALS: dict[str, tuple[dict[str, object], tuple[tuple[int, Mapping[str, object], str, str], ...]]] = {
    "guard-off": ({"memory.guard": "off"}, ((LEASE, JOB, "guard_off", "memory.guard is off"),)),
    "no-environment": (
        {"worker.environments": "/nonexistent"},
        ((LEASE, JOB, "video_not_ready", "cluster video install"),),
    ),
    "disabled": ({"worker.enabled": False}, ((LEASE, JOB, "video_not_ready", "worker.enabled"),)),
    "no-package": ({"models.folders": ""}, ((LEASE, JOB, "video_not_ready", "no usable video package"),)),
    "request": (
        {},
        (
            (200 * GIB, JOB, "lease_too_large", "never fit"),
            (0, JOB, "invalid_request", "lease of 0 bytes"),
            (LEASE, {**JOB, "width": 5}, "invalid_request", "width"),
            (LEASE, {**JOB, "shell": "rm"}, "invalid_request", "shell"),
            (LEASE, {"width": 64}, "invalid_request", "prompt"),
        ),
    ),
}
"""Settings of a node, and requests that it refuses: bytes, job, code and a word of the message."""


@pytest.mark.parametrize("case", REFUSALS)
async def test_what_cannot_be_is_refused_by_name_and_takes_nothing(make: Make, case: str):
    settings, requests = REFUSALS[case]
    node = await make(**{key.replace(".", "__"): value for key, value in settings.items()})
    before = node.ceiling
    for number, (size, job, code, word) in enumerate(requests):
        node.ask(size, job, lease=f"l-{number}")
        refused = await node.answer(f"l-{number}")
        assert isinstance(refused, LeaseRefused)
        assert (refused.code, refused.need) == (code, size)
        assert word in refused.message
        assert (node.ceiling, node.lender.list_states()) == (before, ())


async def test_a_lease_is_never_named_like_a_path(make: Make):
    node = await make()
    for lease in ("../x", "a/b", "", "x" * 97, "a\n"):
        node.ask(lease=lease)
        refused = await node.answer(lease)
        assert isinstance(refused, LeaseRefused)
        assert refused.code == "invalid_request", lease


# memory


async def test_a_lease_waits_for_what_is_in_use_and_ends_nothing(make: Make):
    node = await make(memory__cap="20GiB", engine__scripted__kv_per_token=1024**2)
    node.chat(1, tokens=10_000)
    await node.until(
        lambda: (node.supervisor.reports.latest.memory.reserved if node.supervisor.reports.latest else 0) > 8 * GIB
    )
    before = node.ceiling
    node.ask(10 * GIB)
    refused = await node.answer()
    assert isinstance(refused, LeaseRefused)
    assert (refused.code, refused.need, refused.retry_after > 0) == ("no_headroom", 10 * GIB, True)
    assert refused.headroom is not None
    assert refused.headroom < 10 * GIB
    assert "scripted-1 (in use)" in refused.waiting_for
    assert node.ceiling == before
    assert node.supervisor.live == {1}, "the chat request continues"
    node.supervisor.end("the chat is over")
    await node.until(
        lambda: (
            not node.supervisor.live
            and node.supervisor.reports.limits_number >= node.supervisor.orders.limits_number > 0
        )
    )
    node.ask(10 * GIB, lease="l-2")
    began = time.monotonic()
    assert isinstance(await node.answer("l-2"), LeaseGranted)
    assert time.monotonic() - began < 2
    assert before - node.ceiling == 10 * GIB


async def test_the_engine_holds_to_the_lower_ceiling_before_a_lease_is_granted(make: Make):
    node = await make(attends=False)
    engine = psutil.Process(node.supervisor.pid)
    engine.suspend()
    node.ask()
    await node.until(lambda: node.limiter.leases == LEASE)
    assert not [one for one in node.frames if isinstance(one, LeaseGranted)]
    engine.resume()
    assert isinstance(await node.answer(), LeaseGranted)
    assert node.supervisor.reports.limits_number == node.supervisor.orders.limits_number


async def test_an_engine_that_does_not_confirm_gets_its_ceiling_back(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.memory.lessor.CONFIRM_TIMEOUT_SECONDS", 0.3)
    node = await make(attends=False)
    before, engine = node.ceiling, psutil.Process(node.supervisor.pid)
    engine.suspend()
    node.ask()
    refused = await node.answer()
    engine.resume()
    assert isinstance(refused, LeaseRefused)
    assert refused.code == "engine_silent"
    assert (node.ceiling, node.limiter.leases, node.lender.list_states()) == (before, 0, ())


@pytest.mark.parametrize("pinned", [False, True], ids=["idle", "preloaded"])
async def test_an_idle_model_gives_way_to_a_lease_and_a_preloaded_one_does_not(
    make: Make, tmp_path: Path, pinned: bool
):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "large").symlink_to(models.path("llama", trained=False, preset="bench50m"))
    node = await make(
        attends=False,
        engine__kind="mlx",
        models__trial=False,
        models__folders=f"{studio.tiny_wan()},{tmp_path / 'models'}",
        models__profile="off",
        models__preload="large" if pinned else "",
        memory__cap="6GiB",
        memory__margin="64MiB",
        memory__reserve="off",
    )
    if not pinned:
        node.supervisor.send(encode(LoadModel(1, "large")), LoadModel, 1)

    def loaded() -> bool:
        report = node.supervisor.reports.latest
        return report is not None and any(model.loaded for model in report.models if model.name == "large")

    def settled() -> bool:
        memory = node.poll.read_memory()
        return memory.phys is not None and memory.recent <= memory.phys + 4 * MIB

    await node.until(lambda: loaded() and settled())
    memory = node.poll.read_memory()
    room = compute_headroom(memory.ceiling, memory.margin, memory.phys, memory.reserved)
    assert room is not None
    node.ask(room + 64 * MIB)
    answer = await node.answer()
    if pinned:
        assert isinstance(answer, LeaseRefused)
        assert answer.code == "no_headroom"
        assert "large (preloaded)" in answer.waiting_for
        assert loaded()
    else:
        assert isinstance(answer, LeaseGranted)
        assert not loaded()
        assert compute_level(node.poll.read_memory()) is MemoryLevel.OK
