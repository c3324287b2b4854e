"""A node is lost during answers: its streams continue on another node word for word, without an error for any
client."""

import json
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.effort import IS_NIGHTLY
from tests.support.cluster.engine_pool import MLX, at_rest, cordoned, engine_of, link, loaded, side_by_side
from tests.support.processes import NO_TLS, Pool, Process, gone, pool, until

pytestmark = pytest.mark.slow

STREAMS = 12
TOKENS = 250 if IS_NIGHTLY else 120
"""Tokens of an answer. The nightly run has a node that sleeps for seconds during the answers."""
NODES = ("one", "two")
NOTICED = 1.0
"""Maximum silence in seconds that a client may see, apart from the time to prefill its prompt and text again."""
SUSPECTED = 3.0
"""Seconds of a node's silence after which its streams resume elsewhere."""


@pytest.fixture(scope="module")
def shared(tiny_model: Callable[..., Path]) -> Iterator[Pool]:
    """Start two nodes with the same models, loaded and warm."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        place = link(Path(folder) / "models", llama=tiny_model("llama"))
        made.up()
        for name in NODES:
            made.join(
                name,
                *MLX,
                f"models.folders={place}",
                "models.preload=llama",
                "engine.mlx.max_batch_size=32",
                wait=False,
            )
        for name in NODES:
            until(lambda name=name: "llama" in loaded(made, name), 60, f"{name} loaded")
        yield made


@pytest.fixture
def pair(shared: Pool) -> Pool:
    """Start a node again that a test before has ended."""
    for name in NODES:
        if shared.nodes[name].popen.poll() is not None:
            start_again(shared, name)
    return shared


def start_again(made: Pool, name: str) -> None:
    until(lambda: made.node(name)["state"] == "lost", what="it is missed")
    place = made.folder / "models"
    made.join(name, *MLX, f"models.folders={place}", "models.preload=llama", "engine.mlx.max_batch_size=32", wait=False)
    until(lambda: made.serves(name) and "llama" in loaded(made, name), 60, f"{name} is back")


@dataclass
class Heard:
    """One stream as its client received it: first node, text, time of each piece, and end."""

    node: str = ""
    text: str = ""
    at: list[float] = field(default_factory=list[float])
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    ids: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    last: str = ""

    def gap(self, since: float) -> float:
        """Return the longest silence in seconds that ends after this moment."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return max((after - before for before, after in pairs if after >= since), default=0.0)


@dataclass
class Chat:
    """Streams one answer after another, in a thread of its own."""

    pool: Pool
    number: int
    begun: threading.Event = field(default_factory=threading.Event)
    heard: Heard = field(default_factory=Heard)

    def body(self) -> dict[str, Any]:
        drawn = {"temperature": 0.9, "seed": self.number} if self.number % 6 == 0 else {"temperature": 0.0}
        return {
            "model": "llama",
            "max_tokens": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": f"Tell me story number {self.number}."}],
            "logit_bias": {str(end_of_text(self.pool)): -100},
            **drawn,
        }

    def run(self, enough: int = 30) -> Heard:
        heard = Heard()
        self.heard = heard
        headers = {"Authorization": f"Bearer {self.pool.key}"}
        url = f"{self.pool.facts['base_url']}/chat/completions"
        with (
            httpx.Client(trust_env=False, verify=NO_TLS, timeout=60) as client,
            client.stream("POST", url, json=self.body(), headers=headers) as answer,
        ):
            heard.node = answer.headers["x-macpool-node"]
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.take(heard, json.loads(line.removeprefix("data: ")))
                heard.last = line or heard.last
                if len(heard.at) >= enough:
                    self.begun.set()
        self.begun.set()
        return heard

    def take(self, heard: Heard, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        heard.ids.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            heard.text += choice["delta"].get("content") or ""
            heard.finish = choice["finish_reason"] or heard.finish
            heard.at.append(time.monotonic())
        heard.usage = chunk.get("usage") or heard.usage


def end_of_text(made: Pool) -> int:
    config = made.folder / "models" / "llama" / "config.json"
    return json.loads(config.read_text())["eos_token_id"]


@dataclass
class Told:
    """Results of many streams during the loss of a node."""

    heard: list[Heard]
    victim: str
    since: float
    moved: int


def told(made: Pool, go: Callable[[str], object]) -> Told:
    """Stream STREAMS answers, stop the node with most of them once all have begun, and receive all to their end."""
    chats = [Chat(made, number) for number in range(STREAMS)]
    with side_by_side(STREAMS) as start:
        running = [start(chat.run) for chat in chats]
        for chat in chats:
            assert chat.begun.wait(60)
        places = Counter(chat.heard.node for chat in chats)
        victim = places.most_common(1)[0][0]
        since = time.monotonic()
        go(victim)
        heard = [each.result() for each in running]
    return Told(heard, victim, since, places[victim])


@pytest.fixture(scope="module")
def undisturbed(shared: Pool) -> list[Heard]:
    """Return the answer of each stream without a disturbance."""
    with side_by_side(STREAMS) as start:
        return [each.result() for each in [start(Chat(shared, number).run) for number in range(STREAMS)]]


def unnoticed(pair: Pool, after: Told, undisturbed: list[Heard], rewriting: float, noticed: float = NOTICED) -> None:
    gap = max(heard.gap(after.since) for heard in after.heard)
    usual = max(heard.gap(0.0) for heard in undisturbed)
    print(
        f"{after.moved} of {STREAMS} streams moved from {after.victim}: longest gap {gap:.2f} s, "
        f"undisturbed {usual:.2f} s, writing again {rewriting:.2f} s"
    )
    for heard, whole in zip(after.heard, undisturbed, strict=True):
        assert (heard.text, heard.finish) == (whole.text, whole.finish)
        assert (heard.last, len(heard.ids)) == ("data: [DONE]", 1)
        assert heard.usage["completion_tokens"] == whole.usage["completion_tokens"] == TOKENS
        assert heard.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
    assert gap <= noticed + rewriting + usual


def rewriting(pair: Pool, count: int) -> float:
    """Return the seconds in which one node prefills `count` new prompts of about a hundred tokens."""
    url, headers = f"{pair.facts['base_url']}/chat/completions", {"Authorization": f"Bearer {pair.key}"}
    salt = time.monotonic()

    def ask(number: int) -> None:
        text = f"{number} {salt} {'story ' * 60}"
        asked = {"model": "llama", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        httpx.post(url, json=asked, headers=headers, trust_env=False, verify=NO_TLS, timeout=60).raise_for_status()

    with cordoned(pair, "one"), side_by_side(count) as start:
        begun = time.monotonic()
        for each in [start(ask, number) for number in range(count)]:
            each.result()
        return time.monotonic() - begun


def test_twelve_streams_are_complete_after_their_mac_is_killed(pair: Pool, undisturbed: list[Heard]) -> None:
    again = rewriting(pair, STREAMS)

    def kill(name: str) -> None:
        agent, engine = pair.nodes[name], engine_of(pair, name)
        engine.kill()
        agent.kill()
        gone([engine])

    after = told(pair, kill)
    assert after.moved >= STREAMS // 3
    unnoticed(pair, after, undisturbed, again)


@pytest.mark.nightly
def test_twelve_streams_are_complete_after_their_engine_is_killed(pair: Pool, undisturbed: list[Heard]) -> None:
    """CI has this test of an engine that is killed under a stream:

    - `tests/e2e/test_pool.py::test_an_engine_and_then_the_coordinator_is_killed_and_the_node_comes_back`
    """
    again = rewriting(pair, STREAMS)
    after = told(pair, lambda name: engine_of(pair, name).kill())
    unnoticed(pair, after, undisturbed, again)
    until(lambda: "llama" in loaded(pair, after.victim), 60, "loaded again")


@pytest.mark.nightly
def test_a_mac_is_removed_under_twelve_streams_and_no_client_notices(pair: Pool, undisturbed: list[Heard]) -> None:
    """CI has these tests:

    - `tests/unit/router/placement/test_recovery.py::test_goodbye_of_a_stopping_node_resumes_its_requests`
    - `tests/e2e/test_pool.py::test_a_node_is_drained_under_a_stream_and_no_client_notices`
    """
    again = rewriting(pair, STREAMS)
    left: list[Process] = []

    def stop(name: str) -> None:
        left.append(pair.nodes[name])
        pair.nodes[name].signal(signal.SIGTERM)

    after = told(pair, stop)
    assert left[0].popen.wait(15) == 0
    unnoticed(pair, after, undisturbed, again)
    until(lambda: at_rest(pair, next(name for name in NODES if name != after.victim)), what="at rest")


@pytest.mark.nightly
def test_a_mac_falls_asleep_under_twelve_streams_and_its_late_words_change_nothing(
    pair: Pool, undisturbed: list[Heard]
) -> None:
    """CI has the rule without an engine:

    - `tests/unit/router/placement/test_recovery.py::test_streams_of_a_silent_node_resume_before_it_is_lost`
    """
    again = rewriting(pair, STREAMS)
    asleep: list[Process] = []

    def sleep(name: str) -> None:
        asleep.append(pair.nodes[name])
        pair.nodes[name].signal(signal.SIGSTOP)
        until(lambda: pair.node(name)["state"] == "suspect", what="it is suspected")
        until(lambda: pair.node(name)["in_flight"] == 0, what="all have moved")
        pair.nodes[name].signal(signal.SIGCONT)

    try:
        after = told(pair, sleep)
    finally:
        asleep[0].signal(signal.SIGCONT)
    unnoticed(pair, after, undisturbed, again, SUSPECTED + NOTICED)
    until(lambda: pair.serves(after.victim) and at_rest(pair, after.victim), what="it is back, and has let go of them")
