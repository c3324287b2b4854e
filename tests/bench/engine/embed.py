"""Rows of embeddings: 2,048 texts during eight chats, and their speed compared with the bare model."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import mlx.core as mx
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model

from tests import models
from tests.bench.engine.chats import words
from tests.bench.engine.rows import MIB, ROWS, Server, between, missing, model, one_node, prompts
from tests.bench.row import Row, at_least, at_most, in_turn, not_measured, p99, ratio_of, spread
from tests.support.cluster.engine_pool import counts
from tests.support.engine.embedders import MODULE, write_json
from tests.support.processes import ROOT, Pool, environment

TEXTS = 2048
SPEED_TEXTS = 32
"""Texts of the comparison with the bare model."""
TEXT_WORDS = 16
GAP_ROUNDS, SPEED_ROUNDS = 3, 2
PHASE_PAIRS = 5
"""Phases with and without texts of a round. They alternate, so that both see the same caches and machine."""
PHASE_SECONDS = 2.0
BATCH_TOKENS = 2048
"""Tokens of a forward of the bare model, padding included."""
VECTORS = "vectors"


def make_embedder(folder: Path) -> Path:
    """Link the benchmark's model into a folder, as an embedding model."""
    made = folder / VECTORS
    made.mkdir(parents=True)
    for file in model().iterdir():
        (made / file.name).symlink_to(file)
    write_json(made / "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    write_json(made / "modules.json", [{"type": MODULE + kind, "path": path} for kind, path in kinds])
    return made


def make_texts(seed: int, count: int) -> list[str]:
    """Return texts of different lengths that no round has used."""
    random = Random(seed)
    return [words(random, random.randint(1, 2 * TEXT_WORDS)) for _ in range(count)]


def bench_embed(folder: Path) -> list[Row]:
    """Measure the gaps between tokens of eight chats during 2,048 texts, and the seconds of these texts alone."""
    gaps, peer = f"gap between tokens p99 of {ROWS} chats during {TEXTS} texts for embeddings", "quiet"
    speed, bare = f"{SPEED_TEXTS} texts for embeddings, alone", "the bare model"
    if missing():
        return [not_measured(gaps, f"<= 1.5 x {peer}", missing()), not_measured(speed, f">= 0.9 x {bare}", missing())]
    made = make_embedder(folder / "models")
    with one_node(folder, folder / "models", VECTORS) as (made_pool, server):
        asyncio.run(_measure_gaps(made_pool, server, GAP_ROUNDS))  # the first forwards of each shape are compiled
        found = [asyncio.run(_measure_gaps(made_pool, server, number)) for number in range(GAP_ROUNDS)]

        def over_http(number: int) -> float:
            texts = make_texts(number, SPEED_TEXTS)
            return SPEED_TEXTS / _time(lambda: asyncio.run(embed(server, texts)))

        def alone(number: int) -> float:
            return SPEED_TEXTS / run_bare(made, number)

        mine, other, share, shares = ratio_of(in_turn(over_http, alone, SPEED_ROUNDS))
    # In a phase, two steps that copy caches are already its p99: the row compares the gaps of all rounds together.
    loud, quiet = (p99([gap for phases in found for gap in phases[place]]) for place in (0, 1))
    ratios = [p99(during) / p99(before) for during, before in found]
    figure = f"({loud * 1000:.0f} against {quiet * 1000:.0f} ms of all rounds; by round {spread(ratios)})"
    speeds = f"({mine:.0f} against {other:.0f} texts/s; by round {spread(shares)})"
    return [at_most(gaps, 1.5, loud / quiet, figure, peer), at_least(speed, 0.9, share, speeds, bare)]


async def embed(server: Server, texts: list[str]) -> None:
    """Send texts for embeddings, and read their vectors as OpenAI's library does."""
    body = {"model": VECTORS, "input": texts, "encoding_format": "base64"}
    headers = {"authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(timeout=300, trust_env=False, verify=False) as client:
        answer = await client.post(f"{server.base}/v1/embeddings", json=body, headers=headers)
    assert len(answer.raise_for_status().json()["data"]) == len(texts)


def run_bare(folder: Path, seed: int) -> float:
    """Compute the vectors of a round in a process with the BLAS of the engine, and return its seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.engine.embed", str(folder), str(seed)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=environment(**models.fast_blas()),
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return float(done.stdout.splitlines()[-1])


def load_bare(folder: Path) -> Callable[[list[str]], None]:
    """Load the model and its tokenizer in this process. Return a function that computes the vectors of texts."""
    mx.set_cache_limit(64 * MIB)
    bare: Any = load_model(folder)[0]
    tokenizer: Any = load_tokenizer(folder)

    def compute(texts: list[str]) -> None:
        rows = sorted((tokenizer.encode(text) for text in texts), key=len)
        while rows:
            count = 1
            while count < len(rows) and (count + 1) * len(rows[count]) <= BATCH_TOKENS:
                count += 1
            batch, rows = rows[:count], rows[count:]
            longest = len(batch[-1])
            states = bare.model(mx.array([[*ids, *[0] * (longest - len(ids))] for ids in batch]))
            last = states[mx.arange(count), mx.array([len(ids) - 1 for ids in batch])]
            mx.eval(last / mx.linalg.norm(last, axis=-1, keepdims=True))

    compute(texts=["warm"])
    return compute


def _time(work: Callable[[], None]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


async def _measure_gaps(made_pool: Pool, server: Server, number: int) -> tuple[list[float], list[float]]:
    """Return the gaps in seconds during texts, and those without. The texts of each phase are cancelled after it."""
    times: list[list[float]] = [[] for _ in range(ROWS)]
    asked = prompts(f"embed {number}", ROWS)
    chats = [
        asyncio.ensure_future(server.chat(one, 4000, lambda row=row: row.append(time.monotonic())))
        for one, row in zip(asked, times, strict=True)
    ]

    def count_forwards() -> int:
        return counts(made_pool, "one")["forwards"]

    async def run_phase() -> tuple[float, float]:
        """Wait for PHASE_SECONDS, and until each chat has one more token. Return the begin and the end."""
        before, begun = list(map(len, times)), time.monotonic()
        async with asyncio.timeout(60):
            await asyncio.sleep(PHASE_SECONDS)
            while any(map(int.__eq__, map(len, times), before)):  # noqa: ASYNC110  the chats report tokens to lists
                await asyncio.sleep(0.02)
        return begun, time.monotonic()

    during, before = list[float](), list[float]()
    texts: asyncio.Future[None] | None = None
    try:
        async with asyncio.timeout(60):
            while not all(times):  # noqa: ASYNC110  the chats report tokens to lists
                await asyncio.sleep(0.02)
        for pair in range(PHASE_PAIRS):
            before += between(times, *await run_phase())
            forwards = await asyncio.to_thread(count_forwards)
            texts = asyncio.ensure_future(embed(server, make_texts(number * PHASE_PAIRS + pair, TEXTS)))
            while await asyncio.to_thread(count_forwards) == forwards:
                assert not texts.done(), "the texts ended before their first forward"
            during += between(times, *await run_phase())
            assert not texts.done(), "the texts ended before the phase"
            texts.cancel()
            await asyncio.gather(texts, return_exceptions=True)
    finally:
        for future in (*chats, *([texts] if texts else [])):
            future.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    return during, before


def main() -> None:
    """Print the seconds in which the bare model in a folder computes the vectors of a round."""
    compute = load_bare(Path(sys.argv[1]))
    texts = make_texts(int(sys.argv[2]), SPEED_TEXTS)
    print(_time(lambda: compute(texts)))


if __name__ == "__main__":
    main()
