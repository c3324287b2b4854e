"""A real node with memory for one of two models: the second model is served despite steady traffic on the first."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.effort import IS_NIGHTLY
from tests.support.cluster.engine_pool import MLX, api, at_rest, link, loaded, said
from tests.support.processes import NO_TLS, Pool, pool, until
from wire.units import MIB

pytestmark = pytest.mark.slow

WEIGHTS = 161 * MIB
ROOM = WEIGHTS + 64 * MIB + 60 * MIB
"""Bytes above an engine at rest without a model: one model, transient memory of its load, rows for ten answers."""
TOKENS = 50, 70, 110
"""Lengths of the answers of each client; they differ, because the node must never be idle."""
TURNS = 2 if IS_NIGHTLY else 1
"""Turns of the second model, after each of which the first model returns."""


@pytest.fixture(scope="module")
def narrow(tiny_model: Callable[..., Path]) -> Iterator[Pool]:
    """Start one node with two models, of which one fits.

    Requests are refused after 6 s in the queue. Streams send keep-alives every 0.2 s.
    """
    wide = tiny_model("llama", trained=False, preset="bench50m")
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        place = link(Path(folder) / "models", first=wide, second=wide)
        settings = (*MLX, f"models.folders={place}")
        made.up("router.queue_timeout_seconds=6", "router.keepalive_seconds=0.2", "router.swap_timeout_seconds=40")
        bare = made.join("narrow", *settings)
        until(lambda: made.node("narrow")["current"], what="a reading")
        current = made.node("narrow")["current"]
        assert bare.stop() == 0
        until(lambda: made.node("narrow")["state"] == "lost", what="the first is gone")
        made.join("narrow", *settings, f"memory.cap={current + ROOM}", f"memory.margin={4 * MIB}")
        yield made


class Traffic:
    """Clients that send streams to one model, each the next one as soon as the last has ended."""

    def __init__(self, made: Pool, model: str) -> None:
        self._client = api(made)
        self._model = model
        self._stop = threading.Event()
        self.whole = 0
        self.broken: list[object] = []

    def run(self, tokens: int) -> None:
        while not self._stop.is_set():
            try:
                stream: Any = self._client.chat.completions.create(
                    model=self._model, messages=said("Tell me."), stream=True, max_tokens=tokens, temperature=1.0
                )
                reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
                assert reasons[-1] in ("length", "stop")
                self.whole += 1
            except Exception as error:
                self.broken.append(error)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def steady(made: Pool, model: str) -> Iterator[Traffic]:
    traffic = Traffic(made, model)
    threads = [threading.Thread(target=traffic.run, args=(tokens,)) for tokens in TOKENS]
    for thread in threads:
        thread.start()
    try:
        until(lambda: traffic.whole >= len(TOKENS), 60, "traffic")
        yield traffic
    finally:
        traffic.stop()
        for thread in threads:
            thread.join()


@pytest.mark.nightly
def test_the_second_model_gets_its_turn_again_and_again_and_no_stream_is_cut(narrow: Pool) -> None:
    """CI has the rules of swaps without an engine:

    - `tests/sim/test_simulation.py::test_a_second_model_gets_its_turn_beside_steady_traffic`
    - `tests/unit/router/dispatch/test_dispatch_swaps.py::test_begun_answer_continues_during_a_swap`
    """
    with steady(narrow, "first") as traffic:
        for _ in range(TURNS):
            lines, request_id = streamed(narrow, "second")
            before = traffic.whole
            assert lines[-1] == "data: [DONE]"
            assert ": waiting for a model swap" in lines, lines[:5]
            steps = {
                (step["what"], step["node"])
                for step in narrow.get(f"/api/v1/requests/{request_id}")["requests"][0]["steps"]
            }
            assert ("waiting for a model swap: first -> second", "narrow") in steps
            until(lambda before=before: traffic.whole > before + len(TOKENS), 90, "the first model is back")
            assert loaded(narrow, "narrow") == {"first"}
    assert traffic.broken == []
    until(lambda: at_rest(narrow, "narrow"), what="all given back")
    assert narrow.node("narrow")["engine"]["counts"]["evictions"] >= 2 * TURNS


def streamed(made: Pool, model: str) -> tuple[list[str], str]:
    """Request a stream; return its lines and its request id. Check the reported phase while it waits."""
    body = {"model": model, "messages": said("Tell me."), "stream": True, "max_tokens": 20}
    headers = {"Authorization": f"Bearer {made.key}"}
    address = f"{made.facts['base_url']}/chat/completions"
    lines: list[str] = []
    began, shown = time.monotonic(), False
    with httpx.stream(
        "POST", address, json=body, headers=headers, trust_env=False, verify=NO_TLS, timeout=100
    ) as answer:
        assert answer.status_code == 200
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            lines += [line] if line else []
            if line == ": waiting for a model swap" and not shown:
                shown = True
                (now,) = made.get(f"/api/v1/requests/{request_id}")["under_way"]
                assert now["phase"].startswith("waiting for a model swap")
                assert now["seconds"] <= time.monotonic() - began + 1.0
                shown_to = made.run("explain", request_id, "--state", str(made.state)).stdout
                assert "waiting for a model swap" in shown_to
    return lines, request_id
