"""Every panel of every dashboard, evaluated by a real Prometheus over a real pool under load: each must have data."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.metrics.scrape_config import render_configuration
from dashboards.generate import BOARDS
from dashboards.panels import ANNOTATIONS, Board, Kind, Panel
from tests.support.cluster.engine_pool import HELLO, MLX, said
from tests.support.processes import NO_TLS, Pool, get_ray_ports, pool, until
from tests.support.prometheus import Prometheus, needs, prometheus, token_file
from tests.support.video.chain import until_ray
from tests.support.video.studio import words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEP, WINDOW = 2, 30
SECONDS = {"__rate_interval": "20s", "__interval": f"{STEP}s", "__range": "120s"}
EMPTY = {
    "Requests to upstreams": "only once a request was passed on to an upstream",
    "Tokens of upstreams": "only once a request was passed on to an upstream",
    "Loads under way": "only while a model is loaded",
    "Models that differ": "only while members hold different models under one name",
    "Failures": "only once a video failed",
    "Pressure": "only where the system has a word for it: macOS, and Linux with pressure stalls",
}
"""Panels that may have no data, and the reasons."""
SMALL = (
    "engine.scripted.memory=16GiB",
    "engine.scripted.kv_per_token=16777216",
    "engine.scripted.max_context=512",
    "engine.scripted.refuse=forbidden",
    "engine.scripted.step_ms=10",
    "engine.scripted.tokens=40",
)
"""A node with memory for a few requests at a time, which refuses requests with that word."""
CLIP = {"model": "tiny-wan", "prompt": "a red fox", "size": "64x48", "frames": 9, "fps": 8, "steps": 4, "seed": 1}
RAY_PORTS = get_ray_ports(3)
"""A port range of this worker, because Ray needs a range of ports."""


@contextmanager
def load(made: Pool) -> Iterator[None]:
    """Send requests in threads until the end of the block.

    They are streams, complete answers, refused requests, requests for an unknown model, and requests that must wait.
    """
    stop = threading.Event()
    headers = {"authorization": f"Bearer {made.key}"}
    with httpx.Client(base_url=made.base, headers=headers, trust_env=False, verify=NO_TLS, timeout=60) as client:
        asks = [
            *[(0.05, lambda: ask(client, "scripted-1", "hello there", stream=True))] * 6,
            *[(0.05, lambda: ask(client, "scripted-1", "hello there"))] * 4,
            (0.5, lambda: ask(client, "scripted-1", "this is forbidden")),
            (0.5, lambda: ask(client, "no-such-model", "hello")),
            *[(0.5, lambda: ask(client, "macpool-tiny", HELLO, stream=True))] * 2,
        ]
        threads = [threading.Thread(target=_go_on, args=(one, rest, stop)) for rest, one in asks]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)


def _go_on(act: Callable[[], object], rest: float, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(httpx.HTTPError):
            act()
        stop.wait(rest)


def ask(client: httpx.Client, model: str, text: str, *, stream: bool = False) -> int:
    body = {"model": model, "messages": said(text), "stream": stream, "max_tokens": 40}
    return client.post("/v1/chat/completions", json=body).status_code


def clip(made: Pool, *states: str, **changes: Any) -> None:
    """Request a video, and wait until it is in one of these states."""
    headers = {"authorization": f"Bearer {made.key}"}
    with httpx.Client(base_url=made.base, headers=headers, trust_env=False, verify=NO_TLS, timeout=30) as client:
        job = client.post("/v1/videos", json={**CLIP, **changes}).json()["id"]
        until(lambda: client.get(f"/v1/videos/{job}").json()["status"] in states, 120, f"a video {states}")


def chosen(board: Board, found: Prometheus) -> dict[str, str]:
    """Return all values of every variable, as `All` does."""
    values = dict(SECONDS)
    for name, _, query in board.variables:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match, query
        known = found.api(f"label/{match[2]}/values", **{"match[]": match[1]})
        assert known, f"the variable {name} of {board.uid} has no values"
        values[name] = "|".join(known)
    return values


def evaluate(found: Prometheus, panel: Panel, query: str, values: dict[str, str]) -> tuple[int, int]:
    """Evaluate one query as its panel does; return its series, and its numeric values."""
    asked = re.sub(r"\$(\w+)", lambda match: values[match[1]], query)
    if panel.kind in (Kind.FIGURE, Kind.TABLE):
        result = found.value(asked)
        points = [one["value"][1] for one in result]
    else:
        now = time.time()
        result = found.api("query_range", query=asked, start=now - WINDOW, end=now, step=STEP)["result"]
        points = [value for one in result for _, value in one["values"]]
    return len(result), sum(math.isfinite(float(value)) for value in points)


@pytest.mark.nightly
def test_every_panel_has_data(tmp_path: Path, record_property: Callable[[str, object], None]):
    """CI has these tests of queries and values:

    - `tests/unit/dashboards/test_dashboards.py::test_panels_ask_for_metrics_and_labels_that_exist`
    - `tests/unit/coordinator/metrics/test_values.py`
    """
    needs("prometheus")
    with pool(tmp_path) as made:
        made.up("router.queue_timeout_seconds=20", "video.max_steps=1000")
        filming = words(worker__ray_ports=RAY_PORTS, engine__scripted__model="filmed", node__report_busy_seconds=0.2)
        settings = {"film": filming, "one": SMALL, "two": SMALL, "mlx": MLX, "away": SMALL}
        for name, own in settings.items():
            made.join(name, *own, wait=False)
        for name in settings:
            until(lambda name=name: made.serves(name), 60, f"{name} serves")
        made.cli("pause", "away", "1h")
        made.cli("model", "want", "macpool-tiny")
        made.cli("model", "want", "filmed", "--idle-unload", "1s")  # a scripted model refuses to be unloaded
        until_ray(made, "film")
        key = made.create_key("prometheus", "metrics")
        text = render_configuration(made.base, str(token_file(tmp_path, key)), rules="none.yml", interval_seconds=1)
        with prometheus(tmp_path / "prometheus", text.replace("interval: 15s", "interval: 1s")) as found:
            until(lambda: set(found.up().values()) == {"1"} and len(found.up()) == 6, 60, "all targets are up")
            clip(made, "completed")  # before the load takes the processors
            with load(made):
                clip(made, "in_progress", steps=1000)
                until(lambda: _seen(found), 90, "everything has happened that panels show")
                lines = [line for board in BOARDS.values() for line in _lines(board, found)]
                for name, _, query, _ in ANNOTATIONS:
                    lines.append(f"annotation {name}: {len(found.value(query))} series")
        record_property("seen", "\n".join(lines))
        assert [line for line in lines if line.endswith("NO VALUE")] == []


def _seen(found: Prometheus) -> bool:
    """Return whether the slow figures have been scraped twice: answers, queues, gaps between tokens, hits of the
    cache."""
    queries = (
        'sum(rate(macpool_router_requests_total{outcome="ok"}[20s])) > 0',
        "sum(rate(macpool_request_queue_time_seconds_count[20s])) > 0",
        "sum(rate(macpool_inter_token_latency_seconds_count[20s])) > 0",
        "sum(rate(macpool_router_node_refusals_total[20s])) > 0",
        "sum(rate(macpool_gate_transient_bytes_count[20s])) > 0",
        "sum(rate(macpool_prefix_cache_hits_total[20s])) > 0",
        "sum(rate(macpool_video_lease_confirm_seconds_count[120s])) > 0",
        "sum(rate(macpool_video_job_duration_seconds_count[120s])) > 0",
    )
    return all(found.value(query) for query in queries)


def _lines(board: Board, found: Prometheus) -> Iterator[str]:
    """Yield the numbers of series and values of each query."""
    values = chosen(board, found)
    for panel in board.list_panels():
        for query, _ in panel.queries:
            series, points = evaluate(found, panel, query, values)
            reason = EMPTY.get(panel.title)
            verdict = "" if points else f" ({reason})" if reason else f" of {query}: NO VALUE"
            yield f"{board.uid}: {panel.title}: {series} series, {points} values{verdict}"
