"""Rows of the HTTP side: CPU and latency per token and request, compared with the routers of other projects.

The peers route to mock nodes over HTTP. Our router uses scripted nodes over its link, started by `cluster up` and
`cluster join` as by a user, with keys and TLS on.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests.bench.engine.rows import missing, model
from tests.bench.router import load
from tests.bench.router.bodies import BODIES, hello
from tests.bench.router.peers import Peer, mlx_server, mock_nodes, nginx, sglang, tls_proxies
from tests.bench.row import Row, at_most, commit, not_measured, p99, ratio_of, spread
from tests.support.processes import Pool, pool

STREAMS, TOKENS, STEP_MS = 64, 470, 20
ROUNDS = 3
PLAIN_SECONDS, PLAIN_TOKENS = 4, range(4, 13)
"""Lengths differ, because answers of one length would all end, and restart, at the same instant."""
MANY, MANY_TOKENS, MANY_STEP_MS = 1000, 200, 50
APART, APART_TOKENS = 16, 60
ALONE, PAUSE = 100, 0.02
ASKED, REFUSED_WORD = 20, "elsewhere"
T = TypeVar("T")


def two_nodes(made: Pool, *settings: str) -> Peer:
    """Start a coordinator and two scripted nodes."""
    made.up()
    for name in ("one", "two"):
        made.join(name, *(f"engine.scripted.{setting}" for setting in settings))
    assert made.coordinator is not None
    agents = tuple(psutil.Process(node.pid) for node in made.nodes.values())
    return Peer("macpool", made.base, psutil.Process(made.coordinator.pid), made.key, agents)


def build() -> str:
    """Return the Python that runs this, because our CPU time depends on how Python was compiled."""
    return f"Python {sys.version.split()[0]} in {sys.base_prefix}"


@contextmanager
def node_kinds(step_ms: float) -> Iterator[dict[str, tuple[int, int]]]:
    """Run mock nodes of both kinds, and yield the ports of each.

    The first kind closes a connection after each answer and writes a step to one request after the other, as
    mlx_lm.server does. The second kind keeps connections and writes a step at once, as most servers do.
    """
    with mock_nodes(step_ms) as closing, mock_nodes(step_ms, 0, keeps=True) as keeping:
        yield {"close connections": closing, "keep connections and write a step at once": keeping}


# CPU


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of an event or a request: in the router, and in the agents on its nodes."""

    router: float
    agents: float


def in_rounds(peers: Sequence[Peer], measure: Callable[[Peer], T]) -> list[list[T]]:
    """Measure all peers in every round, each time in another order; round 0 is not counted."""
    found: list[list[T]] = []
    for number in range(ROUNDS + 1):
        first = number % len(peers)
        costs = [measure(peer) for peer in (*peers[first:], *peers[:first])]
        found.append([*costs[len(peers) - first :], *costs[: len(peers) - first]])
    return found[1:]


def per_event(peer: Peer) -> tuple[Cost, load.Seen]:
    """Play one round of streams. Raise RuntimeError unless every event came."""
    router, agents = peer.cpu(), peer.agents_cpu()
    seen = asyncio.run(load.streams(peer.base, peer.key, STREAMS, TOKENS))
    if seen.failed or seen.events != STREAMS * TOKENS:
        raise RuntimeError(f"{peer.name}: {seen.events} events of {STREAMS * TOKENS}, {seen.failed} streams failed")
    return _cost(peer, router, agents, seen.events), seen


def per_request(peer: Peer, body: Mapping[str, object]) -> Cost:
    """Send as many plain requests as complete in one round."""
    router, agents = peer.cpu(), peer.agents_cpu()
    try:
        requests = load.rush(peer.base, peer.key, 2 * STREAMS, PLAIN_SECONDS, PLAIN_TOKENS, body)
    except RuntimeError as error:
        error.add_note(f"this was {peer.name}")
        raise
    return _cost(peer, router, agents, requests)


def _cost(peer: Peer, router: float, agents: float, count: int) -> Cost:
    return Cost((peer.cpu() - router) / count * 1e6, (peer.agents_cpu() - agents) / count * 1e6)


def bench_stream(folder: Path) -> list[Row]:
    """Compare streamed tokens with nginx and sglang-router, and the transit time of a token with a node's socket."""
    with pool(folder) as made, node_kinds(STEP_MS) as kinds, ExitStack() as stack:
        ours = two_nodes(made, f"step_ms={STEP_MS}", "text=clock")
        peers = [
            (nodes, limit, stack.enter_context(start(folder, ports)))
            for nodes, ports in kinds.items()
            for limit, start in ((1.0, nginx), (0.6, sglang))
        ]
        found = in_rounds([ours, *(peer for *_, peer in peers)], per_event)
        (port, _) = list(kinds.values())[-1]
        bare = asyncio.run(load.streams(f"http://127.0.0.1:{port}", "x", STREAMS, TOKENS))
    rows = [
        _cpu(f"streamed token, nodes that {nodes}", limit, [(one[0][0], one[at][0]) for one in found], peer)
        for at, (nodes, limit, peer) in enumerate(peers, 1)
    ]
    transit = list(chain.from_iterable(one[0][1].transit for one in found))
    for name, most, figure in (("p50", 1.0, statistics.median), ("p99", 5.0, p99)):
        added = (figure(transit) - figure(bare.transit)) * 1000
        words = f"{added:.2f} ms ({figure(bare.transit) * 1000:.2f} ms from the node itself)"
        rows.append(Row(f"token transit {name}, added", f"<= {most:.0f} ms", words, added <= most, commit()))
    return rows


def bench_plain(folder: Path) -> list[Row]:
    """Compare plain requests with sglang-router, as many at once as nodes with 20 ms steps allow."""
    name = f"plain request, {2 * STREAMS} at a time, 4 to 12 steps of {STEP_MS} ms"
    return _bodies(folder, STEP_MS, 0.8, {name: hello()})


def bench_bodies(folder: Path) -> list[Row]:
    """Compare plain requests of three lengths with sglang-router, as many as complete."""
    return _bodies(folder, 1, 1.0, {f"body {name}": make() for name, make in BODIES.items()})


def _bodies(folder: Path, step_ms: int, limit: float, bodies: Mapping[str, Mapping[str, object]]) -> list[Row]:
    """Send each body to our router, and to sglang-router in front of both kinds of nodes.

    The gate refuses none of them, because refusals are not measured here.
    """
    with pool(folder) as made, node_kinds(step_ms) as kinds, ExitStack() as stack:
        ours = two_nodes(made, f"step_ms={step_ms}", "tools=true", "kv_per_token=1024")
        peers = [stack.enter_context(sglang(folder, ports)) for ports in kinds.values()]
        rows: list[Row] = []
        for name, body in bodies.items():
            found = in_rounds([ours, *peers], partial(per_request, body=body))
            rows += [
                _cpu(f"{name}, nodes that {nodes}", limit, [(one[0], one[at]) for one in found], peer)
                for at, (nodes, peer) in enumerate(zip(kinds, peers, strict=True), 1)
            ]
    return rows


def _cpu(name: str, limit: float, pairs: Sequence[tuple[Cost, Cost]], peer: Peer) -> Row:
    mine, other, ratio, ratios = ratio_of([(one.router, two.router) for one, two in pairs])
    agents = statistics.median(one.agents for one, _ in pairs)
    words = (
        f"({mine:.1f} against {other:.1f} us of CPU, and {agents:.1f} in our agents; by round {spread(ratios)}; "
        f"{build()})"
    )
    return at_most(name, limit, ratio, words, peer.name)


def bench_apart(folder: Path) -> list[Row]:
    """Compare the mock nodes with a real server of MLX, in two properties that change the work of a router.

    The first is the time between events of one step on different streams. A router that wakes up once for all of them
    has less to do. The second is whether the server keeps connections. If it does, a router need not connect for each
    request.
    """
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
    """Compare the delay that a router adds to a request that runs alone with the delay of sglang-router.

    The delay is the client's waiting time minus the waiting time at the socket of a mock node that keeps connections.
    This removes the client's own time from both sides. Our side has a second process on the node, the agent, and mutual
    TLS to that process. The last set-up gives both to the peer as well: nginx on the node. Our figure includes the time
    that the request spends on the node, where the scripted engine computes more than the mock node does.
    """
    with pool(folder) as made, node_kinds(0) as kinds, ExitStack() as stack:
        ours = two_nodes(made, "step_ms=0")
        peers = [stack.enter_context(sglang(folder, ports)) for ports in kinds.values()]
        (*_, keeping) = kinds.values()
        port, proxies = keeping[0], stack.enter_context(tls_proxies(folder, keeping))
        peers.append(stack.enter_context(sglang(folder, proxies, tls=True)))
        mock = Peer("the mock node", f"http://127.0.0.1:{port}", ours.process)
        found, nodes = in_rounds([ours, *peers, mock], _alone), _node_seconds(made)
    rows: list[Row] = []
    set_ups = (*kinds, "keep connections, with mutual TLS to nginx on the node")
    for at, (kind, peer) in enumerate(zip(set_ups, peers, strict=True), 1):
        alike = [(one[0] - one[-1], one[at] - one[-1]) for one in found]
        mine, other, ratio, ratios = ratio_of(alike)
        words = (
            f"({mine * 1e6:.0f} against {other * 1e6:.0f} us; by round {spread(ratios)}; ours is on its node for "
            f"{nodes * 1e6:.0f} us; {build()})"
        )
        rows.append(at_most(f"single plain request, added p50, nodes that {kind}", 1.0, ratio, words, peer.name))
    return rows


def _alone(peer: Peer) -> float:
    seen = asyncio.run(load.plain(peer.base, peer.key, 1, ALONE, 1, PAUSE))
    if seen.failed:
        raise RuntimeError(f"{seen.failed} requests failed")
    return statistics.median(seen.took)


def _node_seconds(made: Pool) -> float:
    """Return the median seconds from sending a request to the node's last frame, over the newest requests."""
    ended: list[dict[str, Any]] = made.get("/api/v1/requests?last=100")["requests"]
    sent = (next(step["at"] for step in one["steps"] if step["what"] == "sent") for one in ended)
    return statistics.median(one["seconds"] - at for one, at in zip(ended, sent, strict=True))


def bench_many(folder: Path) -> list[Row]:
    """Run a thousand streams at once through one process."""
    with pool(folder) as made:
        ours = two_nodes(made, f"step_ms={MANY_STEP_MS}", f"max_batch_size={MANY}", "text=clock", "memory=512GiB")
        before = ours.cpu(), ours.agents_cpu()
        seen = asyncio.run(load.streams(ours.base, ours.key, MANY, MANY_TOKENS))
        share, agents = (ours.cpu() - before[0]) / seen.seconds, (ours.agents_cpu() - before[1]) / seen.seconds
    pace = MANY_TOKENS / seen.seconds
    ok = share <= 1.0 and not seen.failed and seen.events == MANY * MANY_TOKENS and pace >= 0.9 * 1000 / MANY_STEP_MS
    figure = (
        f"{share:.2f} cores, {agents:.2f} in both agents, {seen.events} of {MANY * MANY_TOKENS} events at {pace:.1f} a "
        f"second each, transit p50 {statistics.median(seen.transit) * 1000:.1f} and p99 "
        f"{p99(seen.transit) * 1000:.1f} ms (the clients' own "
        "reading included)"
    )
    return [Row(f"{MANY} streams of {1000 // MANY_STEP_MS} tokens/s", "one core", figure, ok, commit())]


# refusals


def bench_refusing(folder: Path) -> list[Row]:
    """Measure the extra time of a request that one of two nodes refuses. Then both nodes refuse."""
    with pool(folder) as made:
        made.up("router.queue_timeout_seconds=2")
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
        Row(
            "one of two nodes refuses",
            "all answered, < 10 ms more at worst",
            f"{answered} of {2 * ASKED} answered, {len(moved)} of them after a refusal, {extra:.1f} ms more at worst",
            answered == 2 * ASKED and extra < 10,
            commit(),
        ),
        Row(
            "all refuse",
            "503 with numbers, <= 10 ms after the decision",
            f"{last.status} after {last.seconds:.2f} s, {after:.1f} ms after the decision",
            last.status == 503 and last.memory and after <= 10,
            commit(),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Told:
    """End of one request: its status, the number of attempts, whether memory numbers came, and its seconds."""

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
