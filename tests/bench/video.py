"""Rows of video: cost of a clip in the pool compared with the engine alone, and its effect on chats at the same time.

The engine is the real one on a very small package; most of a clip's time is therefore the start of a process. Rows
about processes and leases alone use its stand-in.
"""

import asyncio
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
from structlog.testing import capture_logs

from node.memory.sensor import list_group_members, measure_footprint
from node.video.lease_rules import LeasePhase
from node.video.worker.worker_monitor import build_worker_environment
from tests import models
from tests.bench.engine.chats import body, chat, words
from tests.bench.row import Row, at_least, at_most, commit, in_turn, ratio_of, spread
from tests.support.processes import ROOT, Pool, environment, pool, until
from tests.support.video.chain import PHASES, RUNNING, VICTIMS, WORKERS, Chain, chain, expected, table
from tests.support.video.standin import standin
from tests.support.video.studio import JOB, LEASE, Node, environments, flat, python, tiny_wan

ROUNDS = 2
CLIP = {**JOB, "frames": 17, "steps": 8}
PORTS = 25_000
WINDOW = 12.0
"""Seconds of chats during a job."""
STREAMS = 4
MIB = 2**20
WORKER = ROOT / "node" / "video" / "worker" / "worker.py"
BARE = """
import json, runpy, sys
job = json.loads(sys.argv[1])
ours = runpy.run_path(sys.argv[2])
import mlx.core as mx
from pathlib import Path
from mflux.models.common.config import ModelConfig
from mflux.models.wan.variants import Wan2_2_TI2V
config = ours["build_package_config"](Path(job["package"]), ModelConfig)
model = Wan2_2_TI2V(model_path=job["package"], model_config=config)
video = model.generate_video(
    seed=job["seed"], prompt=job["prompt"], width=job["width"], height=job["height"], num_frames=job["frames"],
    fps=job["fps"], num_inference_steps=job["steps"],
)
video.save(path=Path(job["out"], "bare.mp4"), overwrite=True)
"""
"""The engine's command as in its own documentation."""


def bench_video(folder: Path) -> list[Row]:
    """Measure every row of video."""
    parts = (bench_lease, bench_clip, bench_beside, bench_chain)
    return [row for number, part in enumerate(parts) for row in part(_place(folder, number))]


def _place(folder: Path, number: int) -> Path:
    place = folder / str(number)
    place.mkdir()
    return place


# Cost of a lease


def bench_lease(folder: Path) -> list[Row]:
    """Measure the grant on a node with a real engine process, and the duration of a breach."""
    with capture_logs():
        granted, back, breach = asyncio.run(_leases(folder))
    words_ = f"{statistics.median(granted) * 1000:.0f} ms ({min(granted) * 1000:.0f} to {max(granted) * 1000:.0f})"
    ends = f"{max(back):.2f} s at most of {len(back)}"
    kills = f"{max(breach):.2f} s at most of {len(breach)}"
    return [
        Row("lease, request to confirmation", "< 200 ms", words_, statistics.median(granted) < 0.2, commit()),
        Row("lease returned after the worker's end", "<= 2 s", ends, max(back) <= 2, commit()),
        Row("worker over its lease, until all its processes have ended", "<= 1 s", kills, max(breach) <= 1, commit()),
    ]


async def _leases(folder: Path) -> tuple[list[float], list[float], list[float]]:
    settings = flat(worker__environments=str(standin(folder).environments))
    node = await Node(folder / "node", settings).start()
    granted: list[float] = []
    try:
        for number in range(20):
            lease = f"l-{number}"
            began = time.monotonic()
            node.ask(lease=lease)
            await node.answer(lease)
            granted.append(time.monotonic() - began)
            await node.ended(lease)
        back = [await _after_death(node, f"b-{number}") for number in range(5)]
        breach = [await _breach(node, f"x-{number}") for number in range(5)]
    finally:
        await node.stop()
    return granted, back, breach


async def _after_death(node: Node, lease: str) -> float:
    node.ask(lease=lease, job={**JOB, "prompt": "hold=denoising"})
    worker = await node.working(LeasePhase.DENOISING, lease)
    psutil.Process(worker).kill()
    began = time.monotonic()
    await node.until(lambda: node.limiter.leases == 0)
    seconds = time.monotonic() - began
    await node.ended(lease)
    return seconds


async def _breach(node: Node, lease: str) -> float:
    """Return the seconds for which a worker was above its lease, measured from outside."""
    size = 256 * MIB
    node.ask(size, {**JOB, "prompt": f"take={2 * size} hold=loading"}, lease)
    worker = await node.working(LeasePhase.STARTING, lease)
    seen: list[float] = []

    def look() -> None:
        while alive := list_group_members(worker):
            if (measure_footprint(alive) or 0) > size:
                seen.append(time.monotonic())
            time.sleep(0.005)
        seen.append(time.monotonic())

    await asyncio.to_thread(look)
    await node.ended(lease)
    return seen[-1] - seen[0]


# a clip


def bench_clip(folder: Path) -> list[Row]:
    """Compare a clip from creation to file with the engine alone, and measure the memory of Ray."""
    with pool(folder) as made:
        one = _real(made, folder)
        pairs = in_turn(lambda number: _made(one, number), lambda number: _alone(folder, number), ROUNDS)
        rays = [*one.find("launcher"), *one.find("driver")]
        family = {p.pid: p for ray in rays for p in [ray, *ray.children(recursive=True)]}.values()
        own, resident = sum(p.memory_full_info().uss for p in family), sum(p.memory_info().rss for p in family)
        one.close()
    ours, alone, ratio, ratios = ratio_of(pairs)
    figure = f"the engine alone ({ours:.1f} s against {alone:.1f}; {spread(ratios)})"
    told = f"{own / MIB:.0f} MiB unshared, {resident / MIB:.0f} resident, {len(family)} processes"
    return [
        at_most("a clip, created to completed", 3, ratio, figure, "the bare engine"),
        Row("Ray's footprint on a node", "reported", told, True, commit()),
    ]


def _real(made: Pool, folder: Path, **settings: str) -> Chain:
    one = Chain(made, standin(folder), PORTS)
    one.up(worker__environments=str(environments()), **settings)
    return one


def _made(one: Chain, number: int) -> float:
    began = time.monotonic()
    name = one.ask("POST", "/v1/videos", json=_asked({**CLIP, "seed": number}))["id"]
    ended = until(
        lambda: found if (found := one.job(name))["status"] in ("completed", "failed") else None, 300, "a clip"
    )
    if ended["status"] != "completed":
        raise RuntimeError(json.dumps(ended["error"]))
    seconds = time.monotonic() - began
    one.whole()
    return seconds


def _asked(job: dict[str, Any]) -> dict[str, Any]:
    size = f"{job['width']}x{job['height']}"
    return {"model": "tiny-wan", "size": size} | {k: v for k, v in job.items() if k not in ("width", "height")}


def _alone(folder: Path, number: int) -> float:
    job = {**CLIP, "seed": number, "package": str(tiny_wan() / "tiny-wan"), "out": str(folder)}
    began = time.monotonic()
    subprocess.run(
        [python(), "-c", BARE, json.dumps(job), WORKER],
        check=True,
        env=environment(),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return time.monotonic() - began


# Chats during a job


def bench_beside(folder: Path) -> list[Row]:
    """Compare chats during a job under a lease with chats during the same worker without lease and watchdog."""
    (folder / "models").mkdir()
    (folder / "models" / "chatter").symlink_to(models.path("llama", trained=False, preset="bench50m"))
    over: list[int] = []
    with pool(folder) as made:
        one = _real(
            made,
            folder,
            models__folders=f"{tiny_wan()},{folder / 'models'}",
            engine__kind="mlx",
            models__profile="off",
            models__preload="chatter",
            memory__cap="18GiB",
            video__lease="10GiB",
        )
        pairs = in_turn(
            lambda number: _beside_ours(one, number, over), lambda number: _beside_bare(one, folder, number), ROUNDS
        )
        restarts = one.node()["engine"]["restarts"]
        one.close()
    ours, bare, ratio, ratios = ratio_of(pairs)
    figure = f"the same during a bare worker ({ours:.1f} tokens/s against {bare:.1f}; {spread(ratios)})"
    above = sum(over)
    return [
        at_least("chats during a video", 0.9, ratio, figure, "the same load without leases"),
        Row(
            "samples over the cap",
            "0",
            f"{above} of {len(over)}, {restarts} restarts",
            not above and not restarts,
            commit(),
        ),
    ]


def _beside_ours(one: Chain, number: int, over: list[int]) -> float:
    name = one.ask("POST", "/v1/videos", json=_asked({**JOB, "steps": 50, "frames": 121, "seed": number}))["id"]
    until(lambda: one.job(name)["phase"] == "denoising", 120, "a video that is made")
    stop = threading.Event()
    watching = threading.Thread(target=_look_on, args=(one, over, stop))
    watching.start()
    try:
        return _chats(one, number)
    finally:
        stop.set()
        watching.join()
        one.ask("POST", f"/v1/videos/{name}/cancel")
        one.whole()


def _look_on(one: Chain, over: list[int], stop: threading.Event) -> None:
    """Record for each sample whether engine and worker together are above the cap."""
    engine, worker = one.find("engine"), one.find("worker")
    cap = one.node()["cap"]
    while not stop.wait(0.05):
        with suppress(psutil.Error):
            taken = sum(measure_footprint((process.pid,)) or 0 for process in [*engine, *worker])
            over.append(int(taken > cap))


def _beside_bare(one: Chain, folder: Path, number: int) -> float:
    with _bare(folder, number):
        return _chats(one, number)


@contextmanager
def _bare(folder: Path, number: int) -> Iterator[None]:
    """Run the same worker alone while it denoises."""
    package = {"package": str(tiny_wan() / "tiny-wan"), "out": str(folder), "size": LEASE}
    job = {**JOB, "steps": 50, "frames": 121, "seed": number, **package}
    with (
        tempfile.TemporaryDirectory() as scratch,
        subprocess.Popen(
            [python(), "-I", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=build_worker_environment(environment(), Path(scratch)),
            cwd=scratch,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if json.loads(line).get("phase") == "denoise":
                break
        threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield
        finally:
            process.kill()


def _chats(one: Chain, number: int) -> float:
    """Chat for WINDOW seconds in STREAMS lanes; return tokens a second."""
    return asyncio.run(_chatting(one, Random(number)))


async def _chatting(one: Chain, random: Random) -> float:
    base, key = one.pool.base, one.pool.key
    began, tokens = time.monotonic(), 0

    def heard() -> None:
        nonlocal tokens
        tokens += 1

    async def lane() -> None:
        while True:
            seen = await chat(base, key, body("chatter", words(random, 40), 64), heard)
            if seen.error or not seen.ended:
                raise RuntimeError(seen.error or "an answer that has no end")

    with suppress(TimeoutError):
        async with asyncio.timeout(WINDOW):
            await asyncio.gather(*[lane() for _ in range(STREAMS)])
    return tokens / (time.monotonic() - began)


# the chain


def bench_chain(folder: Path) -> list[Row]:
    """Kill every process in every phase."""
    cells = [(victim, phase) for phase in PHASES for victim in VICTIMS if phase in RUNNING or victim not in WORKERS]
    with pool(folder) as made, chain(made, PORTS) as one:
        outcomes = [one.kill(victim, phase) for victim, phase in cells]
    print(table(outcomes))
    wrong = [f"{x.victim} {x.phase}: {x.end}" for x in outcomes if x.end != expected(x.victim, x.phase)]
    slowest = max(outcome.back for outcome in outcomes if outcome.back is not None)
    return [
        Row(
            "kill -9 of every process in every phase",
            "each ends as documented",
            f"{len(outcomes)} kills, {len(wrong)} otherwise: {', '.join(wrong)}",
            not wrong,
            commit(),
        ),
        Row("memory returned after any of them", "<= 2 s", f"{slowest:.2f} s at most", slowest <= 2, commit()),
    ]


GROUPS = {"video": bench_video}
