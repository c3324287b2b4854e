"""A pool whose Mac has a disk cache: prompts survive the engine and the node, in every dialect, key and model.

Prefill tokens are those that the engine has counted at its forwards (`counts.prefill_tokens`).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests import models
from tests.effort import thin_cases
from tests.support.cluster.engine_pool import MLX, at_rest, counts, engine_of, link, loaded
from tests.support.processes import NO_TLS, Pool, pool, until

pytestmark = pytest.mark.slow

FIRST, SECOND = "llama", "qwen3"
SETTINGS = ("engine.mlx.disk_cache_size=1GiB", "engine.mlx.disk_cache_min_seconds=0")
WORDS = 420
"""Words of a prompt of about 1,100 tokens: four blocks."""
TURNS = 20
REPORT_SECONDS = 0.5
"""Seconds from an event until a report shows it."""
Answer = tuple[str, int, int]
"""The text, the tokens of the prompt, and how many of them were cached."""


def build_prompt(seed: int, count: int = WORDS) -> str:
    random = Random(seed)
    return " ".join(random.choice(["cat", "word", "sun", "Mac", "seven"]) for _ in range(count))


def join(made: Pool) -> None:
    place = made.folder / "models"
    made.join("studio", *MLX, *SETTINGS, f"models.folders={place}", f"models.preload={FIRST},{SECOND}")
    until(lambda: loaded(made, "studio") == {FIRST, SECOND}, 60, "both models")


@pytest.fixture(scope="module")
def made() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as one:
        link(Path(folder) / "models", **{FIRST: models.path(FIRST), SECOND: models.path(SECOND)})
        one.up()
        join(one)
        yield one


def disk(made: Pool) -> dict[str, Any]:
    return made.node("studio")["engine"]["cache"]


def await_report(made: Pool) -> None:
    """Wait for a report from after this call, which has the counts of all earlier requests."""
    begun = time.monotonic()
    until(lambda: made.node("studio")["heard_seconds"] <= time.monotonic() - begun - REPORT_SECONDS, what="a report")


def settle(made: Pool) -> None:
    """Wait until the node is at rest and all parts are on the disk, by a report from after this call."""
    await_report(made)

    def is_written() -> bool:
        cache = disk(made)
        written = cache["disk_persisted"] > 0 and cache["disk_saves"] == cache["disk_persisted"]
        return at_rest(made, "studio") and written and not cache["disk_waiting"]

    until(is_written, 60, "all parts on the disk")


def kill_engine(made: Pool) -> None:
    engine = engine_of(made, "studio")
    engine.kill()
    engine.wait(10)
    until(lambda: made.node("studio")["engine"]["state"] != "ready", what="the end of the engine is seen")
    until(lambda: made.serves("studio") and loaded(made, "studio") == {FIRST, SECOND}, 60, "the next engine")


def kill_node(made: Pool) -> None:
    node = made.nodes["studio"]
    below = node.children()
    node.kill()
    for child in below:
        if child.is_running():
            child.kill()
    until(lambda: made.node("studio")["state"] != "ready", what="the loss of the node")
    join(made)


def chat(made: Pool, prompt: str, key: str = "", model: str = FIRST, tokens: int = 12) -> Answer:
    return post(
        made, "/v1/chat/completions", model, key, messages=[{"role": "user", "content": prompt}], max_tokens=tokens
    )


def completions(made: Pool, prompt: str) -> Answer:
    return post(made, "/v1/completions", FIRST, prompt=prompt, max_tokens=12)


def responses(made: Pool, prompt: str) -> Answer:
    return post(made, "/v1/responses", FIRST, input=prompt, max_output_tokens=12, store=False)


def messages(made: Pool, prompt: str) -> Answer:
    return post(made, "/v1/messages", FIRST, messages=[{"role": "user", "content": prompt}], max_tokens=12)


def ollama_chat(made: Pool, prompt: str) -> Answer:
    options = {"temperature": 0, "num_predict": 12}
    said = [{"role": "user", "content": prompt}]
    return post(made, "/api/chat", FIRST, messages=said, stream=False, options=options)


def ollama_generate(made: Pool, prompt: str) -> Answer:
    return post(made, "/api/generate", FIRST, prompt=prompt, stream=False, options={"num_predict": 12})


def post(made: Pool, route: str, model: str, key: str = "", **fields: Any) -> Answer:
    """Send a request with the temperature 0; return its answer."""
    drawn = {} if "options" in fields else {"temperature": 0}
    headers = {"Authorization": f"Bearer {key or made.key}"}
    body = {"model": model, **drawn, **fields}
    answer = httpx.post(made.base + route, json=body, headers=headers, trust_env=False, verify=NO_TLS, timeout=120)
    return read_answer(route, answer.raise_for_status().json())


def read_answer(route: str, body: dict[str, Any]) -> Answer:
    usage = body.get("usage", {})
    match route:
        case "/v1/chat/completions":
            text = body["choices"][0]["message"]["content"]
            return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        case "/v1/completions":
            return body["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        case "/v1/responses":
            text = body["output"][0]["content"][0]["text"]
            return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        case "/v1/messages":
            cached = usage["cache_read_input_tokens"]
            return body["content"][0]["text"], usage["input_tokens"] + cached, cached
        case _:
            text = body["message"]["content"] if "message" in body else body["response"]
            return text, body["prompt_eval_count"], body["cached_tokens"]


def count_prefill(made: Pool, ask: Callable[[], Answer]) -> tuple[Answer, int]:
    """Return the answer of a node at rest, and the prompt tokens that its engine has prefilled for it."""
    until(lambda: at_rest(made, "studio"), what="at rest")
    before = counts(made, "studio")
    answer = ask()
    until(lambda: counts(made, "studio")["steps"] >= before["steps"] + 2, what="the steps of the answer")
    until(lambda: at_rest(made, "studio"), what="at rest")
    return answer, counts(made, "studio")["prefill_tokens"] - before["prefill_tokens"]


ROUTES: tuple[Callable[[Pool, str], Answer], ...] = (
    chat,
    completions,
    responses,
    messages,
    ollama_chat,
    ollama_generate,
)


KILLS = ("engine", kill_engine, ROUTES), ("node", kill_node, ROUTES[:2])


@pytest.mark.parametrize(
    ("kill", "routes"), [pytest.param(*case[1:], id=case[0]) for case in thin_cases(KILLS, 2, kept=1)]
)
def test_after_a_kill_every_dialect_reports_the_cached_tokens_and_answers_the_same(
    made: Pool, kill: Callable[[Pool], None], routes: tuple[Callable[[Pool, str], Answer], ...]
):
    """After the end of the node, two of the dialects: the engine reads the same files again."""
    prompts = {route: build_prompt(place + 10 * (kill is kill_node)) for place, route in enumerate(routes)}
    before = {route: route(made, prompt) for route, prompt in prompts.items()}
    assert all(cached <= 64 for _, _, cached in before.values()), before
    settle(made)
    kill(made)
    until(lambda: at_rest(made, "studio"), what="at rest")
    assert counts(made, "studio")["prefill_tokens"] == 0, "another process"
    for route, prompt in prompts.items():
        (text, count, cached), prefilled = count_prefill(made, partial(route, made, prompt))
        assert (text, count) == before[route][:2], route
        assert cached >= 0.9 * count, route
        assert prefilled == count - cached, route
    now = disk(made)
    assert (now["disk_hits"], now["disk_errors"]) == (len(routes), 0)


def test_no_other_key_and_no_other_model_finds_what_was_stored(made: Pool):
    prompt = build_prompt(30)
    alice, mallory = (made.create_key(name) for name in ("alice", "mallory"))
    text, count, _ = chat(made, prompt, alice)
    settle(made)
    kill_engine(made)
    assert chat(made, prompt, mallory) == (text, count, 0)
    assert chat(made, prompt, alice, SECOND)[2] == 0
    again, _, cached = chat(made, prompt, alice)
    assert (again, cached >= 0.9 * count) == (text, True)


@pytest.mark.nightly
def test_each_turn_of_a_conversation_prefills_only_the_new_turn(made: Pool):
    """CI has these tests:

    - `tests/unit/node/engine/scheduling/test_prefix_cache.py`
    - `tests/unit/node/engine/scheduling/disk/test_disk_tier.py`
    """
    said: list[dict[str, str]] = []
    whole = 0
    await_report(made)
    for turn in range(TURNS):
        said.append({"role": "user", "content": build_prompt(100 + turn, 30)})
        if turn == TURNS // 2:
            settle(made)
            kill_engine(made)
        ask = partial(post, made, "/v1/chat/completions", FIRST, messages=said, max_tokens=12)
        (text, count, cached), prefilled = count_prefill(made, ask)
        said.append({"role": "assistant", "content": text})
        new = count - whole
        allowed = new + (256 if turn == TURNS // 2 else 0)
        assert prefilled == count - cached
        assert prefilled <= allowed, f"turn {turn}: {count} tokens, {cached} cached, {new} new"
        whole = count


def test_the_commands_show_and_clear_the_cache(made: Pool):
    chat(made, build_prompt(40))
    chat(made, build_prompt(41), model=SECOND)
    settle(made)

    def list_models() -> dict[str, dict[str, Any]]:
        (node,) = made.cli("cache", "status")["nodes"]
        models = node["cache"]["models"]
        return {entry["model"]: entry for entry in models if entry["nbytes"] or entry["disk_bytes"]}

    shown = list_models()
    assert set(shown) == {FIRST, SECOND}
    assert all(entry["nbytes"] and entry["disk_files"] and entry["disk_bytes"] for entry in shown.values())
    table = made.run("cache", "status", "--model", FIRST, "--state", str(made.state)).stdout
    assert FIRST in table
    assert SECOND not in table
    assert "may be written now" in table
    refused = made.cli("cache", "clear", "--model", FIRST, code=2)
    assert "add --yes" in refused["stderr"]
    assert set(list_models()) == {FIRST, SECOND}
    assert [one["name"] for one in made.cli("cache", "clear", "--model", FIRST, "--yes")["nodes"]] == ["studio"]
    until(lambda: set(list_models()) == {SECOND}, what="the report without the first model")
    assert chat(made, build_prompt(40))[2] <= 64
    made.cli("cache", "clear", "--node", "studio", "--yes")
    until(lambda: not list_models(), what="the report of an empty cache")
    folder = made.folder / "studio"
    assert not [path for suffix in "tws" for path in folder.rglob(f"*.{suffix}")]
