"""Two API keys on one Mac with a real engine: rows are shared between them, cached prompts are not."""

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import models
from tests.support.cluster.engine_pool import MLX, link, loaded
from tests.support.processes import NO_TLS, Pool, pool, until

pytestmark = pytest.mark.slow

ROWS, LONG = 4, 400
MODEL = "llama"
EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
SYSTEM = "You are the assistant of a physician. Answer shortly, and never mention the names of patients. " * 2
SECRET = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "My patient suffers from asthma."}]


@pytest.fixture(scope="module")
def one() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        place = link(Path(folder) / "models", **{MODEL: models.path("llama")})
        shared = Path(folder) / "system.txt"
        shared.write_text("You are the clerk of the whole family, patient, friendly, and always short. " * 2)
        made.up(f"cache.shared_prompts={shared}")
        made.join(
            "studio", *MLX, f"models.folders={place}", f"models.preload={MODEL}", f"engine.mlx.max_batch_size={ROWS}"
        )
        until(lambda: MODEL in loaded(made, "studio"), 60, "the model")
        yield made


def client(made: Pool, name: str) -> httpx.Client:
    key = made.create_key(name)
    return httpx.Client(
        base_url=made.base, headers={"Authorization": f"Bearer {key}"}, trust_env=False, verify=NO_TLS, timeout=120
    )


def cached(asking: httpx.Client, messages: list[dict[str, str]]) -> int:
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    answer = asking.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.nightly
def test_cached_tokens_do_not_reveal_prompts_of_other_keys(one: Pool) -> None:
    """CI has these tests:

    - `tests/abuse/http/test_cache_oracle.py::test_cached_tokens_reveal_no_prompt_of_another_key`
    - `tests/e2e/engine/test_disk_cache.py::test_no_other_key_and_no_other_model_finds_what_was_stored`
    """
    with client(one, "alice") as alice, client(one, "mallory") as mallory:
        assert cached(alice, SECRET) == 0
        assert cached(mallory, SECRET) == 0
        assert cached(alice, SECRET) > 20


@pytest.mark.nightly
def test_a_system_prompt_that_is_named_is_shared(one: Pool) -> None:
    """CI has this test:

    - `tests/abuse/http/test_cache_oracle.py::test_of_a_shared_system_prompt_nothing_behind_it_is_shared`
    """
    system = "You are the clerk of the whole family, patient, friendly, and always short. " * 2
    with client(one, "bob") as bob, client(one, "carol") as carol:
        questions: list[Any] = [
            [{"role": "system", "content": system}, {"role": "user", "content": text}] for text in ("Hello!", "Bye!")
        ]
        assert cached(bob, questions[0]) == 0
        first = cached(carol, questions[1])
        assert first > 20
        assert cached(carol, questions[0]) >= first


def first_token(asking: httpx.Client) -> float:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "stream": True}
    began = time.monotonic()
    with asking.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.monotonic() - began
    raise AssertionError("no token")


@pytest.mark.nightly
def test_four_tokens_of_another_key_come_beside_one_that_has_all_rows(one: Pool) -> None:
    """CI has this test:

    - `tests/abuse/http/test_key_fairness.py::test_short_request_of_another_key_is_served_promptly`
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": LONG,
        "logit_bias": {str(EOS): -100},
    }
    with client(one, "greedy") as greedy, client(one, "other") as other, ThreadPoolExecutor(2 * ROWS) as threads:
        quiet = min(first_token(other) for _ in range(3))
        long = [threads.submit(greedy.post, "/v1/chat/completions", json=body) for _ in range(2 * ROWS)]
        until(lambda: one.node("studio")["running"] >= ROWS, 30, "all rows")
        beside = min(first_token(other) for _ in range(3))
        assert not any(answer.done() for answer in long), "they still run"
        print(f"first token: quiet {quiet * 1000:.0f} ms, beside {beside * 1000:.0f} ms")
        assert beside < max(2 * quiet, 0.5)
        for answer in long:
            usage = answer.result().raise_for_status().json()["usage"]
            assert usage["completion_tokens"] == LONG, "what was preempted is answered to its end"
