"""A real pool over HTTPS, as with `--lan`, answers the recorded requests of every client as the client needs.

`make clients` runs the clients that can be installed here, and writes the recordings again.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.agent import section, sessions
from tests.clients.catalogue import CLIENTS, OTHERS
from tests.clients.test_agent import check
from tests.effort import thin_cases
from tests.support.cluster.engine_pool import MLX
from tests.support.processes import Pool, pool

RECORDED = Path(__file__).parent / "recorded"
DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.slow
Exchange = dict[str, Any]


def exchanges() -> Iterator[Any]:
    """Yield every recorded request with a name."""
    for file in sorted(RECORDED.glob("*.json")):
        for number, one in enumerate(json.loads(file.read_text())):
            yield pytest.param(one, id=f"{file.stem}-{number}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("clients")) as made:
        made.up("router.queue_timeout_seconds=60", "http.tls=on")
        made.join("mini", *MLX)
        for name, settings in OTHERS.items():
            made.join(name, *settings)
        yield made


@pytest.fixture(scope="module")
def client(home: Pool) -> Iterator[httpx.Client]:
    with httpx.Client(verify=home.trust, trust_env=False, timeout=60) as opened:
        yield opened


def ask(made: Pool, client: httpx.Client, said: Exchange) -> httpx.Response:
    headers = said["headers"] | {"authorization": f"Bearer {made.key}"}
    content = json.dumps(said["body"]) if "body" in said else None
    url = made.base + said["path"]
    return client.request(said["method"], url, headers=headers, content=content)


def events(text: str) -> list[Any]:
    """Read server-sent events as strictly as a client: every event is JSON, except the last of OpenAI's."""
    datas = [block.partition("data: ")[2] for block in text.strip().split("\n\n") if not block.startswith(":")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def of_chat(body: Exchange, text: str) -> None:
    if not body.get("stream"):
        whole = json.loads(text)
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        assert whole["usage"]["total_tokens"] > 0
        return
    *chunks, last = events(text)
    assert last == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] in (
        "stop",
        "length",
        "tool_calls",
    )
    wants_usage = body.get("stream_options", {}).get("include_usage", False)
    assert ("usage" in chunks[-1] and chunks[-1]["usage"] is not None) == wants_usage


def of_responses(body: Exchange, text: str) -> None:
    if not body.get("stream"):
        assert json.loads(text)["status"] in ("completed", "incomplete")
        return
    datas = [json.loads(block.partition("data: ")[2]) for block in text.strip().split("\n\n")]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert (datas[0]["type"], datas[-1]["response"]["usage"]["input_tokens"] > 0) == ("response.created", True)
    assert datas[-1]["type"] in ("response.completed", "response.incomplete")


def of_messages(body: Exchange, text: str) -> None:
    if not body.get("stream"):
        assert json.loads(text)["type"] == "message"
        return
    kinds = [event["type"] for event in events(text)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def of_ollama(body: Exchange, text: str) -> None:
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def of_models(_: Exchange, text: str) -> None:
    assert [model["id"] for model in json.loads(text)["data"]] == ["macpool-tiny", "scores", "vectors"]


def of_tags(_: Exchange, text: str) -> None:
    assert [model["name"] for model in json.loads(text)["models"]] == ["macpool-tiny", "scores", "vectors"]


def of_embeddings(body: Exchange, text: str) -> None:
    rows = json.loads(text)["data"]
    assert [row["index"] for row in rows] == [0, 1]
    assert {type(row["embedding"]) for row in rows} == {str if body.get("encoding_format") == "base64" else list}


def of_rerank(body: Exchange, text: str) -> None:
    (result,) = json.loads(text)["results"]
    assert (result["index"], result["relevance_score"]) == (0, 1.0)


SHAPES = {
    "/v1/chat/completions": of_chat,
    "/v1/responses": of_responses,
    "/v1/messages": of_messages,
    "/v1/messages/count_tokens": lambda _, text: json.loads(text)["input_tokens"],
    "/v1/models": of_models,
    "/api/chat": of_ollama,
    "/api/tags": of_tags,
    "/v1/embeddings": of_embeddings,
    "/api/embed": lambda _, text: json.loads(text)["embeddings"][1],
    "/v1/rerank": of_rerank,
    "/v2/rerank": of_rerank,
    "/api/show": lambda _, text: json.loads(text)["capabilities"],
    "/": lambda _, text: None,
}


@pytest.mark.parametrize("said", thin_cases(list(exchanges()), 3, kept=2))
def test_a_client_gets_what_it_can_read(home: Pool, client: httpx.Client, said: Exchange):
    assert home.base.startswith("https://")
    answer = ask(home, client, said)
    assert answer.status_code == said["status"], answer.text
    SHAPES[said["path"].partition("?")[0]](said.get("body", {}), answer.text)


def test_every_client_is_recorded_and_in_the_manual():
    names = {client.name for client in CLIENTS}
    assert {file.stem for file in RECORDED.glob("*.json")} == names
    lines = (DOCS / "clients.md").read_text().splitlines()
    rows = {name: [line for line in lines if f'<span id="{name}">' in line] for name in names}
    assert {name for name, found in rows.items() if len(found) != 1} == set()
    for client in CLIENTS:
        state, trust = rows[client.name][0].split(" | ")[1:3]
        assert (state == "run") == bool(client.command), client.name
        assert trust == (f"`{client.trust}`" if client.trust else "the system's"), client.name


def test_no_words_and_no_keys_are_written_down():
    for file in RECORDED.glob("*.json"):
        text = file.read_text()
        assert "mp_" not in text, file.name
        assert "/tmp/" not in text, file.name
        assert "authorization" not in text.lower(), file.name


def test_an_agent_works_through_both_libraries(home: Pool):
    steps = ("edit_file", "run_tests")
    for name, (turns, events) in sessions(home, steps).items():
        check(section(name, turns, events), steps)
        assert events
