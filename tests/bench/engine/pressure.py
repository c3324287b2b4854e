"""Memory pressure on a real engine.

The load has two length groups of one model, a second model, and answers that outgrow their commitment. Checkpoints in
fp8 and bf16 are loaded and unloaded. No engine may crash, no answer may be cut, and no sample may be over the cap.

Like `torture`, this runs the shipped engine process under the shipped limiter, poll and enforcer.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.bench.engine.torture import MARGIN, MODEL, SECOND, Kind, Node, lay_out, settled, started
from tests.bench.row import Row, commit
from tests.support.engine.checkpoints import fp8
from wire.frames import Failed, Finished, LoadModel, Refusal, UnloadModel
from wire.refusals import RefusalCode
from wire.units import MIB

CLIENTS = 12
ROOMS = (20, 32, 48, 64)
SECONDS = 45.0
SHORT, LONG = Kind(60, 96, 0.6), Kind(1500, 96, 0.4)
"""Lengths that share no batch under these caps."""
EXPECTED = 8
"""Tokens reserved for an answer of 96: every row has to grow."""
ASK_AGAIN, SAMPLE, REST = 0.2, 0.01, 2.0
LOADED = ("packed", "plain")
"""Checkpoints that are loaded and unloaded: 8 MiB of fp8 that become 16, and 16 MiB of bf16."""


@dataclass
class Seen:
    """Results of a run."""

    ends: Counter[str] = field(default_factory=Counter[str])
    loads: Counter[str] = field(default_factory=Counter[str])
    samples: int = 0
    over: int = 0
    highest: int = 0
    deaths: int = 0
    preemptions: int = 0


def lay_out_pressure(folder: Path) -> None:
    """Write the models into the folder of the node."""
    lay_out(folder)
    fp8(folder / "models" / LOADED[0], layers=1)
    fp8(folder / "models" / LOADED[1], layers=1, packed=False)


async def rest_of(folder: Path) -> int:
    """Return the footprint with both models loaded, in bytes."""
    async with started(folder, {"cap": "768MiB", "margin": MARGIN}, prefix_cache_size="off") as node:
        await node.generate(SHORT, 1, SECOND)
        return await settled(node)


async def press(folder: Path, cap: int, seconds: float) -> Seen:
    """Ask for more than fits for `seconds`, and return the results."""
    seen = Seen()
    async with started(folder, {"cap": cap, "margin": MARGIN}) as node:
        until = time.monotonic() + seconds
        clients = [asyncio.create_task(_client(node, seen, number, until)) for number in range(CLIENTS)]
        side = [asyncio.create_task(each) for each in (_sample(node, seen, cap), _load(node, seen))]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
        seen.deaths = node.supervisor.state.restarts
        seen.highest = max(seen.highest, node.supervisor.probe.read_high_water_marks().interval or 0)
        report = node.supervisor.reports.latest
        seen.preemptions = report.counts.preemptions if report is not None else 0
    return seen


async def _client(node: Node, seen: Seen, number: int, until: float) -> None:
    random, turn = Random(number), 0
    while time.monotonic() < until:
        turn += 1
        kind, model = (LONG, MODEL) if random.random() < LONG.share else (SHORT, random.choice((MODEL, SECOND)))
        try:
            end = await node.generate(kind, number * 100_000 + turn, model, EXPECTED)
        except TimeoutError:
            seen.ends["hung"] += 1
            continue
        if isinstance(end, Finished):
            seen.ends["done"] += 1
        elif isinstance(end, Refusal):
            seen.ends[end.refused.code.value] += 1
            await asyncio.sleep(ASK_AGAIN)
        elif isinstance(end, Failed):
            seen.ends[f"cut: {end.code}"] += 1


async def _sample(node: Node, seen: Seen, cap: int) -> None:
    while True:
        phys = node.phys()
        seen.samples += 1
        seen.over += phys > cap
        seen.highest = max(seen.highest, phys)
        await asyncio.sleep(SAMPLE)


async def _load(node: Node, seen: Seen) -> None:
    """Load and unload checkpoints, every second time in the middle of the load."""
    turn = 0
    while True:
        turn += 1
        name = LOADED[turn % len(LOADED)]
        loading = asyncio.create_task(node.order(LoadModel, name))
        if turn % 4 < 2:
            await asyncio.wait([loading], timeout=0.05)
        else:
            await asyncio.wait([loading])
        await node.order(UnloadModel, name)
        end = await loading
        word = "done" if isinstance(end, Finished) else str(getattr(getattr(end, "refused", end), "code", end))
        seen.loads[f"{name} {word}"] += 1
        await asyncio.sleep(REST)


def bench_pressure(folder: Path) -> list[Row]:
    """Run under each cap."""
    lay_out_pressure(folder)
    rest = asyncio.run(rest_of(folder))
    rows: list[Row] = []
    for room in ROOMS:
        seen = asyncio.run(press(folder, rest + room * MIB, SECONDS))
        allowed = {"done", *(code.value for code in (RefusalCode.NO_ROOM, RefusalCode.TOO_LARGE))}
        cut = sum(count for word, count in seen.ends.items() if word not in allowed)
        ok = not (seen.deaths or cut or seen.over) and seen.ends["done"] > 0
        figure = (
            f"{seen.deaths} crashes, {cut} cut, {seen.over} of {seen.samples} samples over; highest "
            f"{(rest + room * MIB - seen.highest) / MIB:.1f} MiB below the cap; ends {dict(seen.ends)}, loads "
            f"{dict(seen.loads)}, {seen.preemptions} preemptions"
        )
        name = f"pressure: two length groups, two models, loads, cap = rest + {room} MiB"
        rows.append(Row(name, "0 crashes, 0 cut, 0 over", figure, ok, commit()))
    return rows
