"""Torture of both tiers of the prefix cache: full queue, memory cache at its limit, and disk tier at its quota.

Like `torture`, this runs the shipped engine process under the shipped limiter, poll and enforcer. Clients repeat a
few long prompts, more than both tiers hold. Prompts are therefore evicted from memory and restored from the disk, and
their files are deleted for newer ones. Answers outgrow their commitments, and leases lower the ceiling: rows are
preempted. The engine counts the tokens of preempted rows at their return, and those that forwards compute again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from node.memory.limits import LeaseHolder
from tests.bench.engine.torture import MARGIN, MODEL, Kind, Node, lay_out, settled, started
from tests.bench.row import Row, commit
from wire.frames import Finished, Refusal
from wire.refusals import RefusalCode
from wire.report import CacheState, EngineCounters
from wire.units import MIB

CLIENTS = 9
"""Requests at once: more than the cap has room for, so that some always wait."""
PROMPTS = 14
"""Prompts that are repeated. The disk tier holds those that run, but not all."""
KIND = Kind(770, 32, 1.0)
"""Three blocks and a few tokens."""
EXPECTED = 8
"""Tokens that are reserved for an answer of 32: every row has to grow."""
ROOM, MEMORY, DISK = 32 * MIB, 4 * MIB, 16 * MIB
"""Bytes above rest, of the memory cache, and of the disk tier. A prompt takes 1.5 MiB."""
LEASE_EVERY, LEASE_FOR, LEASE_SHARE = 2.0, 1.0, 3
"""Seconds between two leases, their duration, and their part of the room: 1 / 3."""
ASK_AGAIN, SAMPLE = 0.5, 0.05
"""Seconds until a refused prompt is sent again, and between two samples. The kernel's mark has all peaks."""
RETURNED_SHARE = 0.9
SECONDS = 60.0


@dataclass
class TierRun:
    """Results of a run. Sizes are bytes."""

    ends: Counter[str] = field(default_factory=Counter[str])
    samples: int = 0
    over: int = 0
    highest: int = 0
    restarts: int = 0
    most_waiting: int = 0
    """Most requests that waited in the engine."""
    most_memory: int = 0
    most_disk: int = 0
    before: EngineCounters | None = None
    """Counts when the disk tier reached its quota; None until then."""
    counts: EngineCounters = field(default_factory=EngineCounters)
    cache: CacheState = field(default_factory=CacheState)

    @property
    def lost(self) -> int:
        """Requests that ended neither with their answer nor with a refusal for memory."""
        return sum(count for end, count in self.ends.items() if end not in ("done", RefusalCode.NO_ROOM))

    @property
    def returned_tokens(self) -> int:
        """Tokens of preempted rows at their return, since the disk tier reached its quota."""
        return 0 if self.before is None else self.counts.returned_tokens - self.before.returned_tokens

    @property
    def returned_share(self) -> float:
        """Share of `returned_tokens` that came from the cache."""
        before = 0 if self.before is None else self.before.recomputed_tokens
        return 1.0 - (self.counts.recomputed_tokens - before) / max(1, self.returned_tokens)

    def is_at_limits(self) -> bool:
        """Return whether the run has reached the limits of the queue and of both tiers.

        Requests waited, the memory cache was more than half full, and the disk tier evicted files. Prompts were
        restored from the disk, and preempted rows returned to a batch.
        """
        full = self.most_memory > MEMORY // 2 and self.cache.disk_evictions > 0
        return bool(full and self.most_waiting and self.cache.disk_hits and self.returned_tokens)

    def describe(self) -> str:
        """Return a summary."""
        counts, cache = self.counts, self.cache
        return (
            f"{self.over} of {self.samples} samples over, {self.restarts} restarts; ends {dict(self.ends)}, "
            f"{self.most_waiting} waiting at most; {counts.preemptions} preemptions, {counts.returned_tokens} tokens "
            f"returned, {counts.recomputed_tokens} computed again; {cache.hits} hits in memory, {cache.disk_hits} on "
            f"the disk, {cache.disk_evictions} files evicted, {cache.disk_drops} parts dropped; at most "
            f"{self.most_memory / MIB:.1f} MiB in memory and {self.most_disk / MIB:.1f} MiB on the disk"
        )


async def measure_rest(folder: Path) -> int:
    """Return the footprint at rest in bytes."""
    async with started(folder, {"cap": "512MiB", "margin": MARGIN}, prefix_cache_size="off") as node:
        return await settled(node)


async def run_tiers(folder: Path, rest: int, seconds: float, *, until_complete: bool = False) -> TierRun:
    """Repeat long prompts for `seconds`, and return the results.

    `rest` is the footprint at rest in bytes. With `until_complete`, end as soon as `TierRun.is_at_limits` is true.
    """
    seen, cap = TierRun(), rest + ROOM
    mlx: dict[str, object] = {
        "prefix_cache_size": f"{MEMORY}B",
        "disk_cache_size": f"{DISK}B",
        "disk_cache_min_seconds": 0.0,
    }
    async with started(folder, {"cap": cap, "margin": MARGIN}, **mlx) as node:
        ends_at = time.monotonic() + seconds

        def has_ended() -> bool:
            return time.monotonic() > ends_at or (until_complete and seen.is_at_limits())

        clients = [asyncio.create_task(_repeat(node, seen, number, has_ended)) for number in range(CLIENTS)]
        side = [asyncio.create_task(each) for each in (_watch(node, seen, cap), _lend(node, seen))]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
        seen.restarts = node.supervisor.state.restarts
        seen.highest = max(seen.highest, node.supervisor.probe.read_high_water_marks().interval or 0)
        seen.over = max(seen.over, seen.highest > cap)
    return seen


async def _repeat(node: Node, seen: TierRun, number: int, has_ended: Callable[[], bool]) -> None:
    """Send prompts one after the other. A refused one is sent again, as the router's queue does."""
    random = Random(number)
    prompt = random.randrange(PROMPTS)
    while not has_ended():
        try:
            end = await node.generate(KIND, prompt, MODEL, EXPECTED)
        except TimeoutError:
            seen.ends["hung"] += 1
            return
        if isinstance(end, Refusal):
            seen.ends[end.refused.code.value] += 1
            await asyncio.sleep(ASK_AGAIN)
            continue
        seen.ends["done" if isinstance(end, Finished) else f"cut: {getattr(end, 'message', end)}"] += 1
        prompt = random.randrange(PROMPTS)


async def _lend(node: Node, seen: TierRun) -> None:
    """Lower the ceiling at intervals once the disk tier is at its quota, so that rows are preempted."""
    while True:
        await asyncio.sleep(LEASE_EVERY)
        if seen.before is None:
            continue
        node.limiter.begin_lease(ROOM // LEASE_SHARE, LeaseHolder.VIDEO)
        node.poll.poll_once()
        try:
            await asyncio.sleep(LEASE_FOR)
        finally:
            node.limiter.end_lease()
            node.poll.poll_once()


async def _watch(node: Node, seen: TierRun, cap: int) -> None:
    """Sample the footprint from outside, and the report of the engine."""
    while True:
        phys, report = node.phys(), node.supervisor.reports.latest
        seen.samples += 1
        seen.over += phys > cap
        seen.highest = max(seen.highest, phys)
        if report is not None:
            seen.counts, seen.cache = report.counts, report.cache
            seen.most_waiting = max(seen.most_waiting, report.waiting)
            seen.most_memory = max(seen.most_memory, report.cache.nbytes)
            seen.most_disk = max(seen.most_disk, report.cache.disk_bytes)
            if seen.before is None and seen.most_disk > DISK * 7 // 8:
                seen.before = report.counts
        await asyncio.sleep(SAMPLE)


def bench_tiers(folder: Path) -> list[Row]:
    """Run for a minute with a full queue and both tiers at their limits."""
    lay_out(folder)
    seen = asyncio.run(run_tiers(folder, asyncio.run(measure_rest(folder)), SECONDS))
    name = f"torture of both tiers: cap = rest + {ROOM // MIB} MiB"
    held = seen.is_at_limits() and not (seen.over or seen.restarts or seen.lost)
    return [
        Row(f"{name}, both at their limits", "0 over, 0 lost", seen.describe(), held, commit()),
        Row(
            f"{name}, preempted rows",
            f">= {RETURNED_SHARE} of their tokens from the cache",
            f"{seen.returned_share:.3f} of {seen.returned_tokens} tokens",
            seen.returned_tokens > 0 and seen.returned_share >= RETURNED_SHARE,
            commit(),
        ),
    ]
