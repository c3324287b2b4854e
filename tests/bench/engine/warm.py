"""Rows of the prefix cache in memory: an exact repeat and a warm prompt against a cold one, and those of mlx_lm.server.

Each prompt is sent three times: new, again, and with another end. Both servers get the same prompts in the same run.
"""

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.bench.engine.rows import Server, model, one_node, prompts
from tests.bench.router.peers import mlx_server
from tests.bench.row import Row, commit, in_turn, spread

ROUNDS = 3
WORDS = 1490
OTHER_WORDS = 20
"""Words at the end of the warm prompt that differ."""
WARM, EXACT = 0.15, 0.12


class FirstTokens(NamedTuple):
    """Seconds to the first tokens of a prompt."""

    cold: float
    exact: float
    warm: float


def bench_warm(folder: Path) -> list[Row]:
    """Compare the first token of a cached prompt with that of a new one, on both servers."""
    with one_node(folder) as (_, ours), mlx_server(folder, model()) as started:
        theirs = Server(started.base, "none", str(model()))
        pairs = in_turn(_measure(ours), _measure(theirs), ROUNDS)
    mine, other = zip(*pairs, strict=True)
    return [
        _compare("exact repeat of 1,500 tokens", EXACT, mine, other, lambda one: one.exact),
        _compare("1,500 tokens with another end", WARM, mine, other, lambda one: one.warm),
    ]


def _measure(server: Server) -> Callable[[int], FirstTokens]:
    def run(number: int) -> FirstTokens:
        (prompt,) = prompts(f"warm {number}", 1, WORDS)
        (end,) = prompts(f"end {number}", 1, OTHER_WORDS)
        shared = prompt.split(" ")[:-OTHER_WORDS]
        asked = (prompt, prompt, " ".join([*shared, end]))
        return FirstTokens(*(asyncio.run(server.chat(one, 2)).first for one in asked))

    return run


def _compare(
    name: str,
    most: float,
    mine: tuple[FirstTokens, ...],
    other: tuple[FirstTokens, ...],
    get: Callable[[FirstTokens], float],
) -> Row:
    ours, theirs = ([get(one) / one.cold for one in side] for side in (mine, other))
    ratio, times = statistics.median(ours), [_describe(side, get) for side in (mine, other)]
    figure = (
        f"{ratio:.3f} x ({times[0]}; by round {spread(ours)}); "
        f"mlx_lm.server {statistics.median(theirs):.3f} x ({times[1]}; by round {spread(theirs)})"
    )
    return Row(f"memory cache: {name}", f"<= {most} x cold", figure, ratio <= most, commit())


def _describe(side: tuple[FirstTokens, ...], get: Callable[[FirstTokens], float]) -> str:
    first, cold = statistics.median(map(get, side)), statistics.median(one.cold for one in side)
    return f"{first * 1000:.0f} of {cold * 1000:.0f} ms"
