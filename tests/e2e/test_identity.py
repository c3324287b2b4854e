"""Two Macs that hold different models under one name: the pool serves one of them, and never mixes both."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import NO_TLS, Pool, pool, until

pytestmark = pytest.mark.slow


@pytest.fixture
def divided() -> Iterator[Pool]:
    """Start three nodes under one model name: one holds the model `beta`, two the model `alpha`."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        for name, identity in (("one", "beta"), ("two", "alpha"), ("three", "alpha")):
            made.join(name, f"engine.scripted.identity={identity}", "engine.scripted.step_ms=20", wait=False)
        for name in ("one", "two", "three"):
            until(lambda name=name: made.serves(name), 60, f"{name} serves")
        yield made


def ask(made: Pool, tokens: int = 4) -> str:
    """Send a request and return the node that answered."""
    body = {"model": "scripted-1", "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(
        f"{made.facts['base_url']}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {made.key}"},
        timeout=30,
        trust_env=False,
        verify=NO_TLS,
    )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-macpool-node"]


@pytest.mark.nightly
def test_a_conflict_is_shown_and_requests_go_to_one_model(divided: Pool) -> None:
    """CI has these tests:

    - `tests/unit/router/placement/test_identity.py::test_new_requests_go_to_one_model_only`
    - `tests/unit/coordinator/cli/commands/test_models.py`
    """
    assert {ask(divided) for _ in range(12)} <= {"two", "three"}
    shown = divided.run("models", "--state", str(divided.state))
    assert "scripted-1 is not the same model everywhere: alpha (served) on three, two; beta on one" in shown.stdout
    (row,) = json.loads(divided.run("models", "--state", str(divided.state), "-o", "json").stdout)["models"]
    assert (row["fingerprint"], row["conflict"]) == ("alpha", True)
    assert {node["name"]: node["fingerprint"] for node in row["nodes"]} == {
        "one": "beta",
        "two": "alpha",
        "three": "alpha",
    }


@pytest.mark.nightly
def test_a_stream_ends_where_only_the_other_model_is_left(divided: Pool) -> None:
    """CI has this test:

    - `tests/unit/router/placement/test_identity.py::test_stream_does_not_resume_with_another_version`
    """
    body = {
        "model": "scripted-1",
        "max_tokens": 400,
        "stream": True,
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"Authorization": f"Bearer {divided.key}"}
    url = f"{divided.facts['base_url']}/chat/completions"
    divided.cli("node", "remove", "--yes", "three")
    error = ""
    with (
        httpx.Client(trust_env=False, verify=NO_TLS, timeout=60) as client,
        client.stream("POST", url, json=body, headers=headers) as answer,
    ):
        assert answer.headers["x-macpool-node"] == "two"
        for count, line in enumerate(answer.iter_lines()):
            if count == 40:
                divided.nodes["two"].kill()
            if line.startswith("data: {") and "error" in (chunk := json.loads(line.removeprefix("data: "))):
                error = chunk["error"]["message"]
    assert "node two was lost (" in error
    assert "the other nodes have a different model with the name scripted-1" in error
    until(lambda: ask(divided) == "one", 30, "the other model is served once nobody else can")
