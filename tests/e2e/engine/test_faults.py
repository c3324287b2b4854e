"""Engines that crash, freeze or are orphaned: which requests fail, which are placed elsewhere, and how the engine
restarts.

Crashes are counted by model. Every test therefore has its own name for the slow model. The tests crash the engine of
`victim`. `other` stays healthy and can answer for it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.cluster.engine_pool import (
    HELLO,
    MLX,
    api,
    at_rest,
    cordoned,
    counts,
    engine_of,
    forwards_of_one,
    greets,
    leave,
    link,
    loaded,
    said,
    side_by_side,
)
from tests.support.processes import Pool, pool, until
from wire.units import MIB

pytestmark = pytest.mark.slow

SLOW = ("read", "written", "fetched", "left")
"""Names of the slow model on `victim` and `other`; only `victim` has `cursed`."""
LONG = "word " * 300
"""A prompt whose prefill takes a node a second or two, in several forwards."""
ENDLESS = "word " * 8000
Answer = tuple[str, int, str]
"""The text, the attempts, and the node that answered."""


def ask(client: OpenAI, model: str, prompt: str = HELLO, **more: Any) -> Answer:
    raw = client.chat.completions.with_raw_response.create(model=model, messages=said(prompt), **more)
    text = raw.parse().choices[0].message.content or ""
    return text, int(raw.headers["x-macpool-attempts"]), raw.headers["x-macpool-node"]


@dataclass(frozen=True)
class Ward:
    """The pool, with shortcuts for its node `victim`."""

    pool: Pool
    client: OpenAI

    def ask(self, model: str, prompt: str = HELLO, **more: Any) -> Answer:
        return ask(self.client, model, prompt, **more)

    def loaded(self) -> set[str]:
        return loaded(self.pool, "victim")

    def restarts(self) -> int:
        return self.pool.node("victim")["engine"]["restarts"]

    def kill(self) -> None:
        engine_of(self.pool, "victim").kill()

    def load(self, model: str) -> None:
        """Load a model on `victim` with a request. It must be the only node that is not cordoned."""
        assert self.ask(model, max_tokens=1)[2] == "victim"
        until(lambda: model in self.loaded() and at_rest(self.pool, "victim"), what="loaded")

    def unload(self, model: str) -> None:
        """Unload a model from `victim`, because the next engine loads all models of a crashed one."""
        self.pool.post("/api/v1/models/unload", {"model": model, "node": "victim"})

    def back(self, node: str, restarts: int, models: set[str]) -> str:
        """Wait until a node's engine serves these models after `restarts` restarts, and return the cause of the
        crash."""

        def here() -> bool:
            engine = self.pool.node(node)["engine"]
            return engine["restarts"] == restarts and self.pool.serves(node) and loaded(self.pool, node) >= models

        until(here, what=f"the engine of {node} with {models}")
        return self.pool.node(node)["engine"]["cause"]

    def forwards(self) -> int:
        """Return the forwards of `victim` since the start of its engine."""
        return counts(self.pool, "victim")["forwards"]

    def reads(self, forwards: int) -> None:
        """Wait until `victim` has begun `forwards` more forwards of prompts."""
        before = self.forwards()
        until(lambda: self.forwards() >= before + forwards, what="a prompt being read")


def join(made: Pool, name: str, *folders: Path) -> None:
    made.join(
        name, *MLX, "engine.mlx.prefill_step_size=64", f"models.folders={','.join(map(str, folders))}", wait=False
    )


@pytest.fixture(scope="module")
def ward(tiny_model: Callable[..., Path]) -> Iterator[Ward]:
    """Start two nodes."""
    known, slow = tiny_model("llama"), tiny_model("llama", trained=False, preset="bench50m")
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        top = Path(folder)
        both = link(top / "both", **dict.fromkeys(SLOW, slow))
        made.up("router.queue_timeout_seconds=20")
        join(made, "other", link(top / "a", ice=slow), both)
        join(made, "victim", link(top / "b", cursed=slow, quick=known), both)
        for name in ("other", "victim"):
            until(lambda name=name: made.serves(name), 60, f"{name} serves")
        yield Ward(made, api(made))


def crashed(error: BaseException | None) -> tuple[int, str, str]:
    assert isinstance(error, openai.InternalServerError), error
    return error.status_code, str(error.code), error.response.headers["x-macpool-attempts"]


CRASHED = (500, "engine_crashed", "1")


def elsewhere(answer: Answer) -> bool:
    """Return whether the request was placed again; `victim` may have been tried once more before its crash was
    known."""
    return answer[1] in (2, 3) and answer[2] == "other"


def kill_in_prefill(ward: Ward) -> tuple[list[BaseException], list[tuple[str, int, str]], int, set[str]]:
    """Kill `victim` while it prefills the first of three requests. Return errors, answers, and its restarts and models
    before."""
    with side_by_side(3) as start:
        with cordoned(ward.pool, "other"):
            ward.load("read")
            restarts, models = ward.restarts(), ward.loaded()
            asked = [start(ward.ask, "read", LONG, max_tokens=2) for _ in range(3)]
            ward.reads(2)
            until(lambda: ward.pool.node("victim")["waiting"] >= 2, what="others beside it")
        ward.kill()
        errors = [error for one in asked if (error := one.exception()) is not None]
        answers = [one.result() for one in asked if one.exception() is None]
    return errors, answers, restarts, models


@pytest.mark.nightly
def test_killed_in_prefill(ward: Ward) -> None:
    """The request in the crashed prefill fails for good. Requests that waited behind it are answered elsewhere.

    CI has these tests, and kills of a real engine's Mac in the first one:

    - `tests/e2e/test_resume.py::test_twelve_streams_are_complete_after_their_mac_is_killed`
    - `tests/e2e/test_pool.py::test_an_engine_and_then_the_coordinator_is_killed_and_the_node_comes_back`
    - `tests/contract/dialects/test_chat.py::test_an_engine_that_crashes_before_the_first_byte_is_a_500`
    - `tests/unit/router/dispatch/test_dispatcher.py::test_engine_crash_retries_unrelated_requests_once`
    - `tests/unit/node/engine_process/test_supervisor.py::test_only_the_request_in_the_forward_is_blamed`
    - `tests/unit/node/engine_process/test_supervisor.py::test_loaded_models_are_loaded_again_after_a_crash`
    """
    errors, answers, restarts, models = kill_in_prefill(ward)
    for _ in range(2):
        if not errors:  # the kill hit the gap between two chunks, where no call runs
            ward.back("victim", restarts + 1, models)
            errors, answers, restarts, models = kill_in_prefill(ward)
    assert [crashed(error) for error in errors] == [CRASHED]
    assert "it was in the prefill of read" in str(errors[0])
    assert [elsewhere(answer) for answer in answers] == [True, True]
    assert "SIGKILL" in ward.back("victim", restarts + 1, models)
    ward.unload("read")


@pytest.mark.nightly
def test_killed_in_decode(ward: Ward) -> None:
    """Requests in the decode continue on another node; a stream that has begun continues without an error.

    CI has these tests, the first one with the real engine:

    - `tests/e2e/test_resume.py::test_twelve_streams_are_complete_after_their_mac_is_killed`
    - `tests/e2e/test_pool.py::test_an_engine_and_then_the_coordinator_is_killed_and_the_node_comes_back`
    - `tests/unit/node/engine_process/test_supervisor.py::test_only_the_request_in_the_forward_is_blamed`
    """
    with side_by_side(2) as start:
        with cordoned(ward.pool, "other"):
            ward.load("written")
            restarts, models = ward.restarts(), ward.loaded()
            begun = ward.client.chat.completions.create(
                model="written", messages=said(HELLO), stream=True, max_tokens=90
            )
            next(begun)
            asked = [start(ward.ask, "written", f"{HELLO} {n}", max_tokens=90) for n in range(2)]
            until(lambda: ward.pool.node("victim")["running"] == 3, what="all decode")
        ward.kill()
        rest = list(begun)
        assert rest[-1].choices[0].finish_reason in ("stop", "length")
        assert [elsewhere(one.result()) for one in asked] == [True, True]
    assert "it was in the decode of written" in ward.back("victim", restarts + 1, models)
    ward.unload("written")


@pytest.mark.nightly
def test_killed_in_load(ward: Ward) -> None:
    """The request that loads the model fails. A second request for the same model is answered elsewhere.

    CI has this test of all calls of an engine:

    - `tests/unit/node/engine_process/test_supervisor.py::test_only_the_request_in_the_forward_is_blamed`
    """
    engine = engine_of(ward.pool, "victim")
    rest, restarts, models = engine.memory_info().rss, ward.restarts(), ward.loaded()
    with side_by_side(2) as start:
        with cordoned(ward.pool, "other"):
            asked = [start(ward.ask, "fetched", max_tokens=2) for _ in range(2)]
            until(lambda: engine.memory_info().rss > rest + 32 * MIB, what="weights being read")
            engine.kill()
        errors = [error for one in asked if (error := one.exception()) is not None]
        answers = [one.result() for one in asked if one.exception() is None]
    assert [crashed(error) for error in errors] == [CRASHED]
    assert [elsewhere(answer) for answer in answers] == [True]
    assert "it was in the load of fetched" in ward.back("victim", restarts + 1, models)


@pytest.mark.nightly
def test_killed_twice_by_one_model_is_kept_out(ward: Ward) -> None:
    """Only this node has `cursed`. After the second crash the model is refused at once; other models still answer.

    CI has these tests:

    - `tests/unit/node/engine_process/test_supervisor.py`
    - `tests/unit/node/engine_process/test_quarantine.py::test_a_model_that_killed_twice_is_kept_out_for_ten_minutes`
    """
    assert greets(ward.client, "quick")
    ward.load("cursed")
    restarts, models = ward.restarts(), ward.loaded()
    cause = ""
    for death in (1, 2):
        with side_by_side(1) as start:
            asked = start(ward.ask, "cursed", LONG)
            ward.reads(2)
            ward.kill()
            assert crashed(asked.exception()) == CRASHED
        cause = ward.back("victim", restarts + death, models - ({"cursed"} if death == 2 else set()))
    assert "crash 2 within 10 minutes: loading the model is blocked for 10 minutes" in cause
    began = time.monotonic()
    with pytest.raises(
        openai.InternalServerError,
        match="the engine crashed 2 times in its load, template, tokenizer or forward pass",
    ) as caught:
        ward.ask("cursed")
    assert time.monotonic() - began < 5
    assert caught.value.code == "model_load_failed"
    assert "cursed" not in ward.loaded()
    assert greets(ward.client, "quick")


@pytest.mark.nightly
def test_frozen(ward: Ward) -> None:
    """A stopped process answers no ping. After 30 s it is replaced, and its requests are answered elsewhere.

    CI has this test:

    - `tests/unit/node/engine_process/test_supervisor.py`
    """
    join(ward.pool, "icy", ward.pool.folder / "a")
    until(lambda: ward.pool.serves("icy"), 60, "icy serves")
    with side_by_side(1) as start:
        with cordoned(ward.pool, "other"):
            answer = start(ward.ask, "ice", max_tokens=100)
            until(lambda: ward.pool.node("icy")["running"] == 1, what="the decode")
            engine, since = engine_of(ward.pool, "icy"), time.monotonic()
            engine.suspend()
        text, _, node = answer.result(60)
    assert (len(text) > 50, node) == (True, "other")
    assert "the engine hung: no answer to a ping for" in ward.back("icy", 1, {"ice"})
    assert time.monotonic() - since > 25
    assert not engine.is_running()
    with cordoned(ward.pool, "other"):
        assert ward.ask("ice", max_tokens=2)[1:] == (1, "icy")
    assert ward.pool.nodes["icy"].stop() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("prompt", [ENDLESS, HELLO], ids=["prefill", "decode"])
def test_a_client_that_leaves_costs_nothing_more(ward: Ward, prompt: str) -> None:
    """CI has these tests:

    - `tests/e2e/test_pool.py::test_client_gone_is_cancelled_on_the_node`
    - `tests/contract/dialects/test_chat.py::test_a_client_that_leaves_is_cancelled_at_the_node`
    """

    def busy() -> bool:
        node = ward.pool.node("victim")
        return node["reserved"] > 0 and node["waiting" if prompt is ENDLESS else "running"] == 1

    assert greets(ward.client, "quick")
    with cordoned(ward.pool, "other"):
        ward.load("left")
        began = ward.forwards()
        leave(ward.pool, "left", prompt, lambda: until(lambda: busy() and ward.forwards() > began, what="a forward"))
        left = time.monotonic()
        until(lambda: at_rest(ward.pool, "victim"), 5, "all given back")
        assert time.monotonic() - left < 2, "longer than a chunk, a report and some noise"
    before = counts(ward.pool, "victim")
    again, last = forwards_of_one(ward.pool, ward.client, "victim", "quick")
    assert (again, last) == (before["forwards"], before["forwards"] + 2)
    steps = counts(ward.pool, "victim")["steps"] - before["steps"]
    assert steps < 60, "only those of the small answer"
