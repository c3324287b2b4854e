"""The same tiny model behind no router, nginx, sglang-router and Macpool: latency and throughput for clients at
saturation.

Each case has two servers of the model: mlx_lm.server behind the peers, and our own nodes behind our router. Without a
router, clients alternate between the two servers.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from tests import models
from tests.bench.engine.chats import body, chat, words
from tests.bench.engine.rows import missing
from tests.bench.router.peers import mlx_server, nginx, sglang
from tests.bench.row import Row, commit, not_measured, p99, spread
from tests.support.processes import pool, until

LANES, SECONDS, ROUNDS = 16, 8.0, 3
PROMPT_WORDS, ANSWER_TOKENS = 40, 16
OURS, NOTHING = "macpool", "nothing"


@dataclass(frozen=True, slots=True)
class Front:
    """An endpoint under test: a name, base URLs that clients use in turn, a key, and the name of the model there."""

    name: str
    bases: Sequence[str]
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    """One round: seconds of each chat, and chats a second."""

    took: list[float]
    speed: float


def bench_end_to_end(folder: Path) -> list[Row]:
    """Measure chats of 16 tokens over 16 connections: p50, p99 and chats a second, a row for each front."""
    if missing():
        return [not_measured("end to end, the same tiny model", "no slower than any other", missing())]
    model = models.EMBEDDED
    with pool(folder) as made, ExitStack() as stack:
        made.up()
        for name in ("one", "two"):
            made.join(name, "engine.kind=mlx", "models.use_huggingface_cache=false", f"models.preload={model.name}")
        until(lambda: model.name in [one["id"] for one in made.get("/v1/models")["data"]], what="the model")
        bases: list[str] = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            bases.append(stack.enter_context(mlx_server(folder / name, model)).base)
        ports = [urlsplit(base).port or 0 for base in bases]
        fronts = [Front(NOTHING, bases, "none", str(model))]
        for start in (nginx, sglang):
            peer = stack.enter_context(start(folder, (ports[0], ports[1])))
            fronts.append(Front(peer.name, [peer.base], "none", str(model)))
        fronts.append(Front(OURS, [made.base], made.key, model.name))
        found = [
            {one.name: asyncio.run(_load(one, number)) for one in fronts[number % 4 :] + fronts[: number % 4]}
            for number in range(ROUNDS + 1)
        ][1:]
    return _rows({one.name: [loads[one.name] for loads in found] for one in fronts})


async def _load(front: Front, number: int) -> Load:
    """Run chats one after the other in every lane."""
    took: list[float] = []
    began = time.monotonic()

    async def lane(place: int) -> None:
        random, base = Random(f"{number} {place}"), front.bases[place % len(front.bases)]
        while time.monotonic() < began + SECONDS:
            asked = time.monotonic()
            seen = await chat(base, front.key, body(front.model, words(random, PROMPT_WORDS), ANSWER_TOKENS))
            if seen.error or not seen.ended:
                raise RuntimeError(f"behind {front.name}: {seen.error or 'an answer without an end'}")
            took.append(time.monotonic() - asked)

    await asyncio.gather(*(lane(place) for place in range(LANES)))
    return Load(took, len(took) / (time.monotonic() - began))


def _rows(found: dict[str, list[Load]]) -> list[Row]:
    """Return a row for each front. Ours must be no slower than the best other front, by medians over the rounds."""
    seen = {
        name: (
            statistics.median(statistics.median(one.took) for one in loads),
            statistics.median(p99(one.took) for one in loads),
            statistics.median(one.speed for one in loads),
        )
        for name, loads in found.items()
    }
    others = [figures for name, figures in seen.items() if name != OURS]
    middle, late, speed = seen[OURS]
    good = (
        middle <= min(one[0] for one in others)
        and late <= min(one[1] for one in others)
        and speed >= max(one[2] for one in others)
    )
    return [
        Row(
            f"end to end behind {name}, {LANES} chats at a time",
            "no figure worse than the best other" if name == OURS else "reported",
            f"p50 {middle * 1000:.0f} ms, p99 {late * 1000:.0f} ms, {speed:.1f} chats/s (by round "
            f"{spread([one.speed for one in found[name]])})",
            good if name == OURS else True,
            commit(),
        )
        for name, (middle, late, speed) in seen.items()
    ]
