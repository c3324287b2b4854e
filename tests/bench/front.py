"""Rows of the front door: what a token and a request cost beside what others put in front of their nodes.

The peers route to mock nodes over HTTP; our own routes to scripted nodes over its link, started by `cluster up` and
`cluster join` as a user would, keys and TLS on.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.bench import load
from tests.bench.bodies import BODIES
from tests.bench.engine import missing, model
from tests.bench.peers import NGINX, SGLANG, Peer, mlx_server, mock_nodes, nginx, sglang
from tests.bench.row import Row, at_most, commit, not_measured, p99, ratio_of, spread
from tests.support.processes import Pool, pool

STREAMS, TOKENS, STEP_MS = 64, 940, 20
ROUNDS = 5
PLAIN_SECONDS, PLAIN_TOKENS = 6, range(4, 13)
"""Answers of one length would end in one instant, all of them, and so would the next ones."""
MANY, MANY_TOKENS, MANY_STEP_MS = 1000, 200, 50
APART, APART_TOKENS = 16, 60
ALONE, PAUSE = 100, 0.02
ASKED, REFUSED_WORD = 20, "elsewhere"
SMALL = "kv_per_token=1024"
"""So little of a node's memory that 128 agents fit in two: what is measured is not the refusing."""


def two_nodes(made: Pool, *settings: str) -> Peer:
    """Start a coordinator and two scripted nodes."""
    made.up()
    for name in ("one", "two"):
        made.join(name, *(f"engine.scripted.{setting}" for setting in settings))
    assert made.coordinator is not None
    return Peer("macpool", made.base, psutil.Process(made.coordinator.pid), made.key)


def build() -> str:
    """Say which Python runs this: what our side costs depends on how it was compiled."""
    return f"Python {sys.version.split()[0]} in {sys.base_prefix}"


# CPU


def per_event(peer: Peer) -> load.Seen:
    """Play one round of streams; RuntimeError unless every event came."""
    before = peer.cpu()
    seen = asyncio.run(load.streams(peer.base, peer.key, STREAMS, TOKENS))
    if seen.failed or seen.events != STREAMS * TOKENS:
        raise RuntimeError(f"{seen.events} events of {STREAMS * TOKENS}, {seen.failed} streams failed")
    seen.cpu = (peer.cpu() - before) / seen.events * 1e6
    return seen


def per_request(peer: Peer, body: Mapping[str, object] | None = None) -> float:
    """Return CPU microseconds per plain request over one round."""
    before = peer.cpu()
    try:
        requests = load.rush(peer.base, peer.key, 2 * STREAMS, PLAIN_SECONDS, PLAIN_TOKENS, body)
    except RuntimeError as error:
        error.add_note(f"this was {peer.name}")
        raise
    return (peer.cpu() - before) / requests * 1e6


def bench_stream(folder: Path) -> list[Row]:
    """Streamed tokens against nginx and sglang-router; and how long a token is under way, against a node's socket. Told
    is what nginx takes before nodes that write a step to all in one instant, too: none does, but it wakes up once
    for all of them then, as we do."""
    with (
        pool(folder) as made, mock_nodes(STEP_MS) as ports, mock_nodes(STEP_MS, 0, keeps=True) as at_once,
        nginx(folder, ports) as plain, sglang(folder, ports) as smart, nginx(folder, at_once) as spared,
    ):  # fmt: skip
        ours = two_nodes(made, f"step_ms={STEP_MS}", "text=clock")
        found = [[per_event(peer) for peer in (ours, plain, smart, spared)] for _ in range(ROUNDS + 1)][1:]
        bare = asyncio.run(load.streams(f"http://127.0.0.1:{at_once[0]}", "x", STREAMS, TOKENS))
    mine = [one.transit for one, *_ in found]
    rows = [
        _cpu("streamed token", 1.0, [(one[0].cpu, one[1].cpu) for one in found], NGINX, "events"),
        _cpu("streamed token", 0.6, [(one[0].cpu, one[2].cpu) for one in found], SGLANG, "events"),
    ]
    _, least, ratio, ratios = ratio_of([(one[0].cpu, one[3].cpu) for one in found])
    told = f"{ratio:.2f} x {NGINX} ({least:.1f} us of CPU; by round {spread(ratios)})"
    rows.append(Row("streamed token, before nodes that write to all in one instant", "told", told, True, commit()))
    for name, most, figure in (("p50", 1.0, statistics.median), ("p99", 5.0, p99)):
        added = (figure(list(chain(*mine))) - figure(bare.transit)) * 1000
        words = f"{added:.2f} ms ({figure(bare.transit) * 1000:.2f} ms from the node itself)"
        rows.append(Row(f"token transit {name}, added", f"<= {most:.0f} ms", words, added <= most, commit()))
    return rows


def bench_plain(folder: Path) -> list[Row]:
    """Plain requests against sglang-router: as many as go through, and as many as nodes of 20 ms steps let through.
    The first rows are before nodes that close a connection after each answer, as mlx_lm.server does; the others before
    nodes that keep them, which costs a peer half as much. Ours has one connection to a node in any case."""
    rows: list[Row] = []
    for step, load_ in (
        (1, "as many as go through"),
        (STEP_MS, f"{2 * STREAMS} at a time, 4 to 12 steps of {STEP_MS} ms"),
    ):
        part = folder / str(step)
        part.mkdir()
        with (
            pool(part) as made, mock_nodes(step) as ports, mock_nodes(step, keeps=True) as kept,
            sglang(part, ports) as peer, sglang(part, kept) as spared,
        ):  # fmt: skip
            ours = two_nodes(made, f"step_ms={step}", SMALL)
            found = [[per_request(one) for one in (ours, peer, spared)] for _ in range(ROUNDS + 1)][1:]
        name = f"plain request, {load_}"
        rows.append(_cpu(name, 0.6, [(one[0], one[1]) for one in found], SGLANG, "requests"))
        rows.append(_cpu(f"{name}, before nodes that keep connections", 0.8, [(one[0], one[2]) for one in found],
                         SGLANG, "requests"))  # fmt: skip
    return rows


def bench_bodies(folder: Path) -> list[Row]:
    """Plain requests of three lengths against sglang-router, as many as go through, before both kinds of nodes."""
    with (
        pool(folder) as made, mock_nodes(1) as ports, mock_nodes(1, keeps=True) as kept,
        sglang(folder, ports) as peer, sglang(folder, kept) as spared,
    ):  # fmt: skip
        ours = two_nodes(made, "step_ms=1", "tools=true", SMALL)
        rows: list[Row] = []
        for name, make in BODIES.items():
            body = make()
            found = [[per_request(one, body) for one in (ours, peer, spared)] for _ in range(ROUNDS + 1)][1:]
            for number, nodes in ((1, "close connections"), (2, "keep connections")):
                pairs = [(one[0], one[number]) for one in found]
                rows.append(_cpu(f"body {name}, before nodes that {nodes}", 1.0, pairs, SGLANG, "requests"))
    return rows


def _cpu(name: str, limit: float, pairs: list[tuple[float, float]], peer: str, what: str) -> Row:
    mine, other, ratio, ratios = ratio_of(pairs)
    words = f"({mine:.1f} against {other:.1f} us of CPU; by round of {what} {spread(ratios)}; {build()})"
    return at_most(name, limit, ratio, words, peer)


def bench_apart(folder: Path) -> list[Row]:
    """Whether peers stand before nodes like real ones: how far apart a server of MLX writes what one step gave its
    streams, and how far a mock node; and whether it keeps connections. A router that wakes up once for all streams of a
    step, or has not to connect for each request, has less to do."""
    events, kept = "events of one step, mock node", "plain answer, mock node"
    target = "no further apart than mlx_lm.server's"
    if missing():
        return [not_measured(name, target, missing()) for name in (events, kept)]
    with mock_nodes(STEP_MS) as ports, mlx_server(folder, model()) as real:
        (mock, its), (server, theirs) = [
            (load.apart(base, name, APART, APART_TOKENS, STEP_MS / 4000), load.manners(base, name))
            for base, name in ((f"http://127.0.0.1:{ports[0]}", "scripted-1"), (real.base, str(model())))
        ]
    ours, others = statistics.median(mock) * 1e6, statistics.median(server) * 1e6
    figure = f"{ours:.0f} us apart, mlx_lm.server's {others:.0f} us (medians; {APART} streams)"
    return [
        Row(events, target, figure, ours <= others, commit()),
        Row(kept, "as mlx_lm.server's", f"{its}; mlx_lm.server {theirs}", its == theirs, commit()),
    ]


# time


def bench_delay(folder: Path) -> list[Row]:
    """What a request alone waits for beside its node, against sglang-router. Ours is what the client waited without the
    time from sending to the node to the node's last word; told, too, is all but what the engine itself took."""
    with pool(folder) as made, mock_nodes(0, keeps=True) as ports, sglang(folder, ports) as peer:
        ours = two_nodes(made, "step_ms=0")
        direct = Peer("the node", f"http://127.0.0.1:{ports[0]}", peer.process)
        pairs, whole = list[tuple[float, float]](), list[float]()
        for _ in range(ROUNDS + 1):
            waited = _alone(ours)
            node, engine = _of_it(made)
            pairs.append(((waited - node) * 1e6, (_alone(peer) - _alone(direct)) * 1e6))
            whole.append((waited - engine) * 1e6)
    mine, other, ratio, ratios = ratio_of(pairs[1:])
    words = (
        f"({mine:.0f} against {other:.0f} us; by round {spread(ratios)}; with link, agent and the engine's socket "
        f"{statistics.median(whole[1:]):.0f} us; {build()})"
    )
    return [at_most("plain request alone, added p50", 0.8, ratio, words, SGLANG)]


def _alone(peer: Peer) -> float:
    seen = asyncio.run(load.plain(peer.base, peer.key, 1, ALONE, 1, PAUSE))
    if seen.failed:
        raise RuntimeError(f"{seen.failed} requests failed")
    return statistics.median(seen.took)


def _of_it(made: Pool) -> tuple[float, float]:
    """Give the medians, over the newest requests, of the seconds from sending to the node's last word, and of those of
    them that its engine says it took."""
    ended: list[dict[str, Any]] = made.get("/api/v1/requests?last=100")["requests"]
    sent = (next(step["at"] for step in one["steps"] if step["what"] == "sent") for one in ended)
    node = [one["seconds"] - at for one, at in zip(ended, sent, strict=True)]
    return statistics.median(node), statistics.median(sum(one["timings"].values()) for one in ended)


def bench_many(folder: Path) -> list[Row]:
    """A thousand streams at once through one process."""
    with pool(folder) as made:
        ours = two_nodes(made, f"step_ms={MANY_STEP_MS}", f"batch={MANY}", "text=clock", "memory=512GiB")
        before = ours.cpu()
        seen = asyncio.run(load.streams(ours.base, ours.key, MANY, MANY_TOKENS))
        share = (ours.cpu() - before) / seen.seconds
    pace = MANY_TOKENS / seen.seconds
    ok = share <= 1.0 and not seen.failed and seen.events == MANY * MANY_TOKENS and pace >= 0.9 * 1000 / MANY_STEP_MS
    figure = (
        f"{share:.2f} cores, {seen.events} of {MANY * MANY_TOKENS} events at {pace:.1f} a second each, transit p50 "
        f"{statistics.median(seen.transit) * 1000:.1f} and p99 {p99(seen.transit) * 1000:.1f} ms (the clients' own "
        "reading included)"
    )
    return [Row(f"{MANY} streams of {1000 // MANY_STEP_MS} tokens/s", "one core", figure, ok, commit())]


# refusals


def bench_refusing(folder: Path) -> list[Row]:
    """One of two nodes refuses: what that adds to who was sent there first. Then both refuse."""
    with pool(folder) as made:
        made.up("router.queue_seconds=2")
        made.join("one", "engine.scripted.step_ms=5", f"engine.scripted.refuse={REFUSED_WORD}")
        made.join("two", "engine.scripted.step_ms=5")
        key = {"authorization": f"Bearer {made.key}"}
        with httpx.Client(base_url=made.base, headers=key, timeout=30, trust_env=False) as client:
            took = {word: [_ask(client, word) for _ in range(2 * ASKED)] for word in ("here", REFUSED_WORD)}
            made.cli("node", "cordon", "two")
            last = _ask(client, REFUSED_WORD)
        decided = made.get("/api/v1/requests?last=1")["requests"][0]["seconds"]
    usual = statistics.median(one.seconds for one in took["here"])
    moved = [one for one in took[REFUSED_WORD] if one.attempts > 1]
    answered = sum(one.status == 200 for one in took[REFUSED_WORD])
    extra, after = (max(one.seconds for one in moved) - usual) * 1000, (last.seconds - decided) * 1000
    return [
        Row("one of two nodes refuses", "all answered, < 10 ms more at worst",
            f"{answered} of {2 * ASKED} answered, {len(moved)} of them after a refusal, {extra:.1f} ms more at worst",
            answered == 2 * ASKED and extra < 10, commit()),
        Row("all refuse", "503 with numbers, <= 10 ms after that was decided",
            f"{last.status} after {last.seconds:.2f} s, {after:.1f} ms after that was decided",
            last.status == 503 and last.memory and after <= 10, commit()),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """How one request ended: its status, how many nodes it was sent to, whether memory numbers came, in seconds."""

    status: int
    attempts: int
    memory: bool
    seconds: float


def _ask(client: httpx.Client, word: str) -> Told:
    body = {"model": "scripted-1", "messages": [{"role": "user", "content": word}], "max_tokens": 1}
    begun = time.monotonic()
    answer = client.post("/v1/chat/completions", json=body)
    seconds = time.monotonic() - begun
    memory = bool(answer.json().get("error", {}).get("memory"))
    return Told(answer.status_code, int(answer.headers.get("x-macpool-attempts", 1)), memory, seconds)


GROUPS: dict[str, Callable[[Path], list[Row]]] = {
    "stream": bench_stream,
    "plain": bench_plain,
    "bodies": bench_bodies,
    "apart": bench_apart,
    "delay": bench_delay,
    "many": bench_many,
    "refusing": bench_refusing,
}
