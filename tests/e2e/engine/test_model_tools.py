"""Tools of a model's owner on real nodes: a model is quantized, found at once, and answers; speeds are measured."""

import json
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import HELLO, MLX, api, greets, link, loaded, said, spoiled
from tests.support.processes import Pool, pool, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


ANSWER_TOKENS, CONTEXT = 300, 1024


def shorten_context(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))


@pytest.fixture(scope="module")
def one() -> Iterator[Pool]:
    """Start a node with the model `tiny`, and the same model as `short` with a context for the shorter prompts."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        spoiled(link(Path(folder) / "models", tiny=EMBEDDED), "short", shorten_context)
        made.up()
        made.join("studio", *MLX, f"models.folders={made.folder / 'models'}")
        until(lambda: made.node("studio").get("models"), 60, "the model is listed")
        yield made


def list_names(made: Pool) -> set[str]:
    return {model["name"] for model in made.get("/api/v1/models")["models"]}


@pytest.mark.nightly
def test_a_model_is_quantized_and_answers(one: Pool):
    """CI has these tests:

    - `tests/contract/hub/test_quantize.py::test_a_model_is_quantized_under_a_lease_and_found`
    - `tests/contract/hub/test_quantize.py::test_the_weights_are_those_of_mlx_lms_converter`
    """
    done = one.cli("model", "quantize", "tiny", "--bits", "8")["quantization"]
    assert (done["state"], done["name"], done["node"]["name"]) == ("completed", "tiny-8bit", "studio")
    assert done["peak"] > 0
    assert (one.folder / "models" / "tiny-8bit" / "config.json").exists()
    until(lambda: "tiny-8bit" in list_names(one), 20, "the result is in the catalogue")
    assert greets(api(one), "tiny-8bit")


def test_a_load_or_unload_is_visible_at_its_answer(one: Pool):
    """A client that reads the state after the answer sees the change, without a wait for the next report."""
    for _ in range(4):
        for command, expected in (("load", True), ("unload", False)):
            one.post(f"/api/v1/models/{command}", {"model": "short", "node": "studio"})
            assert ("short" in loaded(one, "studio")) is expected, command


def run(made: Pool, *words: str) -> tuple[int, str]:
    """Run a command as an administrator. Return its exit code and its errors."""
    done = made.run(*words, "--state", str(made.state))
    return done.returncode, done.stderr


def test_refusals_are_one_sentence(one: Pool):
    text = "Error: studio: this node has a model tiny: give another name, or remove that model\n"
    assert run(one, "model", "quantize", "tiny", "--name", "tiny") == (6, text)
    code, text = run(one, "model", "quantize", "huge")
    assert (code, "no linked node has the model huge" in text) == (5, True)
    for what in (("short",), ("--show",)):
        code, text = run(one, "model", "bench", *what, "--node", "studio", "--node", "stuido")
        assert (code, "stuido" in text, text.count("\n")) == (5, True, 1), text
    assert one.cli("model", "quantizations")["quantizations"][0]["state"] == "failed"


def test_a_busy_node_is_measured_only_with_force(one: Pool):
    ended = threading.Event()
    eos = json.loads((EMBEDDED / "config.json").read_text())["eos_token_id"]

    def keep_busy(client: OpenAI) -> list[int]:
        lengths = list[int]()
        while not ended.is_set():
            answer = client.chat.completions.create(
                model="short", messages=said(HELLO), max_tokens=ANSWER_TOKENS, logit_bias={str(eos): -100}
            )
            assert answer.usage is not None
            lengths.append(answer.usage.completion_tokens)
        return lengths

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(keep_busy, api(one)) for _ in range(2)]
        try:
            until(lambda: one.node("studio")["in_flight"], 20, "requests are in progress")
            code, text = run(one, "model", "bench", "short")
            assert (
                code,
                re.search(r"studio is busy with \d requests?: try later", text) is not None,
            ) == (6, True)
            (forced,) = one.cli("model", "bench", "short", "--force")["benchmarks"]
        finally:
            ended.set()
    assert [run["skipped"] for run in forced["runs"]] == [
        *[""] * 2,
        *[f"the context of the model is {CONTEXT} tokens"] * 2,
    ]
    for client in clients:
        assert set(client.result()) == {ANSWER_TOKENS}, "the requests beside the measurement were answered"


@pytest.mark.nightly
def test_the_speeds_of_a_model_are_measured_and_kept(one: Pool):
    """CI has the measurement of a busy node above, and these tests:

    - `tests/unit/coordinator/model_tools/test_benchmark.py`
    """
    until(lambda: not one.node("studio")["in_flight"], what="at rest after another test")
    (done,) = one.cli("model", "bench", "tiny")["benchmarks"]
    assert [(run["prompt_tokens"], run["parallel"]) for run in done["runs"]] == [
        (512, 1),
        (512, 4),
        (2048, 1),
        (2048, 4),
    ]
    assert all(run["prefill_speed"] > 0 and not run["skipped"] for run in done["runs"])
    assert any(run["decode_speed"] > 0 for run in done["runs"])
    assert done["max_prompt"] > 2048
    assert one.cli("model", "bench", "--show", "tiny")["benchmarks"] == [done]
    (model,) = [model for model in one.get("/api/v1/models")["models"] if model["name"] == "tiny"]
    shown = {name: value for name, value in done.items() if name != "node"}
    assert model["nodes"][0]["benchmark"] == shown
    wide = one.run("models", "-o", "wide", "--state", str(one.state)).stdout
    assert "bench of 20" in wide
    assert max(map(len, one.run("model", "bench", "--show", "--state", str(one.state)).stdout.splitlines())) <= 80
