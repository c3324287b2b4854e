"""Torture test: a real engine near its cap, with more load than memory, and with leases and model loads.

The engine must never exceed its cap, lose no request, and still complete most of the possible work. The cap is a few
MiB above its footprint at rest. The rate of arrivals follows from the measured seconds of computing, so that every
machine is offered the same load.

The engine is the shipped child under the limiter, poll and enforcer of the shipped agent; only the coordinator is
missing. A client that is refused for now asks again, as the router's queue does. Memory is read from the kernel's
high-water mark. Requests arrive at times that follow from a seed, independent of earlier requests.

The oracle is an upper bound of the tokens that any engine could complete of the same arrivals until the same moment.
Each kind of request is measured alone. Its bytes above rest are an average in the smallest chunks; its seconds are
those in the largest chunks. Its seconds of computing are counted separately. The bound fills two budgets: the room's
bytes × seconds, and the engine's seconds. It takes the requests with the most tokens per unit first, and the last one
in part. The smaller sum counts. The oracle knows all sizes and arrivals beforehand, has no margin, never waits, and may
cut requests.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from node.engine_process.supervisor import Supervisor
from node.illegal_events import IllegalEvents
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import open_machine, open_sensor
from node.settings import resolve_settings
from tests import models
from tests.support.engine.embedders import make_embedder, make_reranker
from wire.codec import decode, encode
from wire.frames import (
    TAGS,
    Embed,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    Message,
    Refusal,
    UnloadModel,
)
from wire.refusals import RefusalCode
from wire.report import EngineCounters
from wire.units import MIB

OFFERED_LOAD = 1.0
"""Seconds of computing that a second of arrivals asks for. The requests larger than any cap come in addition."""
PATIENCE = 10.0
"""Seconds for which a client asks again, as a request waits in the router's queue."""
ASK_AGAIN = 0.25
HUNG = 180.0
"""Seconds after which a request counts as hung. On a busy machine the last requests wait for more than a minute."""
SAMPLE = 0.02
CLEAN = frozenset({"done", *RefusalCode})
"""Allowed ends of a request. Any other end, "hung" or a fault, breaks a guarantee. A request that the enforcer ended
counts as refused: the enforcer ends the newest running request with such a code."""
LEASE_EVERY, LEASE_FOR, LEASE_SHARE = 20.0, 6.0, 4
LOAD_EVERY, LOAD_FOR = 25.0, 5.0
FLOOR = 64
BATCH = 32
"""Rows that decode at once at most, as the engine's settings have it."""
MARGIN = 6 * MIB
MODEL, SECOND, VECTORS, SCORES = "chat", "second", "vectors", "scores"
TEXTS_AT_ONCE = 48
"""Texts of one request for embeddings or scores, of 4 to 400 words."""
TOKENS_PER_WORD = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: prompt and answer tokens, answers, and its share of all."""

    prompt: int
    answer: int
    share: float
    choices: int = 1

    @property
    def tokens(self) -> int:
        """Return the tokens of the prompt and of all answers."""
        return self.prompt + self.answer * self.choices


KINDS = (
    Kind(60, 48, 0.45),
    Kind(300, 48, 0.25),
    Kind(900, 32, 0.12),
    Kind(2500, 32, 0.10),
    Kind(6000, 16, 0.05),
    Kind(30_000, 16, 0.03, 4),
)
BEYOND = KINDS[-1]
"""More than any of the caps can hold."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one request of a kind that runs alone.

    `peak`: Most bytes above rest.
    `held`: Bytes × seconds.
    `computed`: Seconds of computing; a decode step is shared by a full batch.
    """

    peak: int
    held: float
    computed: float


@dataclass(slots=True)
class Asked:
    """One request and its end: `done`, or the code that refused it."""

    kind: Kind
    at: float
    ended: float = 0.0
    outcome: str = ""


@dataclass(slots=True)
class Seen:
    """Results of a run. Times are seconds from its start, sizes bytes."""

    asked: list[Asked] = field(default_factory=list[Asked])
    leases: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    orders: list[str] = field(default_factory=list[str])
    texts: Counter[str] = field(default_factory=Counter[str])
    """Ends of the requests for embeddings and scores."""
    samples: int = 0
    over: int = 0
    highest: int = 0
    restarts: int = 0
    evicted: int = 0
    counts: EngineCounters = field(default_factory=EngineCounters)

    def outcomes(self) -> dict[str, int]:
        """Count the ends."""
        return dict(sorted(Counter(one.outcome for one in self.asked).items()))

    def tokens(self, until: float) -> int:
        """Return the tokens completed until a moment."""
        return sum(one.kind.tokens for one in self.asked if one.outcome == "done" and one.ended <= until)


class Node:
    """The agent without a link: machine, limiter, supervisor and poll, as in `node.run`."""

    def __init__(self, folder: Path, memory: dict[str, object], **mlx: object) -> None:
        flat: dict[str, object] = {
            "engine.kind": "mlx",
            "models.folders": (str(folder / "models"),),
            "models.use_huggingface_cache": False,
            "models.profile": "off",
            "models.trial": False,
            "models.preload": (MODEL,),
            "engine.mlx.min_prefill_step": FLOOR,
        }
        flat |= {f"memory.{key}": value for key, value in memory.items()}
        flat |= {f"engine.mlx.{key}": value for key, value in mlx.items()}
        resolved = resolve_settings([("bench", flat)])
        machine = open_machine(resolved.value)
        self.limiter = Limiter(resolved.value, machine, resolved.origins)
        self.supervisor = Supervisor(
            resolved.value,
            on_frame=self._frame,
            on_change=self._change,
            log_file=folder / "engine.log",
            scratch=folder / "scratch",
            wired=self.limiter.read_wired,
            illegal_events=IllegalEvents(),
        )
        self.poll = MemoryPoll(self.limiter, machine, self.supervisor)
        self._ends: dict[int, asyncio.Future[Frame]] = {}
        self._changed = asyncio.Event()
        self._number = 0

    def _frame(self, tag: int, encoded: bytes, request: int) -> None:
        end = self._ends.get(request)
        if TAGS[tag] in (Finished, Refusal, Failed) and end is not None and not end.done():
            end.set_result(decode(tag, encoded[5:]))

    def _change(self) -> None:
        self.poll.poll_sooner()
        self._changed.set()

    async def start(self) -> None:
        """Start, and wait until the model is loaded."""
        self.poll.start()
        await self.supervisor.start()
        async with asyncio.timeout(HUNG):
            while not self._loaded():
                self._changed.clear()
                await self._changed.wait()

    def _loaded(self) -> bool:
        report = self.supervisor.reports.latest
        return report is not None and any(model.loaded for model in report.models)

    def phys(self) -> int:
        """Return the engine's footprint in bytes; 0 if it cannot be read."""
        return self.supervisor.probe.read_footprint().phys or 0

    async def order(self, kind: type[LoadModel | UnloadModel], model: str) -> Frame:
        """Send an order about a model, and return its end."""
        return await self._sent(lambda number: kind(number, model))

    async def generate(self, kind: Kind, seed: int, model: str = MODEL, expected: int = 0) -> Frame:
        """Send one request of a kind, whose words follow from the seed, and return its end.

        `expected`: tokens that are reserved for its answer, all of them where 0.
        """
        bias = ((_end_token(), -100.0),)
        params = GenerationParams(temperature=0.0, max_tokens=kind.answer, n=kind.choices, logit_bias=bias)
        message = Message("user", f"{seed} " + "word " * (kind.prompt // TOKENS_PER_WORD))
        return await self._sent(
            lambda number: Generate(number, number, f"r{number}", model, (message,), params, 0, expected or kind.answer)
        )

    async def embed(self, seed: int) -> Frame:
        """Send one request for embeddings or for scores, whose texts follow from the seed, and return its end."""
        random, scores = Random(seed), seed % 2
        texts = tuple("word " * random.choice((4, 40, 400)) for _ in range(TEXTS_AT_ONCE))
        model, query = (SCORES, "which word?") if scores else (VECTORS, "")
        return await self._sent(lambda number: Embed(number, number, f"r{number}", model, texts, query=query))

    async def _sent(self, frame: Callable[[int], Embed | Generate | LoadModel | UnloadModel]) -> Frame:
        self._number += 1
        number = self._number
        end = self._ends[number] = asyncio.get_running_loop().create_future()
        made = frame(number)
        self.supervisor.send(encode(made), type(made), number)
        try:
            async with asyncio.timeout(HUNG):
                return await end
        finally:
            del self._ends[number]

    async def stop(self) -> None:
        """End the engine."""
        self.poll.stop()
        await self.supervisor.stop()


def _end_token() -> int:
    return json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]


@asynccontextmanager
async def started(folder: Path, memory: dict[str, object], **mlx: object) -> AsyncGenerator[Node]:
    """Run a node with its model loaded and warm."""
    node = Node(folder, memory, **mlx)
    try:
        await node.start()
        await node.generate(KINDS[0], 0)
        yield node
    finally:
        await node.stop()


def lay_out(folder: Path) -> None:
    """Write two models into the folder of the node."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name, architecture in ((MODEL, "llama"), (SECOND, "qwen3")):
        (folder / "models" / name).symlink_to(models.path(architecture))
    make_embedder(folder / "models" / VECTORS, modes=("pooling_mode_mean_tokens",))
    make_reranker(folder / "models" / SCORES)


# Measured before a run


async def alone(folder: Path) -> tuple[int, dict[Kind, Cost]]:
    """Return the footprint at rest, and the cost of each kind alone."""
    roomy: dict[str, object] = {"cap": "512MiB", "margin": MARGIN}
    levels: dict[Kind, tuple[int, float]] = {}
    async with started(folder, roomy, prefill_step_size=FLOOR, prefix_cache_size="off") as node:
        rest = await settled(node)
        for number, kind in enumerate(KINDS[:-1]):
            levels[kind] = await _levels(node, kind, number, rest)
            await settled(node)
    costs: dict[Kind, Cost] = {}
    async with started(folder, roomy, prefix_cache_size="off") as node:
        for number, (kind, (peak, level)) in enumerate(levels.items()):
            timings = (await _finished(node, kind, number)).timings
            computed = timings.prefill + timings.decode / BATCH
            costs[kind] = Cost(peak, level * (timings.prefill + timings.decode), computed)
    return rest, costs


async def _levels(node: Node, kind: Kind, number: int, rest: int) -> tuple[int, float]:
    """Return the most bytes above rest while one request runs alone, and their mean."""
    sensor = open_sensor(node.supervisor.pid or 0)
    sensor.begin_interval()
    running, samples = asyncio.create_task(_finished(node, kind, number)), list[int]()
    while not running.done():
        samples.append(max(0, node.phys() - rest))
        await asyncio.wait([running], timeout=SAMPLE / 4)
    peak = max(0, (sensor.read_high_water_marks().interval or 0) - rest)
    sensor.close()
    await running
    return peak, statistics.mean(samples)


async def _finished(node: Node, kind: Kind, number: int) -> Finished:
    end = await node.generate(kind, 1000 + number)
    if not isinstance(end, Finished):
        raise RuntimeError(f"{kind} alone: {end}")  # noqa: TRY004  no matter of types
    return end


async def settled(node: Node) -> int:
    """Wait until the footprint has stopped falling, and return it."""
    last = node.phys()
    while True:
        await asyncio.sleep(0.5)
        now = node.phys()
        if now >= last:
            return now
        last = now


# the load


async def torture(
    folder: Path, cap: int, seconds: float, rate: float, *, guard: bool = True, texts: bool = False
) -> Seen:
    """Ask for more than fits for `seconds`, and return the results.

    `rate`: requests that arrive a second.
    `guard`: whether the gate decides; without it, the run ends after `seconds`, with requests that still run.
    `texts`: ask for embeddings and scores as well.
    """
    seen = Seen()
    memory: dict[str, object] = {"cap": cap, "margin": MARGIN, "guard": "on" if guard else "off"}
    async with started(folder, memory) as node:
        rest = await settled(node)
        begun = time.monotonic()
        tasks = [
            asyncio.create_task(_client(node, seen, one, number, begun))
            for number, one in enumerate(arrivals(seconds, rate))
        ]
        side = [
            asyncio.create_task(each)
            for each in (
                _watch(node, seen, cap),
                _lend(node, seen, max(MIB, cap - rest) // LEASE_SHARE, begun),
                _load(node, seen),
                *((_embed(node, seen),) if texts else ()),
            )
        ]
        limit = asyncio.timeout(None if guard else seconds)
        try:
            async with limit:
                await asyncio.gather(*tasks)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
        seen.restarts = node.supervisor.state.restarts
        seen.highest = max(seen.highest, node.supervisor.probe.read_high_water_marks().interval or 0)
        seen.over = max(seen.over, seen.highest > cap)
        report = node.supervisor.reports.latest
        seen.counts = report.counts if report else EngineCounters()
    return seen


def arrival_rate(costs: Mapping[Kind, Cost]) -> float:
    """Return the requests a second at which the kinds of `costs`, by their shares, ask for OFFERED_LOAD."""
    return OFFERED_LOAD / sum(kind.share * cost.computed for kind, cost in costs.items())


def arrivals(seconds: float, rate: float) -> list[Asked]:
    """Return the requests of a run, the same in each: Poisson arrivals at `rate` a second, kinds by their shares."""
    random, at, found = Random(0), 0.0, list[Asked]()
    while (at := at + random.expovariate(rate)) < seconds:
        (kind,) = random.choices(KINDS, [kind.share for kind in KINDS])
        found.append(Asked(kind, at))
    return found


async def _client(node: Node, seen: Seen, asked: Asked, number: int, begun: float) -> None:
    await asyncio.sleep(begun + asked.at - time.monotonic())
    seen.asked.append(asked)
    try:
        asked.outcome = await _patiently(node, asked.kind, number)
    except TimeoutError:
        asked.outcome = "hung"
    asked.ended = time.monotonic() - begun


async def _patiently(node: Node, kind: Kind, seed: int) -> str:
    """Send a request until it is done, refused for good, or PATIENCE ends."""
    until = time.monotonic() + PATIENCE
    while True:
        end = await node.generate(kind, seed)
        if isinstance(end, Finished):
            return "done"
        code = end.refused.code if isinstance(end, Refusal) else end.code if isinstance(end, Failed) else ""
        if isinstance(end, Failed) and code not in CLEAN:
            return f"{code}: {end.message}"
        if not isinstance(end, Refusal) or code is not RefusalCode.NO_ROOM or time.monotonic() > until:
            return str(code)
        await asyncio.sleep(ASK_AGAIN)


async def _watch(node: Node, seen: Seen, cap: int) -> None:
    """Sample the footprint from outside; the kernel's mark is read at the end."""
    sensor = open_sensor(node.supervisor.pid or 0)
    sensor.begin_interval()
    try:
        while True:
            phys = sensor.read_footprint().phys or 0
            seen.samples += 1
            seen.over += phys > cap
            seen.highest = max(seen.highest, phys, sensor.read_high_water_marks().interval or 0)
            await asyncio.sleep(SAMPLE)
    finally:
        sensor.close()


async def _lend(node: Node, seen: Seen, lease: int, begun: float) -> None:
    """Lower the ceiling at intervals, as a video job does."""
    while True:
        await asyncio.sleep(LEASE_EVERY)
        since = time.monotonic() - begun
        node.limiter.begin_lease(lease, LeaseHolder.VIDEO)
        node.poll.poll_once()
        try:
            await asyncio.sleep(LEASE_FOR)
        finally:
            node.limiter.end_lease()
            node.poll.poll_once()
            seen.leases.append((since, time.monotonic() - begun, lease))


async def _load(node: Node, seen: Seen) -> None:
    """Load and unload a second model at intervals."""
    while True:
        await asyncio.sleep(LOAD_EVERY)
        for kind in (LoadModel, UnloadModel):
            end = await node.order(kind, SECOND)
            word = "done" if isinstance(end, Finished) else str(end.refused.code) if isinstance(end, Refusal) else "?"
            seen.orders.append(f"{kind.__name__.lower()} {word}")
            await asyncio.sleep(LOAD_FOR)


async def _embed(node: Node, seen: Seen) -> None:
    """Ask for embeddings and for scores in turn, one request after the other."""
    for seed in count():
        end = await node.embed(seed)
        code = end.refused.code if isinstance(end, Refusal) else end.code if isinstance(end, Failed) else "done"
        seen.texts[str(code)] += 1
        if code != "done":
            await asyncio.sleep(ASK_AGAIN)


def verdict(seen: Seen, costs: Mapping[Kind, Cost], room: int, until: float) -> tuple[bool, float, str]:
    """Return whether a run kept every guarantee, its share of the oracle's tokens, and a summary."""
    mine, best = seen.tokens(until), oracle(seen, costs, room, until)
    share = mine / max(1.0, best)
    outcomes = seen.outcomes()
    broken = seen.over + seen.restarts + sum(count for word, count in outcomes.items() if word not in CLEAN)
    counts, longest = seen.counts, max((asked.ended - asked.at for asked in seen.asked), default=0.0)
    words = (
        f"{seen.over} of {seen.samples} samples over, {seen.restarts} restarts, {mine} tokens of {best:.0f} at most; "
        f"ends {outcomes}, after {longest:.0f} s at most; orders {dict(Counter(seen.orders))}; {counts.checks} checks, "
        f"{counts.shrinks} shrinks, {counts.preemptions} preemptions, {counts.sheds} sheds, "
        f"{counts.overs} forwards over"
    )
    return broken == 0, share, words


# steady state


async def steady(folder: Path, cap: int, count: int, clients: int) -> Seen:
    """Send `count` unique prompts of a moderate kind, at most `clients` at once, without retries.

    Their cached prefixes fill the memory until each new one evicts another.
    """
    seen, kind, begun = Seen(), KINDS[0], time.monotonic()
    numbers = iter(range(count))

    async def client(node: Node) -> None:
        for number in numbers:
            end = await node.generate(kind, 10_000_000 + number)
            code = "done" if isinstance(end, Finished) else str(getattr(getattr(end, "refused", end), "code", end))
            seen.asked.append(Asked(kind, 0.0, ended=time.monotonic() - begun, outcome=code))

    async with started(folder, {"cap": cap, "margin": MARGIN}) as node:
        watch = asyncio.create_task(_watch(node, seen, cap))
        try:
            await asyncio.gather(*(client(node) for _ in range(clients)))
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        seen.restarts = node.supervisor.state.restarts
        report = node.supervisor.reports.latest
        if report is not None:
            seen.counts, seen.evicted = report.counts, report.cache.evictions
    return seen


# the oracle


def oracle(seen: Seen, costs: Mapping[Kind, Cost], room: int, until: float) -> float:
    """Return the upper bound of tokens completed until a moment, for the same arrivals in `room` bytes."""
    kinds = [one.kind for one in seen.asked if one.at <= until and one.kind in costs and costs[one.kind].peak <= room]
    lent = sum(size * max(0.0, min(end, until) - since) for since, end, size in seen.leases)
    return min(
        filled([(kind.tokens, costs[kind].held) for kind in kinds], room * until - lent),
        filled([(kind.tokens, costs[kind].computed) for kind in kinds], until),
    )


def filled(requests: Iterable[tuple[int, float]], budget: float) -> float:
    """Return the most tokens of requests, `(tokens, cost)` each, within a budget, the last request in part."""
    tokens = 0.0
    for worth, cost in sorted(requests, key=lambda one: one[1] / one[0]):
        if cost >= budget:
            return tokens + worth * budget / cost
        tokens, budget = tokens + worth, budget - cost
    return tokens
