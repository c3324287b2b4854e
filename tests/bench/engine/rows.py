"""Rows of the MLX engine: the complete stack over HTTP compared with mlx-lm, and the limits of the engine itself.

The model is random, with 42 million parameters in fp32: its speed is that of a larger model, its text has no meaning.
Both sides compute with the same BLAS in one thread. Prompts are new in every round, because a prefix cache must not
help.
"""

import asyncio
import json
import logging
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil
import structlog

from tests import models
from tests.bench.engine import pressure, tokenize, torture
from tests.bench.engine.chats import Chat, body, chat, words
from tests.bench.router.peers import library, mlx_server
from tests.bench.row import Row, at_least, at_most, commit, in_turn, not_measured, p99, ratio_of, spread
from tests.support.processes import ROOT, Pool, environment, pool, until

ROUNDS = 4
ROWS = 8
PROMPT_WORDS = 98
"""With the template 108 tokens."""
LONG_WORDS = 5990
TURN_WORDS = 1490
ALONE_WORDS = 1990
"""A prompt that runs alone. Its 2,000 tokens are the part of a long prompt that is prefilled before a client
disconnects."""
DECODE_TOKENS = 80
ANSWER_TOKENS = 32
QUIET_STEPS = 200
ROOMS = (32, 64, 128)
ORACLE_SHARE, ORACLE_FROM = 0.65, 64
STEADY_COUNT, STEADY_ROOM, STEADY_CLIENTS = 2000, 64, 2
"""Prompts, MiB above rest, clients at once."""
TORTURE_SECONDS, UNGUARDED_SECONDS = 75.0, 20.0
ITL_ROUNDS = 1
LOGS_SHOWN = 2000
CANCELS = 4
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Server:
    """A server of the model: its base URL, a key, and the name of the model there."""

    base: str
    key: str
    model: str

    async def chat(self, prompt: str, tokens: int, heard: Callable[[], object] | None = None) -> Chat:
        """Send a chat; raise RuntimeError unless all tokens came, each in an event of its own."""
        seen = await chat(self.base, self.key, body(self.model, prompt, tokens), heard)
        if seen.error or not seen.ended or seen.tokens != tokens or len(seen.times) != tokens:
            raise RuntimeError(f"{len(seen.times)} events, {seen.tokens} tokens of {tokens}: {seen.error}")
        return seen


def model() -> Path:
    """Return the model's folder; make it if it does not exist."""
    return models.path("llama", trained=False, preset="bench50m")


def missing() -> str:
    """Return a missing requirement of these rows; empty when there is none."""
    if sys.platform == "linux" and not models.fast_blas():
        return "OpenBLAS is not installed (Debian: apt-get install libopenblas0-pthread)"
    return ""


@contextmanager
def one_node(folder: Path, more: Path | None = None, *names: str) -> Iterator[tuple[Pool, Server]]:
    """Start a coordinator and a node as a user would, with keys and TLS on and the model loaded.

    `more` is a folder of further models, of which `names` are loaded as well.
    """
    with pool(folder) as made:
        made.up()
        name = model().name
        made.join(
            "one",
            "engine.kind=mlx",
            "models.use_huggingface_cache=false",
            f"models.folders={','.join(map(str, filter(None, (model(), more))))}",
            f"models.preload={','.join((name, *names))}",
        )
        wanted = {name, *names}
        until(lambda: wanted <= {one["id"] for one in made.get("/v1/models")["data"]}, what="the models")
        try:
            yield made, Server(made.base, made.key, name)
        except Exception as error:
            for log in (folder / "one" / "logs").iterdir():
                error.add_note(f"{log.name}: {log.read_text()[-LOGS_SHOWN:]}")
            raise


def prompts(seed: str, count: int, length: int = PROMPT_WORDS) -> list[str]:
    """Return prompts that no round has used."""
    random = Random(seed)
    return [words(random, length) for _ in range(count)]


# decode


def bench_decode(folder: Path) -> list[Row]:
    """Compare eight decoding rows, over HTTP, with mlx-lm's own batch in one process."""
    name, peer = f"{ROWS} rows decoding", "mlx-lm's BatchGenerator"
    if missing():
        return [not_measured(name, f">= 0.95 x {peer}", missing())]
    with one_node(folder) as (_, ours), library(model()) as theirs:

        def over_http(number: int) -> float:
            return steady(asyncio.run(_times(ours, prompts(f"decode {number}", ROWS))))

        def alone(number: int) -> float:
            return steady(theirs.generate(prompts(f"decode {number}", ROWS), DECODE_TOKENS))

        mine, other, ratio, ratios = ratio_of(in_turn(over_http, alone, ROUNDS))
    figure = f"({mine:.1f} against {other:.1f} tokens/s while all decode; by round {spread(ratios)})"
    return [at_least(name, 0.95, ratio, figure, peer)]


async def _times(server: Server, asked: Sequence[str]) -> list[list[float]]:
    seen = await asyncio.gather(*[server.chat(prompt, DECODE_TOKENS) for prompt in asked])
    return [one.times for one in seen]


def steady(rows: Sequence[Sequence[float]]) -> float:
    """Return the tokens per second while all rows decode: from the last row's first token to the first row's last."""
    begin, end = max(row[0] for row in rows), min(row[-1] for row in rows)
    return sum(begin < when <= end for row in rows for when in row) / (end - begin)


# server


def bench_server(folder: Path) -> list[Row]:
    """Compare streams of 108 prompt and 32 generated tokens, one and eight at a time, with mlx_lm.server.

    The figure includes the forwards per prompt. A prompt whose prefill takes more than 0.25 s alone is prefilled in
    small chunks while other rows decode. Small chunks keep the gaps of those rows short, but need many forwards. The
    row therefore depends on the speed of the machine.
    """
    peer = "mlx_lm.server"
    if missing():
        return [not_measured("streams of the MLX engine", f">= 1.0 and 1.1 x {peer}", missing())]
    rows: list[Row] = []
    with one_node(folder) as (made, ours), mlx_server(folder, model()) as started:
        theirs = Server(started.base, "none", str(model()))
        for lanes, each, least in ((1, 3, 1.0), (8, 2, 1.1)):
            before = _counts(made)["forwards"]
            pairs = in_turn(_loaded(ours, lanes, each), _loaded(theirs, lanes, each), ROUNDS)
            mine, other, ratio, ratios = ratio_of([(one.speed, two.speed) for one, two in pairs])
            forwards = (_counts(made)["forwards"] - before) / (lanes * each * (ROUNDS + 1))
            words = f"({mine:.1f} against {other:.1f} tokens/s; by round {spread(ratios)}; "
            figure = f"{words}{forwards:.1f} forwards a prompt)"
            rows.append(at_least(f"tokens/s, {lanes} at a time", least, ratio, figure, peer))
            mine, other, ratio, ratios = ratio_of([(one.first, two.first) for one, two in pairs])
            figure = f"({mine * 1000:.0f} against {other * 1000:.0f} ms; by round {spread(ratios)})"
            rows.append(at_most(f"first token p50, {lanes} at a time", 1.0, ratio, figure, peer))
    return rows


@dataclass(frozen=True, slots=True)
class Load:
    """Result of one load: tokens per second in total, and median seconds to the first token."""

    speed: float
    first: float


def _loaded(server: Server, lanes: int, each: int) -> Callable[[int], Load]:
    async def lane(asked: Sequence[str]) -> list[Chat]:
        return [await server.chat(prompt, ANSWER_TOKENS) for prompt in asked]

    async def run(number: int) -> Load:
        asked = prompts(f"server {lanes} {number}", lanes * each)
        begun = time.monotonic()
        found = await asyncio.gather(*[lane(asked[first::lanes]) for first in range(lanes)])
        seen = [one for part in found for one in part]
        speed = sum(one.tokens for one in seen) / (time.monotonic() - begun)
        return Load(speed, statistics.median(one.first for one in seen))

    return lambda number: asyncio.run(run(number))


# gaps between tokens


def bench_itl(folder: Path) -> list[Row]:
    """Measure how far the gaps of seven decoding chats grow when a prompt of 6,000 tokens arrives."""
    name, peer = "gap between tokens p99 of 7 chats during a prompt of 6,000 tokens", "quiet"
    if missing():
        return [not_measured(name, f"<= 3 x {peer}", missing())]
    with one_node(folder) as (_, ours):
        found = [asyncio.run(_gaps(ours, number)) for number in range(ITL_ROUNDS)]
    loud, quiet, ratio, ratios = ratio_of([(p99(one.loud), p99(one.quiet)) for one in found])
    figure = (
        f"({loud * 1000:.0f} against {quiet * 1000:.0f} ms; by round {spread(ratios)}; medians "
        f"{statistics.median(found[-1].loud) * 1000:.0f} and {statistics.median(found[-1].quiet) * 1000:.0f} ms; its "
        f"first token after {found[-1].first:.1f} s)"
    )
    return [at_most(name, 3.0, ratio, figure, peer)]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps in seconds, before the long prompt, after it and until its first token, and the seconds to that token."""

    quiet: list[float]
    loud: list[float]
    first: float


async def _gaps(server: Server, number: int) -> Gaps:
    """Measure a quiet phase, a phase with the long prompt, and a second quiet phase, because the answers are longer by
    then."""
    times: list[list[float]] = [[] for _ in range(ROWS - 1)]
    heard = asyncio.Event()

    def hears(row: list[float]) -> Callable[[], None]:
        def hear() -> None:
            row.append(time.monotonic())
            heard.set()

        return hear

    async def all_have(steps: int) -> None:
        while min(len(row) for row in times) < steps:
            heard.clear()
            await asyncio.wait_for(heard.wait(), 60)

    asked = prompts(f"itl {number}", ROWS - 1)
    chats = [asyncio.ensure_future(server.chat(one, 4000, hears(row))) for one, row in zip(asked, times, strict=True)]
    try:
        await all_have(QUIET_STEPS)
        begun, settled = time.monotonic(), max(row[0] for row in times)
        (long,) = prompts(f"itl long {number}", 1, LONG_WORDS)
        first = (await asyncio.wait_for(server.chat(long, 1), 300)).times[0]
        await all_have(max(len(row) for row in times) + QUIET_STEPS)
    finally:
        for one in chats:
            one.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    quiet = between(times, settled, begun) + between(times, first, math.inf)
    return Gaps(quiet, between(times, begun, first), first - begun)


def between(times: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Return the gaps in seconds between the tokens of all rows, from the monotonic time `begin` to `end`."""
    pairs = [pair for row in times for pair in pairwise(row)]
    return [after - before for before, after in pairs if begin <= before and after <= end]


# cancel


def bench_cancel(folder: Path) -> list[Row]:
    """Measure the time from a client's disconnect during a long prefill until memory and commitments are released."""
    name, target = "disconnect to released memory", "<= 1 chunk + 100 ms"
    if missing():
        return [not_measured(name, target, missing())]
    with one_node(folder) as (made, ours):
        engine = _engine(made)
        _warmed, chunk = [asyncio.run(_chunk_seconds(made, ours, number)) for number in range(2)]
        found = [asyncio.run(_hang_up(ours, engine, 0.5 + 0.37 * number, number)) for number in range(CANCELS)]
        until(lambda: not _reserved(made), 10, "the node's reserved memory back at 0")
    worst, most = max(one.seconds for one in found), chunk + 0.1
    figure = (
        f"{worst * 1000:.0f} ms at most, {statistics.median(one.seconds for one in found) * 1000:.0f} ms median "
        f"of {CANCELS} (a chunk takes {chunk * 1000:.0f} ms; {max(one.size for one in found) / MIB:.0f} MiB released; "
        "reserved is 0 again)"
    )
    return [Row(name, target, figure, worst <= most, commit())]


def _engine(made: Pool) -> psutil.Process:
    """Return the engine's process below the node."""
    return next(one for one in made.nodes["one"].children() if "node.engine.process.main" in one.cmdline())


def _counts(made: Pool) -> dict[str, int]:
    return made.node("one")["engine"]["counts"]


def _reserved(made: Pool) -> int:
    return made.node("one")["reserved"]


async def _chunk_seconds(made: Pool, server: Server, number: int) -> float:
    """Return the mean time of a chunk of a long prompt that runs alone."""
    before = _counts(made)
    (long,) = prompts(f"cancel alone {number}", 1, ALONE_WORDS)
    seen = await server.chat(long, 2)  # the second token needs a step, whose report has all chunks
    until(lambda: _counts(made)["steps"] > before["steps"], what="the report of its step")
    return seen.first / max(1, _counts(made)["forwards"] - before["forwards"] - 1)


@dataclass(frozen=True, slots=True)
class Freed:
    """Seconds until the memory was released, and its bytes."""

    seconds: float
    size: int


async def _hang_up(server: Server, engine: psutil.Process, after: float, number: int) -> Freed:
    """Disconnect `after` seconds into a long prompt, and measure until nine tenths of its memory are released."""
    base = engine.memory_info().rss
    (long,) = prompts(f"cancel {number}", 1, LONG_WORDS)
    asking = asyncio.ensure_future(server.chat(long, 1))
    await asyncio.sleep(after)
    taken = engine.memory_info().rss - base
    asking.cancel()
    begun = time.monotonic()
    with suppress(asyncio.CancelledError):
        await asking
    while engine.memory_info().rss > base + taken // 10:
        if time.monotonic() - begun > 10:
            raise RuntimeError(f"{(engine.memory_info().rss - base) / MIB:.0f} MiB are still held after 10 s")
        await asyncio.sleep(0.002)
    return Freed(time.monotonic() - begun, taken)


# gate


def bench_gate(_: Path) -> list[Row]:
    """Measure one check of the gate of a real engine with eight rows and live readings."""
    name, target = "gate, per chunk", "<= 30 us"
    if missing():
        return [not_measured(name, target, missing())]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.engine.gate", str(model()), str(ROWS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=environment(**models.fast_blas()),
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])["microseconds"]
    cost = statistics.median(figures)
    figure = f"{cost:.1f} us of CPU ({min(figures):.1f} to {max(figures):.1f} by round, {ROWS} rows)"
    return [Row(name, target, figure, cost <= 30, commit())]


# prefix cache


def bench_prefix(folder: Path) -> list[Row]:
    """Compare the first token of a chat's second turn, after 1,500 tokens, with and without the cached prefix."""
    name, peer = "first token of a second turn, 1,500 tokens before it", "a new chat"
    if missing():
        return [not_measured(name, f"<= 0.35 x {peer}", missing())]
    rows: list[Row] = []
    with one_node(folder) as (_, ours), mlx_server(folder, model()) as started:
        theirs = Server(started.base, "none", str(model()))
        pairs = in_turn(_second_turn(ours, "ours", known=True), _second_turn(ours, "ours", known=False), ROUNDS)
        hit, cold, ratio, ratios = ratio_of(pairs)
        figure = f"({hit * 1000:.0f} against {cold * 1000:.0f} ms; by round {spread(ratios)})"
        rows.append(at_most(name, 0.35, ratio, figure, peer))
        pairs = in_turn(_second_turn(ours, "beside", known=True), _second_turn(theirs, "beside", known=True), ROUNDS)
        mine, other, ratio, ratios = ratio_of(pairs)
        figure = f"({mine * 1000:.0f} against {other * 1000:.0f} ms; by round {spread(ratios)})"
        rows.append(at_most(name, 1.0, ratio, figure, "mlx_lm.server"))
    return rows


def _second_turn(server: Server, seed: str, *, known: bool) -> Callable[[int], float]:
    """Return a function for the seconds to the first token of a second turn.

    If not `known`, the server has processed another first turn.
    """

    def run(number: int) -> float:
        first, other, second = prompts(f"prefix {seed} {known} {number}", 3, TURN_WORDS)
        asked = [{"role": "user", "content": first}]
        asyncio.run(server.chat(first if known else other, ANSWER_TOKENS))
        told = [*asked, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": second[:100]}]
        whole = body(server.model, "", ANSWER_TOKENS) | {"messages": told}
        return asyncio.run(chat(server.base, server.key, whole)).first

    return run


def bench_estimate(_: Path) -> list[Row]:
    """Compare the fitted estimate with MLX's peak, on six architectures, at chunks that the probe did not use."""
    name, target = "estimate / measured peak on six architectures", "1.00 to 1.25"
    if missing():
        return [not_measured(name, target, missing())]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.engine.estimate"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env=environment(**models.fast_blas()),
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, list[tuple[float, float]]] = json.loads(done.stdout.splitlines()[-1])
    spans = {arch: (min(peak for peak, _ in pairs), max(peak for peak, _ in pairs)) for arch, pairs in found.items()}
    low, high = min(span[0] for span in spans.values()), max(span[1] for span in spans.values())
    each = ", ".join(f"{arch} {least:.2f} to {most:.2f}" for arch, (least, most) in spans.items())
    return [Row(name, target, f"{low:.3f} to {high:.3f} ({each})", low >= 1.0 and high <= 1.25, commit())]


def bench_grammar(_: Path) -> list[Row]:
    """Measure a step's mask at a vocabulary of 152,000, and the time to refuse the worst hostile grammar."""
    step, refusal = "CPU of a step's mask at 151,936 tokens, p99", "hostile grammar refused, the slowest"
    if missing():
        return [not_measured(step, "<= 1.5 ms", missing()), not_measured(refusal, "<= 100 ms", missing())]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.engine.grammar"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env=environment(**models.fast_blas()),
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    times: list[float] = min(found["steps"], key=p99)
    refusals: dict[str, float] = found["refusals"]
    slow = max(refusals, key=refusals.__getitem__)
    figure = f"{p99(times):.2f} ms (median {statistics.median(times):.2f}, {len(times)} steps, the best of 5 rounds)"
    worst = f"{refusals[slow]:.0f} ms ({slow}; {len(refusals)} of 8 refused)"
    return [
        Row(step, "<= 1.5 ms", figure, p99(times) <= 1.5, commit()),
        Row(refusal, "<= 100 ms", worst, refusals[slow] <= 100 and len(refusals) == 8, commit()),
    ]


# memory


def bench_torture(folder: Path) -> list[Row]:
    """Run more than fits under each cap; then a part of it without the guard, which must exceed the cap."""
    name = "torture: cap = rest + {} MiB"
    if missing():
        return [not_measured(name.format(room), "0 over", missing()) for room in ROOMS]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torture.lay_out(folder)
    rest, costs = asyncio.run(torture.alone(folder))
    rate = torture.arrival_rate(costs)
    rows: list[Row] = []
    for room in ROOMS:
        cap = rest + room * MIB
        seen = asyncio.run(torture.torture(folder, cap, TORTURE_SECONDS, rate))
        held, share, words = torture.verdict(seen, costs, room * MIB, TORTURE_SECONDS)
        ok = held and (share >= ORACLE_SHARE or room < ORACLE_FROM)
        target = "0 over, 0 lost" + (
            f", >= {ORACLE_SHARE} x the tokens of an upper bound" if room >= ORACLE_FROM else ""
        )
        below = (cap - seen.highest) / MIB
        rows.append(Row(name.format(room), target, f"{share:.2f} x, {below:.1f} MiB below; {words}", ok, commit()))
        if room == ORACLE_FROM:
            rows.append(_torture_with_texts(folder, cap, room, costs, name.format(room)))
        free = asyncio.run(torture.torture(folder, cap, UNGUARDED_SECONDS, rate, guard=False))
        above = (free.highest - cap) / MIB
        rows.append(
            Row(f"{name.format(room)}, guard off", "over the cap", f"{above:.1f} MiB over", above > 0, commit())
        )
    return rows


def _torture_with_texts(
    folder: Path, cap: int, room: int, costs: Mapping[torture.Kind, torture.Cost], name: str
) -> Row:
    """Run more than fits, with chats and requests for embeddings and scores."""
    seconds = TORTURE_SECONDS / 3
    seen = asyncio.run(torture.torture(folder, cap, seconds, torture.arrival_rate(costs), texts=True))
    held, _, _ = torture.verdict(seen, costs, room * MIB, seconds)
    ok = held and seen.texts.keys() <= torture.CLEAN and seen.texts["done"] > 0
    below = (cap - seen.highest) / MIB
    words = f"{seen.over} of {seen.samples} samples over, {below:.1f} MiB below; texts {dict(seen.texts)}"
    return Row(f"{name}, with embeddings and scores", "0 over, 0 lost", words, ok, commit())


def bench_steady(folder: Path) -> list[Row]:
    """Run unique prompts, one after the other, with full memory: each prompt evicts an older prefix."""
    name, target = f"steady state: {STEADY_COUNT} unique prompts near the limit", "0 refused, 0 over, 0 restarts"
    if missing():
        return [not_measured(name, target, missing())]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torture.lay_out(folder)
    rest, _ = asyncio.run(torture.alone(folder))
    seen = asyncio.run(torture.steady(folder, rest + STEADY_ROOM * MIB, STEADY_COUNT, STEADY_CLIENTS))
    ends = seen.outcomes()
    ok = ends == {"done": STEADY_COUNT} and not seen.over and not seen.restarts and seen.evicted > STEADY_COUNT / 2
    words = f"{ends}, {seen.over} of {seen.samples} samples over, {seen.restarts} restarts, {seen.evicted} evictions"
    return [Row(name, target, words, ok, commit())]


GROUPS: dict[str, Callable[[Path], list[Row]]] = {
    "decode": bench_decode,
    "server": bench_server,
    "itl": bench_itl,
    "cancel": bench_cancel,
    "gate": bench_gate,
    "prefix": bench_prefix,
    "estimate": bench_estimate,
    "torture": bench_torture,
    "pressure": pressure.bench_pressure,
    "tokenize": tokenize.bench_tokenize,
    "grammar": bench_grammar,
    "steady": bench_steady,
}
