"""CPU time of metrics: a scrape of a pool of ten nodes with ten models each, and the counting of a request."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.metrics.exposition import render_metrics
from coordinator.metrics.families import collect_families
from coordinator.metrics.node_families import NODE
from router.dispatch.counters import Counters
from tests.bench.row import Row, commit
from tests.support.cluster.loopback_cluster import LoopbackNode, a_model
from tests.support.cluster.whole_pool import Served, served, status
from tests.support.pictures import node_picture, view
from wire.identity import NodeId

NODES = MODELS = 10
MAX_SERIES = 2000
"""Maximum series of all processes of such a pool."""
SCRAPES = 40
TIMES = 200_000


def bench_metrics(_: Path) -> list[Row]:
    """Measure all rows."""
    return [_scrape(), _per_request(), _per_step()]


def _scrape() -> Row:
    """Measure the coordinator's page over HTTP, and the rendering of all nodes' pages."""
    with full_pool() as pool:
        request = build_scrape(pool)
        pages, seconds = zip(*(_timed(lambda: pool.ask(request)) for _ in range(SCRAPES)), strict=True)
    coordinator = count_series(pages[-1][0])
    node, took = zip(*(_timed(render_node) for _ in range(SCRAPES)), strict=True)
    series = coordinator + NODES * count_series(node[-1])
    whole = statistics.median(seconds) + NODES * statistics.median(took)
    figure = (
        f"{whole * 1000:.1f} ms, {series} series (the coordinator's {statistics.median(seconds) * 1000:.1f} ms and "
        f"{coordinator}, a node's {statistics.median(took) * 1000:.1f} ms and {count_series(node[-1])})"
    )
    good = whole <= 0.05 and series <= MAX_SERIES
    return Row(f"scrape of {NODES} nodes with {MODELS} models", "<= 50 ms, <= 2,000 series", figure, good, commit())


@contextmanager
def full_pool() -> Iterator[Served]:
    """Run a coordinator with `NODES` nodes that have `MODELS` models each, after two requests to each model."""
    models = tuple(a_model(f"model-{number}") for number in range(MODELS))
    with served(*(LoopbackNode(f"n{number}", models=models) for number in range(NODES))) as pool:
        for number in range(MODELS):
            for stream in (False, True):
                assert all(status(one) == 200 for one in _ask(pool, f"model-{number}", stream=stream))
        yield pool


def build_scrape(pool: Served) -> bytes:
    """Return the request of a scrape of the coordinator."""
    key = pool.keys["metrics"]
    return f"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n\r\n".encode()


def render_node() -> bytes:
    """Return the metrics of a node with `MODELS` models."""
    return render_metrics(collect_families(NODE, node_picture(view(models=MODELS))), "")[0]


def count_series(answer: bytes) -> int:
    """Return the number of series in the metrics of a process, with or without a head of HTTP."""
    text = answer.partition(b"\r\n\r\n")[2] or answer
    return sum(bool(line) and not line.startswith(b"#") for line in text.splitlines())


def _per_request() -> Row:
    """Measure all counting of a request that is placed at once."""
    counters, node = Counters(), NodeId("n")

    def request() -> None:
        counters.placement.observe(0.00002)
        counters.count_attempt(node, first=True, resumed=False)
        counters.count_first_token(NodeId("a"), "model", 1, 0.2)
        counters.count_end("ok", "model", 1.5)

    took = _each(request)
    return Row("counting a request", "<= 2 us", f"{took * 1e6:.2f} us", took <= 2e-6, commit())


def _per_step() -> Row:
    """Measure the counting of one step of a node. All streams and tokens of the step share this cost."""
    counters, node = Counters(), NodeId("n")
    clock = time.monotonic
    took = _each(lambda: counters.record_decode_step(node, "model", 7, 8, clock()))
    return Row("counting a step of a node", "<= 2 us", f"{took * 1e6:.2f} us", took <= 2e-6, commit())


def _each(act: Callable[[], object]) -> float:
    def turn() -> float:
        began = time.perf_counter()
        for _ in range(TIMES):
            act()
        return (time.perf_counter() - began) / TIMES

    return statistics.median(turn() for _ in range(5))


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = act()
    return found, time.perf_counter() - began


def _ask(pool: Served, model: str, *, stream: bool) -> list[bytes]:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {pool.keys['infer']}\r\n"
    return pool.ask(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
